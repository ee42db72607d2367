// Begins texts: a new one from what is typed, or one that goes on from a place of another.

import { byId } from "./dom.js";
import { fail } from "./failure.js";
import { placeOf } from "./texts.js";

export class Generator {
  constructor(session, start, stream) {
    Object.assign(this, { session, start, stream });
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.generate();
    });
    byId("afresh").addEventListener("click", () => {
      session.walk(null);
      byId("prompt").focus();
    });
    for (const id of ["chat", "completion"]) byId(id).addEventListener("change", () => this.offerAfresh());
  }

  // A new conversation, where there is one to be left.
  offerAfresh() {
    byId("afresh").hidden = !this.start.chat || !this.session.current?.messages;
  }

  async generate() {
    const { session, start } = this;
    const text = byId("prompt").value;
    if (!text) return fail(new Error("Type a prompt first."));
    const { current } = session;
    const talks = start.chat && current?.messages;
    const before = talks ? [...current.messages, { role: "assistant", content: current.tokens.map((token) => token.text).join("") }] : [];
    try {
      await start.offer();
      const asked = start.request(before);
      const node = session.add({ parent: talks ? current : null, label: short(text), prompt: asked.prompt, messages: asked.messages });
      if (start.chat) byId("prompt").value = "";
      session.show(node);
      if (!(await this.stream.run(node, asked)) && !byId("prompt").value) byId("prompt").value = text;
    } catch (error) {
      fail(error);
    }
  }

  // Goes on from a place of a text: a sibling of what stood there.
  goOn(node, place, label, { tokens = null, sampler = null, begun = null } = {}) {
    if (!node.row) return fail(new Error("This text is not on the server yet."));
    const asked = this.start.more(node, place, { tokens, sampler });
    const next = this.session.add({ parent: node, at: place, label, prompt: node.prompt, messages: node.messages, given: tokens });
    this.session.show(next, node);
    this.stream.run(next, asked, begun);
  }

  // With these tokens, whose text is given, in a token's place. A retracted one's is that of what replaced it.
  choose(node, token, tokens, text) {
    this.goOn(node, placeOf(node, token), short(text) || "⟨token⟩", { tokens });
  }
}

function short(text) {
  return (text.length > 28 ? `${text.slice(0, 27)}…` : text).replaceAll("\n", " ").trim();
}
