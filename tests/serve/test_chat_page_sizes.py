"""The chat page with many conversations and long ones, and in browsers that lack a part."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.browser import Browser, Firefox
from tests.serve.page_driver import Page
from tests.serve.page_server import ScriptedModel

pytestmark = pytest.mark.any_target

FILL = r"""
const store = new m.Conversations();
await store.open();
const words = 'word '.repeat(80);
const answer = (n) => `## Answer ${n}\n\nSome **bold** text and $a_${n}^2$. ${words}\n\n\`\`\`py\nx = ${n}\n\`\`\`\n`;
const made = [];
for (const [id, count, updated] of arguments_[0]) {
  const turns = [];
  for (let n = 0; n < count; n++) {
    const isAnswer = n % 2;
    turns.push({
      id: `${id}-${n}`, conversation: id, parent: n ? `${id}-${n - 1}` : null, created: n, state: 'done',
      role: isAnswer ? 'assistant' : 'user', content: isAnswer ? answer(n) : `question ${n} of ${id}`,
      reasoning: '', calls: [], attachments: [], error: '',
    });
  }
  made.push({ ...store.newRecord({ id, title: id, leaf: `${id}-${count - 1}`, updated }), turns });
}
await store.addAll(made);
"""

# how many turns there are after each change, and whether one was not the next to the one after it
WATCH = r"""
[window.counts, window.wrong] = [[], 0];
new MutationObserver(() => {
  const ids = [...document.querySelectorAll('.turn')].map((each) => Number(each.dataset.id.split('-')[1]));
  window.counts.push(ids.length);
  if (!ids.every((id, place) => id === 300 - ids.length + place)) window.wrong++;
}).observe(document.querySelector('#log'), { childList: true });
"""


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    model = ScriptedModel()
    page = Page(browser, model.url)
    page.clear()
    yield page
    model.server.stop()


def count(page: Page, selector: str) -> int:
    return page.run("return document.querySelectorAll(arguments[0]).length", selector)


@pytest.mark.long
def test_many_conversations_and_a_long_one(page: Page) -> None:
    conversations = [[f"talk {n}", 4, n] for n in range(1000)] + [["long", 300, 5000]]
    page.module("conversations.js", FILL, conversations)
    page.reload()
    # a page of the list is made, the rest as it is scrolled or walked through
    assert 50 <= count(page, "#conversations .open") <= 200
    # the last turns are shown at once, those before them follow
    page.module("dom.js", WATCH)
    page.click("#conversations .open")
    page.wait("document.querySelectorAll('.turn').length === 300")
    counts, wrong = page.run("return [window.counts, window.wrong]")
    assert 1 <= counts[0] <= 20 and len(counts) > 3 and not wrong
    page.wait("!document.querySelector('.turn:last-child .text > .plain')")
    # the end is seen, and what is far from it is drawn later
    end = "const s = document.querySelector('#scroll'); return s.scrollHeight - s.scrollTop - s.clientHeight"
    page.wait(f"(() => {{ {end} }})() < 5")
    assert count(page, ".assistant .text > .plain") > 100
    page.run("document.querySelector('#scroll').scrollTop = 0")
    page.wait("document.querySelectorAll('.turn')[1].querySelector('.block')")
    assert page.run("return document.querySelector('#scroll').scrollTop") == 0
    page.wait(
        "(list => { list.scrollTop = 1e9; return list.querySelectorAll('.open').length === 1001; })"
        "(document.querySelector('#conversations'))"
    )
    page.type("#search", "question 2 of talk 77")
    page.wait("document.querySelector('#found').innerText === '11 conversations'")  # 77, 770 to 779
    assert page.titles()[0] == "talk 779"
    page.type("#search", "")
    page.wait("document.querySelectorAll('#conversations .open').length > 20")
    # all are deleted, and come back
    page.click("#options")
    page.click("#delete-all")
    page.wait("document.querySelectorAll('#conversations .open').length === 0")
    page.push("Undo")
    page.wait("document.querySelectorAll('#conversations .open').length > 20")


LACKING = {
    "no database": "Object.defineProperty(window, 'indexedDB', {value: {open() { throw new Error('no'); }}})",
    "no locks": "Object.defineProperty(navigator, 'locks', {value: undefined})",
    "no storage": "for (const name of ['localStorage', 'sessionStorage']) Object.defineProperty(window, name, "
    "{get() { throw new DOMException('no', 'SecurityError'); }})",
    "no clipboard": "Object.defineProperty(navigator, 'clipboard', {value: undefined})",
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("lack", LACKING)
def test_a_browser_that_lacks_a_part(page: Page, lack: str) -> None:
    if isinstance(page.browser, Firefox):
        pytest.skip("Marionette runs no script before those of a page")
    page.clear()
    script = page.browser.before_each_page(LACKING[lack])
    try:
        page.browser.open("about:blank")
        page.browser.open(page.url)
        page.wait(
            "document.documentElement.dataset.ready !== undefined && document.querySelector('#model').value"
        )
        assert page.ask("one") == "You said: one"
        page.push("Copy", ".turn:last-child .who")
        page.wait("document.querySelector('.turn:last-child .who').innerText.includes('Copied')")
        page.push("New chat")
        page.ask("two")
        assert page.titles() == ["two", "one"]
        page.run("[...document.querySelectorAll('.open')].at(-1).click()")
        page.wait("document.querySelector('.turn .text').textContent === 'one'")
        page.send("slow 60")
        page.wait("document.querySelector('.turn:last-child .text').textContent.includes('w3')")
        if lack == "no database":
            assert "stores nothing" in page.text("#toast")
        else:
            page.reload()
        assert page.answer().endswith("w59")
    finally:
        page.browser.forget_script(script)


@pytest.mark.long
def test_a_newer_page_in_another_tab(page: Page) -> None:
    page.clear()
    page.ask("one")
    page.browser.run_async(
        "return new Promise((resolve) => { const request = indexedDB.open('chat', 1000); "
        "request.onsuccess = () => { request.result.close(); resolve(); }; })"
    )
    page.wait("document.querySelector('#toast').innerText.includes('newer version of this page')")
    page.browser.open(f"{page.url}/docs")
    page.browser.run_async("indexedDB.deleteDatabase('chat')")
