"""Feed-forward layers without a gate, which `max.nn` lacks."""

from __future__ import annotations

from collections.abc import Callable

from max.dtype import DType
from max.graph import DeviceRef, TensorValue, Weight, ops
from max.nn.activation import ACTIVATIONS
from max.nn.layer import Module
from max.nn.layers.linear import Linear

__all__ = ["PlainMLP", "XIELU", "XIELU_PARAMETERS"]


XIELU_PARAMETERS = ("alpha_p", "alpha_n", "beta", "eps")
"""The names of the parameters of `XIELU`."""


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
        above = _softplus(self.alpha_p) * wide * wide
        # clamp: the exponential of large positive elements is unused, but would overflow
        below = (ops.exp(ops.min(wide, self.eps)) - 1 - wide) * (
            self.beta + _softplus(self.alpha_n)
        )
        y = ops.where(wide > 0, above, below) + self.beta * wide
        return ops.cast(y, x.dtype)


def _softplus(x: TensorValue) -> TensorValue:
    return ops.log(ops.exp(x) + 1)


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
