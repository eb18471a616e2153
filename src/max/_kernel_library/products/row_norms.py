"""RMS norms of the rows of a product's left operand, in the product's own launch.

Where x is small, every worker computes all of it for itself, in less time than it would take to wait for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._kernel_library.lowering import Arg, Operand, Workspace, product, view

ALONE, ALONE_WORKERS = 4096, 64
"""Up to so many elements of x each of up to so many workers computes for itself."""

Norm = tuple[float, float, bool]
"""Epsilon, what is added to gamma, and whether gamma is multiplied in before a row is rounded to its dtype."""


@k.inline
def is_alone(elements: Any, ctx: Any) -> Any:
    """Whether each worker computes so many elements of x for itself."""
    return elements <= ALONE and ctx.num_workers <= ALONE_WORKERS


@k.inline
def normalise_row(out: Any, x: Any, gamma: Any, norm: Norm, width: int) -> None:
    """`out` `[K]` = `x / sqrt(mean(x²) + epsilon) * (gamma + offset)`."""
    epsilon, offset, multiply_first = norm
    size = x.shape[0]
    sums = k.splat(k.f32(0), width)
    for j, mask in k.vectors(size, width):
        v = k.cast(x.load(j, width=width, mask=mask), k.f32)
        sums = k.fma(v, v, sums)
    scale = 1.0 / k.sqrt(k.reduce_add(sums) / k.f32(size) + k.f32(epsilon))
    for j, mask in k.vectors(size, width):
        v = k.cast(x.load(j, width=width, mask=mask), k.f32) * scale
        if not multiply_first:
            v = k.cast(k.cast(v, out.dtype), k.f32)
        factor = k.cast(gamma.load(j, width=width, mask=mask), k.f32)
        if offset:
            factor = factor + k.f32(offset)
        out.store(j, value=k.cast(v * factor, out.dtype), mask=mask)


@k.inline
def normalise(x: Any, gamma: Any, memory: Any, norm: Norm, ctx: Any) -> Any:
    """The rows of `x` `[M, K]`, normalised, in `memory`; when it returns this worker may read all of them."""
    rows, size = x.shape[0], x.shape[1]
    width = ctx.target.width(k.f32)
    alone = is_alone(rows * size, ctx)
    out = memory[(ctx.worker * ALONE if alone else k.i64(0)) :]
    if alone:
        for r in range(rows):
            normalise_row(out[r * size :], x[r], gamma, norm, width)
    else:
        for r in ctx.parallel(rows):
            normalise_row(out[r * size :], x[r], gamma, norm, width)
        ctx.barrier()
    return out[: rows * size].reshape(rows, size)


def norm_arguments(
    operands: Sequence[Operand], attributes: Mapping[str, Any], number: int
) -> tuple[tuple[Arg, ...], dict[str, Any], tuple[Workspace, ...]]:
    """What a launch with a norm has besides: arguments, parameters and workspaces; nothing where `attributes` have no `norm`.

    Args:
        operands: x `[…, K]`, the weight, and gamma `[K]`.
        attributes: Those of the op; `norm` is a `Norm`.
        number: The number of the workspace.
    """
    if "norm" not in attributes:
        return (), {}, ()
    x, gamma = operands[0], operands[2]
    memory = Workspace(x.dtype, (product(x.shape) + ALONE_WORKERS * ALONE,))
    args = (
        view("operand", 2, gamma, static=False),
        view("workspace", number, memory, static=False),
    )
    return args, {"norm": attributes["norm"]}, (memory,)
