// The legend: the regimes, and the share of a text's tokens in each.

import { element } from "./dom.js";
import { percent, regimeNode } from "./format.js";
import { REGIMES, occupancy } from "./regimes.js";

export class Legend {
  constructor(list) {
    this.shares = new Map(Object.keys(REGIMES).map((regime) => [regime, element("span", { class: "share", id: `share-${regime}` })]));
    list.append(...[...this.shares].map(([regime, share]) => element("li", { title: REGIMES[regime].says }, regimeNode(regime), " ", share)));
  }

  // Counts the tokens of another text.
  show(tokens) {
    this.counts = occupancy([]);
    this.add(tokens);
  }

  // Counts new tokens.
  add(items) {
    for (const { type, regime } of items) if (type === "token") this.counts[regime] += 1;
    const all = Object.values(this.counts).reduce((sum, count) => sum + count, 0);
    for (const [regime, share] of this.shares) share.textContent = percent(this.counts[regime] / Math.max(all, 1));
  }
}
