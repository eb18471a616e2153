// Settings and keys. Keys stay in the session of a tab, unless the user keeps them.

export const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
export const FIELDS = [...NUMBERS, "reasoning_effort", "system"];

// browsers that forbid storage keep values as long as the page is open
const inMemory = { localStorage: new Map(), sessionStorage: new Map() };

function read(storage, name) {
  try {
    return JSON.parse(window[storage].getItem(`chat.${name}`));
  } catch {
    return inMemory[storage].get(name) ?? null;
  }
}

function write(storage, name, value) {
  const isEmpty = value === null || value === undefined || value === "";
  try {
    if (isEmpty) window[storage].removeItem(`chat.${name}`);
    else window[storage].setItem(`chat.${name}`, JSON.stringify(value));
  } catch {
    inMemory[storage].set(name, isEmpty ? null : value);
  }
}

/** Values by name; a page that is older stored them in the same way. */
export const setting = (name) => read("localStorage", name);
export const setSetting = (name, value) => write("localStorage", name, value);

export const keepsKeys = () => read("localStorage", "remember") === true;

export function secret(name) {
  return read("sessionStorage", name) ?? read("localStorage", name) ?? "";
}

export function setSecret(name, value) {
  write("sessionStorage", name, value);
  write("localStorage", name, keepsKeys() ? value : null);
}

export function setKeepsKeys(keeps, names) {
  write("localStorage", "remember", keeps || null);
  for (const name of names) setSecret(name, secret(name));
}

/** The parameters of a request that the user has set. */
export function parameters() {
  const made = {};
  for (const name of NUMBERS) {
    const value = setting(name);
    if (value !== null && value !== "") made[name] = Number(value);
  }
  const effort = setting("reasoning_effort");
  if (effort) made.reasoning_effort = effort;
  return made;
}

export function authorization() {
  const key = secret("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** The turns of the page before it had several conversations. */
export function oldTurns() {
  const turns = read("localStorage", "turns");
  if (!Array.isArray(turns)) return [];
  return turns
    .filter((turn) => (turn?.role === "user" || turn?.role === "assistant") && typeof turn.content === "string")
    .map(({ role, content, reasoning, error }) => ({
      role,
      content,
      reasoning: typeof reasoning === "string" ? reasoning : "",
      error: typeof error === "string" ? error : "",
      state: error ? "failed" : "done",
    }));
}

export const dropOldTurns = () => write("localStorage", "turns", null);
