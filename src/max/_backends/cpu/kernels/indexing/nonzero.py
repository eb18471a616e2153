"""Indices of non-zero elements: workers count per chunk, worker 0 sums the counts, workers write the rows of chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.kernel_call import KernelCall, Operand, Workspace, product, view
from max.dtype import DType

CHUNK = 4096
"""The number of elements of a task."""


@k.kernel
def nonzero(out: k.Output, mask: k.Input, starts: k.InOut, ctx: k.Context) -> None:
    """Writes a row of `out` for each true element of `mask`, in row-major order: its index along each axis.

    `starts` receives the number of true elements before each chunk.
    """
    size = mask.size
    flat = mask.reshape(size)
    chunks = k.ceildiv(size, CHUNK)
    for chunk in ctx.parallel(chunks):
        count = k.i64(0)
        for i in range(chunk * CHUNK, k.min((chunk + 1) * CHUNK, size)):
            count += k.i64(flat[i])
        starts[chunk] = count
    # worker 0 reads the counts of all
    ctx.barrier()
    if ctx.worker == 0:
        total = k.i64(0)
        for chunk in range(chunks):
            count = starts[chunk]
            # exclusive prefix sums: the first row of the chunk
            starts[chunk] = total
            total += count
        if total != out.shape[0]:
            raise ValueError(
                "{} elements are not 0, but the result has {} rows", total, out.shape[0]
            )
    # the others read the prefix sums
    ctx.barrier()
    for chunk in ctx.parallel(chunks):
        row = k.i64(starts[chunk])
        for i in range(chunk * CHUNK, k.min((chunk + 1) * CHUNK, size)):
            if flat[i]:
                remaining = k.i64(i)
                for reverse in k.static_range(mask.rank):
                    axis = mask.rank - 1 - reverse
                    out[row, axis] = remaining % mask.shape[axis]
                    remaining = remaining // mask.shape[axis]
                row += 1


def _lower_nonzero(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    mask, _ = operands
    (out,) = results
    chunks = (product(mask.shape) + (CHUNK - 1)) // CHUNK
    workspace = Workspace(DType.int64, (chunks,))
    args = (
        view("result", 0, out, static=(False, True)),
        view("operand", 0, mask, static=False),
        view("workspace", 0, workspace, static=False),
    )
    return KernelCall(nonzero, args, workspaces=(workspace,))


LOWERINGS = {"mo.nonzero": _lower_nonzero}
