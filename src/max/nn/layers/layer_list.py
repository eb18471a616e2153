"""Lists of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from max._errors import ArgumentError
from max.nn.layers.layer import Layer
from max.nn.layers.module import Module


class LayerList(Module):
    """A list of modules, named by their indices.

    Args:
        layers: The modules.
    """

    __module__ = "max.nn.layer"

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers: list[Layer] = check_layers("LayerList", layers)

    @property
    def sublayers(self) -> dict[str, Module]:
        """The modules, by index."""
        return {str(i): m for i, m in enumerate(self.layers) if isinstance(m, Module)}

    def append(self, layer: Layer) -> None:
        """Adds a module at the end.

        Args:
            layer: The module.
        """
        self.layers.append(layer)

    def insert(self, i: int, layer: Layer) -> None:
        """Adds a module before an index.

        Args:
            i: The index.
            layer: The module.
        """
        self.layers.insert(i, layer)

    def extend(self, layer: Iterable[Layer]) -> None:
        """Adds modules at the end.

        Args:
            layer: The modules.
        """
        self.layers.extend(layer)

    def __getitem__(self, i: int) -> Any:
        return self.layers[i]

    def __setitem__(self, i: int, layer: Layer) -> None:
        self.layers[i] = layer

    def __delitem__(self, i: int) -> None:
        del self.layers[i]

    def __contains__(self, layer: object) -> bool:
        return layer in self.layers

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A list of modules is not a computation.

        Raises:
            TypeError: Always; call the modules, or use `max.nn.Sequential`.
        """
        raise TypeError("a LayerList is not called; call its layers, or use Sequential")


def check_layers(what: str, layers: Iterable[Any]) -> list[Any]:
    """The layers as a list.

    Raises:
        ArgumentError: One of them cannot be called.
    """
    named_layers = list(layers)
    for index, layer in enumerate(named_layers):
        if not callable(layer):
            raise ArgumentError(f"{what}: layer {index} is {layer!r}, expected a Module")
    return named_layers
