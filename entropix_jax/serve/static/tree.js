// The tree of texts: walk, name, prune.

import { byId, element } from "./dom.js";

export function showTree(session) {
  const list = byId("tree-list");
  session.on(() => {
    const nodes = session.visible();
    byId("tree").hidden = nodes.length + session.past.length + session.future.length === 0;
    list.replaceChildren(...nodes.map((node) => {
      const { current, beside } = session;
      const line = element("li", { class: "twig" },
        element("button", { type: "button", "aria-current": node === current ? "true" : null, onclick: () => session.walk(node) },
          element("span", {}, session.nameOf(node)),
          element("span", { class: "muted" }, node.parent ? ` from token ${node.at + 1}` : "", node === beside ? " · beside" : "")));
      line.style.setProperty("--depth", Math.min(session.depths.get(node), 8));
      return line;
    }));
    byId("undo").disabled = session.past.length === 0;
    byId("redo").disabled = session.future.length === 0;
    byId("name").disabled = byId("prune").disabled = !session.current;
    if (document.activeElement !== byId("name")) byId("name").value = session.current ? session.nameOf(session.current) : "";
  });
  byId("name").addEventListener("change", () => session.current && session.name(session.current, byId("name").value.trim()));
  byId("prune").addEventListener("click", () => session.current && session.prune(session.current));
  byId("undo").addEventListener("click", () => session.undo());
  byId("redo").addEventListener("click", () => session.redo());
}

// The text before or after the current one, in the tree's order.
export function walk(session, step) {
  const nodes = session.visible();
  const next = nodes[nodes.indexOf(session.current) + step];
  if (next) session.walk(next);
}
