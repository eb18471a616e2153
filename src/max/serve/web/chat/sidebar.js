// The list of conversations: search, rename, delete. A long list is made in pages, as it is scrolled.

import { at, button, download, element } from "./dom.js";
import { markdownOf } from "./transfer.js";

const PAGE = 80;
const SEARCH_MS = 150;

/** Events: "open" (detail: an identifier), "remove" (detail: an identifier). */
export class Sidebar extends EventTarget {
  constructor(conversations) {
    super();
    this.conversations = conversations;
    this.list = at("conversations");
    this.menu = at("menu");
    this.found = null;
    this.count = PAGE;
    this.current = "";
    this.running = new Set();
    this.more = element("li", { class: "more", "aria-hidden": "true" });
    const observer = new IntersectionObserver(
      (entries) => {
        if (!entries.at(-1).isIntersecting) return;
        this.addPage();
        // it tells of changes only: the end may be in sight again, or still
        observer.unobserve(this.more);
        observer.observe(this.more);
      },
      { root: this.list },
    );
    observer.observe(this.more);
    conversations.addEventListener("list", () => this.later());
    at("search").oninput = () => this.search();
    at("search").onkeydown = (event) => {
      if (event.key === "Escape" && at("search").value) {
        event.stopPropagation();
        at("search").value = "";
        this.search();
      } else if (event.key === "ArrowDown") this.step(event, 1);
    };
    this.list.addEventListener("keydown", (event) => this.keys(event));
    this.menu.addEventListener("keydown", (event) => this.menuKeys(event));
    this.draw();
  }

  later() {
    if (this.drawing) return;
    this.drawing = true;
    queueMicrotask(() => {
      this.drawing = false;
      this.draw();
    });
  }

  get shown() {
    const all = this.conversations.list();
    return this.found ? all.filter((each) => this.found.has(each.id)) : all;
  }

  /** Marks the open conversation, and those whose answers are made. */
  mark(current, running) {
    const key = JSON.stringify([current, [...running]]);
    if (this.marked === key) return;
    this.marked = key;
    this.current = current;
    this.running = running;
    for (const row of this.list.querySelectorAll("li[data-id]")) this.markRow(row);
  }

  markRow(row) {
    const { id } = row.dataset;
    const opener = row.firstChild;
    if (id === this.current) opener.setAttribute("aria-current", "page");
    else opener.removeAttribute("aria-current");
    row.classList.toggle("running", this.running.has(id));
  }

  draw() {
    if (this.list.querySelector("input")) return; // one is renamed
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    this.rows = this.shown;
    this.drawn = 0;
    this.list.replaceChildren(this.more);
    const count = Math.max(PAGE, Math.min(this.count, this.rows.length));
    while (this.drawn < count && this.drawn < this.rows.length) this.addPage();
    this.more.hidden = this.drawn >= this.rows.length;
    const removed = this.removed && !this.conversations.get(this.removed.id) ? this.removed : null;
    if (removed) this.removed = null;
    const wanted = removed ? removed.neighbor : focused;
    if (wanted || removed) (this.opener(wanted) ?? (removed ? at("new") : null))?.focus();
  }

  opener(id) {
    return id ? this.list.querySelector(`li[data-id="${CSS.escape(id)}"] > button`) : null;
  }

  addPage() {
    const rows = this.rows.slice(this.drawn, this.drawn + PAGE);
    this.drawn += rows.length;
    this.count = Math.max(this.drawn, PAGE);
    this.more.before(...rows.map((each) => this.row(each)));
    this.more.hidden = this.drawn >= this.rows.length;
  }

  row(conversation) {
    const { id, title } = conversation;
    const excerpt = this.found?.get(id);
    const opener = button(title, () => this.open(id), { class: "open", title });
    if (excerpt) opener.append(element("span", { class: "hint" }, excerpt));
    const more = button("⋯", (event) => this.openMenu(event.currentTarget, id), {
      class: "quiet menu",
      "aria-label": `Actions of ${title}`,
      "aria-haspopup": "menu",
      tabindex: "-1",
    });
    const row = element("li", { "data-id": id }, opener, more);
    this.markRow(row);
    return row;
  }

  open(id) {
    this.dispatchEvent(new CustomEvent("open", { detail: id }));
  }

