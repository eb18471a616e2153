// The turns of the open conversation. Those far from what is seen are drawn when they come near.

import { at, copyText } from "./dom.js";
import { TurnView } from "./turn_view.js";

const NEAR = "1200px 0px";
const AT_END = 60;

export class LogView {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map();
    this.log = at("log");
    this.scroll = at("scroll");
    this.sticks = true;
    this.observer = new IntersectionObserver((entries) => this.near(entries), { root: this.scroll, rootMargin: NEAR });
    new ResizeObserver(() => this.stick()).observe(this.log);
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
    let last = null;
    const fresh = [];
    for (const turn of path) {
      let view = this.views.get(turn.id);
      if (!view) {
        view = new TurnView(turn, this.actions);
        this.views.set(turn.id, view);
        fresh.push(view);
      }
      view.update(turn, siblings.get(turn.id));
      const place = last ? last.nextSibling : this.log.firstChild;
      if (place !== view.node) this.log.insertBefore(view.node, place);
      last = view.node;
    }
    for (const view of fresh.slice(-3)) view.draw();
    for (const view of fresh.slice(0, -3)) this.observer.observe(view.node);
    at("empty").hidden = path.length > 0;
    this.stick();
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
