// What the model reads of a conversation.

const REFUSED_CALL = "The user has declined this call.";

/** Fences are longer than any run of backticks in the text. */
export function attachmentText({ name, text }) {
  const longest = Math.max(2, ...(text.match(/`+/g) || []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  const extension = /\.([A-Za-z0-9+]{1,10})$/.exec(name)?.[1] ?? "";
  return `File ${name}:\n${fence}${extension}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

function userText(turn) {
  return [...(turn.attachments || []).map(attachmentText), turn.content].filter(Boolean).join("\n\n");
}

function callsOf(turn) {
  return turn.calls.map(({ id, name, arguments: given }) => ({
    id,
    type: "function",
    function: { name, arguments: given || "{}" },
  }));
}

/**
 * The messages of a path of turns. Roles alternate, which many templates need: answers without text are left out, and
 * neighbors of one role become one message.
 */
export function messagesOf(path, system = "") {
  const messages = system.trim() ? [{ role: "system", content: system }] : [];
  const add = (role, content) => {
    const last = messages.at(-1);
    if (last?.role !== role || last.tool_calls) messages.push({ role, content });
    else last.content = [last.content, content].filter(Boolean).join("\n\n");
  };
  for (const turn of path) {
    if (turn.role === "user") add("user", userText(turn));
    else if (turn.calls?.length) {
      add("assistant", turn.content || "");
      messages.at(-1).tool_calls = callsOf(turn);
      for (const call of turn.calls) {
        messages.push({ role: "tool", tool_call_id: call.id, content: call.result ?? REFUSED_CALL });
      }
    } else if (turn.content) add("assistant", turn.content);
  }
  return messages;
}

/** The name of a conversation that begins with a turn. */
export function titleOf(turn) {
  const text = turn.content.trim() || turn.attachments?.[0]?.name || "";
  const line = text.split("\n", 1)[0].trim();
  return line.length > 60 ? `${[...line].slice(0, 59).join("")}…` : line || "New chat";
}
