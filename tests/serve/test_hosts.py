"""The hosts that a server answers, and the content types of bodies that it reads, over all routes."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import random
import shutil
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from starlette.routing import Route

from max.entrypoints.cli.serve import serve
from max.pipelines.store.local import ModelStore
from max.serve.http import unsupported_routes as later
from max.serve.http.app import build_app
from max.serve.http.connections.hosts import HostGuard, HostRule
from max.serve.http.state import ServerState
from max.serve.metrics import ServerMetrics
from max.serve.models.pool import ModelPool
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.host_names import checked_host, host_of, leads_here
from max.serve.process.settings import ServerSettings
from tests.serve.conftest import TINY, RunningServer

FOREIGN = ["evil.example", "localhost.evil.example", "evil.example:8000", "10.0.0.1", "[2001:db8::1]", "xlocalhost",
           "127.0.0.1.evil.example", "127.0.0.1.nip.io", "[::2]:80", "0x7f.example"]  # fmt: skip
OURS = ["localhost", "LocalHost:8000", "localhost.", "a.localhost:1", "127.0.0.1", "127.1.2.3:99", "[::1]", "[::1]:80",
        "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "0.0.0.0:8000", "[::]"]  # fmt: skip
CHANGING = {"POST", "PUT", "PATCH", "DELETE"}


async def _no_model(_: Any) -> Any:
    raise AssertionError("no model is loaded")


def _application(
    settings: ServerSettings, address: str | None = "127.0.0.1", store: ModelStore | None = None
) -> Any:
    """The application of a server without a model, and its routes in ``.routes``."""
    catalog = (lambda: {model.name: model for model in store.models()}) if store else dict
    pool = ModelPool(catalog, _no_model, PoolLimits())
    rule = None if address is None else HostRule.of(settings, address)
    return build_app(ServerState(settings, ServerMetrics(), pool, store), None, rule)


def _routes(application: Any) -> list[Route]:
    listed: list[Any] = []
    for each in application._app._app._app.routes:
        included = getattr(each, "original_router", None)  # of newer releases of FastAPI
        listed += [each] if included is None else included.routes
    routes = [route for route in listed if isinstance(route, Route)]
    assert len(routes) > 100
    return routes


def _ask(application: Any, *requests: dict[str, Any], **more: Any) -> list[httpx.Response]:
    """The answers to requests; ``host`` of each is its header, or a list of several."""

    async def run() -> list[httpx.Response]:
        async def with_version(scope: Any, receive: Any, send: Any) -> None:
            await application({**scope, **more}, receive, send)

        transport = httpx.ASGITransport(with_version)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            answers = []
            for request in requests:
                hosts = request.pop("host", "localhost")
                built = client.build_request(**request)
                del built.headers["host"]
                given = [hosts] if isinstance(hosts, str) else hosts
                headers = [*built.headers.raw, *((b"Host", host.encode()) for host in given)]
                built.headers = httpx.Headers(headers)
                answers.append(await client.send(built))
            return answers

    return asyncio.run(run())


def test_every_route_refuses_foreign_hosts() -> None:
    draw = random.Random(1)
    application = _application(ServerSettings())
    requests = []
    for route in _routes(application):
        path = route.path.replace("{rest:path}", "a").replace("{", "").replace("}", "")
        for method in sorted({*(route.methods or ()), "OPTIONS", "HEAD", "GET"}):
            host = draw.choice(FOREIGN)
            headers = {"Origin": f"http://{host}", "X-Forwarded-Host": "localhost"}
            requests.append({"method": method, "url": path, "headers": headers, "host": host})
    asked = [(request["method"], request["url"]) for request in requests]
    for what, answer in zip(asked, _ask(application, *requests), strict=True):
        assert answer.status_code == 403, what
        if what[0] != "HEAD":
            error = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert "--allowed-hosts" in message, what
        assert answer.headers["X-Request-Id"]
    assert (
        _ask(application, {"method": "GET", "url": "/nothing", "host": "a"})[0].status_code == 403
    )


def test_a_page_cannot_delete_a_model_by_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(TINY, folder, copy_function=lambda a, b: Path(b).symlink_to(a))
    application = _application(ServerSettings(), store=ModelStore(tmp_path))
    request = {"method": "DELETE", "url": "/api/delete", "json": {"model": "tiny"}}
    evil = {**request, "host": "evil.example", "headers": {"Origin": "http://evil.example"}}
    assert _ask(application, evil)[0].status_code == 403
    assert folder.is_dir()
    assert _ask(application, {**request, "host": "localhost:1"})[0].status_code == 200
    assert not folder.exists()


@pytest.mark.parametrize("path", ["/health", "/api/tags", "/", "/docs", "/nothing", "/v1/models"])
def test_the_number_of_host_headers(path: str) -> None:
    """On every server: a cache or proxy before it may have read the other one."""
    for settings in (ServerSettings(), ServerSettings(api_keys=("a",))):
        application = _application(settings)
        for hosts in (
            [],
            [""],
            ["localhost"] * 2,
            ["a/b"],
            ["localhost, evil"],
            ["[::1"],
            ["u@localhost"],
            ["a b"],
        ):
            (answer,) = _ask(application, {"method": "GET", "url": path, "host": hosts})
            assert answer.status_code == 400, hosts
            assert "Host header" in answer.text, hosts
        # programs that check health in HTTP/1.0 may send none; browsers have no HTTP/1.0
        request = {"method": "GET", "url": path, "host": []}
        (old,) = _ask(application, request, http_version="1.0")
        assert old.status_code not in (400, 403)
        assert (
            _ask(application, {**request, "host": ["a"] * 2}, http_version="1.0")[0].status_code
            == 400
        )


@pytest.mark.parametrize(
    ("settings", "address", "foreign"),
    [
        (ServerSettings(), "127.0.0.1", 403),
        (ServerSettings(), "::1", 403),
        (ServerSettings(), "::ffff:127.0.0.2", 403),
        (ServerSettings(), None, 200),
        (ServerSettings(), "0.0.0.0", 200),
        (ServerSettings(), "::", 200),
        (ServerSettings(), "192.168.1.5", 200),
        (ServerSettings(api_keys=("a",)), "127.0.0.1", 200),
        (ServerSettings(api_keys=("a",), allowed_hosts=("b",)), "0.0.0.0", 403),
        (ServerSettings(allowed_hosts=("b",)), "0.0.0.0", 403),
        (ServerSettings(allowed_hosts=("*",)), "127.0.0.1", 200),
        (ServerSettings(allowed_hosts=("evil.example", "10.0.0.1")), "127.0.0.1", "listed"),
        (ServerSettings(allowed_hosts=(".example",)), "127.0.0.1", "listed"),
        (ServerSettings(host="evil.example"), "127.0.0.1", "listed"),
    ],
)
def test_which_servers_refuse(settings: ServerSettings, address: str | None, foreign: Any) -> None:
    application = _application(settings, address)
    get = {"method": "GET", "url": "/health"}
    for host in OURS:
        assert _ask(application, {**get, "host": host})[0].status_code == 200, host
    for host in FOREIGN:
        listed = host_of(host) in settings.allowed_hosts or host_of(host) == settings.host
        listed |= ".example" in settings.allowed_hosts and host_of(host).endswith(".example")
        expected = (200 if listed else 403) if foreign == "listed" else foreign
        assert _ask(application, {**get, "host": host})[0].status_code == expected, host
    # the address at which a connection arrives is always the server's own
    own = {**get, "host": "10.0.0.1:8000"}
    for server in ("10.0.0.1", "::ffff:10.0.0.1"):
        assert _ask(application, own, server=(server, 8000))[0].status_code == 200


def test_random_addresses() -> None:
    draw = random.Random(2)
    for _ in range(300):
        number = draw.choice([draw.getrandbits(32), (127 << 24) + draw.getrandbits(24)])
        plain = ipaddress.IPv4Address(number)
        mapped = ipaddress.IPv6Address((0xFFFF << 32) + number)
        for text in (str(plain), f"[{mapped}]", f"[{mapped.exploded.upper()}]"):
            host = host_of(text + draw.choice(["", ":", ":0", ":65535"]))
            assert host is not None and leads_here(host) == (number >> 24 == 127 or number == 0)
        other = ipaddress.IPv6Address(draw.getrandbits(128))
        assert not leads_here(host_of(f"[{other}]") or "")
    for text in ("", ":80", "a:b", "[::1]x", "::1", "a#b", "a?b", "a\\b", "[a", "a]", "\tx y"):
        assert host_of(text) is None, text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a.b", ("a.b",)),
        ("A.b., *.C.d ,[::1],10.0.0.1", ("a.b", ".c.d", "::1", "10.0.0.1")),
        (".x.y", (".x.y",)),
        ("*", ("*",)),
        ("bücher.example", ("xn--bcher-kva.example",)),
    ],
)
def test_values_of_the_option(given: str, expected: tuple[str, ...]) -> None:
    assert tuple(checked_host(name) for name in given.split(",")) == expected


@pytest.mark.parametrize(
    "value",
    ["http://a", "a:80", "a/b", "*a", "a.*", "a b", "x@y", "a,http://b", "[::1", "1.2.3.4:5"],
)
def test_values_that_are_no_hosts(value: str) -> None:
    with pytest.raises(click.UsageError, match="is no host; give a name without scheme"):
        serve.make_context("serve", ["--allowed-hosts", value])
    context = serve.make_context("serve", ["--allowed-hosts", "a,B", "--allowed-hosts", "*.c"])
    assert context.params["allowed_hosts"] == ("a", "b", ".c")


def test_the_variable_of_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_SERVE_ALLOWED_HOSTS", "a,b c")
    assert serve.make_context("serve", []).params["allowed_hosts"] == ("a", "b", "c")


def test_bodies_that_a_page_may_send_without_asking() -> None:
    """Over all routes: only JSON is read, which needs a preflight request that the server does not answer."""
    application = _application(ServerSettings())
    absent = {route.path for route in later.router.routes if isinstance(route, Route)}
    ollama = {
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/api/create",
        "/api/copy",
    }
    simple = ["text/plain", "text/plain;charset=UTF-8", "multipart/form-data; boundary=x", None,
              "text/plain; application/json", "application/x-www-form-urlencoded", "application/jsonx",
              "text/plain, application/json"]  # fmt: skip
    signs = [
        {},
        {"Origin": "null"},
        {"Origin": "http://localhost"},
        {"Sec-Fetch-Site": "cross-site"},
    ]
    requests = [
        (route.path, kind, sign, {"method": method, "url": route.path, "content": b'{"model": "a"}',
                                  "headers": {**sign, **({"Content-Type": kind} if kind else {})}})
        for route in _routes(application) for method in sorted(CHANGING & set(route.methods or ()))
        if route.path not in absent for kind in simple for sign in signs
    ]  # fmt: skip
    assert len({path for path, *_ in requests}) > 20
    answers = _ask(application, *(request for *_, request in requests))
    for (path, kind, sign, _), answer in zip(requests, answers, strict=True):
        unmarked = kind in (None, "application/x-www-form-urlencoded") and not sign
        # as Ollama's documentation has it, by programs that are no browsers
        if path in ollama and unmarked:
            assert answer.status_code in (400, 404), path
            continue
        # files of any type, by programs that are no browsers; the digest is none
        if path == "/api/blobs/{digest}" and not sign:
            assert answer.status_code == 400, kind
            continue
        assert answer.status_code == 415, (path, kind, sign)
        wanted = "octet-stream" if path == "/api/blobs/{digest}" else "json"
        assert f"send the header Content-Type: application/{wanted}" in answer.text
        if path.startswith("/api/"):
            assert isinstance(answer.json()["error"], str)
    for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.a+json"):
        request = {"method": "POST", "url": "/api/chat", "content": b'{"model": "a"}'}
        (answer,) = _ask(application, {**request, "headers": {"Content-Type": kind}})
        assert answer.status_code == 404
    both = [("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    for headers in (both, both[::-1]):
        (answer,) = _ask(application, {**request, "headers": headers})
        assert answer.status_code == 415
    # a request that this server lacks says so, whatever its body is
    (answer,) = _ask(
        application, {"method": "POST", "url": "/v1/audio/transcriptions", "files": {"file": b"a"}}
    )
    assert answer.status_code == 501


def test_the_port_of_the_metrics() -> None:
    """Has the guard alone, with the same rule."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x 1"})

    guarded = HostGuard(app, HostRule.of(ServerSettings(), "127.0.0.1"))
    get = {"method": "GET", "url": "/metrics"}
    for host, status in (("localhost:8001", 200), ("evil.example", 403), (["a", "a"], 400)):
        (answer,) = _ask(guarded, {**get, "host": host})
        assert answer.status_code == status


@pytest.fixture
def connection(server: RunningServer) -> Iterator[socket.socket]:
    host, port = server.url.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=60)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /health HTTP/1.1\r\nhOsT:\tlocalhost. \r\n", 200),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"OPTIONS /health HTTP/1.0\r\n", 405),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost\r\n", 403),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nForwarded: host=localhost\r\n", 403),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET http://[::1]:80/health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 403),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", 403),
        (b"GET http://evil.example/health HTTP/1.0\r\n", 403),
        (b"OPTIONS /api/delete HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n"
         b"Access-Control-Request-Method: DELETE\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n", 403),
        (b"GET /health HTTP/1.1\r\nHost: evil.example\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n", 403),
    ],
)  # fmt: skip
def test_requests_on_a_socket(connection: socket.socket, head: bytes, status: int) -> None:
    connection.sendall(head + b"Connection: close\r\n\r\n")
    answer = b""
    while part := connection.recv(4096):
        answer += part
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer
    if status == 403:
        assert "is not answered" in str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"])
    assert b"access-control-allow" not in answer.lower()
