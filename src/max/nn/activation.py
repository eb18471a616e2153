"""Activations by the names of model configurations, and gated activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from max._names import lazy_names
from max.graph import TensorValue, ops

__all__ = [
    "ACTIVATIONS",
    "GatedActivation",
    "activation_function_from_name",
    "activation_named",
    "check_limit",
    "limited_product",
    "make_concatenated_gated_activation_fn",
    "make_interleaved_gated_activation_fn",
    "make_stacked_gated_activation_fn",
    "softplus",
]


def _squared_relu(x: TensorValue) -> TensorValue:
    # So et al., "Primer", 2021
    y = ops.relu(x)
    return y * y


def _clip(
    function: Callable[[TensorValue], TensorValue], low: float, high: float
) -> Callable[[TensorValue], TensorValue]:
    return lambda x: ops.min(ops.max(function(x), low), high)


def softplus(x: TensorValue) -> TensorValue:
    """``log(1 + exp(x))`` without overflow."""
    # the exponent is never positive
    return ops.relu(x) + ops.log1p(ops.exp(-ops.abs(x)))


def _mish(x: TensorValue) -> TensorValue:
    return x * ops.tanh(softplus(x))


def _laplace(x: TensorValue) -> TensorValue:
    """The distribution function of a normal distribution near that of Laplace (https://arxiv.org/abs/2209.10655)."""
    # mean sqrt(1 / 2), standard deviation sqrt(1 / (4 * pi))
    return 0.5 * (1.0 + ops.erf((x - 0.707107) * (1 / (0.282095 * math.sqrt(2.0)))))


ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "gelu_quick": lambda x: ops.gelu(x, "quick"),
    "relu": ops.relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
    "relu2": _squared_relu,
    "relu6": _clip(ops.relu, 0.0, 6.0),
    "gelu_10": _clip(ops.gelu, -10.0, 10.0),
    # MobileNetV3: relu6(x + 3) / 6 in place of the sigmoid
    "hardswish": lambda x: x * _clip(ops.relu, 0.0, 6.0)(x + 3.0) * (1 / 6),
    "sqrtsoftplus": lambda x: ops.sqrt(softplus(x)),
    "leaky_relu": lambda x: ops.max(x, x * 0.01),
    "linear": lambda x: x,
    "mish": _mish,
    "laplace": _laplace,
}
"""The activations of gated MLPs by name."""


