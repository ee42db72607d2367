// Shares of the regimes as a bar. Each has its own pattern besides its colour, and always its place.

import { element } from "./dom.js";
import { percent } from "./format.js";
import { REGIMES } from "./regimes.js";

const total = (counts) => Object.keys(REGIMES).reduce((sum, regime) => sum + (counts[regime] ?? 0), 0);

export function regimeBar(counts) {
  const all = total(counts);
  const there = Object.entries(REGIMES).filter(([regime]) => counts[regime] > 0);
  const said = there.map(([regime, { title }]) => `${title} ${percent(counts[regime] / all)}`).join(", ");
  return element("div", { class: "bar", role: "img", "aria-label": said || "no tokens", title: said },
    ...there.map(([regime]) => element("span", { "data-regime": regime, style: `width: ${(100 * counts[regime]) / all}%` })));
}

export function sumOf(all) {
  const sum = Object.fromEntries(Object.keys(REGIMES).map((regime) => [regime, 0]));
  for (const counts of all) for (const regime in counts) sum[regime] += counts[regime];
  return sum;
}

// The bar's parts by name, with their shares.
export function regimeLegend(counts) {
  const all = Math.max(total(counts), 1);
  return element("ul", { class: "legend shares" }, ...Object.entries(REGIMES).map(([regime, { title, meaning, where }]) =>
    element("li", { "data-regime": regime, title: where },
      element("span", { class: "swatch", "data-regime": regime }), element("b", {}, title), ` ${meaning} `,
      element("data", { class: "share", value: counts[regime] / all }, percent(counts[regime] / all)))));
}
