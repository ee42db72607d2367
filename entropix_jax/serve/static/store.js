// The sessions in this browser's IndexedDB: the texts of each are saved as they grow, and survive a reload. Nothing is sent
// anywhere.

import { addItem } from "./data.js";

const [NAME, KEY, TAILS] = ["entropix-jax", "entropix-jax-session", "entropix-jax-tails"];
const [MOST, MOST_TOKENS] = [50, 200_000]; // sessions, and tokens of all sessions
const WAIT = 1000; // ms from a new token to its save
const LEAVE = 500; // ms in which a page that is left releases its session
const LOST = "This browser stores no texts (its storage is full or off, as in a private window): save those that you need before you leave the page.";
const FIELDS = ["at", "label", "written", "base", "prompt", "messages", "template", "sampler", "row", "server", "ended", "about", "timing"];

export class Store {
  // `tell(problem)` is called with a sentence if texts cannot be stored, and with "" once they are again.
  constructor(session, tell) {
    Object.assign(this, { session, tell });
    this.saved = new Map(); // of each text, see `sizeOf`
    session.on(() => this.note(0));
    addEventListener("pagehide", () => {
      this.keepTails();
      this.save();
    });
    addEventListener("beforeunload", (event) => {
      if (this.failed && session.nodes.length) event.preventDefault();
    });
  }

  // Puts the texts of this tab's session into it. A session that is open in another tab is copied: returns whether it was.
  async restore() {
    const before = sessionStorage.getItem(KEY);
    const own = before && (await reserve(before));
    this.id = own ? before : newId();
    if (!own) await reserve(this.id);
    sessionStorage.setItem(KEY, this.id);
    try {
      this.database = await openDatabase();
      const found = before && (await settle(this.stores("readonly")[0].get(before)));
      if (!found) return false;
      this.fill(found, await settle(this.stores("readonly")[1].getAll(textsOf(before))));
      this.addTails(before);
      if (!own) this.saved.clear();
      return !own;
    } catch {
      this.session.nodes = [];
      this.id = newId(); // the stored session stays as it is
      this.fail();
      return false;
    }
  }

  fill({ nodes, state, past, future }, texts) {
    const { session, saved } = this;
    const records = new Map(texts.map((text) => [text.id, text]));
    for (const { parent, ...own } of nodes) {
      const node = session.add({ ...own, parent: session.nodes[parent] ?? null, ended: own.ended ?? "lost" });
      const { items = [], facts = null } = records.get(node.id) ?? {};
      node.facts = facts;
      for (const item of items) addItem(node, item);
      saved.set(node, sizeOf(node));
    }
    Object.assign(session, { state, past, future });
  }

  // Keeps the tokens that are not yet saved for the next page of this tab. IndexedDB may be too slow for a page that is left.
  keepTails() {
    if (!this.session.nodes.length) return;
    const tails = this.session.nodes.map((node) => [node.id, Math.floor(this.saved.get(node) ?? node.copied)]).map(([id, from]) => ({ id, from, items: recordsOf(this.session.nodes[id], from) }));
    try {
      sessionStorage.setItem(TAILS, JSON.stringify({ session: this.id, tails: tails.filter(({ items }) => items.length) }));
    } catch {} // too many for this storage
  }

  addTails(id) {
    const { session, tails } = JSON.parse(sessionStorage.getItem(TAILS)) ?? {};
    if (session !== id) return;
    for (const { id: index, from, items } of tails) {
      const node = this.session.nodes[index];
      for (const item of items.slice(node ? node.items.length - from : items.length)) addItem(node, item);
    }
  }

  // Saves soon what has changed.
  note(wait = WAIT) {
    if (!wait) clearTimeout(this.timer);
    this.timer = (wait && this.timer) || setTimeout(() => this.save(), wait);
  }

  async save() {
    clearTimeout(this.timer);
    this.timer = null;
    const { session, id } = this;
    const { nodes, state, past, future } = session;
    if (!nodes.length) return;
    try {
      const [sessions, texts] = this.stores("readwrite");
      const changed = nodes.map((node) => [node, sizeOf(node)]).filter(([node, size]) => this.saved.get(node) !== size);
      for (const [node] of changed) texts.put({ session: id, id: node.id, items: recordsOf(node, node.copied), facts: node.facts });
      const count = nodes.reduce((sum, { tokens, at }) => sum + tokens.length - at, 0);
      const records = nodes.map((node) => ({ ...Object.fromEntries(FIELDS.map((name) => [name, node[name]])), parent: node.parent?.id ?? null }));
      sessions.put({ id, title: session.nameOf(nodes[0]), changed: Date.now(), count, texts: state.seen.size, nodes: records, state, past, future });
      texts.transaction.commit(); // at once, for a page that is left
      await settled(texts.transaction);
      for (const [node, size] of changed) this.saved.set(node, size);
      if (this.failed) this.tell("");
      this.failed = false;
      if (!this.trimmed) await this.trim();
      this.trimmed = true;
    } catch {
      this.fail();
    }
  }

  fail() {
    this.failed = true;
    this.tell(LOST);
  }

  stores(mode) {
    const transaction = this.database.transaction(["sessions", "texts"], mode);
    return ["sessions", "texts"].map((name) => transaction.objectStore(name));
  }

  // The stored sessions, the latest first.
  async list() {
    const all = this.database ? await settle(this.stores("readonly")[0].getAll()) : [];
    return all.sort((one, other) => other.changed - one.changed);
  }

  async remove(id) {
    const [sessions, texts] = this.stores("readwrite");
    sessions.delete(id);
    texts.delete(textsOf(id));
    await settled(texts.transaction);
  }

  // Removes the oldest sessions above the limits.
  async trim() {
    let sum = 0;
    for (const [i, { id, count }] of (await this.list()).entries()) {
      sum += count;
      if (id !== this.id && (i >= MOST || sum > MOST_TOKENS)) await this.remove(id);
    }
  }

  // Reloads the page with another session; null starts a new one.
  async open(id) {
    await this.save();
    if (id) sessionStorage.setItem(KEY, id);
    else sessionStorage.removeItem(KEY);
    this.save = () => {}; // nothing is saved any more
    location.reload();
  }
}

function openDatabase() {
  const opening = indexedDB.open(NAME, 1);
  opening.onupgradeneeded = () => {
    opening.result.createObjectStore("sessions", { keyPath: "id" });
    opening.result.createObjectStore("texts", { keyPath: ["session", "id"] });
  };
  return settle(opening);
}

const settle = (request) => new Promise((done, fail) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => fail(request.error);
});

const settled = (transaction) => new Promise((done, fail) => {
  transaction.oncomplete = done;
  transaction.onabort = () => fail(transaction.error);
});

const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;

// The keys of a session's texts.
const textsOf = (id) => IDBKeyRange.bound([id], [id, []]);

// Reserves a session for this tab while the page is open. Returns false if another tab has it.
function reserve(id) {
  if (!navigator.locks) return true; // a page without TLS
  return new Promise((done) => {
    const signal = AbortSignal.timeout(LEAVE);
    const hold = () => {
      done(true);
      return new Promise(() => {});
    };
    navigator.locks.request(`${NAME} ${id}`, { signal }, hold).catch(() => done(false));
  });
}

// A text's records from an index, also those that are not yet on the page.
function recordsOf({ items, pending }, from) {
  return [...items, ...pending].slice(from).map(({ replaced, replacement, index, ...record }) => record);
}

// Changes with what is stored of a text's own.
function sizeOf({ items, pending, facts }) {
  return items.length + pending.length + (facts ? 0.5 : 0);
}
