// Why something failed: one line on top of the page.

import { byId } from "./dom.js";

export function fail(error) {
  byId("failure").hidden = false;
  byId("failure-text").textContent = error.message;
  byId("dismiss").onclick = () => (byId("failure").hidden = true);
}
