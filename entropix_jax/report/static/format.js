// Numbers and texts as they are shown. A <data> element's value is the number as the trace has it.

import { element } from "./dom.js";

// Groups of fields: name in the trace, label, unit, meaning.
export const METRICS = [
  { title: "Next-token distribution", fields: [
    ["entropy", "entropy", "bits", "uncertainty about the next token"],
    ["varentropy", "varentropy", "bits²", "variance of the surprisal"],
    ["sequence_varentropy", "sequence varentropy", "bits²", "variance of the entropy over the text so far"],
    ["logprob", "log-probability", "nats", "of the token that was drawn"],
    ["token_confidence", "token confidence", "nats", "−mean of ln p of the likeliest tokens: higher is surer"],
    ["self_certainty", "self-certainty", "nats", "divergence from the uniform distribution: higher is surer"],
  ] },
  { title: "Attention at the last position", fields: [
    ["attn_entropy", "attention entropy", "bits", "mean over the heads: how widely they attend"],
    ["attn_entropy_norm", "normalised attention entropy", "0–1", "divided by its maximum for the context length"],
    ["attn_varentropy", "attention varentropy", "bits²", "variance of the entropy between heads"],
    ["agreement", "agreement", "0–1", "1: all heads attend to the same positions"],
    ["agreement_published", "published agreement", "", "the published formula, which measures disagreement"],
    ["interaction_strength", "interaction strength", "", "mean absolute attention score"],
  ] },
  { title: "Sampling", fields: [
    ["temperature", "temperature", "", "0: the likeliest token"],
    ["top_k", "top-k", "tokens", "at most so many candidates; 0: no limit"],
    ["top_p", "top-p", "", "candidates up to this probability mass"],
    ["min_p", "min-p", "", "candidates at least this likely, relative to the likeliest"],
    ["confidence", "confidence", "", "weighted sum of the metrics; reported only"],
    ["forwards", "positions evaluated", "", "token positions evaluated so far, without the prompt, with branches"],
  ] },
];

export const ACTIONS = {
  argmax: "took the likeliest token",
  inject: "inserted a thought into the text",
  explore: "drew once, at a raised temperature",
  branch: "rolled out several continuations and kept the best",
  resample: "drew once, at a high temperature",
  backspace: "retracted the previous token and drew again",
  adaptive: "drew several candidates and kept the likeliest",
  sample: "drew once",
  think_end: "ended the thinking, which had been sure for a while",
  phrases: "took a banned phrase back and drew again",
  budget_forcing: "made the thinking longer, or ended it",
};

export function number(value) {
  if (value == null) return "–";
  if (Number.isInteger(value)) return String(value);
  const size = Math.abs(value);
  return size >= 1e-3 && size < 1e5 ? String(Number(value.toFixed(size < 1 ? 4 : 3))) : value.toExponential(2);
}

export function numberNode(value) {
  return element("data", { value: value ?? "" }, number(value));
}

export function percent(share) {
  const value = 100 * share;
  if (value === 0 || value === 100) return `${value} %`;
  if (value < 0.01) return "< 0.01 %";
  return `${value.toFixed(value < 1 ? 2 : 1)} %`;
}

// Text with signs for invisible characters.
export function visible(text, id) {
  if (text === "") return id == null ? "∅" : `⟨${id}⟩`;
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "\ufffd");
}

// The same in quotation marks.
export function quoted(text, id) {
  return text === "" ? visible(text, id) : `“${visible(text, id)}”`;
}
