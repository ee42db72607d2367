// The recorded example, which is shown before the first text: a trace of `generate --model tiny --prompt "Guests:" --seed 0`.

import { readRows } from "./data.js";
import { REGIMES } from "./regimes.js";

export async function fetchExample() {
  const bytes = new Uint8Array(await (await fetch("/static/example.jsonl")).arrayBuffer());
  const lines = new TextDecoder().decode(bytes).trimEnd().split("\n");
  const [{ sampler_parameters: sampler, prompt, percentiles, calibration }, footer] = [lines[0], lines.at(-1)].map((line) => JSON.parse(line));
  const thresholds = Object.fromEntries(["h1", "h2", "u1", "u2"].map((name) => [name, sampler[`thresholds.${name}`]]));
  const boxes = Object.keys(REGIMES).filter((regime) => regime !== "mid").map((regime) => ({ regime, conditions: sampler[`regimes.${regime}`].map(conditionOf) }));
  const [row] = readRows(bytes).values();
  const asked = prompt.replace(/<\|[^|]*\|>/g, ""); // without control tokens
  return { ...row, prompt: asked, facts: { sampler, prompt, percentiles, calibration, thresholds, boxes }, label: "A recorded example", written: [], base: 0, ended: footer.rows[0].finish_reason, pending: [] };
}

// A condition such as `entropy < h1`.
function conditionOf(text) {
  const [quantity, sign, bound] = text.split(" ");
  return { quantity, sign, ...(Number.isNaN(Number(bound)) ? { name: bound } : { value: Number(bound) }) };
}
