// The plane of entropy and varentropy: percentiles of the model's own answers, axes, and the regimes' regions.

// The value at a percentile (0 to 100) of a quantile table, interpolated and rounded as the sampler rounds it.
export function valueAt(table, percent) {
  const place = (Math.max(0, Math.min(percent, 100)) / 100) * (table.length - 1);
  const i = Math.min(Math.floor(place), table.length - 2);
  return Number((table[i] + (place - i) * (table[i + 1] - table[i])).toPrecision(5));
}

// The percentile (0 to 100) of a value in a quantile table.
export function percentileOf(table, value) {
  if (value >= table.at(-1)) return 100;
  const i = table.findLastIndex((entry) => entry <= value);
  if (i < 0) return 0;
  return (100 * (i + (value - table[i]) / (table[i + 1] - table[i]))) / (table.length - 1);
}

// A tick's label: two significant digits, at most four decimals.
export const tickText = (value) => String(Number(Number(value.toPrecision(2)).toFixed(4)));

const USUAL = 0.98; // share of the values that end a linear axis

// An axis of the plane: `at(value)` is a coordinate from 0 to `end`, `value(coordinate)` its inverse. With a quantile
// table the coordinate is the percentile, without one the value. Values beyond the end are drawn at the end.
export function axisOf(table, values, thresholds) {
  if (table) {
    const ticks = [0, 20, 40, 60, 80, 100].map((percent) => [percent, valueAt(table, percent)]);
    return { end: 100, at: (value) => percentileOf(table, value), value: (percent) => valueAt(table, percent), ticks };
  }
  const sorted = Float64Array.from(values).sort();
  const usual = sorted[Math.floor(USUAL * (sorted.length - 1))] ?? 0;
  const end = Math.ceil(Math.max(1, 1.1 * usual, ...thresholds.filter(Number.isFinite).map((one) => 1.3 * one)));
  const ticks = [0, 1, 2, 3, 4].map((i) => [(end * i) / 4, (end * i) / 4]);
  return { end, at: (value) => Math.max(0, Math.min(value, end)), value: (place) => Number(place.toFixed(3)), ticks };
}

// The plane as rectangles of one regime each, `x` in bits and `y` in bits²: the first box that holds a point has it, MID
// the rest. Bounds on other quantities are ignored.
export function regionsOf(bounds) {
  const edges = (name) => [...new Set([-Infinity, ...bounds.flatMap(({ bounds: box }) => box[name] ?? []), Infinity])].sort((a, b) => a - b);
  const within = ([low, high] = [-Infinity, Infinity], [from, to]) => low <= from && to <= high;
  const regions = [];
  for (const y of pairsOf(edges("varentropy"))) for (const x of pairsOf(edges("entropy"))) {
    const regime = bounds.find(({ bounds: box }) => within(box.entropy, x) && within(box.varentropy, y))?.regime ?? "mid";
    const left = regions.at(-1);
    if (left?.regime === regime && left.y[0] === y[0]) left.x[1] = x[1];
    else regions.push({ regime, x, y });
  }
  return regions;
}

function pairsOf(edges) {
  return edges.slice(1).map((edge, i) => [edges[i], edge]);
}

// The regions as they are drawn on two axes: `x` and `y` as coordinates, `side` of each axis the end of the plane that
// the region touches (-1, 0 or 1), and `labelled`, true for the largest region of its regime.
export function drawnRegions(bounds, axes) {
  const drawn = regionsOf(bounds).map(({ regime, x, y }) => {
    const [xs, ys] = [[x, axes.x], [y, axes.y]].map(([range, axis]) => range.map(axis.at));
    return { regime, x: xs, y: ys, side: { x: sideOf(x), y: sideOf(y) }, area: (xs[1] - xs[0]) * (ys[1] - ys[0]) };
  });
  const shown = drawn.filter(({ area }) => area > 0);
  const largest = (regime) => shown.filter((one) => one.regime === regime).reduce((a, b) => (b.area > a.area ? b : a));
  return shown.map((region) => ({ ...region, labelled: region === largest(region.regime) }));
}

function sideOf([low, high]) {
  if (low === -Infinity) return -1;
  return high === Infinity ? 1 : 0;
}

// Whether a threshold's label is before its line: the lower one of a pair, and one closely before another line.
export function labelledBefore(line, lines, axes) {
  const { end, at } = axes[line.axis];
  return line.low || lines.some(({ axis, now }) => axis === line.axis && now > line.now && at(now) - at(line.now) < end / 8);
}
