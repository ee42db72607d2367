// The shown text, the turns before it, and another text side by side: selects the same place in both, and marks where they
// diverge.

import { showDetails, showToken } from "./about.js";
import { byId, element } from "./dom.js";
import { edit } from "./edit.js";
import { Legend } from "./legend.js";
import { Reading } from "./reading.js";
import { regimeTitle } from "./regimes.js";
import { textOf, turnsBefore } from "./session.js";
import { Speaker } from "./speaker.js";
import { systemOf } from "./start.js";
import { placeOf } from "./texts.js";
import { WrongLine } from "./wrong.js";

const ENDS = { eos: "end of text", length: "token limit", confidence: "low confidence", question: "question to you", context: "context limit", stop: "stop string", cancelled: "stopped", lost: "interrupted" };
const SHORT = 100; // ms of a text that are too short for a rate
const CUT = ["length", "cancelled", "lost", "error"]; // ends of texts that can be continued
const WIDE = 900; // minimum width in pixels for details next to the text, as in the style sheet

export class Sides {
  // `regimeOf(token)`: the regime by the current thresholds; `select(token)` is called when a token of the shown text is
  // selected; `chooserOf(node, token)` returns a function that continues with other tokens in its place, or null; `change` has
  // the functions that continue, repeat and edit texts.
  constructor(session, { regimeOf, select, chooserOf, change }) {
    Object.assign(this, { session, regimeOf, select, chooserOf, change });
    [this.main, this.beside] = ["main", "beside"].map((name) => new Reading(byId(name), (reading, token) => this.point(reading, token)));
    this.wrong = new WrongLine(byId("wrong"), (token) => this.main.select(token, { held: true, scroll: true }));
    this.speaker = new Speaker(byId("spoken"));
    this.legend = new Legend(byId("legend"));
    this.turns = [];
    this.pointed = false;
  }

  show() {
    const { displayed: shown, beside } = this.session;
    const focused = byId("main").contains(document.activeElement);
    byId("beside").hidden = !beside;
    byId("texts").classList.toggle("two", Boolean(beside));
    if (this.main.node !== shown) {
      this.pointed = false;
      this.speaker.clear();
    }
    if (!this.pointed) showDetails(element("p", { class: "muted" }, "Point at a token to see its alternatives. Click it, then click an alternative to continue the text with it."));
    this.turns = turnsBefore(shown).map((turn, i) => this.turnOf(turn, i));
    const system = shown && systemOf(shown);
    byId("turns").replaceChildren(...(system ? [element("p", { class: "asked" }, `System message: ${system.content}`)] : []), ...this.turns.map(({ card }) => card));
    if (shown) this.showAsked();
    this.main.show(shown, this.regimeOf);
    for (const form of byId("main").querySelectorAll(".editor")) form.remove();
    byId("asked").hidden = byId("text-0").hidden = false;
    byId("tools").replaceChildren(...this.toolsOf(this.main, "answer"));
    this.beside.show(beside, (token) => token.regime);
    this.legend.show(shown?.tokens ?? []);
    this.wrong.show(shown?.tokens ?? []);
    [this.common, this.parted] = [0, false];
    this.part();
    if (shown && shown === this.session.example) this.describeLast();
    if (focused && !byId("main").contains(document.activeElement)) byId("text-0").focus({ preventScroll: true });
  }

  // An earlier turn of a conversation: the message and its answer.
  turnOf(node, i) {
    const label = `Tokens of answer ${i + 1}`;
    const card = element("div", {},
      element("p", { class: "asked" }, node.messages.at(-1).content),
      element("div", { id: `turn-${i}`, class: "text", role: "listbox", tabindex: 0, "aria-label": label }));
    const reading = new Reading(card, (one, token) => this.point(one, token));
    reading.show(node, (token) => token.regime);
    card.append(element("div", { class: "tools" }, ...this.toolsOf(reading, `answer ${i + 1}`)));
    return reading;
  }

  // The buttons below a text, which change it or its prompt.
  toolsOf(reading, name) {
    const { node, card } = reading;
    if (!node || node === this.session.example) return [];
    const asked = card.querySelector("#asked") ?? card.querySelector(".asked"); // not that of an earlier turn
    const button = (word, onclick, own = {}) => element("button", { type: "button", onclick, "aria-label": node.messages ? `${word}, ${name}` : null, ...own }, word);
    const [prompt, answer] = node.messages ? ["message", "answer"] : ["prompt", "text"];
    return [
      button("Continue", () => this.change.extend(node), { class: "continue", hidden: true }),
      button("Retry", () => this.change.retry(node), { title: "Generate it once more, with a random seed" }),
      button(`Edit ${answer}`, () => {
        const { token, held } = reading;
        const cursor = held ? textOf(node, placeOf(node, token) + 1).length : undefined;
        edit(reading.box, { text: textOf(node), label: `The ${answer}`, cursor, word: "Continue from the cursor", apply: (words) => this.change.rewrite(node, words) });
      }),
      button(`Edit ${prompt}`, () => edit(asked, { text: node.messages ? asked.textContent : node.prompt, label: `The ${prompt}`, whole: true, word: node.messages ? "Send" : "Generate", apply: (words) => this.change.ask(node, words) })),
    ];
  }

