// P(wrong) as a line under a text, if its tokens have it.

import { element } from "./dom.js";
import { percent } from "./format.js";

const svg = (tag, attributes) => Object.entries(attributes).reduce((node, [name, value]) => (node.setAttribute(name, value), node), document.createElementNS("http://www.w3.org/2000/svg", tag));

export class WrongLine {
  // `choose(token)` is called with the token at a pressed place of the line.
  constructor(figure, choose) {
    this.figure = figure;
    this.tokens = [];
    this.caption = element("figcaption");
    this.plot = svg("svg", { preserveAspectRatio: "none", role: "img" });
    figure.replaceChildren(this.caption, this.plot);
    this.plot.addEventListener("click", ({ clientX }) => {
      const { left, width } = this.plot.getBoundingClientRect();
      choose(this.tokens[Math.min(Math.floor(((clientX - left) / width) * this.tokens.length), this.tokens.length - 1)]);
    });
  }

  show(tokens, selected = null) {
    this.tokens = tokens;
    this.figure.hidden = !tokens.some((token) => token.p_wrong != null);
    if (this.figure.hidden) return;
    const heights = tokens.map((token) => 1 - (token.p_wrong ?? 0));
    this.plot.setAttribute("viewBox", `0 0 ${tokens.length} 1`);
    this.cursor = svg("path", { class: "cursor" });
    this.plot.replaceChildren(
      svg("path", { class: "half", d: `M0 .5H${tokens.length}` }),
      svg("path", { d: `M0 1${heights.map((y, i) => `V${y}H${i + 1}`).join("")}V1Z` }),
      this.cursor);
    this.select(selected);
  }

  select(token) {
    const most = this.tokens.reduce((best, { p_wrong: p = 0 }) => Math.max(best, p), 0);
    const at = this.tokens.indexOf(token);
    this.cursor?.setAttribute("d", at < 0 ? "" : `M${at + 0.5} 0V1`);
    const words = [`at most ${percent(most)}`, at >= 0 && token.p_wrong != null && `${percent(token.p_wrong)} at the selected token`].filter(Boolean).join(", ");
    this.caption.replaceChildren(element("b", {}, "P(wrong)"), element("span", { class: "muted" }, ` of the answer: ${words}`));
    this.plot.setAttribute("aria-label", `P(wrong) along the text: ${words}`);
  }
}

// The line of a page's texts.
export function showWrong(texts) {
  const figure = document.getElementById("wrong");
  const line = new WrongLine(figure, (token) => texts.selectToken(token, { pin: true, scroll: true }));
  texts.on("sides", () => line.show(texts.side.tokens));
  texts.on("token", () => line.select(texts.side.token));
}
