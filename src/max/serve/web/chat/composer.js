// The message that is written, a draft of its conversation.

import { at } from "./dom.js";
import { Attachments } from "./attachments.js";

const SAVE_MS = 300;

/** Events: "send", "stop", "cancel". */
export class Composer extends EventTarget {
  constructor(conversations) {
    super();
    this.conversations = conversations;
    this.prompt = at("prompt");
    this.owner = "";
    this.editing = null;
    this.attachments = new Attachments(() => this.later());
    at("form").onsubmit = (event) => {
      event.preventDefault();
      if (!this.isEmpty) this.dispatchEvent(new Event("send"));
    };
    this.prompt.oninput = () => {
      this.grow();
      this.later();
    };
    this.prompt.onkeydown = (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      at("form").requestSubmit();
    };
    at("stop").onclick = () => this.dispatchEvent(new Event("stop"));
    conversations.addEventListener("draft", ({ detail }) => {
      if (detail.conversation === this.owner && !this.editing && document.visibilityState === "hidden")
        this.fill(detail);
    });
    addEventListener("pagehide", () => this.save());
  }

  get isEmpty() {
    return !this.prompt.value.trim() && !this.attachments.list.length;
  }

  get content() {
    return { content: this.prompt.value.trim(), attachments: [...this.attachments.list] };
  }

  /** Shows the draft of a conversation; that of a new one has no name. */
  async open(owner) {
    this.save();
    this.editing = null;
    this.owner = owner;
    this.fill({ text: "", attachments: [] });
    const draft = await this.conversations.draft(owner);
    // what was written meanwhile stays
    if (this.owner === owner && this.isEmpty) this.fill(draft);
  }

  fill({ text, attachments }) {
    this.prompt.value = text;
    this.attachments.set(attachments);
    this.grow();
  }

  /** Puts a turn into the field; its conversation changes when it is sent. */
  edit(turn) {
    this.save();
    this.editing = turn;
    this.fill({ text: turn.content, attachments: turn.attachments || [] });
    this.prompt.focus();
    this.prompt.setSelectionRange(turn.content.length, turn.content.length);
  }

  async cancelEdit() {
    this.editing = null;
    this.fill(await this.conversations.draft(this.owner));
    this.prompt.focus();
  }

  clear() {
    clearTimeout(this.timer);
    this.timer = 0;
    this.fill({ text: "", attachments: [] });
    const wasEdit = this.editing;
    this.editing = null;
    return wasEdit ? undefined : this.conversations.saveDraft(this.draft);
  }

  get draft() {
    return { conversation: this.owner, text: this.prompt.value, attachments: [...this.attachments.list] };
  }

  later() {
    if (this.editing || this.timer) return;
    this.timer = setTimeout(() => this.save(), SAVE_MS);
  }

  save() {
    if (!this.timer) return undefined;
    clearTimeout(this.timer);
    this.timer = 0;
    return this.editing ? undefined : this.conversations.saveDraft(this.draft);
  }

  grow() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight + 2}px`;
  }

  busy(isRunning) {
    at("send").hidden = isRunning;
    at("stop").hidden = !isRunning;
  }
}
