// The details of the selected token: alternatives, branches, attention heads and layers.

import { bestFirst } from "./branches.js";
import { byId, element } from "./dom.js";
import { allMetrics, looksOf, tokenParts } from "./details.js";
import { number, quoted } from "./format.js";

// Replaces the shown details. The focus stays in the panel.
export function showDetails(...nodes) {
  const body = byId("details-body");
  const focused = body !== document.activeElement && body.contains(document.activeElement);
  body.replaceChildren(...nodes);
  if (focused) body.focus({ preventScroll: true });
}

// `facts`, `tokens` and `place`: see `tokenParts`. `choose(tokens, text)` regenerates the text with these tokens in the token's place; null without kept rows. `current`: the
// id of the token that the text has there.
export function showToken(token, { facts, tokens, place, shown, held, choose, current }) {
  showDetails(
    ...tokenParts(token, { facts, tokens, place, shown, held: held ? " · held (click or Esc releases)" : "", choose, current }),
    ...(token.branches ? [branches(token, choose)] : []),
    ...looksOf(token),
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
