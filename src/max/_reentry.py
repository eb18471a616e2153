"""Code that signal handlers, finalizers and trace functions may interrupt at any instruction.

They may use again what they interrupt. A lock that they need is one of `reentrant_lock`. A model and the record of
eager tensors refuse a second use: from the binding of arguments to the end of a run a set has the number of the thread;
while it is there, the thread gets an error. Other threads, which wait for their turn, and other models are not
affected.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

__all__ = ["exclusively", "guarded", "reentrant_lock", "refuse_second_use"]

Function = TypeVar("Function", bound=Callable[..., Any])

_GUARDED: set[CodeType] = set()
_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def reentrant_lock() -> threading.RLock:
    """A lock that the thread that holds it may take again, and that is free in a forked child.

    With an ordinary lock a signal handler that loads or runs a model inside a ``with`` block would wait for its own
    thread for ever, as would a child whose parent had another thread in the block. What the lock guards must be
    consistent at each call inside the block. A child whose own thread holds the lock keeps it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    for lock in list(_locks):
        if not lock._is_owned():  # type: ignore[attr-defined]
            _free(lock)


def _free(lock: Any) -> None:
    """Frees a lock that a thread of the parent holds. The thread that forked may be waiting for it."""
    if lock.acquire(blocking=False):
        lock.release()
        return
    try:
        lock._release_save()
    except RuntimeError:  # the thread had not yet counted it
        lock._at_fork_reinit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def guarded(function: Function) -> Function:
    """Marks a function whose local variable `in_use` is the set to which it adds its thread until it ends."""
    _GUARDED.add(function.__code__)
    return function


@guarded
def exclusively(in_use: set[int], name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that uses a model.

    Args:
        in_use: The threads that use the model.
        name: Its name, for the error.
        function: The function.
        args: Its arguments.

    Raises:
        RuntimeError: This thread uses the model already.
    """
    thread = threading.get_ident()
    if thread in in_use:
        refuse_second_use(in_use, name)
    try:
        # not before the `try`: an exception of a signal handler between them would leave the thread in the set
        in_use.add(thread)
        return function(*args)
    finally:
        in_use.discard(thread)


def refuse_second_use(in_use: object, name: str) -> None:
    """Raises the error, unless no function on the stack uses the model.

    A thread stays in the set if a trace function raises in the last instructions of a use, or if it is a thread of the
    parent process with the number of a new one.

    Args:
        in_use: The set that this thread is in, or what else marks the use.
        name: What is in use.

    Raises:
        RuntimeError: A caller of the caller uses the model.
    """
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code in _GUARDED and frame.f_locals.get("in_use") is in_use:
            raise RuntimeError(
                f"{name} is in use by the code that this signal handler, finalizer or trace function interrupts; note "
                "what came, and run it later"
            )
        frame = frame.f_back
