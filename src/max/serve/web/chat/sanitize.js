// HTML that the renderer made of a model's text becomes nodes here, and nowhere else.

import "../vendor/dompurify/purify.min.js";

const { DOMPurify } = globalThis;

const TAGS = [
  "a",
  "blockquote",
  "br",
  "button",
  "code",
  "del",
  "div",
  "em",
  "h1",
  "h2",
  "h3",
  "h4",
  "h5",
  "h6",
  "hr",
  "li",
  "math",
  "menclose",
  "mfrac",
  "mi",
  "mn",
  "mo",
  "mover",
  "mpadded",
  "mphantom",
  "mroot",
  "mrow",
  "ms",
  "mspace",
  "msqrt",
  "mstyle",
  "msub",
  "msubsup",
  "msup",
  "mtable",
  "mtd",
  "mtext",
  "mtr",
  "munder",
  "munderover",
  "ol",
  "p",
  "path",
  "pre",
  "s",
  "span",
  "strong",
  "svg",
  "table",
  "tbody",
  "td",
  "th",
  "thead",
  "tr",
  "ul",
];
const ATTRIBUTES = [
  "accent",
  "align",
  "aria-hidden",
  "class",
  "columnalign",
  "columnspacing",
  "d",
  "display",
  "displaystyle",
  "fence",
  "height",
  "linethickness",
  "mathvariant",
  "maxsize",
  "minsize",
  "preserveAspectRatio",
  "rowspacing",
  "scriptlevel",
  "separator",
  "start",
  "stretchy",
  "data-css",
  "tabindex",
  "type",
  "viewBox",
  "width",
  "xmlns",
];
const EDGES = ["top", "right", "bottom", "left"];
const STYLES = new Set([
  "background-color",
  "border-color",
  "border-style",
  "border-width",
  "color",
  "height",
  "min-width",
  "position",
  "text-align",
  "vertical-align",
  "width",
  ...EDGES,
  ...EDGES.flatMap((edge) => [`margin-${edge}`, `padding-${edge}`, `border-${edge}-width`]),
]);
const LENGTH = /^-?[\d.]+(em|ex|px|%)?$/;
const WORD = /^([a-z]{1,20}|#[\da-f]{3,8})$/i;

function isHarmless(name, value) {
  if (name === "position") return value === "relative";
  return STYLES.has(name) && value.split(" ").every((part) => LENGTH.test(part) || WORD.test(part));
}

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.hasAttribute("href")) {
    node.setAttribute("rel", "noopener noreferrer");
    node.setAttribute("target", "_blank");
  }
  // styles are set one by one, if they are such as formulas and tables have
  const style = node.getAttribute("data-css");
  if (style === null) return;
  node.removeAttribute("data-css");
  for (const each of style.split(";")) {
    const [name, value = ""] = each.split(/:(.*)/s).map((part) => part.trim());
    if (isHarmless(name, value)) node.style.setProperty(name, value);
  }
});

/** Nodes of HTML, of which nothing runs, loads or leaves its place. */
export function safeNodes(html) {
  return DOMPurify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", ...ATTRIBUTES],
    ADD_URI_SAFE_ATTR: ATTRIBUTES,
    ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
    ALLOW_ARIA_ATTR: false,
    ALLOW_DATA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}
