// A study's items: their scores by setting, and each one's answers.

import { byId, element } from "./dom.js";
import { number, visible } from "./format.js";
import { showFilters } from "./filters.js";
import { Table } from "./table.js";

const MOST_SETTINGS = 40; // columns that a table still can be read with
const MOST_UNFOLDED = 3; // settings whose answers all stand there at once

export class ItemTable {
  constructor(study, settings, answers, facts) {
    Object.assign(this, { study, settings, answers, facts });
    this.items = study.items.map(({ task, item }, i) => ({ task, item, index: i, kind: kindOf(settings.map((one) => one.scores[i])) }));
    this.shown = this.items;
    this.box = byId("items");
    this.of = settings;
    showFilters(byId("item-filters"), this.items, {
      words: (one) => `${one.task} ${one.item}`.toLowerCase(),
      choices: [
        { key: "task", title: "Task", value: (one) => one.task },
        { key: "kind", title: "In all settings", value: (one) => one.kind },
      ],
      numbers: facts.scored ? [{ title: "mean score", value: (one) => meanOf(this.of, one.index) }, { title: "spread of scores", value: (one) => spreadOf(this.of, one.index) }] : [],
      change: (rows) => {
        this.shown = rows;
        byId("item-count").textContent = rows.length === this.items.length ? `All ${rows.length} items.` : `${rows.length} of ${this.items.length} items.`;
        this.table?.setRows(rows);
      },
    });
  }

  setSettings(settings) {
    this.of = settings;
    const some = settings.slice(0, MOST_SETTINGS);
    const scored = this.facts.scored;
    const columns = [
      { key: "item", title: "item", value: (one) => one.item },
      { key: "task", title: "task", value: (one) => one.task },
      ...(scored ? [{ key: "mean", title: "mean", about: "over these settings", numeric: true, value: (one) => meanOf(settings, one.index) }] : []),
      ...some.map((setting) => ({
        key: `setting-${setting.number}`, title: setting.name, numeric: true,
        value: (one) => (scored ? setting.scores[one.index] : setting.forwards[one.index]),
        cell: (one) => (scored ? mark(setting.scores[one.index]) : element("data", { value: setting.forwards[one.index] }, number(setting.forwards[one.index]))),
      })),
    ];
    this.table = new Table(this.box, columns, { label: "Items by setting", open: (one) => this.open(one), nameOf: (one) => one.item });
    this.table.setRows(this.shown);
    if (settings.length > some.length) this.box.append(element("p", { class: "muted" }, `The first ${MOST_SETTINGS} of ${settings.length} settings: filter them above to see others.`));
  }

  open(one) {
    this.table.show(one);
    byId("opened-title").textContent = "The item";
    const found = this.answers && JSON.parse(this.answers[one.index]);
    const rows = (found?.rows ?? []).map(([setting, seed, score, answer, tokens, forwards, end, error, text]) => ({ setting: this.settings[setting], seed, score, answer, tokens, forwards, end, error, text }));
    byId("opened-body").replaceChildren(
      element("p", { class: "word", id: "opened-name" }, visible(one.item, 0)),
      element("p", { class: "muted" }, `task ${one.task}`),
      ...(found?.expected ? [element("p", { id: "expected" }, "Expected: ", element("b", {}, visible(found.expected)))] : []),
      ...(found ? this.of.map((setting) => answersOf(setting, rows.filter((row) => row.setting === setting), this.facts, this.of.length <= MOST_UNFOLDED)) : [element("p", {}, "The answers are not here: the folder has no results.csv.")]));
    if (window.innerWidth < 900) byId("opened").scrollIntoView({ block: "start" });
  }
}

function answersOf(setting, rows, facts, open) {
  return element("details", { class: "answers", "data-setting": setting.name, open },
    element("summary", {}, setting.name, " ", ...rows.map((row) => mark(row.score))),
    ...rows.map((row) => element("div", { class: "answer" },
      element("p", {}, mark(row.score), ` seed ${row.seed}: `, element("b", { class: "given" }, row.answer === "" ? "no answer" : visible(row.answer)), element("span", { class: "muted" }, ` · ${row.tokens} tokens, ${row.forwards} forwards, ${row.end}`)),
      row.error ? element("p", { class: "problem" }, visible(row.error)) : null,
      facts.texts ? element("pre", {}, row.text) : null)));
}

// A score as a sign: right, wrong, or how much of it.
export function mark(score) {
  if (score == null) return element("span", { class: "mark" }, "–");
  const [kind, sign, name] = score >= 1 ? ["right", "✓", "right"] : score <= 0 ? ["wrong", "✗", "wrong"] : ["part", score.toFixed(2), `score ${score.toFixed(2)}`];
  return element("data", { class: `mark ${kind}`, value: score, "aria-label": name, role: "img" }, sign);
}

function kindOf(scores) {
  if (scores.some((score) => score == null)) return null;
  if (scores.every((score) => score >= 1)) return "all right";
  if (scores.every((score) => score <= 0)) return "all wrong";
  return new Set(scores).size > 1 ? "settings differ" : "alike, in part right";
}

function meanOf(settings, i) {
  return settings.length ? settings.reduce((sum, one) => sum + one.scores[i], 0) / settings.length : null;
}

function spreadOf(settings, i) {
  const scores = settings.map((one) => one.scores[i]);
  return Math.max(...scores) - Math.min(...scores);
}
