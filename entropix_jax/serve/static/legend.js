// The legend: what each regime means, what the sampler does there, and the share of a text's tokens.

import { element } from "./dom.js";
import { percent, regimeNode } from "./format.js";
import { REGIMES, occupancy } from "./regimes.js";
import { habitOf } from "./sentences.js";

export class Legend {
  constructor(list) {
    this.shares = new Map(Object.keys(REGIMES).map((regime) => [regime, element("span", { class: "share", id: `share-${regime}` })]));
    this.rows = new Map(Object.keys(REGIMES).map((regime) => [regime, element("li", {}, regimeNode(regime), " ", this.shares.get(regime), element("span", { class: "says" }))]));
    list.append(...this.rows.values());
  }

  // Explains the regimes of another text's sampler, if it is known.
  explain(facts) {
    for (const [regime, row] of this.rows) {
      const habit = habitOf(regime, facts);
      row.title = `Usually ${REGIMES[regime].says}.${habit && ` The sampler ${habit}.`}`;
      row.lastChild.textContent = row.title;
    }
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
