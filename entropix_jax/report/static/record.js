// One record of a batch, with all that the output says of it.

import { byId, element } from "./dom.js";
import { ACTIONS, number, percent, visible } from "./format.js";
import { regimeBar, regimeLegend } from "./bars.js";

const APART = new Set(["id", "text", "prompt", "error", "regimes", "actions", "ended", "token_ids", "timings"]);

export function showRecord(row, table, facts, show) {
  const step = (by, sign, name) => {
    const other = table.after(row, by);
    return element("button", { type: "button", disabled: other === null, "aria-label": `${name} record`, onclick: () => show(other) }, sign);
  };
  byId("record-body").replaceChildren(
    element("p", { class: "word", id: "record-name" }, visible(row.id ?? `line ${row.line}`, 0)),
    element("p", {}, step(-1, "‹", "previous"), " ", step(1, "›", "next"), element("span", { class: "muted" }, " as the table is sorted")),
    ...(row.error == null ? [] : [element("p", { class: "problem", id: "record-error" }, visible(row.error))]),
    ...passage("Prompt", "record-prompt", row.prompt, "not known here: the input is not where it was, or has changed"),
    ...passage("Text", "record-text", row.text, "none"),
    ...(row.regimes ? [element("h3", {}, "Regimes"), regimeBar(row.regimes), regimeLegend(row.regimes)] : []),
    ...(row.actions ? [actions(row)] : []),
    fields(row),
    ...ids(row, facts));
}

function passage(title, id, text, instead) {
  return [element("h3", {}, title), text == null ? element("p", { class: "muted" }, instead) : element("pre", { id, tabindex: 0, "aria-label": title }, text)];
}

function actions(row) {
  return element("table", { class: "metrics" }, element("caption", {}, "What the sampler did"), element("tbody", {}, ...Object.entries(row.actions).map(([name, count]) =>
    element("tr", {}, element("th", { scope: "row", title: ACTIONS[name] }, name), element("td", { class: "value" }, number(count)), element("td", { class: "value" }, percent(count / row.tokens))))));
}

function fields(row) {
  const own = Object.entries(row).filter(([name, value]) => !APART.has(name) && value != null);
  const all = [["ended by", row.ended], ...own, ...Object.entries(row.timings ?? {})];
  return element("table", { class: "metrics" }, element("caption", {}, "All else"), element("tbody", {}, ...all.map(([name, value]) =>
    element("tr", { "data-field": name }, element("th", { scope: "row" }, name), element("td", { class: typeof value === "number" ? "value" : "" },
      typeof value === "number" ? element("data", { value }, number(value)) : typeof value === "string" ? value : JSON.stringify(value))))));
}

function ids(row, facts) {
  if (facts.without.includes("token_ids")) return [element("p", { class: "muted" }, `The token ids are in ${facts.name} alone: this page would be too large.`)];
  if (!row.token_ids) return [];
  return [element("details", {}, element("summary", {}, "Token ids"), element("pre", {}, row.token_ids.join(" ")))];
}
