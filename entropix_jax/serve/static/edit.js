// Edits a text, a prompt or a message in its place.

import { element } from "./dom.js";

// Shows a field in place of a box. `apply(text)` is called with the text up to the cursor, or with all of it if `whole`.
export function edit(box, { text, label, cursor = text.length, whole = false, word, apply }) {
  const field = element("textarea", { "aria-label": label, spellcheck: "false" });
  field.value = text;
  const before = document.activeElement;
  const close = () => {
    form.remove();
    box.hidden = false;
    before.focus();
  };
  const done = (event) => {
    event.preventDefault();
    close();
    apply(whole ? field.value : field.value.slice(0, field.selectionEnd));
  };
  const form = element("form", { class: "editor", onsubmit: done },
    field, element("div", { class: "row" }, element("button", { class: "primary" }, word), element("button", { type: "button", onclick: close }, "Cancel"),
      whole ? null : element("span", { class: "muted" }, "The text after the cursor is generated again.")));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done(event);
    event.stopPropagation();
  });
  box.parentElement.querySelector(":scope > .editor")?.querySelector("[type=button]").click(); // closes another one
  box.before(form);
  box.hidden = true;
  field.focus();
  field.setSelectionRange(cursor, cursor);
}
