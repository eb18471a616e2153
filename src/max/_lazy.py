"""Modules that are imported when they are first used.

For parts that many runs never need, such as the compiler where a program comes from the disk cache::

    if TYPE_CHECKING:
        from max._compiler import pipeline
    else:
        pipeline = lazy_module("max._compiler.pipeline")
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

__all__ = ["lazy_module"]


class _LazyModule(ModuleType):
    """Stands for a module; reading an attribute imports it."""

    def __getattr__(self, name: str) -> Any:
        # Python reads attributes such as __path__ and __wrapped__ of any module that it sees
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        module = self.__dict__.get("__module")
        if module is None:
            module = self.__dict__["__module"] = importlib.import_module(self.__name__)
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(importlib.import_module(self.__name__), name, value)


def lazy_module(name: str) -> Any:
    """A stand-in for a module, which is imported at the first use of one of its attributes.

    Args:
        name: The module's full name.
    """
    return _LazyModule(name)
