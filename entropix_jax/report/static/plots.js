// The plots: metrics along the text, the plane of entropy and varentropy, and attention.

import { byId, onceAFrame, themeColours } from "./dom.js";
import { number, quotedToken } from "./format.js";
import { axisOf, drawnRegions, labelledBefore, tickText } from "./quadrants.js";
import { REGIMES, REGIME_COLOURS, regimeTitle } from "./regimes.js";
import { knobsOf, percentileText } from "./whatif.js";

const SERIES = [["entropy", "bits"], ["varentropy", "bits²"], ["agreement", "0–1"], ["temperature", ""]];

// plotly.js comes compressed: its text becomes a script, which the page's policy knows by its hash.
export function startPlotly(bytes) {
  window.PlotlyConfig = { MathJaxConfig: "local" };
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(bytes);
  document.head.append(script);
}

function theme() {
  const colours = themeColours(["text", "muted", "panel", "line", "grid", "series", ...REGIME_COLOURS]);
  return { colour: (name) => colours[name], narrow: window.innerWidth < 600 };
}

// Buttons are listed one by one: one of plotly's defaults uploads the plot.
function config(...buttons) {
  return { displaylogo: false, responsive: true, modeBarButtons: [["zoom2d", "pan2d", ...buttons, "resetScale2d"]] };
}

function layout({ colour, narrow }, texts, more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("text") },
    dragmode: narrow ? false : "zoom", // a finger scrolls the page
    showlegend: false,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
    uirevision: texts.side.row, // keeps the zoom while the same text is shown
    ...more,
  };
}