  step(event, by) {
    const openers = [...this.list.querySelectorAll("button.open")];
    const place = openers.indexOf(document.activeElement);
    if (by > 0 && place === openers.length - 1 && !this.more.hidden) this.addPage();
    const next = place + by < 0 ? at("search") : this.list.querySelectorAll("button.open")[place + by];
    if (!next) return;
    event.preventDefault();
    next.focus();
  }

  keys(event) {
    const id = event.target.closest("li")?.dataset.id;
    if (!id || event.target.tagName === "INPUT") return;
    if (event.key === "ArrowDown") this.step(event, 1);
    else if (event.key === "ArrowUp") this.step(event, -1);
    else if (event.key === "F2") this.rename(id);
    else if (event.key === "Delete") this.remove(id);
    else if (event.key === "ContextMenu" || event.key === "ArrowRight" || (event.shiftKey && event.key === "F10")) {
      event.preventDefault();
      this.openMenu(event.target.closest("li").querySelector(".menu"), id);
    }
  }

  openMenu(from, id) {
    const item = (label, action) =>
      button(
        label,
        () => {
          this.menu.hidePopover();
          action();
        },
        { role: "menuitem", tabindex: "-1" },
      );
    this.menu.replaceChildren(
      item("Rename", () => this.rename(id)),
      item("Export", () => this.export(id)),
      item("Delete", () => this.remove(id)),
    );
    this.menuOwner = from;
    this.menu.showPopover();
    const place = from.getBoundingClientRect();
    this.menu.style.left = `${Math.max(8, Math.min(place.right, innerWidth) - this.menu.offsetWidth)}px`;
    this.menu.style.top = `${Math.min(place.bottom, innerHeight - this.menu.offsetHeight - 8)}px`;
    this.menu.firstChild.focus();
  }

  menuKeys(event) {
    const items = [...this.menu.children];
    const place = items.indexOf(document.activeElement);
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      items.at((place + (event.key === "ArrowDown" ? 1 : -1)) % items.length).focus();
    } else if (event.key === "Escape" || event.key === "Tab") {
      event.preventDefault();
      event.stopPropagation();
      this.menu.hidePopover();
      this.menuOwner.closest("li")?.firstChild.focus();
    }
  }

  rename(id) {
    const row = this.list.querySelector(`li[data-id="${CSS.escape(id)}"]`);
    if (!row) return;
    const field = element("input", { "aria-label": "Name of the conversation", maxlength: "200" });
    field.value = this.conversations.get(id).title;
    row.firstChild.replaceWith(field);
    field.focus();
    field.select();
    let isOpen = true;
    const end = async (keeps) => {
      if (!isOpen) return;
      isOpen = false;
      const title = field.value.trim();
      const hadFocus = document.activeElement === field;
      field.remove();
      if (keeps && title) await this.conversations.change(id, { title });
      this.draw();
      if (hadFocus) this.opener(id)?.focus();
    };
    field.onkeydown = (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      else if (event.key === "Escape") end(false);
    };
    field.onblur = () => end(true);
  }

  /** Asks for a conversation to be deleted; the focus goes to its neighbor when it is gone. */
  remove(id) {
    const openers = [...this.list.querySelectorAll("button.open")];
    const place = openers.findIndex((each) => each.parentNode.dataset.id === id);
    const hadFocus = this.list.contains(document.activeElement) || document.activeElement === document.body;
    const neighbor = (openers[place + 1] ?? openers[place - 1])?.parentNode.dataset.id;
    this.removed = hadFocus ? { id, neighbor } : null;
    this.dispatchEvent(new CustomEvent("remove", { detail: id }));
  }

  async export(id) {
    const [whole] = await this.conversations.whole([id]);
    const name =
      whole.title
        .replace(/[^\p{L}\p{N}]+/gu, "-")
        .replace(/^-|-$/g, "")
        .slice(0, 60) || "chat";
    download(`${name}.md`, "text/markdown", markdownOf(whole));
  }

  search() {
    clearTimeout(this.timer);
    this.abort?.abort();
    const words = at("search").value.trim();
    if (!words) {
      this.found = null;
      at("found").textContent = "";
      this.count = PAGE;
      this.draw();
      return;
    }
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.timer = setTimeout(async () => {
      const found = await this.conversations.search(words, signal);
      if (!found || signal.aborted) return;
      this.found = found;
      this.count = PAGE;
      at("found").textContent = found.size === 1 ? "1 conversation" : `${found.size} conversations`;
      this.draw();
    }, SEARCH_MS);
  }
}
