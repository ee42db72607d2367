// The settings of the shown text: sliders for the thresholds and the usual settings, every other one by its key.

import { byId, element } from "./dom.js";
import { boundsOf, valuesOf } from "./regimes.js";
import { knobRow, knobsOf, problemOf } from "./whatif.js";

const SETTING = /([\w.]+)\s*=\s*(\[[^\]]*\]|"(?:[^"\\]|\\.)*"|[^\s"[\]=]+)(?=\s|$)/g;

// Parses `key=value key=value`. A value is JSON, or else a text such as 30%.
export function parseSettings(text) {
  const found = {};
  const rest = text.replace(SETTING, (_, key, value) => ((found[key] = valueOf(value)), "")).trim();
  if (rest) throw new Error(`Settings are written key=value, not “${rest}”.`);
  return found;
}

function valueOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// Settings as `parseSettings` reads them.
export function formatSettings(settings) {
  return Object.entries(settings).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(" ");
}

// Settings with a slider: key, label, maximum, step.
const SLIDERS = [["base.temperature", "temperature", 2, 0.05], ["base.min_p", "min-p", 0.5, 0.01]];
const REST = 500; // ms without a move after which the text is regenerated

export class Settings {
  // `move(values)` is called while a slider moves, `drop()` once it rests, `apply(changes)` for a setting by its key.
  constructor({ move, drop, apply }) {
    this.texts = { values: {}, sides: [] };
    this.changes = {}; // of the sliders in `SLIDERS`
    this.move = move;
    for (const id of ["knobs", "sliders"]) byId(id).addEventListener("change", () => { // keys move a slider step by step
      clearTimeout(this.timer);
      this.timer = setTimeout(drop, REST);
    });
    byId("setting").addEventListener("input", () => {
      const key = byId("setting").value;
      const value = this.facts?.percentiles?.[key] ?? this.facts?.sampler[key];
      if (value !== undefined) byId("value").value = JSON.stringify(value);
    });
    byId("other").addEventListener("submit", (event) => {
      event.preventDefault();
      apply({ [byId("setting").value]: valueOf(byId("value").value) });
    });
  }

  show(facts, tokens) {
    clearTimeout(this.timer);
    // The knobs are hidden until a regenerated text has its settings, and then new.
    const { id } = document.activeElement;
    if (id.startsWith("knob-")) this.focused = id;
    byId("settings").hidden = !facts;
    if (!facts) return;
    this.facts = facts;
    this.texts = { values: valuesOf(facts), sides: [{ tokens }] };
    this.changes = {};
    this.rows = knobsOf(facts).map((knob) => knobRow(knob, this.texts, this.move));
    byId("knobs").replaceChildren(...this.rows.map(({ node }) => node));
    byId("sliders").replaceChildren(...SLIDERS.map((slider) => this.sliderOf(...slider)));
    byId("keys").replaceChildren(...Object.keys(facts.sampler).map((value) => element("option", { value })));
    this.refresh(this.texts.values);
    if (this.focused && [document.body, null].includes(document.activeElement)) byId(this.focused)?.focus();
    this.focused = null;
  }

  sliderOf(key, label, max, step) {
    const id = `knob-${key.replace(".", "-")}`;
    const value = this.facts.sampler[key];
    const change = ({ target }) => {
      slider.value = box.value = this.changes[key] = Number(target.value);
    };
    const slider = element("input", { type: "range", id, min: 0, max, step, value, oninput: change });
    const box = element("input", { type: "number", id: `${id}-number`, min: 0, step: "any", value, "aria-label": `${label}, as a number`, oninput: change });
    return element("div", { class: "knob" }, element("label", { for: id }, label, element("span", { class: "muted" }, key)), slider, box);
  }

  // Returns the reason why a sampler refuses the thresholds, or an empty text.
  refresh(values) {
    this.texts.values = values;
    this.rows?.forEach(({ refresh }) => refresh());
    return problemOf(values, boundsOf(this.facts.boxes, values));
  }
}
