// The tree of texts: walk, name, prune.

import { byId, element } from "./dom.js";
import { positionAt } from "./texts.js";

export function showTree(session) {
  const list = byId("tree-list");
  session.on(() => {
    const nodes = session.visible();
    const before = document.activeElement;
    byId("tree").hidden = nodes.length + session.past.length + session.future.length === 0;
    list.replaceChildren(...nodes.map((node) => {
      const { current, beside } = session;
      const line = element("li", { class: "twig" },
        element("button", { type: "button", "aria-current": node === current ? "true" : null, onclick: () => session.walk(node) },
          element("span", {}, session.nameOf(node)),
          element("span", { class: "muted" }, originOf(node), node === beside ? " · side by side" : "")));
      line.style.setProperty("--depth", Math.min(session.depths.get(node), 8));
      return line;
    }));
    byId("undo").disabled = session.past.length === 0;
    byId("redo").disabled = session.future.length === 0;
    byId("name").disabled = byId("prune").disabled = !session.current;
    // The focus stays near where it was.
    if (!before.isConnected) list.querySelector("[aria-current]")?.focus();
    else if (before.disabled && byId("tree").contains(before)) byId(session.past.length ? "undo" : "redo").focus();
    if (document.activeElement !== byId("name")) byId("name").value = session.current ? session.nameOf(session.current) : "";
  });
  let named = null; // the text whose name is edited: another one may be shown when the field loses the focus
  byId("name").addEventListener("focus", () => (named = session.current));
  byId("name").addEventListener("change", () => named && session.name(named, byId("name").value.trim()));
  byId("prune").addEventListener("click", () => session.prune());
  byId("undo").addEventListener("click", () => session.undo());
  byId("redo").addEventListener("click", () => session.redo());
}

// Where a text begins in its parent.
function originOf({ parent, messages, at }) {
  if (!parent) return "";
  return messages && messages !== parent.messages ? " next turn" : ` from position ${positionAt(parent, at)}`;
}

// The text before or after the current one, in the tree's order.
export function walk(session, step) {
  const nodes = session.visible();
  const next = nodes[nodes.indexOf(session.current) + step];
  if (!next) return;
  const naming = document.activeElement === byId("name");
  if (naming) byId("name").blur(); // applies the name to the old text
  session.walk(next);
  if (naming) byId("name").focus();
}
