// The form for a new text: prompt or conversation, sampler, and the request made of them.

import { byId, element } from "./dom.js";
import { parseSettings } from "./settings.js";

export class Start {
  constructor(api) {
    this.api = api;
  }

  // Fetches the server's model and presets once. Tries again after a failure.
  async offer() {
    if (!this.model) await (this.offering ??= this.ask().finally(() => (this.offering = null)));
  }

  async ask() {
    const [model] = (await this.api.get("/v1/models")).data;
    this.model = model.id;
    byId("model").textContent = model.id;
    byId("preset").append(...model.entropix.samplers.map((value) => element("option", { value }, value)));
    this.methods = model.entropix.methods;
    byId("method").append(...Object.keys(this.methods).map((value) => element("option", { value }, value)));
    byId("tokens").max = model.entropix.context;
    // A model that is made for conversations often ends a bare prompt at once.
    if (model.entropix.chat && !byId("prompt").value) byId("chat").click();
    this.keeps = model.entropix.keep > 0;
    byId("keeps-none").hidden = this.keeps;
    document.documentElement.dataset.ready = "true";
  }

  get chat() {
    return byId("chat").checked;
  }

  // The search for a new text. A method that votes counts the answers of all its continuations.
  get search() {
    const [method, forks] = [byId("method").value, byId("forks").value];
    return method && { method, vote: this.methods[method] === "vote", ...(forks && { forks: Number(forks) }) };
  }

  get most() {
    return Number(byId("tokens").value) || 200;
  }

  // The request for a new text. `before`: the conversation so far.
  request(text, before) {
    const seed = byId("seed").value;
    const [preset, own] = [byId("preset").value, parseSettings(byId("own").value)];
    const sampler = Object.keys(own).length ? { ...(preset && { extends: preset }), ...own } : preset || null;
    const body = { model: this.model, max_tokens: this.most, ...(seed !== "" && { seed: Number(seed) }), entropix: this.asked({ ...(sampler && { sampler }), ...this.search }) };
    if (!this.chat) return { path: "/v1/completions", body: { ...body, prompt: text }, prompt: text };
    const messages = [...before, { role: "user", content: text }];
    return { path: "/v1/chat/completions", body: { ...body, messages }, messages };
  }

  // The request to continue a text from a place: with a changed sampler up to the text's own token limit, else up to the
  // current one.
  more(node, position, { tokens, sampler } = {}) {
    const from = { row: node.row, position, ...(tokens && { token: tokens }) };
    return { path: "/v1/completions", body: { model: this.model, ...(!sampler && { max_tokens: Math.max(this.most, tokens?.length ?? 1) }), entropix: this.asked({ from, ...(sampler && { sampler }) }) } };
  }

  asked(own) {
    return { ...(this.keeps && { keep: true }), details: true, retractions: true, ...own };
  }
}
