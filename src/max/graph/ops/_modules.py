"""The package `max.graph.ops` as a module, which keeps its ops when modules of their names are imported."""

from __future__ import annotations

from types import FunctionType, ModuleType
from typing import Any

__all__ = ["OpsPackage"]


class OpsPackage(ModuleType):
    """A package whose functions stay its attributes.

    MAX has a module for most ops, such as ``max.graph.ops.argsort`` (`max._earlier`). An import binds a module in its
    package; here the op of that name stays.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and isinstance(vars(self).get(name), FunctionType)):
            super().__setattr__(name, value)
