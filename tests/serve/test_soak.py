"""Long runs: many concurrent clients, and killed workers.

``SOAK_SECONDS`` and ``SOAK_KILLS`` shorten them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import psutil
import pytest

from tests.serve.conftest import TINY, RunningServer

CLIENTS = 64
SOAK_S = float(os.environ.get("SOAK_SECONDS", "600"))
KILLS = int(os.environ.get("SOAK_KILLS", "20"))
ANSWERED_S = 5.0
"""The longest wait of a client after a kill, beyond the time of the warm load."""
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 8}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
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
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL]},
]
END_S = 600
"""What takes longer hangs, on whatever machine."""


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
            delta = event["choices"][0]["delta"]
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                text += (call["function"].get("name") or "") + call["function"]["arguments"]
            pieces += 1
            if pieces == leave_after:
                return text, "left"
    return text, None


def check_idle(client: httpx.Client) -> None:
    """Asserts that no request is open and no page is held."""
    end = time.monotonic() + END_S
    while True:
        lines = client.get("/metrics").text.splitlines()
        held = [line for line in lines if line.startswith("maxserve_cache_num_used_blocks ")]
        if client.get("/load").json() == {"server_load": 0} and held[0].endswith(" 0.0"):
            return
        assert time.monotonic() < end, held
        time.sleep(0.1)


def memory(server: RunningServer) -> int:
    """The resident memory of the processes of a server, in bytes."""
    process, total = psutil.Process(server.process.pid), 0
    for each in [process, *process.children(recursive=True)]:
        # one that ends while it is looked at has no memory
        with contextlib.suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


def handles(server: RunningServer) -> tuple[int, int, int]:
    """The processes of a server, and their open files and threads."""
    process = psutil.Process(server.process.pid)
    each = [process, *process.children(recursive=True)]
    return len(each), sum(p.num_fds() for p in each), sum(p.num_threads() for p in each)


def check_handles(server: RunningServer, before: tuple[int, int, int]) -> None:
    """Asserts that no process, file or thread is left over; connections may take a moment to close."""
    end = time.monotonic() + END_S
    # a pool of threads starts them on demand, up to the number of cores and a few
    while not (
        (after := handles(server))[0] == before[0]
        and after[1] <= before[1] + 2
        and after[2] <= before[2] + 8
    ):
        assert time.monotonic() < end, (before, after)
        time.sleep(0.1)
    print(f"processes, files, threads: {before} before, {after} after")


@pytest.mark.long
def test_many_clients(start_server: Callable[..., RunningServer]) -> None:
    """Each answer equals that of a single request; pages and memory are released."""
    server = start(start_server)
    with httpx.Client(base_url=server.url, timeout=END_S) as client:
        requests = [body(p, extra, 8 + 8 * i) for p in PROMPTS for i, extra in enumerate(EXTRAS)]
        alone = [answer(client, request)[0] for request in requests]
    before = handles(server)

    def work(seed: int, end: float) -> int:
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

    held: list[int] = []
    # memory must not grow after the first tenth
    for seconds in (SOAK_S / 10, SOAK_S * 9 / 10):
        end = time.monotonic() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            counts = list(pool.map(work, range(CLIENTS), [end] * CLIENTS))
        with httpx.Client(base_url=server.url, timeout=END_S) as client:
            check_idle(client)
        held.append(memory(server))
    check_handles(server, before)
    assert sum(counts) >= CLIENTS
    print(f"{sum(counts)} answers in {seconds:.0f} s, {held[0]} and {held[1]} bytes")
    assert held[1] <= 1.15 * held[0] + (16 << 20), held


def wait_restarted(client: httpx.Client, kills: int) -> None:
    """Waits until a worker runs again after the last kill."""
    end = time.monotonic() + END_S
    while not restarted(client, kills):
        assert time.monotonic() < end
        time.sleep(0.02)


def restarted(client: httpx.Client, kills: int) -> bool:
    """Whether a worker runs again after the last kill."""
    counted = f"maxserve_worker_restarts {kills}.0" in client.get("/metrics").text
    return counted and client.get("/health").status_code == 200


def cpu_seconds(process: psutil.Process) -> float:
    """The CPU time that a process has taken."""
    times = process.cpu_times()
    return times.user + times.system


@dataclass(frozen=True)
class AfterKill:
    """What followed the kill of a worker.

    Args:
        load_s: Seconds until the next worker ran.
        load_cpu_s: The CPU time that it had taken by then.
        wait_s: Seconds until the last of the requests that were open at the kill had ended.
    """

    load_s: float
    load_cpu_s: float
    wait_s: float

    @property
    def limit_s(self) -> float:
        """The longest wait: the warm load, and some seconds of a machine that other programs leave alone.

        A worker that loads does nothing but compute: by how much its load takes longer than its CPU time, all else
        takes longer.
        """
        return self.load_s + ANSWERED_S * max(1.0, self.load_s / self.load_cpu_s)


@pytest.mark.long
def test_workers_that_are_killed(start_server: Callable[..., RunningServer]) -> None:
    """Every stream ends in time with its text or an error event; then the server works as before."""
    server = start(start_server)
    stop = threading.Event()
    request = {**body("import os", {"ignore_eos": True}, 60)}
    with httpx.Client(base_url=server.url, timeout=END_S) as client:
        alone = answer(client, request)[0]
        server.worker.kill()
        wait_restarted(client, 1)
        handles_before, memory_before = handles(server), memory(server)
    open_requests: list[object | None] = [None] * CLIENTS

    def work(number: int) -> tuple[int, int]:
        whole, lost = 0, 0
        with httpx.Client(base_url=server.url, timeout=END_S) as own:
            while not stop.is_set():
                open_requests[number] = object()
                text, ended = answer(own, request)
                open_requests[number] = None
                # three losses within one answer
                assert ended in (None, "engine_lost"), ended
                if ended is None:
                    assert text == alone
                    whole += 1
                else:
                    assert alone.startswith(text)
                    lost += 1
        return whole, lost

    def kill(client: httpx.Client, kills: int) -> AfterKill:
        server.worker.kill()
        begin = time.monotonic()
        held = {id(each): each for each in open_requests if each is not None}
        load_s = load_cpu_s = wait_s = 0.0
        while not (load_s and wait_s):
            now = time.monotonic() - begin
            assert now < END_S
            if not load_s and restarted(client, kills):
                load_s, load_cpu_s = now, cpu_seconds(server.worker)
            if not wait_s and not any(id(each) in held for each in list(open_requests)):
                wait_s = now
            time.sleep(0.02)
        return AfterKill(load_s, load_cpu_s, wait_s)

    after_kills: list[AfterKill] = []
    with (
        ThreadPoolExecutor(CLIENTS) as pool,
        httpx.Client(base_url=server.url, timeout=END_S) as client,
    ):
        working = [pool.submit(work, n) for n in range(CLIENTS)]
        try:
            for number in range(KILLS):
                time.sleep(1 + number % 3)
                after_kills.append(kill(client, number + 2))
                print(f"{after_kills[-1]}, limit {after_kills[-1].limit_s:.1f} s")
        finally:
            stop.set()
        results = [each.result(END_S) for each in working]
        assert sum(whole for whole, _ in results) > 0
        check_idle(client)
        assert f"maxserve_worker_restarts {KILLS + 1}.0" in client.get("/metrics").text
    check_handles(server, handles_before)
    whole, lost = (sum(counts) for counts in zip(*results, strict=True))
    print(f"{whole} answers, {lost} errors; {memory_before} bytes before, {memory(server)} after")
    assert not [each for each in after_kills if each.wait_s > each.limit_s]
