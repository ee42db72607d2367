// The live page: texts come from the server, and go on from wherever the reader says.

import { showDetails, showToken } from "./about.js";
import { Api, isKey } from "./api.js";
import { addItem } from "./data.js";
import { changesOf, firstChange } from "./decisions.js";
import { byId, element } from "./dom.js";
import { percent } from "./format.js";
import { Plane } from "./plane.js";
import { Reading } from "./reading.js";
import { REGIMES, boundsOf, classify, valuesOf } from "./regimes.js";
import { Session } from "./session.js";
import { Settings } from "./settings.js";
import { Speaker } from "./speaker.js";
import { Start } from "./start.js";
import { showTree, walk } from "./tree.js";

const AT_ONCE = 64; // tokens that a frame adds at most
const ENDS = { eos: "end of text", length: "token limit", confidence: "low confidence", context: "context limit", stop: "stop text", cancelled: "stopped" };

const session = new Session();
const api = new Api(askKey);
const start = new Start();
const speaker = new Speaker(byId("spoken"));
const readings = ["main", "beside"].map((name) => new Reading(byId(name), point));
const [main, beside] = readings;
const counts = Object.fromEntries(Object.keys(REGIMES).map((regime) => [regime, 0]));
let values = null; // thresholds as the reader moves them; null: the text's own
let bounds = null;
let common = 0; // tokens that both texts begin with
let parted = null;
let frame = null;
let offering = null;

const regimeOf = (token) => (bounds ? classify(token, bounds) : token.regime);
const plane = new Plane(byId("plane"), { move: moveThresholds, drop: dropThresholds });
const settings = new Settings({ move: moveThresholds, drop: dropThresholds, apply: (changes) => rerun(changes) });

// Requests.

// What the server has. Asked for again where there was no answer, or no key.
async function offer() {
  if (start.model) return;
  await (offering ??= start.offer(api).finally(() => (offering = null)));
  document.documentElement.dataset.ready = "true";
}

// `begun()`: called once it has begun. Returns whether it did.
async function run(node, { path, body }, begun = null) {
  node.stopper = new AbortController();
  const chosen = node.given?.length ?? 0;
  let seen = 0;
  let reason = null;
  refreshStatus();
  try {
    for await (const { choices } of api.stream(path, body, node.stopper.signal)) for (const { entropix: own = {} } of choices) {
      begun?.();
      begun = null;
      if (own.row && !node.row) {
        node.row = own.row;
        learn(node).catch(fail);
      }
      for (const token of own.tokens ?? []) if (seen++ < chosen) token.chosen = true;
      node.pending.push(...(own.tokens ?? []));
      reason = own.finish_reason ?? reason;
      frame ??= requestAnimationFrame(grow);
    }
  } catch (error) {
    if (error.name !== "AbortError") fail(error);
    reason = error.name === "AbortError" ? "cancelled" : "error";
  }
  node.stopper = null;
  node.reason = reason;
  frame ??= requestAnimationFrame(grow);
  const empty = reason === "error" && seen === 0 && !node.row;
  if (empty) session.forget(node);
  return !empty;
}

async function learn(node) {
  node.facts = await api.get(`/v1/rows/${node.row}`);
  if (node === session.current) showFacts();
}

// A frame's share of what came.
function grow() {
  frame = null;
  for (const node of session.nodes) {
    if (node.pending.length) {
      const fresh = node.pending.splice(0, AT_ONCE);
      for (const token of fresh) addItem(node, token);
      if (node === session.current) {
        speaker.add(fresh.map((token) => (token.type === "retracted" ? "" : token.text)).join(""));
        count(fresh);
        plane.grow();
      }
      for (const reading of readings) if (reading.node === node) reading.grow();
      if (node === session.current || node === session.beside) part();
    }
    if (node.reason && !node.pending.length && !node.ended) {
      node.ended = node.reason;
      if (node === session.current) {
        speaker.end(`Ended: ${ENDS[node.ended] ?? node.ended}.`);
        if (!values) settings.show(node.facts, node.tokens); // not under the reader's hand
        if (!pointed && innerWidth >= 900) point(main, node.items.at(-1), { silent: true });
      }
    }
    if (node.pending.length) frame ??= requestAnimationFrame(grow);
  }
  refreshStatus();
}

async function generate() {
  const text = byId("prompt").value;
  if (!text) return fail(new Error("Type a prompt first."));
  const { current } = session;
  const talks = start.chat && current?.messages;
  const before = talks ? [...current.messages, { role: "assistant", content: current.tokens.map((token) => token.text).join("") }] : [];
  try {
    await offer();
    const asked = start.request(before);
    const node = session.add({ parent: talks ? current : null, label: short(text), prompt: asked.prompt, messages: asked.messages });
    if (start.chat) byId("prompt").value = "";
    session.show(node);
    if (!(await run(node, asked)) && !byId("prompt").value) byId("prompt").value = text;
  } catch (error) {
    fail(error);
  }
}

