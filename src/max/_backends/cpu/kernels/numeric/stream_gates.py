"""The weights that mix residual streams, from a projection of the streams (hyper-connections)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, run_time_views


@k.inline
def _sigmoid(x: k.Value) -> Any:
    return k.f32(1) / (k.f32(1) + k.exp(-x))


@k.kernel
def stream_gates(
    pre: k.Output,
    post: k.Output,
    comb: k.Output,
    projection: k.Input,
    base: k.Input,
    scale: k.Input,
    ctx: k.Context,
    *,
    mult: int,
    eps: float,
    steps: int,
) -> None:
    """Computes a row of `pre`, `post` and `comb` from each row of the projection; see `mo.streams.gates`."""
    rows = projection.shape[0]
    check_size("the result", pre.shape[0], rows)
    check_size("the result", post.shape[0], rows)
    check_size("the result", comb.shape[0], rows)
    for row in ctx.parallel(projection.shape[0]):
        # the projection has pre, post and a square matrix: (2 + mult) * mult columns
        for i in k.static_range(mult):
            pre[row, i] = _sigmoid(projection[row, i] * scale[0] + base[i]) + k.f32(eps)
            post[row, i] = k.f32(2) * _sigmoid(
                projection[row, mult + i] * scale[1] + base[mult + i]
            )
        mix = k.tile(k.f32, (mult, mult), fill=0.0)
        for i in k.static_range(mult):
            # softmax of a row, with its maximum subtracted
            top = k.f32(float("-inf"))
            for j in k.static_range(mult):
                at = (2 + i) * mult + j
                mix[i, j] = projection[row, at] * scale[2] + base[at]
                top = k.max(top, mix[i, j])
            total = k.f32(0)
            for j in k.static_range(mult):
                mix[i, j] = k.exp(mix[i, j] - top)
                total += mix[i, j]
            for j in k.static_range(mult):
                # positive, as the iteration divides by sums
                mix[i, j] = mix[i, j] / total + k.f32(eps)
        # Sinkhorn-Knopp: alternately normalize columns and rows of a positive matrix, columns first and last
        for step in range(2 * steps - 1):
            for i in k.static_range(mult):
                total = k.f32(eps)
                for j in k.static_range(mult):
                    total += mix[j, i] if step % 2 == 0 else mix[i, j]
                for j in k.static_range(mult):
                    if step % 2 == 0:
                        mix[j, i] = mix[j, i] / total
                    else:
                        mix[i, j] = mix[i, j] / total
        for i in k.static_range(mult):
            for j in k.static_range(mult):
                comb[row, i * mult + j] = mix[i, j]


def _lower_gates(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.streams.gates`: workers share the rows."""
    params = {
        "mult": attributes["hc_mult"],
        "eps": attributes["hc_eps"],
        "steps": attributes["hc_sinkhorn_iters"],
    }
    return KernelCall(stream_gates, run_time_views(results, operands), params)


LOWERINGS = {"mo.streams.gates": _lower_gates}
