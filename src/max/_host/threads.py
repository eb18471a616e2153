"""Threads that signal handlers and forks may interrupt the start of."""

from __future__ import annotations

import _thread
import os
import threading
from collections.abc import Callable

from max._host.machine import LINUX

__all__ = ["DaemonThread", "name_thread"]


def name_thread(name: str) -> None:
    """Names the calling thread, as `top -H` and debuggers show it; does nothing on other systems than Linux.

    Args:
        name: The name, of which the first 15 bytes count.
    """
    if not LINUX:
        return
    try:
        task = os.open(f"/proc/self/task/{threading.get_native_id()}/comm", os.O_WRONLY)
    except OSError:  # without /proc
        return
    try:
        os.write(task, name.encode()[:15])
    except OSError:
        pass
    finally:
        os.close(task)


class DaemonThread:
    """A thread that does not keep the process alive.

    `threading.Thread.start` takes a lock of the process and waits until the thread runs. A signal handler that
    interrupts it can neither start a thread nor fork: the thread, or the child, would wait for ever. `start` of this
    class returns at once.

    Args:
        target: What the thread calls.
        args: Its arguments.
        name: What `top -H` and debuggers call the thread, 15 characters.

    Attributes:
        ident: The number that `threading.get_ident` gives in the thread; None before its start.
    """

    def __init__(self, target: Callable[..., object], *args: object, name: str) -> None:
        self._target, self._args, self._name = target, args, name
        # held while the thread runs, so that `join` can wait for it
        self._running = _thread.allocate_lock()
        self.ident: int | None = None

    def start(self) -> None:
        """Starts the thread, once.

        Raises:
            RuntimeError: The system refuses a thread.
        """
        self._running.acquire()
        try:
            self.ident = _thread.start_new_thread(self._run, ())
        except RuntimeError:
            self._running.release()
            raise

    def _run(self) -> None:
        try:
            name_thread(self._name)
            self._target(*self._args)
        finally:
            self._running.release()

    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._running.locked()

    def join(self, timeout: float = -1) -> bool:
        """Waits for the end of the thread.

        Args:
            timeout: The maximum number of seconds; without a limit by default.

        Returns:
            Whether it ended, or was never started.
        """
        ended = self._running.acquire(timeout=timeout)
        if ended:
            self._running.release()
        return ended
