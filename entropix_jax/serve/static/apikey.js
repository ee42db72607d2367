// The dialog for the server's API key.

import { isKey } from "./api.js";
import { byId } from "./dom.js";

// Resolves to the key; rejects if the dialog is cancelled. `problem`: why the previous key was invalid.
export function askKey(problem) {
  const [box, field] = [byId("key-box"), byId("key")];
  let found = null;
  byId("key-problem").textContent = problem;
  field.value = "";
  box.showModal();
  return new Promise((resolve, reject) => {
    byId("key-form").onsubmit = (event) => {
      event.preventDefault();
      const text = field.value.trim();
      if (!isKey(text)) return (byId("key-problem").textContent = "API keys contain printable ASCII characters and no spaces.");
      found = text;
      box.close();
    };
    byId("key-cancel").onclick = () => box.close();
    box.onclose = () => (found ? resolve(found) : reject(new Error("The server requires an API key.")));
  });
}
