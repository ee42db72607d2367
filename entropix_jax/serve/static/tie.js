// The two branches of the shown text that tie: the reader chooses one while the row waits.

import { byId, element } from "./dom.js";
import { fail } from "./failure.js";

export class Tie {
  constructor(session, api) {
    Object.assign(this, { session, api, shown: null });
  }

  show() {
    const node = this.session.current;
    const choice = node?.choice ?? null;
    if (choice === this.shown) return;
    this.shown = choice;
    byId("tie").hidden = !choice;
    byId("tie-texts").replaceChildren(...(choice?.texts ?? []).map((text, index) => element("button", { type: "button", class: "choice", onclick: () => this.choose(node, index) }, `“${text}”`)));
  }

  choose(node, index) {
    const { id } = node.choice;
    node.choice = null;
    this.show();
    this.api.ask("/v1/entropix/choice", { method: "POST", json: { id, index } }).catch(fail);
  }
}
