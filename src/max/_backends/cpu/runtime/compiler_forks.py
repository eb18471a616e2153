"""Forks of a process that compiles: a child must not inherit LLVM, or a table, in the middle of a change."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

from max._host.reentry import free, in_child

__all__ = ["FORK_SECONDS", "ForkGuard"]

FORK_SECONDS = 10.0
"""How long a fork waits for other threads that compile. One may be waiting for a lock of the thread that forks."""
_STEP_SECONDS = 0.001


class ForkGuard:
    """Makes forks wait until no other thread uses LLVM. If one does not end, the child cannot use LLVM.

    Args:
        locks: Returns the locks under which threads use LLVM, in the order in which they are taken.
        unfinished_tasks: Returns the compilations that wait or run on threads of the compiler.
        forget: Called in the child, in which the threads of the compiler do not exist.
    """

    def __init__(
        self,
        locks: Callable[[], list[Any]],
        unfinished_tasks: Callable[[], Collection[Future[Any]]],
        forget: Callable[[], None],
    ) -> None:
        self._locks, self._unfinished, self._forget = locks, unfinished_tasks, forget
        self._held: list[list[Any]] = []
        """The locks that each fork in progress holds."""
        self._is_llvm_in_use = False
        """Whether the fork in progress did not wait until no other thread uses LLVM."""
        self._is_llvm_unusable = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_parent=self._after)
        in_child(self._after_in_child)

    def check(self) -> None:
        """Raises an error in a process where LLVM cannot be used.

        Raises:
            RuntimeError: The process was forked in the middle of a compilation of another thread.
        """
        if self._is_llvm_unusable:
            raise RuntimeError(
                "the process was forked while another thread of its parent compiled, so that nothing can be compiled "
                "or loaded in it; load models before the fork, or start the process with the method 'spawn'"
            )

    def _before(self) -> None:
        held: list[Any] = []
        self._held.append(held)
        # the assumption until all locks are held
        self._is_llvm_in_use = True
        deadline = time.monotonic() + FORK_SECONDS
        if not _acquire_all(self._locks(), held, deadline):
            return
        # the threads of the compiler work without these locks
        while self._unfinished():
            if time.monotonic() > deadline:
                return
            time.sleep(_STEP_SECONDS)
        # after the compilations, which take it
        self._is_llvm_in_use = not _acquire_all(_locks_of_llvmlite(), held, deadline)

    def _after(self) -> None:
        if self._held:
            for lock in reversed(self._held.pop()):
                lock.release()

    def _after_in_child(self) -> None:
        if self._is_llvm_in_use:
            self._is_llvm_unusable = True
            for future in list(self._unfinished()):
                # held by a thread that the child does not have
                free(future._condition._lock)  # type: ignore[attr-defined]
        self._forget()
        self._after()


def _acquire_all(locks: list[Any], held_locks: list[Any], deadline: float) -> bool:
    """Acquires locks, and adds them to a list; returns whether it has all of them."""
    for lock in locks:
        if not lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            return False
        held_locks.append(lock)
    return True


def _locks_of_llvmlite() -> list[Any]:
    """The lock of llvmlite's functions, if they are loaded."""
    binding = sys.modules.get("llvmlite.binding.ffi")
    lock = getattr(getattr(getattr(binding, "lib", None), "_lock", None), "_lock", None)
    return [] if lock is None else [lock]
