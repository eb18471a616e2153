"""Layers in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from max.nn.layer import Layer, LayerList

__all__ = ["Sequential"]


class Sequential(LayerList):
    """A list of layers; each takes the output of the previous one.

    Args:
        layers: The layers.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__(layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Applies the layers in order; returns the output of the last one.

        Args:
            args: The arguments of the first layer.
            kwargs: Its keyword arguments.

        Raises:
            ValueError: There is no layer.
        """
        if not self.layers:
            raise ValueError("Sequential: there is no layer")
        x = self.layers[0](*args, **kwargs)
        for layer in self.layers[1:]:
            x = layer(x)
        return x
