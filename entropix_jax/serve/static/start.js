// The form for a new text: prompt or conversation, sampler, and the request made of them. The sampler is the shown text's
// until the reader changes it.

import { byId, element } from "./dom.js";
import { formatSettings, parseSettings } from "./settings.js";

export class Start {
  constructor(api) {
    this.api = api;
    byId("options").addEventListener("input", () => this.summarize());
  }

  // Fetches the server's model and presets, once unless the connection is lost.
  async offer() {
    if (!this.api.server) await (this.offering ??= this.ask().finally(() => (this.offering = null)));
  }

  async ask() {
    const [model] = (await this.api.get("/v1/models")).data;
    this.model = model.id;
    byId("model").textContent = model.id;
    this.api.server = model.created;
    this.methods = model.entropix.methods;
    for (const [id, values] of [["preset", model.entropix.samplers], ["method", Object.keys(this.methods)]]) {
      const { value } = byId(id);
      byId(id).replaceChildren(byId(id).options[0], ...values.map((name) => element("option", { value: name }, name)));
      byId(id).value = value;
    }
    byId("tokens").max = model.entropix.context;
    // A model that is made for conversations often ends a bare prompt at once.
    if (model.entropix.chat && !byId("prompt").value && !this.followed) byId("chat").click();
    this.keeps = model.entropix.keep > 0;
    byId("keeps-none").hidden = this.keeps;
    this.standard = model.entropix.sampler;
    byId("preset").options[0].text = `${this.standard} (server default)`;
    const { followed } = this;
    this.followed = null;
    this.follow(followed); // now its preset is in the list
    this.summarize();
    document.documentElement.dataset.ready = "true";
  }

  // The sampler of the form: a preset, "" for the server's, and settings on top of it.
  get sampler() {
    return { preset: byId("preset").value, own: parseSettings(byId("own").value) };
  }

  // The system message of a conversation, as a list of messages.
  get system() {
    const content = byId("system").value.trim();
    return this.chat && content ? [{ role: "system", content }] : [];
  }

  // Puts the sampler and the system message of another text into the form.
  follow(node) {
    if (!node?.sampler || node === this.followed) return;
    this.followed = node;
    byId("preset").value = node.sampler.preset;
    if (node.messages) byId("system").value = systemOf(node)?.content ?? "";
    this.change(node.sampler.own);
  }

  change(own) {
    byId("own").value = formatSettings(own);
    this.summarize();
  }

  // Adds settings to those of the form.
  keep(changes) {
    this.change({ ...this.sampler.own, ...changes });
  }

  summarize() {
    const [own, method, seed] = ["own", "method", "seed"].map((id) => byId(id).value.trim());
    const count = own.split("=").length - 1;
    const sampler = (byId("preset").value || this.standard || "default sampler") + (own && `, ${count > 9 ? `${count} settings` : own.replaceAll("thresholds.", "")}`);
    byId("chosen").textContent = byId("chosen").title = [sampler, method, `${this.most} tokens`, seed && `seed ${seed}`, this.system.length && "system message"].filter(Boolean).join(" · ");
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

  get seed() {
    return byId("seed").value;
  }

  // The request for a row. `asked`: its `prompt` or `messages`.
  request(asked, { sampler: { preset, own } = this.sampler, search = this.search, seed = this.seed } = {}) {
    const sampler = Object.keys(own).length ? { ...(preset && { extends: preset }), ...own } : preset || null;
    const body = { model: this.model, max_tokens: this.most, ...(seed !== "" && { seed: Number(seed) }), ...asked, entropix: this.asked({ ...(sampler && { sampler }), ...search }) };
    return { path: asked.messages ? "/v1/chat/completions" : "/v1/completions", body };
  }

  // The request to continue a row from a position: with a changed sampler up to the row's own token limit, else up to the
  // current one.
  more(row, position, { tokens, sampler, seed } = {}) {
    const from = { row, position, ...(tokens && { token: tokens }) };
    return { path: "/v1/completions", body: { model: this.model, ...(seed !== null && { seed }), ...(!sampler && { max_tokens: Math.max(this.most, tokens?.length ?? 1) }), entropix: this.asked({ from, ...(sampler && { sampler }) }) } };
  }

  asked(own) {
    return { ...(this.keeps && { keep: true }), ...(byId("asks").checked && !own.method && { ask: true }), details: true, retractions: true, ...own };
  }
}

// The system message of a text's conversation.
export function systemOf({ messages }) {
  return messages?.[0].role === "system" ? messages[0] : null;
}
