"""Commands that ask a server: the key that they send, and the address that they take."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from click.testing import CliRunner

from max.entrypoints.cli import cli

_ANSWERS = {
    "/v1/models": {"data": [{"id": "tiny"}]},
    "/cluster": {"nodes": [], "models": []},
}
_COMMANDS = [["ps"], ["cluster", "status"]]


@pytest.fixture
def server() -> Iterator[tuple[str, list[str | None]]]:
    """The address of a server, and the headers of the requests to it."""
    headers: list[str | None] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers.append(self.headers["Authorization"])
            body = json.dumps(_ANSWERS.get(self.path, {})).encode()
            self.send_response(200 if self.path in _ANSWERS else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_port}", headers
    listener.shutdown()
    thread.join()
    listener.server_close()


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize(
    ("variable", "option", "sent"),
    [
        ("one two", None, "Bearer one"),
        ("one,two", None, "Bearer one,two"),
        ("one two", "three four", "Bearer three four"),
        (" ", None, None),
        (None, None, None),
    ],
)
def test_the_first_key_of_the_variable_is_sent(
    server: tuple[str, list[str | None]],
    command: list[str],
    variable: str | None,
    option: str | None,
    sent: str | None,
):
    url, headers = server
    words = [*command, "--url", url, *(["--api-key", option] if option else [])]
    result = CliRunner().invoke(cli, words, env={"MAX_SERVE_API_KEY": variable})
    assert result.exit_code == 0, result.output
    assert headers == [sent]


@pytest.mark.parametrize("command", _COMMANDS)
@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(
    server: tuple[str, list[str | None]], command: list[str], end: str
):
    url, headers = server
    result = CliRunner().invoke(cli, [*command, "--url", url + end])
    assert result.exit_code == 0, result.output
    assert len(headers) == 1
