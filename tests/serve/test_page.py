"""The chat page with a model, in Chromium, where it is installed with its driver."""

from __future__ import annotations

import time

import httpx
import pytest

from tests.serve.browser import ESCAPE, Browser
from tests.serve.conftest import RunningServer
from tests.serve.page_driver import Page
from tests.serve.test_other_clients import ANSWER, QUESTION


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Page:
    """The chat page of a greedy user with no conversation."""
    page = Page(browser, server.url, wait_s=120.0)
    page.clear()
    page.click("#options")
    page.type("#temperature", "0")
    page.click("#close-settings")
    return page


def test_a_conversation(page: Page) -> None:
    assert page.ask(QUESTION) == ANSWER
    page.wait("/8 tokens, first after/.test(document.querySelector('#state').innerText)")
    used = page.text("#context-text")
    assert used.endswith("of 512 tokens") and 8 < int(used.split()[0]) < 100
    page.push("Edit", ".turn.user")
    assert page.run("return document.querySelector('#prompt').value") == QUESTION
    page.send(QUESTION.replace("Norway", "Japan"))
    assert "Tokyo" in page.answer()
    assert page.problems() == []


def test_stops_cuts_and_errors(page: Page, http: httpx.Client) -> None:
    page.run("localStorage.setItem('chat.max_tokens', '3')")
    page.send(QUESTION)
    page.wait("document.querySelector('.turn:last-child .extra')?.innerText.includes('Cut here')")
    page.run("localStorage.setItem('chat.max_tokens', '40')")
    page.push("Continue")
    page.wait(f"document.querySelector('.assistant .text').textContent.trim() === {ANSWER!r}")
    page.run("localStorage.setItem('chat.top_p', '7')")
    page.push("Again", ".turn:last-child")
    assert "top_p is 7" in page.wait("document.querySelector('[role=alert]')?.innerText")
    page.run("localStorage.removeItem('chat.top_p')")
    # the server stops with the page
    page.run(
        "localStorage.setItem('chat.max_tokens', '400'); localStorage.setItem('chat.temperature', '2')"
    )
    page.send("Tell me all that you know.")
    page.wait("!document.querySelector('#stop').hidden")
    page.press(ESCAPE)
    page.wait("document.querySelector('#stop').hidden")
    # on a busy machine the server may see the closed connection later than the page
    end = time.monotonic() + 60
    while http.get("/load").json()["server_load"] and time.monotonic() < end:
        time.sleep(0.05)
    assert http.get("/load").json()["server_load"] == 0


def test_a_reload_in_a_stream(page: Page, http: httpx.Client) -> None:
    page.run(
        "localStorage.setItem('chat.max_tokens', '400'); localStorage.setItem('chat.temperature', '2')"
    )
    page.send("Tell me all that you know.")
    page.wait("document.querySelector('.assistant .text')?.textContent.length > 5")
    page.reload()
    page.wait("document.querySelectorAll('.turn').length === 2")
    page.answer()
    (turn,) = [each for each in page.stored("turns") if each["role"] == "assistant"]
    assert turn["state"] in ("done", "cut") and turn["usage"]["answer"] > 5
    sent = http.get(f"/v1/streams/{turn['stream']}").text
    assert sent.count('"content"') >= 5
