"""Tools of MCP servers in the chat page: listed, shown, allowed by the user, bounded."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator

import pytest

from tests.serve.browser import CHROMIUM, DRIVER, ENTER, Browser
from tests.serve.page_driver import Page
from tests.serve.page_server import McpServer, ScriptedModel

pytestmark = [
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER), reason="chromium and chromedriver are not installed"
    ),
    pytest.mark.any_target,
]


@pytest.fixture(scope="module")
def model() -> Iterator[ScriptedModel]:
    model = ScriptedModel()
    yield model
    model.server.stop()


@pytest.fixture
def page(browser: Browser, model: ScriptedModel) -> Page:
    page = Page(browser, model.url)
    page.clear()
    model.requests.clear()
    return page


@pytest.fixture
def mcp() -> Iterator[Callable[..., McpServer]]:
    """Starts MCP servers."""
    servers: list[McpServer] = []

    def start(origin: str, as_events: bool = False, key: str = "") -> McpServer:
        servers.append(McpServer(origin, as_events, key))
        return servers[-1]

    yield start
    for server in servers:
        server.server.stop()


def add(page: Page, url: str, key: str = "") -> None:
    """Adds a server in the settings."""
    if not page.run("return document.querySelector('#settings').open"):
        page.click("#options")
    page.type("#mcp-key", key)
    page.type("#mcp-url", url)
    page.press(ENTER)


def state(page: Page) -> str:
    """What the settings say of the last server, once it is connected or not."""
    last = "document.querySelector('#mcp-servers > li:last-child')"
    page.wait(f"{last} && !/connecting/.test({last}.innerText)")
    return page.run(f"return {last}.innerText")


@pytest.mark.parametrize("as_events", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_call(
    page: Page, model: ScriptedModel, mcp: Callable[..., McpServer], as_events: bool
) -> None:
    server = mcp(model.url, as_events, key="Bearer k")
    add(page, server.url)
    assert "another authorization" in state(page) and "OAuth" in state(page)
    page.push(f"Remove {server.url}")
    add(page, server.url, "Bearer k")
    assert "clock" in state(page) and "2 tools" in state(page)
    page.click("#close-settings")
    page.send('call time {"zone": "Oslo"}')
    page.wait("document.querySelector('.call .decide')")
    names = [each["function"]["name"] for each in model.requests[0]["tools"]]
    assert names == ["time", "day"]
    assert '"zone": "Oslo"' in page.text(".call") and server.url in page.text(".call")
    assert server.calls == []
    # the focus is on the question, which screen readers are told
    assert page.run("return document.activeElement.textContent") == "Call it"
    assert "wants to call the tool time" in page.text("#announcer")
    page.press(ENTER)
    page.wait("document.querySelectorAll('.turn').length === 3")
    assert page.answer() == "The tool says: noon in Oslo"
    assert server.calls == [{"name": "time", "arguments": {"zone": "Oslo"}}]
    called, result = model.requests[-1]["messages"][-2:]
    assert called["tool_calls"][0]["function"] == {"name": "time", "arguments": '{"zone": "Oslo"}'}
    assert result == {
        "role": "tool",
        "tool_call_id": called["tool_calls"][0]["id"],
        "content": "noon in Oslo",
    }
    assert page.problems() == []
    # the servers are kept, their keys with the others
    page.reload()
    page.click("#options")
    assert "2 tools" in state(page)
    assert page.run("return localStorage.getItem('chat.mcp').includes('Bearer')") is False
    # a session that the server has forgotten is opened again
    server.sessions.clear()
    page.click("#close-settings")
    page.send("call day {}")
    page.wait("document.querySelector('.turn:last-child .decide')")
    page.push("Call it")
    page.wait("document.querySelectorAll('.turn').length === 6")
    assert page.answer() == "The tool says: noon in none"


@pytest.mark.long
def test_calls_are_declined_or_always_allowed(
    page: Page, model: ScriptedModel, mcp: Callable[..., McpServer]
) -> None:
    server = mcp(model.url)
    add(page, server.url)
    state(page)
    page.click("#close-settings")
    page.send('call time {"zone": "bad"} & day {} & gone {}')
    page.wait("document.querySelectorAll('.call .decide').length === 3")
    page.push("Call it", ".call:nth-child(1)")
    page.wait("document.querySelector('.call.failed')")
    page.push("Don't", ".call:nth-child(2)")
    # a reload does not lose the calls that wait
    page.reload()
    page.wait("document.querySelectorAll('.call .decide').length === 1")
    page.push("Call it", ".call:nth-child(3)")
    page.wait("document.querySelectorAll('.turn').length === 3")
    page.answer()
    results = [each["content"] for each in model.requests[-1]["messages"] if each["role"] == "tool"]
    assert results == [
        "noon in bad",
        "The user has declined this call.",
        "Error: There is no tool gone.",
    ]
    assert [each["name"] for each in server.calls] == ["time"]
    page.send("call day {}")
    page.wait("document.querySelector('.turn:last-child .decide')")
    page.push("Always in this conversation")
    page.wait("document.querySelectorAll('.turn').length === 6")
    page.answer()
    page.send("call day {}")
    page.wait("document.querySelectorAll('.turn').length === 9")
    page.answer()
    # in another conversation it asks again
    page.push("New chat")
    page.send("call day {}")
    page.wait("document.querySelector('.turn:last-child .decide')")
    # a message instead of a decision: the call has a result all the same
    page.ask("never mind")
    assert "declined" in page.text(".call") and not page.run(
        "return document.querySelector('.decide')"
    )
    assert [each["role"] for each in model.requests[-1]["messages"]] == [
        "user",
        "assistant",
        "tool",
        "user",
    ]


@pytest.mark.long
def test_rounds_are_bounded(
    page: Page, model: ScriptedModel, mcp: Callable[..., McpServer]
) -> None:
    server = mcp(model.url)
    add(page, server.url)
    state(page)
    page.click("#close-settings")
    model.calls_again = True
    try:
        page.send("call day {}")
        page.wait("document.querySelector('.turn:last-child .decide')")
        page.push("Always in this conversation")
        page.wait(
            "document.querySelector('.turn:last-child .note')?.innerText.includes('called tools 10 times')"
        )
    finally:
        model.calls_again = False
    assert len(server.calls) == 10 and len(model.requests) == 10


@pytest.mark.long
def test_servers_that_cannot_be_used(
    page: Page, model: ScriptedModel, mcp: Callable[..., McpServer]
) -> None:
    add(page, "nonsense")
    page.wait("document.querySelector('#mcp-state').innerText.includes('Give an address')")
    closed = mcp("http://other.example")
    add(page, closed.url)
    text = state(page)
    assert (
        "does not allow this page (CORS)" in text and model.url in text and "Mcp-Session-Id" in text
    )
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    add(page, f"http://127.0.0.1:{port}/mcp")
    assert "cannot be reached" in state(page)
    add(page, f"{model.url}/v1/models")
    assert "status 405" in state(page)
    # the page itself reaches its own server only
    answer = page.browser.run_async(
        "try { await fetch(arguments_[0], {mode: 'no-cors'}); return 'sent'; } catch (error) { return error.name; }",
        closed.url,
    )
    assert answer == "TypeError"
    assert any("Content Security Policy" in each for each in page.problems())
    assert json.loads(page.run("return localStorage.getItem('chat.mcp')"))[0]["url"] == closed.url
