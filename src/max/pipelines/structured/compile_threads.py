"""Threads that compile grammars with a time limit, for the server and its worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from max._dataclass import dataclass
from max.pipelines.core.exceptions import GrammarsWaitError, GrammarTooSlowError, UserError

COMPILE_S = 10.0
"""The time limit in seconds of a grammar, from submission to result."""
MOST_OVERDUE = 4
"""The maximum number of threads stuck in grammars beyond their time limit, as a thread cannot be stopped."""
_R = TypeVar("_R")


@dataclass(eq=False)
class _Job:
    """A grammar that waits for a thread or is being compiled."""

    make: Callable[[], Any]
    future: Future[Any]
    deadline: float
    begin: float = 0.0
    """The start time of its compilation; 0: it still waits."""
    over: bool = False
    """Whether its future is completed."""


class GrammarThreads:
    """A small pool of threads. A grammar that exceeds the time limit fails, and a new thread replaces the stuck one.

    Args:
        threads: The number of grammars that are compiled concurrently.
    """

    def __init__(self, threads: int) -> None:
        self._max_threads = threads
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._open: dict[_Job, None] = {}  # in order of deadlines
        self._threads: set[threading.Thread] = set()
        self._overdue = 0
        self._watcher: threading.Thread | None = None
        self._closed = False

    def submit(self, make: Callable[..., _R], *arguments: object) -> Future[_R]:
        """Calls a function that compiles a grammar, in a thread, with a time limit of ``COMPILE_S`` seconds.

        Args:
            make: The function.
            arguments: Its arguments.

        Returns:
            Its result or error. After the time limit it fails: with a :class:`GrammarsWaitError` if it waited for other
                grammars for at least half of the time, else with a :class:`GrammarTooSlowError`.

        Raises:
            RuntimeError: The pool is closed, or no thread can be started.
        """
        job = _Job(lambda: make(*arguments), Future(), time.monotonic() + COMPILE_S)
        with self._changed:
            if self._closed:
                raise RuntimeError("GrammarThreads: they are closed")
            # one thread looks at all deadlines, and only while there are any
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="grammars' time", daemon=True)
                watcher.start()
                self._watcher = watcher
            self._waiting.append(job)
            self._open[job] = None
            self._add_threads()
        return job.future

    def close(self) -> None:
        """Cancels waiting grammars, and waits for running ones, at most until their time limit.

        A grammar that exceeds the limit keeps its thread, and interpreter exit waits for it: native code must not
        outlive it.
        """
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            for job in waiting:
                job.over = True
                del self._open[job]
            compiled = [job.future for job in self._open]
            self._changed.notify_all()
        for job in waiting:
            job.future.cancel()
        wait(compiled)

    def _add_threads(self) -> None:
        """Starts a thread for a waiting job, if the limit allows."""
        if self._waiting and self._busy_threads() < self._max_threads:
            thread = threading.Thread(target=self._work, name="grammars")
            try:
                thread.start()
            except RuntimeError:
                return  # no thread can be started: the job waits for a running one, or fails at its time limit
            self._threads.add(thread)

    def _busy_threads(self) -> int:
        """The number of threads, without those that were replaced."""
        # beyond that many stuck threads none is replaced
        return len(self._threads) - min(self._overdue, MOST_OVERDUE)

    def _work(self) -> None:
        """A thread: runs jobs, and drops the results of jobs that took too long."""
        while (job := self._next()) is not None:
            error: BaseException | None = None
            result = None
            try:
                result = job.make()
            except BaseException as caught:
                error = caught
            with self._changed:
                over, job.over = job.over, True
                self._open.pop(job, None)
                if over:
                    self._overdue -= 1
            # the watcher has failed the job meanwhile
            if over:
                continue
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _next(self) -> _Job | None:
        """The next job; None if this thread should end."""
        with self._changed:
            # one too many: this thread was replaced, and its grammar has ended
            while self._waiting and self._busy_threads() <= self._max_threads:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    job.begin = time.monotonic()
                    return job
                # cancelled while it waited
                job.over = True
                del self._open[job]
            self._threads.discard(threading.current_thread())
            return None

    def _watch(self) -> None:
        """Fails jobs at their deadlines; returns when no job is open."""
        while True:
            with self._changed:
                first = next(iter(self._open), None)
                if first is None:
                    self._watcher = None
                    return
                left = first.deadline - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                del self._open[first]
                if first.begin:
                    # its thread counts no more, so that another one starts for the grammars that wait
                    self._overdue += 1
                    self._add_threads()
                else:
                    self._waiting.remove(first)
                first.over = True
            # without the lock, as callbacks of the future run here
            self._fail(first)

    @staticmethod
    def _fail(job: _Job) -> None:
        """Fails a job; if it had less than half of its time to run, other grammars are to blame."""
        if not job.begin and not job.future.set_running_or_notify_cancel():
            return
        if job.begin and job.deadline - job.begin > COMPILE_S / 2:
            error: UserError = GrammarTooSlowError(
                f"the grammar takes more than {COMPILE_S:g} s to compile", "Give a smaller one."
            )
        else:
            error = GrammarsWaitError(
                f"the grammars of other requests take more than {COMPILE_S:g} s to compile",
                f"Try again in {round(COMPILE_S)} s.",
            )
        job.future.set_exception(error)
