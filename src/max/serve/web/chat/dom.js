// Elements of the page.

export const at = (id) => document.getElementById(id);

/** Makes an element; attributes whose names begin with "on" are handlers, those that are null or false are left out. */
export function element(kind, attributes = {}, ...children) {
  const node = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(label, onclick, attributes = {}) {
  return element("button", { type: "button", onclick, ...attributes }, label);
}

/** An identifier that nobody guesses; crypto.randomUUID exists in secure contexts only. */
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Lets the browser handle events and paint. */
export function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}

/** Waits until the browser has time, also in tabs that are not seen. */
export function idle() {
  return new Promise((resolve) => {
    if (globalThis.requestIdleCallback) requestIdleCallback(resolve, { timeout: 100 });
    else setTimeout(resolve, 20);
  });
}

let toastTimer = 0;

/** A message at the edge of the page, with a button if an action is given; resolves to whether it was used. */
export function toast(text, actionLabel = "", seconds = 8) {
  const node = at("toast");
  const [message, action] = node.children;
  node.dispatchEvent(new Event("replaced"));
  message.textContent = text;
  action.textContent = actionLabel;
  action.hidden = !actionLabel;
  node.hidden = false;
  clearTimeout(toastTimer);
  return new Promise((resolve) => {
    const close = (used) => {
      node.hidden = true;
      clearTimeout(toastTimer);
      resolve(used);
    };
    toastTimer = setTimeout(() => close(false), seconds * 1000);
    action.onclick = () => close(true);
    node.addEventListener("replaced", () => resolve(false), { once: true });
  });
}

/** Says something to users of screen readers. */
export function announce(text) {
  at("announcer").textContent = text.length > 1500 ? `${text.slice(0, 1500)}…` : text;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // pages of plain HTTP have no clipboard
    const area = element("textarea", { class: "unseen" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

/** Gives the user a file. */
export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
