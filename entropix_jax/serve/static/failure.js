// The error banner: one line that stays in view until it is dismissed or something succeeds.

import { byId } from "./dom.js";

export function fail(error) {
  byId("failure").hidden = false;
  byId("failure-text").textContent = error.message;
  byId("dismiss").onclick = succeed;
}

// Hides the banner: the reader's last action succeeded.
export function succeed() {
  byId("failure").hidden = true;
}
