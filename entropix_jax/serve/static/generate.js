// Starts texts: a new one from the typed prompt, or a continuation of another one.

import { byId, element } from "./dom.js";
import { fail } from "./failure.js";
import { partsOf, sourceOf, textOf, turnBefore, writtenIn } from "./session.js";
import { systemOf } from "./start.js";
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
    byId("prompt").addEventListener("input", () => byId("prompt").setCustomValidity(""));
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
    byId("system").closest("label").hidden = !start.chat;
    const [button, hint] = start.chat ? ["Send", "Type a message…"] : ["Generate", "Type a prompt… Ctrl+Enter generates"];
    byId("go").textContent = button;
    byId("prompt").placeholder = hint;
    byId("examples").hidden = Boolean(session.current);
    const examples = EXAMPLES[start.chat ? "chat" : "completion"];
    byId("examples").replaceChildren("Examples: ", ...examples.map((text) => element("button", { type: "button", onclick: () => this.fill(text) }, text)));
  }

  // Puts an example into the form.
  fill(text) {
    const field = byId("prompt");
    field.value = text;
    field.setCustomValidity("");
    field.focus();
  }

  // Starts a text from the typed prompt, or from another one.
  async generate(text = byId("prompt").value) {
    const { session, start } = this;
    const field = byId("prompt");
    field.setCustomValidity(text ? "" : `${field.placeholder.replace(/….*/, "")} first.`);
    if (!field.reportValidity()) return; // says so at the field
    const { current } = session;
    if (!(await this.isReady())) return;
    const before = start.chat && current?.messages ? current : null;
    const asked = start.chat ? { messages: [...start.system, ...conversation(before), { role: "user", content: text }] } : { prompt: text };
    const run = this.begin(asked, before);
    if (run) byId("prompt").value = start.chat ? "" : text;
    if (!run || (await run)) return;
    start.follow(session.nodes.at(-1));
    if (!byId("prompt").value) byId("prompt").value = text;
  }

  // Waits for the server's model. Shows an error if the server does not answer.
  async isReady() {
    try {
      await this.start.offer();
      return true;
    } catch (error) {
      fail(error);
      return false;
    }
  }

  // Starts a text from a prompt or from messages. Returns whether it started, later; null if the settings have an error.
  begin(asked, parent, { template, ...options } = {}) {
    try {
      const request = this.start.request(asked, options);
      const label = short(asked.prompt ?? asked.messages.at(-1).content);
      const node = this.session.add({ parent, label, ...asked, template, sampler: this.start.sampler });
      this.session.show(node);
      return this.stream.run(node, request);
    } catch (error) {
      fail(error);
      return null;
    }
  }

  // Generates a text once more, with a random seed.
  async retry(node) {
    if (await this.isReady()) this.begin(askedOf(node), turnBefore(node), { seed: "", template: node.template });
  }

  // Starts a text with another prompt or message in its place.
  async ask(node, text) {
    const { messages } = node;
    if (await this.isReady()) this.begin(messages ? { messages: [...messages.slice(0, -1), { role: "user", content: text }] } : { prompt: text }, turnBefore(node), { template: node.template });
  }

  // Continues a text from a place, as a sibling of its old continuation: its row with `tokens`, or the words before the place
  // and `text` as a prompt.
  async goOn(node, place, label, { tokens = null, text = "", written = writtenIn(node, place), sampler = null, seed = null, begun = null, beside = node } = {}) {
    if (!(await this.isReady())) return;
    const source = text && !tokens ? null : sourceOf(node, place, written);
    const changed = { ...node.sampler, own: { ...node.sampler.own, ...sampler } };
    const { prompt, messages, template } = node;
    const next = this.session.add({ parent: node, at: place, label, prompt, messages, template, written, base: source?.base, sampler: changed });
    const reread = () => {
      const last = { at: place, text };
      Object.assign(next, { base: place, written: text ? [...written, last] : written });
      return this.start.request(askedOf(node, textOf(next)), { sampler: changed, search: null });
    };
    const asked = this.stream.api.has(source) ? this.start.more(source.row, place - source.base, { tokens, sampler, seed }) : reread();
    this.session.show(next, beside);
    await this.stream.run(next, asked, { begun, reread });
  }

  // Continues after the end of a text.
  extend(node) {
    this.goOn(node, node.tokens.length, "continued", { beside: null });
  }

  // Continues with these tokens and their text in a token's place. A retracted token has the place of its replacement.
  choose(node, token, tokens, text) {
    this.goOn(node, placeOf(node, token), short(text) || "⟨token⟩", { tokens, text });
  }

  // Continues an edited text. The beginning that both texts share keeps its tokens.
  rewrite(node, text) {
    let [count, length, place] = [0, 0, 0];
    const written = [];
    for (const part of partsOf(node)) {
      if (!text.startsWith(part.text, length)) break;
      length += part.text.length;
      if ("at" in part) written.push(part);
      else count += 1;
      if (part.text) place = count; // a token that ended the text has no text
    }
    const rest = text.slice(length);
    const seed = Math.floor(2 ** 31 * Math.random()); // else the row would repeat its old text
    this.goOn(node, place, rest ? short(`✎ ${rest}`) : "continued", { text: rest, written, seed, beside: null });
  }
}

// The prompt or the messages of a text that begins with other words.
function askedOf({ prompt, messages }, begun = "") {
  if (!messages) return { prompt: prompt + begun };
  return { messages: begun ? [...messages, { role: "assistant", content: begun }] : messages };
}

// The messages of a conversation up to the end of a text, without the system message.
function conversation(node) {
  if (!node) return [];
  const messages = systemOf(node) ? node.messages.slice(1) : node.messages;
  return [...messages, { role: "assistant", content: textOf(node) }];
}

export function short(text) {
  return (text.length > 28 ? `${text.slice(0, 27)}…` : text).replaceAll("\n", " ").trim();
}
