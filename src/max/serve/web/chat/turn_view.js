// One turn of a conversation on the page.

import { announce, button, copyText, element } from "./dom.js";
import { MarkdownView, plainNodes } from "./markdown_view.js";
import { callCard } from "./call_cards.js";

const LONG_TEXT = 4000;
const STATES = {
  stopped: "Stopped.",
  cut: "Cut here: the longest answer or the context is reached.",
};

/** The view of a turn; `actions` are edit, again, goOn, choose, decide. */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.isDrawn = false;
    this.text = element("div", { class: "text" });
    this.head = element("div", { class: "who" });
    this.extra = element("div", { class: "extra" });
    this.reasoning = null;
    this.markdown = turn.role === "assistant" ? new MarkdownView(this.text) : null;
    this.node = element("article", { class: `turn ${turn.role}`, "data-id": turn.id, "aria-label": this.name });
    this.node.append(this.head, this.text, this.extra);
    this.text.append(plainNodes(turn.content));
  }

  get name() {
    return this.turn.role === "user" ? "You" : "Answer";
  }

  /** Shows the turn as it is now, with its place among its siblings. */
  update(turn, siblings) {
    this.turn = turn;
    if (siblings) this.siblings = siblings;
    this.drawHead();
    if (this.isDrawn) return this.draw();
    return undefined;
  }

  /** Draws the text, which waits until the turn is near the part of the page that is seen. */
  draw() {
    this.isDrawn = true;
    const { turn } = this;
    this.drawReasoning();
    this.drawExtra();
    if (this.markdown) return this.markdown.show(turn.content, turn.state !== "running");
    if (this.shownText !== turn.content) {
      this.shownText = turn.content;
      this.text.replaceChildren(plainNodes(turn.content));
      this.text.classList.toggle("long", turn.content.length > LONG_TEXT);
    }
    return undefined;
  }

  drawHead() {
    const { turn, actions, siblings } = this;
    const running = turn.state === "running";
    const key = JSON.stringify([turn.state, !turn.content, turn.model, siblings?.map((each) => each.id), siblings?.indexOf(turn)]);
    if (this.headKey === key) return;
    this.headKey = key;
    const buttons = [];
    const place = siblings?.findIndex((each) => each.id === turn.id) ?? 0;
    if (siblings?.length > 1) {
      const step = (by) => actions.choose(siblings[place + by]);
      buttons.push(
        element(
          "span",
          { class: "branches" },
          button("‹", () => step(-1), { class: "quiet", "aria-label": "Earlier version", disabled: place === 0 }),
          element("span", {}, `${place + 1}/${siblings.length}`),
          button("›", () => step(1), {
            class: "quiet",
            "aria-label": "Later version",
            disabled: place === siblings.length - 1,
          }),
        ),
      );
    }
    if (turn.role === "user") buttons.push(button("Edit", () => actions.edit(this.turn), { class: "quiet" }));
    else if (!running) buttons.push(button("Again", () => actions.again(this.turn), { class: "quiet" }));
    if (!running && turn.content) buttons.push(button("Copy", (event) => this.copy(event.currentTarget), { class: "quiet" }));
    const model = turn.role === "assistant" && turn.model ? element("span", { class: "model" }, turn.model) : null;
    const active = this.head.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.head.replaceChildren(element("span", { class: "name" }, this.name), ...(model ? [model] : []), ...buttons);
    if (active) [...this.head.querySelectorAll("button")].find((each) => each.textContent === active)?.focus();
  }

  drawReasoning() {
    const { reasoning, content } = this.turn;
    if (!reasoning) {
      this.reasoning?.remove();
      this.reasoning = null;
      return;
    }
    if (!this.reasoning) {
      this.reasoning = element(
        "details",
        { class: "reasoning" },
        element("summary", {}, "Reasoning"),
        element("div", {}),
      );
      this.text.before(this.reasoning);
    }
    this.reasoning.firstChild.textContent = content || this.turn.state !== "running" ? "Reasoning" : "Reasoning…";
    if (this.shownReasoning === reasoning) return;
    this.shownReasoning = reasoning;
    this.reasoning.lastChild.replaceChildren(plainNodes(reasoning));
  }

  drawExtra() {
    const { turn, actions } = this;
    const servers = turn.calls?.map(actions.serverOf);
    const key = JSON.stringify([
      turn.state,
      turn.error,
      turn.note,
      turn.calls,
      servers,
      turn.attachments?.length,
      turn.role,
    ]);
    if (this.extraKey === key) return;
    this.extraKey = key;
    const parts = [];
    for (const { name, text } of turn.attachments || []) {
      parts.push(element("details", { class: "attachment" }, element("summary", {}, name), plainNodes(text)));
    }
    for (const call of (turn.calls || []).filter(Boolean)) {
      parts.push(
        callCard(call, turn.state, actions.serverOf(call), (decision) => actions.decide(this.turn, call, decision)),
      );
    }
    if (turn.error) parts.push(element("p", { class: "error", role: "alert" }, turn.error));
    const note = turn.note || STATES[turn.state];
    if (note) {
      const goesOn = turn.role === "assistant" && turn.content && !turn.calls?.length && STATES[turn.state];
      const more = goesOn ? button("Continue", () => actions.goOn(this.turn), { class: "quiet" }) : null;
      parts.push(element("p", { class: "note" }, `${note} `, more));
    }
    this.extra.replaceChildren(...parts);
  }

  async copy(from) {
    await copyText(this.turn.content);
    from.textContent = "Copied";
    announce("Copied");
    setTimeout(() => {
      from.textContent = "Copy";
    }, 1500);
  }
}
