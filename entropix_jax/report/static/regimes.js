// The five regimes: how they are called and drawn, and which of them a token is in.

export const REGIMES = {
  lelv: { title: "LELV", meaning: "certain", where: "low entropy, low varentropy", symbol: "circle" },
  helv: { title: "HELV", meaning: "undecided", where: "high entropy, low varentropy", symbol: "square" },
  lehv: { title: "LEHV", meaning: "forked", where: "low entropy, high varentropy", symbol: "diamond" },
  hehv: { title: "HEHV", meaning: "scattered", where: "high entropy, high varentropy", symbol: "x" },
  mid: { title: "MID", meaning: "between", where: "in none of the four boxes", symbol: "triangle-up" },
};

export const BOXES = ["lelv", "helv", "lehv", "hehv"]; // tried in this order

// Open bounds of each box: quantity to [low, high]. `values` are the bounds that have a name, or
// that stand for themselves, by their key.
export function boundsOf(boxes, values) {
  return BOXES.map((regime) => {
    const bounds = {};
    for (const condition of boxes[regime]) {
      const [low, high] = bounds[condition.quantity] ?? [-Infinity, Infinity];
      // The run compared float32 numbers.
      const bound = Math.fround(values[keyOf(condition)]);
      bounds[condition.quantity] =
        condition.sign === "<" ? [low, Math.min(high, bound)] : [Math.max(low, bound), high];
    }
    return { regime, bounds };
  });
}

// Bounds that share a key move together: those of one name, and those of one quantity and number.
export function keyOf(condition) {
  return condition.name ?? `${condition.quantity} ${condition.value}`;
}

// The value of every bound, by its key.
export function valuesOf(facts) {
  const conditions = BOXES.flatMap((box) => facts.boxes[box]);
  return Object.fromEntries(conditions.map((one) => [keyOf(one), one.name ? facts.thresholds[one.name] : one.value]));
}

// The first open box that holds a token, else MID. The loop guard's tokens are LEHV wherever they are.
export function classify(token, boxes) {
  if (token.loop) return "lehv";
  for (const { regime, bounds } of boxes) {
    const inside = Object.entries(bounds).every(([quantity, [low, high]]) => {
      const value = Math.fround(token[quantity]);
      return low < value && value < high;
    });
    if (inside) return regime;
  }
  return "mid";
}

// How many tokens are in each regime, in the order of REGIMES.
export function occupancy(tokens, regimeOf) {
  const counts = Object.fromEntries(Object.keys(REGIMES).map((regime) => [regime, 0]));
  for (const token of tokens) counts[regimeOf(token)] += 1;
  return counts;
}
