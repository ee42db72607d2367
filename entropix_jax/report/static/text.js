// The texts: tokens to point at, click and walk through, and the legend.

import { byId } from "./dom.js";
import { percent } from "./format.js";
import { occupancy } from "./regimes.js";

export function showTexts(texts) {
  for (const side of texts.sides) bindTokens(texts, side);

  const colour = () => {
    const { items, spans } = texts.side;
    for (const token of items) {
      const regime = texts.regimeOf(token);
      spans[token.index].dataset.regime = regime;
      spans[token.index].classList.toggle("faded", texts.hidden.has(regime) || (texts.marked !== null && !texts.marked.has(token)));
    }
  };
  texts.on("sides", () => {
    for (const side of texts.sides) side.card.hidden = side !== texts.side;
    for (const node of document.querySelectorAll("[data-of-row]")) node.hidden = Number(node.dataset.ofRow) !== texts.side.row;
  });
  texts.on("token", ({ scroll }) => selectSpan(texts.side, texts.pinned, scroll));
  texts.on("sides hidden marked bounds", colour);
}

function bindTokens(texts, side) {
  side.spans.forEach((span, i) => {
    span.id = `${side.box.id}-${i}`;
    span.dataset.index = i;
    span.setAttribute("role", "option");
    span.setAttribute("aria-selected", "false");
    if (side.items[i].type === "retracted") span.setAttribute("aria-label", `retracted: ${side.items[i].text}`);
  });
  const tokenAt = (event) => side.items[event.target.closest?.(".token")?.dataset.index];
  side.box.addEventListener("pointerover", (event) => {
    const token = event.pointerType !== "touch" && tokenAt(event);
    if (token) texts.selectToken(token);
  });
  side.box.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token) texts.selectToken(token, { pin: !(texts.pinned && token === side.token) });
  });
  side.box.addEventListener("keydown", (event) => {
    const token = neighbour(event.key, side);
    if (event.key === "Escape") texts.select(texts.place, { token: side.token, pin: false });
    else if (token) texts.selectToken(token, { pin: true, scroll: true });
    else return;
    event.preventDefault();
  });
}

function selectSpan({ box, spans, token }, pinned, scroll) {
  const before = box.querySelector(".selected");
  before?.classList.remove("selected", "pinned");
  before?.setAttribute("aria-selected", "false");
  const span = token && spans[token.index];
  if (!span) return;
  span.classList.add("selected");
  span.classList.toggle("pinned", pinned);
  span.setAttribute("aria-selected", "true");
  box.setAttribute("aria-activedescendant", span.id);
  if (!scroll) return;
  const [outer, inner] = [box, span].map((node) => node.getBoundingClientRect());
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 24;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 24;
}

// The token that a key leads to: along the text, or to the line above or below.
export function neighbour(key, { items, spans, token }) {
  if (!token && key !== "Home") return /^(Arrow|End)/.test(key) ? items.at(-1) : null; // beyond the end of this text
  const at = token?.index;
  if (key === "ArrowRight") return items[Math.min(at + 1, items.length - 1)];
  if (key === "ArrowLeft") return items[Math.max(at - 1, 0)];
  if (key === "Home") return items[0];
  if (key === "End") return items.at(-1);
  if (key === "ArrowDown") return items[onNextLine(spans, at, 1)];
  if (key === "ArrowUp") return items[onNextLine(spans, at, -1)];
  return null;
}

function onNextLine(spans, at, step) {
  const { left, top, height } = spans[at].getBoundingClientRect();
  let [best, line, distance] = [at, null, Infinity];
  for (let i = at + step; i >= 0 && i < spans.length; i += step) {
    const rect = spans[i].getBoundingClientRect();
    if (step * (rect.top - top) < height / 2) continue;
    line ??= rect.top;
    if (Math.abs(rect.top - line) > height / 2) break;
    if (Math.abs(rect.left - left) < distance) [best, distance] = [i, Math.abs(rect.left - left)];
  }
  return best;
}

export function showLegend(texts) {
  const buttons = [...document.querySelectorAll("#legend button")];
  for (const button of buttons) button.addEventListener("click", () => texts.toggleRegime(button.dataset.regime));
  texts.on("sides hidden bounds", () => {
    const tokens = texts.side.tokens;
    const counts = occupancy(tokens, texts.regimeOf);
    for (const button of buttons) {
      const { regime } = button.dataset;
      button.setAttribute("aria-pressed", String(!texts.hidden.has(regime)));
      button.querySelector(".share").textContent = percent(counts[regime] / Math.max(tokens.length, 1));
    }
  });
  const sides = byId("sides") ? [...byId("sides").querySelectorAll("button")] : [];
  sides.forEach((button, i) => button.addEventListener("click", () => texts.show(texts.sides[i])));
  texts.on("sides", () => sides.forEach((button, i) => button.setAttribute("aria-pressed", String(texts.sides[i] === texts.side))));
}
