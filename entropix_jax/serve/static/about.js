// What is told of the token that someone points at: what else it could have been, its branches, heads and layers.

import { bestFirst } from "./branches.js";
import { byId, element, themeColours } from "./dom.js";
import { metricRows, tokenParts } from "./details.js";
import { number, quoted } from "./format.js";

// In place of what is shown, which may have had the focus.
export function showDetails(...nodes) {
  const body = byId("details-body");
  const focused = body !== document.activeElement && body.contains(document.activeElement);
  body.replaceChildren(...nodes);
  if (focused) body.focus({ preventScroll: true });
}

// `choose(tokens, text)`: goes on with these in the token's place; null: nothing can.
export function showToken(token, { shown, held, choose }) {
  const own = token.chosen ? [element("p", { class: "note" }, "You chose this token.")] : [];
  showDetails(
    ...tokenParts(token, { shown, held: held ? " · held (click or Esc releases)" : "", choose }),
    ...own,
    ...(token.branches ? [branches(token, choose)] : []),
    ...(token.layers ? [heads(token.layers)] : []),
    element("details", {}, element("summary", {}, "All metrics"), element("table", { class: "columns" }, ...metricRows([token], { units: true }))),
  );
}

function branches(token, choose) {
  return element("div", { class: "lost" },
    element("h3", {}, "Branches, best first"),
    element("ul", {}, ...bestFirst(token.branches).map(({ text, tokens, score, chosen }) => element("li", { class: chosen ? "leaf chosen" : "leaf" },
      chosen || !tokens.length || !choose ? element("span", { class: "leaf-text" }, quoted(text, tokens[0])) : element("button", { type: "button", class: "choice", "data-branch": "", title: "Go on with this branch", onclick: () => choose(tokens, text) }, quoted(text, tokens[0])),
      element("span", { class: "leaf-score" }, score == null ? "no score" : number(score), chosen ? element("b", { class: "tag" }, "kept") : null)))));
}

// A cell for each head, a line for each layer: the wider the attention, the taller its bar.
function heads(layers) {
  const flat = layers.flat();
  const most = flat.reduce((a, b) => Math.max(a, b), 0.001);
  const least = flat.reduce((a, b) => Math.min(a, b), most);
  const words = `Attention entropy of ${layers.length} layers' heads: ${number(least)} to ${number(most)} bits`;
  const [cell, gap] = [Math.max(5, Math.min(26, Math.floor(260 / layers[0].length))), layers.length > 12 ? 8 : 16];
  const canvas = element("canvas", { width: cell * layers[0].length * 2, height: gap * layers.length * 2, role: "img", "aria-label": words });
  const ink = canvas.getContext("2d");
  ink.fillStyle = themeColours(["accent"]).accent;
  ink.scale(2, 2);
  layers.forEach((values, layer) => values.forEach((value, head) => {
    const height = (value / most) * (gap - 3);
    ink.globalAlpha = 0.25 + (0.75 * value) / most;
    ink.fillRect(head * cell, (layer + 1) * gap - 1 - height, cell - 2, height + 1);
  }));
  return element("figure", { class: "heads" },
    element("figcaption", {}, element("b", {}, "Heads and layers"), element("span", { class: "muted" }, ` attention entropy, ${number(least)} to ${number(most)} bits; first layer on top`)), canvas);
}
