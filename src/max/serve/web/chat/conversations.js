// The conversations of this browser. Each change is one record, and a message to the other tabs.

import { newId } from "./dom.js";
import { openDatabase } from "./database.js";
import { dropOldTurns, oldTurns } from "./settings_store.js";
import { titleOf } from "./messages.js";

const PURGE_MS = 60_000;

const byUse = (a, b) => b.updated - a.updated || (a.id < b.id ? -1 : 1);

/**
 * Events: "list" (the list has changed), "turn" (detail: a turn of another tab), "draft" (detail: one of another tab),
 * "removed" (detail: the identifier of a conversation), "outdated" (another tab has a newer page).
 */
export class Conversations extends EventTarget {
  async open() {
    this.database = await openDatabase(() => this.dispatchEvent(new Event("outdated")));
    this.channel = new BroadcastChannel("chat");
    this.channel.onmessage = ({ data }) => this.receive(data);
    const old = Date.now() - PURGE_MS;
    const records = await this.database.all("conversations");
    const gone = records.filter((each) => each.deleted && each.deleted < old).map((each) => each.id);
    if (gone.length) await this.database.removeConversations(gone);
    this.records = new Map(records.filter((each) => !gone.includes(each.id)).map((each) => [each.id, each]));
    await this.importOld();
  }

  /** Takes over the conversation of the page before there were several; in two tabs at once it is the same one. */
  async importOld() {
    const turns = oldTurns();
    if (!turns.length) return;
    const id = "from-older-page";
    const made = turns.map((turn, number) => ({
      id: `${id}-${number}`,
      conversation: id,
      parent: number ? `${id}-${number - 1}` : null,
      created: number,
      ...turn,
    }));
    await this.database.put("turns", ...made);
    await this.save(this.newRecord({ id, title: titleOf(turns[0]), leaf: made.at(-1).id }));
    dropOldTurns();
  }

  get lasting() {
    return this.database.lasting;
  }

  /** Those that are not deleted, the newest first. */
  list() {
    return [...this.records.values()].filter((each) => !each.deleted).sort(byUse);
  }

  get(id) {
    const found = this.records.get(id);
    return found && !found.deleted ? found : undefined;
  }

  newRecord(fields = {}) {
    const now = Date.now();
    return { id: newId(), title: "New chat", created: now, updated: now, leaf: null, model: "", deleted: 0, ...fields };
  }

  async save(conversation) {
    await this.database.put("conversations", conversation);
    this.publish(conversation);
    return conversation;
  }

  async change(id, changes) {
    const changed = await this.database.change("conversations", id, changes);
    if (changed) this.publish(changed);
    return changed;
  }

  publish(conversation) {
    this.records.set(conversation.id, conversation);
    this.channel.postMessage({ kind: "conversation", conversation });
    this.dispatchEvent(new Event("list"));
  }

  async turns(id) {
    return new Map((await this.database.turnsOf(id)).map((turn) => [turn.id, turn]));
  }

  /** Adds a turn as the leaf of its conversation. */
  async addTurn(turn, changes = {}) {
    const fields = { leaf: turn.id, updated: Date.now(), ...changes };
    const changed = await this.database.addTurn(turn, fields);
    if (!changed) throw new Error("this conversation was deleted in another tab");
    this.publish(changed);
    this.show(turn);
  }

  async saveTurn(turn) {
    const { id, ...fields } = turn;
    await this.database.change("turns", id, fields);
    this.show(turn);
  }

  async removeTurn(turn) {
    await this.database.remove("turns", turn.id);
    this.channel.postMessage({ kind: "turn", turn: { ...turn, state: "removed" } });
    if (this.get(turn.conversation)?.leaf === turn.id) await this.change(turn.conversation, { leaf: turn.parent });
  }

  /** Shows a turn, as far as it was made, in the other tabs. */
  show(turn) {
    this.channel.postMessage({ kind: "turn", turn });
  }

  /** Marks conversations as deleted; they are removed later, when the page is opened again. */
  async remove(...ids) {
    await this.changeAll(ids, { deleted: Date.now() });
  }

  restore(...ids) {
    return this.changeAll(ids, { deleted: 0 });
  }

  async changeAll(ids, changes) {
    await this.database.changeAll("conversations", ids, changes);
    await this.receive({ kind: "reload" });
    this.channel.postMessage({ kind: "reload" });
  }

  async draft(id) {
    return (await this.database.get("drafts", id)) || { conversation: id, text: "", attachments: [] };
  }

  async saveDraft(draft) {
    if (draft.text || draft.attachments.length) await this.database.put("drafts", draft);
    else await this.database.remove("drafts", draft.conversation);
    this.channel.postMessage({ kind: "draft", draft });
  }

  async receive(message) {
    if (message.kind === "conversation") {
      const before = this.get(message.conversation.id);
      this.records.set(message.conversation.id, message.conversation);
      this.dispatchEvent(new Event("list"));
      if (before && message.conversation.deleted) this.dispatchEvent(new CustomEvent("removed", { detail: before.id }));
    } else if (message.kind === "reload") {
      const before = this.list();
      this.records = new Map((await this.database.all("conversations")).map((each) => [each.id, each]));
      this.dispatchEvent(new Event("list"));
      for (const { id } of before) if (!this.get(id)) this.dispatchEvent(new CustomEvent("removed", { detail: id }));
    } else {
      this.dispatchEvent(new CustomEvent(message.kind, { detail: message.turn ?? message.draft }));
    }
  }

  /** Adds whole conversations, as an import does. */
  async addAll(conversations) {
    for (const { turns, ...conversation } of conversations) {
      await this.database.put("turns", ...turns);
      await this.database.put("conversations", conversation);
      this.records.set(conversation.id, conversation);
    }
    this.channel.postMessage({ kind: "reload" });
    this.dispatchEvent(new Event("list"));
  }

  /** Whole conversations, with all their branches. */
  async whole(ids) {
    const wanted = new Map(ids.map((id) => [id, { ...this.get(id), turns: [] }]));
    if (ids.length === 1) wanted.get(ids[0]).turns = [...(await this.turns(ids[0])).values()];
    else
      for await (const turns of this.database.batches()) {
        for (const turn of turns) wanted.get(turn.conversation)?.turns.push(turn);
      }
    return [...wanted.values()];
  }

  /** Finds conversations by their titles and texts: a map of identifiers to the text around the place. */
  async search(words, signal) {
    const wanted = words.toLowerCase();
    const found = new Map();
    for (const each of this.list()) if (each.title.toLowerCase().includes(wanted)) found.set(each.id, "");
    for await (const turns of this.database.batches()) {
      if (signal.aborted) return null;
      for (const turn of turns) {
        if (found.has(turn.conversation)) continue;
        const place = turn.content.toLowerCase().indexOf(wanted);
        if (place >= 0 && this.get(turn.conversation)) found.set(turn.conversation, excerpt(turn.content, place));
      }
    }
    return found;
  }
}

function excerpt(text, place) {
  const begin = Math.max(0, place - 20);
  return (begin ? "…" : "") + text.slice(begin, place + 60).replace(/\s+/g, " ");
}
