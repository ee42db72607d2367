// Other thresholds of the regimes: sliders, how they classify this run, and how to use them.

import { byId, copyText, element, onceAFrame } from "./dom.js";
import { number, percent, regimeNode } from "./format.js";
import { percentileOf, valueAt } from "./quadrants.js";
import { REGIMES, keyOf, occupancy, regimeTitle, valuesOf } from "./regimes.js";

const QUANTITIES = { entropy: "entropy", varentropy: "varentropy", attn_entropy_norm: "normalised attention entropy", agreement: "agreement", sequence_varentropy: "sequence varentropy", p_wrong: "P(wrong)" };
const PAIRS = [["h1", "h2"], ["u1", "u2"]]; // low and high
const UNITS = { entropy: "bits", varentropy: "bits²", sequence_varentropy: "bits²" };

// Every threshold: its key, quantity, name, value, percentile as written (if any), whether it is the lower one of its pair,
// the quantile table of its quantity (null without one), whose answers the table describes, and the regimes below and
// above it.
export function knobsOf(facts) {
  const knobs = new Map();
  const values = valuesOf(facts);
  const owner = Object.keys(facts.calibration?.model ?? {}).length ? "this model's answers" : "the generic table";
  for (const { regime, conditions } of facts.boxes) for (const [i, condition] of conditions.entries()) {
    const { quantity, name } = condition;
    const key = keyOf(condition);
    const written = /([\d.]+)\s*%\s*$/.exec(writtenBound(facts, regime, i, name))?.[1];
    const knob = { key, quantity, name, value: values[key], written: written && Number(written), low: PAIRS.some(([low]) => low === name), table: facts.calibration?.quantiles[quantity] ?? null, owner, below: [], above: [] };
    if (!knobs.has(key)) knobs.set(key, knob);
    knobs.get(key)[condition.sign === "<" ? "below" : "above"].push(regimeTitle(regime));
  }
  const order = Object.keys(QUANTITIES);
  return [...knobs.values()].sort((a, b) => order.indexOf(a.quantity) - order.indexOf(b.quantity) || a.value - b.value);
}

// The bound of a regime's condition `i` in the sampler's file, if it holds a percentile: a threshold's value
// such as "30%", or the whole condition.
function writtenBound({ percentiles = {} }, regime, i, name) {
  return name ? percentiles[`thresholds.${name}`] : percentiles[`regimes.${regime}`]?.[i];
}

// A value of a threshold as a percentile, such as "30 %"; empty without a table.
export function percentileText({ value: original, written, table }, value) {
  if (!table) return "";
  const found = value === original && written !== undefined ? written : percentileOf(table, value);
  return `${Number(found.toFixed(1))} %`;
}

// A dragged threshold's value, kept in order with the other one of its pair.
export function inOrder(name, value, values) {
  for (const [low, high] of PAIRS) {
    if (name === low && high in values) return Math.min(value, values[high]);
    if (name === high && low in values) return Math.max(value, values[low]);
  }
  return value;
}

// Why a sampler refuses the thresholds: wrong order, or an empty box.
export function problemOf(values, bounds) {
  for (const [low, high] of PAIRS) {
    if (values[low] > values[high]) return `${low} is above ${high}: samplers refuse that.`;
  }
  for (const { regime, bounds: box } of bounds) {
    for (const [quantity, [low, high]] of Object.entries(box)) {
      if (low >= high) return `${regimeTitle(regime)} is empty: its bounds on ${QUANTITIES[quantity]} cross. Samplers refuse that.`;
    }
  }
  return "";
}

// Settings as TOML values by their dotted key. Thresholds that did not move keep their percentile as written.
export function settingsOf(facts, values) {
  const settings = {};
  const original = valuesOf(facts);
  const stays = (key) => values[key] === original[key];
  for (const name of Object.keys(facts.thresholds)) {
    const written = stays(name) && writtenBound(facts, null, null, name);
    if (name in values) settings[`thresholds.${name}`] = written ? tomlOf(written) : String(values[name]);
  }
  for (const { regime, conditions } of facts.boxes) {
    if (conditions.every(({ name }) => name)) continue;
    settings[`regimes.${regime}`] = tomlOf(conditions.map((condition, i) => {
      const { quantity, sign, name } = condition;
      const written = !name && stays(keyOf(condition)) && writtenBound(facts, regime, i);
      return written || `${quantity} ${sign} ${name ?? values[keyOf(condition)]}`;
    }));
  }
  return settings;
}

function commandOf(settings) {
  const words = Object.entries(settings).map(([key, value]) => {
    const word = `sampler.${key}=${value.replace(/^"([\d.]+%)"$/, "$1")}`;
    return /[^\w.=%-]/.test(word) ? `'${word}'` : word;
  });
  return `--set ${words.join(" ")}`;
}

