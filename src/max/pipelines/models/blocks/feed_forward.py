"""Feed-forward layers that are one MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import NormalDist
from typing import Any

from max._dataclass import dataclass
from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.activation import ACTIVATIONS, softplus
from max.nn.layer import Layer, Module
from max.nn.layers.linear import Linear
from max.nn.layers.mlp import MLP
from max.pipelines.models.blocks.mixer import Site

__all__ = ["MLPForm", "PlainMLP", "ScaledMLP", "SparseMLP", "XIELU", "XIELU_PARAMETERS"]


XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The names of the parameters of `XIELU`."""


@dataclass(frozen=True)
class MLPForm:
    """The form of a feed-forward layer that is one MLP.

    Args:
        size: The inner size.
        activation: The activation, a key of `max.nn.activation.ACTIVATIONS`, or xielu, which has parameters.
        gated: Whether there is a gate.
        bias: Whether the projections have biases.
        sparsity: The fraction of the gates that is set to zero.
        factors: The factors of the gate before its activation, and of the result; None: none are applied.
        xielu: The values of `XIELU_PARAMETERS`, if they are not weights of the checkpoint.
    """

    size: int
    activation: str = "silu"
    gated: bool = True
    bias: bool = False
    sparsity: float = 0.0
    factors: tuple[float, float] | None = None
    xielu: tuple[float, ...] = ()

    def layer(self, site: Site) -> Layer:
        """The layer.

        Args:
            site: What it needs from its model.
        """
        if not self.gated:
            return PlainMLP(
                site.dtype,
                site.hidden_size,
                self.size,
                site.device,
                site.linear_cls,
                self.bias,
                self.activation,
            )
        options: dict[str, Any] = {
            "dtype": site.dtype,
            "quantization_encoding": None,
            "hidden_dim": site.hidden_size,
            "feed_forward_length": self.size,
            "devices": [site.device],
            "linear_cls": site.linear_cls,
            "has_bias": self.bias,
            "activation_function": self.activation,
        }
        if self.factors is not None:
            return ScaledMLP(self.factors, **options)
        return SparseMLP(self.sparsity, **options) if self.sparsity else MLP(**options)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of features that are split over devices."""
        return (self.size,)

    @property
    def features(self) -> int:
        """The number of features that are computed for a token."""
        return self.size

    def part(self, share: Callable[[int], int]) -> MLPForm:
        """One device's part of the features.

        Args:
            share: The device's share of a number of features.
        """
        return replace(self, size=share(self.size))


class XIELU(Module):
    """xIELU (https://arxiv.org/abs/2411.13010), piecewise: quadratic above 0, exponential below, plus a linear term.

    Weights: ``alpha_p`` and ``alpha_n``, before softplus, ``beta`` and ``eps``; all ``[1]``, float32.

    Args:
        device: Where it runs.
    """

    def __init__(self, device: DeviceRef) -> None:
        self.alpha_p = Weight("alpha_p", DType.float32, [1], device)
        self.alpha_n = Weight("alpha_n", DType.float32, [1], device)
        self.beta = Weight("beta", DType.float32, [1], device)
        self.eps = Weight("eps", DType.float32, [1], device)

    def __call__(self, x: TensorValue) -> TensorValue:
        """The activation, of x's dtype; computed in float32.

        Args:
            x: Of any shape.
        """
        wide = ops.cast(x, DType.float32)
        above = softplus(self.alpha_p) * wide * wide
        # clamp: the exponential of large positive elements is unused, but would overflow
        below = (ops.exp(ops.min(wide, self.eps)) - 1 - wide) * (self.beta + softplus(self.alpha_n))
        y = ops.where(wide > 0, above, below) + self.beta * wide
        return ops.cast(y, x.dtype)


class PlainMLP(Module):
    """``down(activation(up(x)))``.

    Weights: ``up_proj``, ``down_proj`` (`Linear`); with xielu those of ``act_fn``.

    Args:
        dtype: The dtype of the weights.
        hidden_dim: The size of the input's last dimension.
        feed_forward_length: The size between the projections.
        device: Where it runs.
        linear_cls: The constructor of the projections.
        has_bias: Whether the projections have biases.
        activation: A key of `max.nn.activation.ACTIVATIONS`, or xielu, which has parameters and is a layer.
    """

    def __init__(
        self,
        dtype: DType,
        hidden_dim: int,
        feed_forward_length: int,
        device: DeviceRef,
        linear_cls: Callable[..., Linear] = Linear,
        has_bias: bool = False,
        activation: str = "gelu",
    ) -> None:
        self.activation = activation
        if activation == "xielu":
            self.act_fn = XIELU(device)
        self.up_proj = linear_cls(hidden_dim, feed_forward_length, dtype, device, has_bias=has_bias)
        self.down_proj = linear_cls(
            feed_forward_length, hidden_dim, dtype, device, has_bias=has_bias
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        """``down(activation(up(x)))``, of x's dtype.

        Args:
            x: ``[…, hidden_dim]``.
        """
        up = self.up_proj(x)
        if self.activation == "xielu":
            hidden = self.act_fn(up)
        else:
            hidden = ACTIVATIONS[self.activation](up)
        return ops.cast(self.down_proj(hidden), x.dtype)


class SparseMLP(MLP):
    """A gated MLP with sparse gates: ``relu(gate - bound)`` replaces a gate before the activation.

    The bound is the mean of a token's gates plus a multiple of their standard deviation.

    Args:
        sparsity: The fraction of normally distributed gates below the bound, in (0, 1).
        options: The arguments of `MLP`.
    """

    def __init__(self, sparsity: float, **options: Any) -> None:
        super().__init__(**options)
        # standard deviations above the mean below which a fraction `sparsity` of normally distributed gates lies
        self.bound = NormalDist().inv_cdf(sparsity)
        self.activation = ACTIVATIONS[options["activation_function"]]

    def __call__(self, x: TensorValue) -> TensorValue:
        """The result, of x's shape and dtype.

        Args:
            x: ``[total_seq_len, hidden_size]``.
        """
        gates = self.gate_proj(x)
        # each token has its own bound, `self.bound` standard deviations above the mean of its gates
        centered = gates - ops.mean(gates, axis=-1)
        bound = ops.sqrt(ops.mean(centered * centered, axis=-1)) * self.bound
        hidden = self.activation(ops.relu(centered - bound)) * self.up_proj(x)
        return ops.cast(self.down_proj(hidden), x.dtype)


class ScaledMLP(MLP):
    """A gated MLP with factors on the gate and on the result.

    Args:
        factors: The two factors.
        options: The arguments of `MLP`.
    """

    def __init__(self, factors: tuple[float, float], **options: Any) -> None:
        super().__init__(**options)
        self.factors = factors

    def __call__(self, x: TensorValue) -> TensorValue:
        """``factor * down(activation(factor * gate(x)) * up(x))``, of x's dtype.

        Args:
            x: ``[…, hidden_dim]``.
        """
        inner, outer = self.factors
        gate = ACTIVATIONS[self.activation_function](self.gate_proj(x) * inner)
        return ops.cast(self.down_proj(gate * self.up_proj(x)) * outer, x.dtype)
