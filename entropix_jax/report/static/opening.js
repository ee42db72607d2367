// Opening a page: what it shows comes piece by piece, and it says so where it cannot.

import { byId } from "./dom.js";

export const nextFrame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

export async function openPage(start) {
  try {
    await start();
    document.documentElement.dataset.ready = "true";
  } catch (error) {
    byId("failure").hidden = false;
    byId("failure").textContent = `This browser cannot show the page: ${error.message}`;
    throw error;
  }
}

export function onTheme(listener) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
