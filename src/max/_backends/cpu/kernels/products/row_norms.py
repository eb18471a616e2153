"""RMS norms of the rows of a product's left operand, in the product's own launch.

Each worker normalizes a small activation itself, which takes less time than a barrier. The workspace then holds one
copy per worker, otherwise a single copy::

    small    worker 0: SMALL_ELEMENTS │ worker 1: SMALL_ELEMENTS │ …
    large    x [M, K], each row by one worker, then a barrier
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.kernel_call import Arg, Operand, Workspace, product, view

SMALL_ELEMENTS, SMALL_WORKERS = 4096, 64
"""Maximum size of an activation, and maximum number of workers, if each worker normalizes all of it itself."""

PIECE = 128
"""The most squares that a lane adds up in f32 before their sum is added in f64."""

Norm = tuple[float, float, bool]
"""Epsilon, the offset of gamma, and whether gamma is applied before a row is rounded to its dtype."""


class NormOperands(NamedTuple):
    """The operands of a norm in a product's launch.

    Args:
        gamma: The weight of the norm, `[K]`.
        memory: The workspace of the normalized rows, flat.
    """

    gamma: k.Input
    memory: k.InOut


@k.inline
def is_small(elements: k.Value, ctx: k.Context) -> Any:
    """Whether each worker normalizes an activation of `elements` elements itself."""
    return elements <= SMALL_ELEMENTS and ctx.num_workers <= SMALL_WORKERS


@k.outlined
def normalize_row(out: k.View, x: k.View, gamma: k.View, norm: Norm, width: int) -> None:
    """`out` `[K]` = `x / sqrt(mean(x²) + epsilon) * (gamma + offset)`, in f32."""
    epsilon, offset, multiply_first = norm
    size = x.size
    total = k.f64(0)
    # pieces bound the error in f32, whatever the size of a row
    for start in range(0, size, PIECE * width):
        sums = k.splat(k.f32(0), width)
        for j, mask in k.vectors(start, k.min(start + PIECE * width, size), width):
            v = k.cast(x.load(j, width=width, mask=mask), k.f32)
            sums = k.fma(v, v, sums)
        total = total + k.cast(k.reduce_add(sums), k.f64)
    scale = 1.0 / k.sqrt(k.cast(total, k.f32) / k.f32(size) + k.f32(epsilon))
    for j, mask in k.vectors(size, width):
        v = k.cast(x.load(j, width=width, mask=mask), k.f32) * scale
        # rounded before gamma, as a graph that stores the norm in this dtype
        if not multiply_first:
            v = k.cast(k.cast(v, out.dtype), k.f32)
        factor = k.cast(gamma.load(j, width=width, mask=mask), k.f32)
        if offset:
            factor = factor + k.f32(offset)
        out.store(j, value=k.cast(v * factor, out.dtype), mask=mask)


@k.inline
def normalize(x: k.View, operands: NormOperands, norm: Norm, ctx: k.Context) -> Any:
    """Normalizes the rows of `x` `[M, K]` into the workspace; on return this worker may read all of them."""
    gamma, memory = operands
    rows, size = x.shape[0], x.shape[1]
    width = ctx.target.width(k.f32)
    small = is_small(rows * size, ctx)
    out = memory[(ctx.worker * SMALL_ELEMENTS if small else k.i64(0)) :]
    # equal shares of the rows instead of a parallel loop, so that one loop serves both cases
    share = rows if small else k.ceildiv(rows, ctx.num_workers)
    first = k.i64(0) if small else ctx.worker * share
    for r in range(first, k.min(first + share, rows)):
        normalize_row(out[r * size :], x[r], gamma, norm, width)
    if not small:
        ctx.barrier()
    return out[: rows * size].reshape(rows, size)


def norm_arguments(
    operands: Sequence[Operand], attributes: Mapping[str, Any], index: int
) -> tuple[tuple[Arg, ...], dict[str, Any], tuple[Workspace, ...]]:
    """The arguments, parameters and workspaces that a norm adds to a launch; empty if `attributes` has no `norm`.

    Args:
        operands: x `[…, K]`, the weight, and gamma `[K]`.
        attributes: The op's attributes; `norm` is a `Norm`.
        index: The index of the workspace.
    """
    if "norm" not in attributes:
        return (), {}, ()
    x, gamma = operands[0], operands[2]
    memory = Workspace(x.dtype, (product(x.shape) + SMALL_WORKERS * SMALL_ELEMENTS,))
    args = (
        view("operand", 2, gamma, static=False),
        view("workspace", index, memory, static=False),
    )
    return args, {"norm": attributes["norm"]}, (memory,)
