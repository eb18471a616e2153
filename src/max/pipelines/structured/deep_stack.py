"""Runs a function on a stack that is large enough for deep recursion over a long text."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 384 << 20
"""The stack size in bytes. It reserves address space; only touched pages take memory."""
_START = threading.Lock()  # the stack size of new threads is a process-wide setting
_R = TypeVar("_R")


def on_deep_stack(function: Callable[[], _R]) -> _R:
    """Calls a function in a thread with a stack of ``STACK_BYTES``, and waits for it.

    Args:
        function: The function.

    Raises:
        RuntimeError: The thread cannot be started.
        BaseException: Any exception of the function.
    """
    result: Future[_R] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    with _START:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="deep stack", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return result.result()
