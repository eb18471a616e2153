"""API keys, tenants and salts share no cached prefixes: neither in memory nor in a folder of prefixes."""

from __future__ import annotations

import asyncio
import random
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from max.interfaces import RequestID
from max.pipelines.core.context import TextContext
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.encoder_messages import EncodeRequest
from max.pipelines.kv_cache import salts
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.salts import KEY_FILE, NO_SALT, salt_key_of
from max.serve.batch import call
from max.serve.http import prefix_epochs
from max.serve.http.middleware import Gate
from max.serve.http.prefix_epochs import PrefixEpochs
from max.serve.metrics import ServerMetrics
from max.serve.models.model import ServedModel
from max.serve.process.settings import ServerSettings
from max.serve.requests.request_context import CURRENT_REQUEST, RequestContext, current_request
from max.serve.worker.subscription import prompt_of
from tests.serve.conftest import TINY, RunningServer

PAGE = 16


def _prompt(draw: random.Random) -> str:
    return " ".join(draw.choice(["Oslo", "Bergen", "Tromso", "a", "the"]) for _ in range(90))


def _cached(http: httpx.Client, path: str, prompt: str, key: str = "", **more: Any) -> int:
    """The tokens of a prompt that the server had in its cache, as the answer tells."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= {"X-Tenant-Id": tenant} if (tenant := more.pop("tenant", None)) else {}
    body: dict[str, Any] = {"temperature": 0, **more}
    message = [{"role": "user", "content": prompt}]
    body |= {
        "/v1/completions": {"prompt": prompt, "max_tokens": 2},
        "/v1/chat/completions": {"messages": message, "max_tokens": 2},
        "/v1/responses": {"input": prompt, "max_output_tokens": 2},
        "/v1/messages": {"messages": message, "max_tokens": 2},
    }[path]
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return usage["cache_read_input_tokens"]
    details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    return details["cached_tokens"]


@contextmanager
def _running(start: Callable[..., RunningServer], *options: str) -> Iterator[httpx.Client]:
    server = start(
        "--model", str(TINY), "--max-length", "512", "--quantization-encoding", "float32",
        "--kv-cache-page-size", str(PAGE), *options,
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client
    assert server.stop() == 0


def test_keys_tenants_and_salts_of_a_server(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    draw = random.Random(3)
    options = ("--api-key", "first", "--api-key", "second", "--kv-cache-folder", str(tmp_path))
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    prompts = {path: _prompt(draw) for path in paths}
    with _running(start_server, *options) as http:
        for path, prompt in prompts.items():
            assert _cached(http, path, prompt, "first") < 3 * PAGE, path
            assert _cached(http, path, prompt, "first") > 5 * PAGE, path
            first = _cached(http, path, prompt, "second")
            # the second key may have the begin of the template from its own earlier requests
            assert first < 3 * PAGE, path
            assert _cached(http, path, prompt, "second") > 5 * PAGE, path
            for more in ({"tenant": "a"}, {"tenant": "b"}, {"cache_salt": "a"}, {"cache_salt": "b"},
                         {"cache_salt": "a", "tenant": "a"}):  # fmt: skip
                assert _cached(http, path, prompt, "first", **more) < 3 * PAGE, (path, more)
                assert _cached(http, path, prompt, "first", **more) > 5 * PAGE, (path, more)
        # the second key drops its own prefixes, and none of another key or tenant
        reset = http.post("/reset_prefix_cache", headers={"Authorization": "Bearer second"})
        assert reset.status_code == 200
        path = "/v1/completions"
        for _ in range(2):
            assert _cached(http, path, prompts[path], "first") > 5 * PAGE
            assert _cached(http, path, prompts[path], "first", tenant="a") > 5 * PAGE
        assert _cached(http, path, prompts[path], "second") == 0
        assert _cached(http, path, prompts[path], "second") > 5 * PAGE
        for salt in ("", 1, ["a"]):
            wrong = http.post(
                "/v1/completions", json={"prompt": "a", "cache_salt": salt}, headers={"X-Api-Key": "first"}
            )  # fmt: skip
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "cache_salt"
    names = [path.name for path in tmp_path.iterdir()]
    assert KEY_FILE in names and len(names) > 1
    for path in tmp_path.iterdir():
        assert b"first" not in path.read_bytes()
    with _running(start_server, *options) as http:
        path = "/v1/completions"
        assert _cached(http, path, prompts[path], "first") > 5 * PAGE
        assert _cached(http, path, prompts[path], "first", cache_salt="a") > 5 * PAGE
        assert _cached(http, path, prompts[path], "first", cache_salt="c") == 0


def test_a_server_without_keys_shares(http: httpx.Client) -> None:
    prompt = _prompt(random.Random(4)) * 2
    path = "/v1/completions"
    assert _cached(http, path, prompt) == 0
    assert _cached(http, path, prompt) > 100
    assert _cached(http, path, prompt, "any") > 100
    assert _cached(http, path, prompt, cache_salt="a") == 0
    assert _cached(http, path, prompt, cache_salt="a") > 100
    assert _cached(http, path, prompt, tenant="a") == 0
    stream = {"prompt": prompt, "stream": True, "max_tokens": 1, "n": 3, "temperature": 0,
              "stream_options": {"include_usage": True}}  # fmt: skip
    lines = http.post(path, json=stream).text.split("\n\n")
    assert '"cached_tokens":' in lines[-3] and '"cached_tokens":0' not in lines[-3]


def test_what_tells_prefixes_apart() -> None:
    """Over keys, tenants and ``cache_salt``: equal salts for equal ones only."""
    seen: list[RequestContext] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current_request())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    def salts(settings: ServerSettings, *headers: tuple[str, str]) -> str:
        async def with_headers(scope: Any, receive: Any, send: Any) -> None:
            more = [(name.lower().encode(), value.encode()) for name, value in headers]
            scope = {**scope, "headers": [*scope["headers"], *more]}
            await Gate(app, settings, ServerMetrics())(scope, receive, send)

        status, *_ = asyncio.run(call(with_headers, "/v1/completions", {}))
        assert status == 200
        return seen[-1].prefix_salt

    keyed = ServerSettings(api_keys=("a", "b", "X-Tenant-Id"))
    keys = [("Authorization", f"Bearer {key}") for key in keyed.api_keys]
    tenants = [(), (("X-Tenant-Id", "a"),), (("X-Tenant-Id", "b"),), (("X-Tenant-Id", "a, b"),),
               (("X-Tenant-Id", "a"), ("X-Tenant-Id", "b"))]  # fmt: skip
    all_salts = [salts(keyed, key, *tenant) for key in keys for tenant in tenants]
    assert len(set(all_salts)) == len(all_salts) and all(len(salt) == 64 for salt in all_salts)
    assert salts(keyed, keys[0]) == salts(keyed, ("X-Api-Key", "a")) == all_salts[0]
    shared = ServerSettings(api_keys=("a", "b"), share_prefixes=True)
    assert {salts(shared, key, *tenant) for key in keys[:2] for tenant in tenants} == {""}
    keyless = ServerSettings(tenant_header="X-Other")
    assert salts(keyless) == salts(keyless, keys[0], *tenants[1]) == ""
    assert salts(keyless, ("x-OTHER", "a")) not in ("", *all_salts)
    for tenant in ("", "a"):
        unsalted = RequestContext(tenant=tenant).prefix_salt
        salted = [
            RequestContext(tenant=tenant, cache_salt=salt).prefix_salt
            for salt in ("", "a", "\ud800")
        ]
        assert len({unsalted, *salted}) == 4


def test_a_prompt_of_several_sequences_counts_once() -> None:
    context = RequestContext()
    context.cached_by_request = {"a-0": (1, 32), "a-1": (1, 48), "b": (2, 16)}
    assert context.cached_tokens == 48


def test_the_size_of_a_prompt() -> None:
    """Tokens count themselves; of texts, four characters are about one."""
    tokens, salt, size = prompt_of(GenerationRequest("r", (1, 2), 9, generated_tokens=(3,)))
    assert (tokens, salt, size) == ((1, 2, 3), NO_SALT, 0)
    assert prompt_of(EncodeRequest("r", ("a" * 61, "b" * 60))) == ((), NO_SALT, 30)


def test_the_router_tells_adapters_and_scales_apart() -> None:
    """Requests share a replica's pages where adapter, scale and salt are equal."""
    ways = [("", 1.0, ""), ("a", 1.0, ""), ("a", 0.5, ""), ("b", 1.0, ""), ("a", 1.0, "s")]
    found = {
        prompt_of(GenerationRequest("r", (1, 2), 9, adapter=name, adapter_scale=scale, cache_salt=salt))[1]
        for name, scale, salt in ways
    }  # fmt: skip
    assert len(found) == len(ways)


