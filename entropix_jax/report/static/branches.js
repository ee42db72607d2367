// Branches as small trees, and retracted tokens.

import { byId, element } from "./dom.js";
import { number, numberNode, quoted, quotedToken, visible } from "./format.js";

const CONTEXT = 8; // tokens shown before a branch

export function showBranches(texts) {
  const several = byId("branches-several");
  let cards = new Map();
  const fill = () => {
    const { side } = texts;
    const all = side.tokens.filter((token) => token.branches);
    const forked = all.filter((token) => token.branches.length > 1);
    byId("branches").hidden = all.length === 0;
    byId("branches-count").textContent = `${all.length} in all, ${forked.length} with several candidates.`;
    several.parentElement.hidden = forked.length === 0 || forked.length === all.length;
    const shown = several.checked && forked.length > 0 ? forked : all;
    cards = new Map(shown.map((token) => [token, tree(token, side, texts)]));
    byId("branches-list").replaceChildren(...cards.values());
  };
  texts.on("sides", fill);
  several.addEventListener("change", fill);
  texts.on("token", ({ scroll }) => {
    const list = byId("branches-list");
    list.querySelector(".current")?.classList.remove("current");
    const node = cards.get(texts.side.token);
    node?.classList.add("current");
    if (node && scroll) list.scrollTop = node.offsetTop - list.offsetTop;
  });
}

export function bestFirst(branches) {
  return [...branches].sort((a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity));
}

function tree(token, side, texts) {
  const scores = token.branches.map((branch) => branch.score).filter((score) => score != null);
  const [best, worst] = [Math.max(...scores), Math.min(...scores)];
  const before = side.tokens.filter((other) => other.position < token.position).slice(-CONTEXT).map((other) => other.text).join("");
  const leaves = bestFirst(token.branches).map(({ text, tokens, score, chosen }) => {
    const share = best === worst ? 1 : (score - worst) / (best - worst);
    return element("li", { class: chosen ? "leaf chosen" : "leaf" },
      element("span", { class: "leaf-text" }, quoted(text, tokens[0], token.top)),
      element("span", { class: "leaf-score" },
        score == null ? "no score" : element("meter", { min: 0, max: 1, value: 0.08 + 0.92 * share, "aria-hidden": "true" }),
        score == null ? null : element("data", { value: score }, number(score)),
        chosen ? element("b", { class: "tag" }, "kept") : null));
  });
  return element("li", { class: "tree" },
    element("button", { type: "button", class: "root", onclick: () => texts.selectToken(token, { pin: true, scroll: true }) },
      element("span", { class: "muted" }, "position ", numberNode(token.position)), element("span", { class: "context" }, `…${visible(before)}`)),
    element("ul", { "aria-label": "candidates, best first" }, ...leaves),
    token.ambiguous ? element("p", { class: "note" }, "The two best scores differ by less than the margin.") : null);
}

export function showRetractions(texts) {
  texts.on("sides", () => {
    const { side } = texts;
    const retracted = side.items.filter((token) => token.type === "retracted");
    byId("retractions").hidden = retracted.length === 0;
    byId("retractions-list").replaceChildren(...retracted.map((token) => element("tr", {},
      element("td", {}, element("button", { type: "button", class: "link", onclick: () => texts.selectToken(token, { pin: true, scroll: true }), "aria-label": `show position ${token.position}` }, numberNode(token.position))),
      element("td", {}, tokenNode(token)),
      element("td", {}, token.replacement ? tokenNode(token.replacement) : "no replacement: the run ended"),
      element("td", { class: "value" }, numberNode(token.entropy)))));
  });
}

function tokenNode(token) {
  return element("span", { class: `token ${token.type}`, "data-regime": token.regime }, quotedToken(token));
}