// Goes on from a place of a text: a sibling of what stood there.
function goOn(node, position, label, { tokens = null, sampler = null, beside = null, begun = null } = {}) {
  if (!node.row) return fail(new Error("This text is not on the server yet."));
  const asked = start.more(node, position, { tokens, sampler });
  const next = session.add({ parent: node, at: position, label, prompt: node.prompt, messages: node.messages, given: tokens });
  session.show(next, beside);
  run(next, asked, begun);
}

function choose(tokens, text) {
  const { node, token } = pointed;
  // A retracted token's place is that of what replaced it.
  goOn(node, token.position - node.items[0].position, short(text) || "⟨token⟩", { tokens, beside: node });
}

// Thresholds and other settings.

function moveThresholds(moved) {
  values = moved;
  const node = session.current;
  bounds = boundsOf(node.facts.boxes, values);
  const problem = settings.refresh(values);
  const found = firstChange(node, {}, values);
  byId("first").textContent = problem || (found ? `The first decision that changes: token ${node.items[found.index].position - node.items[0].position + 1}.` : "No decision changes.");
  plane.values = values;
  plane.redraw();
  main.recolour();
}

function dropThresholds() {
  const node = session.current;
  if (!values || !node) return;
  const changes = changesOf(node.facts, values);
  if (!settings.refresh(values) && Object.keys(changes).length) rerun(changes, values);
}

function rerun(changes, moved = null) {
  const node = session.current;
  const found = firstChange(node, changes, moved);
  const words = Object.entries(changes).map(([key, value]) => `${key.replace("thresholds.", "")} = ${JSON.stringify(value)}`).join(", ");
  if (!found) {
    byId("first").textContent = `With ${words} no decision of this text changes.`;
    return;
  }
  const begun = () => (byId("first").textContent = `${words}: regenerated from token ${found.position + 1}, with the same seed.`);
  goOn(node, found.position, words, { sampler: changes, beside: node, begun });
}

// What is shown.

let pointed = null;

function point(reading, token, { silent = false } = {}) {
  const { node } = reading;
  if (!token) return;
  pointed = { node, token };
  showToken(token, { shown: regimeOf(token), held: reading.held, choose: start.keeps ? choose : null });
  if (silent) return;
  if (node === session.current) plane.select(token);
  const other = reading === main ? beside : main;
  const twin = other.node?.tokens[token.position - node.items[0].position];
  if (twin && !other.held) other.select(twin, { held: false, silent: true });
  if (reading.held) byId("announcement").textContent = `${token.text}${token.type === "retracted" ? ", retracted" : ""}: ${REGIMES[token.regime].title}, ${REGIMES[token.regime].meaning}, ${token.action}`;
}

function count(tokens) {
  for (const token of tokens) if (token.type === "token") counts[token.regime] += 1;
}

function refresh() {
  [values, bounds] = [null, null];
  const [{ current }, other] = [session, session.beside];
  byId("work").hidden = !current;
  byId("first").textContent = "";
  byId("beside").hidden = !other;
  byId("texts").classList.toggle("two", Boolean(other));
  if (main.node !== current) {
    pointed = null;
    speaker.clear();
  }
  if (!pointed) showDetails(element("p", { class: "muted" }, "Point at a token."));
  main.show(current, regimeOf);
  beside.show(other, (token) => token.regime);
  [common, parted] = [0, null];
  part();
  for (const regime in counts) counts[regime] = 0;
  if (current) count(current.items);
  for (const node of session.nodes) if (node.stopper && !session.state.seen.has(node.id)) node.stopper.abort();
  showFacts();
  refreshStatus();
  offerAfresh();
}

function offerAfresh() {
  byId("afresh").hidden = !start.chat || !session.current?.messages;
}

function showFacts() {
  const node = session.current;
  if (!node) return;
  plane.show(node.items, node.facts, node.facts ? valuesOf(node.facts) : {}, regimeOf);
  settings.show(node.facts, node.tokens);
  const asked = node.messages ? node.messages.map(({ role, content }) => `${role}: ${content}`).join("\n") : node.prompt ?? node.facts?.prompt ?? "";
  byId("asked").textContent = asked;
}

// Looks on from where both texts were the same.
function part() {
  const [one, other] = [session.current, session.beside];
  if (!one || !other || parted !== null) return;
  const most = Math.min(one.tokens.length, other.tokens.length);
  while (common < most && one.tokens[common].token_id === other.tokens[common].token_id) common += 1;
  if (common >= most) return;
  parted = common;
  main.part(parted, "texts diverge");
  beside.part(parted, "texts diverge");
}

