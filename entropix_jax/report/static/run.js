// The page of one run: reads what it carries, then shows it, the text before the pictures.

import { byId, element } from "./dom.js";
import { readFacts, readRows, unpack } from "./data.js";
import { State } from "./state.js";
import { showLegend, showText } from "./text.js";
import { showDetails, showGlossary } from "./details.js";
import { showBranches, showRetractions } from "./branches.js";
import { showWhatIf } from "./whatif.js";
import { showHeatMap, showPlane, showSeries } from "./plots.js";
import { startPlotly } from "./plotting.js";
import { nextFrame, onTheme, openPage } from "./opening.js";
import { valuesOf } from "./regimes.js";

function chooseRows(state) {
  const select = byId("row");
  select.replaceChildren(...[...state.rows.keys()].map((number) => element("option", { value: number }, `text ${number + 1} of ${state.rows.size}`)));
  select.parentElement.hidden = state.rows.size < 2;
  select.addEventListener("change", () => state.chooseRow(Number(select.value)));
  state.on("row", () => {
    for (const node of document.querySelectorAll("[data-of-row]")) node.hidden = Number(node.dataset.ofRow) !== state.row.number;
  });
}

function offerTrace(bytes, name) {
  byId("save").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([bytes], { type: "application/jsonl" }));
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  });
}

async function start() {
  const facts = readFacts();
  const plotly = unpack("plotly");
  const trace = await unpack("trace");
  offerTrace(trace, facts.name);
  showGlossary();
  const rows = readRows(trace);
  byId("nothing").hidden = rows.size > 0;
  byId("run").hidden = rows.size === 0;
  if (rows.size > 0) {
    const state = new State(facts, rows, valuesOf(facts));
    chooseRows(state);
    for (const show of [showLegend, showText, showDetails, showBranches, showRetractions, showWhatIf]) show(state);
    state.chooseRow(state.row.number);
    await nextFrame(); // the text is there to be read
    startPlotly(await plotly);
    for (const show of [showSeries, showPlane, showHeatMap]) {
      show(state);
      await nextFrame();
    }
    onTheme(() => state.tell("theme"));
  }
}

openPage(start);
