"""Tools of MCP servers in the chat page: listed, shown, allowed by the user, bounded."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.serve.browser import ENTER, Browser
from tests.serve.page_driver import Page
from tests.serve.page_server import McpServer, ScriptedModel
from tests.serve.sign_in_server import SignInServer

pytestmark = pytest.mark.any_target


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

    def start(origin: str, *more: Any, **options: Any) -> McpServer:
        servers.append(McpServer(origin, *more, **options))
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
    # the call is drawn before the question has the focus
    page.wait("/wants to call/.test(document.querySelector('#announcer').textContent)")
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
    assert any(re.search("Content.Security.Policy", each) for each in page.problems())
    assert json.loads(page.run("return localStorage.getItem('chat.mcp')"))[0]["url"] == closed.url


def sign_in(page: Page) -> str:
    """Follows the link of the last server, and returns what the page says to which its user comes back."""
    own, before = page.browser.tab, set(page.browser.tabs)
    page.click("#mcp-servers > li:last-child > a")
    for _ in range(600):
        if opened := set(page.browser.tabs) - before:
            break
        time.sleep(0.02)
    (page.browser.tab,) = opened
    page.wait("/signed|failed|waits/i.test(document.querySelector('#result')?.innerText)")
    text = page.text("#result")
    assert page.run("return location.search") == ""
    page.browser.close_tab(own)
    return text


def test_a_sign_in(page: Page, model: ScriptedModel, mcp: Callable[..., McpServer]) -> None:
    provider = SignInServer()
    server = mcp(model.url, sign_in=provider)
    add(page, server.url)
    assert "sign in at 127.0.0.1" in state(page)
    assert "You are signed in" in sign_in(page)
    page.wait("document.querySelector('#mcp-servers details')")
    assert "2 tools" in state(page) and len(provider.clients) == 1
    assert provider.asked[0]["scope"] == "tools:read tools:call"
    # a token that has expired is refreshed, once for requests at the same time
    provider.valid.clear()
    page.click("#close-settings")
    page.send('call time {"zone": "Oslo"} & day {}')
    page.wait("document.querySelectorAll('.decide').length === 2")
    page.push("Call it", ".call:nth-child(1)")
    page.push("Call it", ".call:nth-child(2)")
    page.wait("document.querySelectorAll('.turn').length === 3")
    assert page.answer() == "The tool says: noon in none"
    assert len(server.calls) == 2 and len(provider.refreshes) == 1
    # a reload keeps the tokens, but not after the browser is closed
    page.reload()
    page.click("#options")
    assert "2 tools" in state(page)
    assert not any(t in page.run("return JSON.stringify(localStorage)") for t in provider.valid)
    # without tokens that are valid, the user signs in again; the page is a client as before
    provider.valid.clear()
    provider.refreshes.clear()
    page.push(f"Connect to {server.url} again")
    assert "sign in at" in state(page)
    provider.refuses = True
    assert "The user has refused." in sign_in(page)
    assert "The user has refused." in state(page)
    assert len(provider.clients) == 1
    assert not [each for each in page.problems() if "401" not in each and "400" not in each]


@pytest.mark.long
def test_a_sign_in_without_registration(
    page: Page, model: ScriptedModel, mcp: Callable[..., McpServer]
) -> None:
    provider = SignInServer(registers=False, exposes=False)
    server = mcp(model.url, sign_in=provider)
    add(page, server.url)
    redirect = f"{model.url}/signed-in"
    assert f"redirect address {redirect}" in state(page)
    provider.clients["mine"] = [redirect]
    page.type("#mcp-servers > li input:not([type=checkbox])", "mine")
    page.wait("document.querySelector('#mcp-servers > li > a')")
    assert "You are signed in" in sign_in(page)
    assert provider.asked[0]["scope"] == "tools:read"
    page.push(f"Sign out of {server.url}")
    page.wait("document.querySelector('#mcp-servers > li > a')")
    # the identifier stays; an answer to an older sign-in is no answer
    link = page.run("return document.querySelector('#mcp-servers > li > a').href")
    page.reload()
    own = page.browser.tab
    page.browser.new_tab()
    page.browser.open(link)
    page.wait("/No chat page waits/.test(document.querySelector('#result').innerText)")
    page.browser.close_tab(own)
    page.click("#options")
    page.wait("document.querySelector('#mcp-servers > li > a')")
    provider.issuer_in_answer = "https://other.example"
    assert "not of the server that was asked" in sign_in(page)
    assert provider.valid and not page.run("return sessionStorage.length > 2")


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"code_challenge_methods_supported": ["plain"]}, "does not say that it checks codes"),
        ({"issuer": "https://other.example"}, "are those of https://other.example"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization endpoint is no HTTPS"),
        ({"token_endpoint": "http://192.0.2.1/token"}, "token endpoint is no HTTPS"),
        ({"resource": "https://other.example/mcp"}, "another server"),
        ({"server": "http://192.0.2.1"}, "authorization server is no HTTPS"),
    ],
)
def test_sign_ins_that_are_not_safe(
    page: Page,
    model: ScriptedModel,
    mcp: Callable[..., McpServer],
    changes: dict[str, Any],
    says: str,
) -> None:
    provider = SignInServer()
    provider.changes = changes
    add(page, mcp(model.url, sign_in=provider).url)
    assert says in state(page)
    assert not page.run("return document.querySelector('#mcp-servers a')")
    assert not provider.clients
