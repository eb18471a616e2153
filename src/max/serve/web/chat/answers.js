// Makes answers. The server keeps each one, so that it goes on after a reload, and in another tab if this one closes.

import { newId } from "./dom.js";
import { eventsOf, failureOf } from "./event_stream.js";
import { authorization } from "./settings_store.js";

const SHOW_MS = 200;
const SAVE_MS = 1000;
const RETRIES = 5;
const EARLY_MS = 500;

/** Whether the server's model is not loaded yet. */
async function isEarly(response) {
  if (response.status !== 503) return false;
  return (await response.clone().json().catch(() => null))?.error?.code === "model_loading";
}

/** Work that one tab at a time does; pages of plain HTTP from other machines have no locks. */
function alone(name, work) {
  return navigator.locks ? navigator.locks.request(`chat.${name}`, work) : work();
}

const url = (turn) => `v1/streams/${turn.stream}`;

/** Events: "change" (detail: a turn that goes on), "end" (detail: the turn, and whether it was made here). */
export class Answers extends EventTarget {
  constructor(conversations) {
    super();
    this.conversations = conversations;
    this.running = new Map();
    // turns that another tab shows, without locks, by the time when it did
    this.shownElsewhere = new Map();
    conversations.addEventListener("turn", ({ detail }) => this.shownElsewhere.set(detail.id, Date.now()));
  }

  runs(turn) {
    return this.running.has(turn.id);
  }

  /**
   * Asks for an answer, as far as the turn has text already. `store` puts the turn where other tabs see it: this tab
   * makes the answer by then.
   */
  start(turn, request, store) {
    Object.assign(turn, { stream: newId(), state: "running", error: "", note: "" });
    turn.base = { content: turn.content.length, reasoning: turn.reasoning.length };
    const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
    const open = async (signal) => {
      for (;;) {
        const response = await fetch("v1/chat/completions", {
          method: "POST",
          headers: { "Content-Type": "application/json", "X-Stream-Id": turn.stream, ...authorization() },
          body,
          signal,
        });
        if (!(await isEarly(response))) return response;
        await new Promise((resolve) => setTimeout(resolve, EARLY_MS));
      }
    };
    return this.run(turn, open, store);
  }

  /** Goes on with an answer that the page has left, or that another tab makes if that closes. */
  async resume(turn) {
    if (this.running.has(turn.id)) return;
    if (!navigator.locks) {
      const begin = Date.now();
      await new Promise((resolve) => setTimeout(resolve, 5 * SHOW_MS));
      if ((this.shownElsewhere.get(turn.id) ?? 0) >= begin) return;
    }
    await this.run(turn, (signal) => this.again(turn, signal));
  }

  again(turn, signal) {
    return fetch(url(turn), { headers: authorization(), signal });
  }

  async run(turn, open, store = null) {
    const abort = new AbortController();
    this.running.set(turn.id, abort);
    let isMade = false;
    try {
      await alone(turn.stream, async () => {
        if (store) await store();
        else {
          // another tab was quicker, or the turn is gone
          const stored = await this.conversations.database.get("turns", turn.id);
          if (stored?.state !== "running" || stored.stream !== turn.stream) {
            Object.assign(turn, stored ?? { state: "removed" });
            return;
          }
        }
        isMade = true;
        turn.isTimed = Boolean(store);
        this.dispatchEvent(new CustomEvent("change", { detail: turn }));
        await this.follow(turn, open, abort.signal);
        await this.finish(turn);
      });
    } catch (error) {
      Object.assign(turn, { state: "failed", error: error.message });
    } finally {
      this.running.delete(turn.id);
      this.dispatchEvent(new CustomEvent("end", { detail: { turn, isMade } }));
    }
  }

