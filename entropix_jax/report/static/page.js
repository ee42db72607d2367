// The page: reads what it carries, then shows the texts before the plots.

import { byId, nextFrame, saveFile } from "./dom.js";
import { readRows, unpack } from "./data.js";
import { Texts } from "./texts.js";
import { showLegend, showTexts } from "./text.js";
import { showDetails, showGlossary } from "./details.js";
import { showBranches, showRetractions } from "./branches.js";
import { showWhatIf } from "./whatif.js";
import { showWrong } from "./wrong.js";
import { showHeatMap, showPlane, showSeries, startPlotly } from "./plots.js";

function offerTrace(bytes, name) {
  byId("save").addEventListener("click", () => saveFile(bytes, name, "application/jsonl"));
}

async function start() {
  const facts = JSON.parse(byId("facts").textContent);
  const plotly = unpack("plotly");
  const trace = await unpack("trace-0");
  offerTrace(trace, facts.name);
  if (!byId("legend")) return; // no tokens
  const texts = new Texts(facts, readRows(trace));
  for (const show of [showLegend, showTexts, showWrong, showDetails, showBranches, showRetractions, showWhatIf]) show(texts);
  showGlossary();
  texts.show(texts.sides[0]);
  await nextFrame(); // the text can be read
  startPlotly(await plotly);
  for (const show of [showSeries, showPlane, showHeatMap]) {
    show(texts);
    await nextFrame();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => texts.tell("theme"));
}

start().then(
  () => (document.documentElement.dataset.ready = "true"),
  (error) => {
    byId("failure").hidden = false;
    byId("failure").textContent = `This browser cannot show the page: ${error.message}`;
    throw error;
  },
);
