// The texts: tokens to point at, click and walk through, the legend, and where texts diverge.

import { byId, element } from "./dom.js";
import { percent } from "./format.js";
import { occupancy } from "./regimes.js";
import { placeOf } from "./texts.js";

export function showTexts(texts) {
  for (const side of texts.sides) bindTokens(texts, side);

  const colour = () => {
    for (const { items, spans } of texts.shown) for (const token of items) {
      const regime = texts.regimeOf(token);
      spans[token.index].dataset.regime = regime;
      spans[token.index].classList.toggle("faded", texts.hidden.has(regime) || (texts.marked !== null && !texts.marked.has(token)));
    }
  };
  const select = ({ scroll, side: source }) => {
    for (const side of texts.shown) selectSpan(side, texts.pinned, scroll || side !== source);
  };
  texts.on("sides", () => {
    for (const side of texts.sides) side.card.hidden = !side.shown;
    for (const node of document.querySelectorAll("[data-of-row]")) node.hidden = Number(node.dataset.ofRow) !== texts.shown[0].about.row;
    if (!texts.single) for (const side of texts.shown) markParting(texts, side);
  });
  texts.on("token", select);
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
    if (token) texts.selectToken(side, token);
  });
  side.box.addEventListener("click", (event) => {
    const token = tokenAt(event);
    if (token) texts.selectToken(side, token, { pin: !(texts.pinned && token === side.token) });
  });
  side.box.addEventListener("keydown", (event) => {
    const token = neighbour(event.key, side);
    if (event.key === "Escape") texts.select(texts.place, { side, token: side.token, pin: false });
    else if (token) texts.selectToken(side, token, { pin: true, scroll: true });
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
  if (!token) return /^(Arrow|Home|End)/.test(key) ? items.at(-1) : null; // beyond the end of this text
  const at = token.index;
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

function markParting(texts, side) {
  const { items, spans, card, box, parting } = side;
  const several = texts.shown.length > 1;
  box.querySelector(".parting")?.remove();
  items.forEach((token, i) => {
    const place = placeOf(side, token);
    spans[i].classList.toggle("common", several && place < texts.common);
    spans[i].classList.toggle("parts", several && place === parting && token.type === "token");
  });
  const [first] = texts.shown;
  const at = several ? items.findIndex((token) => placeOf(side, token) === parting) : -1;
  if (at > 0) spans[at].before(element("span", { class: "parting", "aria-hidden": "true" }, side === first ? "texts diverge" : `differs from ${first.name}`));
  card.querySelector(".parting-note").textContent = partingText(texts, side);
}

function partingText({ shown }, { tokens, parting, ...side }) {
  const isFirst = side.number === shown[0].number;
  if (tokens.length === 0) return "No tokens.";
  if (shown.length === 1) return `${tokens.length} tokens.`;
  const other = isFirst ? "the other texts" : shown[0].name;
  if (parting === null) return `Same tokens as ${other}.`;
  if (parting === 0) return `Differs from ${other} from the start.`;
  if (parting >= tokens.length) return `A prefix of ${other}: ${parting} tokens.`;
  return `Differs from ${other} at token ${parting + 1}.`;
}

export function showLegend(texts) {
  const buttons = [...document.querySelectorAll("#legend button")];
  for (const button of buttons) button.addEventListener("click", () => texts.toggleRegime(button.dataset.regime));
  texts.on("sides hidden bounds", () => {
    const tokens = texts.shown.flatMap((side) => side.tokens);
    const counts = occupancy(tokens, texts.regimeOf);
    for (const button of buttons) {
      const { regime } = button.dataset;
      button.setAttribute("aria-pressed", String(!texts.hidden.has(regime)));
      button.querySelector(".share").textContent = percent(counts[regime] / Math.max(tokens.length, 1));
    }
  });
  const sides = byId("sides") ? [...byId("sides").querySelectorAll("button")] : [];
  sides.forEach((button, i) => button.addEventListener("click", () => texts.toggleSide(texts.sides[i])));
  texts.on("sides", () => sides.forEach((button, i) => button.setAttribute("aria-pressed", String(texts.sides[i].shown))));
}
