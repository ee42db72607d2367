// The text, token by token, and the legend beside it.

import { byId, element } from "./dom.js";
import { percent, visible } from "./format.js";
import { REGIMES, occupancy } from "./regimes.js";

// `prefix` tells the ids of several texts apart; `mark` adds to a text that was just written.
export function showText(state, box = byId("text"), prefix = "token", mark = () => {}) {
  let spans = [];

  function fill() {
    spans = state.row.items.map((token) => tokenSpan(token, prefix));
    box.replaceChildren(...spans);
    mark(spans);
    colour();
    box.scrollTop = 0;
  }

  function colour() {
    for (const token of state.row.items) {
      const regime = state.regimeOf(token);
      const span = spans[token.index];
      span.dataset.regime = regime;
      span.classList.toggle("faded", state.hidden.has(regime) || (state.marked !== null && !state.marked.has(token)));
    }
    const note = byId("text-note");
    if (note) note.hidden = !state.changed;
  }

  function select({ scroll }) {
    box.querySelector(".selected")?.classList.remove("selected", "pinned");
    box.querySelector("[aria-selected=true]")?.setAttribute("aria-selected", "false");
    const span = state.token && spans[state.token.index];
    if (!span) return;
    span.classList.add("selected");
    span.classList.toggle("pinned", state.pinned);
    span.setAttribute("aria-selected", "true");
    box.setAttribute("aria-activedescendant", span.id);
    if (scroll) scrollWithin(box, span);
  }

  const tokenAt = (event) => {
    const span = event.target.closest?.(".token");
    return span && state.row.items[Number(span.dataset.index)];
  };
  box.addEventListener("pointerover", (event) => {
    const token = event.pointerType !== "touch" && tokenAt(event);
    if (token) state.select(token);
  });
  box.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token) state.select(token, { pin: !(state.pinned && token === state.token) });
  });
  box.addEventListener("keydown", (event) => {
    const token = neighbour(event.key, state, spans);
    if (event.key === "Escape") state.select(state.token, { pin: false });
    else if (token) state.select(token, { pin: true, scroll: true });
    else return;
    event.preventDefault();
  });

  state.on("row", fill);
  state.on("token", select);
  for (const kind of ["hidden", "marked", "bounds"]) state.on(kind, colour);
}

function tokenSpan(token, prefix) {
  const span = element("span", {
    class: "token",
    role: "option",
    id: `${prefix}-${token.index}`,
    "aria-selected": "false",
    "data-index": token.index,
    "data-action": token.action,
  });
  span.classList.toggle("injected", token.action === "inject");
  span.classList.toggle("branched", token.action === "branch");
  span.classList.toggle("loop", token.loop);
  span.classList.toggle("retracted", token.type === "retracted");
  if (token.runStart) span.classList.add(`${token.runStart}-start`);
  if (token.text === "") span.classList.add("empty");
  if (token.type === "retracted") span.setAttribute("aria-label", `taken back: ${token.text}`);
  // A line break has a sign to point at, and breaks the line.
  const lines = token.text.split("\n");
  lines.forEach((line, i) => {
    if (i > 0) span.append(element("span", { class: "sign", "aria-hidden": "true" }, "↵"), "\n");
    if (line) span.append(line.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u2028\u2029]/g, "\ufffd"));
  });
  if (token.text === "") span.append(visible("", token.token_id));
  return span;
}

// The token that a key leads to: along the text, or to the next line of it as it is laid out.
function neighbour(key, state, spans) {
  const items = state.row.items;
  if (!state.token) return /^(Arrow|Home|End)/.test(key) ? items.at(-1) : null; // past the end of this text
  const at = state.token.index;
  if (key === "ArrowRight") return items[Math.min(at + 1, items.length - 1)];
  if (key === "ArrowLeft") return items[Math.max(at - 1, 0)];
  if (key === "Home") return items[0];
  if (key === "End") return items.at(-1);
  if (key === "ArrowDown") return items[otherLine(spans, at, 1)];
  if (key === "ArrowUp") return items[otherLine(spans, at, -1)];
  return null;
}

function otherLine(spans, at, step) {
  const { left, top, height } = spans[at].getBoundingClientRect();
  let best = at;
  let line = null;
  for (let i = at + step; i >= 0 && i < spans.length; i += step) {
    const rect = spans[i].getBoundingClientRect();
    if (step * (rect.top - top) < height / 2) continue;
    line ??= rect.top;
    if (Math.abs(rect.top - line) > height / 2) break;
    if (best === at || Math.abs(rect.left - left) < Math.abs(spans[best].getBoundingClientRect().left - left)) best = i;
  }
  return best;
}

function scrollWithin(box, span) {
  const outer = box.getBoundingClientRect();
  const inner = span.getBoundingClientRect();
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 24;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 24;
}

export function showLegend(state, tokensOf = () => state.row.tokens) {
  const buttons = Object.entries(REGIMES).map(([regime, { title, meaning, where }]) => {
    const share = element("span", { class: "share" });
    const button = element("button", {
      type: "button",
      "aria-pressed": "true",
      "data-regime": regime,
      title: "show or hide these tokens",
      onclick: () => state.toggle(regime),
    },
    element("span", { class: "token", "data-regime": regime }, meaning),
    element("span", { class: "what" }, element("b", {}, title), ` ${where}`),
    share);
    return { regime, button, share };
  });
  byId("legend").replaceChildren(...buttons.map(({ button }) => element("li", {}, button)));
  const update = () => {
    const tokens = tokensOf();
    const counts = occupancy(tokens, state.regimeOf);
    for (const { regime, button, share } of buttons) {
      button.setAttribute("aria-pressed", String(!state.hidden.has(regime)));
      share.textContent = percent(counts[regime] / Math.max(tokens.length, 1));
    }
  };
  for (const kind of ["row", "hidden", "bounds"]) state.on(kind, update);
}
