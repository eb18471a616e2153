"""The step that long work is at, such as compiling or packing weights, for whoever shows it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["STEPS", "LoadSteps"]

Taker = Callable[[str, int, int], None]


class LoadSteps:
    """Hands on the steps of a process's work."""

    def __init__(self) -> None:
        self._takers: list[Taker] = []

    def at(self, step: str, num_done: int = 0, total: int = 0) -> None:
        """Tells how far a step is.

        Args:
            step: The step in a few words.
            num_done: Its parts that are done.
            total: All its parts; 0: it has none.
        """
        for taker in self._takers:
            taker(step, num_done, total)

    @contextmanager
    def handed_to(self, taker: Taker) -> Generator[None]:
        """Hands steps to a function for the duration of a block.

        Args:
            taker: Is called in the thread that works with a step, its parts that are done, and all its parts.
        """
        self._takers.append(taker)
        try:
            yield
        finally:
            self._takers.remove(taker)


STEPS = LoadSteps()
"""Those of this process."""