  /** Reads the answer, again if the connection is lost. */
  async follow(turn, open, signal) {
    turn.begun = performance.now();
    for (let tries = 0; ; tries++) {
      try {
        const response = await (tries ? this.again(turn, signal) : open(signal));
        if (response.ok) await this.read(turn, response);
        else if (response.status === 404 || response.status === 410) this.lost(turn);
        else Object.assign(turn, { state: "failed", error: await failureOf(response) });
        return;
      } catch (error) {
        turn.isTimed = false;
        if (signal.aborted) {
          turn.state = "stopped";
          return;
        }
        if (error.fatal || tries === RETRIES) {
          const reason = error.fatal ? error.message : "The server cannot be reached.";
          Object.assign(turn, { state: "failed", error: reason });
          return;
        }
        await new Promise((resolve) => setTimeout(resolve, 200 * 2 ** tries));
      }
    }
  }

  lost(turn) {
    if (turn.content) Object.assign(turn, { state: "stopped", note: "The server no longer has the rest." });
    else Object.assign(turn, { state: "failed", error: "The server no longer has this answer." });
  }

  /** Reads the events of an answer from its start. */
  async read(turn, response) {
    turn.content = turn.content.slice(0, turn.base.content);
    turn.reasoning = turn.reasoning.slice(0, turn.base.reasoning);
    turn.calls = [];
    let reason = null;
    for await (const text of eventsOf(response.body)) {
      if (text === "[DONE]") break;
      const event = JSON.parse(text);
      if (event.error) throw Object.assign(new Error(event.error.message), { fatal: true });
      if (event.usage) turn.usage = { prompt: event.usage.prompt_tokens, answer: event.usage.completion_tokens };
      const choice = event.choices?.[0];
      if (!choice) continue;
      this.add(turn, choice.delta ?? {});
      reason = choice.finish_reason ?? reason;
    }
    turn.state = { null: "stopped", length: "cut", cancelled: "stopped" }[reason] ?? "done";
    if (turn.calls.length && turn.state === "done") turn.state = "calls";
    // an answer that is read again comes as fast as the network
    if (turn.isTimed) turn.seconds = (performance.now() - (turn.first ?? turn.begun)) / 1000;
  }

  add(turn, delta) {
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (!turn.first && (delta.content || reasoning || delta.tool_calls)) turn.first = performance.now();
    turn.content += delta.content ?? "";
    turn.reasoning += reasoning;
    for (const part of delta.tool_calls ?? []) {
      const call = (turn.calls[part.index] ??= { id: part.id, name: "", arguments: "", state: "new" });
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    this.dispatchEvent(new CustomEvent("change", { detail: turn }));
    const now = Date.now();
    if (now - (turn.shown ?? 0) < SHOW_MS) return;
    turn.shown = now;
    if (now - (turn.saved ?? 0) < SAVE_MS) this.conversations.show(stored(turn));
    else {
      turn.saved = now;
      this.conversations.saveTurn(stored(turn));
    }
  }

  async finish(turn) {
    if (turn.first && turn.isTimed) turn.wait = (turn.first - turn.begun) / 1000;
    const record = stored(turn);
    const isEmpty = !record.content && !record.reasoning && !record.calls.length;
    if (isEmpty && record.state === "stopped") {
      turn.state = "removed";
      await this.conversations.removeTurn(record);
    } else await this.conversations.saveTurn(record);
  }

  /** Stops an answer, in whatever tab it is made. */
  async stop(turn) {
    const ended = this.end(turn);
    this.running.get(turn.id)?.abort();
    await ended;
  }

  async end(turn) {
    // the request may come after this one
    for (let tries = 0; tries < 4; tries++) {
      try {
        const response = await fetch(url(turn), { method: "DELETE", headers: authorization(), keepalive: true });
        if (response.status !== 404 || turn.first) return;
      } catch {
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** tries));
    }
  }
}

/** A turn without what only this page needs. */
function stored(turn) {
  const { begun, first, shown, saved, isTimed, ...record } = turn;
  return { ...record, calls: (record.calls || []).filter(Boolean) };
}
