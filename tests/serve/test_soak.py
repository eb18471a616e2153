"""Long runs: many clients at once, and workers that are killed under them."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.serve.conftest import TINY, RunningServer

CLIENTS, SOAK_S, KILLS = 64, 600, 20
PROMPTS = [
    "import os",
    "The capital of",
    "def f(",
    "Sort: b a",
    "1 2 3",
    "What is the capital of Norway?",
]
EXTRAS = [
    {},
    {"guided_regex": "[a-f]{3,9}"},
    {"response_format": {"type": "json_object"}},
    {"stop": ["a"]},
]
END_S = 120


def start(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "256", "--max-batch-size", "16",
        "--quantization-encoding", "float32", "--batch-invariant",
    ).wait_ready()  # fmt: skip


def body(prompt: str, extra: dict, tokens: int) -> dict:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True, **extra}


def answer(
    client: httpx.Client, request: dict, leave_after: int | None = None
) -> tuple[str, str | None]:
    """The text of a stream, and the code of the error that ended it."""
    text, pieces = "", 0
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return text, event["error"]["code"]
            text += event["choices"][0]["delta"].get("content") or ""
            pieces += 1
            if pieces == leave_after:
                return text, "left"
    return text, None


def check_idle(client: httpx.Client) -> None:
    """No request is open, and no page is held."""
    end = time.monotonic() + END_S
    while True:
        lines = client.get("/metrics").text.splitlines()
        held = [line for line in lines if line.startswith("maxserve_cache_num_used_blocks ")]
        if client.get("/load").json() == {"server_load": 0} and held[0].endswith(" 0.0"):
            return
        assert time.monotonic() < end, held
        time.sleep(0.1)


@pytest.mark.long
def test_many_clients(start_server: Callable[..., RunningServer]) -> None:
    """Each answer is the one that the same request gets alone; pages come back."""
    server = start(start_server)
    with httpx.Client(base_url=server.url, timeout=END_S) as client:
        requests = [body(p, extra, 8 + 8 * i) for p in PROMPTS for i, extra in enumerate(EXTRAS)]
        alone = [answer(client, request)[0] for request in requests]
    end = time.monotonic() + SOAK_S

    def work(seed: int) -> int:
        numbers, count = random.Random(seed), 0
        with httpx.Client(base_url=server.url, timeout=END_S) as own:
            while time.monotonic() < end:
                number = numbers.randrange(len(requests))
                leave = numbers.randint(1, 5) if numbers.random() < 0.2 else None
                text, ended = answer(own, requests[number], leave)
                assert ended in (None, "left")
                if ended is None:
                    assert text == alone[number], requests[number]
                count += 1
        return count

    with ThreadPoolExecutor(CLIENTS) as pool:
        assert sum(pool.map(work, range(CLIENTS))) >= CLIENTS
    with httpx.Client(base_url=server.url, timeout=END_S) as client:
        check_idle(client)


@pytest.mark.long
def test_workers_that_are_killed(start_server: Callable[..., RunningServer]) -> None:
    """Every stream ends, with its text or with an error event; afterwards the server is as before."""
    server = start(start_server)
    stop = threading.Event()
    request = {**body("import os", {"ignore_eos": True}, 60)}
    with httpx.Client(base_url=server.url, timeout=END_S) as client:
        alone = answer(client, request)[0]

    def work(_: int) -> tuple[int, int]:
        whole, lost = 0, 0
        with httpx.Client(base_url=server.url, timeout=END_S) as own:
            while not stop.is_set():
                text, ended = answer(own, request)
                assert ended in (None, "engine_lost"), ended
                if ended is None:
                    assert text == alone
                    whole += 1
                else:
                    assert alone.startswith(text)
                    lost += 1
        return whole, lost

    with (
        ThreadPoolExecutor(CLIENTS) as pool,
        httpx.Client(base_url=server.url, timeout=END_S) as client,
    ):
        working = [pool.submit(work, n) for n in range(CLIENTS)]
        try:
            for number in range(KILLS):
                time.sleep(1 + number % 3)
                server.worker.kill()
                restarts = f"maxserve_worker_restarts {number + 1}.0"
                end = time.monotonic() + END_S
                while not (
                    restarts in client.get("/metrics").text
                    and client.get("/health").status_code == 200
                ):
                    assert time.monotonic() < end
                    time.sleep(0.05)
        finally:
            stop.set()
        results = [each.result(END_S) for each in working]
        assert sum(whole for whole, _ in results) > 0
        check_idle(client)
        assert f"maxserve_worker_restarts {KILLS}.0" in client.get("/metrics").text
