"""Helpers of 26.x: parts of a model as subgraphs, and tensors that stay on their device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec, TypeVar

from max.experimental.tensor import Tensor

__all__ = ["PinnedDeviceTensor", "as_subgraph"]

P = ParamSpec("P")


R = TypeVar("R")


class _PinnedDevice:
    """Marks the annotation of `PinnedDeviceTensor`."""


PinnedDeviceTensor = Annotated[Tensor, _PinnedDevice]
"""The annotation of an attribute that holds a tensor in device memory; on CPUs it means any tensor."""


def as_subgraph(
    fn: Callable[P, R], *, name: str | None = None, prefix: str | None = None
) -> Callable[P, R]:
    """Marks a function or module that a model calls several times; returns a callable with the result of `fn`.

    Marking has no further effect: parts of a model that differ only in their weights always share kernels when the
    model is compiled.

    Args:
        fn: A function of tensors, or a module.
        name: A name for the part.
        prefix: The prefix of the names of its weights.

    Raises:
        TypeError: `fn` cannot be called, or a name is not a text.
    """
    if not callable(fn):
        raise TypeError(
            f"as_subgraph: {fn!r} is a {type(fn).__name__}, expected a function or a module"
        )
    texts: dict[str, Any] = {"name": name, "prefix": prefix}
    for argument, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise TypeError(f"as_subgraph: {argument} is {value!r}, expected text")

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return fn(*args, **kwargs)

    return functools.update_wrapper(call, fn, updated=())
