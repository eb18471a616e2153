// Shows Markdown that may still grow: blocks that are complete stay as they are.

import { element, pause } from "./dom.js";
import { safeNodes } from "./sanitize.js";

const SLICE_MS = 8;
const PLAIN_PIECE = 16_000;
const LONGEST_TEXT = 1_000_000;
const BUSY_SHARE = 4;
const BATCH = 4000;

/** The time after which a text is shown as it is. */
export const limits = { renderMs: 4000 };

const workerUrl = new URL("markdown_worker.js", import.meta.url);
const policy = globalThis.trustedTypes?.createPolicy("page-workers", {
  createScriptURL: (url) => {
    if (new URL("./", url).href !== new URL("./", import.meta.url).href)
      throw new TypeError(`no worker of this page: ${url}`);
    return url;
  },
});

/** Starts a script of this folder as a worker. */
export function startWorker(url) {
  return new Worker(policy ? policy.createScriptURL(url.href) : url.href, { type: "module" });
}

/** The thread that makes HTML; one that takes too long for a text is replaced, and the text stays plain. */
class Renderer {
  constructor() {
    this.jobs = new Map();
    this.next = 0;
  }

  start() {
    this.worker = startWorker(workerUrl);
    this.worker.onmessage = ({ data }) => this.settle(data.job, data);
    this.worker.onerror = () => this.replace();
    this.ready = false;
  }

  render(text, isLast) {
    return new Promise((resolve) => {
      const job = this.next++;
      this.jobs.set(job, { text, isLast, resolve });
      this.worker.postMessage({ job, text, isLast });
      if (this.jobs.size === 1) this.watch();
    });
  }

  // the first answer of a thread waits for its scripts too
  watch() {
    clearTimeout(this.timer);
    if (this.jobs.size) this.timer = setTimeout(() => this.replace(), (this.ready ? 1 : 4) * limits.renderMs);
  }

  settle(job, made) {
    this.ready = true;
    const found = this.jobs.get(job);
    this.jobs.delete(job);
    this.watch();
    found?.resolve(made);
  }

  replace() {
    this.worker.terminate();
    const [job, guilty] = this.jobs.entries().next().value ?? [];
    this.start();
    if (guilty) this.settle(job, { blocks: [{ begin: 0, html: "", plain: guilty.text }], isWhole: true });
    this.ready = false;
    for (const [number, { text, isLast }] of this.jobs) this.worker.postMessage({ job: number, text, isLast });
  }
}

const renderer = new Renderer();
renderer.start(); // its scripts come while the page opens

/** Long runs of marks above and below one letter take the browser seconds to draw. */
const withoutTowers = (text) => text.replace(/(\p{M}{16})\p{M}+/gu, "$1");

/** Text as it is, in pieces that the browser lays out when they are seen. */
export function plainNodes(source) {
  const text = withoutTowers(source);
  const pieces = [];
  for (let place = 0; place < text.length; place += PLAIN_PIECE) {
    pieces.push(element("div", { class: "piece" }, text.slice(place, place + PLAIN_PIECE)));
  }
  return element("div", { class: "plain" }, ...pieces);
}

export class MarkdownView {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.blocks = [];
    this.isBusy = false;
    this.wanted = null;
  }

  /**
   * Shows a text, of which the one before is the begin unless it was edited. Until all of it is drawn the node is
   * `aria-busy`.
   */
  async show(text, isLast = true) {
    this.wanted = { text, isLast };
    if (this.isBusy) return;
    this.isBusy = true;
    this.node.setAttribute("aria-busy", "true");
    try {
      while (this.wanted) {
        const begin = performance.now();
        const { text: next, isLast: last } = this.wanted;
        this.wanted = null;
        await this.render(next, last);
        // long texts are drawn less often, so that the page stays quick
        const pausing = Math.max(30, BUSY_SHARE * (performance.now() - begin));
        if (this.wanted && !this.wanted.isLast)
          await new Promise((resolve) => setTimeout(resolve, Math.min(pausing, 2000)));
      }
    } finally {
      this.isBusy = false;
      this.node.removeAttribute("aria-busy");
    }
  }

  async render(text, isLast) {
    // the last block may still change, and at the end all may, by definitions of links
    let kept = isLast || !text.startsWith(this.text) ? 0 : Math.max(0, this.blocks.length - 1);
    let from = kept ? this.blocks[kept].begin : 0;
    const shown = text.slice(from, LONGEST_TEXT);
    const made = await renderer.render(shown, isLast);
    if (made.isWhole && kept) {
      kept = from = 0;
      made.blocks = (await renderer.render(text.slice(0, LONGEST_TEXT), isLast)).blocks;
    }
    const blocks = made.blocks.map((block) => ({ ...block, begin: block.begin + from }));
    if (text.length > LONGEST_TEXT) blocks.push({ begin: LONGEST_TEXT, html: "", plain: text.slice(LONGEST_TEXT) });
    await this.put(blocks, kept);
    this.text = text;
  }

  async put(blocks, kept) {
    if (!this.blocks.length) this.node.replaceChildren(); // the plain text until now
    let begin = performance.now();
    for (let first = 0; first < blocks.length;) {
      const old = this.blocks[kept + first];
      const block = blocks[first];
      if (old && old.html === block.html && old.plain === block.plain) {
        old.begin = block.begin;
        first++;
        continue;
      }
      if (performance.now() - begin > SLICE_MS) {
        await pause();
        begin = performance.now();
      }
      // many small blocks are made at once
      let end = first + 1;
      let length = block.html.length;
      while (!old && !block.plain && end < blocks.length && !blocks[end].plain && length < BATCH) {
        length += blocks[end++].html.length;
      }
      const nodes = blockNodes(blocks.slice(first, end));
      if (old) old.node.replaceWith(...nodes);
      else this.node.append(...nodes);
      for (const node of nodes) this.blocks[kept + first] = { ...blocks[first++], node };
    }
    for (const block of this.blocks.splice(kept + blocks.length)) block.node.remove();
  }
}

function blockNodes(blocks) {
  if (blocks[0].plain) return [element("div", { class: "block" }, plainNodes(blocks[0].plain))];
  const html = blocks.map((each) => `<div class="block">${withoutTowers(each.html)}</div>`).join("");
  const nodes = [...safeNodes(html).children];
  if (nodes.length === blocks.length) return nodes;
  if (blocks.length === 1) return [element("div", { class: "block" }, ...nodes)];
  return blocks.flatMap((each) => blockNodes([each]));
}
