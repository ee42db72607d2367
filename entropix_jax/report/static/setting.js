// One setting of a study: its figures, and its sampler in full beside the baseline's.

import { byId, element } from "./dom.js";
import { numberNode, percent, visible } from "./format.js";
import { regimeBar, regimeLegend } from "./bars.js";

export function showSetting(one, study, settings) {
  byId("opened-title").textContent = "The setting";
  byId("opened-body").replaceChildren(
    element("p", { class: "word", id: "opened-name" }, visible(one.name, 0)),
    element("p", { class: "muted" }, `sampler ${one.sampler}${one.name === study.baseline ? ", the baseline" : ""}`),
    regimeBar(one.regimes),
    regimeLegend({ lelv: 0, helv: 0, lehv: 0, hehv: 0, mid: 0, ...one.regimes }),
    shares("What the sampler did", one.actions, one.tokens),
    ...parameters(one, study, settings));
}

function shares(title, counts, all) {
  return element("table", { class: "metrics" }, element("caption", {}, title), element("tbody", {}, ...Object.entries(counts).sort(([, a], [, b]) => b - a).map(([name, count]) =>
    element("tr", {}, element("th", { scope: "row" }, name), element("td", { class: "value" }, numberNode(count)), element("td", { class: "value" }, percent(count / Math.max(all, 1)))))));
}

const shown = (value) => (value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

// A key may go on in the next line after a dot or a low line, rather than anywhere.
const breakable = (key) => key.split(/(?<=[._])/).flatMap((part) => [part, element("wbr")]);

function parameters(one, study, settings) {
  const base = settings.find((other) => other.name === study.baseline) ?? one;
  const keys = [...new Set([...Object.keys(one.parameters), ...Object.keys(base.parameters)])].sort();
  const differs = (key) => shown(one.parameters[key]) !== shown(base.parameters[key]);
  const search = element("input", { type: "search", placeholder: "a key", "aria-label": "Search the keys" });
  const only = element("input", { type: "checkbox", id: "only-differing" });
  const body = element("tbody", { id: "parameters" });
  const fill = () => body.replaceChildren(...keys.filter((key) => key.includes(search.value.trim()) && (!only.checked || differs(key))).map((key) =>
    element("tr", { "data-key": key, class: differs(key) ? "differs" : "" }, element("th", { scope: "row" }, ...breakable(key)),
      element("td", {}, shown(one.parameters[key]), differs(key) ? element("span", { class: "muted" }, ` (${study.baseline}: ${shown(base.parameters[key])})`) : null))));
  search.addEventListener("input", fill);
  only.addEventListener("change", fill);
  fill();
  return [
    element("h3", {}, "Parameters"),
    element("div", { class: "filters" }, search, one === base ? null : element("label", {}, only, ` only what differs from ${study.baseline}`)),
    element("table", { class: "parameters" }, body)];
}
