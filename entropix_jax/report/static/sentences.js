// Sentences about a token: why it is in its regime, and what the sampler did.

import { METRICS, number, percent } from "./format.js";
import { boundsOf, classify, keyOf, valuesOf } from "./regimes.js";

const FIELDS = new Map(METRICS.flatMap(({ fields }) => fields).map(([name, label, unit]) => [name, [label, unit.startsWith("bits") ? ` ${unit}` : ""]]));

// A sentence with the bounds that put the token into its regime. "" if they do not, as with thresholds that moved during the
// run.
export function reasonOf(token, facts) {
  const values = facts && valuesOf(facts);
  if (!facts || classify(token, boundsOf(facts.boxes, values)) !== token.regime) return "";
  const box = facts.boxes.find(({ regime }) => regime === token.regime);
  const conditions = (box ? [box] : facts.boxes).flatMap((one) => one.conditions);
  const quantities = [...new Set(conditions.map(({ quantity }) => quantity))];
  const parts = quantities.map((quantity) => {
    const [label, unit] = FIELDS.get(quantity);
    const bounds = conditions.filter((one) => one.quantity === quantity).map((one) => [values[keyOf(one)], one.name]);
    const below = bounds.filter(([value]) => value < token[quantity]).sort(([a], [b]) => b - a)[0];
    const above = bounds.filter(([value]) => value > token[quantity]).sort(([a], [b]) => a - b)[0];
    const digits = [1, 2, 3, 4, 5].find((count) => [below, above].every((bound) => !bound || bound[0].toFixed(count) !== token[quantity].toFixed(count))) ?? 6;
    const shown = (value) => value.toFixed(Math.max(digits, value > 0 ? Math.ceil(1 - Math.log10(value)) : 0)); // two significant digits, at least
    const told = ([value, name]) => `${name ? `${name} = ` : ""}${shown(value)}`;
    const sides = [below && `above ${told(below)}`, above && `below ${told(above)}`].filter(Boolean);
    return sides.length ? `${label} ${shown(token[quantity])}${unit} is ${sides.join(" and ")}` : "";
  }).filter(Boolean).join(", ");
  return parts && `${parts[0].toUpperCase()}${parts.slice(1)}.`;
}

// The distribution before a token in words. They follow from its measures, since thresholds may be extreme. "" if an old
// trace lacks them.
export function shapeOf({ max_prob: most, varentropy }) {
  if (most == null) return "";
  if (most >= 0.9) return `one likely token (${percent(most)})`;
  if (most >= 0.5) return `a favourite (${percent(most)}) and rivals`;
  return varentropy < 1 ? `many tokens, about equally likely (the first ${percent(most)})` : `no clear favourite (the first has ${percent(most)}), and unevenly likely tokens`;
}

// The text that the host forced or that a question became, around a token of such an action; "" for others. `tokens` are
// the committed ones of its text.
export function forcedAround(token, tokens) {
  if (!["lookup", "clarify"].includes(token.action) || token.type === "retracted") return "";
  const at = tokens.indexOf(token);
  const from = tokens.findLastIndex((one, i) => i < at && one.action !== token.action) + 1;
  const length = tokens.slice(from).findIndex(({ action }) => action !== token.action);
  // The model ends a question in its own words, and the text with it.
  const last = length < 0 || token.action === "clarify" ? undefined : from + length;
  return tokens.slice(from, last).map(({ text }) => text).join("").trim();
}

const ACTIONS = {
  argmax: "took the most likely token",
  inject: "injected a thought into the text",
  branch: "rolled out several continuations and kept the best",
  clarify: "asked a question, because several continuations had different outcomes",
  backspace: "stepped back: retracted a token and sampled again",
  adaptive: "sampled several candidates and kept the most likely of them",
  think_end: "ended the thinking section, because the model was certain for several tokens",
  phrases: "retracted a banned phrase and sampled again",
  budget_forcing: "extended or ended the thinking section",
  lookup: "looked something up and inserted the result",
};

const HABITS = {
  argmax: "takes the most likely token",
  sample: "draws a token",
  explore: "draws at a higher temperature",
  inject: "draws at a higher temperature",
  branch: "continues several candidates and keeps the best",
  backspace: "may take the last token back",
  resample: "draws at a high temperature",
  adaptive: "draws several candidates and keeps the most likely one",
  lookup: "looks something up and inserts the result",
  clarify: "asks a question if sampled continuations have a few different outcomes",
};

// The sampler's action in a regime. Empty for an unknown arm.
export function habitOf(regime, facts) {
  const settings = facts?.sampler ?? {};
  const arm = settings[`arms.${regime}`];
  return arm === "inject" && settings["inject.thought"]?.length ? "injects a thought" : HABITS[arm] ?? "";
}

const FORCED = ["inject", "lookup", "clarify"]; // in any regime

// Why an arm did something else.
const INSTEAD = {
  backspace: () => "no token before it was in doubt, so none was taken back",
  branch: () => "the row has no forks left",
  inject: (settings) => (settings["inject.thought"]?.length ? "no thought was due" : null),
};

// `place`: the number of tokens before it.
export function deedOf(token, facts, place) {
  const settings = facts?.parameters ?? facts?.sampler ?? {};
  const candidates = token.branches?.length;
  if (token.action === "branch") {
    if (!candidates) return "continues the token before it";
    return candidates > 1 ? `forked: continued ${candidates} candidates and kept the best` : "no fork: no second token was likely enough";
  }
  const draws = settings["adaptive.draws"];
  const once = ["sample", "explore", "resample"].includes(token.action) && `sampled once, at temperature ${token.temperature.toFixed(2)}`;
  const done = once || (token.action === "adaptive" && draws > 1 ? `drew ${draws} candidates and kept the most likely of them` : ACTIONS[token.action] ?? "a custom arm");
  const arm = settings[`arms.${token.regime}`];
  if (arm === token.action || token.loop || FORCED.includes(token.action)) return done;
  if (place < settings["start.tokens"] && token.action === settings["arms.start"]) return `${done}, as for the first ${number(settings["start.tokens"])} tokens in any regime`;
  const why = INSTEAD[arm]?.(settings);
  return why ? `${why}: ${done}` : done;
}
