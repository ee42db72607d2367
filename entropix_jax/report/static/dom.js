// Elements, frames, colours, files. Text is inserted as text: nothing of a trace is ever parsed as HTML.

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function byId(id) {
  return document.getElementById(id);
}

// Calls `work` at most once per frame, with the latest arguments.
export function onceAFrame(work) {
  let latest = null;
  return (...args) => {
    if (latest === null) requestAnimationFrame(() => {
      const now = latest;
      latest = null;
      work(...now);
    });
    latest = args;
  };
}

export function nextFrame() {
  return new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
}

// The style sheet's colours of these names, in the current theme.
export function themeColours(names) {
  const probe = document.body.appendChild(document.createElement("i"));
  const found = names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  });
  probe.remove();
  return Object.fromEntries(found);
}

export function saveFile(content, name, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it and copy";
  }
  setTimeout(() => (button.textContent = before), 1500);
}
