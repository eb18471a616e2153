"""Code that signal handlers, finalizers and trace functions may interrupt at any instruction.

They may use again what they interrupt. A lock that they need is one of `reentrant_lock`. A model and the record of
eager tensors refuse a second use: from the binding of arguments to the end of a run a set has the number of the thread;
while it is there, the thread gets an error. Other threads, which wait for their turn, and other models are not
affected.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from functools import cached_property
else:

    class cached_property:
        """`functools.cached_property` without its lock, which releases before 3.12 have for each property of a class.

        A child whose parent had another thread in the function would wait for ever. Two threads may both call it.
        """

        def __init__(self, function: Callable[[Any], Any]) -> None:
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = self.function(instance)
            return instance.__dict__.setdefault(self.name, value)


__all__ = [
    "INVERTED_SECONDS", "LockLevel", "ReentryError", "cached_property", "exclusively", "free", "mark_guarded",
    "in_child", "hold_lock", "reentrant_lock", "refuse_in_collection", "refuse_second_use",
]  # fmt: skip

Function = TypeVar("Function", bound=Callable[..., Any])

_GUARDED: set[CodeType] = set()
_locks: dict[int, tuple[weakref.ref[threading.RLock], LockLevel]] = {}
"""The locks by their identities; read in one instruction, which threads and signal handlers cannot interrupt."""
INVERTED_SECONDS = 0.1
"""How long a thread waits for a lock that it should have taken before one that it has."""


class ReentryError(RuntimeError):
    """A signal handler, finalizer or trace function uses what it interrupts. The same call may succeed later."""


class LockLevel(IntEnum):
    """The order in which a thread takes locks, but for signal handlers and finalizers."""

    EAGER = 0
    PROGRAMS = 1
    CUSTOM_OPS = 2
    SESSIONS = 3
    STORE = 4
    JITS = 5
    JIT = 6
    LEAF = 7
    """Nothing is waited for under these locks, but the end of a run."""


def reentrant_lock(level: LockLevel = LockLevel.LEAF) -> threading.RLock:
    """A lock that the thread that holds it may take again, and that is free in a forked child.

    With an ordinary lock a signal handler that loads or runs a model inside a ``with`` block would wait for its own
    thread for ever, as would a child whose parent had another thread in the block. What the lock guards must be
    consistent at each call inside the block. A child whose own thread holds the lock keeps it.

    Args:
        level: When threads take it. Functions that take one of another level than `LEAF` are `locked`.
    """
    lock = threading.RLock()
    number = id(lock)
    _locks[number] = weakref.ref(lock, lambda _: _locks.pop(number, None)), level
    return lock


def _all_locks() -> list[tuple[Any, LockLevel]]:
    locks = [(reference(), level) for reference, level in list(_locks.values())]
    return [(lock, level) for lock, level in locks if lock is not None]


def hold_lock(lock: threading.RLock | str) -> Callable[[Function], Function]:
    """Decorates a function that a lock guards, and that takes further locks.

    The thread that has the lock may be waiting for one that this thread has, if this is a signal handler or finalizer:
    then the call raises an error after `INVERTED_SECONDS`.

    Args:
        lock: A lock of `reentrant_lock`, or the name of the attribute of the function's object that has it.
    """

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            taken: Any = getattr(args[0], lock) if isinstance(lock, str) else lock
            if taken._is_owned():
                return function(*args, **kwargs)
            try:
                if not taken.acquire(blocking=False):
                    _wait_for(taken)
                return function(*args, **kwargs)
            finally:
                # not after a check: an exception of a signal handler between them would leave the lock to the thread
                try:
                    taken.release()
                except RuntimeError:
                    pass  # it was not acquired

        return cast("Function", call)

    return decorate


def _wait_for(lock: Any) -> None:
    """Acquires a lock.

    Raises:
        RuntimeError: It is not free, and this thread has one that other threads take after it.
    """
    level = _locks[id(lock)][1]
    inverted = any(
        other_level >= level and other is not lock and other._is_owned()
        for other, other_level in _all_locks()
    )
    if not lock.acquire(timeout=INVERTED_SECONDS if inverted else -1):
        raise ReentryError(
            "another thread waits for the code that this signal handler, finalizer or trace function interrupts; note "
            "what came, and run it later"
        )


_in_child: list[Callable[[], None]] = []
_collects: list[bool] = []
"""Whether the garbage collector is on, for each fork in progress."""


def in_child(function: Callable[[], None]) -> None:
    """Calls a function in each forked child, after all locks are free.

    The garbage collector is off meanwhile: a finalizer that uses a model would wait for a thread of the parent.
    """
    _in_child.append(function)


def _before_fork() -> None:
    is_on = gc.isenabled()
    gc.disable()
    _collects.append(is_on)


def _after_fork() -> None:
    if _collects and _collects.pop():
        gc.enable()


def _after_fork_in_child() -> None:
    for lock, _ in _all_locks():
        if not lock._is_owned():
            free(lock)
    for function in _in_child:
        function()
    _after_fork()


_IS_WORD_OF_LOCK_KNOWN = (
    sys.implementation.name == "cpython"
    and sys.version_info < (3, 14)
    and object.__basicsize__ == 2 * ctypes.sizeof(ctypes.c_void_p)
)
"""Whether the word after the header of an RLock is its lock of the system."""


def free(lock: Any) -> None:
    """Frees a lock that a thread of the parent holds. The thread that forked may be waiting for it."""
    if lock.acquire(blocking=False):
        lock.release()
        return
    try:
        lock._release_save()
    except RuntimeError:
        # the thread had the lock of the system, and waited for Python's lock to count it
        if _IS_WORD_OF_LOCK_KNOWN:
            # not a new lock: a signal handler that forks returns to a wait for this one
            word = ctypes.c_void_p.from_address(id(lock) + object.__basicsize__)
            ctypes.pythonapi.PyThread_release_lock(word)
        else:
            lock._at_fork_reinit()  # in place from 3.14 on


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child
    )


def mark_guarded(function: Function) -> Function:
    """Marks a function whose local variable `in_use` is the set to which it adds its thread until it ends."""
    _GUARDED.add(function.__code__)
    return function


@mark_guarded
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
            raise ReentryError(
                f"{name} is in use by the code that this signal handler, finalizer or trace function interrupts; note "
                "what came, and run it later"
            )
        frame = frame.f_back


_phases: OrderedDict[str, None] = OrderedDict(start=None, stop=None)
"""The phases of the garbage collector, the latest last, in releases where `refuse_in_collection` needs them."""
_passes: dict[str, object] = {}
"""What the collector told of its latest pass, by phase."""
_own_passes = threading.local()
"""The same of the thread that ran it, as attributes."""

if sys.version_info < (3, 12):
    # called as `(phase, info)`. No Python code: Python would run signal handlers in it, and drop their exceptions, so
    # that Ctrl-C would now and then do nothing
    gc.callbacks += [_phases.move_to_end, _passes.__setitem__, _own_passes.__setattr__]


def _runs_a_pass() -> bool:
    """Whether this thread runs a pass of the garbage collector."""
    own = getattr(_own_passes, "start", None)
    return own is not None and own is _passes["start"] and next(reversed(_phases)) == "start"


def refuse_in_collection(name: str) -> None:
    """Raises an error if a finalizer that the garbage collector calls is about to set a context variable.

    The collector of CPython 3.11 runs inside `ContextVar.set`. A finalizer that sets a variable then frees the table
    that is being changed: a segmentation fault. From 3.12 on the collector runs between two instructions.

    Args:
        name: What sets the variable.

    Raises:
        RuntimeError: The thread runs a pass of the collector.
    """
    if _runs_a_pass():
        raise ReentryError(
            f"{name} is not possible in a finalizer that the garbage collector of Python 3.11 calls, or in what "
            "interrupts it; note what came, and run it later"
        )
