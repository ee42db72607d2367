// Several runs of one prompt, side by side: which of them are shown, where they part, and the one
// place in all of them that someone looks at. A place is counted from 0 in the committed tokens.

import { valuesOf } from "./regimes.js";
import { State } from "./state.js";

export class Comparison {
  constructor(traces, rowsOf) {
    this.sides = traces.flatMap((facts, trace) => sidesOf(facts, trace, rowsOf[trace], traces.length > 1));
    this.sides.forEach((side, i) => Object.assign(side, { number: i, name: nameOf(i) }));
    this.hidden = new Set(); // regimes
    this.place = null;
    this.listeners = {};
    this.following = false;
    for (const side of this.sides) {
      side.state.hidden = this.hidden;
      side.state.on("token", () => this.follow(side));
    }
    this.align();
  }

  // Kinds: "row" (other sides are shown), "cursor", "hidden", "theme".
  on(kind, listener) {
    (this.listeners[kind] ??= []).push(listener);
  }

  tell(kind) {
    this.listeners[kind]?.forEach((listener) => listener());
  }

  get shown() {
    return this.sides.filter((side) => side.shown);
  }

  // A run is shown with the regimes that it had.
  regimeOf = (token) => token.regime;

  toggle(regime) {
    if (!this.hidden.delete(regime)) this.hidden.add(regime);
    this.shown.forEach((side) => side.state.tell("hidden"));
    this.tell("hidden");
  }

  // One at least stays.
  toggleSide(side) {
    if (side.shown && this.shown.length === 1) return;
    side.shown = !side.shown;
    this.refresh();
  }

  refresh() {
    this.align();
    for (const { state } of this.shown) state.tell("row");
    this.tell("row");
    this.go(this.place ?? 0, { pin: false });
  }

  // How many tokens all shown sides begin with, and where each of them parts from the first one:
  // null where neither has anything that the other lacks.
  align() {
    const [first, ...others] = this.shown;
    const partings = others.map((side) => partingOf(first, side));
    others.forEach((side, i) => (side.parting = partings[i]));
    const known = partings.filter((place) => place !== null);
    first.parting = known.length ? Math.min(...known) : null;
    this.common = first.parting ?? first.tokens.length;
  }

  // Someone points at a token of one side: the others show what they have at its place.
  follow(source) {
    const { token, pinned } = source.state;
    if (this.following || !token) return;
    this.moveTo(placeOf(source, token), pinned, source);
  }

  go(place, { pin } = {}) {
    if (pin === undefined && this.shown.some((side) => side.state.pinned)) return;
    this.moveTo(place, pin ?? false, null);
  }

  moveTo(place, pin, source) {
    this.following = true;
    this.place = place;
    for (const side of this.shown) {
      if (side !== source) side.state.select(side.tokens[place] ?? null, { pin, scroll: true });
    }
    this.following = false;
    this.tell("cursor");
  }
}

function sidesOf(facts, trace, rows, several) {
  const all = rows.size ? [...rows.values()] : [{ number: 0, items: [], tokens: [] }];
  return all.map((row, i) => ({
    facts,
    row,
    tokens: row.tokens,
    of: all.length,
    about: facts.rows.find((one) => one.row === row.number) ?? { tokens: 0, retracted: 0 },
    trace,
    shown: several ? i === 0 : true,
    parting: null,
    state: new State(facts, new Map([[row.number, row]]), valuesOf(facts)),
  }));
}

function nameOf(i) {
  const letter = String.fromCharCode(65 + (i % 26));
  return i < 26 ? letter : `${letter}${Math.floor(i / 26) + 1}`;
}

export function placeOf(side, token) {
  return token.position - side.row.items[0].position;
}

// Models of different vocabularies may write the same text by other numbers.
function sameToken(one, other, numbers) {
  return one.text === other.text && (!numbers || one.token_id === other.token_id);
}

function partingOf(one, other) {
  const numbers = one.facts.model === other.facts.model;
  const most = Math.max(one.tokens.length, other.tokens.length);
  for (let i = 0; i < most; i++) {
    const [a, b] = [one.tokens[i], other.tokens[i]];
    if (!a || !b || !sameToken(a, b, numbers)) return i;
  }
  return null;
}
