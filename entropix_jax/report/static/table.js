// A table of any length that sorts by its columns, page by page.

import { element } from "./dom.js";
import { number } from "./format.js";

// Columns: `key`, `title`, `value` (of a row: a number, a text or null) and at will `cell` (of a
// row: what is shown), `numeric`, `about`. `open` is called with a row whose button is pressed.
export class Table {
  constructor(box, columns, { label, size = 25, open = null, nameOf = null }) {
    Object.assign(this, { box, columns, size, open, nameOf });
    this.rows = [];
    this.sorted = null; // { column, down }
    this.first = 0;
    this.current = null;
    this.body = element("tbody");
    this.heads = columns.map((column) => this.head(column));
    this.place = element("span", { role: "status" });
    this.buttons = [["first", "«", () => 0], ["previous", "‹", () => this.first - size], ["next", "›", () => this.first + size], ["last", "»", () => Math.floor((this.rows.length - 1) / size) * size]].map(([name, sign, to]) =>
      element("button", { type: "button", "aria-label": `${name} page`, onclick: () => this.turnTo(to()) }, sign));
    box.replaceChildren(
      element("div", { class: "scroll wide", tabindex: 0, role: "region", "aria-label": label },
        element("table", { class: "grid" }, element("thead", {}, element("tr", {}, ...this.heads)), this.body)),
      element("div", { class: "pager" }, this.buttons[0], this.buttons[1], this.place, this.buttons[2], this.buttons[3]));
  }

  head(column) {
    const button = element("button", { type: "button", class: "sort", title: column.about, onclick: () => this.sortBy(column) }, column.title);
    return element("th", { scope: "col", "data-key": column.key, class: column.numeric ? "value" : "" }, button);
  }

  setRows(rows) {
    this.given = rows;
    this.order();
    this.turnTo(0);
  }

  // Downwards first for numbers, upwards for words; then the other way; then as it was.
  sortBy(column) {
    const begin = Boolean(column.numeric);
    if (this.sorted?.column !== column) this.sorted = { column, down: begin };
    else this.sorted = this.sorted.down === begin ? { column, down: !begin } : null;
    this.columns.forEach((one, i) => {
      const sort = this.sorted?.column === one ? (this.sorted.down ? "descending" : "ascending") : null;
      if (sort) this.heads[i].setAttribute("aria-sort", sort);
      else this.heads[i].removeAttribute("aria-sort");
    });
    this.order();
    this.turnTo(0);
  }

  order() {
    this.rows = this.given;
    if (!this.sorted) return;
    const { column: { value }, down } = this.sorted;
    const keyed = this.given.map((row, i) => [value(row), i, row]);
    // What is not there comes last, either way.
    keyed.sort(([a, i], [b, j]) => {
      if (a == null || b == null) return (a == null) - (b == null) || i - j;
      const one = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
      return (down ? -one : one) || i - j;
    });
    this.rows = keyed.map(([, , row]) => row);
  }

  turnTo(first) {
    this.first = Math.max(0, Math.min(first, Math.floor((this.rows.length - 1) / this.size) * this.size));
    const page = this.rows.slice(this.first, this.first + this.size);
    this.body.replaceChildren(...page.map((row) => this.line(row)));
    const last = this.first + page.length;
    this.place.textContent = this.rows.length ? `${this.first + 1} to ${last} of ${this.rows.length}` : "nothing fits";
    this.buttons.forEach((button, i) => (button.disabled = i < 2 ? this.first === 0 : last >= this.rows.length));
    this.box.querySelector(".pager").hidden = this.rows.length <= this.size && this.rows.length > 0;
  }

  line(row) {
    const cells = this.columns.map((column, i) => {
      const shown = this.shown(column, row);
      if (i > 0) return element("td", { class: column.numeric ? "value" : "words" }, shown);
      return element("th", { scope: "row" }, this.open ? element("button", { type: "button", class: "link", onclick: () => this.open(row) }, shown) : shown);
    });
    return element("tr", { class: row === this.current ? "current" : "", "data-row": this.nameOf?.(row) }, ...cells);
  }

  shown(column, row) {
    if (column.cell) return column.cell(row);
    const value = column.value(row);
    return typeof value === "number" ? element("data", { value }, number(value)) : (value ?? "–");
  }

  // Marks a row, and turns to its page.
  show(row) {
    this.current = row;
    const at = this.rows.indexOf(row);
    this.turnTo(at < 0 ? this.first : Math.floor(at / this.size) * this.size);
  }

  // The row that many after another one, as the table is sorted now.
  after(row, step) {
    const at = this.rows.indexOf(row);
    return at < 0 ? null : (this.rows[at + step] ?? null);
  }
}
