// Traces: the recorded example, and files that the reader opens, by choice or by drag.

import { inflate, rowsOf } from "./data.js";
import { byId } from "./dom.js";
import { fail, succeed } from "./failure.js";
import { METRICS } from "./format.js";
import { REGIMES, boundsOf, valuesOf } from "./regimes.js";

const FORMAT = 1; // of the traces that this page reads
const OPTIONAL = ["token_confidence", "self_certainty", "max_prob", "p_wrong"];
const NUMBERS = METRICS.flatMap(({ fields }) => fields).map(([name]) => name).filter((name) => !OPTIONAL.includes(name));

// The recorded example, which is shown before the first text: a trace of `generate --model tiny --prompt "Guests:" --seed 0`.
export async function fetchExample() {
  const answer = await fetch("/static/example.jsonl");
  const [text] = readTrace(new Uint8Array(await answer.arrayBuffer()), "example.jsonl");
  return { ...text, label: "A recorded example", written: [], base: 0, pending: [] };
}

// Adds the texts of files to a session: of traces, and of pages that have one.
export function offerOpening(session) {
  const open = async (files) => {
    for (const file of files) {
      try {
        const nodes = (await readFile(file)).map((text) => session.add(text));
        const seen = new Set([...session.state.seen, ...nodes.map(({ id }) => id)]);
        session.change({ seen, current: nodes[0].id, beside: null });
        succeed();
      } catch (error) {
        fail(error);
      }
    }
  };
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async ({ target }) => {
    await open([...target.files]);
    target.value = "";
  });
  document.addEventListener("dragover", (event) => event.dataTransfer.types.includes("Files") && event.preventDefault());
  document.addEventListener("drop", (event) => {
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    open([...event.dataTransfer.files]);
  });
}

async function readFile(file) {
  let bytes = new Uint8Array(await file.arrayBuffer());
  const start = new TextDecoder().decode(bytes.slice(0, 100)).trimStart();
  if (start.startsWith("<")) {
    const found = /<script type="text\/plain" id="trace-0">([^<]*)/.exec(new TextDecoder().decode(bytes));
    if (!found) throw new Error(`${file.name} is not a page of entropix_jax: open a trace, or a page that was saved here or by --report.`);
    bytes = await inflate(found[1]).catch(() => {
      throw damaged(file.name, "its trace cannot be unpacked");
    });
  }
  return readTrace(bytes, file.name);
}

// The texts of a trace. The last line of an interrupted run may be truncated.
function readTrace(bytes, name) {
  const lines = new TextDecoder().decode(bytes).split("\n");
  const records = [];
  for (const [i, line] of lines.entries()) {
    if (!line.trim()) continue;
    const record = parse(line);
    if (!i && record?.type !== "header") throw new Error(`${name} is not a trace: open a file of --trace, or a page that was saved here or by --report.`);
    if (!i && record.format_version !== FORMAT) throw new Error(`${name} has trace format ${record.format_version}, this page reads format ${FORMAT}: open it with the version of entropix_jax that wrote it.`);
    if (!record && i === lines.length - 1) break;
    if (!record || (["token", "retracted"].includes(record.type) && !isToken(record))) throw damaged(name, `line ${i + 1} is invalid`);
    records.push(record);
  }
  const rows = rowsOf(records);
  if (!rows.size) throw new Error(`${name} has no tokens, so there is no text to open.`);
  const ends = new Map(records.at(-1).rows?.map(({ row, finish_reason: reason }) => [row, reason]));
  try {
    const common = contentOf(records[0]);
    return [...rows].map(([row, texts]) => ({ ...texts, ...common, label: rows.size > 1 ? `${name}, text ${row + 1}` : name, ended: ends.get(row) ?? "lost" }));
  } catch {
    throw damaged(name, "its header is invalid");
  }
}

function contentOf({ prompt, messages, sampler_parameters: sampler, percentiles, calibration }) {
  const thresholds = Object.fromEntries(["h1", "h2", "u1", "u2"].map((name) => [name, sampler[`thresholds.${name}`]]));
  const boxes = Object.keys(REGIMES).filter((regime) => regime !== "mid").map((regime) => ({ regime, conditions: sampler[`regimes.${regime}`].map(conditionOf) }));
  const facts = { sampler, prompt, percentiles, calibration, thresholds, boxes };
  boundsOf(boxes, valuesOf(facts)); // throws an error if one is missing
  return { prompt, messages, facts, template: true, sampler: { preset: "", own: { ...sampler, ...percentiles } } };
}

// A condition such as `entropy < h1`.
function conditionOf(text) {
  const [quantity, sign, bound] = text.split(" ");
  return { quantity, sign, ...(Number.isNaN(Number(bound)) ? { name: bound } : { value: Number(bound) }) };
}

function parse(line) {
  try {
    return JSON.parse(line);
  } catch {
    return null;
  }
}

function isToken({ token_id: id, position, text, action, regime, top = [], branches = [], layers = [], layers_varentropy: spreads = [], attention = [], ...own }) {
  return [id, position].every(Number.isInteger) && [text, action].every((value) => typeof value === "string") && regime in REGIMES
    && NUMBERS.every((name) => typeof own[name] === "number")
    && [top, branches, layers, spreads, attention].every(Array.isArray) && [...top, ...layers, ...spreads].every(Array.isArray)
    && branches.every((branch) => Array.isArray(branch?.tokens)) && attention.every((head) => Array.isArray(head?.to));
}

const damaged = (name, what) => new Error(`${name} is damaged: ${what}. Save it once more, or open another copy.`);
