// The plane of entropy and varentropy: the boxes of the regimes, a sign for each token, thresholds to be dragged.

import { onceAFrame, themeColours } from "./dom.js";
import { REGIMES, REGIME_COLOURS, boundsOf, keyOf } from "./regimes.js";

const EDGE = { left: 40, right: 10, top: 10, bottom: 34 };
const NEAR = 9; // pixels from which a threshold is taken
const AXES = { entropy: "x", varentropy: "y" };

export class Plane {
  // `move(values)` while a threshold is dragged, `drop(values)` afterwards.
  constructor(figure, { move, drop }) {
    [this.back, this.front] = figure.querySelectorAll("canvas");
    this.figure = figure;
    this.facts = null;
    this.values = {};
    this.tokens = [];
    this.drawn = 0;
    this.top = { x: 1, y: 1 };
    this.redraw = onceAFrame(() => this.draw());
    new ResizeObserver(() => this.redraw()).observe(figure);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
    this.drag(move, drop);
  }

  show(tokens, facts, values, regimeOf) {
    Object.assign(this, { tokens, facts, values, regimeOf, selected: null });
    this.redraw();
  }

  // Draws the tokens that came since; everything only if one lies beyond the axes.
  grow() {
    if (!this.look) return;
    const fresh = this.tokens.slice(this.drawn);
    if (fresh.some((token) => token.entropy > this.top.x || token.varentropy > this.top.y)) this.redraw();
    else this.points(fresh);
    this.drawn = this.tokens.length;
  }

  select(token) {
    this.selected = token;
    this.redraw();
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
    for (const [quantity, axis] of Object.entries(AXES)) {
      const most = this.tokens.reduce((top, token) => Math.max(top, token[quantity]), 1);
      const bounds = this.lines().filter((line) => line.axis === axis).map(({ value }) => value * 1.15);
      this.top[axis] = Math.ceil(Math.max(most * 1.1, ...bounds));
    }
    this.boxes(this.back.getContext("2d"));
    this.points(this.tokens);
    this.drawn = this.tokens.length;
    if (this.selected) this.ring(this.selected);
  }

  x(value) {
    return EDGE.left + (Math.min(value, this.top.x) / this.top.x) * (this.width - EDGE.left - EDGE.right);
  }

  y(value) {
    return this.height - EDGE.bottom - (Math.min(value, this.top.y) / this.top.y) * (this.height - EDGE.top - EDGE.bottom);
  }

  // The thresholds that are lines of the plane.
  lines() {
    const found = new Map();
    for (const { conditions } of this.facts?.boxes ?? []) for (const one of conditions) {
      if (AXES[one.quantity]) found.set(keyOf(one), { key: keyOf(one), axis: AXES[one.quantity], value: this.values[keyOf(one)] });
    }
    return [...found.values()];
  }

  boxes(ink) {
    const { look } = this;
    const [left, right, bottom, top] = [EDGE.left, this.width - EDGE.right, this.height - EDGE.bottom, EDGE.top];
    ink.font = "12px system-ui, sans-serif";
    const within = (value, most) => Math.max(0, Math.min(value, most));
    for (const { regime, bounds } of this.facts ? boundsOf(this.facts.boxes, this.values) : []) {
      const [x, y] = ["entropy", "varentropy"].map((name) => bounds[name] ?? [0, Infinity]);
      const [x0, x1] = x.map((value) => this.x(within(value, this.top.x)));
      const [y1, y0] = y.map((value) => this.y(within(value, this.top.y)));
      if (x1 <= x0 || y1 <= y0) continue;
      ink.fillStyle = look[`${regime}-fill`];
      ink.fillRect(x0, y0, x1 - x0, y1 - y0);
      ink.save();
      ink.beginPath();
      ink.rect(x0, y0, x1 - x0, y1 - y0);
      ink.clip();
      ink.fillStyle = look[`${regime}-text`];
      ink.textAlign = "right";
      const { title, meaning } = REGIMES[regime];
      if (x1 - x0 > 42) ink.fillText(x1 - x0 > 120 ? `${title} ${meaning}` : title, x1 - 5, y0 + 15);
      ink.restore();
    }
    ink.strokeStyle = look.line;
    ink.strokeRect(left, top, right - left, bottom - top);
    ink.fillStyle = look.muted;
    for (let i = 0; i <= 4; i++) {
      const [x, y] = [(this.top.x * i) / 4, (this.top.y * i) / 4];
      ink.textAlign = i === 4 ? "right" : "center";
      ink.fillText(String(+x.toFixed(2)), this.x(x), bottom + 14);
      ink.textAlign = "right";
      ink.fillText(String(+y.toFixed(2)), left - 5, this.y(y) + (i === 4 ? 9 : 4));
    }
    ink.textAlign = "center";
    ink.fillText("entropy, bits", (left + right) / 2, this.height - 5);
    ink.save();
    ink.translate(11, (top + bottom) / 2);
    ink.rotate(-Math.PI / 2);
    ink.fillText("varentropy, bits²", 0, 0);
    ink.restore();
    ink.setLineDash([5, 4]);
    ink.strokeStyle = look.text;
    for (const { axis, value, key } of this.lines()) {
      const at = this[axis](value);
      ink.lineWidth = key === this.taken ? 2.5 : 1;
      ink.beginPath();
      if (axis === "x") ink.moveTo(at, top), ink.lineTo(at, bottom);
      else ink.moveTo(left, at), ink.lineTo(right, at);
      ink.stroke();
    }
    ink.setLineDash([]);
  }

  points(tokens) {
    const ink = this.front.getContext("2d");
    for (const token of tokens) {
      const regime = this.regimeOf(token);
      ink.strokeStyle = ink.fillStyle = this.look[regime];
      ink.lineWidth = 1.3;
      ink.globalAlpha = token.type === "retracted" ? 0.4 : 0.75;
      sign(ink, REGIMES[regime].symbol, this.x(token.entropy), this.y(token.varentropy));
    }
    ink.globalAlpha = 1;
  }

  ring(token) {
    const ink = this.front.getContext("2d");
    ink.strokeStyle = this.look.text;
    ink.lineWidth = 2;
    ink.beginPath();
    ink.arc(this.x(token.entropy), this.y(token.varentropy), 8, 0, 7);
    ink.stroke();
  }

  drag(move, drop) {
    const lineAt = ({ offsetX, offsetY }) => this.look && this.lines()
      .map((line) => ({ ...line, away: Math.abs((line.axis === "x" ? offsetX : offsetY) - this[line.axis](line.value)) }))
      .sort((a, b) => a.away - b.away).find(({ away }) => away <= NEAR);
    let held = null;
    this.front.addEventListener("pointerdown", (event) => {
      held = lineAt(event) ?? null;
      if (!held) return;
      this.taken = held.key;
      this.front.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.front.addEventListener("pointermove", (event) => {
      const line = held ?? lineAt(event);
      this.front.style.cursor = line ? (line.axis === "x" ? "ew-resize" : "ns-resize") : "";
      if (!held) return;
      const inner = held.axis === "x" ? this.width - EDGE.left - EDGE.right : this.height - EDGE.top - EDGE.bottom;
      const along = held.axis === "x" ? event.offsetX - EDGE.left : this.height - EDGE.bottom - event.offsetY;
      const value = Math.max(0, Math.min(1, along / inner)) * this.top[held.axis];
      move({ ...this.values, [held.key]: +value.toFixed(3) });
    });
    const end = () => {
      if (!held) return;
      held = this.taken = null;
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
