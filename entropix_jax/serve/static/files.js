// Saves the shown text as a page or as a trace.

import { byId, saveFile } from "./dom.js";
import { fail, succeed } from "./failure.js";

export function offerFiles(session, api) {
  const save = async (kind, name, type) => {
    try {
      const answer = await api.ask(`/v1/rows/${session.current.row}/${kind}`);
      saveFile(await answer.arrayBuffer(), name, type);
      succeed();
    } catch (error) {
      fail(error);
    }
  };
  byId("save-report").addEventListener("click", () => save("report", "text.html", "text/html"));
  byId("save-trace").addEventListener("click", () => save("trace", "text.jsonl", "application/jsonl"));
}

// Running texts cannot be saved, and those whose row the server no longer has.
export function allowSaving(node, api) {
  for (const id of ["save-report", "save-trace"]) byId(id).disabled = !api.has(node) || !node.ended;
}
