// Two texts side by side: selects the same place in both, and marks where they diverge.

import { showDetails, showToken } from "./about.js";
import { byId, element } from "./dom.js";
import { Legend } from "./legend.js";
import { Reading } from "./reading.js";
import { regimeTitle } from "./regimes.js";
import { Speaker } from "./speaker.js";
import { placeOf } from "./texts.js";

const ENDS = { eos: "end of text", length: "token limit", confidence: "low confidence", context: "context limit", stop: "stop string", cancelled: "stopped" };
const WIDE = 900; // minimum width in pixels for details next to the text, as in the style sheet

export class Sides {
  // `regimeOf(token)`: the regime by the current thresholds; `select(token)` is called when a token of the shown text is
  // selected; `chooserOf(node, token)` returns a function that continues with other tokens in its place, or null.
  constructor(session, { regimeOf, select, chooserOf }) {
    Object.assign(this, { session, regimeOf, select, chooserOf });
    [this.main, this.beside] = ["main", "beside"].map((name) => new Reading(byId(name), (reading, token) => this.point(reading, token)));
    this.speaker = new Speaker(byId("spoken"));
    this.legend = new Legend(byId("legend"));
    this.pointed = false;
  }

  show() {
    const { current, beside } = this.session;
    byId("beside").hidden = !beside;
    byId("texts").classList.toggle("two", Boolean(beside));
    if (this.main.node !== current) {
      this.pointed = false;
      this.speaker.clear();
    }
    if (!this.pointed) showDetails(element("p", { class: "muted" }, "Point at a token to see its alternatives. Click it, then click an alternative to continue the text with it."));
    this.main.show(current, this.regimeOf);
    this.beside.show(beside, (token) => token.regime);
    this.legend.show(current?.tokens ?? []);
    [this.common, this.parted] = [0, false];
    this.part();
  }

  // Shows the prompt of the shown text.
  showAsked() {
    const { messages, prompt, facts } = this.session.current;
    const text = messages ? messages.map(({ role, content }) => `${role}: ${content}`).join("\n") : prompt ?? facts?.prompt ?? "";
    const box = byId("asked");
    if (box.textContent === text) return;
    box.textContent = text;
    box.scrollTop = box.scrollHeight; // the newest message
  }

  showStatus() {
    const { session } = this;
    for (const [{ card }, node] of [[this.main, session.current], [this.beside, session.beside]]) {
      if (!node) continue;
      const state = node.ended ? `ended: ${endOf(node)}` : node.comment ?? "running";
      const own = node.tokens.length === 1 ? "1 token" : `${node.tokens.length} tokens`;
      card.querySelector("h3").textContent = session.nameOf(node);
      card.querySelector(".about").textContent = `${own}, ${node.items.length - node.tokens.length} retracted, ${state}${node.about ?? ""}`;
    }
  }

  // Adds new tokens of a text.
  grow(node, items) {
    const { current, beside } = this.session;
    if (node === current) {
      this.speaker.add(items.map((token) => (token.type === "retracted" ? "" : token.text)).join(""));
      this.legend.add(items);
    }
    for (const reading of [this.main, this.beside]) if (reading.node === node) reading.grow();
    if (node === current || node === beside) this.part();
  }

  // Called when the shown text has ended.
  end(node) {
    this.speaker.end(`Ended: ${endOf(node)}.`);
    if (!this.pointed && innerWidth >= WIDE && node.items.length) this.describe(this.main, node.items.at(-1));
  }

  recolour() {
    this.main.recolour();
  }

  point(reading, token) {
    this.describe(reading, token);
    if (reading.node === this.session.current) this.select(token);
    const other = reading === this.main ? this.beside : this.main;
    const twin = other.node?.tokens[placeOf(reading.node, token)];
    if (twin && !other.held) other.select(twin, { held: false, silent: true });
    if (reading.held) byId("announcement").textContent = `${token.text}${token.type === "retracted" ? ", retracted" : ""}: ${regimeTitle(token.regime)}, ${token.action}`;
  }

  describe({ node, held }, token) {
    this.pointed = true;
    const [place, { facts }] = [placeOf(node, token), node];
    const current = node.tokens[place]?.token_id;
    showToken(token, { facts, place, shown: this.regimeOf(token), held, choose: this.chooserOf(node, token), current });
  }

  // Looks for the place where the texts diverge, from the end of the known common prefix.
  part() {
    const [one, other] = [this.session.current, this.session.beside];
    if (!one || !other || this.parted) return;
    const most = Math.min(one.tokens.length, other.tokens.length);
    while (this.common < most && one.tokens[this.common].token_id === other.tokens[this.common].token_id) this.common += 1;
    if (this.common >= most) return;
    this.parted = true;
    for (const reading of [this.main, this.beside]) reading.part(this.common);
  }
}

function endOf({ ended }) {
  return ENDS[ended] ?? ended;
}
