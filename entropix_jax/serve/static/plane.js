// The plane of entropy and varentropy: the regions of the regimes, a symbol for each token, thresholds that can be dragged.

import { onceAFrame, themeColours } from "./dom.js";
import { number } from "./format.js";
import { axisOf, drawnRegions, labelledBefore, tickText } from "./quadrants.js";
import { REGIMES, REGIME_COLOURS, boundsOf } from "./regimes.js";
import { inOrder, knobsOf, percentileText } from "./whatif.js";

const EDGE = { left: 56, right: 52, top: 24, bottom: 34 };
const NEAR = 9; // pixels from a threshold within which it can be dragged
const SAME = 2; // pixels between two thresholds that are dragged apart by the direction
const PAD = 5; // pixels around a label
const AXES = { entropy: "x", varentropy: "y" };

export class Plane {
  // `move(values)` is called while a threshold is dragged, `drop()` afterwards.
  constructor(figure, { move, drop }) {
    [this.back, this.front] = figure.querySelectorAll("canvas");
    this.figure = figure;
    this.facts = null;
    this.values = {};
    this.knobs = [];
    this.tokens = [];
    this.drawn = 0;
    this.redraw = onceAFrame(() => this.draw());
    new ResizeObserver(() => this.redraw()).observe(figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
    this.drag(move, drop);
  }

  show(tokens, facts, values, regimeOf) {
    Object.assign(this, { tokens, facts, values, regimeOf, selected: null });
    this.knobs = facts ? knobsOf(facts).filter(({ quantity }) => AXES[quantity]) : [];
    this.redraw();
  }

  // Draws the new tokens. Redraws everything only if one lies beyond the axes.
  grow() {
    if (!this.look) return;
    const fresh = this.tokens.slice(this.drawn);
    const beyond = ([quantity, axis]) => !this.tableOf(quantity) && fresh.some((token) => token[quantity] > this.axes[axis].end);
    if (Object.entries(AXES).some(beyond)) this.redraw();
    else this.points(fresh);
    this.drawn = this.tokens.length;
  }

  select(token) {
    this.selected = token;
    this.redraw();
  }

  tableOf(quantity) {
    return this.facts?.calibration?.quantiles[quantity];
  }

  draw() {
    const { width, height } = this.figure.getBoundingClientRect();
    if (!width) return;
    const ratio = devicePixelRatio;
    for (const canvas of [this.back, this.front]) {
      canvas.width = width * ratio;
      canvas.height = height * ratio;
      canvas.getContext("2d").scale(ratio, ratio);
    }
    Object.assign(this, { width, height, look: themeColours(["text", "muted", "line", ...REGIME_COLOURS]) });
    this.axes = Object.fromEntries(Object.entries(AXES).map(([quantity, axis]) => [axis, axisOf(
      this.tableOf(quantity),
      this.tokens.map((token) => token[quantity]),
      this.lines().filter((line) => line.axis === axis).map(({ now }) => now),
    )]));
    const ink = this.back.getContext("2d");
    this.regions(ink);
    this.scales(ink);
    for (const line of this.lines()) this.threshold(ink, line);
    this.points(this.tokens);
    this.drawn = this.tokens.length;
    if (this.selected) this.ring(this.selected);
  }

  // Pixels of a coordinate of an axis, and of a value.
  pixel(axis, place) {
    const share = place / this.axes[axis].end;
    if (axis === "x") return EDGE.left + share * (this.width - EDGE.left - EDGE.right);
    return this.height - EDGE.bottom - share * (this.height - EDGE.top - EDGE.bottom);
  }

  at(axis, value) {
    return this.pixel(axis, this.axes[axis].at(value));
  }

  // The thresholds that are lines of the plane, at their current values.
  lines() {
    return this.knobs.map((knob) => ({ ...knob, axis: AXES[knob.quantity], now: this.values[knob.key] }));
  }

  regions(ink) {
    const bounds = this.facts ? boundsOf(this.facts.boxes, this.values) : [];
    if (!bounds.length) return;
    for (const { regime, x, y, side, labelled } of drawnRegions(bounds, this.axes)) {
      const [[x0, x1], [y1, y0]] = [x.map((place) => this.pixel("x", place)), y.map((place) => this.pixel("y", place))];
      ink.fillStyle = this.look[`${regime}-fill`];
      ink.fillRect(x0, y0, x1 - x0, y1 - y0);
      if (labelled) this.label(ink, regime, { x0, x1, y0, y1, side });
    }
  }

  // The regime's name, and its acronym if there is room, in the corner of the plane that the region touches.
  label(ink, regime, { x0, x1, y0, y1, side }) {
    const { name, acronym } = REGIMES[regime];
    const part = (text, font) => ((ink.font = `${font} system-ui, sans-serif`), { text, font: ink.font, width: ink.measureText(text).width });
    const large = part(name, "600 12px");
    const room = x1 - x0 - 2 * PAD;
    const widthOf = (parts) => parts.reduce((sum, { width }) => sum + width, 0);
    const parts = [[large, part(` ${acronym}`, "10px")], [large], [part(name, "600 10px")]].find((one) => widthOf(one) <= room);
    if (!parts || y1 - y0 < 20) return;
    let x = x0 + PAD + ((side.x + 1) / 2) * (room - widthOf(parts));
    const y = { [-1]: y1 - PAD, 0: (y0 + y1) / 2 + 4, 1: y0 + 16 }[side.y];
    ink.fillStyle = this.look[`${regime}-text`];
    ink.textAlign = "left";
    for (const { text, font, width } of parts) {
      ink.font = font;
      ink.fillText(text, x, y);
      x += width;
    }
  }

  scales(ink) {
    const { look } = this;
    const [left, right, bottom, top] = [EDGE.left, this.width - EDGE.right, this.height - EDGE.bottom, EDGE.top];
    ink.font = "12px system-ui, sans-serif";
    ink.strokeStyle = look.line;
    ink.strokeRect(left, top, right - left, bottom - top);
    ink.fillStyle = look.muted;
    for (const [axis, { ticks }] of Object.entries(this.axes)) for (const [place, value] of ticks) {
      const text = tickText(value);
      ink.textAlign = axis === "x" ? "center" : "right";
      if (axis === "x") ink.fillText(text, this.pixel("x", place), bottom + 14);
      else ink.fillText(text, left - 5, this.pixel("y", place) + 4);
    }
    ink.textAlign = "center";
    ink.fillText("entropy, bits", (left + right) / 2, this.height - 5);
    ink.save();
    ink.translate(11, (top + bottom) / 2);
    ink.rotate(-Math.PI / 2);
    ink.fillText("varentropy, bits²", 0, 0);
    ink.restore();
  }

  // A threshold's line, name and percentile.
  threshold(ink, line) {
    const { axis, now, key } = line;
    const [left, right, bottom, top] = [EDGE.left, this.width - EDGE.right, this.height - EDGE.bottom, EDGE.top];
    const at = this.at(axis, now);
    ink.strokeStyle = ink.fillStyle = this.look.text;
    ink.lineWidth = key === this.taken ? 2.5 : 1;
    ink.setLineDash([5, 4]);
    ink.beginPath();
    if (axis === "x") ink.moveTo(at, top), ink.lineTo(at, bottom);
    else ink.moveTo(left, at), ink.lineTo(right, at);
    ink.stroke();
    ink.setLineDash([]);
    ink.lineWidth = 1;
    ink.font = `${key === this.taken ? "600 " : ""}12px system-ui, sans-serif`;
    const parts = [line.name ?? number(now), percentileText(line, now)].filter(Boolean);
    const before = labelledBefore(line, this.lines(), this.axes);
    if (axis === "x") {
      ink.textAlign = before ? "right" : "left";
      ink.fillText(parts.join(" "), before ? Math.max(at, left + 14) : Math.min(at, right - 10), top - 7);
    } else {
      ink.textAlign = "left";
      const first = before ? at + 13 : at - 4 - 14 * (parts.length - 1);
      parts.forEach((text, i) => ink.fillText(text, right + 4, first + 14 * i));
    }
  }

  points(tokens) {
    const ink = this.front.getContext("2d");
    for (const token of tokens) {
      const regime = this.regimeOf(token);
      ink.strokeStyle = ink.fillStyle = this.look[regime];
      ink.lineWidth = 1.3;
      ink.globalAlpha = token.type === "retracted" ? 0.4 : 0.75;
      sign(ink, REGIMES[regime].symbol, this.at("x", token.entropy), this.at("y", token.varentropy));
    }
    ink.globalAlpha = 1;
  }

  ring(token) {
    const ink = this.front.getContext("2d");
    ink.strokeStyle = this.look.text;
    ink.lineWidth = 2;
    ink.beginPath();
    ink.arc(this.at("x", token.entropy), this.at("y", token.varentropy), 8, 0, 7);
    ink.stroke();
  }

  // The threshold nearest to the pointer, and those at the same place.
  linesAt({ offsetX, offsetY }) {
    if (!this.look) return [];
    const near = this.lines()
      .map((line) => ({ ...line, pixel: this.at(line.axis, line.now) }))
      .map((line) => ({ ...line, away: Math.abs((line.axis === "x" ? offsetX : offsetY) - line.pixel) }))
      .filter(({ away }) => away <= NEAR).sort((a, b) => a.away - b.away);
    return near.filter(({ axis, pixel }) => axis === near[0].axis && Math.abs(pixel - near[0].pixel) <= SAME);
  }

  drag(move, drop) {
    let [lines, start] = [[], 0]; // the thresholds under the hand, and where the pointer took them
    const alongOf = (axis, { offsetX, offsetY }) => (axis === "x" ? offsetX - EDGE.left : this.height - EDGE.bottom - offsetY);
    this.front.addEventListener("pointerdown", (event) => {
      lines = this.linesAt(event);
      if (!lines.length) return;
      start = alongOf(lines[0].axis, event);
      this.front.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.front.addEventListener("pointermove", (event) => {
      const { axis } = lines[0] ?? this.linesAt(event)[0] ?? {};
      this.front.style.cursor = axis ? (axis === "x" ? "ew-resize" : "ns-resize") : "";
      if (!lines.length) return;
      const along = alongOf(axis, event);
      // Of equal thresholds the upper one moves up, the lower one down.
      if (lines.length > 1 && along === start) return;
      if (lines.length > 1) lines = [lines.find(({ low }) => low === along < start) ?? lines[0]];
      const [{ key }] = lines;
      const inner = axis === "x" ? this.width - EDGE.left - EDGE.right : this.height - EDGE.top - EDGE.bottom;
      this.taken = key;
      const value = this.axes[axis].value(Math.max(0, Math.min(1, along / inner)) * this.axes[axis].end);
      move({ ...this.values, [key]: inOrder(key, value, this.values) });
    });
    const end = () => {
      if (!lines.length) return;
      lines = [];
      this.taken = null;
      this.redraw();
      drop();
    };
    this.front.addEventListener("pointerup", end);
    this.front.addEventListener("pointercancel", end);
  }
}

function sign(ink, symbol, x, y) {
  const r = 3.4;
  ink.beginPath();
  if (symbol === "circle") ink.arc(x, y, r, 0, 7);
  else if (symbol === "square") ink.rect(x - r, y - r, 2 * r, 2 * r);
  else if (symbol === "diamond") [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]].forEach(([a, b]) => ink.lineTo(x + a * r, y + b * r));
  else if (symbol === "x") ink.moveTo(x - r, y - r), ink.lineTo(x + r, y + r), ink.moveTo(x + r, y - r), ink.lineTo(x - r, y + r);
  else [[0, -1.2], [1.1, 0.9], [-1.1, 0.9]].forEach(([a, b]) => ink.lineTo(x + a * r, y + b * r));
  ink.closePath();
  if (symbol === "x") ink.stroke();
  else ink.fill();
}
