// The details of the selected token: alternatives, branches, attention heads and layers.

import { bestFirst } from "./branches.js";
import { byId, element, themeColours } from "./dom.js";
import { allMetrics, tokenParts } from "./details.js";
import { number, quoted } from "./format.js";

// Replaces the shown details. The focus stays in the panel.
export function showDetails(...nodes) {
  const body = byId("details-body");
  const focused = body !== document.activeElement && body.contains(document.activeElement);
  body.replaceChildren(...nodes);
  if (focused) body.focus({ preventScroll: true });
}

// `place` and `facts`: see `tokenParts`. `choose(tokens, text)` regenerates the text with these tokens in the token's place; null without kept rows. `current`: the
// id of the token that the text has there.
export function showToken(token, { facts, place, shown, held, choose, current }) {
  showDetails(
    ...tokenParts(token, { facts, place, shown, held: held ? " · held (click or Esc releases)" : "", choose, current }),
    ...(token.branches ? [branches(token, choose)] : []),
    ...(token.layers ? [heads(token.layers)] : []),
    allMetrics(token),
  );
}

function branches(token, choose) {
  return element("div", { class: "lost" },
    element("h3", {}, "Branches, best first"),
    element("ul", {}, ...bestFirst(token.branches).map(({ text, tokens, score, chosen }) => element("li", { class: chosen ? "leaf chosen" : "leaf" },
      chosen || !tokens.length || !choose ? element("span", { class: "leaf-text" }, quoted(text, tokens[0], token.top)) : element("button", { type: "button", class: "choice", "data-branch": "", title: "Continue with this branch", onclick: () => choose(tokens, text) }, quoted(text, tokens[0], token.top)),
      element("span", { class: "leaf-score" }, score == null ? "no score" : number(score), chosen ? element("b", { class: "tag" }, "kept") : null)))));
}

// A bar for each head, a line for each layer. Taller bars attend more widely.
function heads(layers) {
  const flat = layers.flat();
  const most = flat.reduce((a, b) => Math.max(a, b), 0.001);
  const least = flat.reduce((a, b) => Math.min(a, b), most);
  const range = `${number(least < 0.001 ? 0 : least)} to ${number(most)} bits`;
  const words = `Attention entropy of the heads of ${layers.length} layers: ${range}`;
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
    element("figcaption", {}, element("b", {}, "Heads and layers"), element("span", { class: "muted" }, ` attention entropy, ${range}; first layer on top`)), canvas);
}
