"""The chat page with a model that follows a script: what is kept, what is sent, what is shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from max.pipelines.store.names import SHORT_NAMES
from tests.serve.browser import ENTER, ESCAPE, TAB, Browser
from tests.serve.page_driver import Page
from tests.serve.page_server import ScriptedModel

pytestmark = pytest.mark.any_target


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.server.stop()


@pytest.fixture
def page(browser: Browser, model: ScriptedModel) -> Iterator[Page]:
    """The page of a user who is new."""
    page = Page(browser, model.url)
    page.clear()
    model.requests.clear()
    yield page
    model.key, model.states = "", {"tiny": {"value": "loaded"}}
    model.health = {"status": "ok"}


def roles(model: ScriptedModel) -> list[tuple[str, str]]:
    """The messages of the last request."""
    return [(each["role"], each["content"]) for each in model.requests[-1]["messages"]]


def test_conversations_stay(page: Page) -> None:
    assert page.ask("first question") == "You said: first question"
    page.push("New chat")
    assert page.texts() == []
    page.type("#prompt", "a draft of a new chat")
    page.wait_stored("drafts", lambda draft: draft["text"] == "a draft of a new chat")
    page.click("#conversations li .open")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.run("return document.querySelector('#prompt').value") == ""
    page.type("#prompt", "a draft of the first")
    page.run("localStorage.setItem('chat.seed', '5')")
    page.wait_stored("drafts", lambda draft: draft["text"] == "a draft of the first")
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.text("#title") == "first question"
    assert page.run("return document.querySelector('#prompt').value") == "a draft of the first"
    page.push("New chat")
    page.wait("document.querySelector('#prompt').value === 'a draft of a new chat'")
    assert page.ask("second") == "You said: second"
    assert page.titles() == ["second", "first question"]
    # what is written while a draft is read stays
    page.run(
        "document.querySelector('#new').click(); const p = document.querySelector('#prompt'); p.value = 'quick'; "
        "p.dispatchEvent(new Event('input'))"
    )
    page.wait_stored("drafts", lambda draft: draft["text"] == "quick")
    assert page.run("return document.querySelector('#prompt').value") == "quick"
    page.type("#prompt", "")
    page.run("[...document.querySelectorAll('.open')][0].click()")
    page.wait("document.querySelector('#title').innerText === 'second'")
    # back and forward go through the conversations
    page.run("history.back()")
    page.wait("document.querySelector('#title').innerText === 'New chat'")
    page.run("history.forward()")
    page.wait("document.querySelector('#title').innerText === 'second'")
    assert page.problems() == []


def test_the_end_stays_in_sight(page: Page, tmp_path: Path) -> None:
    """A long message and attachments shrink the part of the page that has the answers."""
    page.ask("say " + "\n\n".join(f"word {n}" for n in range(60)))
    end = "(s => s.scrollHeight - s.scrollTop - s.clientHeight < 2)(document.querySelector('#scroll'))"
    height = "document.querySelector('#scroll').clientHeight"
    page.wait(end)
    for change in (
        lambda: page.type("#prompt", "\n" * 6),
        lambda: page.browser.chosen_file("#file", str(tmp_path / "a.txt")),
    ):
        before = page.run(f"return {height}")
        (tmp_path / "a.txt").write_text("text")
        change()
        page.wait(f"{height} < {before}")
        page.wait(end)
    # one who reads further up stays there
    page.run("document.querySelector('#scroll').scrollTop = 100")
    page.wait_frames()
    page.type("#prompt", "")
    page.wait(f"{height} > {before}")
    assert page.run("return document.querySelector('#scroll').scrollTop") == 100


@pytest.mark.long
def test_rename_search_delete_and_undo(page: Page) -> None:
    for text in ("about whales", "about bees", "about cats"):
        page.push("New chat")
        page.ask(text)
    page.push("Actions of about bees")
    page.push("Rename", "#menu")
    page.run("document.querySelector('#conversations input').value = 'Insects'")
    page.press(ENTER)
    page.wait("document.querySelector('#conversations')?.innerText.includes('Insects')")
    page.type("#search", "BEES")
    page.wait("document.querySelector('#found').innerText === '1 conversation'")
    assert page.titles() == ["Insects"]
    assert "about bees" in page.text("#conversations .hint")
    page.type("#search", "nothing of it")
    page.wait("document.querySelector('#found').innerText === '0 conversations'")
    page.type("#search", "")
    page.wait("document.querySelectorAll('#conversations .open').length === 3")
    page.push("Actions of about cats")
    page.push("Delete", "#menu")
    page.wait("document.querySelectorAll('#conversations .open').length === 2")
    assert page.texts() == [] and "about cats" in page.text("#toast")
    page.push("Undo")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.titles() == ["about cats", "Insects", "about whales"]
    # what stays deleted is gone after a minute
    page.push("Actions of about whales")
    page.push("Delete", "#menu")
    page.wait("document.querySelectorAll('#conversations .open').length === 2")
    page.reload()
    assert len(page.stored("conversations")) == 3
    change = (
        "const c = new m.Conversations(); await c.open(); for (const each of c.records.values()) "
        "if (each.deleted) await c.change(each.id, {deleted: 5});"
    )
    page.module("conversations.js", change)
    page.reload()
    assert {each["title"] for each in page.stored("conversations")} == {"about cats", "Insects"}
    assert len(page.stored("turns")) == 4


@pytest.mark.long
def test_branches(page: Page, model: ScriptedModel) -> None:
    page.ask("one")
    page.push("Again", ".turn:last-child")
    page.wait("document.querySelector('.turn:last-child .branches')?.innerText.includes('2/2')")
    page.answer()
    page.push("Edit", ".turn.user")
    assert page.run("return document.querySelector('#prompt').value") == "one"
    page.press(ESCAPE)
    page.wait("document.querySelector('#prompt').value === ''")
    page.push("Edit", ".turn.user")
    page.type("#prompt", "uno")
    page.press(ENTER)
    page.wait("document.querySelector('.turn.assistant .text')?.innerText.includes('uno')")
    assert page.texts() == ["uno", "You said: uno"]
    assert roles(model) == [("user", "uno")]
    page.ask("more")
    page.push("Earlier version", ".turn.user")
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.texts() == ["one", "You said: one"]
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.push("Later version", ".turn.user")
    page.wait("document.querySelectorAll('.turn').length === 4")
    assert page.texts("user") == ["uno", "more"]
    page.push("Copy", ".turn:last-child .who")
    page.wait("document.querySelector('.turn:last-child .who')?.innerText.includes('Copied')")


def test_stop_with_a_template_whose_roles_alternate(page: Page, model: ScriptedModel) -> None:
    page.send("slow 200")
    page.wait("document.querySelector('.assistant .text')?.innerText.includes('w3')")
    page.press(ESCAPE)
    page.wait("document.querySelector('#stop').hidden")
    (stopped,) = page.texts("assistant")
    assert "Stopped." in page.text(".turn.assistant .extra")
    assert page.ask("next") == "You said: next"
    assert roles(model)[1] == ("assistant", stored_text(page, "slow 200"))
    assert stopped.startswith("w0 w1")
    # an answer without text is no turn, and the next message joins the one before
    page.send("hang")
    page.wait("document.querySelector('.turn:last-child.assistant')")
    page.push("Stop")
    page.wait(
        "document.querySelector('#stop').hidden && !document.querySelector('.turn:last-child.assistant')"
    )
    assert page.ask("after that") == "You said: after that"
    assert roles(model)[-1] == ("user", "hang\n\nafter that")
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 7")
    assert page.texts("user") == ["slow 200", "next", "hang", "after that"]


def stored_text(page: Page, question: str) -> str:
    """The answer to a question, as it is stored."""
    turns = {each["id"]: each for each in page.stored("turns")}
    return next(
        each["content"]
        for each in turns.values()
        if each["parent"] and turns[each["parent"]]["content"] == question
    )


def test_errors_and_going_on(page: Page, model: ScriptedModel) -> None:
    page.send("fail")
    assert "the engine has stopped" in page.wait(
        "document.querySelector('[role=alert]')?.innerText"
    )
    assert page.ask("again please") == "You said: again please"
    model.early = 2  # a model that is not loaded yet is waited for
    assert page.ask("early") == "You said: early" and not model.early
    page.ask("cut")
    assert "Cut here" in page.text(".turn:last-child .extra")
    page.push("Continue")
    page.wait("document.querySelector('.turn:last-child .text')?.innerText.includes('and so on')")
    assert page.answer() == "the begin and so on"
    assert model.requests[-1]["continue_final_message"] is True
    assert roles(model)[-1] == ("assistant", "the begin")


def test_a_reload_in_a_stream(page: Page, model: ScriptedModel) -> None:
    page.send("slow 300")
    page.wait("document.querySelector('.assistant .text')?.innerText.includes('w3')")
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert not page.run("return document.querySelector('#stop').hidden")
    want = " ".join(f"w{number}" for number in range(300))
    # what is shown follows what has come after a while
    page.wait("document.querySelector('.turn:last-child .text')?.innerText.includes('w299')")
    assert page.answer() == want
    assert len(model.requests) == 1
    # one that waits for its first token, and one that is stopped after the reload
    page.send("slow 500")
    page.wait(
        "document.querySelector('.turn:last-child.assistant .text')?.innerText.includes('w3')"
    )
    page.reload()
    page.wait(
        "document.querySelector('.turn:last-child.assistant .text')?.innerText.includes('w9')"
    )
    page.push("Stop")
    page.wait("document.querySelector('#stop').hidden")
    assert "Stopped." in page.text(".turn:last-child .extra")
    assert len(model.requests) == 2
    assert page.problems() == []


@pytest.mark.long
def test_a_stream_that_the_server_has_lost(page: Page, model: ScriptedModel) -> None:
    page.send("slow 500")
    page.wait("document.querySelector('.assistant .text')?.innerText.includes('w3')")
    page.wait_stored("turns", lambda turn: turn["content"].startswith("w0 w1"))
    page.browser.open(f"{page.url}/docs")
    for stream in list(model.streams._streams.values()):
        stream.client = "b"
    model.streams._streams.clear()
    page.open()
    page.click("#conversations .open")
    page.wait(
        "document.querySelector('.turn:last-child .extra')?.innerText.includes('no longer has the rest')"
    )
    assert page.texts("assistant")[0].startswith("w0 w1")


@pytest.mark.long
def test_two_tabs(page: Page, browser: Browser, model: ScriptedModel) -> None:
    page.ask("from the first tab")
    first = browser.tab
    address = page.run("return location.hash")
    second = browser.new_tab()
    page.open(address)
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.send("slow 40")
    page.wait("document.querySelector('.turn:last-child .text')?.innerText.includes('w3')")
    # the first tab shows what the second one writes, and goes on with it when that closes
    browser.tab = first
    page.wait(
        "document.querySelector('.turn:last-child.assistant .text')?.innerText.includes('w9')"
    )
    assert page.texts("user") == ["from the first tab", "slow 40"]
    browser.tab = second
    browser.close_tab(first)
    want = " ".join(f"w{number}" for number in range(40))
    assert page.answer() == want
    assert len(model.requests) == 2
    # messages that are sent side by side are both kept
    second = browser.new_tab()
    page.open(address)
    page.wait("document.querySelectorAll('.turn').length === 4")
    browser.tab = first
    page.run("BroadcastChannel.prototype.postMessage = () => {}")
    page.ask("one of two")
    browser.tab = second
    page.ask("two of two")
    browser.close_tab(first)
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 6")
    page.wait("document.querySelectorAll('.turn')[4].innerText.includes('2/2')")
    assert page.texts("user")[-1] == "two of two"
    page.push("Earlier version", ".turn:nth-child(5)")
    page.wait("document.querySelectorAll('.turn')[4].innerText.includes('one of two')")
    # a conversation that is deleted elsewhere closes
    second = browser.new_tab()
    page.open(address)
    page.push("Actions of from the first tab")
    page.push("Delete", "#menu")
    page.wait("document.querySelectorAll('#conversations .open').length === 0")
    browser.close_tab(first)
    page.wait("document.querySelectorAll('.turn').length === 0")
    assert page.titles() == []


@pytest.mark.long
def test_what_the_older_page_has_stored(page: Page) -> None:
    turns = [
        {"role": "user", "content": "old question"},
        {"role": "assistant", "content": "old **answer**", "reasoning": "old thoughts"},
        {"role": "tool", "content": 5},
    ]
    page.browser.open(f"{page.url}/docs")
    page.run(
        "localStorage.setItem('chat.turns', arguments[0]); localStorage.setItem('chat.temperature', '\"0.5\"'); "
        "localStorage.setItem('chat.theme', '\"dark\"')",
        json.dumps(turns),
    )
    page.open()
    assert page.titles() == ["old question"]
    page.click("#conversations .open")
    page.wait("document.querySelector('.assistant strong')")
    assert page.texts() == ["old question", "old answer"]
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    assert page.run("return document.querySelector('#temperature').value") == "0.5"
    assert page.run("return localStorage.getItem('chat.turns')") is None
    page.reload()
    assert page.titles() == ["old question"]


@pytest.mark.long
def test_settings_key_and_models(page: Page, model: ScriptedModel) -> None:
    model.states = {
        "big": {"value": "unloaded"}, "bad": {"value": "unloaded", "failed": True, "error": "no memory"},
        "tiny": {"value": "loaded"},
    }  # fmt: skip
    model.key = "secret"
    page.run("location.reload()")
    page.wait("document.querySelector('#model-state')?.innerText.includes('API key')")
    page.click("#options")
    page.type("#key", "secret")
    page.wait("document.querySelector('#model').options.length === 3")
    page.type("#temperature", "0.25")
    page.type("#system", "Be brief.")
    page.click("#close-settings")
    page.run("const m = document.querySelector('#model'); m.value = 'bad'; m.onchange()")
    assert page.text("#model-state") == "cannot be loaded: no memory"
    page.run("const m = document.querySelector('#model'); m.value = 'big'; m.onchange()")
    assert "loads with the first message" in page.text("#model-state")
    model.states["big"] = {"value": "loading"}
    model.health = {"status": "ok", "loading": [{"model": "big", "step": "compiling kernels 3/17"}]}
    page.send("hang")
    page.wait("/The model is loading… 1 s/.test(document.querySelector('#state').innerText)")
    page.push("Stop")
    page.wait("/kernels 3.17/.test(document.querySelector('#model-state').innerText)")
    model.states["big"], model.health = {"value": "loaded"}, {"status": "unresponsive"}
    page.wait("document.querySelector('#model-state').innerText === 'The engine is unresponsive.'")
    model.health = {"status": "ok"}
    page.wait("document.querySelector('#model-state').innerText === ''")
    assert model.requests[-1]["model"] == "big" and model.requests[-1]["temperature"] == 0.25
    assert roles(model) == [("system", "Be brief."), ("user", "hang")]
    page.reload()
    assert page.run("return document.querySelector('#model').value") == "big"
    # the key lives as long as the tab, unless it is kept
    assert page.run("return localStorage.getItem('chat.key')") is None
    page.click("#options")
    page.click("#remember")
    assert page.run("return localStorage.getItem('chat.key')") == '"secret"'
    page.click("#remember")
    assert page.run("return localStorage.getItem('chat.key')") is None
    assert page.run("return sessionStorage.getItem('chat.key')") == '"secret"'


@pytest.mark.long
def test_a_server_without_models_says_how_one_is_got(page: Page, model: ScriptedModel) -> None:
    model.states = {}
    page.run("location.reload()")
    told = page.wait("document.querySelector('#model-state')?.innerText")
    (_, name) = told.split(": max pull ")
    assert name.removesuffix(" gets one.") in SHORT_NAMES
    # one that is there now is found when the list is opened
    model.states = {"tiny": {"value": "loaded"}}
    page.run("document.querySelector('#model').dispatchEvent(new Event('focus'))")
    page.wait("document.querySelector('#model').value === 'tiny'")
    assert page.text("#model-state") == "" and page.ask("hello") == "You said: hello"


@pytest.mark.long
def test_attachments(page: Page, model: ScriptedModel, tmp_path: Path) -> None:
    code = tmp_path / "a b.py"
    code.write_bytes("print('ü')\r\n```\n".encode())
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "large.txt").write_text("a" * ((1 << 20) + 1))
    for name, message in (("picture.png", "no text"), ("large.txt", "at most 1 MiB")):
        page.browser.chosen_file("#file", str(tmp_path / name))
        page.wait(f"document.querySelector('#toast')?.innerText.includes('{message}')")
    page.browser.chosen_file("#file", str(code))
    page.wait("document.querySelector('#attachments')?.innerText.includes('a b.py')")
    page.wait_stored("drafts", lambda draft: draft["attachments"])
    page.reload()
    page.wait("document.querySelector('#attachments')?.innerText.includes('a b.py')")
    page.ask("What is it?")
    assert roles(model) == [("user", "File a b.py:\n````py\nprint('ü')\n```\n````\n\nWhat is it?")]
    assert page.run("return document.querySelector('#attachments').hidden")
    assert page.text(".user .attachment summary") == "a b.py"
    page.push("Edit", ".turn.user")
    page.push("Remove a b.py")
    page.press(ENTER)
    page.wait("document.querySelectorAll('.user .attachment').length === 0")
    page.answer()
    assert roles(model) == [("user", "What is it?")]


@pytest.mark.long
def test_export_and_import(page: Page) -> None:
    page.ask("one")
    page.push("Again", ".turn:last-child")
    page.wait("document.querySelector('.turn:last-child .branches')?.innerText.includes('2/2')")
    page.answer()
    export = (
        "const t = await import(folder + 'transfer.js'); const c = new m.Conversations(); await c.open(); "
        "const all = await c.whole(c.list().map((each) => each.id)); "
        "return [t.exportText(all), t.markdownOf(all[0])]"
    )
    text, markdown = page.module("conversations.js", export)
    assert markdown == "# one\n\n## You\n\none\n\n## tiny\n\nYou said: one\n"
    load = (
        "const t = await import(folder + 'transfer.js'); const c = new m.Conversations(); await c.open(); "
        "try { await c.addAll(t.importedOf(arguments_[0], (id) => c.records.has(id))); return c.list().length; } "
        "catch (error) { return error.message; }"
    )
    assert page.module("conversations.js", load, text) == 2
    page.wait("document.querySelectorAll('#conversations .open').length === 2")
    turns = page.stored("turns")
    assert len(turns) == 6 and len({each["id"] for each in turns}) == 6
    page.run("document.querySelector('#conversations li:not(:has([aria-current])) .open').click()")
    page.wait("document.querySelector('.turn:last-child .branches')?.innerText.includes('2/2')")
    for bad, message in (
        ("{", "no JSON"),
        ("[]", "no conversations"),
        ('{"format": "supremum-chat", "version": 9, "conversations": []}', "version 9"),
        ('{"format": "supremum-chat", "version": 1, "conversations": [{"turns": [{"id": 5}]}]}', "Conversation 1"),
        ('{"format": "supremum-chat", "version": 1, "conversations": [null]}', "Conversation 1"),
    ):  # fmt: skip
        assert message in page.module("conversations.js", load, bad)
    # turns that are each other's parents
    loop = {
        "format": "supremum-chat", "version": 1,
        "conversations": [{"id": "x", "title": "<b>loop</b>", "leaf": "a", "turns": [
            {"id": "a", "parent": "b", "role": "user", "content": "a"},
            {"id": "b", "parent": "a", "role": "assistant", "content": "b", "state": "running"},
        ]}],
    }  # fmt: skip
    assert page.module("conversations.js", load, json.dumps(loop)) == 3
    page.wait("document.querySelectorAll('#conversations .open').length === 3")
    page.run(
        "[...document.querySelectorAll('.open')].find(each => each.title === '<b>loop</b>').click()"
    )
    page.wait("document.querySelectorAll('.turn').length === 2")
    assert page.run(
        "return [...document.querySelectorAll('.note')].map(each => each.closest('.turn').className)"
    ) == ["turn assistant"]


@pytest.mark.long
def test_the_keyboard(page: Page) -> None:
    page.ask("one")
    page.push("New chat")
    page.ask("two")
    reached = set()
    page.run("document.querySelector('.skip').focus()")
    for _ in range(24):
        page.press(TAB)
        reached.add(page.run("const a = document.activeElement; return a.id || a.textContent"))
    page_ids = {"new", "search", "model", "options", "theme", "scroll", "attach", "prompt", "send"}
    assert page_ids | {"two", "one", "Edit", "Copy", "Again"} <= reached
    down, up, right, delete, f2 = "\ue015", "\ue013", "\ue014", "\ue017", "\ue032"
    page.run("document.querySelector('#search').focus()")
    page.press(down + down)
    assert page.run("return document.activeElement.textContent") == "one"
    page.press(f2)
    page.press("renamed" + ENTER)
    page.wait("document.querySelector('#conversations')?.innerText.includes('renamed')")
    page.wait("document.activeElement.textContent === 'renamed'")
    page.press(ENTER)
    page.wait("document.querySelector('#title').innerText === 'renamed'")
    page.press(up)
    assert page.run("return document.activeElement.textContent") == "two"
    page.press(right)
    page.wait("document.activeElement.getAttribute('role') === 'menuitem'")
    page.press(down + down + ENTER)
    page.wait("document.querySelectorAll('#conversations .open').length === 1")
    page.wait("document.activeElement.textContent === 'renamed'")
    page.press(delete)
    page.wait("document.querySelectorAll('#conversations .open').length === 0")
    # what screen readers are told
    assert "renamed was deleted" in page.text("#announcer")
    page.run("document.querySelector('#prompt').focus()")
    page.ask("hello")
    assert page.text("#announcer") == "You said: hello"
    unnamed = page.run(
        "return [...document.querySelectorAll('button, input, select, textarea')].filter(each => !each.hidden && "
        "!each.textContent.trim() && !each.ariaLabel && !each.labels?.length).map(each => each.outerHTML)"
    )
    assert unnamed == []


@pytest.mark.long
def test_narrow(page: Page) -> None:
    page.ask("z" * 500)
    wide = "| " + " | ".join("abcdefgh" * 2 for _ in range(9)) + " |"
    rule = "|" + "-|" * 9
    page.ask(
        f"say {wide}\n{rule}\n{wide}\n\n```\n{'x ' * 300}\n```\n{'y' * 900}\n\n$$"
        + "x+" * 80
        + "x$$".replace("\n\n", "\n \n")
    )
    page.browser.size(360, 740)
    page.wait("getComputedStyle(document.querySelector('#sidebar')).visibility === 'hidden'")
    sizes = "return [document.documentElement.scrollWidth, document.querySelector('#scroll').scrollWidth <= 360]"
    assert page.run(sizes) == [360, True]
    seen = (
        "return [...document.querySelectorAll('#page button, #page select, #page textarea')].filter(each => "
        "each.checkVisibility() && !each.closest('.code') && (each.getBoundingClientRect().right > 360 || "
        "each.getBoundingClientRect().left < 0)).map(each => each.outerHTML)"
    )
    assert page.run(seen) == []
    page.click("#open-sidebar")
    page.wait("document.activeElement.id === 'close-sidebar'")
    assert page.run("return document.querySelector('#page').inert")
    page.press(ESCAPE)
    page.wait("document.activeElement.id === 'open-sidebar'")
    page.click("#options")
    assert (
        page.run("return document.querySelector('#settings').getBoundingClientRect().right") <= 360
    )
    assert page.run(sizes)[0] == 360
