"""Symbols of a graph for the dynamic dimensions of a source model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from max.graph import Dim

__all__ = ["SymbolNames"]

_OTHER = re.compile(r"[^0-9A-Za-z_]+")


class SymbolNames:
    """The symbols of a model's dynamic dimensions: one for each name in the model, a new one for each unnamed size."""

    def __init__(self) -> None:
        self._by_name: dict[str, str] = {}
        self._used: set[str] = set()

    def dims(self, name: str, shape: Sequence[int | str | None]) -> list[Dim]:
        """The dimensions of an input.

        Args:
            name: The name of the input; symbols of unnamed sizes begin with it.
            shape: Sizes, names of dynamic sizes, or None for dynamic sizes without a name.
        """
        return [
            Dim(size) if isinstance(size, int) else Dim(self._symbol(name, axis, size))
            for axis, size in enumerate(shape)
        ]

    def _symbol(self, name: str, axis: int, size: str | None) -> str:
        if size and not _OTHER.sub("", size):
            # "?" is no name
            size = None
        key = size or f"{name}_{axis}"
        if size and key in self._by_name:
            return self._by_name[key]
        stem = _OTHER.sub("_", key).strip("_")[:60] or "size"
        symbol = stem = f"d{stem}" if stem[0].isdigit() else stem
        number = 1
        while symbol in self._used:
            number += 1
            symbol = f"{stem}_{number}"
        self._used.add(symbol)
        if size:
            self._by_name[key] = symbol
        return symbol
