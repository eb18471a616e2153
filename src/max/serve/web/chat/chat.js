// The open conversation: what is sent, and what happens with its answers.

import { announce, at, newId } from "./dom.js";
import { LogView } from "./log_view.js";
import { messagesOf, titleOf } from "./messages.js";
import { parameters, setting } from "./settings_store.js";
import { leafOf, newestLeaf, pathTo, siblingsOf } from "./turn_tree.js";

const MOST_ROUNDS = 10;

export class Chat {
  constructor(parts) {
    Object.assign(this, parts);
    this.id = null;
    this.turns = new Map();
    this.leaf = null;
    this.allowed = new Set();
    this.log = new LogView({
      edit: (turn) => this.composer.edit(turn),
      again: (turn) => this.again(turn),
      goOn: (turn) => this.goOn(turn),
      choose: (turn) => this.choose(turn),
      decide: (turn, call, decision) => this.decide(turn, call, decision),
      serverOf: (call) => this.tools.byName.get(call.name)?.server.url,
    });
    this.composer.addEventListener("send", () => this.send());
    this.composer.addEventListener("stop", () => this.stop());
    this.answers.addEventListener("change", ({ detail }) => this.changed(detail));
    this.answers.addEventListener("end", ({ detail }) => this.ended(detail.turn, detail.isMade));
    this.conversations.addEventListener("turn", ({ detail }) => this.fromElsewhere(detail));
    this.conversations.addEventListener("removed", ({ detail }) => {
      if (detail === this.id) this.open("");
    });
    this.conversations.addEventListener("list", () => this.drawTitle());
    this.tools.addEventListener("change", () => this.show());
    this.models.addEventListener("change", () => this.drawState());
  }

  /** Opens a conversation; a new one has no name yet. */
  open(id) {
    const wanted = this.conversations.get(id) ? id : "";
    if (this.id === wanted) return this.opened;
    this.id = wanted;
    this.opened = this.load(wanted, this.composer.open(wanted));
    return this.opened;
  }

  async load(wanted, draft) {
    const conversation = this.conversations.get(wanted);
    const turns = conversation ? await this.conversations.turns(wanted) : new Map();
    if (this.id !== wanted) return;
    if (!wanted && location.hash) history.replaceState(null, "", location.pathname + location.search);
    // answers that this tab makes are newer than what is stored
    for (const id of turns.keys()) if (this.live?.has(id)) turns.set(id, this.live.get(id));
    // calls that the page has left while they ran
    for (const { calls, state } of turns.values()) {
      for (const call of state === "calls" ? calls : []) if (call.state === "running") call.state = "new";
    }
    this.turns = turns;
    this.leaf = conversation ? leafOf(conversation, turns) : null;
    this.models.choose(conversation?.model);
    this.log.show([], new Map());
    this.log.toEnd();
    this.show();
    this.drawTitle();
    for (const turn of turns.values())
      if (turn.state === "running" && !this.answers.runs(turn)) this.answers.resume(turn);
    await draft;
  }

  get path() {
    return pathTo(this.turns, this.leaf);
  }

  /** The turn of the open branch that is being answered. */
  get running() {
    const last = this.turns.get(this.leaf);
    return last?.state === "running" ? last : null;
  }

  show() {
    const { path } = this;
    this.log.show(path, siblingsOf(this.turns, path));
    this.drawState();
  }

  drawTitle() {
    const title = this.conversations.get(this.id)?.title ?? "New chat";
    at("title").textContent = title;
    document.title = this.id ? `${title} · Chat` : "Chat";
    this.sidebar.mark(this.id, this.runningIds);
  }

  get runningIds() {
    return new Set([...(this.live?.values() ?? [])].map((turn) => turn.conversation));
  }

  drawState() {
    const { running } = this;
    this.composer.busy(Boolean(running));
    at("log").setAttribute("aria-busy", Boolean(running));
    const waits = running && !running.content && !running.reasoning;
    this.models.busy(Boolean(waits));
    const last = this.turns.get(this.leaf);
    at("state").textContent = running ? this.progressText(waits) : summaryOf(last);
    this.drawContext();
    this.sidebar.mark(this.id, this.runningIds);
  }

