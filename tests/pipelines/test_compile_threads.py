"""Grammars that are slow to compile fail in time, and hold up neither others nor the end of the process."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError

import pytest

from max.pipelines.core.exceptions import GrammarsWaitError, GrammarTooSlowError
from max.pipelines.structured import compile_threads
from max.pipelines.structured.compile_threads import MOST_OVERDUE, GrammarThreads


def wait_until_quiet(threads: GrammarThreads, watcher: bool = True) -> None:
    """Waits for the end of all threads; the one that watches deadlines ends at the next one."""
    deadline = time.monotonic() + 120
    while threads._threads or (watcher and threads._watcher is not None):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_slow_grammars_are_replaced_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "COMPILE_S", 1.0)
    threads, go, begun = GrammarThreads(1), threading.Event(), []

    def compile_slowly(number: int) -> int:
        begun.append(number)
        assert go.wait(60)
        return number

    for number in range(MOST_OVERDUE + 1):
        with pytest.raises(GrammarTooSlowError, match=r"more than 1 s to compile\nGive a smaller"):
            threads.submit(compile_slowly, number).result(120)
        # another thread takes the place of the slow one, as long as there are few of them
        if number < MOST_OVERDUE:
            assert threads.submit(lambda: 7).result(120) == 7
    late = threads.submit(compile_slowly, 99)
    with pytest.raises(GrammarsWaitError, match="grammars of other requests"):
        late.result(120)
    go.set()
    wait_until_quiet(threads)
    assert begun == list(range(MOST_OVERDUE + 1)), "what waited for too long is not compiled"
    assert threads.submit(lambda: 8).result(120) == 8
    wait_until_quiet(threads)


def test_results_errors_and_cancelled_ones() -> None:
    threads, go, begun = GrammarThreads(2), threading.Event(), threading.Barrier(3)
    held = [threads.submit(lambda: (begun.wait(60), go.wait(60))) for _ in range(2)]
    begun.wait(60)
    waiting = [threads.submit(lambda n=n: n) for n in range(50)]
    assert waiting[3].cancel() and not held[0].cancel()
    go.set()
    assert [f.result(120) for f in waiting if not f.cancelled()] == [*range(3), *range(4, 50)]
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 // 0).result(120)
    wait_until_quiet(threads, watcher=False)


def test_the_end_waits_for_native_code_alone() -> None:
    threads, begun, go, ended = GrammarThreads(1), threading.Event(), threading.Event(), []
    running = threads.submit(lambda: (begun.set(), go.wait(60), time.sleep(0.1), ended.append(1)))
    waiting = threads.submit(lambda: ended.append(2))
    assert begun.wait(60)
    threading.Timer(0.1, go.set).start()
    threads.close()
    assert ended == [1] and running.done()
    with pytest.raises(CancelledError):
        waiting.result(0)
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(lambda: 1)


def test_the_end_does_not_wait_for_what_is_beyond_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "COMPILE_S", 0.2)
    threads, go = GrammarThreads(2), threading.Event()
    slow = [threads.submit(go.wait, 60) for _ in range(2)]
    with pytest.raises(GrammarTooSlowError):
        slow[0].result(120)
    begin = time.monotonic()
    threads.close()
    assert time.monotonic() - begin < 50 and slow[1].done() and not go.is_set()
    go.set()
    wait_until_quiet(threads)


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request fails with an error that says to try again; none is lost."""
    monkeypatch.setattr(compile_threads, "COMPILE_S", 0.2)
    threads, start = GrammarThreads(1), threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "grammars":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(GrammarsWaitError):
        threads.submit(lambda: 1).result(120)
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(compile_threads, "COMPILE_S", 120)
    assert threads.submit(lambda: 2).result(120) == 2
