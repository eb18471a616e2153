// The turns of the open conversation. The last ones come first; those far from what is seen are drawn when they come near.

import { at, copyText, idle } from "./dom.js";
import { TurnView } from "./turn_view.js";

const NEAR = "1200px 0px";
const AT_END = 60;
const FIRST_TURNS = 16;
const PIECE = 72;

export class LogView {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map();
    this.log = at("log");
    this.scroll = at("scroll");
    this.sticks = true;
    this.observer = new IntersectionObserver((entries) => this.near(entries), { root: this.scroll, rootMargin: NEAR });
    // the part that is seen shrinks as well: by a long message, files, the keyboard of a phone
    const sizes = new ResizeObserver(() => this.stick());
    for (const each of [this.log, this.scroll]) sizes.observe(each);
    this.scroll.addEventListener(
      "scroll",
      () => {
        const { scrollHeight, scrollTop, clientHeight } = this.scroll;
        // a page that grows is no user who scrolls
        if (scrollTop < this.lastTop || scrollHeight === this.lastHeight)
          this.sticks = scrollHeight - scrollTop - clientHeight < AT_END;
        [this.lastTop, this.lastHeight] = [scrollTop, scrollHeight];
      },
      { passive: true },
    );
    this.log.addEventListener("click", (event) => {
      const from = event.target.closest("button.copy-code");
      if (!from) return;
      copyText(from.closest(".code").querySelector("code").textContent);
      from.textContent = "Copied";
      setTimeout(() => {
        from.textContent = "Copy";
      }, 1500);
    });
  }

  near(entries) {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      this.observer.unobserve(target);
      this.views.get(target.dataset.id)?.draw();
    }
  }

  /** Shows a path of turns; views of turns that stay are kept. */
  show(path, siblings) {
    const wanted = new Set(path.map((turn) => turn.id));
    for (const [id, view] of this.views) {
      if (wanted.has(id)) continue;
      this.observer.unobserve(view.node);
      view.node.remove();
      this.views.delete(id);
    }
    Object.assign(this, { path, siblings });
    const known = path.findIndex((turn) => this.views.has(turn.id));
    const first = Math.max(0, Math.min(known < 0 ? path.length : known, path.length - FIRST_TURNS));
    const fresh = this.place(first, path.length);
    for (const view of fresh.slice(-3)) view.draw();
    for (const view of fresh.slice(0, -3)) this.observer.observe(view.node);
    if (first) this.fill();
    at("empty").hidden = path.length > 0;
    this.stick();
  }

  /** Puts a part of the path into the page; returns the views that are new. */
  place(begin, end) {
    const fresh = [];
    let last = null;
    for (const turn of this.path.slice(begin, end)) {
      let view = this.views.get(turn.id);
      if (!view) {
        view = new TurnView(turn, this.actions);
        this.views.set(turn.id, view);
        fresh.push(view);
      }
      view.update(turn, this.siblings.get(turn.id));
      const place = last ? last.nextSibling : this.log.firstChild;
      if (place !== view.node) this.log.insertBefore(view.node, place);
      last = view.node;
    }
    return fresh;
  }

  /** Adds the turns before those that are shown, while the page has nothing else to do. */
  async fill() {
    if (this.isFilling) return;
    this.isFilling = true;
    try {
      for (;;) {
        await idle();
        const first = this.path.findIndex((turn) => this.views.has(turn.id));
        if (first <= 0) break;
        for (const view of this.place(Math.max(0, first - PIECE), first)) this.observer.observe(view.node);
      }
    } finally {
      this.isFilling = false;
    }
  }

  update(turn) {
    return this.views.get(turn.id)?.update(turn);
  }

  /** Goes to the end, and stays there while the text grows. */
  toEnd() {
    this.sticks = true;
    this.stick();
  }

  stick() {
    if (this.sticks) this.scroll.scrollTop = this.scroll.scrollHeight;
  }
}
