// The metrics of the selected token, and the glossary.

import { byId, element, themeColours } from "./dom.js";
import { METRICS, number, numberNode, percent, quoted, quotedToken, regimeNode, visible } from "./format.js";
import { regimeTitle } from "./regimes.js";
import { deedOf, forcedAround, reasonOf, shapeOf } from "./sentences.js";
import { placeOf } from "./texts.js";

function row(label, cells, attributes = {}) {
  return element("tr", attributes, element("th", { scope: "row" }, ...[label].flat()), ...cells.map((cell) => (cell.tagName === "TD" ? cell : element("td", {}, cell))));
}

export function showDetails(texts) {
  texts.on("token bounds", () => {
    const { token } = texts.side;
    const parts = tokenParts(token, { facts: texts.facts, tokens: texts.side.tokens, place: placeOf(texts.side, token), shown: texts.regimeOf(token), held: texts.pinned ? " · held (click or Esc releases)" : "" });
    byId("details-body").replaceChildren(...parts, ...looksOf(token), allMetrics(token));
    if (texts.pinned) byId("announcement").textContent = announcement(token);
  });
}

let unfolded = false; // whether the reader wants to see all metrics

export function allMetrics(token) {
  return element("details", { open: unfolded, ontoggle: (event) => (unfolded = event.target.open) }, element("summary", {}, "All metrics"), element("table", { class: "columns" }, ...metricRows(token)));
}

function metricRows(token) {
  return METRICS.map(({ title, fields }) => element("tbody", {},
    element("tr", {}, element("th", { scope: "rowgroup", class: "rowgroup", colspan: 3 }, title)),
    ...fields.filter(([name]) => token[name] != null).map(([name, label, unit, meaning]) => row(label,
      [element("td", { class: "value" }, numberNode(token[name])), element("td", { class: "unit" }, unit)],
      { "data-field": name, title: unit ? `${meaning}; ${unit}` : meaning }))));
}

// `facts`: the run's sampler, if known; `tokens`: the committed ones of its text; `place`: the number of tokens before it; `shown`: its regime by the current
// thresholds; `choose`: called with an alternative that replaces the token. `current`: the id of the token that the text has
// in this place.
export function tokenParts(token, { facts, tokens, place, shown, held, choose = null, current = null }) {
  const why = [shapeOf(token), reasonOf(token, facts)].filter(Boolean).map((words) => words.replace(/\.?$/, ".")).join(" ");
  const forced = forcedAround(token, tokens);
  return [
    element("p", { class: "word", id: "details-word" }, quotedToken(token)),
    element("p", { id: "why" }, regimeNode(token.regime), why && `: ${why}`),
    shown === token.regime ? "" : element("p", { class: "what-if" }, `With your thresholds: ${regimeTitle(shown)}`),
    element("p", {}, ...(token.chosen ? [element("b", {}, "chosen"), " by the reader"] : [element("b", {}, token.action), `: ${deedOf(token, facts, place)}.`])),
    forced ? element("p", { class: "note" }, token.action === "lookup" ? `Looked up: “${forced}”` : `Asked: “${forced}”`) : "",
    element("p", { class: "muted", title: "Positions count from 0, with the tokens of the prompt" }, "position ", numberNode(token.position), ", token id ", numberNode(token.token_id), held),
    ...notes(token).map((text) => element("p", { class: "note" }, text)),
    alternatives(token, choose, current),
  ];
}

function notes(token) {
  const found = [];
  if (token.type === "retracted") {
    const { replacement } = token;
    const unlikely = `this token was unlikely (${percent(Math.exp(token.logprob))}), and the sampler stepped back to it`;
    const why = { backspace: unlikely, phrases: "a banned phrase began here" }[replacement?.action] ?? "a token before it was retracted";
    found.push(replacement ? `Retracted: ${why}. Replaced by ${quotedToken(replacement)}.` : "Retracted.");
  }
  if (token.replaced?.length) found.push(`Replaces ${token.replaced.map(quotedToken).join(", ")}, retracted.`);
  if (token.loop) found.push("The text was repeating itself. The loop guard chose the arm.");
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

// Attention of the heads at a token: bars of entropy and varentropy, and the positions that three of them look at.
export function looksOf({ layers, layers_varentropy: spreads, attention }) {
  return [layers && headBars(layers, "entropy", "bits"), spreads && headBars(spreads, "varentropy", "bits²"), attention && looks(attention)].filter(Boolean);
}

// A bar for each head, a line for each layer.
function headBars(layers, name, unit) {
  const flat = layers.flat();
  const most = flat.reduce((a, b) => Math.max(a, b), 0.001);
  const least = flat.reduce((a, b) => Math.min(a, b), most);
  const range = `${number(least < 0.001 ? 0 : least)} to ${number(most)} ${unit}`;
  const [cell, gap] = [Math.max(5, Math.min(26, Math.floor(260 / layers[0].length))), layers.length > 12 ? 8 : 16];
  const canvas = element("canvas", { width: cell * layers[0].length * 2, height: gap * layers.length * 2, role: "img", "aria-label": `Attention ${name} of the heads of ${layers.length} layers: ${range}` });
  const ink = canvas.getContext("2d");
  ink.fillStyle = themeColours(["accent"]).accent;
  ink.scale(2, 2);
  layers.forEach((values, layer) => values.forEach((value, head) => {
    const height = (value / most) * (gap - 3);
    ink.globalAlpha = 0.25 + (0.75 * value) / most;
    ink.fillRect(head * cell, (layer + 1) * gap - 1 - height, cell - 2, height + 1);
  }));
  return element("figure", { class: "heads" },
    element("figcaption", {}, element("b", {}, `Attention ${name}`), element("span", { class: "muted" }, ` of each head, ${range}; first layer on top`)), canvas);
}

const LEAST = 0.005; // weight of a shown position

function looks(attention) {
  const places = (to) => to.filter(([, , weight], i) => !i || weight >= LEAST).map(([position, text, weight], i) => element("span", { title: `position ${position}` }, i ? ", " : "", `“${visible(text)}” `, element("span", { class: "muted" }, percent(weight))));
  return element("table", { class: "looks" }, element("caption", {}, "Looks at", element("span", { class: "muted" }, " · the sharpest heads of the upper layers")),
    element("tbody", {}, ...attention.map(({ layer, head, to }) => row(`layer ${layer}, head ${head}`, [element("td", {}, ...places(to))]))));
}

// The selected token, for screen readers.
function announcement(token) {
  const retracted = token.type === "retracted" ? "retracted, " : "";
  return `${quotedToken(token)}: ${retracted}${regimeTitle(token.regime)}, ${token.action}, entropy ${number(token.entropy)} bits`;
}

export function showGlossary() {
  byId("glossary").replaceChildren(...METRICS.flatMap(({ fields }) => fields).map(([, label, unit, meaning]) =>
    element("div", {}, element("dt", {}, unit ? `${label} (${unit})` : label), element("dd", {}, meaning))));
}
