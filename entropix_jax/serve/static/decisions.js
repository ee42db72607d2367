// Which decision of a text is the first that other settings change.

import { boundsOf, classify, valuesOf } from "./regimes.js";
import { placeOf } from "./texts.js";
import { settingsOf } from "./whatif.js";

const REACH = 8; // tokens that a row may go back
const RULE = new Set(["thresholds", "regimes"]);

// The settings that moved thresholds stand for, by their keys.
export function changesOf(facts, values) {
  const [before, after] = [settingsOf(facts, valuesOf(facts)), settingsOf(facts, values)];
  return Object.fromEntries(Object.entries(after).filter(([key, text]) => text !== before[key]).map(([key, text]) => [key, JSON.parse(text)]));
}

// `thresholds` by their keys where those changed; `changes`: settings. Returns the index of the first token that may come
// otherwise, and the place from which the text is to go on; null if there is none.
export function firstChange(node, changes, values = null) {
  const { items, facts } = node;
  const bounds = values && boundsOf(facts.boxes, values);
  const keys = Object.keys(changes).filter((key) => !bounds || !RULE.has(key.split(".")[0]));
  const index = items.findIndex((token) => !token.chosen && ((bounds && classify(token, bounds) !== token.regime) || keys.some((key) => mayUse(token, key, facts.sampler))));
  if (index < 0) return null;
  // A token that was taken back later stood further left.
  const places = items.slice(index).filter((token, i) => i === 0 || token.type === "retracted").map((token) => placeOf(node, token));
  const place = Math.min(...places);
  const back = goesBack({ ...facts.sampler, ...changes }) ? place - REACH : place;
  // What the reader chose before it stays.
  const chosen = items.slice(0, index).findLast((token) => token.chosen);
  return { index, position: Math.max(0, back, chosen ? placeOf(node, chosen) + 1 : 0) };
}

function goesBack(sampler) {
  return Object.entries(sampler).some(([key, value]) => key.startsWith("arms.") && value === "backspace") || sampler["phrases.banned"]?.length > 0;
}

// Whether a setting may play a part in how the token was drawn.
function mayUse(token, key, sampler) {
  const [section, name] = key.split(".");
  if (section === "arms") return name === "loop" ? token.loop : token.regime === name;
  const arm = sampler[token.loop ? "arms.loop" : `arms.${token.regime}`];
  if (section === "base") return arm !== "argmax" || token.action !== "argmax";
  if (Object.entries(sampler).some(([other, value]) => other.startsWith("arms.") && value === section)) return arm === section || token.action === section;
  return true;
}
