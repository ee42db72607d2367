// The regimes: names, what they say about the model, plot symbols, and the sampler's rule that classifies a token.

export const REGIMES = {
  lelv: { name: "certain", acronym: "LELV", says: "one likely token", symbol: "circle" },
  helv: { name: "undecided", acronym: "HELV", says: "many tokens, about equally likely", symbol: "square" },
  lehv: { name: "forked", acronym: "LEHV", says: "a favourite and rivals", symbol: "diamond" },
  hehv: { name: "scattered", acronym: "HEHV", says: "no clear favourite, and unevenly likely tokens", symbol: "x" },
  mid: { name: "between", acronym: "MID", says: "moderately certain", symbol: "triangle-up" },
};

export const regimeTitle = (regime) => `${REGIMES[regime].name} (${REGIMES[regime].acronym})`;

// The style sheet's names of their colours: symbols, regions, labels on a region.
export const REGIME_COLOURS = Object.keys(REGIMES).flatMap((regime) => [regime, `${regime}-fill`, `${regime}-text`]);

// Each box's open bounds: quantity to [low, high]. `values` has the thresholds by key. A box inside an earlier one is
// skipped, because no token can be in it.
export function boundsOf(boxes, values) {
  const all = boxes.map(({ regime, conditions }) => {
    const bounds = {};
    for (const condition of conditions) {
      const [low, high] = bounds[condition.quantity] ?? [-Infinity, Infinity];
      const bound = Math.fround(values[keyOf(condition)]); // the sampler compares float32
      bounds[condition.quantity] = condition.sign === "<" ? [low, Math.min(high, bound)] : [Math.max(low, bound), high];
    }
    return { regime, bounds };
  });
  return all.filter(({ bounds }, i) => !all.slice(0, i).some((before) => contains(before.bounds, bounds)));
}

function contains(outer, inner) {
  return Object.entries(outer).every(([quantity, [low, high]]) => {
    const [from, to] = inner[quantity] ?? [-Infinity, Infinity];
    return low <= from && to <= high;
  });
}

// The key of a condition's threshold: its name, or the quantity and the number.
export function keyOf(condition) {
  return condition.name ?? `${condition.quantity} ${condition.value}`;
}

// The value of every threshold, by its key.
export function valuesOf({ boxes, thresholds }) {
  const conditions = boxes.flatMap((box) => box.conditions);
  return Object.fromEntries(conditions.map((one) => [keyOf(one), one.name ? thresholds[one.name] : one.value]));
}

// The first box that contains the token, else MID.
export function classify(token, boxes) {
  for (const { regime, bounds } of boxes) {
    const inside = Object.entries(bounds).every(([quantity, [low, high]]) => {
      const value = Math.fround(token[quantity]);
      return low < value && value < high;
    });
    if (inside) return regime;
  }
  return "mid";
}

// The number of tokens in each regime.
export function occupancy(tokens, regimeOf) {
  const counts = Object.fromEntries(Object.keys(REGIMES).map((regime) => [regime, 0]));
  for (const token of tokens) counts[regimeOf(token)] += 1;
  return counts;
}
