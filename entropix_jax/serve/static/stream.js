// Streams texts from the server: each frame of the page adds a share of the received tokens.

import { addItem } from "./data.js";
import { onceAFrame } from "./dom.js";
import { fail, succeed } from "./failure.js";
import { short } from "./generate.js";

const AT_ONCE = 64; // maximum number of tokens that a frame adds

export class Stream {
  // Callbacks of `tell`: `grow(node, items)` when tokens are added to a text, `end(node)` after its last one, `learn(node)`
  // when the facts of its row are known, `change()` when a text starts and after each frame.
  constructor(session, api, tell) {
    this.session = session;
    this.api = api;
    this.tell = tell;
    this.grow = onceAFrame(() => this.addShare());
  }

  get running() {
    return this.session.nodes.some(({ stopper }) => stopper);
  }

  // Calls `begun()` when the text has started, and returns whether it did. `reread()` returns the request for a row that the
  // server no longer has.
  async run(node, { path, body }, { begun = null, reread = null } = {}) {
    node.stopper = new AbortController();
    const timing = { asked: performance.now(), before: node.tokens.length };
    let started = false;
    let reason = null;
    this.tell.change();
    try {
      for await (const { choices, comment } of this.api.stream(path, body, node.stopper.signal)) {
        node.comment = comment;
        if (comment) this.tell.change();
        for (const { entropix: own = {} } of choices) {
          if (!started) succeed();
          if (!started) begun?.();
          started = true;
          const told = own.continuations?.[0] ?? own;
          if (told.row && !node.row) {
            Object.assign(node, { row: told.row, server: this.api.server });
            this.learn(node).catch(fail);
          }
          const fresh = told.tokens ?? [];
          joinPositions(node, fresh);
          node.pending.push(...fresh);
          node.choice = own.choice ?? (fresh.length ? null : node.choice);
          if (fresh.length && !timing.first) Object.assign(timing, { first: performance.now(), firsts: fresh.filter(({ type }) => type === "token").length });
          reason = told.finish_reason ?? reason;
          if (own.continuations) this.addContinuations(node, own);
          this.grow();
        }
      }
    } catch (error) {
      if (reread && !started && error.code === "row_not_found") return this.run(node, reread(), { begun });
      reason = error.name === "AbortError" ? "cancelled" : this.api.server === null ? "lost" : "error";
      if (reason !== "cancelled") fail(error);
    }
    node.stopper = node.choice = null;
    node.reason = reason;
    node.timing = { ...timing, end: performance.now() };
    this.grow();
    const empty = ["error", "lost"].includes(reason) && !node.row && !node.items.length && !node.pending.length;
    if (empty) this.session.forget(node);
    return !empty;
  }

  // Adds the continuations of a search to the tree, below the texts that they part from: the first one is the text itself.
  // Shows the chosen one.
  addContinuations(node, { continuations, chosen, method, votes, answer }) {
    const { session } = this;
    const nodes = [node];
    for (const item of node.pending.splice(0)) addItem(node, item);
    const start = node.tokens[0]?.position ?? 0;
    for (const { parent = 0, position = start, tokens, row, finish_reason: reason } of continuations.slice(1)) {
      const label = short(tokens.map(({ text }) => text).join("")) || "⟨no text⟩";
      const next = session.add({ parent: nodes[parent], at: position - start, label, prompt: node.prompt, messages: node.messages, sampler: node.sampler, row, server: this.api.server, reason });
      for (const item of tokens) addItem(next, item);
      if (row) this.learn(next).catch(fail);
      nodes.push(next);
    }
    const counted = answer in votes ? `, ${votes[answer]} votes for “${answer}”` : "";
    nodes[chosen].about = `, chosen by ${method} from ${nodes.length} texts${counted}`;
    const seen = new Set([...session.state.seen, ...nodes.map(({ id }) => id)]);
    session.change({ seen, current: node === session.current ? nodes[chosen].id : session.state.current }, { silent: true });
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

  // Stops hidden texts.
  stopUnseen() {
    for (const { id, stopper } of this.session.nodes) if (!this.session.state.seen.has(id)) stopper?.abort();
  }
}

// Positions of a text's tokens follow one another, even if another row continues it.
function joinPositions(node, fresh) {
  if (!fresh.length) return;
  node.shift ??= node.items.length ? node.items[0].position + node.tokens.length - fresh[0].position : 0;
  for (const token of fresh) token.position += node.shift;
}
