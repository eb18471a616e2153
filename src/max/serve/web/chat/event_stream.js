// Server-sent events.

/** Yields the data of each event. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const lines = (rest + (value ?? "")).split(/\r\n|\n|\r(?!$)/);
      rest = done ? "" : lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The message of a response that is an error. */
export async function failureOf(response) {
  try {
    const { error } = await response.json();
    return error.message || String(error);
  } catch {
    return `The server answers with status ${response.status}.`;
  }
}