  // Shows the prompt of the shown text, or its last message, and the sampler's habits.
  showAsked() {
    const { messages, prompt = "", facts, template } = this.session.displayed;
    const text = messages?.at(-1).content ?? (template ? prompt.replace(/<\|[^|]*\|>/g, "") : prompt); // without control tokens
    const box = byId("asked");
    this.legend.explain(facts);
    if (box.textContent === text) return;
    box.textContent = text;
    box.scrollTop = box.scrollHeight;
  }

  showStatus() {
    const { session } = this;
    for (const [{ card }, node] of [[this.main, session.displayed], [this.beside, session.beside]]) {
      if (!node) continue;
      const state = node.ended ? `ended: ${endOf(node)}` : node.comment ?? "running";
      const own = node.tokens.length === 1 ? "1 token" : `${node.tokens.length} tokens`;
      card.querySelector("h3").textContent = session.nameOf(node);
      card.querySelector(".about").textContent = `${own}, ${node.items.length - node.tokens.length} retracted, ${state}${node.about ?? ""}${costOf(node)}`;
    }
    const { current } = session;
    byId("together").hidden = !session.beside && !(current && session.parentOf(current));
    const [tools, isCut] = [byId("tools"), CUT.includes(current?.ended)];
    const button = tools.querySelector(".continue");
    if (button) button.hidden = !isCut;
    if (tools.hidden === !current?.ended) return;
    tools.hidden = !current?.ended;
    this.main.follow(); // to the buttons
  }

  // Adds new tokens of a text.
  grow(node, items) {
    const { current, beside } = this.session;
    if (node === current) {
      this.speaker.add(items.map((token) => (token.type === "retracted" ? "" : token.text)).join(""));
      this.legend.add(items);
      this.wrong.show(node.tokens, this.main.token);
    }
    for (const reading of [this.main, this.beside]) if (reading.node === node) reading.grow();
    if (node === current || node === beside) this.part();
  }

  // Called when the shown text has ended.
  end(node) {
    this.speaker.end(`Ended: ${endOf(node)}.`);
    if (!this.pointed) this.describeLast();
  }

  // Describes the last token that the reader chose, else the last fork, else the last token.
  describeLast() {
    const { items } = this.main.node;
    const token = items.findLast(({ chosen }) => chosen) ?? items.findLast(({ branches }) => branches?.length > 1) ?? items.at(-1);
    if (token && innerWidth >= WIDE) this.describe(this.main, token);
  }

  recolour() {
    this.main.recolour();
  }

  point(reading, token) {
    this.describe(reading, token);
    if (reading.node === this.session.displayed) this.select(token);
    if (reading === this.main) this.wrong.select(token);
    const sides = [this.main, this.beside];
    const [own, others] = sides.includes(reading) ? [sides, this.turns] : [[], [...sides, ...this.turns]];
    for (const one of others) if (one !== reading) one.release();
    const other = own.find((one) => one !== reading);
    const twin = other?.node?.tokens[placeOf(reading.node, token)];
    if (twin && !other.held) other.select(twin, { held: false, silent: true });
    if (reading.held) byId("announcement").textContent = `${token.text}${token.type === "retracted" ? ", retracted" : ""}: ${regimeTitle(token.regime)}, ${token.action}`;
  }

  describe({ node, held }, token) {
    this.pointed = true;
    const [place, { facts }] = [placeOf(node, token), node];
    const current = node.tokens[place]?.token_id;
    showToken(token, { facts, tokens: node.tokens, place, shown: this.regimeOf(token), held, choose: this.chooserOf(node, token), current });
  }

  // Looks for the place where the texts diverge, from the end of the known common prefix.
  part() {
    const [one, other] = [this.session.current, this.session.beside];
    if (!one || !other || this.parted) return;
    const most = Math.min(one.tokens.length, other.tokens.length);
    const split = splitOf(one.written, other.written);
    while (this.common < Math.min(most, split) && one.tokens[this.common].token_id === other.tokens[this.common].token_id) this.common += 1;
    if (this.common >= most) return;
    this.parted = true;
    for (const reading of [this.main, this.beside]) reading.part(this.common);
  }
}

// The number of tokens before the first part that the reader wrote in only one of two texts.
function splitOf(one, other) {
  const i = one.findIndex(({ at, text }, j) => at !== other[j]?.at || text !== other[j].text);
  return Math.min(...[one, other].map((parts) => parts[i < 0 ? one.length : i]?.at ?? Infinity));
}

function endOf({ ended }) {
  return ENDS[ended] ?? ended;
}

// The work and time of a text that has ended. The first tokens may have waited, so they do not count for the rate.
function costOf({ ended, tokens, base, items, timing }) {
  if (!ended || !timing?.first || tokens.length === base) return "";
  const { asked, before, first, firsts, end } = timing; // ms, and tokens
  const count = tokens.length - before; // of this request
  const rate = end - first > SHORT ? (count - firsts) / (end - first) : count / (end - asked);
  return ` · ${(items.at(-1).forwards / (tokens.length - base)).toFixed(2)} forward passes per token · ${((end - asked) / 1000).toFixed(1)} s · ${(1000 * rate).toFixed(1)} tokens/s`;
}
