"""The order of the compiler's tasks, their results, errors and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from max._backends.cpu.runtime.compile_threads import LongestFirst


def held(threads: LongestFirst[str]) -> threading.Event:
    """Occupies a thread until the event is set."""
    begun, go = threading.Event(), threading.Event()

    def wait() -> str:
        begun.set()
        assert go.wait(60)
        return "held"

    future = threads.submit(0, wait)
    assert begun.wait(60)
    assert future.running() and not future.cancel()
    return go


def test_the_longest_waiting_task_is_next_and_equal_ones_keep_their_order() -> None:
    threads, done = LongestFirst[str](1), list[str]()
    go = held(threads)

    def task(name: str) -> Callable[[], str]:
        return lambda: done.append(name) or name

    lengths = {"short": 1, "long": 30, "a": 20, "b": 20, "c": 20, "longest": 31}
    futures = {name: threads.submit(length, task(name)) for name, length in lengths.items()}
    assert not done and threads.unfinished > set(futures.values())
    go.set()
    assert {name: future.result(60) for name, future in futures.items()} == {n: n for n in lengths}
    assert done == ["longest", "long", "a", "b", "c", "short"]


def test_cancelled_tasks_do_not_run_and_the_others_do() -> None:
    threads, done = LongestFirst[str](1), list[str]()
    go = held(threads)
    first = threads.submit(2, lambda: done.append("first") or "first")
    second = threads.submit(1, lambda: done.append("second") or "second")
    assert first.cancel()
    go.set()
    assert second.result(60) == "second"
    assert done == ["second"] and first.cancelled()


def test_errors_are_those_of_the_task_and_the_thread_goes_on() -> None:
    threads = LongestFirst[str](1)

    def fail() -> str:
        raise KeyError("x")

    with pytest.raises(KeyError):
        threads.submit(1, fail).result(60)
    assert threads.submit(1, lambda: "after").result(60) == "after"


def test_tasks_run_on_as_many_threads() -> None:
    threads, both = LongestFirst[int](2), threading.Barrier(2, timeout=60)

    def meet() -> int:
        both.wait()
        return threading.get_ident()

    numbers = {future.result(60) for future in [threads.submit(1, meet) for _ in range(2)]}
    assert len(numbers) == 2 and threading.get_ident() not in numbers
    assert len({threads.submit(1, threading.get_ident).result(60) for _ in range(9)} | numbers) == 2