@pytest.mark.parametrize("seed", range(3))
def test_random_requests_reuse_only_pages_of_their_salt(seed: int) -> None:
    draw = random.Random(seed)
    cache = RequestPages(PageManager(400, 4, True))
    other = RequestPages(PageManager(400, 4, True))
    read: dict[str, set[tuple[int, ...]]] = {}
    for _ in range(150):
        salt = draw.choice(["", "a", "b", "ab", "\ud800", "a" * 200])
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 24))]
        context = TextContext(
            request_id=RequestID(), tokens=np.array(tokens), max_length=40, cache_salt=salt
        )
        cache.claim(context.request_id)
        known = read.setdefault(salt, set())
        ends = [end for end in range(4, len(tokens), 4) if tuple(tokens[:end]) in known]
        assert cache.reuse_prefix(context) == max(ends, default=0)
        cache.alloc(context)
        context.update(0)
        cache.step([context])
        known |= {tuple(tokens[:end]) for end in range(4, len(tokens) + 1, 4)}
        # another cache has other hashes, unless it has the same key
        digest = cache._salt(context)
        assert (other._salt(context) == digest) == (salt == "")
        other_key, other.salt_key = other.salt_key, cache.salt_key
        assert other._salt(context) == digest
        other.salt_key = other_key
        cache.release(context.request_id)
    cache.pages.check()


