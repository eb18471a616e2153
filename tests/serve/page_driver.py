"""What a user of the chat page does and sees, in Chromium."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from tests.serve.browser import ENTER, Browser

TYPE = """
const field = document.querySelector(arguments[0]);
field.focus();
field.value = arguments[1];
field.dispatchEvent(new Event('input', {bubbles: true}));
field.dispatchEvent(new Event('change', {bubbles: true}));
"""
READY = "document.documentElement?.dataset.ready !== undefined && document.querySelector('#model').value"
CLEAR = """
localStorage.clear(); sessionStorage.clear();
await new Promise((resolve, reject) => {
  const request = indexedDB.deleteDatabase('chat');
  request.onsuccess = resolve; request.onerror = request.onblocked = reject;
});
"""


class Page:
    """The chat page of a server.

    Args:
        browser: The browser.
        url: The address of the server.
        wait_s: The seconds for which something is waited for.
    """

    def __init__(self, browser: Browser, url: str, wait_s: float = 30.0) -> None:
        self.browser, self.url = browser, url
        browser.wait_s = wait_s
        self.run, self.wait, self.press, self.click = (
            browser.run, browser.wait, browser.press, browser.click,
        )  # fmt: skip

    def clear(self) -> None:
        """Forgets all that the browser knows of the server, and opens the page."""
        # a page that has no database open comes between
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}/docs")
        self.browser.run_async(CLEAR)
        self.browser.size(1100, 800)
        self.browser.colors("light")
        self.open()
        self.browser.log()

    def open(self, query: str = "") -> None:
        """Opens the page.

        Args:
            query: The end of the address.
        """
        self.browser.open("about:blank")
        self.browser.open(f"{self.url}/{query}")
        self.wait(READY)

    def reload(self) -> None:
        """Loads the page again."""
        self.run("document.documentElement.dataset.old = ''; location.reload()")
        self.wait(f"document.documentElement?.dataset.old === undefined && {READY}")

    def type(self, selector: str, text: str) -> None:
        """Writes into a field.

        Args:
            selector: Names the field, in CSS.
            text: Its text.
        """
        self.run(TYPE, selector, text)

    def send(self, text: str) -> None:
        """Sends a message.

        Args:
            text: The message.
        """
        self.type("#prompt", text)
        self.press(ENTER)
        self.wait("document.querySelector('#prompt').value === ''")

    def ask(self, text: str) -> str:
        """Sends a message, and returns the answer as it is shown.

        Args:
            text: The message.
        """
        self.send(text)
        return self.answer()

    def answer(self) -> str:
        """The last answer, when it is complete."""
        self.wait(
            "document.querySelector('#stop').hidden && document.querySelector('.turn:last-child.assistant .block, "
            ".turn:last-child.assistant .extra *')"
        )
        # the text as it was before it is drawn, and the last words of one that is still being drawn
        self.wait(
            "!document.querySelector('.turn:last-child.assistant .text:is([aria-busy], :has(> .plain))')"
        )
        return self.texts("assistant")[-1]

    def texts(self, kind: str = "") -> list[str]:
        """The texts of the turns.

        Args:
            kind: ``user`` or ``assistant``; both if not given.
        """
        script = (
            "return [...document.querySelectorAll(`.turn${arguments[0]} > .text`)]"
            ".map(each => each.textContent.trim())"
        )
        return self.run(script, f".{kind}" if kind else "")

    def titles(self) -> list[str]:
        """The names in the list of conversations."""
        return self.run(
            "return [...document.querySelectorAll('#conversations .open')].map(each => each.firstChild.textContent)"
        )

    def text(self, selector: str) -> str:
        """The text of an element.

        Args:
            selector: Names it, in CSS.
        """
        return self.run("return document.querySelector(arguments[0]).innerText", selector)

    def push(self, label: str, within: str = "body") -> None:
        """Uses a button.

        Args:
            label: Its text, or its label.
            within: Names an element around it, in CSS.
        """
        script = (
            "const found = [...document.querySelector(arguments[1]).querySelectorAll('button')].filter(each => "
            "each.textContent === arguments[0] || each.ariaLabel === arguments[0]); "
            "found.at(-1)?.click(); return found.length"
        )
        assert self.run(script, label, within), f"{within} has no button {label}"

    def module(self, name: str, body: str, *arguments: Any) -> Any:
        """Runs a function on a module of the page.

        Args:
            name: Its file.
            body: The function's body; the module is ``m``.
            *arguments: Its arguments, ``arguments_``.
        """
        start = (
            "const folder = document.querySelector('script[src*=\"chat/main.js\"]').src.replace('main.js', ''); "
            f"const m = await import(folder + {json.dumps(name)}); "
        )
        return self.browser.run_async(start + body, *arguments)

    def stored(self, store: str) -> list[dict[str, Any]]:
        """The records of the browser's database.

        Args:
            store: Their store.
        """
        return self.browser.run_async(
            "return new Promise((resolve) => { const request = indexedDB.open('chat'); request.onsuccess = () => { "
            "const all = request.result.transaction(arguments_[0]).objectStore(arguments_[0]).getAll(); "
            "all.onsuccess = () => { request.result.close(); resolve(all.result); }; }; });",
            store,
        )

    def wait_stored(self, store: str, fits: Callable[[dict[str, Any]], object]) -> None:
        """Waits until the browser's database has a record.

        Args:
            store: Its store.
            fits: Whether a record is the one.
        """
        end = time.monotonic() + self.browser.wait_s
        while not any(map(fits, records := self.stored(store))):
            assert time.monotonic() < end, f"{store} has only {records}"
            time.sleep(0.02)

    def wait_frames(self) -> None:
        """Waits until the page has handled what moved it, and is drawn."""
        self.browser.run_async(
            "await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def problems(self) -> list[str]:
        """The errors and warnings of the browser's console since the last call."""
        return [each for each in self.browser.log() if "Password field" not in each]
