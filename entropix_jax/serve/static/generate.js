// Starts texts: a new one from the typed prompt, or a continuation of another one.

import { byId, element } from "./dom.js";
import { fail } from "./failure.js";
import { placeOf } from "./texts.js";

const EXAMPLES = {
  completion: ["Once upon a time", "Guests:", "12 + 7 ="],
  chat: ["What is the capital of France?", "What is 12 + 7?", "Tell me a short story."],
};

export class Generator {
  constructor(session, start, stream) {
    Object.assign(this, { session, start, stream });
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    byId("continue").addEventListener("click", () => this.extend(session.current));
    byId("afresh").addEventListener("click", () => {
      session.walk(null);
      byId("prompt").focus();
    });
    for (const id of ["chat", "completion"]) byId(id).addEventListener("change", () => this.offer());
  }

  // Offers a new conversation if the current text is one, and examples if there is no text.
  offer() {
    const { session, start } = this;
    byId("afresh").hidden = !start.chat || !session.current?.messages;
    const [button, hint] = start.chat ? ["Send", "Type a message…"] : ["Generate", "Type a prompt…"];
    byId("go").textContent = button;
    byId("prompt").placeholder = hint;
    byId("examples").hidden = Boolean(session.current);
    const examples = EXAMPLES[start.chat ? "chat" : "completion"];
    byId("examples").replaceChildren("Examples: ", ...examples.map((text) => element("button", { type: "button", onclick: () => this.generate(text) }, text)));
  }

  // Starts a text from the typed prompt, or from another one.
  async generate(text = byId("prompt").value) {
    const { session, start } = this;
    if (!text) return fail(new Error("Type a prompt first."));
    const { current } = session;
    const talks = start.chat && current?.messages;
    const before = talks ? [...current.messages, { role: "assistant", content: current.tokens.map((token) => token.text).join("") }] : [];
    try {
      await start.offer();
      const asked = start.request(text, before);
      const node = session.add({ parent: talks ? current : null, label: short(text), prompt: asked.prompt, messages: asked.messages, sampler: start.sampler });
      byId("prompt").value = start.chat ? "" : text;
      session.show(node);
      if (await this.stream.run(node, asked)) return;
      start.follow(node);
      if (!byId("prompt").value) byId("prompt").value = text;
    } catch (error) {
      fail(error);
    }
  }

  // Continues a text from a place, as a sibling of its old continuation.
  goOn(node, place, label, { tokens = null, sampler = null, begun = null, beside = node } = {}) {
    if (!node.row) return fail(new Error("This text is not on the server yet."));
    const asked = this.start.more(node, place, { tokens, sampler });
    const next = this.session.add({ parent: node, at: place, label, prompt: node.prompt, messages: node.messages, sampler: { ...node.sampler, own: { ...node.sampler.own, ...sampler } } });
    this.session.show(next, beside);
    this.stream.run(next, asked, begun);
  }

  // Continues after the end of a text.
  extend(node) {
    this.goOn(node, node.tokens.length, "continued", { beside: null });
  }

  // Continues with these tokens and their text in a token's place. A retracted token has the place of its replacement.
  choose(node, token, tokens, text) {
    this.goOn(node, placeOf(node, token), short(text) || "⟨token⟩", { tokens });
  }
}

export function short(text) {
  return (text.length > 28 ? `${text.slice(0, 27)}…` : text).replaceAll("\n", " ").trim();
}
