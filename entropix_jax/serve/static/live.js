// The live page: texts are streamed from the server, and can be continued from any token.

import { Api } from "./api.js";
import { askKey } from "./apikey.js";
import { byId } from "./dom.js";
import { fetchExample } from "./example.js";
import { fail } from "./failure.js";
import { allowSaving, offerFiles } from "./files.js";
import { Generator } from "./generate.js";
import { listenToKeys } from "./keyboard.js";
import { Session } from "./session.js";
import { Sides } from "./sides.js";
import { Start } from "./start.js";
import { Stream } from "./stream.js";
import { Thresholds } from "./thresholds.js";
import { showTree } from "./tree.js";

const session = new Session();
const api = new Api(askKey);
const start = new Start(api);
const stream = new Stream(session, api, { grow, end, learn, change: showStatus });
const generator = new Generator(session, start, stream);
const thresholds = new Thresholds(session, {
  recolour: () => sides.recolour(),
  keep: (changes) => start.keep(changes),
  goOn: (...place) => generator.goOn(...place),
});
const sides = new Sides(session, {
  regimeOf: thresholds.regimeOf,
  select: (token) => thresholds.select(token),
  chooserOf: (node, token) => (start.model && node !== session.example ? (tokens, text) => generator.choose(node, token, tokens, text) : null),
  change: generator,
});

// Events of the stream.

function grow(node, items) {
  if (node === session.current) thresholds.grow();
  sides.grow(node, items);
}

function end(node) {
  if (node !== session.current) return;
  thresholds.end(node);
  sides.end(node);
}

function learn(node) {
  if (node === session.current) showFacts(node);
}

// The shown texts.

function show() {
  const { current, displayed } = session;
  document.body.classList.toggle("fresh", !current);
  thresholds.clear();
  start.follow(current);
  sides.show();
  stream.stopUnseen();
  if (displayed) thresholds.show(displayed);
  showStatus();
  generator.offer();
}

function showFacts(node) {
  thresholds.show(node);
  sides.showAsked();
}

function showStatus() {
  const { running } = stream;
  byId("stop").disabled = !running;
  allowSaving(session.current);
  sides.showStatus();
  document.documentElement.dataset.state = running ? "running" : "idle";
}

byId("stop").addEventListener("click", () => stream.stop());
byId("together").addEventListener("click", () => session.toggleBeside());
offerFiles(session, api);
listenToKeys(session, { generate: () => generator.generate(), stop: () => stream.stop(), chats: () => start.chat });
session.on(show);
showTree(session);
session.move(session.state);
start.offer().catch(fail);
fetchExample().then((example) => {
  session.example = example;
  if (!session.current) show();
}, fail);
