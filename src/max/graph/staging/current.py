"""The graph that ops are staged into, as a protocol: values and weights need it, and `Graph` imports both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Protocol

from max import mlir
from max.graph.value import TensorValue, Value

__all__ = ["CURRENT", "OUTSIDE", "RETRIES", "GraphNeeded", "Staging", "current_graph"]


class Staging(Protocol):
    """The methods of `Graph` that values and weights call."""

    def stage(
        self,
        name: str,
        operands: Sequence[Value[Any]],
        attrs: Mapping[str, Any] | None = None,
        result_types: Sequence[mlir.Attribute] | None = None,
    ) -> Sequence[mlir.SSAValue]:
        """Stages an op; see `Graph.stage`."""
        ...

    def add_weight(self, weight: Any, force_initial_weight_on_host: bool = True) -> TensorValue:
        """Adds a weight; see `Graph.add_weight`."""
        ...


CURRENT: ContextVar[tuple[Staging, ...]] = ContextVar("max.graph.staging.current", default=())
"""The stack of entered graphs, innermost last."""

_Run = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
OUTSIDE: ContextVar[_Run | None] = ContextVar("max.graph.outside", default=None)
"""What runs an op that is called where no graph was entered; None where that is an error."""

RETRIES: ContextVar[bool] = ContextVar("max.graph.retries", default=False)
"""Whether the function that is being called is called again within a graph if it needs one (`GraphNeeded`)."""


class GraphNeeded(BaseException):
    """A function that was called without a graph needs one. No `Exception`: functions of the user do not catch it."""


def current_graph() -> Staging:
    """The graph that ops are staged into.

    Raises:
        LookupError: No graph was entered.
        GraphNeeded: No graph was entered, and the function is called again within one (`RETRIES`).
    """
    stack = CURRENT.get()
    if not stack:
        if RETRIES.get():
            raise GraphNeeded
        raise LookupError(
            "no graph is being built here: stage ops inside `with Graph(...)`, or in the "
            "function given to Graph(name, forward, ...)"
        )
    return stack[-1]
