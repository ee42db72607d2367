// Texts as they come from the server: each frame of the page adds a share of what came.

import { addItem } from "./data.js";
import { onceAFrame } from "./dom.js";
import { fail } from "./failure.js";

const AT_ONCE = 64; // tokens that a frame adds at most

export class Stream {
  // What it tells: `grow(node, items)` as these are added to a text, `end(node)` once it has all, `learn(node)` once
  // the facts of its row are known, `change()` when a text begins and after each frame.
  constructor(session, api, tell) {
    this.session = session;
    this.api = api;
    this.tell = tell;
    this.grow = onceAFrame(() => this.addShare());
  }

  get running() {
    return this.session.nodes.some(({ stopper }) => stopper);
  }

  // `begun()`: called once the text has begun. Returns whether it did.
  async run(node, { path, body }, begun = null) {
    node.stopper = new AbortController();
    const chosen = node.given?.length ?? 0;
    let seen = 0;
    let reason = null;
    this.tell.change();
    try {
      for await (const { choices } of this.api.stream(path, body, node.stopper.signal)) for (const { entropix: own = {} } of choices) {
        begun?.();
        begun = null;
        if (own.row && !node.row) {
          node.row = own.row;
          this.learn(node).catch(fail);
        }
        for (const token of own.tokens ?? []) if (seen++ < chosen) token.chosen = true;
        node.pending.push(...(own.tokens ?? []));
        reason = own.finish_reason ?? reason;
        this.grow();
      }
    } catch (error) {
      reason = error.name === "AbortError" ? "cancelled" : "error";
      if (reason === "error") fail(error);
    }
    node.stopper = null;
    node.reason = reason;
    this.grow();
    const empty = reason === "error" && seen === 0 && !node.row;
    if (empty) this.session.forget(node);
    return !empty;
  }

  async learn(node) {
    node.facts = await this.api.get(`/v1/rows/${node.row}`);
    this.tell.learn(node);
  }

  addShare() {
    for (const node of this.session.nodes) {
      const items = node.pending.splice(0, AT_ONCE);
      for (const item of items) addItem(node, item);
      if (items.length) this.tell.grow(node, items);
      if (node.pending.length) {
        this.grow();
      } else if (node.reason && !node.ended) {
        node.ended = node.reason;
        this.tell.end(node);
      }
    }
    this.tell.change();
  }

  stop() {
    for (const { stopper } of this.session.nodes) stopper?.abort();
  }

  // Nobody reads what is out of sight.
  stopUnseen() {
    for (const { id, stopper } of this.session.nodes) if (!this.session.state.seen.has(id)) stopper?.abort();
  }
}
