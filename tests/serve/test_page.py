"""The chat page in Chromium, where it is installed with its driver."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.serve.browser import CHROMIUM, DRIVER, ENTER, ESCAPE, TAB, Browser
from tests.serve.conftest import RunningServer
from tests.serve.test_other_clients import ANSWER, QUESTION

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
)

MARKDOWN = {
    "# A *b*\n**c** __d__ `*e*` ~~f~~ g_h_i 2*3*4": "<h3>A <em>b</em></h3><p><strong>c</strong> "
    "<strong>d</strong> <code>*e*</code> <del>f</del> g_h_i 2*3*4</p>",
    "a\nb\n\n---\n> q\n> r": "<p>a<br>b</p><hr><blockquote><p>q<br>r</p></blockquote>",
    "1. a\n   - b\n     - c\n2. d\n\n3. e\nf": '<ol start="1"><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li>'
    "<li>d</li><li>e<br>f</li></ol>",
    "7) a\n\n   b\n- c": '<ol start="7"><li><p>a</p><p>b</p></li></ol><ul><li>c</li></ul>',
    "1. a\n  - b\n    - c": '<ol start="1"><li>a<ul><li>b<ul><li>c</li></ul></li></ul></li></ol>',
    "- a\n  ```py\n  if x:\n    y\n  ```": '<ul><li><p>a</p><div class="code"><pre><code>if x:\n  y</code></pre>'
    '<button type="button">Copy</button></div></li></ul>',
    "|a|b|\n|:-:|-:|\n|c|d|": '<table><tr><th style="text-align: center;">a</th>'
    '<th style="text-align: right;">b</th></tr>'
    '<tr><td style="text-align: center;">c</td><td style="text-align: right;">d</td></tr></table>',
    "[a](https://b.c) [d](javascript:e) <img src=x onerror=f()>": '<p><a href="https://b.c" rel="noopener noreferrer" '
    'target="_blank">a</a> [d](javascript:e) &lt;img src=x onerror=f()&gt;</p>',
    "```\nopen": '<div class="code"><pre><code>open</code></pre><button type="button">Copy</button></div>',
}  # fmt: skip


@pytest.fixture(scope="module")
def browser(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser that has never seen the server."""
    browser = Browser(str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Browser:
    """The chat page of a greedy user with no conversation."""
    browser.open(server.url)
    browser.run("localStorage.clear(); localStorage.setItem('chat.temperature', '\"0\"')")
    browser.size(1000, 800)
    browser.open(server.url)
    browser.wait("document.getElementById('model').value")
    return browser


def texts(page: Browser, kind: str) -> list[str]:
    """The texts of the turns of a kind."""
    script = "return [...document.querySelectorAll(`.${arguments[0]} .text`)].map(node => node.innerText)"
    return page.run(script, kind)


def test_markdown(page: Browser) -> None:
    made = page.run(
        "return arguments[0].map(text => element('div', ...markdown(text)).innerHTML)", list(MARKDOWN)
    )  # fmt: skip
    assert made == list(MARKDOWN.values())
    deep = page.run(
        "return markdown('>'.repeat(20000) + ' a').length + markdown('- '.repeat(9000)).length"
    )
    assert deep == 2


def test_a_conversation_by_the_keyboard(page: Browser) -> None:
    page.press(QUESTION + ENTER)
    page.wait("/8 tokens, first after/.test(document.getElementById('state').textContent)")
    assert (texts(page, "user"), texts(page, "assistant")) == ([QUESTION], [ANSWER])
    # all that can be done is reached by Tab, and the conversation comes back after a reload
    page.press(TAB * 12)
    page.run("location.reload()")
    page.wait(
        "document.querySelectorAll('.turn').length === 2 && document.readyState === 'complete'"
    )
    reached = set()
    for _ in range(12):
        page.press(TAB)
        active = page.run("const a = document.activeElement; return a.id || a.textContent")
        reached.add(active)
    assert {
        "model",
        "new",
        "options",
        "theme",
        "scroll",
        "Edit",
        "Again",
        "prompt",
        "send",
    } <= reached
    # Edit changes nothing until the message is sent
    page.click(".user button")
    assert page.run("return document.getElementById('prompt').value") == QUESTION
    page.press(ESCAPE)
    assert page.run("return document.getElementById('prompt').value") == ""
    assert texts(page, "assistant") == [ANSWER]
    page.click(".user button")
    page.run("document.getElementById('prompt').value = ''")
    page.press(QUESTION.replace("Norway", "Japan") + ENTER)
    page.wait("document.querySelector('.assistant .text')?.innerText.includes('Tokyo')")
    assert len(texts(page, "user")) == 1


def test_stop_and_errors(page: Browser) -> None:
    page.run("localStorage.setItem('chat.max_tokens', '\"3\"')")
    page.run("location.reload()")
    page.wait(
        "document.getElementById('max_tokens').value === '3' && document.getElementById('model').value"
    )
    page.press(QUESTION + ENTER)
    page.wait("/cut there/.test(document.getElementById('state').textContent)")
    page.run(
        "document.getElementById('max_tokens').value = ''; document.getElementById('top_p').value = 7"
    )
    page.click(".assistant .who button")
    assert "top_p is 7" in page.wait("document.querySelector('[role=alert]')?.textContent")
    # the second request waits at the server until the page leaves it
    page.run(
        "window.fetch = (_, options) => new Promise((_, no) => { options.signal.onabort = () => "
        "no(new DOMException('', 'AbortError')); })"
    )
    page.click(".assistant .who button")
    page.wait("!document.getElementById('stop').hidden")
    page.press(ESCAPE)
    assert page.wait("document.getElementById('state').textContent") == "stopped"
    assert page.run(
        "return document.getElementById('stop').hidden && !document.getElementById('send').hidden"
    )


def test_narrow_screens(page: Browser) -> None:
    wide = "| " + " | ".join("abcdefgh" * 2 for _ in range(9)) + " |"
    rule = "|" + "-|" * 9
    content = f"{wide}\n{rule}\n{wide}\n\n```\n{'x ' * 300}\n```\n{'y' * 900}"
    turns = [{"role": "user", "content": "z" * 500}, {"role": "assistant", "content": content}]
    page.size(390, 800)
    page.run(
        "localStorage.setItem('chat.turns', arguments[0]); location.reload()", json.dumps(turns)
    )
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.click("#options")
    assert page.run("return document.documentElement.scrollWidth") == 390
    # words of tables are whole: the table scrolls
    assert page.run("return document.querySelector('th').offsetHeight") < 50
    # nothing is cut off at the side
    script = (
        "return [...document.querySelectorAll('button, select, input')]"
        ".every(node => node.getBoundingClientRect().right <= 390)"
    )
    assert page.run(script)
