// Data in the page: compressed payloads in script elements, and traces.

export function unpack(id) {
  return inflate(document.getElementById(id).textContent);
}

export async function inflate(text) {
  const bytes = fromBase64(text);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

export function readRows(bytes) {
  return rowsOf(new TextDecoder().decode(bytes).split("\n").filter(Boolean).map((line) => JSON.parse(line)));
}

// Each row's tokens in the trace's order, see `addItem`.
export function rowsOf(records) {
  const rows = new Map();
  for (const token of records) {
    if (!["token", "retracted"].includes(token.type)) continue;
    if (!rows.has(token.row)) rows.set(token.row, { items: [], tokens: [], waiting: [] });
    addItem(rows.get(token.row), token);
  }
  return rows;
}

// Adds a row's next token: `items` has the retracted ones, too, `tokens` has not. A token's `index` counts items;
// `replaced` lists the retracted tokens that a token replaced.
export function addItem(row, token) {
  token.index = row.items.push(token) - 1;
  if (token.type === "retracted") {
    row.waiting.push(token);
  } else {
    row.tokens.push(token);
    token.replaced = row.waiting;
    row.waiting = [];
    token.replaced.forEach((retracted) => (retracted.replacement = token));
  }
}
