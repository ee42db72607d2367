// The page of a study: its settings, pictures and items. The figures are the study's own.

import { byId, element } from "./dom.js";
import { readFacts, unpack } from "./data.js";
import { number, percent } from "./format.js";
import { regimeBar, regimeLegend, sumOf } from "./bars.js";
import { drawCosts, drawIntervals, drawPredictors, drawReliability, drawResponse, drawTruth } from "./figures.js";
import { showFilters } from "./filters.js";
import { ItemTable } from "./items.js";
import { nextFrame, onTheme, openPage } from "./opening.js";
import { startPlotly } from "./plotting.js";
import { showSetting } from "./setting.js";
import { Table } from "./table.js";
import { viewsOf } from "./views.js";

function chooser(select, names, listener) {
  select.replaceChildren(...names.map((name, i) => element("option", { value: i }, name)));
  select.addEventListener("change", () => listener(Number(select.value)));
  listener(0);
}

function measuresOf(settings, baseline) {
  const all = [
    { name: "score", title: "score", of: (line) => line.score },
    { name: `over ${baseline}`, title: `score over that of ${baseline}`, of: (line) => line.over_baseline, difference: true },
    { name: "at equal forwards", title: `score over majorities of ${baseline}, at equal forwards`, of: (line) => line.at_equal_forwards, difference: true },
    { name: "over what it changes", title: "score over that of the setting that it changes", of: (line) => line.over_base, difference: true },
  ];
  return all.filter(({ of }) => settings.some((one) => of(one.line)));
}

function showTuned(tuned) {
  const cell = (value) => element("td", { class: "value" }, element("data", { value }, number(value)));
  byId("tuned").replaceChildren(...tuned.map((one) => element("tr", {},
    element("th", { scope: "row" }, one.sampler), cell(one.candidates), cell(one.default_score), cell(one.score),
    element("td", {}, Object.entries(one.values).map(([key, value]) => `${key}=${typeof value === "string" ? value : JSON.stringify(value)}`).join(", ") || "as it is"))));
}

function showRegimes(shown) {
  const counts = sumOf(shown.map((one) => one.regimes));
  byId("regimes").replaceChildren(regimeLegend(counts), element("p", { class: "muted" }, "Shares over all of them; below, setting by setting."),
    element("div", { class: "scroll" , tabindex: 0, role: "region", "aria-label": "Regimes by setting" }, element("table", { class: "bars" }, element("tbody", {}, ...shown.map((one) => element("tr", { "data-setting": one.name },
      element("th", { scope: "row" }, one.name), element("td", { class: "value" }, `${percent(1 - (one.regimes.lelv ?? 0) / Math.max(one.tokens, 1))} not certain`), element("td", { class: "grow" }, regimeBar(one.regimes))))))));
}

openPage(async () => {
  const facts = readFacts();
  const plotly = unpack("plotly");
  const text = new TextDecoder();
  const study = JSON.parse(text.decode(await unpack("figures")));
  const answers = facts.answers ? text.decode(await unpack("answers")).split("\n") : null;
  const { settings } = study;
  settings.forEach((one, i) => Object.assign(one, { number: i, ...study.parameters[one.name] && { parameters: study.parameters[one.name].parameters } }));
  const numberOf = (name) => settings.findIndex((one) => one.name === name);

  let shown = settings;
  let opened = null;
  const pictures = [];
  const draw = () => pictures.forEach((picture) => picture());
  const open = (one, seek = false) => {
    if (!one) return;
    opened = one;
    table.show(one);
    showSetting(one, study, settings);
    if (costs) costs();
    if (seek && window.innerWidth < 900) byId("opened").scrollIntoView({ block: "start" });
  };
  let costs = null;

  // The table of settings, in several views.
  const views = viewsOf(study, facts);
  let table = null;
  chooser(byId("view"), views.map(({ name }) => name), (i) => {
    table = new Table(byId("settings"), views[i].columns, { label: `Settings: ${views[i].name}`, open: (one) => open(one, true), nameOf: (one) => one.name });
    table.setRows(shown);
    table.show(opened);
    byId("view-about").textContent = views[i].about;
  });
  const items = new ItemTable(study, settings, answers, facts);
  showFilters(byId("filters"), settings, {
    words: (one) => `${one.name} ${one.sampler} ${JSON.stringify(one.varied)}`.toLowerCase(),
    choices: [{ key: "sampler", title: "Sampler", value: (one) => one.sampler }],
    numbers: facts.scored ? [{ title: "score", value: (one) => one.line.score.value }, { title: "forwards", value: (one) => one.line.forwards }] : [],
    change: (rows) => {
      shown = rows;
      table.setRows(rows);
      byId("count").textContent = rows.length === settings.length ? `All ${settings.length} settings.` : `${rows.length} of ${settings.length} settings.`;
      showRegimes(rows);
      items.setSettings(rows);
      draw();
    },
  });
  if (facts.tuned) showTuned(study.tuned);
  open(settings[0]);
  await nextFrame(); // the tables are there to be read
  startPlotly(await plotly);

  if (facts.scored) {
    const measures = measuresOf(settings, study.baseline);
    let measure = measures[0];
    const intervals = () => drawIntervals(byId("intervals"), shown, measure, (one) => open(one));
    chooser(byId("measure"), measures.map(({ name }) => name), (i) => {
      measure = measures[i];
      intervals();
    });
    costs = () => drawCosts(byId("costs"), shown, settings, study.baseline, opened, (one) => open(one));
    pictures.push(intervals, costs);
    costs();
    await nextFrame();
  }
  if (facts.scored && facts.responses) {
    const keys = [...new Set(settings.flatMap((one) => Object.keys(one.varied)))].filter((key) => new Set(settings.filter((one) => key in one.varied).map((one) => JSON.stringify(one.varied[key]))).size > 1).sort();
    let key = keys[0];
    const response = () => drawResponse(byId("response"), shown, key, (one) => open(one));
    chooser(byId("key"), keys, (i) => {
      key = keys[i];
      response();
    });
    pictures.push(response);
  }
  if (facts.predictors) {
    const tasks = [...new Set(study.predictors.map((one) => one.task))];
    let task = tasks[0];
    const predictors = () => drawPredictors(byId("predictors"), study.predictors.filter((one) => one.task === task), numberOf);
    chooser(byId("task"), tasks.map((name) => (name === "all" ? "all tasks" : name)), (i) => {
      task = tasks[i];
      predictors();
    });
    const reliability = () => drawReliability(byId("reliability"), study.reliability, numberOf);
    reliability();
    pictures.push(predictors, reliability);
  }
  if (facts.truth) {
    drawTruth(study.truth);
    pictures.push(() => drawTruth(study.truth));
  }
  onTheme(draw);
});