// The complete sampler, not only the changes: the file that it came from may be elsewhere or changed.
function fileOf(facts, settings) {
  const { "thresholds.calibrated": _, ...parameters } = facts.parameters; // a key of older traces
  const run = Object.entries({ ...parameters, ...facts.percentiles }).map(([key, value]) => [key, tomlOf(value)]);
  const sections = {};
  for (const [key, value] of Object.entries({ ...Object.fromEntries(run), ...settings })) {
    const [section, name] = key.split(".");
    (sections[section] ??= []).push(`${name} = ${value}`);
  }
  return Object.entries(sections).map(([name, lines]) => `[${name}]\n${lines.join("\n")}\n`).join("\n");
}

function tomlOf(value) {
  if (Array.isArray(value)) return `[${value.map(tomlOf).join(", ")}]`;
  // JSON leaves DEL unescaped, TOML does not allow it.
  return JSON.stringify(value).replaceAll("\x7f", "\\u007f");
}

export function showWhatIf(texts) {
  const { facts } = texts;
  const apply = onceAFrame((values) => texts.setValues(values));
  const rows = knobsOf(facts).map((knob) => knobRow(knob, texts, apply));
  byId("knobs").replaceChildren(...rows.map(({ node }) => node));
  const resets = [...document.querySelectorAll(".what-if-reset")];
  for (const button of resets) button.addEventListener("click", () => texts.setValues({ ...texts.original }));
  for (const name of ["command", "file"]) {
    const button = byId(`copy-${name}`);
    button.addEventListener("click", () => copyText(byId(`what-if-${name}`).textContent, button));
  }
  texts.on("sides bounds", () => {
    const problem = problemOf(texts.values, texts.bounds);
    const settings = settingsOf(facts, texts.values);
    byId("what-if-problem").textContent = problem;
    byId("copy-command").disabled = byId("copy-file").disabled = Boolean(problem);
    for (const button of resets) button.disabled = !texts.changed;
    byId("what-if-note").hidden = !texts.changed;
    byId("what-if-command").textContent = commandOf(settings);
    byId("what-if-file").textContent = fileOf(facts, settings);
    rows.forEach(({ refresh }) => refresh());
    showOccupancy(texts);
  });
}

export function knobRow(knob, texts, apply) {
  const { table, quantity } = knob;
  const unit = UNITS[quantity] ? `, ${UNITS[quantity]}` : "";
  const label = (knob.name ? `${knob.name}, ${QUANTITIES[quantity]}` : QUANTITIES[quantity]) + unit;
  const scale = table
    ? { max: 100, step: 0.5, at: (value) => percentileOf(table, value), value: (percent) => valueAt(table, percent) }
    : linearScale(knob, texts);
  const change = (value) => value >= 0 && apply({ ...texts.values, [knob.key]: value });
  const id = `knob-${knob.key.replace(/\W/g, "-")}`;
  const slider = element("input", { type: "range", id, min: 0, max: scale.max, step: scale.step, oninput: () => change(scale.value(Number(slider.value))) });
  const box = element("input", { type: "number", id: `${id}-number`, min: 0, step: "any", "aria-label": `${label}, as a number`, oninput: () => box.value !== "" && change(Number(box.value)) });
  const share = element("output", { class: "muted", for: id });
  const uses = [[knob.below, "below"], [knob.above, "above"]].filter(([names]) => names.length);
  const node = element("div", { class: "knob" },
    element("label", { for: id }, label, element("span", { class: "muted" }, uses.map(([names, side]) => `${names.join(" and ")} ${side}`).join(", "))), slider, box, share);
  const refresh = () => {
    const value = texts.values[knob.key];
    // Several positions may have one value: the slider stays under the hand.
    if (scale.value(Number(slider.value)) !== value) slider.value = scale.at(value);
    if (document.activeElement !== box) box.value = value;
    share.textContent = table ? `${percentileText(knob, value)} of ${knob.owner}` : "";
    slider.setAttribute("aria-valuetext", [`${number(value)} ${UNITS[quantity] ?? ""}`.trim(), share.textContent].filter(Boolean).join(", "));
  };
  return { node, refresh };
}

// The scale of a slider without a table: values up to a little beyond the run's and the threshold.
function linearScale({ quantity, value: original }, texts) {
  const same = (value) => value;
  if (["attn_entropy_norm", "agreement", "p_wrong"].includes(quantity)) return { max: 1, step: 0.001, at: same, value: same };
  const values = texts.sides.flatMap(({ tokens }) => tokens.map((token) => token[quantity]));
  const max = Math.ceil(values.reduce((a, b) => Math.max(a, b), 1.5 * original) * 10.5) / 10;
  return { max, step: max > 2 ? 0.01 : 0.001, at: same, value: same };
}

function showOccupancy(texts) {
  const { tokens } = texts.side;
  const [before, now] = [(token) => token.regime, texts.regimeOf].map((of) => occupancy(tokens, of));
  const share = (count) => element("td", { class: "value" }, element("data", { value: count }, percent(count / Math.max(tokens.length, 1))));
  byId("occupancy").replaceChildren(...Object.keys(REGIMES).map((regime) => {
    const change = now[regime] - before[regime];
    return element("tr", { "data-regime": regime },
      element("th", { scope: "row" }, regimeNode(regime)),
      share(before[regime]), share(now[regime]),
      element("td", { class: "value" }, change ? `${change > 0 ? "+" : "−"}${number(Math.abs(change))}` : "="));
  }));
}
