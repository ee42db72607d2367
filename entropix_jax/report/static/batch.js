// The page of a batch: its records, to sort, filter and open.

import { byId, element } from "./dom.js";
import { readFacts, unpack } from "./data.js";
import { number, percent, visible } from "./format.js";
import { regimeBar, regimeLegend, sumOf } from "./bars.js";
import { showFilters } from "./filters.js";
import { drawHistograms } from "./histograms.js";
import { nextFrame, onTheme, openPage } from "./opening.js";
import { startPlotly } from "./plotting.js";
import { showRecord } from "./record.js";
import { Table } from "./table.js";

const perToken = (row) => (row.tokens ? row.forwards / row.tokens : null);
const seconds = (row) => row.timings?.seconds ?? null;
const nameOf = (row) => row.id ?? `line ${row.line}`;
const short = (text) => (text == null ? "–" : visible(text.slice(0, 120)));

const NUMBERS = [
  { key: "tokens", title: "tokens", value: (row) => row.tokens ?? null },
  { key: "mean_entropy", title: "mean entropy, bits", value: (row) => row.mean_entropy ?? null },
  { key: "per-token", title: "forwards a token", value: perToken },
  { key: "seconds", title: "seconds", value: seconds },
  { key: "mean_varentropy", title: "mean varentropy, bits²", value: (row) => row.mean_varentropy ?? null },
  { key: "forwards", title: "forwards", value: (row) => row.forwards ?? null },
  { key: "retracted", title: "taken back", value: (row) => row.retracted ?? null },
  { key: "line", title: "line", value: (row) => row.line },
];
const HISTOGRAMS = NUMBERS.slice(0, 4);
const MOST_ERRORS = 200; // that are listed

function columns(records) {
  const several = new Set(records.map((row) => row.sampler)).size > 1;
  const numeric = (key, title) => ({ ...NUMBERS.find((one) => one.key === key), title, numeric: true });
  return [
    { key: "id", title: "record", value: nameOf },
    { key: "text", title: "text", value: (row) => row.text ?? row.error, cell: (row) => element("span", { class: row.text == null ? "cut problem" : "cut" }, short(row.text ?? row.error)) },
    { key: "regimes", title: "regimes", about: "sorted by the share of tokens that were not certain", value: (row) => (row.tokens ? 1 - row.regimes.lelv / row.tokens : null), numeric: true, cell: (row) => (row.tokens ? regimeBar(row.regimes) : "–") },
    ...(several ? [{ key: "sampler", title: "sampler", value: (row) => row.sampler }] : []),
    { key: "ended", title: "ended by", value: (row) => row.ended },
    numeric("tokens", "tokens"),
    numeric("forwards", "forwards"),
    numeric("mean_entropy", "entropy"),
    numeric("seconds", "seconds"),
  ];
}

function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) if (row.text != null) {
    if (!groups.has(row.sampler)) groups.set(row.sampler, []);
    groups.get(row.sampler).push(row);
  }
  return groups;
}

const sum = (rows, value) => rows.reduce((all, row) => all + (value(row) ?? 0), 0);
const meanOf = (rows, value) => {
  const found = rows.map(value).filter((one) => one != null);
  return found.length ? found.reduce((all, one) => all + one, 0) / found.length : null;
};

function showOverall(rows, groups) {
  const counts = sumOf(rows.filter((row) => row.regimes).map((row) => row.regimes));
  byId("shares").replaceChildren(regimeBar(counts), regimeLegend(counts));
  const cell = (value) => element("td", { class: "value" }, value == null ? "–" : element("data", { value }, number(value)));
  byId("samplers").replaceChildren(...[...groups].map(([name, of]) => {
    const tokens = sum(of, (row) => row.tokens);
    return element("tr", { "data-sampler": name },
      element("th", { scope: "row" }, name),
      cell(of.length), cell(tokens), cell(meanOf(of, (row) => row.tokens)),
      cell(tokens ? sum(of, (row) => (row.mean_entropy ?? 0) * row.tokens) / tokens : null),
      cell(tokens ? sum(of, (row) => row.forwards) / tokens : null),
      cell(meanOf(of, seconds)),
      element("td", {}, regimeBar(sumOf(of.map((row) => row.regimes)))));
  }));
}

function showErrors(records, open) {
  const errors = records.filter((row) => row.error != null);
  byId("errors").hidden = errors.length === 0;
  byId("errors-count").textContent = `${errors.length} of ${records.length} records (${percent(errors.length / records.length)}) ended with an error.${errors.length > MOST_ERRORS ? ` The first ${MOST_ERRORS}:` : ""}`;
  byId("errors-list").replaceChildren(...errors.slice(0, MOST_ERRORS).map((row) => element("tr", {},
    element("th", { scope: "row" }, element("button", { type: "button", class: "link", onclick: () => open(row) }, nameOf(row))),
    element("td", { class: "value" }, number(row.line)),
    element("td", {}, visible(row.error)))));
}

openPage(async () => {
  const facts = readFacts();
  const plotly = unpack("plotly");
  const lines = new TextDecoder().decode(await unpack("results")).split("\n");
  const records = lines.filter(Boolean).map((line) => JSON.parse(line));
  for (const row of records) row.regimes ??= null;

  let groups = new Map();
  let drawn = false;
  const table = new Table(byId("records"), columns(records), { label: "Records", open: (row) => show(row, true), nameOf });
  const show = (row, seek = false) => {
    table.show(row);
    showRecord(row, table, facts, show);
    if (seek && window.innerWidth < 900) byId("record").scrollIntoView({ block: "start" });
  };
  const words = new Map(records.map((row) => [row, [nameOf(row), row.prompt, row.text, row.error].filter((one) => one != null).join("\n").toLowerCase()]));
  showErrors(records, (row) => show(row, true));
  showFilters(byId("filters"), records, {
    words: (row) => words.get(row),
    choices: [
      { key: "ended", title: "Ended by", value: (row) => row.ended },
      { key: "sampler", title: "Sampler", value: (row) => row.sampler },
    ],
    numbers: NUMBERS,
    change: (rows) => {
      table.setRows(rows);
      byId("count").textContent = rows.length === records.length ? `All ${records.length} records.` : `${rows.length} of ${records.length} records; all below is of these.`;
      groups = groupsOf(rows);
      showOverall(rows, groups);
      if (drawn) drawHistograms(byId("histograms"), HISTOGRAMS, groups);
    },
  });
  show(records[0]);
  await nextFrame(); // the table is there to be read
  startPlotly(await plotly);
  drawHistograms(byId("histograms"), HISTOGRAMS, groups);
  drawn = true;
  onTheme(() => drawHistograms(byId("histograms"), HISTOGRAMS, groups));
});
