"""Placeholder modules without weights."""

from __future__ import annotations

from typing import Any, NoReturn

from max.graph import TensorValue
from max.nn.layer import Module

__all__ = ["Identity", "MissingLayer"]


class Identity(Module):
    """Returns its input; replaces a norm or another part that a model does not have."""

    def __call__(self, x: TensorValue) -> TensorValue:
        """The input.

        Args:
            x: A tensor.
        """
        return x


class MissingLayer(Module):
    """Holds the place of a layer that another process runs, so that the layers after it keep their names.

    Args:
        layer_id: The number of the layer.
    """

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Always fails, because the layer runs in another process.

        Raises:
            RuntimeError: Always.
        """
        raise RuntimeError(
            f"layer {self.layer_id} is a MissingLayer: another process runs it, and this one has no weights of it"
        )
