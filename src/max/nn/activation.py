"""Activations by name, as configurations have them."""

from __future__ import annotations

from collections.abc import Callable

from max._earlier import earlier_names
from max.graph import TensorValue
from max.nn._mlp import ACTIVATIONS

__all__ = ["activation_function_from_name"]


def activation_function_from_name(name: str) -> Callable[[TensorValue], TensorValue]:
    """The activation of a name.

    Args:
        name: silu, gelu, gelu_tanh, gelu_quick, relu, tanh or sigmoid.

    Raises:
        ValueError: There is no activation of this name.
    """
    function = ACTIVATIONS.get(name)
    if function is None:
        raise ValueError(
            f"activation_function_from_name: {name!r}, expected one of {', '.join(ACTIVATIONS)}"
        )
    return function


__getattr__ = earlier_names(__name__)
