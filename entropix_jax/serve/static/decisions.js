// The first decision of a text that other settings change.

import { boundsOf, classify, valuesOf } from "./regimes.js";
import { placeOf } from "./texts.js";
import { settingsOf } from "./whatif.js";

const PHRASE = 8; // maximum number of tokens that are retracted for a banned phrase
const RULE = new Set(["thresholds", "regimes"]);

// The settings of moved thresholds, by their keys, as numbers.
export function changesOf(facts, values) {
  const numeric = { ...facts, percentiles: {} };
  const [before, after] = [settingsOf(numeric, valuesOf(facts)), settingsOf(numeric, values)];
  return Object.fromEntries(Object.entries(after).filter(([key, text]) => text !== before[key]).map(([key, text]) => [key, JSON.parse(text)]));
}

// The index of the first token that may change, and the place from which the text is regenerated; null if no token
// changes. `changes` are settings, `values` the thresholds by their keys if those moved.
export function firstChange(node, changes, values = null) {
  const { items, facts, written = [] } = node;
  const fixed = written.at(-1)?.at ?? 0; // what the reader wrote stays
  const original = valuesOf(facts);
  const moved = values && Object.keys(values).some((key) => values[key] !== original[key]);
  const bounds = moved && boundsOf(facts.boxes, values);
  const keys = Object.keys(changes).filter((key) => !values || !RULE.has(key.split(".")[0]));
  const changed = (token) => bounds && (classify(token, bounds) !== token.regime || mayUseThresholds(token, facts, values));
  const index = items.findIndex((token) => !token.chosen && placeOf(node, token) >= fixed && (changed(token) || keys.some((key) => mayUse(token, key, facts.sampler))));
  if (index < 0) return null;
  // A token that was retracted later was further left.
  const places = items.slice(index).filter((token, i) => i === 0 || token.type === "retracted").map((token) => placeOf(node, token));
  const place = Math.min(...places);
  const back = place - reachOf({ ...facts.sampler, ...changes });
  // Tokens that the reader chose stay.
  const chosen = items.slice(0, index).findLast((token) => token.chosen);
  return { index, place: Math.max(fixed, back, chosen ? placeOf(node, chosen) + 1 : 0) };
}

// Whether moved thresholds may change a token that keeps its regime: branches end by the regimes of their own tokens,
// and adaptive draws may be in units of h2 and u2.
function mayUseThresholds(token, { sampler, thresholds }, values) {
  const scaled = sampler["metrics.units"] === "thresholds" && ["h2", "u2"].some((name) => name in values && values[name] !== thresholds[name]);
  return sampler["thresholds.dynamic"] || Boolean(token.branches) || (scaled && ["adaptive", "backspace"].includes(token.action));
}

// How many tokens before a decision it may retract.
function reachOf(sampler) {
  if (sampler["phrases.banned"]?.length) return PHRASE;
  const arms = Object.entries(sampler).filter(([key]) => key.startsWith("arms.")).map(([, arm]) => arm);
  return arms.includes("backspace") ? sampler["backspace.reach"] : 0;
}

// Whether a setting may affect the draw of a token.
function mayUse(token, key, sampler) {
  const [section, name] = key.split(".");
  if (section === "arms") return name === "loop" ? token.loop : token.regime === name;
  const arm = sampler[token.loop ? "arms.loop" : `arms.${token.regime}`];
  if (section === "base") return arm !== "argmax" || token.action !== "argmax";
  if (Object.entries(sampler).some(([other, value]) => other.startsWith("arms.") && value === section)) return arm === section || token.action === section;
  return true;
}
