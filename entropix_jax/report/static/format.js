// Numbers, texts and regimes as they are shown. A <data> element's value is the number as the trace has it.

import { element } from "./dom.js";
import { REGIMES } from "./regimes.js";

// Groups of fields: name in the trace, label, unit, meaning.
export const METRICS = [
  { title: "Next-token distribution", fields: [
    ["entropy", "entropy", "bits", "uncertainty about the next token"],
    ["varentropy", "varentropy", "bits²", "variance of the surprisal"],
    ["sequence_varentropy", "sequence varentropy", "bits²", "variance of the entropy over the text so far"],
    ["logprob", "log-probability", "nats", "of the token that was drawn"],
    ["token_confidence", "token confidence", "nats", "−mean of ln p of the most likely tokens: higher is surer"],
    ["max_prob", "p of the most likely", "", "probability of the most likely token"],
    ["p_wrong", "P(wrong)", "0–1", "estimated probability that the answer is wrong"],
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
    ["temperature", "temperature", "", "0: the most likely token"],
    ["top_k", "top-k", "tokens", "maximum number of candidates; 0: no limit"],
    ["top_p", "top-p", "", "candidates up to this probability mass"],
    ["min_p", "min-p", "", "minimum probability of a candidate, relative to the most likely one"],
    ["confidence", "confidence", "", "weighted sum of the metrics; reported only"],
    ["forwards", "positions evaluated", "", "token positions evaluated so far, including branches, excluding the prompt"],
  ] },
];

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
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "\ufffd");
}

// A regime's name in its style, and its acronym.
export function regimeNode(regime) {
  const { name, acronym } = REGIMES[regime];
  return element("span", {}, element("span", { class: "token", "data-regime": regime }, name), element("span", { class: "muted" }, ` (${acronym})`));
}

// A text in quotation marks, with signs for invisible characters. `id` and `top` name a token without text.
export function quoted(text, id, top) {
  return text === "" ? nameOf(id, top) : `“${visible(text)}”`;
}

export function quotedToken({ text, token_id, top }) {
  return quoted(text, token_id, top);
}

// The name of a token without text, such as <|im_end|>, or its id in brackets. Only the most likely tokens, `top`, have
// names, and a part of a character has none.
export function nameOf(id, top) {
  const name = top?.find(([other]) => other === id)?.[1];
  return name && !name.includes("\ufffd") ? visible(name) : `⟨${id}⟩`;
}
