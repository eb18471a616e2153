"""Spans of time in a program, nested and named.

With ``MAX_PROFILE=1`` each span is logged when it closes, with its time, to the logger ``max.profiler`` (level INFO);
without it spans cost almost nothing. ``Model.profile()`` measures the kernels of a model.

::

    from max.profiler import Tracer, traced

    @traced(message="inference")
    def run(model, x):
        return model.execute(x)

    with Tracer("request") as tracer:
        tracer.push("tokens")
        ...
        tracer.next("model")
        ...
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar, overload

from max._config import flags

__all__ = ["Tracer", "is_profiling_enabled", "traced"]

F = TypeVar("F", bound=Callable[..., Any])
COLOR = "modular_purple"

logger = logging.getLogger("max.profiler")


def is_profiling_enabled() -> bool:
    """Whether spans are measured: ``MAX_PROFILE``."""
    return flags.MAX_PROFILE


class _Span:
    """An open span."""

    def __init__(self, message: str, depth: int) -> None:
        self.message, self.depth = message, depth
        self.start = time.perf_counter_ns()

    def log(self, suffix: str) -> None:
        took = (time.perf_counter_ns() - self.start) / 1e6
        logger.info("%s%s%s: %.3f ms", "  " * self.depth, self.message, suffix, took)


class Tracer:
    """A stack of spans.

    As a context manager it closes all open spans at the end; so does the deletion of the tracer.

    Args:
        message: The name of the first span; None opens none.
        color: The color for tools that draw; not used.
    """

    def __init__(self, message: str | None = None, color: str = COLOR) -> None:
        self._stack: list[_Span | None] = []
        if message is not None:
            self.push(message, color)

    def push(self, message: str | None = None, color: str = COLOR) -> None:
        """Opens a span inside the current one.

        Args:
            message: Its name; None puts an entry without a span on the stack.
            color: The color for tools that draw; not used.
        """
        span = None
        if message is not None and is_profiling_enabled():
            span = _Span(message, len(self._stack))
        self._stack.append(span)

    def pop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        """Closes the last span.

        Args:
            exc_type: The class of the exception that ends it.
            exc_value: The exception.
            traceback: Where it was raised.

        Raises:
            IndexError: No span is open.
        """
        span = self._stack.pop()
        if span is not None:
            span.log("" if exc_type is None else f" ({exc_type.__name__})")

    def next(self, message: str, color: str = COLOR) -> None:
        """Closes the last span and opens another one in its place.

        Args:
            message: The name of the new one.
            color: A color for visual tools; not used.

        Raises:
            IndexError: No span is open.
        """
        self.pop()
        self.push(message, color)

    def mark(self) -> None:
        """Logs the time since the last span was opened.

        Raises:
            AssertionError: No span is open.
        """
        if not self._stack:
            raise AssertionError("Tracer.mark: no span is open")
        span = self._stack[-1]
        if span is not None:
            span.log(" so far")

    def cleanup(self) -> None:
        """Closes all spans."""
        while self._stack:
            self.pop()

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        while self._stack:
            self.pop(exc_type, exc_value, traceback)

    def __del__(self) -> None:
        self.cleanup()


@overload
def traced(func: F, *, message: str | None = None, color: str = COLOR) -> F: ...


@overload
def traced(
    func: None = None, *, message: str | None = None, color: str = COLOR
) -> Callable[[F], F]: ...


def traced(
    func: Callable[..., Any] | None = None, *, message: str | None = None, color: str = COLOR
) -> Any:
    """Makes each call of a function a span; of coroutines too.

    Args:
        func: The function. Without it, a decorator.
        message: The span's name; the function's by default.
        color: A color for visual tools; not used.
    """
    if func is None:
        return lambda func: traced(func, message=message, color=color)
    name = message or func.__name__
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def run(*args: object, **kwargs: object) -> Any:
            with Tracer(name, color):
                return await func(*args, **kwargs)

        return run

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> Any:
        with Tracer(name, color):
            return func(*args, **kwargs)

    return call
