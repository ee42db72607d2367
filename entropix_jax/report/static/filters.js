// What of a table is shown: words, kinds, and numbers between two bounds.

import { element, onceAFrame } from "./dom.js";

// `choices`: { key, title, value(row) }, each a list of what there is; where there is but one thing
// to choose there is no list. `numbers`: the same, with bounds. `words(row)` is what is searched.
export function showFilters(box, rows, { words, choices, numbers, change }) {
  const search = element("input", { type: "search", id: `${box.id}-search`, placeholder: "any words" });
  const lists = choices.map((choice) => ({ ...choice, found: kindsOf(rows, choice.value) })).filter(({ found }) => found.length > 1)
    .map((choice) => ({ ...choice, select: element("select", { id: `${box.id}-${choice.key}` }, element("option", { value: "" }, "all"), ...choice.found.map(([kind, count], i) => element("option", { value: i + 1 }, `${kind} (${count})`))) }));
  const measure = element("select", { "aria-label": "a number" }, ...numbers.map(({ title }, i) => element("option", { value: i }, title)));
  const [least, most] = ["at least", "at most"].map((name) => element("input", { type: "number", step: "any", "aria-label": name, placeholder: name }));
  const clear = element("button", { type: "button" }, "Show all");
  const labelled = (title, node) => element("div", { class: "filter" }, element("label", { for: node.id }, title), node);
  box.replaceChildren(
    labelled("Search", search),
    ...lists.map(({ title, select }) => labelled(title, select)),
    ...(numbers.length ? [element("fieldset", { class: "filter" }, element("legend", {}, "Between"), measure, least, most)] : []),
    clear);

  const apply = () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = lists.filter(({ select }) => select.value !== "").map(({ value, found, select }) => [value, found[select.value - 1][0]]);
    const value = numbers[measure.value]?.value;
    const low = least.value === "" ? -Infinity : Number(least.value);
    const high = most.value === "" ? Infinity : Number(most.value);
    const bounded = least.value !== "" || most.value !== "";
    change(rows.filter((row) => {
      if (chosen.some(([of, kind]) => of(row) !== kind)) return false;
      if (bounded) {
        const found = value(row);
        if (found == null || found < low || found > high) return false;
      }
      return wanted.every((word) => words(row).includes(word));
    }));
  };
  const soon = onceAFrame(apply);
  for (const node of [search, measure, least, most, ...lists.map(({ select }) => select)]) node.addEventListener("input", soon);
  clear.addEventListener("click", () => {
    for (const node of [search, least, most, ...lists.map(({ select }) => select)]) node.value = "";
    apply();
  });
  apply();
}

function kindsOf(rows, value) {
  const counts = new Map();
  for (const row of rows) {
    const kind = value(row);
    if (kind != null) counts.set(kind, (counts.get(kind) ?? 0) + 1);
  }
  return [...counts].sort(([, a], [, b]) => b - a);
}
