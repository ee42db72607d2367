// Numbers and texts as they are shown. A <data> element's value is the number as the trace has it.

import { element } from "./dom.js";

export const METRICS = [
  { title: "Next-token distribution", fields: [
    ["entropy", "entropy", "bits", "how uncertain the next token is"],
    ["varentropy", "varentropy", "bits²", "how unevenly: the variance of the surprise"],
    ["sequence_varentropy", "sequence varentropy", "bits²", "how much the entropy has varied in this text so far"],
    ["logprob", "log-probability", "nats", "of the token that was taken"],
  ] },
  { title: "Attention of the last position", fields: [
    ["attn_entropy", "attention entropy", "bits", "how widely the heads look, on average"],
    ["attn_entropy_norm", "normalised attention entropy", "0–1", "divided by the most that the context allows"],
    ["attn_varentropy", "attention varentropy", "bits²", "how much the heads differ in that"],
    ["agreement", "agreement", "0–1", "1: all heads look at the same places"],
    ["agreement_published", "agreement as published", "", "the published formula, which measures disagreement"],
    ["interaction_strength", "interaction strength", "", "mean size of the attention scores"],
  ] },
  { title: "How the token was drawn", fields: [
    ["temperature", "temperature", "", "0: the most likely token"],
    ["top_k", "top-k", "tokens", "at most so many were left; 0: no limit"],
    ["top_p", "top-p", "", "the likeliest tokens up to this mass were left"],
    ["min_p", "min-p", "", "tokens this much less likely than the first were dropped"],
    ["confidence", "confidence", "", "a sum of all metrics; reported, steers nothing"],
    ["forwards", "token positions evaluated", "", "beyond the prompt, up to here, branches included"],
  ] },
];

// What the sampler may do, in a newcomer's words.
export const ACTIONS = {
  argmax: "took the most likely token",
  inject: "wrote a thought into the text",
  explore: "drew once, warmer than usual",
  branch: "followed several continuations and kept the best",
  resample: "drew once, hot",
  backspace: "took the last token back and drew its place again",
  adaptive: "drew several candidates and kept the likeliest",
  sample: "drew once",
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

// Text with signs for characters that cannot be seen.
export function visible(text, id) {
  if (text === "") return id == null ? "∅" : `⟨${id}⟩`;
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "\ufffd");
}

// The same between quotation marks where its blanks matter.
export function quoted(text, id) {
  return text === "" ? visible(text, id) : `“${visible(text, id)}”`;
}
