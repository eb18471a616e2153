"""Hyper-connections: residual streams, mixed by weights that are computed from them, as in DeepSeek-V4."""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max.dtype import DType
from max.graph import DeviceRef, TensorType, TensorValue, Weight, ops
from max.graph.ops._stage import check_operand
from max.nn.layer import Module

__all__ = ["HyperConnection", "hyper_connection_gates", "mix_streams"]

_KERNEL = "max.hyper_connection.gates"


@k.inline
def _sigmoid(x: Any) -> Any:
    return k.f32(1) / (k.f32(1) + k.exp(-x))


@k.register(_KERNEL)
def _gates(
    pre: k.Output[k.f32, 2],
    post: k.Output[k.f32, 2],
    comb: k.Output[k.f32, 2],
    proj: k.Input[k.f32, 2],
    base: k.Input[k.f32, 1],
    scale: k.Input[k.f32, 1],
    ctx: k.Context,
    *,
    mult: int,
    eps: float,
    steps: int,
) -> None:
    for row in ctx.parallel(proj.shape[0]):
        for i in k.static_range(mult):
            pre[row, i] = _sigmoid(proj[row, i] * scale[0] + base[i]) + k.f32(eps)
            post[row, i] = k.f32(2) * _sigmoid(proj[row, mult + i] * scale[1] + base[mult + i])
        mix = k.tile(k.f32, (mult, mult), fill=0.0)
        for i in k.static_range(mult):
            top = k.f32(float("-inf"))
            for j in k.static_range(mult):
                at = (2 + i) * mult + j
                mix[i, j] = proj[row, at] * scale[2] + base[at]
                top = k.max(top, mix[i, j])
            total = k.f32(0)
            for j in k.static_range(mult):
                mix[i, j] = k.exp(mix[i, j] - top)
                total += mix[i, j]
            for j in k.static_range(mult):
                mix[i, j] = mix[i, j] / total + k.f32(eps)
        # Sinkhorn-Knopp: alternately normalise columns and rows of a positive matrix, columns first and last
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
        hc_sinkhorn_iters: The number of times that columns are normalised; rows are normalised in between.

    Returns:
        Three tensors: the weight of each stream in the input of a layer, ``[tokens, hc_mult]``; the weight of its
        output in each stream, ``[tokens, hc_mult]``; and the mixing matrix of the streams,
        ``[tokens, hc_mult * hc_mult]``.

    Raises:
        ValueError: A shape does not fit, or `hc_mult` or `hc_sinkhorn_iters` is less than 1.
        TypeError: An operand is not float32.
    """
    op = "hyper_connection_gates"
    for name, value in (("hc_mult", hc_mult), ("hc_sinkhorn_iters", hc_sinkhorn_iters)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{op}: {name} is {value!r}, expected 1 or more")
    width = (2 + hc_mult) * hc_mult
    operands = {
        "hc_proj": (hc_proj, 2, width),
        "pre_post_comb_b": (pre_post_comb_b, 1, width),
        "pre_post_comb_scale": (pre_post_comb_scale, 1, 3),
    }
    for name, (value, rank, size) in operands.items():
        check_operand(op, name, value, DType.float32, rank)
        if value.shape[-1] != size:
            raise ValueError(f"{op}: {name} is {value!r}, expected {size} as the last dimension")
    rows, device = hc_proj.shape[0], hc_proj.device
    sizes = (hc_mult, hc_mult, hc_mult * hc_mult)
    parameters: dict[str, Any] = {"mult": hc_mult, "eps": float(hc_eps), "steps": hc_sinkhorn_iters}
    pre, post, comb = ops.custom(
        _KERNEL,
        device,
        [hc_proj, pre_post_comb_b, pre_post_comb_scale],
        [TensorType(DType.float32, [rows, size], device) for size in sizes],
        parameters,
    )
    return pre.tensor, post.tensor, comb.tensor


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
    flat = ops.reshape(streams, [tokens, mult * hidden])
    inverse = ops.rsqrt(ops.mean(flat * flat, 1) + norm_eps)
    weights = ops.matmul(flat, ops.transpose(fn, 0, 1)) * inverse
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
        hc_sinkhorn_iters: The number of times that the columns of the mixing matrix are normalised.
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
