// What is shown now, and who wants to know when that changes.

import { boundsOf, classify } from "./regimes.js";

export class State {
  constructor(facts, rows, values) {
    Object.assign(this, { facts, rows, values, original: { ...values } });
    this.row = rows.values().next().value;
    this.token = null;
    this.pinned = false; // while it is, pointing at something else selects nothing
    this.hidden = new Set(); // regimes
    this.marked = null; // tokens that were picked out on the plane; null: none
    this.listeners = {};
    this.bounds = boundsOf(facts.boxes, values);
  }

  // Kinds: "row", "token", "hidden", "marked", "bounds".
  on(kind, listener) {
    (this.listeners[kind] ??= []).push(listener);
  }

  tell(kind, ...details) {
    this.listeners[kind]?.forEach((listener) => listener(...details));
  }

  get changed() {
    return Object.keys(this.values).some((key) => this.values[key] !== this.original[key]);
  }

  // The regime that the page shows: the run's own, or that of other bounds.
  regimeOf = (token) => (this.changed ? classify(token, this.bounds) : token.regime);

  chooseRow(number) {
    this.row = this.rows.get(number);
    this.token = null;
    this.pinned = false;
    this.marked = null;
    this.tell("row");
    this.select(this.row.tokens[0] ?? null);
  }

  // `pin`: true keeps the token, false lets it go, undefined: someone only points at it.
  select(token, { pin, scroll = false } = {}) {
    if (this.pinned && pin === undefined) return;
    this.pinned = pin ?? false;
    this.token = token;
    this.tell("token", { scroll });
  }

  toggle(regime) {
    if (!this.hidden.delete(regime)) this.hidden.add(regime);
    this.tell("hidden");
  }

  mark(tokens) {
    this.marked = tokens && new Set(tokens);
    this.tell("marked");
  }

  setBounds(values) {
    this.values = values;
    this.bounds = boundsOf(this.facts.boxes, values);
    this.tell("bounds");
  }
}
