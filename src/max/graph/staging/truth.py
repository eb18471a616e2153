"""Truth values of tensors while a predicate is staged: `and`, `or`, `not`, `if` and chained comparisons.

Python asks a tensor for its truth value, which only a run knows. A predicate is therefore called once for each outcome
of its conditions, and the calls become the branches of `max.graph.ops.cond`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["UndecidedCondition", "decisions", "truth_of"]


class UndecidedCondition(BaseException):
    """A predicate asked for a truth value that no decision gives; no `except Exception` of a program catches it.

    Args:
        condition: The tensor.
    """

    def __init__(self, condition: Any) -> None:
        super().__init__()
        self.condition = condition


_CURRENT: ContextVar[Iterator[bool] | None] = ContextVar("max_truth", default=None)


@contextmanager
def decisions(truths: tuple[bool, ...]) -> Generator[None]:
    """Gives the conditions of a block their truth values, in the order in which Python asks for them.

    Args:
        truths: The truth values; the next condition raises `UndecidedCondition`.
    """
    token = _CURRENT.set(iter(truths))
    try:
        yield
    finally:
        _CURRENT.reset(token)


def truth_of(tensor: Any) -> bool:
    """The truth value of a tensor of a graph.

    Args:
        tensor: The tensor.

    Raises:
        TypeError: No predicate is staged.
        UndecidedCondition: The predicate is to be called again for each value.
    """
    known = _CURRENT.get()
    if known is None:
        raise TypeError(
            "a tensor of a graph has no truth value while the graph is built; use ops.where, or ops.logical_and, "
            "logical_or and logical_not; in the predicate of ops.while_loop `and`, `or` and `not` work"
        )
    for value in known:
        return value
    raise UndecidedCondition(tensor)
