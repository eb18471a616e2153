// The models of the server, and whether they are loaded.

import { at } from "./dom.js";
import { failureOf } from "./event_stream.js";
import { authorization, setSetting, setting } from "./settings_store.js";

const POLL_MS = 1000;
const IDLE_MS = 15_000;
const WORDS = { loaded: "", loading: "loading", unloaded: "not loaded", failed: "cannot be loaded" };

/** Events: "change". */
export class Models extends EventTarget {
  constructor() {
    super();
    this.models = [];
    this.select = at("model");
    this.loadingSince = new Map();
    // what loads, with the step that it is at
    this.steps = new Map();
    this.engine = "ok";
    this.isBusy = false;
    this.select.onchange = () => {
      setSetting("model", this.select.value);
      this.draw();
      this.dispatchEvent(new Event("change"));
    };
    this.select.onfocus = () => this.read();
    document.addEventListener("visibilitychange", () => this.later());
  }

  get name() {
    return this.select.value;
  }

  get chosen() {
    return this.models.find((each) => each.id === this.select.value);
  }

  get contextLength() {
    return this.chosen?.max_model_len ?? 0;
  }

  /** Chooses the model of a conversation, else the one that was used last. */
  choose(name) {
    this.wanted = name || setting("model") || "";
    if (this.models.some((each) => each.id === this.wanted)) this.select.value = this.wanted;
    this.draw();
  }

  /** While an answer waits, its model may be loading. */
  busy(isBusy) {
    if (this.isBusy === isBusy) return;
    this.isBusy = isBusy;
    if (!isBusy && this.text) this.read();
    else this.later();
  }

  later() {
    clearTimeout(this.timer);
    if (document.visibilityState === "hidden") return;
    const quick =
      this.isBusy || this.error || this.engine !== "ok" || this.models.some((each) => this.state(each) === "loading");
    this.timer = setTimeout(() => this.read(), quick ? POLL_MS : IDLE_MS);
  }

  async read() {
    try {
      const response = await fetch("v1/models", { headers: authorization() });
      if (!response.ok) throw new Error(await failureOf(response));
      this.models = (await response.json()).data;
      this.error = "";
      await this.readHealth();
    } catch (error) {
      this.error = error instanceof TypeError ? "The server cannot be reached." : error.message;
    }
    const now = Date.now();
    for (const model of this.models) {
      const { id } = model;
      if (this.state(model) !== "loading") this.loadingSince.delete(id);
      else if (!this.loadingSince.has(id)) this.loadingSince.set(id, now);
    }
    this.fill();
    this.later();
    this.dispatchEvent(new Event("change"));
  }

  async readHealth() {
    const response = await fetch("health");
    const { status, loading } = await response.json();
    this.engine = status;
    this.steps = new Map((loading ?? []).map(({ model, step }) => [model, step]));
  }

  fill() {
    const names = JSON.stringify(this.models.map((each) => [each.id, this.word(each)]));
    if (names !== this.shown) {
      const chosen = this.select.value || this.wanted || setting("model") || "";
      this.select.replaceChildren(
        ...this.models.map((each) => {
          const word = this.word(each);
          return new Option(word ? `${each.id} (${word})` : each.id, each.id);
        }),
      );
      if (this.models.some((each) => each.id === chosen)) this.select.value = chosen;
      this.shown = names;
    }
    this.draw();
  }

  word(model) {
    return WORDS[this.state(model)] ?? this.state(model);
  }

  state({ id, status }) {
    if (this.steps.has(id)) return "loading";
    return status?.failed ? "failed" : (status?.value ?? "loaded");
  }

  draw() {
    at("model-state").textContent = this.text;
  }

  /** The state of the chosen model, for people; empty where it is ready. */
  get text() {
    if (this.error) return this.error;
    const model = this.chosen;
    if (!model) return this.models.length ? "" : "No models yet: max pull qwen3:0.6b gets one.";
    const state = this.state(model);
    if (state === "loading") {
      const seconds = Math.round((Date.now() - (this.loadingSince.get(model.id) ?? Date.now())) / 1000);
      const step = this.steps.get(model.id);
      return `loading… ${seconds} s${step ? `, ${step}` : ""}`;
    }
    if (this.engine !== "ok") return `The engine is ${this.engine}.`;
    if (state === "unloaded") return "loads with the first message";
    return state === "failed" ? `cannot be loaded: ${model.status.error}` : "";
  }
}
