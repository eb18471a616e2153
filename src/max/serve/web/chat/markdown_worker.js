// Makes HTML of Markdown in a thread of its own, which the page ends if a text takes too long.

import MarkdownIt from "../vendor/markdown-it/markdown-it.esm.min.mjs";
import "../vendor/katex/katex.min.js";
import hljs from "../vendor/highlight.js/highlight.min.js";
import { mathRules } from "./math_rules.js";

const { katex } = globalThis;
const LONGEST_CODE = 50_000;
const LONGEST_OPEN_CODE = 8_000;
const MOST_HTML = 300_000;
const MOST_TAGS = 20_000;
const MOST_BLOCKS = 2_000;
const MOST_FORMULAS = 500;

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
const { escapeHtml } = markdown.utils;
const formulas = new Map();
let isOpen = false;

mathRules(markdown, (source, isBlock) => {
  const key = `${isBlock}${source}`;
  let made = formulas.get(key);
  if (made === undefined) {
    try {
      made = katex
        .renderToString(source, {
          displayMode: isBlock,
          throwOnError: true,
          strict: "ignore",
          trust: false,
          maxExpand: 200,
          maxSize: 30,
        })
        .replace(/<annotation .*?<\/annotation>|<\/?semantics>/gs, "");
    } catch {
      made = `<code class="formula">${escapeHtml(source)}</code>`;
    }
    if (formulas.size >= MOST_FORMULAS) formulas.delete(formulas.keys().next().value);
    formulas.set(key, made);
  }
  return isBlock ? `<div class="math">${made}</div>` : made;
});

function highlighted(code, language) {
  const most = isOpen ? LONGEST_OPEN_CODE : LONGEST_CODE;
  if (!language || code.length > most || !hljs.getLanguage(language)) return escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

function codeBlock(code, language) {
  const name = escapeHtml(language);
  return (
    `<div class="code"><div class="bar"><span>${name}</span><button type="button" class="quiet copy-code">Copy</button></div>` +
    `<pre tabindex="0"><code>${highlighted(code, language)}</code></pre></div>\n`
  );
}

const { rules } = markdown.renderer;
rules.fence = (tokens, index) =>
  codeBlock(tokens[index].content, tokens[index].info.trim().split(/\s+/)[0].slice(0, 40));
rules.code_block = (tokens, index) => codeBlock(tokens[index].content, "");
// pages load nothing from other hosts: a picture is a link
rules.image = (tokens, index, options) => {
  const source = escapeHtml(tokens[index].attrGet("src") ?? "");
  const label = markdown.renderer.renderInlineAsText(tokens[index].children ?? [], options, {});
  return `<a href="${source}">Picture: ${escapeHtml(label) || source}</a>`;
};
rules.table_open = () => '<div class="table" tabindex="0"><table>';
rules.table_close = () => "</table></div>";

/** The top-level blocks of a text: their HTML, and where each begins. */
function blocksOf(text) {
  const env = {};
  const tokens = markdown.parse(text, env);
  const starts = [0];
  for (let place = text.indexOf("\n"); place >= 0; place = text.indexOf("\n", place + 1)) starts.push(place + 1);
  const blocks = [];
  for (let first = 0; first < tokens.length;) {
    let end = first;
    let depth = 0;
    do depth += tokens[end++].nesting;
    while (depth > 0 && end < tokens.length);
    const [from, to] = tokens[first].map ?? [0, 0];
    const begin = starts[from] ?? text.length;
    if (blocks.length === MOST_BLOCKS) {
      blocks.push({ begin, html: "", plain: text.slice(begin) });
      break;
    }
    isOpen = isOpenText && end === tokens.length;
    // texts have no such attribute: their quotes are escaped. The policy of the page forbids styles within HTML
    const html = markdown.renderer
      .render(tokens.slice(first, end), markdown.options, env)
      .replaceAll(' style="', ' data-css="');
    const isLarge = html.length > MOST_HTML || html.split("<", MOST_TAGS + 1).length > MOST_TAGS;
    blocks.push(
      isLarge ? { begin, html: "", plain: text.slice(begin, starts[to] ?? text.length) } : { begin, html, plain: "" },
    );
    first = end;
  }
  // definitions of links change what stands before them
  return { blocks, isWhole: Object.keys(env.references ?? {}).length > 0 };
}

let isOpenText = false;

self.onmessage = ({ data: { job, text, isLast } }) => {
  isOpenText = !isLast;
  let made;
  try {
    made = blocksOf(text);
  } catch {
    made = { blocks: [{ begin: 0, html: "", plain: text }], isWhole: true };
  }
  self.postMessage({ job, ...made });
};
