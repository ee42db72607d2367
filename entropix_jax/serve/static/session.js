// The texts of a session: a tree in which a text continues another one from a place. Changes of the view can be undone.

import { addItem } from "./data.js";

export class Session {
  constructor() {
    this.nodes = [];
    this.state = { current: null, beside: null, seen: new Set(), names: new Map() };
    this.past = [];
    this.future = [];
    this.shown = new Map(); // the state before a text was first shown
    this.listeners = [];
    this.example = null; // shown while no text is
  }

  on(listener) {
    this.listeners.push(listener);
  }

  // Adds a text. `at`: number of tokens copied from its parent; `own`: its other fields, such as `written`, what the reader
  // wrote before some of its tokens, and `base`, the number of tokens before its row's first one.
  add({ parent = null, at = 0, label, ...own }) {
    const node = { parent, at, label, written: [], base: 0, items: [], copied: 0, tokens: [], waiting: [], pending: [], ended: null, row: null, facts: null, ...own, id: this.nodes.length };
    this.nodes.push(node);
    if (parent && at > 0) {
      const last = parent.tokens[at - 1];
      for (const { replaced, replacement, index, ...record } of parent.items.slice(0, last.index + 1)) addItem(node, record);
      node.copied = node.items.length;
    }
    return node;
  }

  get current() {
    return this.nodes[this.state.current] ?? null;
  }

  // The text on the page.
  get displayed() {
    return this.current ?? this.example;
  }

  get beside() {
    return this.nodes[this.state.beside] ?? null;
  }

  nameOf(node) {
    return this.state.names.get(node.id) ?? node.label;
  }

  // Changes the state; `silent` changes cannot be undone.
  change(changes, { silent = false } = {}) {
    if (!silent) {
      this.past.push(this.state);
      this.future = [];
    }
    this.move({ ...this.state, ...changes });
  }

  move(state) {
    this.state = state;
    this.listeners.forEach((listener) => listener());
  }

  show(node, beside = null) {
    const seen = new Set(this.state.seen).add(node.id);
    this.shown.set(node.id, this.state);
    this.change({ seen, current: node.id, beside: beside?.id ?? null });
  }

  // Selects a text; null selects none, for a new one.
  walk(node) {
    const beside = node && this.state.beside !== node.id ? this.state.beside : null;
    this.change({ current: node?.id ?? null, beside }, { silent: true });
  }

  name(node, text) {
    const names = new Map(this.state.names);
    if (text) names.set(node.id, text);
    else names.delete(node.id);
    this.change({ names });
  }

  // Shows or hides the parent of the current text next to it.
  toggleBeside() {
    const { current, state } = this;
    if (current) this.change({ beside: state.beside === null ? this.parentOf(current)?.id ?? null : null });
  }

  // Hides the current text and its continuations.
  prune() {
    const node = this.current;
    if (!node) return;
    const gone = new Set([node, ...this.nodes.filter((one) => ancestors(one).includes(node))].map(({ id }) => id));
    const left = this.visible();
    const seen = new Set([...this.state.seen].filter((id) => !gone.has(id)));
    const before = left.slice(0, left.indexOf(node)).filter(({ id }) => seen.has(id));
    const next = (seen.has(node.parent?.id) ? node.parent : before.at(-1)) ?? left.find(({ id }) => seen.has(id));
    this.change({ seen, current: next?.id ?? null, beside: null });
  }

  // Removes a text that never started from all states.
  forget(node) {
    node.prompt = node.messages = null; // may be long
    const before = this.shown.get(node.id);
    const without = (state) => {
      if (!state.seen.has(node.id)) return state;
      const seen = new Set([...state.seen].filter((id) => id !== node.id));
      const place = state.current === node.id ? before : state;
      const [current, beside] = [place.current, place.beside].map((id) => (seen.has(id) ? id : null));
      return { ...state, seen, current, beside };
    };
    this.past = this.past.map(without);
    this.future = this.future.map(without);
    const state = without(this.state);
    for (const steps of [this.past, this.future]) while (steps.length && same(steps.at(-1), state)) steps.pop();
    this.move(state);
  }

  undo() {
    if (!this.past.length) return;
    this.future.push(this.state);
    this.move(this.past.pop());
  }

  redo() {
    if (!this.future.length) return;
    this.past.push(this.state);
    this.move(this.future.pop());
  }

  // The visible texts in the order of the tree; `depths` has their depths.
  visible() {
    const found = [];
    this.depths = new Map();
    const add = (parent, depth) => {
      for (const node of this.nodes) {
        if (!this.state.seen.has(node.id) || this.parentOf(node) !== parent) continue;
        this.depths.set(node, depth);
        found.push(node);
        add(node, depth + 1);
      }
    };
    add(null, 0);
    return found;
  }

  // The nearest visible ancestor.
  parentOf(node) {
    return ancestors(node).find(({ id }) => this.state.seen.has(id)) ?? null;
  }
}

// The last text of the turn before a text's.
export function turnBefore(node) {
  return ancestors(node).find(({ messages }) => messages !== node.messages) ?? null;
}

// The turns of a conversation before a text, oldest first.
export function turnsBefore(node) {
  const before = node && turnBefore(node);
  return before ? [...turnsBefore(before), before] : [];
}

// The parts of a text in order: its tokens, and what the reader wrote (`at` is the number of tokens before it).
export function partsOf({ tokens, written }) {
  const parts = tokens.map(({ text }) => ({ text }));
  for (const part of written.toReversed()) parts.splice(part.at, 0, part);
  return parts;
}

// The text up to a number of tokens.
export function textOf(node, count = node.tokens.length) {
  return partsOf({ tokens: node.tokens.slice(0, count), written: writtenIn(node, count) }).map(({ text }) => text).join("");
}

// The parts that the reader wrote, up to a number of tokens.
export function writtenIn({ written }, count) {
  return written.filter(({ at }) => at <= count);
}

// The text whose row continues after these tokens and written parts of `node`.
export function sourceOf(node, count, written) {
  return count < node.base || node.written.length > written.length ? sourceOf(node.parent, count, written) : node;
}

function same(one, other) {
  return one.current === other.current && one.beside === other.beside && one.names === other.names && one.seen.size === other.seen.size && [...one.seen].every((id) => other.seen.has(id));
}

function ancestors({ parent }) {
  return parent ? [parent, ...ancestors(parent)] : [];
}
