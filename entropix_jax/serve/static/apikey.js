// Asks the reader for the server's key.

import { isKey } from "./api.js";
import { byId } from "./dom.js";

// Resolves to the key; rejects if the reader has none. `problem`: why the last one was none.
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
      if (!isKey(text)) return (byId("key-problem").textContent = "A key has letters, digits and signs of ASCII, without spaces.");
      found = text;
      box.close();
    };
    byId("key-cancel").onclick = () => box.close();
    box.onclose = () => (found ? resolve(found) : reject(new Error("The server asks for a key.")));
  });
}
