// A text on the page: adds tokens as they arrive, selects and holds them by pointer or keyboard. A card with a part of the
// class `flow` scrolls it to the newest token.

import { element } from "./dom.js";
import { nameOf } from "./format.js";
import { neighbour } from "./text.js";

export class Reading {
  // `tell(reading, token)` is called when a token is selected.
  constructor(card, tell) {
    this.card = card;
    this.box = card.querySelector(".text");
    this.tell = tell;
    this.spans = [];
    this.node = null;
    this.token = null;
    this.held = false;
    const tokenAt = (event) => this.node?.items[event.target.closest?.(".token")?.dataset.index];
    this.box.addEventListener("pointerover", (event) => {
      const token = event.pointerType !== "touch" && !this.held && tokenAt(event);
      if (token) this.select(token, { held: false });
    });
    this.box.addEventListener("click", (event) => {
      const token = tokenAt(event);
      if (token) this.select(token, { held: !(this.held && token === this.token) });
    });
    this.follows = true;
    this.flow = card.querySelector(".flow");
    this.flow?.addEventListener("scroll", () => (this.follows = this.flow.scrollHeight - this.flow.scrollTop - this.flow.clientHeight < 40), { passive: true });
    if (this.flow) new ResizeObserver(() => this.follow()).observe(this.flow);
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  get items() {
    return this.node?.items ?? [];
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.items.length) return;
    const token = neighbour(event.key, this);
    if (event.key === "Escape" && this.token) this.select(this.token, { held: false });
    else if (token) this.select(token, { held: true, scroll: true });
    else return;
    event.preventDefault();
  }

  // Shows all of a text.
  show(node, regimeOf) {
    if (node !== this.node) this.follows = true;
    this.node = node;
    this.regimeOf = regimeOf;
    this.spans = [];
    [this.line, this.count, this.wrote, this.asks] = [null, 0, 0, false]; // the last line, the drawn tokens and written parts, and whether a question has begun
    this.token = null;
    this.held = false;
    this.box.replaceChildren();
    this.box.removeAttribute("aria-activedescendant");
    if (node) this.grow();
  }

  // Adds the new tokens.
  grow() {
    const { items } = this.node;
    for (let i = this.spans.length; i < items.length; i++) {
      const wrote = this.drawWritten();
      if (i && i === this.node.copied && !wrote && !items[i].chosen) this.append(element("span", { class: "seam", "aria-hidden": "true", title: "Continued from here" }), "");
      const span = this.draw(items[i], items[i - 1]);
      this.spans.push(span);
      this.append(span, items[i].text);
      if (items[i].type === "token") this.count += 1;
    }
    this.drawWritten();
    this.follow();
  }

  // A block for each line: only the last one is laid out again.
  append(span, text) {
    if (!this.line) this.box.append((this.line = element("div", { role: "none" })));
    if (/^ .*\S/s.test(text)) this.line.append(element("wbr"));
    this.line.append(span);
    if (text.endsWith("\n")) this.line = null;
  }

  // Adds what the reader wrote before the next token, and returns whether there was anything.
  drawWritten() {
    const { written } = this.node;
    const before = this.wrote;
    for (; written[this.wrote]?.at === this.count; this.wrote++) {
      const { text } = written[this.wrote];
      this.append(element("span", { class: "written", role: "option", "aria-selected": "false", "aria-disabled": "true", title: "Written by you" }, text), text);
    }
    return this.wrote > before;
  }

  // Scrolls to the newest token unless the reader scrolled away or holds a token.
  follow() {
    if (this.flow && this.follows && !this.held) this.flow.scrollTop = 1e7;
  }

  draw(token, before) {
    const thought = (one) => one?.action === "inject" && !one.chosen;
    // A branch without a rival is no fork, nor are the tokens that follow in it.
    const branched = token.action === "branch" && (token.branches ? token.branches.length > 1 : this.forked);
    this.forked = branched;
    this.asks ||= token.action === "clarify";
    const lookup = token.action === "lookup";
    const classes = { injected: thought(token), "inject-start": thought(token) && !thought(before), branched, "branch-start": branched && token.branches?.length > 1, lookup, "lookup-start": lookup && before?.action !== "lookup", question: this.asks, loop: token.loop, retracted: token.type === "retracted", empty: !token.text, chosen: token.chosen };
    const span = element("span", {
      id: `${this.box.id}-${token.index}`, role: "option", "aria-selected": "false", "data-index": token.index, "data-regime": this.regimeOf(token),
      class: ["token", ...Object.keys(classes).filter((name) => classes[name])].join(" "), "aria-label": token.type === "retracted" ? `retracted: ${token.text}` : null,
    });
    (token.text || nameOf(token.token_id, token.top)).split("\n").forEach((line, i) => span.append(...(i ? [element("i", { class: "sign" }, "↵"), "\n"] : []), line));
    return span;
  }

  // Selects no token.
  release() {
    const span = this.token && this.spans[this.token.index];
    span?.classList.remove("selected", "pinned");
    span?.setAttribute("aria-selected", "false");
    [this.token, this.held] = [null, false];
  }

  select(token, { held, scroll = false, silent = false }) {
    this.release();
    [this.token, this.held] = [token, held];
    const span = this.spans[token.index];
    span.classList.add("selected");
    span.classList.toggle("pinned", held);
    span.setAttribute("aria-selected", "true");
    this.box.setAttribute("aria-activedescendant", span.id);
    if (scroll) span.scrollIntoView({ block: "nearest" });
    if (!silent) this.tell(this, token);
  }

  recolour() {
    this.spans.forEach((span, i) => (span.dataset.regime = this.regimeOf(this.items[i])));
  }

  // Marks the place where the text diverges from the other one.
  part(place) {
    const span = this.spans[this.node.tokens[place].index];
    span.classList.add("parts");
    span.before(element("span", { class: "parting", "aria-hidden": "true" }, "texts diverge"));
  }
}
