// Other bounds for the regimes: sliders, what they would make of this run, and how to keep them.

import { byId, copyText, element, onceAFrame } from "./dom.js";
import { number, percent } from "./format.js";
import { BOXES, REGIMES, keyOf, occupancy, valuesOf } from "./regimes.js";

const SIGNS = { entropy: "entropy", varentropy: "varentropy", attn_entropy_norm: "normalised attention entropy", agreement: "agreement" };

// Every bound that a box has, by its key: its quantity, its value, its label.
export function knobsOf(facts) {
  const knobs = new Map();
  const values = valuesOf(facts);
  for (const box of BOXES) for (const condition of facts.boxes[box]) {
    const key = keyOf(condition);
    if (!knobs.has(key)) knobs.set(key, { key, quantity: condition.quantity, name: condition.name, value: values[key], below: [], above: [] });
    knobs.get(key)[condition.sign === "<" ? "below" : "above"].push(REGIMES[box].title);
  }
  const order = Object.keys(SIGNS);
  return [...knobs.values()].sort((a, b) => order.indexOf(a.quantity) - order.indexOf(b.quantity) || a.value - b.value);
}

// What a sampler would refuse: a box that nothing fits into, or thresholds in the wrong order.
export function problemOf(values, bounds) {
  for (const [low, high] of [["h1", "h2"], ["u1", "u2"]]) {
    if (values[low] > values[high]) return `${low} is above ${high}: a sampler would refuse that.`;
  }
  for (const { regime, bounds: box } of bounds) {
    for (const [quantity, [low, high]] of Object.entries(box)) {
      if (low >= high) return `${REGIMES[regime].title} has no ${SIGNS[quantity]} between its bounds: a sampler would refuse that.`;
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
  for (const box of BOXES) {
    if (facts.boxes[box].some((condition) => !condition.name)) {
      settings[`regimes.${box}`] = `[${facts.boxes[box].map((condition) => JSON.stringify(conditionText(condition, values))).join(", ")}]`;
    }
  }
  return settings;
}

export function commandOf(settings) {
  const words = Object.entries(settings).map(([key, value]) => {
    const word = `sampler.${key}=${value}`;
    return /[^\w.=-]/.test(word) ? `'${word}'` : word;
  });
  return `--set ${words.join(" ")}`;
}

// The whole sampler: what the run's own was made from may lie elsewhere, or have been changed.
export function fileOf(facts, settings) {
  const run = Object.entries(facts.parameters).map(([key, value]) => [key, tomlOf(value)]);
  // Of any model: its own thresholds must not take the place of these.
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
  // JSON leaves DEL as it is, TOML does not take it.
  return JSON.stringify(value).replaceAll("\x7f", "\\u007f");
}

export function showWhatIf(state) {
  const { facts } = state;
  const knobs = knobsOf(facts);
  const apply = onceAFrame((values) => state.setBounds(values));
  const rows = knobs.map((knob) => knobRow(knob, state, apply));
  byId("knobs").replaceChildren(...rows.map(({ node }) => node));
  byId("what-if-reset").addEventListener("click", () => state.setBounds({ ...state.original }));
  byId("text-note-reset").addEventListener("click", () => state.setBounds({ ...state.original }));
  for (const name of ["command", "file"]) {
    const button = byId(`copy-${name}`);
    button.addEventListener("click", () => copyText(byId(`what-if-${name}`).textContent, button));
  }

  const update = () => {
    const problem = problemOf(state.values, state.bounds);
    const settings = settingsOf(facts, state.values);
    byId("what-if-problem").textContent = problem;
    byId("copy-command").disabled = byId("copy-file").disabled = Boolean(problem);
    byId("what-if-reset").disabled = !state.changed;
    byId("what-if-command").textContent = commandOf(settings);
    byId("what-if-file").textContent = fileOf(facts, settings);
    rows.forEach(({ refresh }) => refresh());
    table(state);
  };
  for (const kind of ["row", "bounds"]) state.on(kind, update);
}

function knobRow(knob, state, apply) {
  const top = limit(knob, state);
  const step = top > 2 ? 0.01 : 0.001;
  const label = knob.name ? `${knob.name}, ${SIGNS[knob.quantity]}` : SIGNS[knob.quantity];
  const change = (event) => {
    const value = Number(event.target.value);
    if (event.target.value !== "" && value >= 0) apply({ ...state.values, [knob.key]: value });
  };
  const id = `knob-${knob.key.replace(/\W/g, "-")}`;
  const slider = element("input", { type: "range", id, min: 0, max: top, step, oninput: change });
  const box = element("input", { type: "number", min: 0, step: "any", "aria-label": `${label}, as a number`, oninput: change });
  const node = element("div", { class: "knob" },
    element("label", { for: id }, label, element("span", { class: "muted" }, usesOf(knob))), slider, box);
  const refresh = () => {
    const value = state.values[knob.key];
    slider.value = value;
    if (document.activeElement !== box) box.value = value;
  };
  return { node, refresh };
}

// Which boxes lie on which side of a bound.
function usesOf({ below, above }) {
  const sides = [[below, "below"], [above, "above"]].filter(([names]) => names.length);
  return sides.map(([names, side]) => `${names.join(" and ")} ${side}`).join(", ");
}

// The end of a slider: a little past all that the run has, and past the bound itself.
function limit(knob, state) {
  if (knob.quantity === "attn_entropy_norm" || knob.quantity === "agreement") return 1;
  let most = 1.5 * knob.value;
  for (const row of state.rows.values()) for (const token of row.tokens) most = Math.max(most, token[knob.quantity]);
  return Math.ceil(most * 10.5) / 10;
}

function table(state) {
  const { tokens } = state.row;
  const before = occupancy(tokens, (token) => token.regime);
  const now = occupancy(tokens, state.regimeOf);
  const total = Math.max(tokens.length, 1);
  byId("occupancy").replaceChildren(...Object.entries(REGIMES).map(([regime, { title, meaning }]) => {
    const change = now[regime] - before[regime];
    return element("tr", { "data-regime": regime },
      element("th", { scope: "row" }, element("span", { class: "token", "data-regime": regime }, title), ` ${meaning}`),
      element("td", { class: "value" }, element("data", { value: before[regime] }, percent(before[regime] / total))),
      element("td", { class: "value" }, element("data", { value: now[regime] }, percent(now[regime] / total))),
      element("td", { class: "value" }, change ? `${change > 0 ? "+" : "−"}${number(Math.abs(change))}` : "="));
  }));
}
