// All that the trace says of the selected token.

import { byId, element } from "./dom.js";
import { ACTIONS, METRICS, number, numberNode, percent, quoted } from "./format.js";
import { REGIMES } from "./regimes.js";

export function showDetails(state) {
  const update = () => {
    const token = state.token;
    const box = byId("details-body");
    if (!token) return box.replaceChildren("Nothing was generated.");
    box.replaceChildren(...parts(token, state));
    if (state.pinned) byId("announcement").textContent = announcement(token);
  };
  for (const kind of ["token", "bounds"]) state.on(kind, update);
}

// What a screen reader says of a token that someone has walked to.
function announcement(token) {
  const { title, meaning } = REGIMES[token.regime];
  const gone = token.type === "retracted" ? "taken back, " : "";
  return `${quoted(token.text, token.token_id)}: ${gone}${title}, ${meaning}, ${token.action}, entropy ${number(token.entropy)} bits`;
}

function parts(token, state) {
  return [heading(token, state), ...notes(token), alternatives(token), ...METRICS.map((group) => metrics(group, token))].filter(Boolean);
}

function heading(token, state) {
  const shown = state.regimeOf(token);
  const whatIf = shown !== token.regime ? `With your bounds: ${REGIMES[shown].title}` : null;
  return element("div", { class: "heading" },
    element("p", { class: "word", id: "details-word" }, quoted(token.text, token.token_id)),
    element("p", {},
      element("span", { class: "token", "data-regime": token.regime }, REGIMES[token.regime].title),
      ` ${REGIMES[token.regime].meaning}: ${REGIMES[token.regime].where}`),
    whatIf && element("p", { class: "what-if" }, whatIf),
    element("p", {}, element("b", {}, token.action), `: ${ACTIONS[token.action] ?? "an arm of your own"}`),
    element("p", { class: "muted" }, "position ", numberNode(token.position), ", token ", numberNode(token.token_id),
      state.pinned ? " · held (Esc or click lets it go)" : ""));
}

function notes(token) {
  const found = [];
  if (token.type === "retracted") found.push(`Taken back; ${quoted(token.replacement?.text ?? "", token.replacement?.token_id)} stands in its place.`);
  if (token.replaced?.length) found.push(`Stands in the place of ${token.replaced.map((gone) => quoted(gone.text, gone.token_id)).join(", ")}, taken back.`);
  if (token.loop) found.push("The text was repeating itself: the loop guard treats it as LEHV.");
  if (token.branches) {
    const many = token.branches.length;
    found.push(`The best of ${many} ${many === 1 ? "candidate" : "candidates"}, shown under Branches.`);
  }
  return found.map((text) => element("p", { class: "note" }, text));
}

function alternatives(token) {
  if (!token.top?.length) return null;
  const rows = token.top.map(([id, text, probability]) =>
    element("tr", { class: id === token.token_id ? "taken" : "" },
      element("th", { scope: "row" }, quoted(text, id), id === token.token_id ? element("span", { class: "badge" }, "taken") : null),
      element("td", {}, element("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" })),
      element("td", { class: "value" }, element("data", { value: probability }, percent(probability)))));
  const table = element("table", { class: "alternatives" }, element("caption", {}, "The likeliest tokens here"), element("tbody", {}, ...rows));
  return table;
}

function metrics({ title, fields }, token) {
  const rows = fields.map(([name, label, unit, meaning]) =>
    element("tr", { "data-field": name, title: meaning },
      element("th", { scope: "row" }, label),
      element("td", { class: "value" }, numberNode(token[name])),
      element("td", { class: "unit" }, unit)));
  return element("table", { class: "metrics" }, element("caption", {}, title), element("tbody", {}, ...rows));
}

export function showGlossary() {
  byId("glossary").replaceChildren(...METRICS.flatMap(({ fields }) => fields).map(([, label, unit, meaning]) =>
    element("div", {}, element("dt", {}, unit ? `${label} (${unit})` : label), element("dd", {}, meaning))));
}
