// The pictures of a comparison: one line, and one kind of point, for each side.

import { byId, onceAFrame } from "./dom.js";
import { axis, boxShape, config, cursorAt, escapeMarkup, hoverText, layout, rangesOf, theme } from "./plotting.js";

const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "diamond", "square", "cross", "x", "triangle-up", "star", "hexagon"];

const colourOf = (side, look) => look.colour(`side-${side.number % 8}`);
const titleOf = (side) => escapeMarkup(`${side.name} ${side.facts.sampler}`);

export function showOverlay(group) {
  const box = byId("series");
  const measure = byId("measure");
  const start = () => group.shown[0].row.items[0]?.position ?? 0;
  const cursor = () => cursorAt(group.place === null ? null : start() + group.place);

  function draw() {
    const look = theme();
    const [name, unit] = [measure.value, measure.selectedOptions[0].dataset.unit];
    const lines = group.shown.map((side) => ({
      type: "scatter", mode: "lines", name: titleOf(side),
      x: side.tokens.map((_, place) => start() + place),
      y: side.tokens.map((token) => token[name]),
      text: side.tokens.map(hoverText),
      hovertemplate: "%{text}: %{y:.4g}<extra>%{fullData.name}</extra>",
      line: { color: colourOf(side, look), width: 1.5, dash: DASHES[side.number % DASHES.length] },
    }));
    Plotly.react(box, lines, layout(look, {
      uirevision: "series",
      margin: { l: look.narrow ? 40 : 56, r: 12, t: 46, b: 42 },
      height: look.narrow ? 340 : 380,
      hovermode: "x unified",
      dragmode: look.narrow ? false : "zoom", // a finger scrolls the page
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: axis(look, "position in the text", { zeroline: false }),
      yaxis: axis(look, unit ? `${name}, ${unit}` : name, { rangemode: "tozero", fixedrange: true, zeroline: false }),
      shapes: [...cursor(), ...partingShape(group, look, start())],
      annotations: partingLabel(group, look, start()),
    }), config("zoom2d", "pan2d", "resetScale2d"));
  }

  const redraw = onceAFrame(draw);
  const move = onceAFrame(() => Plotly.relayout(box, { shapes: [...cursor(), ...partingShape(group, theme(), start())] }));
  draw();
  const placeAt = ({ points }) => points[0].x - start();
  box.on("plotly_hover", (event) => group.go(placeAt(event)));
  box.on("plotly_click", (event) => group.go(placeAt(event), { pin: true }));
  measure.addEventListener("change", redraw);
  for (const kind of ["row", "theme"]) group.on(kind, redraw);
  group.on("cursor", move);
}

// What all have in common, as a band from the beginning.
function partingShape(group, look, start) {
  if (group.shown.length < 2 || group.common === 0) return [];
  return [{ type: "rect", layer: "below", xref: "x", x0: start, x1: start + group.common - 0.5, yref: "paper", y0: 0, y1: 1, fillcolor: look.colour("grid"), opacity: 0.6, line: { width: 0 } }];
}

function partingLabel(group, look, start) {
  if (group.shown.length < 2 || group.common === 0) return [];
  return [{ text: "in common", showarrow: false, x: start, xanchor: "left", yref: "paper", y: 1, yanchor: "top", font: { color: look.colour("muted"), size: 11 } }];
}

export function showPlanes(group) {
  const box = byId("plane");
  let points = []; // the tokens of each side that are drawn

  const rings = () => group.shown.map((side) => side.state.token).map((token) => (token ? [[token.entropy], [token.varentropy]] : [[], []]));

  function draw() {
    const look = theme();
    const { shown } = group;
    points = shown.map((side) => side.tokens.filter((token) => !group.hidden.has(token.regime)));
    const alike = shown.every((side) => JSON.stringify(side.state.bounds) === JSON.stringify(shown[0].state.bounds));
    byId("plane-note").textContent = alike ? "" : `The boxes are those of ${shown[0].name}; other sides have others.`;
    const ranges = rangesOf(shown.flatMap((side) => side.row.items), shown[0].state.bounds);
    const dots = shown.map((side, i) => ({
      type: "scatter", mode: "markers", name: titleOf(side),
      x: points[i].map((token) => token.entropy),
      y: points[i].map((token) => token.varentropy),
      text: points[i].map(hoverText),
      hovertemplate: "%{text}<br>entropy %{x:.3f}, varentropy %{y:.3f}<extra>%{fullData.name}</extra>",
      marker: { symbol: SYMBOLS[side.number % SYMBOLS.length], size: 7, color: colourOf(side, look), opacity: 0.65 },
    }));
    const cursors = shown.map((side, i) => ({
      type: "scatter", mode: "markers", x: rings()[i][0], y: rings()[i][1], hoverinfo: "skip", showlegend: false,
      marker: { symbol: SYMBOLS[side.number % SYMBOLS.length], size: 16, color: "rgba(0,0,0,0)", line: { width: 3, color: look.colour("text") } },
    }));
    Plotly.react(box, [...dots, ...cursors], layout(look, {
      uirevision: "plane",
      margin: { l: 52, r: 12, t: 46, b: 46 },
      height: look.narrow ? 380 : 460,
      hovermode: "closest",
      dragmode: look.narrow ? false : "zoom",
      showlegend: true,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: axis(look, "entropy, bits", { range: ranges.x, zeroline: false }),
      yaxis: axis(look, "varentropy, bits²", { range: ranges.y, zeroline: false }),
      shapes: shown[0].state.bounds.flatMap((one) => boxShape(one, look, ranges)),
    }), config("zoom2d", "pan2d", "resetScale2d"));
  }

  const redraw = onceAFrame(draw);
  const ring = onceAFrame(() => {
    const now = rings();
    Plotly.restyle(box, { x: now.map(([x]) => x), y: now.map(([, y]) => y) }, now.map((_, i) => points.length + i));
  });
  draw();
  const select = (event, pin) => {
    const { curveNumber, pointIndex } = event.points[0];
    const token = points[curveNumber]?.[pointIndex];
    if (token) group.shown[curveNumber].state.select(token, { pin, scroll: true });
  };
  box.on("plotly_hover", (event) => select(event, undefined));
  box.on("plotly_click", (event) => select(event, true));
  for (const kind of ["row", "hidden", "theme"]) group.on(kind, redraw);
  group.on("cursor", ring);
}
