// What the table of a study's settings can show.

import { element } from "./dom.js";
import { number, percent } from "./format.js";
import { REGIMES } from "./regimes.js";

const three = (value) => (value == null ? "–" : value.toFixed(3));
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

// A figure and its interval; the value of the element is the figure.
function interval(found, show = three) {
  if (!found) return "–";
  return element("span", { class: "interval" }, element("data", { value: found.value ?? "" }, show(found.value)), element("span", { class: "muted" }, ` [${show(found.low)}, ${show(found.high)}]`));
}

const VERDICTS = { higher: "▲", lower: "▼", "no difference seen": "=" };

function difference(found) {
  if (!found) return "–";
  return element("span", { class: "interval", title: found.verdict }, element("b", { role: "img", "aria-label": found.verdict }, VERDICTS[found.verdict] ?? ""), " ", interval(found, signed));
}

function figure(key, title, value, show, about) {
  return { key, title, about, numeric: true, value, cell: (one) => (value(one) == null ? "–" : element("data", { value: value(one) }, show(value(one)))) };
}

const share = (part, whole) => (whole ? part / whole : null);

export function viewsOf(study, facts) {
  const { settings, tasks, baseline } = study;
  const name = { key: "name", title: "setting", value: (one) => one.name };
  const tokens = figure("tokens", "tokens", (one) => one.tokens, number);
  const all = (field) => [...new Set(settings.flatMap((one) => Object.keys(one[field])))].sort();
  const views = [];
  if (facts.scored) {
    const gap = (key, title, of) => (settings.some((one) => of(one.line)) ? [{ key, title, numeric: true, value: (one) => of(one.line)?.value ?? null, cell: (one) => difference(of(one.line)) }] : []);
    views.push({
      name: "scores",
      about: "Scores are means over tasks, of means over items, of means over seeds. Forwards are token positions evaluated for an answer beyond its prompt. ▲ and ▼: the interval of a difference leaves out 0; =: it does not.",
      columns: [
        name,
        { key: "score", title: "score [95 %]", numeric: true, value: (one) => one.line.score.value, cell: (one) => interval(one.line.score) },
        figure("forwards", "forwards", (one) => one.line.forwards, (value) => value.toFixed(1)),
        ...gap("over-baseline", `over ${baseline}`, (line) => line.over_baseline),
        ...gap("at-equal", "at equal forwards", (line) => line.at_equal_forwards),
        ...gap("over-base", "over what it changes", (line) => line.over_base),
      ],
    });
    if (tasks.length > 1) {
      views.push({
        name: "tasks",
        about: "Scores by task, and their mean.",
        columns: [name, figure("score", "mean", (one) => one.line.score.value, three), ...tasks.map((task, i) => figure(`task-${i}`, task, (one) => one.line.by_task[i], three))],
      });
    }
    const sizes = settings[0].line.votes.map((vote) => vote.samples);
    if (sizes.length > 1) {
      views.push({
        name: "self-consistency",
        about: "What majorities of samples score, and for how many forwards.",
        columns: [name, ...sizes.flatMap((k, i) => [
          { key: `vote-${k}`, title: `of ${k}`, numeric: true, value: (one) => one.line.votes[i].score.value, cell: (one) => interval(one.line.votes[i].score) },
          figure(`vote-${k}-forwards`, "forwards", (one) => one.line.votes[i].forwards, (value) => value.toFixed(1)),
        ])],
      });
    }
  }
  views.push({
    name: "regimes",
    about: "Shares of the tokens.",
    columns: [name, tokens, ...Object.entries(REGIMES).map(([regime, { title, meaning }]) => figure(regime, `${title} ${meaning}`, (one) => share(one.regimes[regime] ?? 0, one.tokens), percent))],
  }, {
    name: "actions",
    about: "Shares of the tokens; forwards of all rows for each of their tokens.",
    columns: [name, ...all("actions").map((action) => figure(action, action, (one) => share(one.actions[action] ?? 0, one.tokens), percent)),
      figure("retracted", "taken back", (one) => share(one.retracted, one.tokens), percent),
      figure("per-token", "forwards a token", (one) => share(one.positions, one.tokens), three)],
  }, {
    name: "texts",
    about: "What can be said of the texts without knowing what was asked.",
    columns: [name, figure("rows", "texts", (one) => one.rows, number), figure("length", "tokens a text", (one) => share(one.tokens, one.rows), (value) => value.toFixed(1)),
      ...all("finish").map((reason) => figure(`ends-${reason}`, `ends by ${reason}`, (one) => share(one.finish[reason] ?? 0, one.rows), percent)),
      ...["perplexity", "distinct_1", "distinct_2", "repetition"].map((measure) => figure(measure, measure.replace("_", "-"), (one) => one[measure] ?? null, three)),
      figure("errors", "errors", (one) => one.errors, number)],
  });
  const keys = all("varied");
  if (keys.length) {
    const told = (value) => (value == null || typeof value === "number" || typeof value === "string" ? value : JSON.stringify(value));
    views.push({
      name: "what is varied",
      about: "The values that a setting changes.",
      columns: [name, ...keys.map((key) => ({ key, title: key, value: (one) => told(one.varied[key]), cell: (one) => String(told(one.varied[key]) ?? "–") }))],
    });
  }
  return views;
}
