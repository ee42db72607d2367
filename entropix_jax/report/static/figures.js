// The pictures of a study. A setting has the same colour and shape in all of them.

import { byId } from "./dom.js";
import { axis, config, escapeMarkup, layout, theme } from "./plotting.js";

const SHAPES = ["circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "x", "star"];
const LINES = ["solid", "dash", "dot", "dashdot"];

// Eight colours; the shape changes with each round of them, and within the first too.
const shapeOf = (number) => SHAPES[(number + Math.floor(number / 8)) % SHAPES.length];
const colourOf = (number, look) => look.colour(`side-${number % 8}`);
const below = { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false };
const buttons = () => config("zoom2d", "pan2d", "resetScale2d");

function errors(intervals, axisName) {
  return { [`error_${axisName}`]: { type: "data", symmetric: false, array: intervals.map((one) => one.high - one.value), arrayminus: intervals.map((one) => one.value - one.low), thickness: 1.4, width: 4 } };
}

const said = ({ value, low, high }) => `${value.toFixed(3)} [${low.toFixed(3)}, ${high.toFixed(3)}]`;

// One figure of each setting, a line each, from the top.
export function drawIntervals(box, settings, { title, of, difference }, open) {
  const look = theme();
  const there = settings.filter((one) => of(one.line));
  const found = there.map((one) => of(one.line));
  const names = there.map((one) => short(one.name, look));
  const points = {
    type: "scatter", mode: "markers", x: found.map((one) => one.value), y: there.map((_, i) => i),
    ...errors(found, "x"),
    text: there.map((one, i) => `${escapeMarkup(one.name)}<br>${said(found[i])}${found[i].verdict ? `, ${found[i].verdict}` : ""}`),
    hovertemplate: "%{text}<extra></extra>",
    marker: {
      size: 10, symbol: there.map((one, i) => shapeOf(one.number) + (difference && found[i].verdict === "no difference seen" ? "-open" : "")),
      color: there.map((one) => colourOf(one.number, look)), line: { width: 1.5, color: there.map((one) => colourOf(one.number, look)) },
    },
  };
  points.error_x.color = look.colour("muted");
  Plotly.react(box, [points], layout(look, {
    margin: { l: look.narrow ? 110 : 170, r: 14, t: 28, b: 46 },
    height: 90 + 26 * Math.max(there.length, 3),
    hovermode: "closest",
    dragmode: false,
    xaxis: axis(look, escapeMarkup(title), { zeroline: Boolean(difference), zerolinecolor: look.colour("text"), zerolinewidth: 1 }),
    yaxis: axis(look, "", { tickvals: there.map((_, i) => i), ticktext: names, range: [there.length - 0.5, -0.5], zeroline: false, fixedrange: true, automargin: true }),
  }), buttons());
  onClick(box, ({ points: [point] }) => open(there[point.pointIndex]));
}

const short = (name, look) => escapeMarkup(look.narrow && name.length > 15 ? `${name.slice(0, 14)}…` : name.length > 24 ? `${name.slice(0, 23)}…` : name);

// One listener a box, whatever is drawn in it.
function onClick(box, listener) {
  box.removeAllListeners?.("plotly_click");
  box.on("plotly_click", listener);
}

export function drawCosts(box, settings, all, baseline, opened, open) {
  const look = theme();
  const base = all.find((one) => one.name === baseline);
  const lines = [[base, "solid", look.colour("muted")], ...(opened && opened !== base ? [[opened, "dash", colourOf(opened.number, look)]] : [])];
  const curves = lines.filter(([one]) => one?.line.votes.length > 1).flatMap(([one, dash, color], i) => {
    const { votes } = one.line;
    const x = votes.map((vote) => vote.forwards);
    const label = votes.map((vote) => `majority of ${vote.samples} of ${escapeMarkup(one.name)}<br>${said(vote.score)}<br>${vote.forwards.toFixed(1)} forwards`);
    const band = { type: "scatter", mode: "lines", x: [...x, ...[...x].reverse()], y: [...votes.map((vote) => vote.score.high), ...[...votes].reverse().map((vote) => vote.score.low)], fill: "toself", fillcolor: look.colour("grid"), opacity: 0.5, line: { width: 0 }, hoverinfo: "skip", showlegend: false };
    return [...(i === 0 ? [band] : []), { type: "scatter", mode: "lines+markers", name: `majorities of ${escapeMarkup(one.name)}`, x, y: votes.map((vote) => vote.score.value), text: label, hovertemplate: "%{text}<extra></extra>", line: { color, dash, width: 2 }, marker: { size: 5, color }, showlegend: true }];
  });
  const points = settings.map((one) => ({
    type: "scatter", mode: "markers", name: escapeMarkup(one.name), x: [one.line.forwards], y: [one.line.score.value],
    ...errors([one.line.score], "y"),
    hovertemplate: `${escapeMarkup(one.name)}<br>${said(one.line.score)}<br>%{x:.1f} forwards<extra></extra>`,
    marker: { size: one === opened ? 14 : 9, symbol: shapeOf(one.number), color: colourOf(one.number, look), line: { width: one === opened ? 2 : 0, color: look.colour("text") } },
    showlegend: settings.length <= 24 && !look.narrow,
  }));
  for (const point of points) point.error_y.color = point.marker.color;
  Plotly.react(box, [...curves, ...points], layout(look, {
    uirevision: settings.length,
    margin: { l: 52, r: 14, t: 40, b: 46 },
    height: look.narrow ? 400 : 480,
    hovermode: "closest",
    dragmode: look.narrow ? false : "zoom",
    showlegend: true,
    legend: look.narrow ? below : { itemclick: false, itemdoubleclick: false, x: 1.01, y: 1 },
    xaxis: axis(look, look.narrow ? "forward passes an answer" : "forward passes an answer, beyond the prompt", { type: settings.every((one) => one.line.forwards > 0) ? "log" : "linear", zeroline: false }),
    yaxis: axis(look, "score", { zeroline: false }),
  }), buttons());
  onClick(box, ({ points: [point] }) => open(settings[point.curveNumber - curves.length] ?? opened));
}

export function drawResponse(box, settings, key, open) {
  const look = theme();
  const there = settings.filter((one) => key in one.varied);
  const values = there.map((one) => one.varied[key]);
  const numeric = values.every((value) => typeof value === "number");
  const scores = there.map((one) => one.line.score);
  const points = {
    type: "scatter", mode: "markers", x: values.map((value) => (numeric ? value : escapeMarkup(String(typeof value === "string" ? value : JSON.stringify(value))))), y: scores.map((one) => one.value),
    ...errors(scores, "y"),
    text: there.map((one, i) => `${escapeMarkup(one.name)}<br>${said(scores[i])}`), hovertemplate: "%{text}<extra></extra>",
    marker: { size: 9, symbol: there.map((one) => shapeOf(one.number)), color: there.map((one) => colourOf(one.number, look)) },
  };
  points.error_y.color = look.colour("muted");
  Plotly.react(box, [points], layout(look, {
    margin: { l: 52, r: 14, t: 28, b: 46 }, height: 360, hovermode: "closest", dragmode: false,
    xaxis: axis(look, escapeMarkup(key), { type: numeric ? "linear" : "category", zeroline: false }),
    yaxis: axis(look, "score", { zeroline: false }),
  }), buttons());
  onClick(box, ({ points: [point] }) => open(there[point.pointIndex]));
}

const NAMES = { mean_entropy: "mean entropy", max_entropy: "max entropy", mean_varentropy: "mean varentropy", max_varentropy: "max varentropy", perplexity: "perplexity" };

export function drawPredictors(box, predictors, numberOf) {
  const look = theme();
  const names = Object.keys(predictors[0]?.auroc ?? {});
  const step = 0.7 / Math.max(predictors.length, 1);
  const groups = predictors.map(({ setting, auroc }, i) => {
    const found = names.map((name) => auroc[name]);
    const group = {
      type: "scatter", mode: "markers", name: escapeMarkup(setting),
      x: found.map((one) => one.value), y: names.map((_, k) => k + (i - (predictors.length - 1) / 2) * step),
      ...errors(found, "x"),
      text: names.map((name, k) => `${escapeMarkup(setting)}, ${NAMES[name] ?? escapeMarkup(name)}<br>${found[k].value?.toFixed(3)} [${found[k].low?.toFixed(3)}, ${found[k].high?.toFixed(3)}]`), hovertemplate: "%{text}<extra></extra>",
      marker: { size: 10, symbol: shapeOf(numberOf(setting)), color: colourOf(numberOf(setting), look) },
    };
    group.error_x.color = group.marker.color;
    return group;
  });
  Plotly.react(box, groups, layout(look, {
    margin: { l: 124, r: 14, t: 44, b: 46 }, height: 130 + 46 * names.length, hovermode: "closest", dragmode: false, showlegend: true, legend: below,
    xaxis: axis(look, "area under the ROC curve", { range: [0, 1.03], zeroline: false }),
    yaxis: axis(look, "", { tickvals: names.map((_, k) => k), ticktext: names.map((name) => NAMES[name] ?? escapeMarkup(name)), range: [names.length - 0.5, -0.5], zeroline: false, fixedrange: true }),
    shapes: [{ type: "line", x0: 0.5, x1: 0.5, yref: "paper", y0: 0, y1: 1, line: { color: look.colour("text"), width: 1, dash: "dot" } }],
  }), buttons());
}

export function drawReliability(box, reliability, numberOf) {
  const look = theme();
  Plotly.react(box, reliability.map(({ setting, bins }) => ({
    type: "scatter", mode: "lines+markers", name: escapeMarkup(setting), x: bins.map((bin) => bin.mean), y: bins.map((bin) => bin.right),
    text: bins.map((bin) => `${bin.low.toFixed(3)} to ${bin.high.toFixed(3)} bits, ${bin.number} texts: ${bin.right.toFixed(3)}`), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    line: { color: colourOf(numberOf(setting), look), dash: LINES[numberOf(setting) % LINES.length] }, marker: { size: 9, symbol: shapeOf(numberOf(setting)), color: colourOf(numberOf(setting), look) },
  })), layout(look, {
    margin: { l: 52, r: 14, t: 44, b: 46 }, height: 340, hovermode: "closest", dragmode: false, showlegend: true, legend: below,
    xaxis: axis(look, "mean entropy of the text, bits", { zeroline: false }),
    yaxis: axis(look, "mean score", { range: [-0.02, 1.05], zeroline: false }),
  }), buttons());
}

export function drawTruth(truth) {
  const look = theme();
  const bars = (name, field, color, shape) => ({ type: "bar", name, x: truth.map((one) => escapeMarkup(one.regime.toUpperCase())), y: truth.map((one) => one[field]), marker: { color: look.colour(color), pattern: { fillmode: "overlay", shape, fgcolor: look.colour("panel"), solidity: 0.3 } }, hovertemplate: "%{x}: %{y:.3f} bits<extra>%{fullData.name}</extra>" });
  Plotly.react(byId("truth"), [bars("true", "true_entropy", "muted", "/"), bars("the model's", "model_entropy", "side-0", "")], layout(look, {
    margin: { l: 52, r: 14, t: 44, b: 40 }, height: 320, barmode: "group", dragmode: false, showlegend: true, legend: below,
    xaxis: axis(look, ""), yaxis: axis(look, "mean entropy, bits"),
  }), buttons());
}
