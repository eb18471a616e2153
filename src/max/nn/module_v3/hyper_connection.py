"""Hyper-connections of eager tensors."""

from __future__ import annotations

from collections.abc import Iterator

from max.experimental import functional as F
from max.experimental import random
from max.experimental.tensor import Tensor
from max.nn.layers.hyper_connection import mix_streams
from max.nn.module_v3.module import Module

__all__ = ["HyperConnection"]

_mix = F.functional(mix_streams)


class HyperConnection(Module):
    """`max.nn.HyperConnection` for eager tensors; parameters are initialized at random.

    Args:
        hidden_size: The width of a stream.
        hc_mult: The number of streams.
        hc_sinkhorn_iters: The number of times that the columns of the mixing matrix are normalized.
        hc_eps: Added to weights and to the sums that divide them.
        rms_norm_eps: Added to the mean square of a token's streams.
    """

    hc_fn: Tensor
    """The projection, of shape ``((2 + hc_mult) * hc_mult, hc_mult * hidden_size)``."""
    hc_base: Tensor
    """Added to the projection's results."""
    hc_scale: Tensor
    """The factors of the weights before the layer, of those after it, and of the mixing matrix."""

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        *,
        hc_sinkhorn_iters: int = 20,
        hc_eps: float = 1e-6,
        rms_norm_eps: float = 1e-6,
    ) -> None:
        width = (2 + hc_mult) * hc_mult
        self.hc_fn = random.normal([width, hc_mult * hidden_size])
        self.hc_base = random.normal([width])
        self.hc_scale = random.normal([3])
        self.hidden_size, self.hc_mult = hidden_size, hc_mult
        self.iterations, self.eps, self.norm_eps = hc_sinkhorn_iters, hc_eps, rms_norm_eps

    def __call__(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of a layer's output for each stream, the mixing matrix, and the layer's input.

        Args:
            hidden_streams: ``[tokens, hc_mult, hidden_size]``.

        Raises:
            ValueError: The shape of the streams does not fit.
        """
        return _mix(
            hidden_streams, self.hc_fn, self.hc_base, self.hc_scale, self.iterations, self.eps, self.norm_eps
        )  # fmt: skip

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "hidden_size", self.hidden_size
        yield "hc_mult", self.hc_mult
