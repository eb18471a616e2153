"""Pulls of a router, without a hub: the threads that they take, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from max.serve.ollama import library

WAIT_S = 30


class Hub:
    """Pulls that go on when the test says so."""

    def __init__(self, patch: pytest.MonkeyPatch, threads: int) -> None:
        self.begun: list[str] = []
        self.goes_on, self.ended = threading.Event(), threading.Semaphore(0)
        patch.setattr(library, "_hub_source", lambda name: SimpleNamespace(files=()))
        patch.setattr(library, "_is_stored", lambda name, store: False)
        patch.setattr(library, "pull_model", self.pull)
        patch.setattr(library, "_PULL_THREADS", ThreadPoolExecutor(threads))

    def pull(self, source, store, name, max_bytes, note) -> None:
        self.begun.append(name)
        try:
            while not self.goes_on.wait(0.01):
                note("file", 1, 2)
        finally:
            self.ended.release()


def lines(name: str) -> Any:
    store: Any = SimpleNamespace()
    return library._pull_lines(name, store)


async def rest(stream) -> list[dict]:
    return [json.loads(line) async for line in stream]


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_pulls_leave_the_threads_of_the_loop_to_others(monkeypatch) -> None:
    hub = Hub(monkeypatch, threads=3)

    async def whole() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        pulls = [asyncio.ensure_future(rest(lines(f"a/{n}"))) for n in range(3)]
        await until(lambda: len(hub.begun) == 3)
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(int)
        hub.goes_on.set()
        for answer in await asyncio.gather(*pulls):
            assert answer[-1] == {"status": "success"}

    asyncio.run(whole())


def test_a_client_that_leaves_ends_its_pull_and_no_other(monkeypatch) -> None:
    """One that waits for a thread leaves at once."""
    hub = Hub(monkeypatch, threads=1)
    monkeypatch.setattr(library, "_REPORT_S", 0.01)

    async def whole() -> None:
        first, second = lines("a/1"), lines("a/2")
        await anext(first)
        reading = asyncio.ensure_future(anext(first))
        await until(lambda: hub.begun)
        assert json.loads(await reading)["completed"] == 1
        await anext(second)
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await second.aclose()
        assert hub.begun == ["a/1"] and not library._PULLS.keys() - {"a/1"}
        async with asyncio.timeout(WAIT_S):
            await first.aclose()
        assert hub.ended.acquire(timeout=WAIT_S) and not library._PULLS

    asyncio.run(whole())
