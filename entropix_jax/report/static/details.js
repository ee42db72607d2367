// The metrics of the selected tokens, what differs between compared texts, and the glossary.

import { byId, element } from "./dom.js";
import { ACTIONS, METRICS, number, numberNode, percent, quoted } from "./format.js";
import { REGIMES, occupancy } from "./regimes.js";

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

// The metrics of some tokens, a column for each; `units`: and one of the units.
export function metricRows(found, { units }) {
  return METRICS.map(({ title, fields }) => element("tbody", {}, groupRow(title, found.length + units),
    ...fields.map(([name, label, unit, meaning]) => row(label, [
      ...found.map((token) => element("td", { class: "value" }, token ? numberNode(token[name]) : "–")),
      ...(units ? [element("td", { class: "unit" }, unit)] : [])], { "data-field": name, title: unit ? `${meaning}; ${unit}` : meaning }))));
}

const held = (texts) => (texts.pinned ? " · held (click or Esc releases)" : "");

// One text: the token, what the sampler did, and the likeliest tokens.
function describeToken(texts, [token]) {
  return [tokenParts(token, { shown: texts.regimeOf(token), held: held(texts) }), []];
}

// `shown`: its regime by other thresholds; `choose`: what takes an alternative instead of the token.
export function tokenParts(token, { shown, held, choose = null }) {
  return [
    element("p", { class: "word", id: "details-word" }, quoted(token.text, token.token_id)),
    element("p", {}, regimeNode(token), ` ${REGIMES[token.regime].meaning}`),
    shown === token.regime ? "" : element("p", { class: "what-if" }, `With your thresholds: ${REGIMES[shown].title}`),
    element("p", {}, element("b", {}, token.action), `: ${ACTIONS[token.action] ?? "a custom arm"}`),
    element("p", { class: "muted" }, "position ", numberNode(token.position), ", token id ", numberNode(token.token_id), held),
    ...notes(token).map((text) => element("p", { class: "note" }, text)),
    alternatives(token, choose),
  ];
}

function notes(token) {
  const found = [];
  if (token.type === "retracted") found.push(token.replacement ? `Retracted; replaced by ${quoted(token.replacement.text, token.replacement.token_id)}.` : "Retracted.");
  if (token.replaced?.length) found.push(`Replaces ${token.replaced.map((one) => quoted(one.text, one.token_id)).join(", ")}, retracted.`);
  if (token.loop) found.push("The text was repeating itself: the loop guard treats the token as LEHV.");
  if (token.branches) found.push(`Number of continuations: ${token.branches.length}, see Branches.`);
  return found;
}

function alternatives(token, choose) {
  if (!token.top?.length) return "";
  return element("table", { class: "alternatives" }, element("caption", {}, "Likeliest tokens"), element("tbody", {}, ...token.top.map(([id, text, probability]) =>
    row([choose ? element("button", { type: "button", class: "choice", "data-token": id, title: "Go on with this token", onclick: () => choose([id], text) }, quoted(text, id)) : quoted(text, id), id === token.token_id ? element("span", { class: "tag" }, "drawn") : ""], [
      element("meter", { min: 0, max: 1, value: probability, "aria-hidden": "true" }),
      element("td", { class: "value" }, element("data", { value: probability }, percent(probability)))], { class: id === token.token_id ? "drawn" : "" }))));
}

// Several texts: what each has at the place.
function describePlace(texts, found) {
  const cells = (of) => found.map((token) => (token ? of(token) : "–"));
  return [[element("p", { id: "place" }, `Token ${texts.place + 1}`, element("span", { class: "muted" }, held(texts)))], [
    head(texts),
    element("tbody", {},
      row("token", cells((token) => element("td", { class: "word" }, quoted(token.text, token.token_id).replace("“ ", "“\u00a0")))), // does not wrap after the quotation mark
      row("regime", cells(regimeNode)),
      row("action", cells((token) => (token.type === "retracted" ? `${token.action}, retracted` : token.action))),
      row("position", cells((token) => numberNode(token.position))))]];
}

const regimeNode = (token) => element("span", { class: "token", "data-regime": token.regime }, REGIMES[token.regime].title);

// For screen readers, when someone walks to a token.
function announcement(texts, found) {
  const words = (token) => {
    if (!token) return "ended";
    const { title, meaning } = REGIMES[token.regime];
    const retracted = token.type === "retracted" ? "retracted, " : "";
    return `${quoted(token.text, token.token_id)}: ${retracted}${title}, ${meaning}, ${token.action}, entropy ${number(token.entropy)} bits`;
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
    ["ended by", (side) => side.about.ended ?? "interrupted"],
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
  const shares = Object.entries(REGIMES).map(([regime, { title, meaning }]) =>
    [`${title} ${meaning}`, (side) => occupancy(side.tokens, regimeOf)[regime] / Math.max(side.tokens.length, 1), percent]);
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
