// The live page: texts are streamed from the server, and can be continued from any token.

import { Api } from "./api.js";
import { askKey } from "./apikey.js";
import { byId } from "./dom.js";
import { fail, succeed } from "./failure.js";
import { allowSaving, offerFiles } from "./files.js";
import { Generator } from "./generate.js";
import { listenToKeys } from "./keyboard.js";
import { Session } from "./session.js";
import { offerSessions } from "./sessions.js";
import { Sides } from "./sides.js";
import { Start } from "./start.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";
import { Thresholds } from "./thresholds.js";
import { Tie } from "./tie.js";
import { fetchExample, offerOpening } from "./trace.js";
import { showTree } from "./tree.js";

const session = new Session();
const store = new Store(session, (problem) => {
  byId("unstored").hidden = !problem;
  byId("unstored").textContent = problem;
});
if (await store.restore()) fail(new Error("This session is open in another tab, so this tab continues a copy of it."));
const api = new Api(askKey);
const start = new Start(api);
const tie = new Tie(session, api);
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
  store.note();
  if (node === session.current) thresholds.grow();
  sides.grow(node, items);
}

function end(node) {
  store.note();
  if (node !== session.current) return;
  thresholds.end(node);
  sides.end(node);
}

function learn(node) {
  store.note();
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
  allowSaving(session.current, api);
  sides.showStatus();
  tie.show();
  document.documentElement.dataset.state = running ? "running" : "idle";
}

// Looks for a lost server until it answers.
let looking = null;
let before = null; // when the server started
api.lose = () => {
  showStatus();
  looking ??= setTimeout(async () => {
    looking = null;
    await start.offer().then(() => (succeed(), greet()), () => {});
  }, 1000);
};

// Called when the server answers.
function greet() {
  if (before && before !== api.server) fail(new Error("The server was started again: texts can be continued, but old ones can no longer be saved as files."));
  before = api.server;
  showStatus();
}

byId("stop").addEventListener("click", () => stream.stop());
byId("together").addEventListener("click", () => session.toggleBeside());
offerFiles(session, api);
listenToKeys(session, { generate: () => generator.generate(), stop: () => stream.stop(), chats: () => start.chat });
session.on(show);
showTree(session);
offerSessions(store);
offerOpening(session);
if (session.current?.messages) byId("chat").checked = true;
session.move(session.state);
start.offer().then(greet, fail);
fetchExample().then((example) => {
  session.example = example;
  if (!session.current) show();
}, fail);
