// What all pictures share: the library, the look, labels, and the boxes of the plane.

import { visible } from "./format.js";
import { REGIMES } from "./regimes.js";

// Named one by one: among the library's own buttons is one that sends the picture away.
export const config = (...buttons) => ({ displaylogo: false, responsive: true, modeBarButtons: [buttons] });

// The library comes packed: its text becomes a script, which the page's policy knows by its digest.
export function startPlotly(bytes) {
  window.PlotlyConfig = { MathJaxConfig: "local" };
  const script = document.createElement("script");
  script.textContent = new TextDecoder().decode(bytes);
  document.head.append(script);
}

export function theme() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return { colour, narrow: window.innerWidth < 600 };
}

export function layout({ colour }, more) {
  return {
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("text"), family: "system-ui, sans-serif", size: 12 },
    hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("line"), font: { color: colour("text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("muted"), activecolor: colour("text") },
    showlegend: false,
    ...more,
  };
}

export function axis({ colour }, title, more = {}) {
  return { title: { text: title, standoff: 8 }, gridcolor: colour("grid"), zerolinecolor: colour("grid"), linecolor: colour("line"), ...more };
}

export const hoverText = (token) => escapeMarkup(`${token.position} “${visible(token.text, token.token_id)}”`);

// Plotly reads a little HTML in its labels.
export function escapeMarkup(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// A dotted line across a picture of what lies along the text.
export function cursorAt(position) {
  return position == null ? [] : [{ type: "line", xref: "x", x0: position, x1: position, yref: "paper", y0: 0, y1: 1, line: { color: theme().colour("text"), width: 1.5, dash: "dot" } }];
}

// The ends of the plane's axes: all tokens and all bounds lie between them.
export function rangesOf(items, bounds) {
  const most = (name) => {
    const limits = bounds.flatMap(({ bounds: box }) => box[name] ?? []).filter(Number.isFinite);
    const seen = items.map((token) => token[name]);
    return Math.max(1, ...limits.map((limit) => 1.2 * limit), seen.reduce((a, b) => Math.max(a, b), 0));
  };
  const x = 1.04 * most("entropy");
  const y = 1.04 * most("varentropy");
  return { x: [-0.02 * x, x], y: [-0.02 * y, y] };
}

// One regime's box; what bounds it on other quantities cannot be drawn on this plane.
export function boxShape({ regime, bounds }, look, ranges) {
  const [x0, x1] = within(bounds.entropy, ranges.x);
  const [y0, y1] = within(bounds.varentropy, ranges.y);
  if (x0 >= x1 || y0 >= y1) return [];
  const slim = (x1 - x0) / (ranges.x[1] - ranges.x[0]) < 0.2;
  return [{
    type: "rect", layer: "below", x0, x1, y0, y1,
    fillcolor: look.colour(`${regime}-fill`),
    line: { color: look.colour(regime), width: 1 },
    label: { text: slim || look.narrow ? REGIMES[regime].title : `${REGIMES[regime].title} ${REGIMES[regime].meaning}`, textposition: "top left", font: { color: look.colour(`${regime}-text`), size: 12 } },
  }];
}

function within([low, high] = [-Infinity, Infinity], [first, last]) {
  return [Math.max(low, first), Math.min(high, last)];
}
