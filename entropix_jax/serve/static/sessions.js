// The list of stored sessions: opens and deletes them.

import { byId, element } from "./dom.js";

export function offerSessions(store) {
  const box = byId("sessions");
  const show = async () => {
    const found = await store.list().catch(() => []);
    byId("sessions-list").replaceChildren(...found.map((one) => rowOf(store, one, show)));
    byId("sessions-none").hidden = found.length > 0;
  };
  byId("sessions-open").addEventListener("click", async () => {
    await store.save();
    await show();
    box.showModal();
  });
  byId("sessions-new").addEventListener("click", () => store.open(null));
  byId("sessions-close").addEventListener("click", () => box.close());
}

function rowOf(store, { id, title, texts, changed }, show) {
  const own = id === store.id;
  const about = `${texts === 1 ? "1 text" : `${texts} texts`}, ${new Date(changed).toLocaleString()}${own ? ", open" : ""}`;
  // A second press deletes.
  const remove = async ({ target }) => {
    if (!target.dataset.sure) return (target.dataset.sure = target.textContent = "Delete for good");
    await store.remove(id);
    return own ? store.open(null) : show();
  };
  return element("li", { class: "twig" },
    element("button", { type: "button", "aria-current": own ? "true" : null, onclick: () => (own ? byId("sessions").close() : store.open(id)) }, element("span", {}, title), element("span", { class: "muted" }, ` ${about}`)),
    element("button", { type: "button", "aria-label": `Delete ${title}`, onclick: remove }, "Delete"));
}
