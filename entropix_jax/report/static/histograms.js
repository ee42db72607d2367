// How numbers are spread: histograms, a colour and a pattern for each group.

import { element } from "./dom.js";
import { axis, config, escapeMarkup, layout, theme } from "./plotting.js";

const PATTERNS = ["", "/", "x", ".", "-", "\\", "+", "|"];
const MOST_BINS = 30;

// `measures`: { key, title, value(row) }. `groups`: a Map of a name to its rows.
export function drawHistograms(box, measures, groups) {
  if (!box.children.length) box.replaceChildren(...measures.map(({ key, title }) => element("div", { id: `histogram-${key}`, class: "plot", role: "img", "aria-label": `Histogram: ${title}` })));
  const look = theme();
  measures.forEach(({ title, value }, i) => {
    const found = [...groups].map(([name, rows]) => [name, rows.map(value).filter((one) => one != null)]);
    const bins = binsOf(found.flatMap(([, values]) => values));
    const parts = found.map(([name, values], k) => ({
      type: "histogram", name: escapeMarkup(name), x: values, xbins: bins, autobinx: false,
      marker: { color: look.colour(`side-${k % 8}`), pattern: { fillmode: "overlay", shape: PATTERNS[k % 8], fgcolor: look.colour("panel"), solidity: 0.35, size: 6 }, line: { color: look.colour("panel"), width: 0.5 } },
      hovertemplate: "%{x}: %{y} records<extra>%{fullData.name}</extra>",
    }));
    Plotly.react(box.children[i], parts, layout(look, {
      margin: { l: 48, r: 10, t: 34, b: 44 },
      height: 250,
      barmode: "group",
      bargap: 0.08,
      dragmode: false,
      showlegend: groups.size > 1 && i === 0,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", itemclick: false, itemdoubleclick: false },
      xaxis: axis(look, title, { zeroline: false, range: [bins.start, bins.end] }),
      yaxis: axis(look, "records", { rangemode: "tozero", fixedrange: true }),
    }), { ...config("resetScale2d"), displayModeBar: false });
  });
}

// Bins of a round width that hold all values; whole numbers get bins of whole ones.
function binsOf(values) {
  const [low, high] = values.reduce(([a, b], one) => [Math.min(a, one), Math.max(b, one)], [Infinity, -Infinity]);
  if (!values.length) return { start: 0, end: 1, size: 1 };
  const raw = Math.max((high - low) / MOST_BINS, values.every(Number.isInteger) ? 1 : 1e-6);
  const power = 10 ** Math.floor(Math.log10(raw));
  const size = power * [1, 2, 5, 10].find((step) => step * power >= raw * (1 - 1e-9));
  const start = Math.floor(low / size) * size;
  return { start, end: start + size * (Math.floor((high - start) / size) + 1), size };
}
