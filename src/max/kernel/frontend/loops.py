"""What a ``for`` may loop over besides sequences, and the context, at compile time."""

from __future__ import annotations

from dataclasses import dataclass

from max.kernel.frontend.arithmetic import Runtime
from max.kernel.frontend.views import Index


@dataclass(frozen=True, slots=True, eq=False)
class ParallelValue(Runtime):
    """``ctx.parallel(shape, grain)``."""

    shape: tuple[Index, ...]
    grain: Index  # 0: chosen at run time
    scalar: bool  # the shape was one number, so is the index

    def __str__(self) -> str:
        return "a parallel loop"


@dataclass(frozen=True, slots=True, eq=False)
class ChunksValue(Runtime):
    """``ctx.chunks(n, grain, multiple)``."""

    total: Index
    grain: Index
    multiple: int

    def __str__(self) -> str:
        return "a parallel loop over chunks"


@dataclass(frozen=True, slots=True, eq=False)
class VectorsValue(Runtime):
    """``k.vectors(n, width)`` or ``k.vectors(start, stop, width)``."""

    start: Index
    stop: Index
    width: int

    def __str__(self) -> str:
        return "a loop over vectors"


@dataclass(frozen=True, slots=True, eq=False)
class ContextValue(Runtime):
    """The kernel's ``ctx`` parameter."""

    def __str__(self) -> str:
        return "the context"
