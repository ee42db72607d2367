// The pictures of one run: the plane, the series over the text, the attention's heat map.

import { byId, onceAFrame } from "./dom.js";
import { axis, boxShape, config, cursorAt, hoverText, layout, rangesOf, theme } from "./plotting.js";
import { REGIMES } from "./regimes.js";

const SERIES = [["entropy", "entropy<br>bits"], ["varentropy", "varentropy<br>bits²"], ["agreement", "agreement<br>0–1"], ["temperature", "temperature"]];

// The plane of entropy and varentropy.

export function showPlane(state) {
  const box = byId("plane");
  let groups = [];

  function draw() {
    const look = theme();
    const items = state.row.items;
    const kept = Object.keys(REGIMES).map((regime) => items.filter((token) => token.type === "token" && state.regimeOf(token) === regime));
    groups = [...kept, items.filter((token) => token.type === "retracted")];
    const names = [...Object.keys(REGIMES), "gone"];
    const traces = groups.map((tokens, i) => pointsOf(tokens, names[i], look, state));
    const { x, y } = currentPoint(state);
    traces.push({ type: "scatter", mode: "markers", x, y, hoverinfo: "skip", marker: { size: 17, color: "rgba(0,0,0,0)", line: { width: 3, color: look.colour("text") } } });
    const ranges = rangesOf(state.row.items, state.bounds);
    Plotly.react(box, traces, layout(look, {
      uirevision: state.row.number, // keeps the view that a person has zoomed to
      margin: { l: 52, r: 12, t: 30, b: 46 },
      height: look.narrow ? 340 : 440,
      hovermode: "closest",
      dragmode: look.narrow ? false : "zoom", // a finger scrolls the page
      xaxis: axis(look, "entropy, bits", { range: ranges.x, zeroline: false }),
      yaxis: axis(look, "varentropy, bits²", { range: ranges.y, zeroline: false }),
      shapes: state.bounds.flatMap((one) => boxShape(one, look, ranges)),
    }), config("zoom2d", "pan2d", "select2d", "lasso2d", "resetScale2d"));
  }

  const redraw = onceAFrame(draw);
  const ring = onceAFrame(() => {
    const { x, y } = currentPoint(state);
    Plotly.restyle(box, { x: [x], y: [y] }, [groups.length]);
  });
  draw();
  const tokenOf = ({ points }) => groups[points[0].curveNumber]?.[points[0].pointIndex];
  box.on("plotly_hover", (event) => tokenOf(event) && state.select(tokenOf(event), { scroll: true, pin: undefined }));
  box.on("plotly_click", (event) => tokenOf(event) && state.select(tokenOf(event), { scroll: true, pin: true }));
  box.on("plotly_selected", (event) => state.mark(event ? event.points.map((point) => groups[point.curveNumber]?.[point.pointIndex]).filter(Boolean) : null));
  box.on("plotly_deselect", () => state.mark(null));
  for (const kind of ["row", "bounds", "hidden", "theme"]) state.on(kind, redraw);
  state.on("token", ring);
}

function pointsOf(tokens, name, look, state) {
  const gone = name === "gone";
  return {
    type: "scatter",
    mode: "markers",
    name: gone ? "taken back" : REGIMES[name].title,
    visible: !state.hidden.has(name),
    x: tokens.map((token) => token.entropy),
    y: tokens.map((token) => token.varentropy),
    text: tokens.map(hoverText),
    hovertemplate: "%{text}<br>entropy %{x:.3f}, varentropy %{y:.3f}<extra>%{fullData.name}</extra>",
    marker: gone
      ? { symbol: "circle-open", size: 10, color: look.colour("muted"), line: { width: 1.5 } }
      : { symbol: REGIMES[name].symbol, size: 7, color: look.colour(name), opacity: 0.75 },
  };
}

function currentPoint({ token }) {
  return token ? { x: [token.entropy], y: [token.varentropy] } : { x: [], y: [] };
}

// Entropy, varentropy, agreement and temperature along the text.

