// Conversations as files: JSON that can be imported again, Markdown to read.

import { newId } from "./dom.js";
import { attachmentText } from "./messages.js";
import { leafOf, pathTo } from "./turn_tree.js";

const FORMAT = "supremum-chat";
const VERSION = 1;
const LARGEST = 200 << 20;
const STATES = ["done", "stopped", "cut", "failed", "calls"];

export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations }, null, 1);
}

/** The branch that is shown, as Markdown. */
export function markdownOf({ title, turns, ...conversation }) {
  const byId = new Map(turns.map((turn) => [turn.id, turn]));
  const parts = pathTo(byId, leafOf(conversation, byId)).map((turn) => {
    const files = (turn.attachments || []).map(attachmentText);
    const calls = (turn.calls || []).map((call) => `Tool ${call.name}: \`${call.arguments}\`\n\n${call.result ?? ""}`);
    return [`## ${turn.role === "user" ? "You" : turn.model || "Answer"}`, ...files, turn.content, ...calls]
      .filter(Boolean)
      .join("\n\n");
  });
  return `# ${title}\n\n${parts.join("\n\n")}\n`;
}

const text = (value, otherwise = "") => (typeof value === "string" ? value : otherwise);
const number = (value, otherwise) => (Number.isFinite(value) ? value : otherwise);
const list = (value) => (Array.isArray(value) ? value : []);

/** An answer that was still made when it was exported has ended there. */
function stateOf({ role, state }) {
  if (role === "user" || state === undefined) return "done";
  return STATES.includes(state) ? state : "stopped";
}

function readTurn(turn, ids, conversation) {
  if (typeof turn?.id !== "string" || !["user", "assistant"].includes(turn.role))
    throw new Error("a turn has no identifier or no role");
  const made = {
    id: ids.get(turn.id),
    conversation,
    parent: ids.get(turn.parent) ?? null,
    role: turn.role,
    created: number(turn.created, 0),
    content: text(turn.content),
    reasoning: text(turn.reasoning),
    error: text(turn.error),
    model: text(turn.model),
    state: stateOf(turn),
    attachments: list(turn.attachments).map((each) => ({ name: text(each?.name, "file"), text: text(each?.text) })),
    calls: list(turn.calls)
      .filter((call) => call && typeof call === "object")
      .map((call) => ({
        id: text(call.id, newId()),
        name: text(call.name),
        arguments: text(call.arguments),
        state: text(call.state, "done"),
        ...(typeof call.result === "string" ? { result: call.result } : {}),
      })),
  };
  if (turn.usage && typeof turn.usage === "object")
    made.usage = { prompt: number(turn.usage.prompt, 0), answer: number(turn.usage.answer, 0) };
  return made;
}

/** The conversations of an exported file; those that are here already get other identifiers. */
export function importedOf(source, isUsed) {
  if (source.length > LARGEST) throw new Error("The file is longer than 200 MB.");
  let data;
  try {
    data = JSON.parse(source);
  } catch {
    throw new Error("The file is no JSON.");
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations))
    throw new Error("The file has no conversations of this page.");
  if (data.version > VERSION)
    throw new Error(`The file has version ${data.version}; this page reads version ${VERSION}.`);
  return data.conversations.map((each, place) => {
    try {
      const id = typeof each.id === "string" && !isUsed(each.id) ? each.id : newId();
      // no file names the turns of another conversation
      const ids = new Map(list(each.turns).map((turn) => [turn?.id, newId()]));
      const now = Date.now();
      return {
        id,
        title: text(each.title, "Chat").slice(0, 200) || "Chat",
        created: number(each.created, now),
        updated: number(each.updated, now),
        leaf: ids.get(each.leaf) ?? null,
        model: text(each.model),
        deleted: 0,
        turns: list(each.turns).map((turn) => readTurn(turn, ids, id)),
      };
    } catch (error) {
      throw new Error(`Conversation ${place + 1} of the file cannot be read: ${error.message}.`);
    }
  });
}