  progressText(waits) {
    const loading = this.models.text;
    if (waits && loading) return loading.startsWith("loading") ? `The model is ${loading}` : "Waiting…";
    return waits ? "Reading…" : "Writing…";
  }

  drawContext() {
    const used = [...this.path].reverse().find((turn) => turn.usage)?.usage;
    const most = this.models.contextLength;
    at("context").hidden = !used || !most;
    if (!used || !most) return;
    const total = used.prompt + used.answer;
    const share = total / most;
    at("context-text").textContent = `${total.toLocaleString("en")} of ${most.toLocaleString("en")} tokens`;
    at("context-meter").value = Math.min(share, 1);
    at("context").classList.toggle("full", share > 0.9);
    at("context").title =
      share > 0.9
        ? "The context is nearly full. A new chat begins with an empty one."
        : "The part of the model's context that is used";
  }

  async send() {
    if (this.running || this.isSending) return;
    this.isSending = true;
    try {
      await this.opened;
      const { content, attachments } = this.composer.content;
      const edited = this.composer.editing;
      if (!edited) await this.declineCalls(this.turns.get(this.leaf));
      const conversation = this.conversations.get(this.id) ?? (await this.create(content, attachments));
      const turn = this.newTurn(conversation, "user", { content, attachments, state: "done" });
      turn.parent = edited ? edited.parent : this.leaf;
      await this.add(turn);
      await this.composer.clear();
      this.composer.owner = conversation.id;
      await this.answer(turn);
    } catch (error) {
      at("state").textContent = error.message;
    } finally {
      this.isSending = false;
    }
  }

  /** A message instead of a decision declines the calls that wait. */
  async declineCalls(turn) {
    if (turn?.state !== "calls") return;
    turn.state = "done";
    for (const call of turn.calls) if (call.state === "new") call.state = "declined";
    await this.conversations.saveTurn(turn);
    this.log.update(turn);
  }

  async create(content, attachments) {
    const record = this.conversations.newRecord({ title: titleOf({ content, attachments }), model: this.models.name });
    await this.conversations.save(record);
    this.id = record.id;
    history.pushState(null, "", `#c=${record.id}`);
    return record;
  }

  newTurn(conversation, role, fields) {
    return {
      id: newId(),
      conversation: conversation.id,
      parent: null,
      role,
      created: Date.now(),
      content: "",
      reasoning: "",
      calls: [],
      attachments: [],
      error: "",
      note: "",
      model: "",
      ...fields,
    };
  }

  async add(turn) {
    await this.conversations.addTurn(turn, { model: this.models.name });
    if (turn.conversation !== this.id) return;
    this.turns.set(turn.id, turn);
    this.leaf = turn.id;
    this.log.toEnd();
    this.show();
    this.drawTitle();
  }

  /** Answers a path that ends with a turn. */
  async answer(last) {
    const turns = last.conversation === this.id ? this.turns : await this.conversations.turns(last.conversation);
    const path = pathTo(turns, last.id);
    const conversation = this.conversations.get(last.conversation);
    const turn = this.newTurn(conversation, "assistant", {
      parent: last.id,
      model: this.models.name,
      state: "running",
    });
    this.run(turn, this.request(path), () => this.add(turn));
  }

  request(path, more = {}) {
    const tools = this.tools.definitions;
    return {
      model: this.models.name || undefined,
      messages: messagesOf(path, setting("system") ?? ""),
      ...parameters(),
      ...(tools.length ? { tools } : {}),
      ...more,
    };
  }

  /** Begins an answer; resolves when it is complete. */
  run(turn, request, store) {
    this.track(turn);
    return this.answers.start(turn, request, store);
  }

  track(turn) {
    (this.live ??= new Map()).set(turn.id, turn);
  }

  /** Another answer to the same message, beside the one before. */
  async again(turn) {
    if (this.running) return;
    const parent = this.turns.get(turn.parent);
    if (parent) await this.answer(parent);
  }

  /** Goes on with an answer that was stopped or cut. */
  async goOn(turn) {
    if (this.running) return;
    const request = this.request(pathTo(this.turns, turn.id), { continue_final_message: true });
    delete request.tools;
    this.log.toEnd();
    this.run(turn, request, () => this.conversations.saveTurn(turn));
  }