export function showSeries(state) {
  const box = byId("series");

  const cursor = () => cursorAt(state.token?.position);

  function draw() {
    const look = theme();
    const tokens = state.row.tokens;
    const x = tokens.map((token) => token.position);
    const colours = tokens.map((token) => look.colour(state.regimeOf(token)));
    const traces = SERIES.map(([name], i) => ({
      type: "scatter", mode: i ? "lines" : "lines+markers", name, x, y: tokens.map((token) => token[name]), yaxis: i ? `y${i + 1}` : "y",
      line: { color: look.colour(i ? "line-plot" : "series"), width: 1 }, marker: { size: 4, color: colours },
      text: tokens.map(hoverText), hovertemplate: i ? `${name} %{y:.4g}<extra></extra>` : `%{text}<br>${name} %{y:.4g}<extra></extra>`,
    }));
    const axes = {};
    const tall = 1 / SERIES.length;
    SERIES.forEach(([, title], i) => {
      const top = 1 - i * tall;
      axes[i ? `yaxis${i + 1}` : "yaxis"] = axis(look, look.narrow ? "" : title, { domain: [top - (look.narrow ? 0.72 : 0.8) * tall, top], rangemode: "tozero", nticks: 4, fixedrange: true, zeroline: false });
    });
    const names = SERIES.map(([, title], i) => ({ text: title.replace("<br>", ", "), showarrow: false, xref: "paper", yref: "paper", x: 0, xanchor: "left", y: 1 - i * tall, yanchor: "bottom" }));
    Plotly.react(box, traces, layout(look, {
      uirevision: state.row.number,
      margin: { l: look.narrow ? 36 : 62, r: 12, t: look.narrow ? 30 : 28, b: 40 },
      height: look.narrow ? 440 : 460,
      hovermode: "x unified",
      hoversubplots: "axis",
      dragmode: look.narrow ? false : "zoom", // a finger scrolls the page
      xaxis: axis(look, "position in the text", { anchor: `y${SERIES.length}`, zeroline: false }),
      annotations: look.narrow ? names : [],
      shapes: cursor(),
      ...axes,
    }), config("zoom2d", "pan2d", "resetScale2d"));
  }

  const redraw = onceAFrame(draw);
  const move = onceAFrame(() => Plotly.relayout(box, { shapes: cursor() }));
  draw();
  box.on("plotly_hover", ({ points }) => state.select(state.row.tokens[points[0].pointIndex], { scroll: true }));
  box.on("plotly_click", ({ points }) => state.select(state.row.tokens[points[0].pointIndex], { scroll: true, pin: true }));
  for (const kind of ["row", "bounds", "theme"]) state.on(kind, redraw);
  state.on("token", move);
}

// Attention entropy of each layer and head along the text.

export function showHeatMap(state) {
  const box = byId("heat");
  byId("attention").hidden = ![...state.rows.values()].some((row) => row.tokens.some((token) => token.layers));
  const draw = () => {
    const tokens = state.row.tokens.filter((token) => token.layers);
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
      colorscale: "Cividis", // the same to the colour-blind
      zmin: 0,
      colorbar: { title: { text: "bits" }, thickness: 12, len: 1 },
    }], layout(look, {
      margin: { l: 62, r: 8, t: 28, b: 44 },
      height: Math.max(look.narrow ? 300 : 320, Math.min(900, 60 + 3 * labels.length)),
      xaxis: axis(look, "position in the text"),
      yaxis: axis(look, "", { tickvals: starts.map((start, i) => start + (heads[i] - 1) / 2), ticktext: heads.map((_, layer) => `layer ${layer}`), autorange: "reversed" }),
      shapes: starts.slice(1).map((start) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: start - 0.5, y1: start - 0.5, line: { color: look.colour("panel"), width: 2 } })),
    }), config("zoom2d", "pan2d", "resetScale2d"));
  };
  const redraw = onceAFrame(draw);
  const start = () => {
    draw();
    box.on?.("plotly_click", ({ points }) => {
      const token = state.row.tokens.find((one) => one.position === points[0].x);
      if (token) state.select(token, { scroll: true, pin: true });
    });
    for (const kind of ["row", "theme"]) state.on(kind, redraw);
  };
  // The largest picture, and the last one: not before someone comes near it.
  const watcher = new IntersectionObserver(([entry]) => {
    if (!entry.isIntersecting) return;
    watcher.disconnect();
    start();
  }, { rootMargin: "600px" });
  watcher.observe(box);
}
