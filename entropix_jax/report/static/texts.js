// The texts of a page: which are shown, where they diverge, and which place is selected in all of them. A place counts
// committed tokens from 0.

import { boundsOf, classify, valuesOf } from "./regimes.js";

export class Texts {
  // `single`: one text is shown at a time.
  constructor(traces, rowsOf, { single }) {
    this.single = single;
    this.sides = [...document.querySelectorAll(".side")].map((card, number) => newSide(card, number, traces, rowsOf));
    this.sides.forEach((side, i) => (side.shown = single ? i === 0 : traces.length === 1 || this.sides[i - 1]?.trace !== side.trace));
    this.hidden = new Set(); // regimes
    this.marked = null; // tokens selected on the plane; null: no selection
    this.place = null;
    this.pinned = false;
    this.listeners = {};
    this.original = valuesOf(traces[0]);
    this.values = { ...this.original };
  }

  // Kinds: "sides", "token", "hidden", "marked", "bounds", "theme".
  on(kinds, listener) {
    for (const kind of kinds.split(" ")) (this.listeners[kind] ??= []).push(listener);
  }

  tell(kind, details) {
    this.listeners[kind]?.forEach((listener) => listener(details));
  }

  get shown() {
    return this.sides.filter((side) => side.shown);
  }

  // The thresholds were changed on the page of one run.
  get changed() {
    return Object.keys(this.values).some((key) => this.values[key] !== this.original[key]);
  }

  get bounds() {
    return this.single ? boundsOf(this.sides[0].facts.boxes, this.values) : this.shown[0].bounds;
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

  // At least one text stays.
  toggleSide(side) {
    if (this.single) this.sides.forEach((one) => (one.shown = one === side));
    else if (!side.shown || this.shown.length > 1) side.shown = !side.shown;
    this.refresh();
  }

  refresh() {
    this.align();
    this.marked = null;
    this.tell("sides");
    this.select(this.single ? 0 : this.place ?? 0, { pin: false });
  }

  mark(tokens) {
    this.marked = tokens && new Set(tokens);
    this.tell("marked");
  }

  // `pin`: true holds the place, false releases it, undefined points at it unless another is held. `side` and `token`
  // say which text led here, and by which token.
  select(place, { side = null, token = null, pin, scroll = false } = {}) {
    if (this.pinned && pin === undefined) return;
    this.pinned = pin ?? false;
    this.place = place;
    for (const one of this.shown) one.token = one === side ? token : one.tokens[place] ?? null;
    this.tell("token", { scroll, side });
  }

  selectToken(side, token, options) {
    this.select(placeOf(side, token), { side, token, ...options });
  }

  // `common`: how many tokens all shown texts begin with. `parting`: the place where a text diverges from the first one;
  // null where it does not.
  align() {
    const [first, ...others] = this.shown;
    for (const side of others) side.parting = partingOf(first, side);
    const known = others.map((side) => side.parting).filter((place) => place !== null);
    first.parting = known.length ? Math.min(...known) : null;
    this.common = first.parting ?? first.tokens.length;
  }
}

function newSide(card, number, traces, rowsOf) {
  const [trace, rowNumber] = [Number(card.dataset.trace), Number(card.dataset.row)];
  const facts = traces[trace];
  const { items, tokens } = rowsOf[trace].get(rowNumber) ?? { items: [], tokens: [] };
  return {
    card, number, trace, facts, items, tokens,
    name: card.dataset.name,
    box: card.querySelector(".text"),
    spans: [...card.querySelectorAll(".token")],
    about: facts.rows.find((row) => row.row === rowNumber) ?? { row: rowNumber, retracted: 0 },
    bounds: boundsOf(facts.boxes, valuesOf(facts)),
    token: null,
    parting: null,
  };
}

export function placeOf(side, token) {
  return token.position - side.items[0].position;
}

function partingOf(one, other) {
  // Models with different vocabularies have other ids for the same text.
  const key = (token) => token && (one.facts.model === other.facts.model ? `${token.token_id} ${token.text}` : token.text);
  const most = Math.max(one.tokens.length, other.tokens.length);
  for (let i = 0; i < most; i++) if (key(one.tokens[i]) !== key(other.tokens[i])) return i;
  return null;
}
