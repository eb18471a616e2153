"""A stand-in for torch while the reference is made: its names are enough to import `max.torch`, nothing is computed.

The pages show signatures and docstrings, which need no torch: the package with its libraries takes gigabytes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Placeholder:
    """Stands for any class or function of torch."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        return self

    def __contains__(self, _: object) -> bool:
        return False


class _Module(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].islower():
            try:
                return importlib.import_module(f"{self.__name__}.{name}")
            except ImportError:
                pass
        return type(name, (_Placeholder,), {"__module__": self.__name__})

    # a name in lower case may be a function, too
    def __call__(self, *_: Any, **__: Any) -> _Placeholder:
        return _Placeholder()


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        ours = fullname == "torch" or fullname.startswith("torch.")
        return ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def import_without_torch(module: str) -> None:
    """Imports a module that needs torch, with all its names; without torch with the stand-in, which is gone afterwards.

    Args:
        module: The module.
    """
    if importlib.util.find_spec("torch") is not None:
        return
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        found = importlib.import_module(module)
        # those that are imported at first use, too
        for name in getattr(found, "__all__", ()):
            getattr(found, name)
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n == "torch" or n.startswith("torch.")]:
            del sys.modules[name]
