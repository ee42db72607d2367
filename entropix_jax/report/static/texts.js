// The texts of a page: which of them is shown, and which place is selected in it. A place counts committed tokens
// from 0.

import { boundsOf, classify, valuesOf } from "./regimes.js";

export class Texts {
  constructor(facts, rows) {
    this.facts = facts;
    this.sides = [...document.querySelectorAll(".side")].map((card) => newSide(card, rows));
    this.side = this.sides[0]; // the one that is shown
    this.hidden = new Set(); // regimes
    this.marked = null; // tokens selected on the plane; null: no selection
    this.place = null;
    this.pinned = false;
    this.listeners = {};
    this.original = valuesOf(facts);
    this.values = { ...this.original };
  }

  // Kinds: "sides", "token", "hidden", "marked", "bounds", "theme".
  on(kinds, listener) {
    for (const kind of kinds.split(" ")) (this.listeners[kind] ??= []).push(listener);
  }

  tell(kind, details) {
    this.listeners[kind]?.forEach((listener) => listener(details));
  }

  // The thresholds were changed.
  get changed() {
    return Object.keys(this.values).some((key) => this.values[key] !== this.original[key]);
  }

  get bounds() {
    return boundsOf(this.facts.boxes, this.values);
  }

  regimeOf = (token) => (this.changed ? classify(token, this.changedBounds) : token.regime);

  setValues(values) {
    this.values = values;
    this.changedBounds = this.bounds;
    this.tell("bounds");
  }

  toggleRegime(regime) {
    if (!this.hidden.delete(regime)) this.hidden.add(regime);
    this.tell("hidden");
  }

  show(side) {
    this.side = side;
    this.marked = null;
    this.tell("sides");
    this.select(0, { pin: false });
  }

  mark(tokens) {
    this.marked = tokens && new Set(tokens);
    this.tell("marked");
  }

  // `pin`: true holds the place, false releases it, undefined points at it unless another is held. `token` says which
  // token led here.
  select(place, { token = null, pin, scroll = false } = {}) {
    if (this.pinned && pin === undefined) return;
    this.pinned = pin ?? false;
    this.place = place;
    this.side.token = token ?? this.side.tokens[place] ?? this.side.items[0];
    this.tell("token", { scroll });
  }

  selectToken(token, options) {
    this.select(placeOf(this.side, token), { token, ...options });
  }
}

function newSide(card, rows) {
  const row = Number(card.dataset.row);
  const { items, tokens } = rows.get(row);
  return { card, row, items, tokens, box: card.querySelector(".text"), spans: [...card.querySelectorAll(".token")], token: null };
}

export function placeOf(side, token) {
  return token.position - side.items[0].position;
}

// The inverse of `placeOf`: positions are shown, places are not.
export function positionAt({ items }, place) {
  return (items[0]?.position ?? 0) + place;
}
