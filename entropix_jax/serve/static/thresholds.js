// Thresholds and other settings of the shown text. Changing one regenerates the text from the first decision that it may
// change.

import { changesOf, firstChange } from "./decisions.js";
import { byId } from "./dom.js";
import { Plane } from "./plane.js";
import { boundsOf, classify, valuesOf } from "./regimes.js";
import { Settings } from "./settings.js";
import { positionAt } from "./texts.js";

export class Thresholds {
  // `recolour()` is called when regimes of tokens may have changed, `keep(changes)` with settings that change no decision;
  // `goOn`: see `Generator`.
  constructor(session, { recolour, keep, goOn }) {
    Object.assign(this, { session, recolour, keep, goOn });
    const handlers = { move: (values) => this.move(values), drop: () => this.drop() };
    this.plane = new Plane(byId("plane"), handlers);
    this.settings = new Settings({ ...handlers, apply: (changes) => this.regenerate(changes) });
    this.clear();
  }

  // The regime by the moved thresholds, or the text's own.
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
    if (!this.values && !Object.keys(this.settings.changes).length) this.settings.show(facts, tokens); // unless a slider is moving
  }

  select(token) {
    this.plane.select(token);
  }

  move(values) {
    const node = this.session.displayed;
    this.values = values;
    this.bounds = boundsOf(node.facts.boxes, values);
    const problem = this.settings.refresh(values);
    const found = firstChange(node, {}, values);
    byId("first").textContent = problem || (found ? `Will be regenerated from position ${positionAt(node, found.place)}.` : "No decision changes.");
    this.plane.values = values;
    this.plane.redraw();
    this.recolour();
  }

  drop() {
    const { values } = this;
    const node = this.session.displayed;
    if (!node?.facts || (values && this.settings.refresh(values))) return;
    const changes = { ...(values && changesOf(node.facts, values)), ...this.settings.changes };
    if (Object.keys(changes).length) this.regenerate(changes, values);
  }

  // Regenerates with changed settings, by their keys. `moved` has the thresholds if those changed.
  regenerate(changes, moved = null) {
    const { current: node, example } = this.session;
    if (!node && example) return (byId("first").textContent = "This text is recorded, so only its colours change. A text that you generate follows its settings.");
    const found = firstChange(node, changes, moved);
    const words = Object.entries(changes).map(([key, value]) => `${key.replace("thresholds.", "")} = ${JSON.stringify(value)}`).join(", ");
    if (!found) {
      byId("first").textContent = `With ${words} no decision of this text changes. Later texts have this setting.`;
      return this.keep(changes);
    }
    const begun = () => (byId("first").textContent = `${words}: regenerated from position ${positionAt(node, found.place)}, with the same seed.`);
    this.goOn(node, found.place, words, { sampler: changes, begun });
  }
}