def activation_named(name: str, user: str) -> Callable[[TensorValue], TensorValue]:
    """Looks up an activation by name.

    Args:
        name: A key of `ACTIVATIONS`.
        user: The name of the caller, for error messages.

    Raises:
        ValueError: There is no activation of this name.
    """
    function = ACTIVATIONS.get(name)
    if function is None:
        raise ValueError(
            f"{user}: the activation is {name!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    return function


def activation_function_from_name(name: str) -> Callable[[TensorValue], TensorValue]:
    """Looks up an activation by name.

    Args:
        name: silu, gelu, gelu_tanh, gelu_quick, relu, tanh, sigmoid or another key of `ACTIVATIONS`.

    Raises:
        ValueError: There is no activation of this name.
    """
    return activation_named(name, "activation_function_from_name")


def check_limit(op: str, limit: float) -> None:
    """Checks the bound of the factors of a gated activation.

    Args:
        op: The layer, for error messages.
        limit: The bound; 0: none.

    Raises:
        ValueError: It is negative or NaN.
    """
    if not limit >= 0:
        raise ValueError(f"{op}: the limit is {limit}, expected 0 or more")


def limited_product(factor: TensorValue, up: TensorValue, limit: float | None) -> TensorValue:
    """``factor * up``.

    Args:
        factor: The activation of the gate projection's outputs.
        up: The outputs of the up projection.
        limit: The upper bound of `factor` and the bound of the magnitude of `up`; 0 or None: no bounds.
    """
    if limit:
        factor, up = ops.min(factor, limit), ops.min(ops.max(up, -limit), limit)
    return factor * up


_FUSED = ("silu", "swigluoai", "gelu_tanh")


@dataclass(frozen=True)
class GatedActivation:
    """Maps the outputs of the gate and up projections to the input of the down projection; for ``MoE(activation=)``.

    Args:
        fused_activation: ``silu`` or ``gelu_tanh`` of the gate, times the up projection; or ``swigluoai``, the
            activation of GPT-OSS: ``g * sigmoid(alpha * g) * (u + 1)``, with ``g`` and ``u`` clamped by `limit`.
        alpha: The ``alpha`` of ``swigluoai``, which requires `alpha` and `limit`.
        limit: For ``silu``, the upper bound of the activation and the bound of the magnitude of the up projection. For
            ``swigluoai``, the upper bound of ``g`` and the bound of the magnitude of ``u``. 0: no bounds.
        gated_activation_fn: A function to use instead. Its arguments are the outputs of the gate and up projections,
            concatenated along the last dimension, and the size of each.

    Raises:
        ValueError: The activation is unknown, or `alpha` or `limit` does not fit it.
    """

    fused_activation: str = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    gated_activation_fn: Callable[[TensorValue, int], TensorValue] | None = None

    def __post_init__(self) -> None:
        name = self.fused_activation
        if name not in _FUSED:
            raise ValueError(f"GatedActivation: {name!r}, expected one of {', '.join(_FUSED)}")
        check_limit("GatedActivation", self.limit)
        if name == "swigluoai":
            if not (self.alpha and self.limit):
                raise ValueError("GatedActivation: swigluoai needs alpha and limit, other than 0")
        elif self.alpha:
            raise ValueError(f"GatedActivation: {name} takes no alpha")
        elif name == "gelu_tanh" and self.limit:
            raise ValueError("GatedActivation: gelu_tanh takes no limit")

    def kernel_parameters(self) -> dict[str, float | str]:
        """The name and the parameters of the activation, as kernels take them.

        Raises:
            ValueError: The activation is a function.
        """
        if self.gated_activation_fn is not None:
            raise ValueError("GatedActivation: a gated_activation_fn has no parameters of kernels")
        return {
            "activation": self.fused_activation,
            "swiglu_alpha": self.alpha,
            "swiglu_limit": self.limit,
        }

    def __call__(self, gate: TensorValue, up: TensorValue) -> TensorValue:
        """Computes the input of the down projection.

        Args:
            gate: The outputs of the gate projection.
            up: The outputs of the up projection.
        """
        if self.gated_activation_fn is not None:
            return self.gated_activation_fn(ops.concat([gate, up], axis=-1), int(gate.shape[-1]))
        if self.fused_activation == "swigluoai":
            gate = ops.min(gate, self.limit)
            up = ops.min(ops.max(up, -self.limit), self.limit)
            return gate * ops.sigmoid(gate * self.alpha) * (up + 1)
        return limited_product(ACTIVATIONS[self.fused_activation](gate), up, self.limit)


_Activation = Callable[[TensorValue], TensorValue]


def _check_halves(op: str, both: TensorValue, size: int) -> None:
    if both.shape[-1] != 2 * size:
        raise ValueError(f"{op}: the last dimension of {both!r} is not twice {size}")


def make_concatenated_gated_activation_fn(
    activation_fn: _Activation, limit: float | None = None
) -> Callable[[TensorValue, int], TensorValue]:
    """Makes a function of ``[…, 2 * size]`` and the size: the gate's outputs, then those of the up projection.

    Args:
        activation_fn: The activation applied to the gate's outputs.
        limit: The upper bound of the activation and the bound of the magnitude of the factor that it multiplies.

    Raises:
        ValueError: The limit is negative.
    """
    check_limit("make_concatenated_gated_activation_fn", limit or 0.0)

    def split_halves(both: TensorValue, size: int) -> TensorValue:
        _check_halves("concatenated", both, size)
        return limited_product(activation_fn(both[..., :size]), both[..., size:], limit)

    return split_halves


def make_interleaved_gated_activation_fn(
    activation_fn: _Activation,
) -> Callable[[TensorValue, int], TensorValue]:
    """Makes a function of ``[…, 2 * size]`` and the size: outputs of the gate and up projections alternate.

    Args:
        activation_fn: The activation applied to the gate's outputs.
    """

    def split_pairs(both: TensorValue, size: int) -> TensorValue:
        _check_halves("interleaved", both, size)
        return activation_fn(both[..., ::2]) * both[..., 1::2]

    return split_pairs


def make_stacked_gated_activation_fn(
    activation_fn: _Activation,
) -> Callable[[TensorValue, TensorValue], TensorValue]:
    """Makes a function of two tensors: the outputs of the gate and those of the up projection.

    Args:
        activation_fn: The activation applied to the gate's outputs.
    """
    return lambda gate, up: activation_fn(gate) * up


__getattr__ = lazy_names(__name__)
