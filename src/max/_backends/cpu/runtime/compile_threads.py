"""The threads of the compiler, which take the longest waiting task first."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

from max._host.threads import DaemonThread

__all__ = ["LongestFirst"]

T = TypeVar("T")


class LongestFirst(Generic[T]):
    """A thread pool that takes long tasks before short ones, so that no thread waits for a long task at the end.

    Signal handlers may submit tasks inside `submit`: the heap and the queue change in one instruction each.

    Args:
        num_threads: The number of threads; they start with the tasks.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._threads: list[DaemonThread] = []
        self._waiting: list[tuple[int, int, Future[T], Callable[[], T]]] = []
        self._numbers = itertools.count()
        self._submitted: SimpleQueue[None] = SimpleQueue()
        """An item for each task of `_waiting`."""
        self.unfinished: set[Future[T]] = set()
        """The tasks that wait or run."""

    def submit(self, length: int, task: Callable[[], T]) -> Future[T]:
        """Runs a task on a thread, after the longer ones that wait; returns its result, which may be cancelled.

        Args:
            length: The length of the task, in any unit.
            task: The task.

        Raises:
            RuntimeError: The system refuses the first thread.
        """
        if len(self._threads) < self._num_threads:
            self._start_thread()
        future: Future[T] = Future()
        self.unfinished.add(future)
        # the number keeps tasks of equal length in the order of their submission
        heapq.heappush(self._waiting, (-length, next(self._numbers), future, task))
        self._submitted.put(None)
        return future

    def _start_thread(self) -> None:
        thread = DaemonThread(self._work, name="max compiler")
        try:
            thread.start()
        except RuntimeError:
            # one thread is enough to finish all tasks
            if not self._threads:
                raise
        else:
            self._threads.append(thread)

    def _work(self) -> None:
        """A thread: runs the waiting task with the longest text, and stores its result or exception in its future."""
        while True:
            self._submitted.get()
            *_, future, task = heapq.heappop(self._waiting)
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(task())
            except (
                BaseException
            ) as error:  # raised where the result is read, as in concurrent.futures
                future.set_exception(error)
            finally:
                self.unfinished.discard(future)
                # a waiting thread would keep its last task alive
                del future, task
