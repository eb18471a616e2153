"""Requests of clients: no field replaces arguments of the server, no tensor is taken, and keys guard every route.

CVE-2025-62426 (vLLM: `chat_template_kwargs`), CVE-2025-61620 (vLLM: templates of requests), CVE-2025-62164 (vLLM:
`prompt_embeds`), CVE-2026-21869 (llama.cpp: negative numbers), CVE-2025-48956 (vLLM: huge headers), CVE-2025-25183
(vLLM: collisions of hashes of prompts). tests/serve/test_prefix_salts.py has CVE-2025-46570 (pages of other keys),
tests/serve/test_hosts.py foreign hosts.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import random
import socket
import subprocess
import sys
from typing import Any

import httpx
import numpy as np
import pytest

from max.serve.http.middleware import is_open
from max.serve.process.settings import ServerSettings
from tests.serve.conftest import RunningServer, http, server, start_server  # noqa: F401
from tests.serve.test_hosts import _application, _ask, _routes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BOMB = "{{ 'a' * 10 ** 9 }}{% for i in range(10 ** 9) %}{% endfor %}"
NUMBERS = (
    -1,
    -2,
    -99,
    -(2**31),
    -(2**31) - 1,
    -(2**63),
    -(2**63) - 1,
    -(2**70),
    -0.5,
    -1e308,
    2**63,
    2**70,
    1e308,
)
FIELDS = {
    CHAT: (
        "max_tokens",
        "max_completion_tokens",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "top_logprobs",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "min_tokens",
        "n_discard",
        "n_keep",
        "n_predict",
        "priority",
        "truncate_prompt_tokens",
        "prompt_logprobs",
        "thinking_token_budget",
        "stop_token_ids",
    ),
    COMPLETIONS: (
        "max_tokens",
        "n",
        "best_of",
        "logprobs",
        "top_k",
        "seed",
        "temperature",
        "n_discard",
        "suffix",
        "min_tokens",
    ),
    "/infill": (
        "n_predict",
        "n_discard",
        "top_k",
        "seed",
        "temperature",
        "n_probs",
        "id_slot",
        "n_keep",
    ),
    "/api/generate": ("keep_alive",),
    "/tokenize": ("max_length",),
    "/detokenize": ("tokens",),
    "/v1/embeddings": ("dimensions",),
    "/v1/messages": ("max_tokens", "top_k", "temperature"),
}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
    "/api/generate": {
        "model": "tiny",
        "prompt": "a",
        "stream": False,
        "options": {"num_predict": 1},
    },
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
}


def refused(answer: httpx.Response) -> str:
    assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:300])
    error = answer.json()["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "conversation", "tools"])
def test_arguments_of_the_rendering(http: httpx.Client, name: str) -> None:  # noqa: F811
    """CVE-2025-62426."""
    for route in (CHAT, "/apply-template", "/tokenize"):
        body = {"messages": MESSAGES, "chat_template_kwargs": {name: BOMB}, "max_tokens": 1}
        assert name in refused(http.post(route, json=body))


def test_templates_of_requests(http: httpx.Client) -> None:  # noqa: F811
    """CVE-2025-61620."""
    for route, body in BODIES.items():
        if "messages" in body:
            answer = http.post(route, json={**body, "chat_template": BOMB})
            assert 400 <= answer.status_code < 500 or "a" * 99 not in answer.text
    hostile = [{"role": "user", "content": BOMB}]
    text = http.post("/apply-template", json={"messages": hostile}).text
    assert "10 ** 9" in text and len(text) < 2000
    values = {"enable_thinking": BOMB, "x": {"y": [BOMB]}}
    assert http.post(CHAT, json={**BODIES[CHAT], "chat_template_kwargs": values}).status_code == 200


class Call:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_tensors_and_objects(http: httpx.Client) -> None:  # noqa: F811
    """CVE-2025-62164."""
    draw = random.Random(0)
    for _ in range(20):
        data = draw.choice(
            [
                draw.randbytes(64),
                pickle.dumps(Call()),
                b"PK\x03\x04" + draw.randbytes(64),
                b"\x93NUMPY\x01\x00" + bytes(64),
            ]
        )
        text = base64.b64encode(data).decode()
        part = draw.choice(
            [
                {"type": "image_embeds", "image_embeds": text},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
                {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}},
                {"type": "tensor", "tensor": text},
            ]
        )
        refused(
            http.post(
                CHAT, json={**BODIES[CHAT], "messages": [{"role": "user", "content": [part]}]}
            )
        )
        refused(http.post(COMPLETIONS, json={"prompt_embeds": text, "max_tokens": 1}))
        for kind in (
            "application/python-pickle",
            "application/octet-stream",
            "application/x-msgpack",
        ):
            refused(http.post(CHAT, content=data, headers={"Content-Type": kind}))


def test_negative_numbers_and_numbers_beyond_64_bits(http: httpx.Client) -> None:  # noqa: F811
    """CVE-2026-21869."""
    draw = random.Random(1)
    for _ in range(120):
        route = draw.choice([*FIELDS, CHAT, COMPLETIONS])
        number = draw.choice(NUMBERS)
        field = draw.choice(FIELDS[route])
        body = {
            **BODIES[route],
            field: [number] if field in ("tokens", "stop_token_ids") else number,
        }
        if route == "/api/generate":
            name = draw.choice(
                ["num_predict", "top_k", "seed", "num_ctx", "repeat_last_n", "num_keep"]
            )
            body = {**body, "options": {"num_predict": 1, name: number}}
        answer = http.post(route, json=body)
        assert answer.status_code == 200 or refused(answer), (route, field, number)
    assert http.get("/health").status_code == 200


def test_huge_headers(server: RunningServer) -> None:  # noqa: F811
    """CVE-2025-48956."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    many = b"".join(b"X-%d: %s\r\n" % (i, b"a" * 100) for i in range(20_000))
    key = b"Authorization: Bearer " + b"a" * 200_000 + b"\r\n"
    for headers in (b"X-A: " + b"a" * 1_000_000 + b"\r\n", many, key, b"X-A\r\n" * 100_000):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            with contextlib.suppress(OSError):  # the answer may come before the end
                connection.sendall(
                    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n"
                )
            assert connection.recv(16).split()[1:2] in ([b"431"], [b"400"])
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_keys_guard_every_route() -> None:
    """Of any prefix, for any method, with keys that are missing, wrong, empty, near or huge."""
    application = _application(ServerSettings(api_keys=("secret", "x" * 64)))
    draw, requests = random.Random(2), []
    for route in _routes(application):
        path = route.path.replace("{rest:path}", "a").replace("{", "").replace("}", "")
        for method in sorted(route.methods or ()):
            key = draw.choice(["", "secre", "secret2", "SECRET", "é", "x" * 5000, "None", "sk-"])
            header = draw.choice(
                [
                    {},
                    {"Authorization": f"Bearer {key}".encode()},
                    {"X-Api-Key": key.encode()},
                    {"Authorization": key.encode()},
                    {"Authorization": b"Basic c2VjcmV0"},
                ]
            )
            # a browser asks first, without a key
            if not is_open(path) and method != "OPTIONS":
                requests.append({"method": method, "url": path, "headers": header})
    paths = [(request["method"], request["url"]) for request in requests]
    assert any(not path.startswith("/v1") for _, path in paths)
    for what, answer in zip(paths, _ask(application, *requests), strict=True):
        assert answer.status_code == 401, what
    variants = [
        "//v1/models",
        "/v1//models",
        "/V1/models",
        "/v1/models/",
        "/./v1/models",
        "/v1/models;a",
        "/health/../v1/models",
        "/metrics",
    ]
    for answer in _ask(
        application, *({"method": "GET", "url": f"http://127.0.0.1{path}"} for path in variants)
    ):
        assert answer.status_code == 401, answer.url
    (good,) = _ask(
        application,
        {"method": "GET", "url": "/v1/models", "headers": {"Authorization": "Bearer secret"}},
    )
    assert good.status_code == 200


HASHES = """
import numpy as np
from max.pipelines.kv_cache.page_tables import page_hash_of
for row in np.random.default_rng(0).integers(-2, 3, (2000, 4)):
    for parent in (b"", b"a" * 16):
        print(page_hash_of(parent, row, 0, 4).hex(), row.tolist(), parent)
"""


def test_hashes_of_prompts() -> None:
    """CVE-2025-25183: Python's hash of -1 is that of -2, and that of None is known."""
    lines = subprocess.run(
        [sys.executable, "-c", HASHES], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    by_hash: dict[str, set[str]] = {}
    for line in lines:
        digest, _, page = line.partition(" ")
        by_hash.setdefault(digest, set()).add(page)
    assert all(len(pages) == 1 for pages in by_hash.values()) and len(by_hash) > 1000
    assert all(len(digest) == 32 for digest in by_hash)
    assert np.unique([*by_hash]).size == len(by_hash)
