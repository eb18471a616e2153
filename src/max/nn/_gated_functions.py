"""Gated activations of the two projections of a gated MLP, by the layout of their outputs."""

from __future__ import annotations

from collections.abc import Callable

from max.graph import TensorValue
from max.nn.activation import check_limit, limited_product

__all__ = [
    "make_concatenated_gated_activation_fn",
    "make_interleaved_gated_activation_fn",
    "make_stacked_gated_activation_fn",
]

_Activation = Callable[[TensorValue], TensorValue]


def _checked(op: str, both: TensorValue, size: int) -> None:
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

    def concatenated(both: TensorValue, size: int) -> TensorValue:
        _checked("concatenated", both, size)
        return limited_product(activation_fn(both[..., :size]), both[..., size:], limit)

    return concatenated


def make_interleaved_gated_activation_fn(
    activation_fn: _Activation,
) -> Callable[[TensorValue, int], TensorValue]:
    """Makes a function of ``[…, 2 * size]`` and the size: outputs of the gate and up projections alternate.

    Args:
        activation_fn: The activation applied to the gate's outputs.
    """

    def interleaved(both: TensorValue, size: int) -> TensorValue:
        _checked("interleaved", both, size)
        return activation_fn(both[..., ::2]) * both[..., 1::2]

    return interleaved


def make_stacked_gated_activation_fn(
    activation_fn: _Activation,
) -> Callable[[TensorValue, TensorValue], TensorValue]:
    """Makes a function of two tensors: the outputs of the gate and those of the up projection.

    Args:
        activation_fn: The activation applied to the gate's outputs.
    """
    return lambda gate, up: activation_fn(gate) * up
