"""Activations by name, as configurations have them."""

from __future__ import annotations

from collections.abc import Callable

from max._earlier import earlier_names
from max.graph import TensorValue, ops

__all__ = ["ACTIVATIONS", "activation_function_from_name", "activation_named"]

ACTIVATIONS: dict[str, Callable[[TensorValue], TensorValue]] = {
    "silu": ops.silu,
    "gelu": ops.gelu,
    "gelu_tanh": lambda x: ops.gelu(x, "tanh"),
    "gelu_quick": lambda x: ops.gelu(x, "quick"),
    "relu": ops.relu,
    "tanh": ops.tanh,
    "sigmoid": ops.sigmoid,
}
"""The activations of gated MLPs by name."""


def activation_named(name: str, user: str) -> Callable[[TensorValue], TensorValue]:
    """The activation of a name.

    Args:
        name: A key of `ACTIVATIONS`.
        user: What needs it, for the error.

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
    """The activation of a name.

    Args:
        name: silu, gelu, gelu_tanh, gelu_quick, relu, tanh or sigmoid.

    Raises:
        ValueError: There is no activation of this name.
    """
    return activation_named(name, "activation_function_from_name")


__getattr__ = earlier_names(__name__)
