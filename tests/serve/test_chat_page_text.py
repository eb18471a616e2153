"""Answers as the chat page shows them: Markdown, formulas, code, and texts that are made to do harm."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serve.browser import Browser
from tests.serve.page_driver import Page
from tests.serve.page_server import ScriptedModel

pytestmark = pytest.mark.any_target

SHOW = """
const node = document.createElement('div');
node.className = 'text';
document.querySelector('#log').replaceChildren(node);
const view = new m.MarkdownView(node);
window.longest = 0;
// Firefox has none, and warns of who looks for them
if (PerformanceObserver.supportedEntryTypes.includes('longtask')) window.watch ??= new PerformanceObserver((list) => {
  for (const each of list.getEntries()) window.longest = Math.max(window.longest, each.duration);
}).observe({type: 'longtask'}) ?? true;
const begin = performance.now();
for (const part of arguments_[0]) await view.show(part, false);
await view.show(arguments_[0].at(-1), true);
const seconds = (performance.now() - begin) / 1000;
await new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));
const all = [...node.querySelectorAll('*')];
return {
  html: node.innerHTML.length < 30000 ? [...node.children].map((each) => each.innerHTML.trim()).join('') : '',
  text: node.textContent.length, seconds, longest: window.longest,
  tags: [...new Set(all.map((each) => each.tagName.toLowerCase()))],
  attributes: [...new Set(all.flatMap((each) => each.getAttributeNames()))],
  links: [...new Set(all.filter((each) => each.hasAttribute('href')).map((each) => each.protocol))],
};
"""
COPY = '<button type="button" class="quiet copy-code">Copy</button></div>'
MARKDOWN = {
    "# A *b*\n**c** `*e*` ~~f~~ g_h_i 2*3": "<h1>A <em>b</em></h1><p><strong>c</strong> "
    "<code>*e*</code> <s>f</s> g_h_i 2*3</p>",
    "a\nb\n\n---\n> q": "<p>a<br>\nb</p><hr><blockquote>\n<p>q</p>\n</blockquote>",
    "```py\nif x:\n  y\n```": '<div class="code"><div class="bar"><span>py</span>' + COPY
    + '<pre tabindex="0"><code><span class="hljs-keyword">if</span> x:\n  y\n</code></pre></div>',
    "```\nopen": '<div class="code"><div class="bar"><span></span>' + COPY
    + '<pre tabindex="0"><code>open</code></pre></div>',
    "|a|\n|-:|\n|c|": '<div class="table" tabindex="0"><table><thead>\n<tr>\n<th style="text-align: right;">a</th>\n'
    '</tr>\n</thead>\n<tbody>\n<tr>\n<td style="text-align: right;">c</td>\n</tr>\n</tbody>\n</table></div>',
    "[a](https://b.c) https://d.e": '<p><a href="https://b.c" rel="noopener noreferrer" target="_blank">a</a> '
    '<a href="https://d.e" rel="noopener noreferrer" target="_blank">https://d.e</a></p>',
    "[d](javascript:e) <img src=x onerror=f()>": "<p>[d](javascript:e) &lt;img src=x onerror=f()&gt;</p>",
    "![p](https://b.c/d.png)": '<p><a href="https://b.c/d.png" rel="noopener noreferrer" target="_blank">'
    "Picture: p</a></p>",
    "it costs $5, or $6 and \\$7": "<p>it costs $5, or $6 and $7</p>",
    "$$\\frac{1}{2": "<p>$$\\frac{1}{2</p>", "\\[ a": "<p>[ a</p>", "$\\undefined$": "<p>"
    '<code class="formula">\\undefined</code></p>',
    "`$a$`": "<p><code>$a$</code></p>",
}  # fmt: skip
HARM = [
    "<script>window.harmed = 1</script>",
    "<img src=x onerror='window.harmed = 1'>",
    "[a](javascript:window.harmed=1)",
    "<a href='javascript:window.harmed=1'>a</a>",
    "![b](javascript:1)",
    "[c](data:text/html,<script>1</script>)",
    "[d]: javascript:window.harmed=1 '<b>'\n\n[d]",
    "<iframe src=//a.b></iframe>",
    "<svg onload=window.harmed=1>",
    "<style>*{display:none}</style>",
    "$\\href{javascript:1}{x}$",
    "$\\htmlStyle{position:fixed}{x}$",
    "<b style='position:fixed'>",
    "$\\url{javascript:1}$",
    "$\\includegraphics{http://a.b/c.png}$",
    "`",
    "```",
    "```html\n<script>window.harmed = 1</script>\n```",
    "<math><mi//xlink:href='data:x,<script>1</script>'>",
    "$x^2$",
    "$$\n\\sqrt{\\frac ab}\n$$",
    "\\(",
    "\\]",
    "$$",
    "$",
    "**",
    "_",
    "> ",
    "- ",
    "1. ",
    "|a|b|\n|-|-|\n|c|d|",
    "\n",
    "\n\n",
    "    code",
    "# ",
    "[",
    "](",
    ")",
    "<!--",
    "-->",
    "&lt;script&gt;",
    "&#106;avascript:",
    '<https://a.b/?"onclick=1>',
    '" style="color:red',
    "' onmouseover='window.harmed=1'",
    "\u202e",
    "\0",
    "👩‍👩‍👧",
    "wörter ",
    "text ",
    "<form action=//a.b><input name=x><button>",
    "<meta http-equiv=refresh content=0>",
    "<base href=//a.b>",
    "~~~",
    "\\",
    "$\\unicode{x}$",
]
ALLOWED = {
    "class",
    "href",
    "rel",
    "target",
    "type",
    "style",
    "tabindex",
    "align",
    "start",
    "aria-hidden",
}
FORMULAS = {
    "accent",
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
    "preserveaspectratio",
    "rowspacing",
    "scriptlevel",
    "separator",
    "stretchy",
    "viewbox",
    "width",
    "xmlns",
}
LARGE = {
    "one word": "a" * 1_000_000,
    "words": "word " * 200_000,
    "paragraphs": "word\n\n" * 150_000,
    "quotes": ">" * 100_000,
    "lists": "- " * 20_000,
    "brackets": "[" * 100_000,
    "stars": "**a*" * 100_000,
    "dollars": "$a " * 200_000,
    "formulas": "\\[ a\n" * 100_000,
    "nested": "$$" + "{" * 2000 + "}" * 2000 + "$$",
    "html": "<div>" * 50_000,
    "code": "```python\n" + 'x = [1, "a"]\n' * 40_000,
    "links": "[a](http://b.c) " * 50_000,
    "headings": "# a\n" * 60_000,
    "towers": "a" + "\u0301" * 300_000,
    "table": "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + ("\n|" + "b|" * 2000) * 50,
    "macro": "$$\\def\\a{\\b\\b\\b\\b}\\def\\b{\\c\\c\\c\\c}\\def\\c{\\a\\a}\\a$$",
    "entities": "&amp;&#x41;" * 100_000,
}


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """A page whose answers the tests show themselves."""
    model = ScriptedModel()
    page = Page(browser, model.url)
    page.clear()
    yield page
    assert page.run("return window.harmed") is None
    assert page.problems() == []
    model.server.stop()


def shown(page: Page, *texts: str) -> dict[str, Any]:
    """What becomes of a text that grows."""
    return page.module("markdown_view.js", SHOW, list(texts))


def check_harmless(seen: dict[str, Any]) -> None:
    assert not {
        "script",
        "img",
        "iframe",
        "style",
        "form",
        "input",
        "object",
        "base",
        "meta",
        "link",
    } & set(seen["tags"])
    assert {each.lower() for each in seen["attributes"]} <= ALLOWED | FORMULAS
    assert set(seen["links"]) <= {"http:", "https:", "mailto:"}


def test_markdown(page: Page) -> None:
    made = {text: shown(page, text)["html"] for text in MARKDOWN}
    assert made == MARKDOWN


def test_formulas(page: Page) -> None:
    for text in (
        "$a^2$",
        "\\(a^2\\)",
        "$$a^2$$",
        "\\[a^2\\]",
        "$$\na^2\n\n+b\n$$",
        "- x\n  $$\n  a^2\n  $$",
    ):
        seen = shown(page, text)
        assert "math" in seen["tags"] and "$" not in page.text("#log"), text
        check_harmless(seen)
    seen = shown(
        page,
        "\\[ \\sqrt{x} = \\overbrace{a}^{b} \\left( \\frac{1}{2} \\right) \\begin{pmatrix} a \\\\ b \\end{pmatrix} \\]",
    )
    assert {"svg", "path", "mtable", "msqrt"} <= set(seen["tags"])
    # fonts and styles of formulas come from this server, and are used
    sizes = page.run(
        "const svg = document.querySelector('#log svg'); return [svg.getAttribute('viewBox') !== null, "
        "document.querySelector('#log .katex-strut, #log .strut').style.height, "
        "getComputedStyle(document.querySelector('#log .mathnormal')).fontFamily]"
    )
    assert sizes[0] and sizes[1].endswith("em") and "KaTeX" in sizes[2]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 40))]
)
def test_nothing_that_a_model_writes_does_harm(page: Page, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(15):
        text = "".join(draw.choices(HARM, k=draw.randrange(1, 30)))
        # the text may be cut anywhere while it grows; in the end it is as if it had come at once
        cuts = sorted(draw.choices(range(len(text) + 1), k=draw.randrange(6)))
        grown = shown(page, *[text[:cut] for cut in cuts], text)
        check_harmless(grown)
        assert grown["html"] == shown(page, text)["html"], text


@pytest.mark.long
@pytest.mark.parametrize("kind", LARGE)
def test_large_texts_do_not_stop_the_page(page: Page, kind: str) -> None:
    text = LARGE[kind]
    seen = shown(page, text)
    check_harmless(seen)
    # a page that does not answer for seconds is what this finds; it is no measurement
    assert seen["longest"] < 8000 and seen["seconds"] < 30
    # the next text is shown as ever
    assert shown(page, "**a**")["html"] == "<p><strong>a</strong></p>"


def test_a_text_that_takes_too_long_is_shown_as_it_is(page: Page) -> None:
    seen = page.module(
        "markdown_view.js",
        "m.limits.renderMs = 200; const start = Worker.prototype.postMessage; "
        "Worker.prototype.postMessage = function (message) { "
        "if (!message.text.includes('never')) start.call(this, message); }; "
        "const nodes = ['**a**', '**never**', '**b**'].map(() => document.createElement('div')); "
        "await Promise.all(nodes.map((node, n) => new m.MarkdownView(node).show(['**a**', '**never**', '**b**'][n]))); "
        "Worker.prototype.postMessage = start; m.limits.renderMs = 4000; "
        "return nodes.map((node) => node.innerHTML.replace(/\\n/g, ''))",
    )
    assert "<strong>a</strong>" in seen[0] and "<strong>b</strong>" in seen[2]
    assert "**never**" in seen[1] and "plain" in seen[1]


def test_a_text_is_busy_until_all_of_it_is_drawn(page: Page) -> None:
    """Screen readers wait for the end of a text; one that grows is drawn in parts."""
    seen = page.module(
        "markdown_view.js",
        "const node = document.createElement('div'); const view = new m.MarkdownView(node); let text = ''; "
        "let early = 0; const states = [node.ariaBusy]; "
        "const frame = () => new Promise((done) => requestAnimationFrame(done)); "
        "for (let n = 0; n < 40; n++) { text += `word ${n} `; view.show(text, n === 39); states.push(node.ariaBusy); "
        "if (n % 5 === 4) await frame(); "
        "if (node.ariaBusy !== 'true' && node.textContent.trim() !== text.trim()) early++; } "
        "while (node.ariaBusy === 'true') await frame(); "
        "return {early, states, whole: node.textContent.trim() === text.trim()}",
    )
    assert seen["states"] == [None] + ["true"] * 40
    assert seen["early"] == 0 and seen["whole"]
