"""Pulls of a router, without a hub: the threads that they take, and clients that leave."""

from __future__ import annotations

import asyncio
import gc
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
        self.asked: list[str] = []
        self.answers, self.goes_on = threading.Event(), threading.Event()
        self.answers.set()
        self.ended = threading.Semaphore(0)
        patch.setattr(library, "_hub_source", self.source)
        patch.setattr(library, "_is_stored", lambda name, store: False)
        patch.setattr("max.pipelines.store.pull.pull", self.pull)
        patch.setattr(library, "_PULL_THREADS", ThreadPoolExecutor(threads))

    def source(self, name: str) -> SimpleNamespace:
        self.asked.append(name)
        assert self.answers.wait(WAIT_S)
        return SimpleNamespace(files=())

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
        hub.answers.clear()
        pulls = [asyncio.ensure_future(rest(lines(f"a/{n}"))) for n in range(3)]
        await until(lambda: len(hub.asked) == 3)
        async with asyncio.timeout(WAIT_S):
            await asyncio.to_thread(int)
        hub.answers.set()
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

    unheard: list[dict] = []

    async def whole() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, error: unheard.append(error))
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
        del first, second
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(whole())
    assert not unheard, "the thread has ended by an error, which is nobody's"


def test_a_client_leaves_whose_pull_has_no_thread_yet(monkeypatch) -> None:
    hub = Hub(monkeypatch, threads=1)
    monkeypatch.setattr(library, "_REPORT_S", 0.01)
    looks = 0

    def is_stored(name, store) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:  # after the hub was asked
            library._PULL_THREADS.submit(hub.goes_on.wait, WAIT_S)
        return False

    monkeypatch.setattr(library, "_is_stored", is_stored)

    async def whole() -> None:
        stream = lines("a/1")
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await until(lambda: library._PULL_THREADS._work_queue.qsize() == 1)
        waiting.cancel()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await stream.aclose()
        hub.goes_on.set()
        await asyncio.wrap_future(library._PULL_THREADS.submit(int))
        assert hub.begun == []

    asyncio.run(whole())
