"""Hyper-connections: residual streams, mixed by weights that are computed from them, as in DeepSeek-V4."""

from __future__ import annotations

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.kernels.streams import hyper_connection_gates
from max.nn.layer import Module

__all__ = ["HyperConnection", "mix_streams"]


def mix_streams(
    hidden_streams: TensorValue,
    fn: TensorValue,
    base: TensorValue,
    scale: TensorValue,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[TensorValue, TensorValue, TensorValue]:
    """`HyperConnection` as a function of explicit weights.

    Args:
        hidden_streams: ``[tokens, hc_mult, hidden_size]``.
        fn: The projection, ``[(2 + hc_mult) * hc_mult, hc_mult * hidden_size]``.
        base: As `pre_post_comb_b` of `hyper_connection_gates`.
        scale: As `pre_post_comb_scale` of `hyper_connection_gates`.
        iterations: As `hc_sinkhorn_iters` of `hyper_connection_gates`.
        eps: As `hc_eps` of `hyper_connection_gates`.
        norm_eps: Added to the mean square of a token's streams.

    Raises:
        ValueError: The rank of the streams is not 3, or their number or width differs from that of the projection.
    """
    # eager tensors that stand for graph values are accepted too
    hidden_streams, fn = TensorValue(hidden_streams), TensorValue(fn)
    base, scale = TensorValue(base), TensorValue(scale)
    if hidden_streams.rank != 3:
        raise ValueError(
            f"HyperConnection: expected [tokens, hc_mult, hidden_size], got {hidden_streams!r}"
        )
    tokens, mult, hidden = hidden_streams.shape
    if mult * hidden != fn.shape[1] or fn.shape[0] != (mult + 2) * mult:
        raise ValueError(
            f"HyperConnection: the streams are {hidden_streams!r}, the projection takes {fn.shape[1]} elements"
        )
    streams = hidden_streams.cast(DType.float32)
    flat = ops.reshape(streams, [tokens, mult * hidden])  # [tokens, mult * hidden]
    inverse = ops.rsqrt(ops.mean(flat * flat, 1) + norm_eps)
    # the factor of the RMS norm is applied to the few results instead of the streams
    weights = ops.matmul(flat, ops.transpose(fn, 0, 1)) * inverse  # [tokens, (2 + mult) * mult]
    pre, post, comb = hyper_connection_gates(weights, base, scale, int(mult), eps, iterations)
    collapsed = ops.sum(ops.reshape(pre, [tokens, mult, 1]) * streams, 1)
    return (
        post,
        ops.reshape(comb, [tokens, mult, mult]),
        ops.reshape(collapsed, [tokens, hidden]).cast(hidden_streams.dtype),
    )


class HyperConnection(Module):
    """The weights of several residual streams around a layer, computed from the streams.

    ``post, comb, x = connection(streams)`` computes the layer's input ``x``. Given the layer's output ``y``, the new
    streams are ``ops.matmul(comb.transpose(1, 2), streams) + post[:, :, None] * y[:, None, :]``.

    Args:
        hidden_size: The width of a stream.
        hc_mult: The number of streams.
        device: The device of the weights.
        dtype: The dtype of the weights; must be float32.
        hc_sinkhorn_iters: The number of times that the columns of the mixing matrix are normalized.
        hc_eps: Added to weights and to the sums that divide them.
        rms_norm_eps: Added to the mean square of a token's streams.
    """

    __module__ = "max.nn.hyper_connection"

    hc_fn: Weight
    """The projection, of shape ``((2 + hc_mult) * hc_mult, hc_mult * hidden_size)``."""
    hc_base: Weight
    """Added to the projection's results."""
    hc_scale: Weight
    """The factors of the weights before the layer, of those after it, and of the mixing matrix."""

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        device: DeviceRef,
        dtype: DType = DType.float32,
        *,
        hc_sinkhorn_iters: int = 20,
        hc_eps: float = 1e-6,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        width = (2 + hc_mult) * hc_mult
        self.hc_fn = Weight("hc_fn", dtype, [width, hc_mult * hidden_size], device)
        self.hc_base = Weight("hc_base", dtype, [width], device)
        self.hc_scale = Weight("hc_scale", dtype, [3], device)
        self.iterations, self.eps, self.norm_eps = hc_sinkhorn_iters, hc_eps, rms_norm_eps

    def __call__(self, hidden_streams: TensorValue) -> tuple[TensorValue, TensorValue, TensorValue]:
        """The weights of a layer's output for each stream, the mixing matrix, and the layer's input.

        Args:
            hidden_streams: ``[tokens, hc_mult, hidden_size]``.

        Returns:
            ``[tokens, hc_mult]`` and ``[tokens, hc_mult, hc_mult]``, both float32, and ``[tokens, hidden_size]`` of
            the streams' dtype.

        Raises:
            ValueError: The shape of the streams does not fit.
        """
        return mix_streams(
            hidden_streams, self.hc_fn, self.hc_base, self.hc_scale, self.iterations, self.eps, self.norm_eps
        )  # fmt: skip
