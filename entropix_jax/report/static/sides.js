// The sides of a comparison: who they are, what differs between them, their texts, their tokens at
// one place.

import { byId, element } from "./dom.js";
import { METRICS, number, numberNode, percent, quoted } from "./format.js";
import { REGIMES, occupancy } from "./regimes.js";
import { showText } from "./text.js";
import { placeOf } from "./comparison.js";

export function badge(side) {
  return element("span", { class: "side-badge", "data-side": side.number % 8 }, side.name);
}

function whereFrom(side) {
  return side.of > 1 ? `${side.facts.name}, text ${side.row.number + 1}` : side.facts.name;
}

export function showSides(group) {
  const buttons = group.sides.map((side) => {
    const { facts } = side;
    return element("button", { type: "button", "aria-pressed": String(side.shown), onclick: () => group.toggleSide(side) },
      badge(side), element("b", {}, facts.sampler), element("span", { class: "what" }, `seed ${facts.seed ?? "none"} · ${whereFrom(side)}`));
  });
  byId("sides").replaceChildren(...buttons.map((button) => element("li", {}, button)));
  group.on("row", () => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(group.sides[i].shown))));
}

export function showTexts(group) {
  const boxes = group.sides.map((side) => {
    const id = `side-${side.number}`;
    const box = element("div", { class: "text", id, tabindex: 0, role: "listbox", "aria-label": `Text ${side.name}. Arrow keys go from token to token.` });
    const note = element("p", { class: "about" });
    const card = element("article", { class: "side", "data-number": side.number, "aria-label": `Text ${side.name}` },
      element("h3", {}, badge(side), " ", side.facts.sampler, element("span", { class: "muted" }, ` seed ${side.facts.seed ?? "none"}`)), note, box);
    showText(side.state, box, `${id}-token`, (spans) => markParting(group, side, spans));
    return { side, card, note };
  });
  byId("texts").replaceChildren(...boxes.map(({ card }) => card));
  const update = () => {
    for (const { side, card, note } of boxes) {
      card.hidden = !side.shown;
      if (side.shown) note.textContent = partingText(group, side);
    }
  };
  group.on("row", update);
}

function partingText(group, side) {
  const [first] = group.shown;
  if (side.tokens.length === 0) return "Nothing was generated.";
  if (group.shown.length === 1) return `${side.tokens.length} tokens.`;
  if (side.parting === null) return side === first ? "The same as the others." : `The same as ${first.name}, token by token.`;
  const from = side === first ? "the others" : first.name;
  if (side.parting === 0) return `Parts from ${from} at once.`;
  if (side.parting >= side.tokens.length) return `Ends where it would part from ${from}, after ${side.parting} tokens.`;
  return `Parts from ${from} at token ${side.parting + 1}; ${side.parting} in common.`;
}

function markParting(group, side, spans) {
  if (group.shown.length < 2) return;
  const { items } = side.row;
  items.forEach((token, i) => {
    const place = placeOf(side, token);
    spans[i].classList.toggle("common", place < group.common);
    spans[i].classList.toggle("parts", place === side.parting && token.type === "token");
  });
  const at = items.findIndex((token) => placeOf(side, token) === side.parting);
  if (at > 0) spans[at].before(element("span", { class: "parting", "aria-hidden": "true" }, `from here on ${side === group.shown[0] ? "they part" : `not as ${group.shown[0].name}`}`));
}

// What differs.

const mean = (tokens, name) => (tokens.length ? tokens.reduce((sum, token) => sum + token[name], 0) / tokens.length : null);

