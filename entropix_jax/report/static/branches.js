// Branches as small trees, and tokens that were taken back.

import { byId, element } from "./dom.js";
import { number, numberNode, quoted, visible } from "./format.js";

const CONTEXT = 8; // tokens before a branch that are shown

export function showBranches(state) {
  const several = byId("branches-several");
  let cards = new Map();
  const fill = () => {
    const all = state.row.tokens.filter((token) => token.branches);
    const forked = all.filter((token) => token.branches.length > 1);
    byId("branches").hidden = all.length === 0;
    byId("branches-count").textContent = `${all.length} branchings, ${forked.length} of them between several candidates.`;
    if (forked.length === 0) several.checked = false;
    several.parentElement.hidden = forked.length === 0 || forked.length === all.length;
    const shown = several.checked ? forked : all;
    cards = new Map(shown.map((token) => [token, card(token, state)]));
    byId("branches-list").replaceChildren(...cards.values());
  };
  state.on("row", () => {
    several.checked = true;
    fill();
  });
  several.addEventListener("change", fill);
  state.on("token", ({ scroll }) => {
    byId("branches-list").querySelector(".current")?.classList.remove("current");
    const node = cards.get(state.token);
    node?.classList.add("current");
    const list = byId("branches-list");
    if (node && scroll) list.scrollTop = node.offsetTop - list.offsetTop;
  });
}

function card(token, state) {
  const scores = token.branches.map((branch) => branch.score).filter((score) => score != null);
  const best = Math.max(...scores);
  const worst = Math.min(...scores);
  const before = state.row.tokens.filter((other) => other.position < token.position).slice(-CONTEXT).map((other) => other.text).join("");
  const leaves = [...token.branches].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity)).map((branch) => {
    const share = best === worst ? 1 : (branch.score - worst) / (best - worst);
    return element("li", { class: branch.chosen ? "leaf chosen" : "leaf" },
      element("span", { class: "leaf-text" }, quoted(branch.text, branch.tokens[0])),
      element("span", { class: "leaf-score" },
        branch.score == null ? "no score" : element("meter", { min: 0, max: 1, value: 0.08 + 0.92 * share, "aria-hidden": "true" }),
        branch.score == null ? null : element("data", { value: branch.score }, number(branch.score)),
        branch.chosen ? element("b", { class: "badge" }, "kept") : null));
  });
  return element("li", { class: "tree" },
    element("button", { type: "button", class: "root", onclick: () => state.select(token, { pin: true, scroll: true }) },
      element("span", { class: "muted" }, "position ", numberNode(token.position)), element("span", { class: "context" }, `…${visible(before, token.token_id)}`)),
    element("ul", { "aria-label": "candidates, the best first" }, ...leaves),
    token.ambiguous ? element("p", { class: "note" }, "Too close to call: the two best scores lie within the margin.") : null);
}

export function showRetractions(state) {
  state.on("row", () => {
    const gone = state.row.items.filter((token) => token.type === "retracted");
    byId("retractions").hidden = gone.length === 0;
    byId("retractions-list").replaceChildren(...gone.map((token) => retraction(token, state)));
  });
}

function retraction(token, state) {
  const after = token.replacement;
  return element("tr", {},
    element("td", {}, element("button", { type: "button", class: "link", onclick: () => state.select(token, { pin: true, scroll: true }), "aria-label": `show position ${token.position}` }, numberNode(token.position))),
    element("td", {}, element("span", { class: "token retracted", "data-regime": token.regime }, quoted(token.text, token.token_id))),
    element("td", {}, after ? element("span", { class: "token", "data-regime": after.regime }, quoted(after.text, after.token_id)) : "nothing: the run ended here"),
    element("td", {}, numberNode(token.entropy)));
}