function refreshStatus() {
  const node = session.current;
  const running = session.nodes.some(({ stopper }) => stopper);
  byId("stop").disabled = !running;
  for (const [reading, one] of [[main, node], [beside, session.beside]]) {
    if (!one) continue;
    const state = one.ended ? `ended: ${ENDS[one.ended] ?? one.ended}` : "running";
    const own = one.tokens.length === 1 ? "1 token" : `${one.tokens.length} tokens`;
    reading.card.querySelector("h3").textContent = session.nameOf(one);
    reading.card.querySelector(".about").textContent = `${own}, ${one.items.length - one.tokens.length} retracted, ${state}`;
  }
  for (const id of ["save-report", "save-trace"]) byId(id).disabled = !node?.row || !node.ended;
  const all = Math.max(node?.tokens.length ?? 0, 1);
  for (const [regime, number] of Object.entries(counts)) byId(`share-${regime}`).textContent = percent(number / all);
  document.documentElement.dataset.state = running ? "running" : "idle";
}

// Files.

async function save(kind, name, type) {
  try {
    const answer = await api.ask(`/v1/rows/${session.current.row}/${kind}`);
    const url = URL.createObjectURL(new Blob([await answer.arrayBuffer()], { type }));
    element("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  } catch (error) {
    fail(error);
  }
}

async function open(file) {
  try {
    await offer();
    const { rows } = await api.get("/v1/rows", { method: "POST", body: await file.arrayBuffer() });
    for (const [i, { row, prompt, tokens, finish_reason }] of rows.entries()) {
      const node = session.add({ label: rows.length > 1 ? `${file.name} ${i + 1}` : file.name, prompt, row, ended: finish_reason ?? "interrupted" });
      for (const token of tokens) addItem(node, token);
      session.show(node);
      await learn(node);
    }
  } catch (error) {
    fail(error);
  }
}

// The reader.

function askKey(problem) {
  const [box, field] = [byId("key-box"), byId("key")];
  let found = null;
  byId("key-problem").textContent = problem;
  field.value = "";
  box.showModal();
  return new Promise((resolve, reject) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (!isKey(text)) return (byId("key-problem").textContent = "A key has letters, digits and signs of ASCII, without spaces.");
      found = text;
      box.close();
    };
    byId("key-cancel").onclick = () => box.close();
    box.onclose = () => (found ? resolve(found) : reject(new Error("The server asks for a key.")));
  });
}

function fail(error) {
  byId("failure").hidden = false;
  byId("failure-text").textContent = error.message;
}

function stop() {
  for (const node of session.nodes) node.stopper?.abort();
}

function toggleBeside() {
  const { current, state } = session;
  if (current) session.change({ beside: state.beside === null ? session.parentOf(current)?.id ?? null : null });
}

const short = (text) => (text.length > 28 ? `${text.slice(0, 27)}…` : text).replaceAll("\n", " ").trim();
const ALT = {
  KeyS: stop, KeyB: toggleBeside, KeyP: () => session.current && session.prune(session.current), KeyN: () => byId("name").focus(),
  KeyA: () => byId("details-body").querySelector(".choice")?.focus(), KeyT: () => main.box.focus(), ArrowUp: () => walk(session, -1), ArrowDown: () => walk(session, 1),
  KeyH: () => (byId("help").open = !byId("help").open),
};

function key(event) {
  if (byId("key-box").open) return;
  const typing = event.target.closest("input:not([type=range], [type=radio]), textarea");
  // Alt types a sign on some keyboards, and opens lists.
  const types = event.target.closest("select") || (typing && (event.key === "Dead" || /^[^\x20-\x7e]$/.test(event.key)));
  if ((event.ctrlKey || event.metaKey) && event.key === "Enter") generate();
  else if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z" && !typing) event.shiftKey ? session.redo() : session.undo();
  else if (event.altKey && !types && ALT[event.code]) ALT[event.code]();
  else return;
  event.preventDefault();
}

function listen() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  byId("stop").addEventListener("click", stop);
  byId("afresh").addEventListener("click", () => {
    session.walk(null);
    byId("prompt").focus();
  });
  for (const id of ["chat", "completion"]) byId(id).addEventListener("change", offerAfresh);
  byId("together").addEventListener("click", toggleBeside);
  byId("save-report").addEventListener("click", () => save("report", "text.html", "text/html"));
  byId("save-trace").addEventListener("click", () => save("trace", "text.jsonl", "application/jsonl"));
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async () => {
    for (const file of byId("file").files) await open(file);
    byId("file").value = "";
  });
  byId("dismiss").addEventListener("click", () => (byId("failure").hidden = true));
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => {
    event.preventDefault();
    if (kind === "drop") for (const file of event.dataTransfer.files) open(file);
  });
  document.addEventListener("keydown", key);
  byId("legend").append(...Object.entries(REGIMES).map(([regime, { title, meaning }]) =>
    element("li", {}, element("span", { class: "token", "data-regime": regime }, meaning), element("span", { class: "muted" }, ` ${title} `), element("span", { class: "share", id: `share-${regime}` }))));
  session.on(refresh);
  showTree(session);
}

listen();
session.move(session.state);
offer().catch(fail);
