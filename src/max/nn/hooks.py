"""Hooks that observe the calls of layers."""

from __future__ import annotations

from typing import Any

from max.graph import BufferValue, TensorValue
from max.nn.layer import Layer, Module, add_layer_hook, recursive_named_layers, remove_layer_hook

__all__ = ["PrintHook"]


class PrintHook:
    """Prints the inputs and outputs of layers each time the graph runs.

    Create it before the graph is staged. Labels are ``name.input_0``, ``name.keyword`` and ``name.output_0``; the name
    is set by `name_layers`, and is otherwise the class and a number.

    Args:
        export_path: The folder to which values are written as files; requires
            ``session.set_debug_print_options("BINARY", output_directory=hook.export_path)``.
    """

    def __init__(self, export_path: str | None = None) -> None:
        self._export_path = export_path
        self._names: dict[int, str] = {}
        # keeps the layers alive, so that their ids stay unique keys
        self._layers: list[Layer] = []
        add_layer_hook(self._observe)

    @property
    def export_path(self) -> str | None:
        """The folder that values are written to as files; None: values are printed."""
        return self._export_path

    def name_layers(self, model: Layer) -> None:
        """Names the layers of a model by their attribute paths.

        Args:
            model: The model, which gets the name ``model``.
        """
        self._name(model, "model")
        if isinstance(model, Module):
            for name, layer in recursive_named_layers(model):
                if layer is not model:
                    self._name(layer, f"model.{name}")
            return
        seen = {id(model)}
        pending: list[tuple[str, Any]] = [("model", model)]
        while pending:
            name, layer = pending.pop()
            for key, value in vars(layer).items():
                parts = enumerate(value) if isinstance(value, list | tuple) else [(None, value)]
                for index, part in parts:
                    if isinstance(part, Layer) and id(part) not in seen:
                        seen.add(id(part))
                        path = f"{name}.{key}" if index is None else f"{name}.{key}.{index}"
                        self._name(part, path)
                        pending.append((path, part))

    def print_value(self, name: str, value: Any) -> bool:
        """Stages an op that prints a value.

        Args:
            name: The label.
            value: A tensor or a buffer; lists and tuples are printed element by element.

        Returns:
            Whether the value could be printed.
        """
        if isinstance(value, TensorValue | BufferValue):
            value.print(name)
            return True
        if isinstance(value, list | tuple):
            return any([self.print_value(f"{name}_{i}", part) for i, part in enumerate(value)])
        return False

    def remove(self) -> None:
        """Removes the hook; graphs that are already staged keep printing."""
        remove_layer_hook(self._observe)

    def _name(self, layer: Layer, name: str) -> None:
        self._names[id(layer)] = name
        self._layers.append(layer)

    def _observe(
        self, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        if id(layer) not in self._names:
            self._name(layer, f"{type(layer).__name__}_{len(self._names)}")
        name = self._names[id(layer)]
        for i, value in enumerate(args):
            self.print_value(f"{name}.input_{i}", value)
        for key, value in kwargs.items():
            self.print_value(f"{name}.{key}", value)
        values = outputs if isinstance(outputs, list | tuple) else [outputs]
        for i, value in enumerate(values):
            self.print_value(f"{name}.output_{i}", value)
