// Thresholds and other settings of the shown text: those that the reader moves regenerate it from the first decision
// that they change.

import { changesOf, firstChange } from "./decisions.js";
import { byId } from "./dom.js";
import { Plane } from "./plane.js";
import { boundsOf, classify, valuesOf } from "./regimes.js";
import { Settings } from "./settings.js";
import { placeOf } from "./texts.js";

export class Thresholds {
  // `recolour()`: the regimes of the tokens may be others; `goOn`: see `Generator`.
  constructor(session, { recolour, goOn }) {
    Object.assign(this, { session, recolour, goOn });
    const handlers = { move: (values) => this.move(values), drop: () => this.drop() };
    this.plane = new Plane(byId("plane"), handlers);
    this.settings = new Settings({ ...handlers, apply: (changes) => this.regenerate(changes) });
    this.clear();
  }

  // As the reader moved them; else the text's own.
  regimeOf = (token) => (this.bounds ? classify(token, this.bounds) : token.regime);

  clear() {
    [this.values, this.bounds] = [null, null];
    byId("first").textContent = "";
  }

  show({ items, tokens, facts }) {
    this.plane.show(items, facts, facts ? valuesOf(facts) : {}, this.regimeOf);
    this.settings.show(facts, tokens);
  }

  grow() {
    this.plane.grow();
  }

  end({ tokens, facts }) {
    if (!this.values) this.settings.show(facts, tokens); // not under the reader's hand
  }

  select(token) {
    this.plane.select(token);
  }

  move(values) {
    const node = this.session.current;
    this.values = values;
    this.bounds = boundsOf(node.facts.boxes, values);
    const problem = this.settings.refresh(values);
    const found = firstChange(node, {}, values);
    byId("first").textContent = problem || (found ? `The first decision that changes: token ${placeOf(node, node.items[found.index]) + 1}.` : "No decision changes.");
    this.plane.values = values;
    this.plane.redraw();
    this.recolour();
  }

  drop() {
    const { values } = this;
    const node = this.session.current;
    if (!values || !node) return;
    const changes = changesOf(node.facts, values);
    if (!this.settings.refresh(values) && Object.keys(changes).length) this.regenerate(changes, values);
  }

  // With changed settings, by their keys; `moved`: the thresholds, where those changed.
  regenerate(changes, moved = null) {
    const node = this.session.current;
    const found = firstChange(node, changes, moved);
    const words = Object.entries(changes).map(([key, value]) => `${key.replace("thresholds.", "")} = ${JSON.stringify(value)}`).join(", ");
    if (!found) {
      byId("first").textContent = `With ${words} no decision of this text changes.`;
      return;
    }
    const begun = () => (byId("first").textContent = `${words}: regenerated from token ${found.position + 1}, with the same seed.`);
    this.goOn(node, found.position, words, { sampler: changes, begun });
  }
}
