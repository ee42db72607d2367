// The metrics of the selected tokens, what differs between compared texts, and the glossary.

import { byId, element } from "./dom.js";
import { ACTIONS, METRICS, number, numberNode, percent, quoted, quotedToken, regimeNode } from "./format.js";
import { REGIMES, occupancy, regimeTitle } from "./regimes.js";

function badge(side) {
  return element("span", { class: "badge", "data-side": side.number % 8 }, side.name);
}

function row(label, cells, attributes = {}) {
  return element("tr", attributes, element("th", { scope: "row" }, ...[label].flat()), ...cells.map((cell) => (cell.tagName === "TD" ? cell : element("td", {}, cell))));
}

function groupRow(title, columns) {
  return element("tr", {}, element("th", { scope: "rowgroup", class: "rowgroup", colspan: columns + 1 }, title));
}

function head(texts) {
  return element("thead", {}, element("tr", {}, element("td", {}), ...texts.shown.map((side) => element("th", { scope: "col" }, badge(side)))));
}

export function showDetails(texts) {
  const describe = texts.single ? describeToken : describePlace;
  texts.on("token bounds", () => {
    const found = texts.shown.map((side) => side.token);
    const [before, top] = describe(texts, found);
    byId("details-body").replaceChildren(...before, element("table", { class: "columns" }, ...top, ...metricRows(found, { units: texts.single })));
    if (texts.pinned) byId("announcement").textContent = announcement(texts, found);
  });
}

// The metrics of tokens, one column per token, and a column of the units with `units`.
export function metricRows(found, { units }) {
  return METRICS.map(({ title, fields }) => element("tbody", {}, groupRow(title, found.length + units),
    ...fields.map(([name, label, unit, meaning]) => row(label, [
      ...found.map((token) => element("td", { class: "value" }, token ? numberNode(token[name]) : "–")),
      ...(units ? [element("td", { class: "unit" }, unit)] : [])], { "data-field": name, title: unit ? `${meaning}; ${unit}` : meaning }))));
}

const held = (texts) => (texts.pinned ? " · held (click or Esc releases)" : "");

// One text: the token, the sampler's action, and the most likely tokens.
function describeToken(texts, [token]) {
  return [tokenParts(token, { shown: texts.regimeOf(token), held: held(texts) }), []];
}

// `shown`: its regime by the current thresholds; `choose`: called with an alternative that replaces the token. `current`:
// the id of the token that the text has in this place.
export function tokenParts(token, { shown, held, choose = null, current = null }) {
  return [
    element("p", { class: "word", id: "details-word" }, quotedToken(token)),
    element("p", {}, regimeNode(token.regime)),
    shown === token.regime ? "" : element("p", { class: "what-if" }, `With your thresholds: ${regimeTitle(shown)}`),
    element("p", {}, ...(token.chosen ? [element("b", {}, "chosen"), " by the reader"] : [element("b", {}, token.action), `: ${ACTIONS[token.action] ?? "a custom arm"}`])),
    element("p", { class: "muted" }, "position ", numberNode(token.position), ", token id ", numberNode(token.token_id), held),
    ...notes(token).map((text) => element("p", { class: "note" }, text)),
    alternatives(token, choose, current),
  ];
}

function notes(token) {
  const found = [];
  if (token.type === "retracted") found.push(token.replacement ? `Retracted. Replaced by ${quotedToken(token.replacement)}.` : "Retracted.");
  if (token.replaced?.length) found.push(`Replaces ${token.replaced.map(quotedToken).join(", ")}, retracted.`);
  if (token.loop) found.push("The text was repeating itself. The loop guard chose the arm.");
  if (token.branches) found.push(`Candidates of the fork: ${token.branches.length}, see Branches.`);
  return found;
}

function alternatives(token, choose, current) {
  if (!token.top?.length) return "";
  const option = (id, text) => element("button", { type: "button", class: "choice", "data-token": id, disabled: id === current, title: id === current ? "The text has this token" : "Continue with this token", onclick: () => choose([id], text) }, quoted(text, id));
  const caption = element("caption", {}, "Most likely tokens", choose ? element("span", { class: "muted" }, " · click one to continue with it") : "");
  return element("table", { class: "alternatives" }, caption, element("tbody", {}, ...token.top.map(([id, text, probability]) =>
    row([choose ? option(id, text) : quoted(text, id), id === token.token_id ? element("span", { class: "tag" }, token.chosen ? "chosen" : "drawn") : ""], [
      element("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" }),
      element("td", { class: "value" }, element("data", { value: probability }, percent(probability)))], { class: id === token.token_id ? "drawn" : "" }))));
}

