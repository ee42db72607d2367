// What the page carries: packed bytes in script elements, facts in JSON, the trace as it was written.

export async function unpack(id) {
  const bytes = fromBase64(document.getElementById(id).textContent);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

export function readFacts() {
  return JSON.parse(document.getElementById("facts").textContent);
}

// The tokens of each row in the order of the trace. `index` counts all of a row's, those that were
// taken back included; `replaced` lists what stood in a token's place before.
export function readRows(bytes) {
  const rows = new Map();
  for (const line of new TextDecoder().decode(bytes).split("\n")) {
    const token = line && JSON.parse(line);
    if (!token || !["token", "retracted"].includes(token.type)) continue;
    if (!rows.has(token.row)) rows.set(token.row, { items: [], waiting: [] });
    const row = rows.get(token.row);
    token.index = row.items.push(token) - 1;
    if (token.type === "retracted") {
      row.waiting.push(token);
    } else {
      token.replaced = row.waiting;
      row.waiting = [];
      token.replaced.forEach((gone) => (gone.replacement = token));
    }
  }
  return new Map([...rows].map(([number, { items }]) => [number, newRow(number, items)]));
}

function newRow(number, items) {
  markRuns(items);
  return { number, items, tokens: items.filter((token) => token.type === "token") };
}

// Where a branch or a thought begins.
function markRuns(items) {
  for (const token of items) {
    if (token.type !== "token") continue;
    if (token.branches) token.runStart = "branch";
    else if (token.action === "inject" && !previousWas(items, token, "inject")) token.runStart = "inject";
  }
}

function previousWas(items, token, action) {
  return token.index > 0 && items[token.index - 1].action === action;
}
