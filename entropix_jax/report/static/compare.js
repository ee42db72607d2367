// The page of several runs side by side.

import { readFacts, readRows, unpack } from "./data.js";
import { Comparison } from "./comparison.js";
import { showGlossary } from "./details.js";
import { nextFrame, onTheme, openPage } from "./opening.js";
import { showOverlay, showPlanes } from "./overlays.js";
import { startPlotly } from "./plotting.js";
import { showFacts, showPlace, showSides, showTexts } from "./sides.js";
import { showLegend } from "./text.js";

openPage(async () => {
  const { traces } = readFacts();
  const plotly = unpack("plotly");
  const rows = await Promise.all(traces.map(async (_, i) => readRows(await unpack(`trace-${i}`))));
  showGlossary();
  const group = new Comparison(traces, rows);
  showLegend(group, () => group.shown.flatMap((side) => side.tokens));
  for (const show of [showSides, showTexts, showFacts, showPlace]) show(group);
  group.refresh();
  await nextFrame(); // the texts are there to be read
  startPlotly(await plotly);
  for (const show of [showOverlay, showPlanes]) {
    show(group);
    await nextFrame();
  }
  onTheme(() => group.tell("theme"));
});
