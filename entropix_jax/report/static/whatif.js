// Other thresholds of the regimes: sliders, how they classify this run, and how to use them.

import { byId, copyText, element, onceAFrame } from "./dom.js";
import { number, percent } from "./format.js";
import { REGIMES, keyOf, occupancy, valuesOf } from "./regimes.js";

const QUANTITIES = { entropy: "entropy", varentropy: "varentropy", attn_entropy_norm: "normalised attention entropy", agreement: "agreement", sequence_varentropy: "sequence varentropy" };

// Every threshold: its key, quantity, name and value, and the regimes below and above it.
export function knobsOf(facts) {
  const knobs = new Map();
  const values = valuesOf(facts);
  for (const { regime, conditions } of facts.boxes) for (const condition of conditions) {
    const key = keyOf(condition);
    if (!knobs.has(key)) knobs.set(key, { key, quantity: condition.quantity, name: condition.name, value: values[key], below: [], above: [] });
    knobs.get(key)[condition.sign === "<" ? "below" : "above"].push(REGIMES[regime].title);
  }
  const order = Object.keys(QUANTITIES);
  return [...knobs.values()].sort((a, b) => order.indexOf(a.quantity) - order.indexOf(b.quantity) || a.value - b.value);
}

// Why a sampler refuses the thresholds: wrong order, or an empty box.
export function problemOf(values, bounds) {
  for (const [low, high] of [["h1", "h2"], ["u1", "u2"]]) {
    if (values[low] > values[high]) return `${low} is above ${high}: samplers refuse that.`;
  }
  for (const { regime, bounds: box } of bounds) {
    for (const [quantity, [low, high]] of Object.entries(box)) {
      if (low >= high) return `${REGIMES[regime].title} is empty: its bounds on ${QUANTITIES[quantity]} cross. Samplers refuse that.`;
    }
  }
  return "";
}

function conditionText(condition, values) {
  return `${condition.quantity} ${condition.sign} ${condition.name ?? values[keyOf(condition)]}`;
}

// Settings as TOML values by their dotted key.
export function settingsOf(facts, values) {
  const settings = {};
  for (const name of Object.keys(facts.thresholds)) {
    const value = values[name] ?? facts.thresholds[name];
    if (name in values) settings[`thresholds.${name}`] = String(value);
  }
  for (const { regime, conditions } of facts.boxes) {
    if (conditions.some((condition) => !condition.name)) {
      settings[`regimes.${regime}`] = `[${conditions.map((condition) => JSON.stringify(conditionText(condition, values))).join(", ")}]`;
    }
  }
  return settings;
}

function commandOf(settings) {
  const words = Object.entries(settings).map(([key, value]) => {
    const word = `sampler.${key}=${value}`;
    return /[^\w.=-]/.test(word) ? `'${word}'` : word;
  });
  return `--set ${words.join(" ")}`;
}

// The complete sampler, not only the changes: the file that it came from may be elsewhere or changed.
function fileOf(facts, settings) {
  const run = Object.entries(facts.parameters).map(([key, value]) => [key, tomlOf(value)]);
  // So that the model's own thresholds do not override these.
  const all = { ...Object.fromEntries(run), ...settings, "thresholds.calibrated": "false" };
  const sections = {};
  for (const [key, value] of Object.entries(all)) {
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
  const { facts } = texts.sides[0];
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
  const top = limitOf(knob, texts);
  const label = knob.name ? `${knob.name}, ${QUANTITIES[knob.quantity]}` : QUANTITIES[knob.quantity];
  const change = (event) => {
    const value = Number(event.target.value);
    if (event.target.value !== "" && value >= 0) apply({ ...texts.values, [knob.key]: value });
  };
  const id = `knob-${knob.key.replace(/\W/g, "-")}`;
  const slider = element("input", { type: "range", id, min: 0, max: top, step: top > 2 ? 0.01 : 0.001, oninput: change });
  const box = element("input", { type: "number", min: 0, step: "any", "aria-label": `${label}, as a number`, oninput: change });
  const uses = [[knob.below, "below"], [knob.above, "above"]].filter(([names]) => names.length);
  const node = element("div", { class: "knob" },
    element("label", { for: id }, label, element("span", { class: "muted" }, uses.map(([names, side]) => `${names.join(" and ")} ${side}`).join(", "))), slider, box);
  const refresh = () => {
    slider.value = texts.values[knob.key];
    if (document.activeElement !== box) box.value = texts.values[knob.key];
  };
  return { node, refresh };
}

// The end of a slider: a little beyond the run's values and the threshold.
function limitOf(knob, texts) {
  if (knob.quantity === "attn_entropy_norm" || knob.quantity === "agreement") return 1;
  const values = texts.sides.flatMap(({ tokens }) => tokens.map((token) => token[knob.quantity]));
  return Math.ceil(values.reduce((a, b) => Math.max(a, b), 1.5 * knob.value) * 10.5) / 10;
}

function showOccupancy(texts) {
  const { tokens } = texts.shown[0];
  const [before, now] = [(token) => token.regime, texts.regimeOf].map((of) => occupancy(tokens, of));
  const share = (count) => element("td", { class: "value" }, element("data", { value: count }, percent(count / Math.max(tokens.length, 1))));
  byId("occupancy").replaceChildren(...Object.entries(REGIMES).map(([regime, { title, meaning }]) => {
    const change = now[regime] - before[regime];
    return element("tr", { "data-regime": regime },
      element("th", { scope: "row" }, element("span", { class: "token", "data-regime": regime }, title), ` ${meaning}`),
      share(before[regime]), share(now[regime]),
      element("td", { class: "value" }, change ? `${change > 0 ? "+" : "−"}${number(Math.abs(change))}` : "="));
  }));
}
