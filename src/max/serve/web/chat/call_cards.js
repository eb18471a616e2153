// Calls of tools: what the model wants to call, and what came of it.

import { button, element } from "./dom.js";

const STATES = {
  new: "is to be called",
  running: "runs…",
  done: "was called",
  failed: "has failed",
  declined: "was declined",
};
const LONGEST_SHOWN = 20_000;

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const shortened = (text) => (text.length > LONGEST_SHOWN ? `${text.slice(0, LONGEST_SHOWN)}\n…` : text);

/**
 * The card of a call to a server, which is undefined where none has the tool. While the call waits for the user,
 * `decide` gets "once", "always" or "no".
 */
export function callCard(call, turnState, server, decide) {
  const waits = turnState === "calls" && call.state === "new";
  const card = element(
    "section",
    { class: `call ${call.state}`, "aria-label": `Call of ${call.name}` },
    element(
      "p",
      {},
      "Tool ",
      element("code", {}, call.name),
      waits && server ? ` of ${server}` : "",
      ` ${turnState === "running" ? "…" : STATES[call.state]}`,
    ),
  );
  if (call.arguments && call.arguments !== "{}") {
    card.append(
      element(
        "details",
        { open: waits },
        element("summary", {}, "Arguments"),
        element("pre", {}, shortened(pretty(call.arguments))),
      ),
    );
  }
  if (call.result !== undefined && call.state !== "declined") {
    card.append(element("details", {}, element("summary", {}, "Result"), element("pre", {}, shortened(call.result))));
  }
  if (waits) {
    card.append(
      element(
        "p",
        { class: "buttons" },
        button("Call it", () => decide("once"), { class: "main decide" }),
        button("Always in this conversation", () => decide("always")),
        button("Don't", () => decide("no")),
      ),
    );
  }
  return card;
}