function axis({ colour }, title, more = {}) {
  return { title: { text: title, standoff: 8 }, gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"), zeroline: false, ...more };
}

// Plotly reads a subset of HTML in labels.
function escapeMarkup(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

const hoverText = (token) => escapeMarkup(`${token.position} ${quotedToken(token)}`);

// Metrics along the text: a row of the plot for each.

export function showSeries(texts) {
  const box = byId("series");
  const start = () => texts.side.items[0].position;

  function shapes(look) {
    const at = start() + texts.place;
    return [{ type: "line", xref: "x", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: look.colour("text"), width: 1.5, dash: "dot" } }];
  }

  function draw() {
    const look = theme();
    const { tokens } = texts.side;
    const traces = SERIES.map(([name], i) => ({
      type: "scatter", mode: i === 0 ? "lines+markers" : "lines", name,
      x: tokens.map((_, place) => start() + place), y: tokens.map((token) => token[name]), yaxis: i ? `y${i + 1}` : "y",
      line: { color: look.colour("series"), width: 1 },
      marker: { size: 4, color: tokens.map((token) => look.colour(texts.regimeOf(token))) },
      text: tokens.map(hoverText), hovertemplate: i ? "%{y:.4g}<extra>%{fullData.name}</extra>" : "%{text} %{y:.4g}<extra>%{fullData.name}</extra>",
    }));
    const height = 1 / SERIES.length;
    const axes = SERIES.map(([, unit], i) => [`yaxis${i ? i + 1 : ""}`, axis(look, unit, { domain: [1 - (i + 1) * height, 1 - (i + 0.22) * height], rangemode: "tozero", nticks: 4, fixedrange: true })]);
    const names = SERIES.map(([name], i) => ({ text: name, showarrow: false, xref: "paper", yref: "paper", x: 0, xanchor: "left", y: 1 - (i + 0.22) * height, yanchor: "bottom" }));
    Plotly.react(box, traces, layout(look, texts, {
      margin: { l: 52, r: 12, t: 20, b: 40 },
      height: 500,
      hovermode: "x unified",
      hoversubplots: "axis",
      xaxis: axis(look, "position", { anchor: `y${SERIES.length}` }),
      annotations: names,
      shapes: shapes(look),
      ...Object.fromEntries(axes),
    }), config());
  }

  draw();
  box.on("plotly_hover", ({ points }) => texts.select(points[0].x - start(), { scroll: true }));
  box.on("plotly_click", ({ points }) => texts.select(points[0].x - start(), { scroll: true, pin: true }));
  texts.on("sides bounds theme", onceAFrame(draw));
  texts.on("token", onceAFrame(() => Plotly.relayout(box, { shapes: shapes(theme()) })));
}

// The plane of entropy and varentropy. Points are grouped by regime.

export function showPlane(texts) {
  const box = byId("plane");
  let [groups, axes] = [[], null];

  function groupsOf(look) {
    const { side } = texts;
    const regimes = Object.entries(REGIMES).map(([regime, { symbol }]) => ({
      name: regimeTitle(regime), tokens: side.tokens.filter((token) => texts.regimeOf(token) === regime), visible: !texts.hidden.has(regime),
      marker: { symbol, size: 7, color: look.colour(regime), opacity: 0.75 },
    }));
    const retracted = side.items.filter((token) => token.type === "retracted");
    return [...regimes, { name: "retracted", tokens: retracted, marker: { symbol: "circle-open", size: 10, color: look.colour("muted"), line: { width: 1.5 } } }];
  }

  const pointsOf = (tokens) => ({
    x: tokens.map((token) => axes.x.at(token.entropy)), y: tokens.map((token) => axes.y.at(token.varentropy)),
    customdata: tokens.map((token) => [token.entropy, token.varentropy]),
  });
  const cursor = () => pointsOf([texts.side.token]);

  function draw() {
    const look = theme();
    groups = groupsOf(look);
    const lines = linesOf(texts);
    axes = axesOf(texts, lines);
    const dots = groups.map(({ name, tokens, marker, visible: seen = true }) => ({
      type: "scatter", mode: "markers", name, marker, visible: seen, ...pointsOf(tokens),
      text: tokens.map(hoverText), hovertemplate: "%{text}<br>entropy %{customdata[0]:.3f}, varentropy %{customdata[1]:.3f}<extra>%{fullData.name}</extra>",
    }));
    const ring = {
      type: "scatter", mode: "markers", ...cursor(), hoverinfo: "skip", showlegend: false,
      marker: { symbol: "circle", size: 17, color: "rgba(0,0,0,0)", line: { width: 3, color: look.colour("text") } },
    };
    const room = { x: box.clientWidth - 104, y: look.narrow ? 270 : 360 };
    Plotly.react(box, [...dots, ring], layout(look, texts, {
      margin: { l: 60, r: 44, t: 48, b: 46 },
      height: look.narrow ? 364 : 454,
      hovermode: "closest",
      legend: { orientation: "h", x: 0, y: 1.07, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: planeAxis(look, "entropy, bits", axes.x),
      yaxis: planeAxis(look, "varentropy, bits²", axes.y),
      shapes: [...drawnRegions(texts.bounds, axes).map((one) => regionShape(one, look, axes, room)), ...lines.map((one) => lineShape(one, look, axes))],
      annotations: lines.map((one) => lineLabel(one, labelledBefore(one, lines, axes), look, axes)),
    }), config("select2d", "lasso2d"));
  }

  draw();
  const tokenOf = (point) => groups[point.curveNumber]?.tokens[point.pointIndex];
  const select = ({ points: [point] }, pin) => tokenOf(point) && texts.selectToken(tokenOf(point), { pin, scroll: true });
  box.on("plotly_hover", (event) => select(event, undefined));
  box.on("plotly_click", (event) => select(event, true));
  box.on("plotly_selected", (event) => texts.mark(event ? event.points.map(tokenOf).filter(Boolean) : null));
  box.on("plotly_deselect", () => texts.mark(null));
  texts.on("sides bounds hidden theme", onceAFrame(draw));
  texts.on("token", onceAFrame(() => {
    const points = Object.fromEntries(Object.entries(cursor()).map(([name, values]) => [name, [values]]));
    Plotly.restyle(box, points, [groups.length]);
  }));
}

const PLANE = { entropy: "x", varentropy: "y" };

// The thresholds that are lines of the plane, at their current values.
function linesOf(texts) {
  return knobsOf(texts.facts).filter(({ quantity }) => PLANE[quantity]).map((knob) => ({ ...knob, axis: PLANE[knob.quantity], now: texts.values[knob.key] ?? knob.value }));
}

function axesOf({ facts, side }, lines) {
  return Object.fromEntries(Object.entries(PLANE).map(([quantity, axis]) => [axis, axisOf(
    facts.calibration?.quantiles[quantity],
    side.items.map((token) => token[quantity]),
    lines.filter((line) => line.axis === axis).map(({ now }) => now),
  )]));
}

function planeAxis(look, title, { end, ticks }) {
  const places = { showgrid: false, tickvals: ticks.map(([place]) => place), ticktext: ticks.map(([, value]) => tickText(value)) };
  return axis(look, title, { range: [-0.015 * end, 1.015 * end], ...places });
}

function regionShape({ regime, x, y, side, labelled }, look, axes, room) {
  const { name, acronym } = REGIMES[regime];
  const width = ((x[1] - x[0]) / axes.x.end) * room.x;
  const fits = labelled && width > 70 && ((y[1] - y[0]) / axes.y.end) * room.y > 24;
  const [row, column] = [["middle", "top", "bottom"].at(side.y), ["center", "right", "left"].at(side.x)];
  const widened = (range, { end }) => range.map((edge) => (edge === 0 ? -0.015 * end : edge === end ? 1.015 * end : edge));
  const [[x0, x1], [y0, y1]] = [widened(x, axes.x), widened(y, axes.y)];
  return {
    type: "rect", layer: "below", x0, x1, y0, y1, fillcolor: look.colour(`${regime}-fill`), line: { width: 0 },
    label: { text: fits ? `<b>${name}</b>${width > 130 ? ` <span style="font-size:10px">${acronym}</span>` : ""}` : "", textposition: `${row} ${column}`, padding: 6, font: { color: look.colour(`${regime}-text`), size: look.narrow ? 11 : 13 } },
  };
}

function lineShape({ axis: name, now }, look, axes) {
  const at = axes[name].at(now);
  const ends = name === "x" ? { x0: at, x1: at, yref: "paper", y0: 0, y1: 1 } : { y0: at, y1: at, xref: "paper", x0: 0, x1: 1 };
  return { type: "line", layer: "below", ...ends, line: { color: look.colour("muted"), width: 1.5, dash: "dash" } };
}

// A threshold's name and percentile.
function lineLabel(line, before, look, axes) {
  const { axis: name, now } = line;
  const at = axes[name].at(now);
  const parts = [`<b>${line.name ?? number(now)}</b>`, percentileText(line, now)].filter(Boolean);
  const place = name === "x"
    ? { x: at, xanchor: before ? "right" : "left", yref: "paper", y: 1, yanchor: "bottom", text: parts.join(" ") }
    : { xref: "paper", x: 1, xanchor: "left", y: at, yanchor: before ? "top" : "bottom", text: parts.join("<br>"), align: "left" };
  return { ...place, showarrow: false, font: { color: look.colour("text"), size: 12 } };
}

// Attention entropy of each layer and head along the text.

export function showHeatMap(texts) {
  const box = byId("heat");
  byId("attention").hidden = !texts.sides.some(({ tokens }) => tokens.some((token) => token.layers));
  const draw = () => {
    const tokens = texts.side.tokens.filter((token) => token.layers);
    if (tokens.length === 0) return;
    const look = theme();
    const heads = tokens[0].layers.map((layer) => layer.length);
    const labels = heads.flatMap((count, layer) => Array.from({ length: count }, (_, head) => `layer ${layer}, head ${head}`));
    const flat = tokens.map((token) => token.layers.flat());
    const starts = heads.map((_, layer) => heads.slice(0, layer).reduce((sum, count) => sum + count, 0));
    Plotly.react(box, [{
      type: "heatmap",
      x: tokens.map((token) => token.position),
      z: labels.map((_, i) => flat.map((values) => values[i])),
      text: labels.map((label) => tokens.map(() => label)),
      hovertemplate: "%{text}<br>position %{x}: %{z:.3f} bits<extra></extra>",
      colorscale: "Cividis", // safe for the colour-blind
      zmin: 0,
      colorbar: { title: { text: "bits" }, thickness: 12, len: 1 },
    }], layout(look, texts, {
      margin: { l: 62, r: 8, t: 28, b: 44 },
      height: Math.max(320, Math.min(900, 60 + 3 * labels.length)),
      xaxis: axis(look, "position"),
      yaxis: axis(look, "", { tickvals: starts.map((start, i) => start + (heads[i] - 1) / 2), ticktext: heads.map((_, layer) => `layer ${layer}`), autorange: "reversed" }),
      shapes: starts.slice(1).map((start) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: start - 0.5, y1: start - 0.5, line: { color: look.colour("panel"), width: 2 } })),
    }), config());
  };
  // The largest plot: drawn when someone scrolls near it.
  const watcher = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    watcher.disconnect();
    draw();
    box.on?.("plotly_click", ({ points }) => texts.select(points[0].x - texts.side.items[0].position, { scroll: true, pin: true }));
    texts.on("sides theme", onceAFrame(draw));
  }, { rootMargin: "600px" });
  watcher.observe(box);
}
