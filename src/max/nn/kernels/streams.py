"""Mixed residual streams (hyper-connections), as in DeepSeek-V4."""

from __future__ import annotations

from max.graph import TensorValue
from max.graph.ops.staging.stage import stage_declared

__all__ = ["hyper_connection_gates"]


def hyper_connection_gates(
    hc_proj: TensorValue,
    pre_post_comb_b: TensorValue,
    pre_post_comb_scale: TensorValue,
    hc_mult: int,
    hc_eps: float,
    hc_sinkhorn_iters: int,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """Computes the weights that mix residual streams from a projection of the streams.

    Args:
        hc_proj: ``[tokens, (2 + hc_mult) * hc_mult]``, float32.
        pre_post_comb_b: Added to the scaled projection, float32 ``[(2 + hc_mult) * hc_mult]``.
        pre_post_comb_scale: The factors of the three parts, float32 ``[3]``.
        hc_mult: The number of streams.
        hc_eps: Added to weights and to the sums that divide them.
        hc_sinkhorn_iters: The number of times that columns are normalized; rows are normalized in between.

    Returns:
        Three tensors: the weight of each stream in the input of a layer, ``[tokens, hc_mult]``; the weight of its
        output in each stream, ``[tokens, hc_mult]``; and the mixing matrix of the streams,
        ``[tokens, hc_mult * hc_mult]``.

    Raises:
        ValueError: A shape does not fit, or `hc_mult` or `hc_sinkhorn_iters` is less than 1.
        TypeError: An operand is not float32, or a number not an integer.
    """
    parameters = {
        "hc_mult": hc_mult,
        "hc_eps": float(hc_eps),
        "hc_sinkhorn_iters": hc_sinkhorn_iters,
    }
    pre, post, comb = stage_declared(
        "streams.gates", [hc_proj, pre_post_comb_b, pre_post_comb_scale], parameters
    )
    return pre, post, comb
