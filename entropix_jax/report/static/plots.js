// The plots: metrics along the text, the plane of entropy and varentropy, and attention.

import { byId, onceAFrame, themeColours } from "./dom.js";
import { number, quotedToken } from "./format.js";
import { axisOf, drawnRegions, labelledBefore, tickText } from "./quadrants.js";
import { REGIMES, REGIME_COLOURS, regimeTitle } from "./regimes.js";
import { knobsOf, percentileText } from "./whatif.js";

const SERIES = [["entropy", "bits"], ["varentropy", "bits²"], ["agreement", "0–1"], ["temperature", ""]];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "diamond", "square", "cross", "x", "triangle-up", "star", "hexagon"];

// plotly.js comes compressed: its text becomes a script, which the page's policy knows by its hash.
export function startPlotly(bytes) {
  window.PlotlyConfig = { MathJaxConfig: "local" };
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(bytes);
  document.head.append(script);
}

function theme() {
  const colours = themeColours(["text", "muted", "panel", "line", "grid", ...REGIME_COLOURS, ...SYMBOLS.map((_, i) => `side-${i}`)]);
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
    showlegend: !texts.single,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
    uirevision: texts.shown.map((side) => side.name).join(), // keeps the zoom while the same texts are shown
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
const titleOf = (side) => escapeMarkup(`${side.name} ${side.facts.sampler}`);
const colourOf = (side, look) => look.colour(`side-${side.number % 8}`);

// Metrics along the text: a row of the plot for each, a line for each text.

export function showSeries(texts) {
  const box = byId("series");
  const start = () => texts.shown.find((side) => side.items.length)?.items[0].position ?? 0;

  function shapes(look) {
    const found = [];
    if (texts.place !== null) found.push({ type: "line", xref: "x", x0: start() + texts.place, x1: start() + texts.place, yref: "paper", y0: 0, y1: 1, line: { color: look.colour("text"), width: 1.5, dash: "dot" } });
    // What all texts have in common.
    if (texts.shown.length > 1 && texts.common > 0) found.push({ type: "rect", layer: "below", xref: "x", x0: start(), x1: start() + texts.common - 0.5, yref: "paper", y0: 0, y1: 1, fillcolor: look.colour("grid"), opacity: 0.6, line: { width: 0 } });
    return found;
  }

  function draw() {
    const look = theme();
    const traces = SERIES.flatMap(([name], i) => texts.shown.map((side) => ({
      type: "scatter", mode: texts.single && i === 0 ? "lines+markers" : "lines",
      name: texts.single ? name : titleOf(side), showlegend: i === 0,
      x: side.tokens.map((_, place) => start() + place), y: side.tokens.map((token) => token[name]), yaxis: i ? `y${i + 1}` : "y",
      line: { color: colourOf(side, look), width: texts.single ? 1 : 1.5, dash: DASHES[side.number % DASHES.length] },
      marker: { size: 4, color: side.tokens.map((token) => look.colour(texts.regimeOf(token))) },
      text: side.tokens.map(hoverText), hovertemplate: i ? "%{y:.4g}<extra>%{fullData.name}</extra>" : "%{text} %{y:.4g}<extra>%{fullData.name}</extra>",
    })));
    const height = 1 / SERIES.length;
    const axes = SERIES.map(([, unit], i) => [`yaxis${i ? i + 1 : ""}`, axis(look, unit, { domain: [1 - (i + 1) * height, 1 - (i + 0.22) * height], rangemode: "tozero", nticks: 4, fixedrange: true })]);
    const names = SERIES.map(([name], i) => ({ text: name, showarrow: false, xref: "paper", yref: "paper", x: 0, xanchor: "left", y: 1 - (i + 0.22) * height, yanchor: "bottom" }));
    Plotly.react(box, traces, layout(look, texts, {
      margin: { l: 52, r: 12, t: texts.single ? 20 : 46, b: 40 },
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

// The plane of entropy and varentropy. Points are grouped by regime, or by text on the page that compares texts.

export function showPlane(texts) {
  const box = byId("plane");
  let [groups, axes] = [[], null];

  function groupsOf(look) {
    if (!texts.single) return texts.shown.map((side) => ({
      side, name: titleOf(side), tokens: side.tokens.filter((token) => !texts.hidden.has(token.regime)),
      marker: { symbol: SYMBOLS[side.number % SYMBOLS.length], size: 7, color: colourOf(side, look), opacity: 0.65 },
    }));
    const [side] = texts.shown;
    const regimes = Object.entries(REGIMES).map(([regime, { symbol }]) => ({
      side, name: regimeTitle(regime), tokens: side.tokens.filter((token) => texts.regimeOf(token) === regime), visible: !texts.hidden.has(regime),
      marker: { symbol, size: 7, color: look.colour(regime), opacity: 0.75 },
    }));
    const retracted = side.items.filter((token) => token.type === "retracted");
    return [...regimes, { side, name: "retracted", tokens: retracted, marker: { symbol: "circle-open", size: 10, color: look.colour("muted"), line: { width: 1.5 } } }];
  }

  const pointsOf = (tokens) => ({
    x: tokens.map((token) => axes.x.at(token.entropy)), y: tokens.map((token) => axes.y.at(token.varentropy)),
    customdata: tokens.map((token) => [token.entropy, token.varentropy]),
  });
  const cursors = () => texts.shown.map(({ token }) => pointsOf(token ? [token] : []));

  function draw() {
    const look = theme();
    groups = groupsOf(look);
    const lines = linesOf(texts);
    axes = axesOf(texts.shown, lines);
    const dots = groups.map(({ name, tokens, marker, visible: seen = true }) => ({
      type: "scatter", mode: "markers", name, marker, visible: seen, ...pointsOf(tokens),
      text: tokens.map(hoverText), hovertemplate: "%{text}<br>entropy %{customdata[0]:.3f}, varentropy %{customdata[1]:.3f}<extra>%{fullData.name}</extra>",
    }));
    const rings = cursors().map((point, i) => ({
      type: "scatter", mode: "markers", ...point, hoverinfo: "skip", showlegend: false,
      marker: { symbol: SYMBOLS[texts.shown[i].number % SYMBOLS.length], size: 17, color: "rgba(0,0,0,0)", line: { width: 3, color: look.colour("text") } },
    }));
    const alike = texts.shown.every((side) => JSON.stringify(side.bounds) === JSON.stringify(texts.shown[0].bounds));
    if (byId("plane-note")) byId("plane-note").textContent = alike ? "" : `The regions are those of ${texts.shown[0].name}. The other texts have different ones.`;
    const room = { x: box.clientWidth - 104, y: look.narrow ? 270 : 360 };
    Plotly.react(box, [...dots, ...rings], layout(look, texts, {
      margin: { l: 60, r: 44, t: texts.single ? 48 : 70, b: 46 },
      height: look.narrow ? 364 : 454,
      hovermode: "closest",
      legend: { orientation: "h", x: 0, y: 1.07, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: planeAxis(look, "entropy, bits", axes.x),
      yaxis: planeAxis(look, "varentropy, bits²", axes.y),
      shapes: [...drawnRegions(texts.bounds, axes).map((one) => regionShape(one, look, axes, room)), ...lines.map((one) => lineShape(one, look, axes))],
      annotations: lines.map((one) => lineLabel(one, labelledBefore(one, lines, axes), look, axes)),
    }), texts.single ? config("select2d", "lasso2d") : config());
  }

  draw();
  const tokenOf = (point) => groups[point.curveNumber]?.tokens[point.pointIndex];
  const select = ({ points: [point] }, pin) => tokenOf(point) && texts.selectToken(groups[point.curveNumber].side, tokenOf(point), { pin, scroll: true });
  box.on("plotly_hover", (event) => select(event, undefined));
  box.on("plotly_click", (event) => select(event, true));
  box.on("plotly_selected", (event) => texts.mark(event ? event.points.map(tokenOf).filter(Boolean) : null));
  box.on("plotly_deselect", () => texts.mark(null));
  texts.on("sides bounds hidden theme", onceAFrame(draw));
  texts.on("token", onceAFrame(() => {
    const found = cursors();
    const points = Object.fromEntries(["x", "y", "customdata"].map((name) => [name, found.map((point) => point[name])]));
    if (box.data.length === groups.length + found.length) Plotly.restyle(box, points, found.map((_, i) => groups.length + i));
  }));
}

const PLANE = { entropy: "x", varentropy: "y" };

// The thresholds that are lines of the plane, at their current values.
function linesOf(texts) {
  const { facts } = texts.shown[0];
  const values = texts.single ? texts.values : {};
  return knobsOf(facts).filter(({ quantity }) => PLANE[quantity]).map((knob) => ({ ...knob, axis: PLANE[knob.quantity], now: values[knob.key] ?? knob.value }));
}

function axesOf(sides, lines) {
  const tokens = sides.flatMap(({ items }) => items);
  return Object.fromEntries(Object.entries(PLANE).map(([quantity, axis]) => [axis, axisOf(
    sides[0].facts.calibration?.quantiles[quantity],
    tokens.map((token) => token[quantity]),
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
    const tokens = texts.shown[0].tokens.filter((token) => token.layers);
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
    box.on?.("plotly_click", ({ points }) => texts.select(points[0].x - texts.shown[0].items[0].position, { scroll: true, pin: true }));
    texts.on("sides theme", onceAFrame(draw));
  }, { rootMargin: "600px" });
  watcher.observe(box);
}
