"""A worker that does not run, or whose engine hangs, is noticed, and replaced after a while."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import click
import httpx
import psutil
import pytest

from max.entrypoints.cli.errors import CommandError
from max.entrypoints.cli.serve import _settings, serve
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import TokensGenerated
from max.serve.process.settings import WatchLimits
from max.serve.worker.client import EngineClient, EngineLostError, EngineState
from max.serve.worker.life_signs import LifeSigns
from max.serve.worker.suspects import MOST_HANGS
from max.serve.worker.watch import WorkerWatch
from tests.pipelines.counting_pipeline import expected
from tests.serve.conftest import TINY, RunningServer
from tests.serve.hanging_worker import HANGS, SLOW, SLOW_S, HangingWorker

WHILE_S = 120.0


def until(condition: Callable[[], object], seconds: float = WHILE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


class _Clock:
    """A clock that the test sets, and a worker that beats by it."""

    def __init__(self, limits: WatchLimits, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lost, self._due = 1000.0, list[str](), 0.0
        self.signs: Any = SimpleNamespace(interval_s=2.0, last_beat=1000.0, step_begin=None)
        loop: Any = SimpleNamespace(call_later=self._call_later)
        monkeypatch.setattr(asyncio, "get_running_loop", lambda: loop)
        self.watch = WorkerWatch(self.signs, limits, self.lost.append, lambda: self.now)

    def _call_later(self, seconds: float, look: Callable[[], None]) -> Any:
        self._due, self._look = self.now + seconds, look
        return SimpleNamespace(cancel=lambda: None)

    def run(self, seconds: float, beats: bool) -> None:
        """Lets time pass in small parts, with this process running."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += 0.25
            if beats and self.now - self.signs.last_beat >= 2:
                self.signs.last_beat = self.now
            if self.now >= self._due and not self.lost:
                self._look()


def test_silence_suspends_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(WatchLimits(5, 30, 600), monkeypatch)
    clock.run(500, beats=True)
    assert clock.watch.responds and not clock.lost
    clock.run(4, beats=False)
    clock.run(3, beats=False)
    assert not clock.watch.responds
    clock.run(2, beats=True)
    assert clock.watch.responds
    # neither process runs: the time does not count, whoever is asked first
    for _ in range(3):
        clock.now += 10_000
        assert clock.watch.responds
        clock.run(2.5, beats=True)
        clock.now += 10_000
        clock._look()
        assert clock.watch.responds and not clock.lost
        clock.run(10, beats=True)
    # a step may take long
    clock.signs.step_begin = clock.now
    clock.run(595, beats=True)
    assert clock.watch.responds and not clock.lost
    clock.run(8, beats=True)
    assert len(clock.lost) == 1 and "a step of the engine has taken 60" in clock.lost[0]
    other = _Clock(WatchLimits(5, 30, 600), monkeypatch)
    other.run(29, beats=False)
    assert not other.lost
    other.run(4, beats=False)
    assert len(other.lost) == 1 and "has not run for 3" in other.lost[0]
    never = _Clock(WatchLimits(5, 0, 0), monkeypatch)
    never.signs.step_begin = never.now
    never.run(5000, beats=False)
    assert not never.lost and not never.watch.responds
    # a step that a suspend interrupted
    step = _Clock(WatchLimits(5, 30, 600), monkeypatch)
    step.signs.step_begin = step.now
    step.run(300, beats=True)
    step.now += 10_000
    step.run(590, beats=True)
    assert not step.lost


def _request(name: str, first: int, new: int = 6) -> GenerationRequest:
    return GenerationRequest(name, (first, 2, 3), 3 + new)


async def _tokens(client: EngineClient, request: GenerationRequest) -> list[int]:
    tokens: list[int] = []
    with client.open([request]) as subscription:
        while True:
            for _, event in await subscription.next_events():
                if isinstance(event, TokensGenerated):
                    tokens += event.tokens
                    if event.status.is_done:
                        return tokens


def _with_client(
    limits: WatchLimits, test: Callable[[EngineClient, list[HangingWorker]], Awaitable[None]]
) -> None:
    workers: list[HangingWorker] = []

    def start() -> HangingWorker:
        workers.append(HangingWorker(limits.unhealthy_s))
        return workers[-1]

    async def whole() -> None:
        client = EngineClient(start, None, limits)
        client.start()
        try:
            async with asyncio.timeout(WHILE_S):
                await client.wait_ready()
                await test(client, workers)
        finally:
            await client.close(finish=False, timeout=0.1)

    asyncio.run(whole())
    until(lambda: not any(worker.alive for worker in workers))


