// Texts as files: saves a page or a trace, opens files that are chosen or dropped on the page.

import { addItem } from "./data.js";
import { byId, saveFile } from "./dom.js";
import { fail, succeed } from "./failure.js";

export function offerFiles(session, api, start, stream) {
  const save = async (kind, name, type) => {
    try {
      const answer = await api.ask(`/v1/rows/${session.current.row}/${kind}`);
      saveFile(await answer.arrayBuffer(), name, type);
      succeed();
    } catch (error) {
      fail(error);
    }
  };
  const open = async (file) => {
    try {
      await start.offer();
      const { rows } = await api.get("/v1/rows", { method: "POST", body: await file.arrayBuffer() });
      for (const [i, { row, prompt, messages, tokens, finish_reason }] of rows.entries()) {
        const node = session.add({ label: rows.length > 1 ? `${file.name} ${i + 1}` : file.name, prompt, messages, row, ended: finish_reason ?? "interrupted" });
        for (const token of tokens) addItem(node, token);
        session.show(node);
        if (messages) byId("chat").click();
        await stream.learn(node);
      }
      succeed();
    } catch (error) {
      fail(error);
    }
  };
  byId("save-report").addEventListener("click", () => save("report", "text.html", "text/html"));
  byId("save-trace").addEventListener("click", () => save("trace", "text.jsonl", "application/jsonl"));
  byId("open").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async () => {
    for (const file of byId("file").files) await open(file);
    byId("file").value = "";
  });
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, (event) => {
    event.preventDefault();
    if (kind === "drop") for (const file of event.dataTransfer.files) open(file);
  });
}

// Running texts cannot be saved.
export function allowSaving(node) {
  for (const id of ["save-report", "save-trace"]) byId(id).disabled = !node?.row || !node.ended;
}