// Several texts: their tokens at the same place.
function describePlace(texts, found) {
  const cells = (of) => found.map((token) => (token ? of(token) : "–"));
  return [[element("p", { id: "place" }, `Token ${texts.place + 1}`, element("span", { class: "muted" }, held(texts)))], [
    head(texts),
    element("tbody", {},
      row("token", cells((token) => element("td", { class: "word" }, quotedToken(token).replace("“ ", "“\u00a0")))), // does not wrap after the quotation mark
      row("regime", cells((token) => regimeNode(token.regime))),
      row("action", cells((token) => (token.type === "retracted" ? `${token.action}, retracted` : token.action))),
      row("position", cells((token) => numberNode(token.position))))]];
}

// The selected tokens, for screen readers.
function announcement(texts, found) {
  const words = (token) => {
    if (!token) return "ended";
    const retracted = token.type === "retracted" ? "retracted, " : "";
    return `${quotedToken(token)}: ${retracted}${regimeTitle(token.regime)}, ${token.action}, entropy ${number(token.entropy)} bits`;
  };
  return texts.single ? words(found[0]) : `Token ${texts.place + 1}. ${texts.shown.map((side, i) => `${side.name}: ${words(found[i])}`).join(". ")}`;
}

const mean = (tokens, name) => (tokens.length ? tokens.reduce((sum, token) => sum + token[name], 0) / tokens.length : null);

// Rows of the table of differences: label, value of a side, format of numbers.
function factsOf({ shown, regimeOf }) {
  const general = [
    ["sampler", (side) => side.facts.sampler],
    ["seed", (side) => side.facts.seed],
    ["model", (side) => side.facts.model],
    ["file", (side) => side.facts.name],
    ["ended by", (side) => side.about.ended ?? "interruption"],
    ["tokens", (side) => side.tokens.length],
    ["retracted tokens", (side) => side.about.retracted],
    ["positions evaluated", (side) => side.about.forwards],
    ["tokens/s", (side) => side.facts.speed],
    ["mean entropy, bits", (side) => mean(side.tokens, "entropy")],
    ["mean varentropy, bits²", (side) => mean(side.tokens, "varentropy")],
    [`tokens in common with ${shown[0].name}`, (side) => side.parting ?? side.tokens.length],
    ["backend", (side) => side.facts.backend],
    ["versions", (side) => Object.entries(side.facts.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
  const shares = Object.keys(REGIMES).map((regime) =>
    [regimeTitle(regime), (side) => occupancy(side.tokens, regimeOf)[regime] / Math.max(side.tokens.length, 1), percent]);
  const keys = [...new Set(shown.flatMap((side) => Object.keys(side.facts.parameters)))].sort();
  const setting = (key) => (side) => JSON.stringify(side.facts.parameters[key]);
  const settings = keys.map((key) => [key, setting(key)]).filter(([, of]) => new Set(shown.map(of)).size > 1);
  return [["", general], ["Share of the tokens", shares], ["Sampler settings", settings]].filter(([, rows]) => rows.length);
}

export function showFacts(texts) {
  texts.on("sides", () => byId("facts-table").replaceChildren(head(texts), ...factsOf(texts).map(([title, rows]) =>
    element("tbody", {}, title && groupRow(title, texts.shown.length), ...rows.map(([label, of, show = number]) => {
      const values = texts.shown.map((side) => of(side) ?? null);
      const differs = new Set(values).size > 1;
      return row([label, differs ? element("span", { class: "unseen" }, " (differs)") : ""],
        values.map((value) => (typeof value === "number" ? element("data", { value }, show(value)) : value ?? "–")),
        { class: differs ? "differs" : "", "data-fact": label });
    })))));
}

export function showGlossary() {
  byId("glossary").replaceChildren(...METRICS.flatMap(({ fields }) => fields).map(([, label, unit, meaning]) =>
    element("div", {}, element("dt", {}, unit ? `${label} (${unit})` : label), element("dd", {}, meaning))));
}