def test_the_key_of_a_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    folder = tmp_path / "new"
    key = salt_key_of(folder)
    assert len(key) == 32 and salt_key_of(folder) == key
    cache = RequestPages(PageManager(4, 4, True))
    cache.salt_folder = folder
    assert cache.salt_key == key
    assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == [KEY_FILE]
    for damaged in (b"", b"short", key + b"x"):
        (folder / KEY_FILE).write_bytes(damaged)
        fresh = salt_key_of(folder)
        assert fresh not in (key, damaged) and salt_key_of(folder) == fresh
    assert salt_key_of(tmp_path / "other") != fresh
    # another process writes its key first
    raced = tmp_path / "raced"
    write = salts._write
    monkeypatch.setattr(
        salts, "_write", lambda path, _: (write(path, b"o" * 32), write(path, b"n" * 32))
    )
    assert salt_key_of(raced) == b"o" * 32
    assert not caplog.records
    (tmp_path / "file").write_text("")
    assert len({salt_key_of(tmp_path / "file"), salt_key_of(tmp_path / "file")}) == 2
    assert "are not kept" in caplog.text


def test_each_reset_of_a_tenant_changes_its_salt_and_no_other() -> None:
    epochs, draw, seen = PrefixEpochs(), random.Random(7), set[str]()
    tenants = [str(n) for n in range(5)]

    def salts() -> dict[str, str]:
        return {
            name: RequestContext(tenant=name, prefix_epoch=epochs.of(name)).prefix_salt
            for name in tenants
        }

    before = salts()
    for _ in range(60):
        seen |= set(before.values())
        name = draw.choice(tenants)
        epochs.drop(name)
        after = salts()
        assert {n for n in tenants if after[n] != before[n]} == {name} and after[name] not in seen
        before = after


def test_very_many_tenants_that_drop_their_prefixes_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix_epochs, "_MOST_TENANTS", 50)
    epochs, seen = PrefixEpochs(), dict[str, int]()
    for n in range(500):
        name = str(n % 173)
        before = epochs.of(name)
        assert before >= seen.get(name, 0)
        epochs.drop(name)
        assert epochs.of(name) > before and len(epochs._epochs) <= 50
        seen[name] = epochs.of(name)


def test_known_parts_of_chats_are_shared_as_pages_are() -> None:
    """Requests that share no cached pages share no remembered parts: the tokenizer's time tells nothing of others."""

    class Tokenizer:
        salts: ClassVar[list[str]] = []

        async def encode_ids(self, text: str, special: bool, salt: str) -> list[int]:
            assert text == "<|a|>the" and not special
            self.salts.append(salt)
            return [7]

    model: Any = SimpleNamespace(check_text=lambda *_: None, tokenizer=Tokenizer())
    contexts = [
        RequestContext(),
        *(RequestContext(tenant=name, prefix_epoch=epoch) for name in "ab" for epoch in (0, 1)),
        RequestContext(cache_salt="a"),
    ]
    for context in contexts:
        token = CURRENT_REQUEST.set(context)
        try:
            assert asyncio.run(ServedModel.encode_template(model, "<|a|>the")) == [7]
        finally:
            CURRENT_REQUEST.reset(token)
    assert Tokenizer.salts == [context.prefix_salt for context in contexts]
    assert len(set(Tokenizer.salts)) == len(contexts)
