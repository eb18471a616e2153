"""Threads that compile grammars within a time limit, for the server and its worker."""

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
"""The time limit in seconds of a grammar, from its request to its result."""
MOST_OVERDUE = 4
"""The most threads that may be stuck in grammars beyond their time limit: nothing can end them."""
_R = TypeVar("_R")


@dataclass(eq=False)
class _Job:
    """A grammar that waits or is compiled."""

    make: Callable[[], Any]
    future: Future[Any]
    deadline: float
    begin: float = 0.0
    """When it was begun; 0: it waits."""
    over: bool = False
    """Whether its future has a result."""


class GrammarThreads:
    """A few threads. A grammar that takes too long fails, and another thread replaces the one that compiles it.

    Args:
        threads: The grammars that are compiled at once.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._changed = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._open: dict[_Job, None] = {}  # in the order of their deadlines
        self._threads: set[threading.Thread] = set()
        self._overdue = 0
        self._watcher: threading.Thread | None = None
        self._closed = False

    def submit(self, make: Callable[..., _R], *arguments: object) -> Future[_R]:
        """Calls a function that compiles a grammar, in a thread, with a limit of ``COMPILE_S`` seconds.

        Args:
            make: The function.
            arguments: Its arguments.

        Returns:
            Its result, or its error. After the time it fails: with a :class:`GrammarsWaitError` where others kept
            it waiting for half of it or longer, else with a :class:`GrammarTooSlowError`.

        Raises:
            RuntimeError: The threads are closed, or the system gives none.
        """
        job = _Job(lambda: make(*arguments), Future(), time.monotonic() + COMPILE_S)
        with self._changed:
            if self._closed:
                raise RuntimeError("GrammarThreads: they are closed")
            if self._watcher is None:
                watcher = threading.Thread(target=self._watch, name="grammars' time", daemon=True)
                watcher.start()
                self._watcher = watcher
            self._waiting.append(job)
            self._open[job] = None
            self._add_threads()
        return job.future

    def close(self) -> None:
        """Cancels waiting grammars, and waits for those being compiled, at most until their time limit.

        A grammar that takes longer keeps its thread, for which the interpreter waits: native code must not outlive it.
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
        """Starts a thread for a job that waits, if there may be one more."""
        if self._waiting and self._working() < self._most:
            thread = threading.Thread(target=self._work, name="grammars")
            try:
                thread.start()
            except RuntimeError:
                return  # no thread can be started now: the job waits for a running one, or fails at its time limit
            self._threads.add(thread)

    def _working(self) -> int:
        """The threads, without those that others have replaced."""
        return len(self._threads) - min(self._overdue, MOST_OVERDUE)

    def _work(self) -> None:
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
            if over:
                continue
            if error is not None:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)

    def _next(self) -> _Job | None:
        """The next job; None if this thread is to end."""
        with self._changed:
            while self._waiting and self._working() <= self._most:
                job = self._waiting.popleft()
                if job.future.set_running_or_notify_cancel():
                    job.begin = time.monotonic()
                    return job
                job.over = True
                del self._open[job]
            self._threads.discard(threading.current_thread())
            return None

    def _watch(self) -> None:
        """Fails the jobs whose time is over; ends if there are none left."""
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
                    self._overdue += 1
                    self._add_threads()
                else:
                    self._waiting.remove(first)
                first.over = True
            self._fail(first)

    @staticmethod
    def _fail(job: _Job) -> None:
        """Fails a job; a grammar that had less than half of the time is not the slow one."""
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