def test_a_step_that_never_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Its request is tried once more, others get the answer of the next worker; the beats go on meanwhile."""

    async def test(client: EngineClient, workers: list[HangingWorker]) -> None:
        assert await _tokens(client, _request("a", 1)) == expected((1, 2, 3), 6)
        hanging = asyncio.ensure_future(_tokens(client, _request("b", HANGS)))
        await asyncio.sleep(0.2)
        waiting = asyncio.ensure_future(_tokens(client, _request("c", 5)))
        problem = (
            rf"{MOST_HANGS} worker processes do not respond \(a step of the engine has taken [1-9]"
        )
        with pytest.raises(EngineLostError, match=problem):
            await hanging
        assert client.responds
        assert await waiting == expected((5, 2, 3), 6)
        assert client.restarts == 2 and len(workers) == 3

    _with_client(WatchLimits(2, 0, 1), test)
    assert "does not respond: a step of the engine has taken" in caplog.text


def test_slow_steps_are_no_hang() -> None:
    """Many steps, each within the bound, and silence of the engine while it is idle."""

    async def test(client: EngineClient, workers: list[HangingWorker]) -> None:
        for name in "ab":
            assert await _tokens(client, _request(name, SLOW, 4)) == expected((SLOW, 2, 3), 4)
            assert client.responds
            await asyncio.sleep(1.5 * SLOW_S)
        assert len(workers) == 1 and client.state is EngineState.READY

    _with_client(WatchLimits(2, 10, 5 * SLOW_S), test)


def test_a_process_that_does_not_run() -> None:
    """Random requests; the worker is stopped for a short while, and then for ever."""
    draw = random.Random(1)

    async def test(client: EngineClient, workers: list[HangingWorker]) -> None:
        process = psutil.Process(client.worker_pid)
        process.suspend()
        while client.responds:
            await asyncio.sleep(0.02)
        assert client.state is EngineState.READY
        process.resume()
        while not client.responds:
            await asyncio.sleep(0.02)
        slow = asyncio.ensure_future(_tokens(client, _request("slow", SLOW, 12)))
        await asyncio.sleep(2.5 * SLOW_S)
        process.suspend()
        firsts = [draw.randrange(90) for _ in range(20)]
        others = [_tokens(client, _request(f"r{i}", first)) for i, first in enumerate(firsts)]
        answers = asyncio.gather(*others)
        # it goes on with the next worker
        assert await slow == expected((SLOW, 2, 3), 12)
        assert await answers == [expected((first, 2, 3), 6) for first in firsts]
        assert len(workers) == 2

    _with_client(WatchLimits(1, 3, 0), test)


def test_a_server_whose_worker_is_stopped(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(
        "--model", str(TINY), "--max-length", "2048", "--max-batch-size", "2",
        "--unhealthy-after", "1", "--restart-after", "3", "--quantization-encoding", "float32",
    ).wait_ready()  # fmt: skip
    body = {"prompt": "import os", "ignore_eos": True, "temperature": 0}
    with httpx.Client(base_url=server.url, timeout=WHILE_S) as http:
        worker = server.worker
        # a suspended machine: nobody runs
        server.process.send_signal(signal.SIGSTOP)
        worker.suspend()
        time.sleep(3)
        server.process.send_signal(signal.SIGCONT)
        assert http.get("/health").status_code == 200
        worker.resume()
        answer = http.post("/v1/completions", json={**body, "max_tokens": 5})
        assert answer.status_code == 200 and server.worker.pid == worker.pid
        long = {**body, "max_tokens": 600}
        whole = http.post("/v1/completions", json=long).json()["choices"][0]["text"]
        with http.stream("POST", "/v1/completions", json={**long, "stream": True}) as lines:
            parts = lines.iter_lines()
            first = next(parts)
            worker.suspend()
            until(lambda: http.get("/health").status_code == 503)
            assert http.get("/health").json()["status"] in ("unresponsive", "restarting")
            data = [line[6:] for line in (first, *parts) if line.startswith("data: {")]
        # the stream goes on with the next worker as if nothing had happened
        assert "".join(json.loads(each)["choices"][0]["text"] for each in data) == whole
        until(lambda: http.get("/health").status_code == 200)
        again = http.post("/v1/completions", json={**body, "max_tokens": 5})
        assert again.json()["choices"] == answer.json()["choices"]
        assert server.worker.pid != worker.pid and not worker.is_running()
    assert server.stop() == 0


def test_the_options() -> None:
    context = serve.make_context("serve", ["--unhealthy-after", "1", "--restart-after", "0"])
    assert _settings(dict(context.params)).watch == WatchLimits(1, 0, 600)
    assert _settings(dict(serve.make_context("serve", []).params)).watch == WatchLimits(5, 30, 600)
    context = serve.make_context("serve", ["--unhealthy-after", "8", "--restart-after", "7"])
    with pytest.raises(CommandError, match="less than --unhealthy-after, 8"):
        _settings(dict(context.params))
    with pytest.raises(click.UsageError, match="not in the range"):
        serve.make_context("serve", ["--unhealthy-after", "0"])


def test_the_beats_of_a_thread() -> None:
    signs = LifeSigns(0.05)
    before = signs.last_beat
    assert signs.step_begin is None
    signs.start()
    until(lambda: signs.last_beat > before + 0.1)
    signs.step_begins()
    assert signs.step_begin is not None and abs(time.monotonic() - signs.step_begin) < 60
    signs.step_ends()
    assert signs.step_begin is None
