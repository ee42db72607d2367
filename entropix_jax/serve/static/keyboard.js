// Keyboard shortcuts.

import { byId } from "./dom.js";
import { walk } from "./tree.js";

export function listenToKeys(session, { generate, stop, chats }) {
  const alt = {
    KeyS: stop,
    KeyT: () => byId("text-0").focus(),
    KeyA: () => byId("details-body").querySelector(".choice:enabled")?.focus(),
    ArrowUp: () => walk(session, -1),
    ArrowDown: () => walk(session, 1),
    KeyN: () => byId("name").focus(),
    KeyP: () => session.prune(),
    KeyB: () => session.toggleBeside(),
    KeyH: () => {
      byId("help").open = !byId("help").open;
      byId("help").scrollIntoView({ block: "nearest" });
    },
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    const control = event.ctrlKey || event.metaKey;
    const typing = event.target.closest("input:not([type=range], [type=radio]), textarea");
    // Alt types a character on some keyboards, and opens lists.
    const types = event.target.closest("select") || (typing && (event.key === "Dead" || /^[^a-zA-Z]$/u.test(event.key)));
    const sends = control || (chats() && event.target === byId("prompt") && !event.shiftKey && !event.isComposing);
    if (sends && event.key === "Enter") generate();
    else if (control && event.key.toLowerCase() === "z" && !typing) event.shiftKey ? session.redo() : session.undo();
    else if (event.altKey && !types && alt[event.code]) alt[event.code]();
    else return;
    event.preventDefault();
  });
}