  async choose(turn) {
    if (!turn || this.running) return;
    this.leaf = newestLeaf(this.turns, turn).id;
    this.show();
    await this.conversations.change(this.id, { leaf: this.leaf });
  }

  changed(turn) {
    this.track(turn);
    if (turn.conversation !== this.id || !this.turns.has(turn.id)) return;
    this.turns.set(turn.id, turn);
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      this.log.update(turn);
      this.drawState();
    });
  }

  ended(turn, isMade) {
    this.live?.delete(turn.id);
    if (turn.conversation === this.id) {
      if (turn.state === "removed") this.drop(turn);
      else this.turns.set(turn.id, turn);
      this.show();
      if (turn.id === this.leaf) announce(turn.error || turn.content || "The model calls a tool.");
      if (turn.state === "removed") {
        at("state").textContent = "Stopped.";
        announce("Stopped.");
      }
      if (turn.error && /api key/i.test(turn.error)) this.settings.askForKey();
    }
    if (turn.state === "calls" && isMade) this.proceed(turn);
    this.drawTitle();
  }

  drop(turn) {
    this.turns.delete(turn.id);
    if (this.leaf === turn.id) this.leaf = turn.parent;
  }

  fromElsewhere(turn) {
    if (turn.conversation !== this.id) return;
    if (turn.state === "removed") this.drop(turn);
    else {
      const isNew = !this.turns.has(turn.id);
      this.turns.set(turn.id, turn);
      // the branch that is shown grows in both tabs
      if (isNew && turn.parent === this.leaf) this.leaf = turn.id;
      if (turn.state === "running" && !this.answers.runs(turn)) this.answers.resume(turn);
    }
    this.show();
  }

  async stop() {
    const { running } = this;
    if (running) await this.answers.stop(running);
    at("prompt").focus();
  }

  escape() {
    if (this.running) this.stop();
    else if (this.composer.editing) this.composer.cancelEdit();
  }

  /** Runs a call as the user decides; the answer goes on when all calls of a turn have a result. */
  async decide(turn, call, decision) {
    if (call.state !== "new") return;
    if (decision === "always") this.allowed.add(`${turn.conversation} ${call.name}`);
    if (decision === "no") call.state = "declined";
    else {
      call.state = "running";
      this.log.update(turn);
      await this.conversations.saveTurn(turn);
      await this.tools.run(call);
    }
    await this.conversations.saveTurn(turn);
    this.log.update(turn);
    await this.proceed(turn);
  }

  async proceed(turn) {
    const next = turn.calls.find((call) => call.state === "new");
    if (next && this.allowed.has(`${turn.conversation} ${next.name}`)) await this.decide(turn, next, "once");
    else if (next) {
      announce(`The model wants to call the tool ${next.name}.`);
      this.log.views.get(turn.id)?.extra.querySelector(".decide")?.focus();
    } else if (turn.calls.every((call) => call.state !== "running")) await this.nextRound(turn);
  }

  async nextRound(turn) {
    const turns = turn.conversation === this.id ? this.turns : await this.conversations.turns(turn.conversation);
    const path = pathTo(turns, turn.id).reverse();
    const rounds = path.findIndex((each) => each.role === "user");
    turn.state = "done";
    if (rounds >= MOST_ROUNDS) turn.note = `The model has called tools ${rounds} times; send a message to go on.`;
    await this.conversations.saveTurn(turn);
    this.log.update(turn);
    if (rounds < MOST_ROUNDS) await this.answer(turn);
  }
}

/** What is told about an answer that is complete. */
function summaryOf(turn) {
  if (turn?.role !== "assistant" || !turn.usage) return "";
  const parts = [turn.usage.answer === 1 ? "1 token" : `${turn.usage.answer} tokens`];
  if (turn.wait !== undefined) parts.push(`first after ${Math.round(turn.wait * 1000)} ms`);
  if (turn.usage.answer > 1 && turn.seconds > 0.01)
    parts.push(`${((turn.usage.answer - 1) / turn.seconds).toFixed(1)} a second`);
  return parts.join(", ");
}
