// The page: reads what it carries, then shows the texts before the plots.

import { byId, nextFrame, saveFile } from "./dom.js";
import { readRows, unpack } from "./data.js";
import { Texts } from "./texts.js";
import { showLegend, showTexts } from "./text.js";
import { showDetails, showFacts, showGlossary } from "./details.js";
import { showBranches, showRetractions } from "./branches.js";
import { showWhatIf } from "./whatif.js";
import { showHeatMap, showPlane, showSeries, startPlotly } from "./plots.js";

function offerTrace(bytes, name) {
  byId("save").addEventListener("click", () => saveFile(bytes, name, "application/jsonl"));
}

async function start() {
  const traces = JSON.parse(byId("traces").textContent);
  const single = byId("save") !== null; // the page of one run
  const plotly = unpack("plotly");
  const payloads = await Promise.all(traces.map((_, i) => unpack(`trace-${i}`)));
  if (single) offerTrace(payloads[0], traces[0].name);
  if (!byId("legend")) return; // no tokens
  const texts = new Texts(traces, payloads.map(readRows), { single });
  const parts = [showLegend, showTexts, showDetails, ...(single ? [showBranches, showRetractions, showWhatIf] : [showFacts])];
  for (const show of parts) show(texts);
  showGlossary();
  texts.refresh();
  await nextFrame(); // the text can be read
  startPlotly(await plotly);
  for (const show of [showSeries, showPlane, ...(single ? [showHeatMap] : [])]) {
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
