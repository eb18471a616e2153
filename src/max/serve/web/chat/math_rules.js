// Marks of formulas in Markdown: $a$, $$a$$, \(a\) and \[a\]. Text with a mark that is never closed stays text.

const LONGEST = 5000;
const LONGEST_INLINE = 1000;
// marks of one paragraph that are not closed, after which no more are looked for
const MOST_UNCLOSED = 1000;
const PAIRS = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];

const isSpace = (char) => char === undefined || /\s/.test(char);
const isDigit = (char) => char !== undefined && char >= "0" && char <= "9";

/** The place of a closing mark; a dollar closes after a character that is no space, and not before a digit. */
function closing(source, begin, close, longest) {
  const text = source.slice(begin, begin + longest);
  for (let place = text.indexOf(close); place >= 0; place = text.indexOf(close, place + 1)) {
    let slashes = 0;
    while (text[place - 1 - slashes] === "\\") slashes++;
    if (slashes % 2) continue;
    if (close === "$" && (isSpace(text[place - 1]) || isDigit(source[begin + place + 1]))) continue;
    return place > 0 ? begin + place : -1;
  }
  return -1;
}

function inlineRule(state, silent) {
  const { src, pos } = state;
  if (src[pos] !== "$" && src[pos] !== "\\") return false;
  for (const [open, close, isBlock] of PAIRS) {
    if (!src.startsWith(open, pos)) continue;
    const begin = pos + open.length;
    if (open === "$" && isSpace(src[begin])) return false;
    if (state.unclosed > MOST_UNCLOSED) return false;
    const end = closing(src, begin, close, isBlock ? LONGEST : LONGEST_INLINE);
    if (end < 0) {
      state.unclosed = (state.unclosed ?? 0) + 1;
      return false;
    }
    if (!silent) {
      const token = state.push(isBlock ? "math_block" : "math_inline", "math", 0);
      token.content = src.slice(begin, end);
      token.markup = open;
    }
    state.pos = end + close.length;
    return true;
  }
  return false;
}

/** A formula that begins on its own line and may have blank lines. */
function blockRule(state, startLine, endLine, silent) {
  const begin = state.bMarks[startLine] + state.tShift[startLine];
  const pair = PAIRS.find(([open, , isBlock]) => isBlock && state.src.startsWith(open, begin));
  if (!pair) return false;
  const { env } = state;
  if (env.unclosedBlocks > MOST_UNCLOSED) return false;
  const [open, close] = pair;
  const end = closing(state.src, begin + open.length, close, LONGEST);
  if (end < 0) {
    env.unclosedBlocks = (env.unclosedBlocks ?? 0) + 1;
    return false;
  }
  let line = startLine;
  while (line < endLine && state.eMarks[line] < end) line++;
  // text after it: a paragraph holds both
  if (line >= endLine || state.src.slice(end + close.length, state.eMarks[line]).trim()) return false;
  if (line > startLine && state.sCount[line] < state.blkIndent) return false;
  if (silent) return true;
  const token = state.push("math_block", "math", 0);
  token.block = true;
  token.content = state
    .getLines(startLine, line + 1, state.tShift[startLine], false)
    .trim()
    .slice(open.length, -close.length);
  token.map = [startLine, line + 1];
  state.line = line + 1;
  return true;
}

/** Adds formulas to a parser; `render` makes their HTML. */
export function mathRules(markdown, render) {
  markdown.inline.ruler.before("escape", "math", inlineRule);
  markdown.block.ruler.before("fence", "math", blockRule, { alt: ["paragraph", "reference", "blockquote", "list"] });
  markdown.renderer.rules.math_inline = (tokens, index) => render(tokens[index].content, false);
  markdown.renderer.rules.math_block = (tokens, index) => render(tokens[index].content, true);
}
