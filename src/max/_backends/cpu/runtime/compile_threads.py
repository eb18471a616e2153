"""The threads of the compiler, which take the longest waiting task first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from max._reentry import reentrant_lock

__all__ = ["LongestFirst"]

T = TypeVar("T")


class LongestFirst(Generic[T]):
    """A thread pool that takes long tasks before short ones, so that no thread waits for a long task at the end.

    Args:
        num_threads: The number of threads.
        name: The prefix of the threads' names.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._waiting: list[tuple[int, int, Future[T], Callable[[], T]]] = []
        self._numbers = itertools.count()
        self._lock = reentrant_lock()

    def submit(self, length: int, task: Callable[[], T]) -> Future[T]:
        """Runs a task on a thread, after the longer ones that wait; returns its result, which may be cancelled.

        Args:
            length: The length of the task, in any unit.
            task: The task.
        """
        future: Future[T] = Future()
        with self._lock:
            # the number keeps tasks of equal length in the order of their submission
            heapq.heappush(self._waiting, (-length, next(self._numbers), future, task))
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        """Runs the waiting task with the longest text, and stores its result or exception in its future."""
        with self._lock:
            *_, future, task = heapq.heappop(self._waiting)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(task())
        except BaseException as error:  # raised where the result is read, as in concurrent.futures
            future.set_exception(error)
