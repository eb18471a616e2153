"""The context ``ctx``: worker numbers, parallel loops, barriers and scratch memory."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from typing import Any

from max._abi import SCRATCH_ALIGNMENT, Context
from max.kernel.errors import KernelSyntaxError
from max.kernel.frontend.conversions import as_index
from max.kernel.frontend.division import MAX_SIZE
from max.kernel.frontend.functions.matrix_tiles import TILE_METHODS, TilesValue
from max.kernel.frontend.functions.table import Handler, as_dtype
from max.kernel.frontend.state import Frontend
from max.kernel.frontend.values import ChunksValue, ContextValue, Method, ParallelValue, describe
from max.kernel.frontend.views.views import View, scratch_view
from max.kernel.ir.nodes import Barrier
from max.kernel.types import INDEX, POINTER


def emit_parallel(fe: Frontend, ctx: ContextValue, shape: Any, grain: Any = 0) -> Any:
    if isinstance(shape, tuple):
        if not shape:
            fe.fail("ctx.parallel takes a size or a non-empty shape")
        return ParallelValue(tuple(as_index(fe, s) for s in shape), as_index(fe, grain), False)
    return ParallelValue((as_index(fe, shape),), as_index(fe, grain), True)


def emit_chunks(
    fe: Frontend, ctx: ContextValue, total: Any, grain: Any = 0, multiple: Any = 1
) -> Any:
    """`ctx.chunks`: the domain of a loop over chunks, whose sizes are multiples of `multiple`."""
    if not isinstance(multiple, int) or multiple < 1:
        fe.fail(
            f"multiple must be a positive integer known at compile time, got {describe(multiple)}"
        )
    return ChunksValue(as_index(fe, total), as_index(fe, grain), multiple)


def emit_barrier(fe: Frontend, ctx: ContextValue) -> None:
    """`ctx.barrier`."""
    if fe.parallel_depth:
        fe.fail(
            "a barrier cannot be inside a parallel loop: not all workers reach it",
            KernelSyntaxError,
        )
    fe.b.emit(Barrier(fe.b.line))


def emit_scratch(fe: Frontend, ctx: ContextValue, dtype: Any, shape: Any) -> View:
    """`ctx.scratch`: a view of the next aligned bytes of the worker's scratch memory."""
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple) or not all(isinstance(s, int) and s >= 0 for s in sizes):
        fe.fail(f"the shape of scratch memory must be known at compile time, got {describe(shape)}")
    dtype = as_dtype(fe, dtype)
    size = dtype.size
    for s in sizes:
        size *= s
    # each allocation starts aligned, whatever the sizes before it
    offset = fe.scratch_bytes
    fe.scratch_bytes += -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    base = fe.b.op("ctx", (), POINTER, Context.SCRATCH.value)
    return scratch_view(fe, base, offset, dtype, sizes)


_CONTEXT_METHODS: dict[str, Handler] = {
    "parallel": emit_parallel,
    "chunks": emit_chunks,
    "barrier": emit_barrier,
    "scratch": emit_scratch,
}
_CONTEXT_NUMBERS = {"worker": (Context.WORKER, 0), "num_workers": (Context.WORKERS, 1)}
"""Attributes of ``ctx``: the field, and its minimum."""


def context_attribute(fe: Frontend, ctx: Any, name: str) -> Any:
    """An attribute of the context, such as ``ctx.worker``, or of matrix tiles; None if the name is unknown."""
    if isinstance(ctx, TilesValue):
        if name == "shapes":
            return ctx.shapes
        return Method(TILE_METHODS[name], ctx) if name in TILE_METHODS else None
    if not isinstance(ctx, ContextValue):
        return None
    if name in _CONTEXT_METHODS:
        return Method(_CONTEXT_METHODS[name], ctx)
    if name in _CONTEXT_NUMBERS:
        # the bound lets the analysis drop checks and signed divisions
        field, low = _CONTEXT_NUMBERS[name]
        number = fe.b.op("ctx", (), INDEX, field.value)
        fe.b.intervals[number.id] = low, MAX_SIZE
        return number
    if name == "target":
        return fe.target
    return None