// Rows of the table: a label, what each side has, and how it is shown.
function factsOf(group) {
  const { shown } = group;
  const [first] = shown;
  const rows = [
    ["sampler", (side) => side.facts.sampler],
    ["seed", (side) => side.facts.seed],
    ["model", (side) => side.facts.model],
    ["from", whereFrom],
    ["ended by", (side) => side.about.ended ?? "interrupted"],
    ["tokens", (side) => side.tokens.length],
    ["taken back", (side) => side.about.retracted],
    ["positions evaluated", (side) => side.about.forwards],
    ["tokens/s", (side) => side.facts.speed],
    ["mean entropy, bits", (side) => mean(side.tokens, "entropy")],
    ["mean varentropy, bits²", (side) => mean(side.tokens, "varentropy")],
    [`as ${first.name}, tokens from the beginning`, (side) => side.parting ?? side.tokens.length],
    ["backend", (side) => side.facts.backend],
    ["versions", (side) => Object.entries(side.facts.versions).map(([name, version]) => `${name} ${version}`).join(", ")],
  ];
  const shares = Object.entries(REGIMES).map(([regime, { title, meaning }]) =>
    [`${title} ${meaning}`, (side) => occupancy(side.tokens, group.regimeOf)[regime] / Math.max(side.tokens.length, 1), percent]);
  const keys = [...new Set(shown.flatMap((side) => Object.keys(side.facts.parameters)))].sort();
  const setting = (key) => (side) => JSON.stringify(side.facts.parameters[key]);
  const settings = keys.map((key) => [key, setting(key)]).filter(([, of]) => new Set(shown.map(of)).size > 1);
  return { rows, shares, settings };
}

export function showFacts(group) {
  group.on("row", () => {
    const { rows, shares, settings } = factsOf(group);
    byId("facts-table").replaceChildren(head(group), body(group, rows), body(group, shares, "Share of the tokens"), ...(settings.length ? [body(group, settings, "Settings of the samplers that differ")] : []));
    byId("no-settings").hidden = settings.length > 0 || group.shown.length < 2;
  });
}

function head(group) {
  return element("thead", {}, element("tr", {}, element("td", {}), ...group.shown.map((side) => element("th", { scope: "col" }, badge(side)))));
}

function body(group, rows, title) {
  const caption = title && element("tr", {}, element("th", { scope: "rowgroup", class: "rowgroup", colspan: group.shown.length + 1 }, title));
  return element("tbody", {}, caption, ...rows.map(([label, of, show]) => {
    const values = group.shown.map(of);
    const differs = new Set(values.map((value) => value ?? null)).size > 1;
    return element("tr", { class: differs ? "differs" : "", "data-fact": label },
      element("th", { scope: "row" }, label, differs ? element("span", { class: "unseen" }, " (differs)") : null),
      ...values.map((value) => element("td", {}, typeof value === "number" ? element("data", { value }, (show ?? number)(value)) : (value ?? "–"))));
  }));
}

// The tokens at one place.

export function showPlace(group) {
  const update = () => {
    const { shown, place } = group;
    const tokens = shown.map((side) => side.state.token);
    byId("place").replaceChildren(place === null ? "" : `Token ${place + 1}`, element("span", { class: "muted" }, shown.some((side) => side.state.pinned) ? " · held (Esc or click lets it go)" : ""));
    const words = (label, of) => element("tr", {}, element("th", { scope: "row" }, label), ...tokens.map((token) => element("td", {}, token ? of(token) : "–")));
    const groups = METRICS.map(({ title, fields }) => element("tbody", {},
      element("tr", {}, element("th", { scope: "rowgroup", class: "rowgroup", colspan: shown.length + 1 }, title)),
      ...fields.map(([name, label, unit, meaning]) => element("tr", { "data-field": name, title: unit ? `${meaning}; ${unit}` : meaning },
        element("th", { scope: "row" }, label),
        ...tokens.map((token) => element("td", { class: "value" }, token ? numberNode(token[name]) : "–"))))));
    byId("details-body").replaceChildren(element("table", { class: "sides" },
      head(group),
      element("tbody", {},
        // The blank before a word must not break the line.
        words("token", (token) => element("span", { class: "word" }, quoted(token.text, token.token_id).replace("“ ", "“\u00a0"))),
        words("regime", (token) => element("span", { class: "token", "data-regime": token.regime }, REGIMES[token.regime].title)),
        words("action", (token) => (token.type === "retracted" ? `${token.action}, taken back` : token.action)),
        words("position", (token) => numberNode(token.position))),
      ...groups));
    if (shown.some((side) => side.state.pinned)) byId("announcement").textContent = `Token ${place + 1}. ${shown.map((side, i) => `${side.name}: ${tokens[i] ? `${quoted(tokens[i].text, tokens[i].token_id)}, ${REGIMES[tokens[i].regime].title}, entropy ${number(tokens[i].entropy)} bits` : "ended"}`).join(". ")}`;
  };
  group.on("cursor", update);
}
