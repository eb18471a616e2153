"""Finds the names and modules of other versions of the API, and raises the errors of those that this release lacks.

`max` installs this module as the fallback of `max._names`: it is imported when a name is not found. Two tables have
what is found: `MODULES`, modules that stand elsewhere here, and `NAMES`, names that a module had or will have. Objects
are the same ones under each name.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from max import _names
from max._compat import absent
from max._compat.module_paths import MODULES
from max._compat.names import NAMES

if TYPE_CHECKING:
    from importlib.abc import Loader as _Loader
else:
    # importlib.abc imports much
    _Loader = object

__all__ = ["find_spec", "lookup"]


def lookup(module: str, name: str) -> Any:
    """The object of a name that a module has in another version.

    Args:
        module: The module.
        name: The name.

    Raises:
        AttributeError: No version has it, or this release lacks it.
        ImportError: The same, where an import asks for it.
    """
    if f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    where = NAMES.get(module, {}).get(name)
    if where is None:
        raise absent.missing(module, name, depth=3)
    value = _names.load_name(where, name)
    setattr(sys.modules[module], name, value)
    return value


def find_spec(fullname: str) -> ModuleSpec | None:
    """The spec of a module of another version; None if no version has it.

    Args:
        fullname: The module's name.

    Raises:
        ModuleNotFoundError: This release lacks the module.
    """
    modules = _targets(fullname)
    existing = tuple(module for module in modules if _names.module_exists(module))
    if existing:
        return ModuleSpec(fullname, _Alias(existing), is_package=True)
    absent.raise_for_module(fullname)
    return None


def _targets(name: str) -> tuple[str, ...]:
    """The modules that stand for a name: by its longest beginning in `MODULES`."""
    head, tail = name, ""
    while head:
        if head in MODULES:
            return tuple(module + tail for module in MODULES[head])
        head, dot, last = head.rpartition(".")
        tail = dot + last + tail
    return ()


class _Alias(_Loader):
    """Makes a module whose names are those of others."""

    def __init__(self, targets: tuple[str, ...]) -> None:
        self.targets = targets

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        parent, _, child = module.__name__.rpartition(".")
        if _is_function(sys.modules[parent], child):
            sys.modules[parent].__class__ = _KeepsFunctions
        targets = [importlib.import_module(target) for target in self.targets]
        public = {
            name
            for target in targets
            for name in getattr(target, "__all__", [n for n in dir(target) if n[0] != "_"])
        }

        def alias_name(name: str) -> Any:
            for target in targets:
                try:
                    return getattr(target, name)
                except AttributeError:
                    pass
            if absent.message(f"{module.__name__}.{name}") is not None:
                raise absent.missing(module.__name__, name)
            where = " or ".join(self.targets)
            raise AttributeError(
                f"module {module.__name__!r} has no attribute {name!r}; its names are in {where}"
            )

        # attributes as far as nothing more is imported for them: tools read them without running code
        for target in reversed(targets):
            own = NAMES.get(target.__name__, {})
            names = [name for name, where in own.items() if where.startswith(target.__name__ + ".")]
            names += [name for name in getattr(target, "__all__", ()) if name in vars(target)]
            module.__dict__.update({name: getattr(target, name) for name in names})
        module.__dict__.update(
            __doc__=f"Another version's name of {', '.join(self.targets)}.",
            __all__=sorted(public),
            __getattr__=alias_name,
            __dir__=lambda: public,
        )


class _KeepsFunctions(ModuleType):
    """A package whose functions stay its attributes when modules of their names are imported.

    An import binds a module in its package; ``max.graph.ops.argsort`` stays the op.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and _is_function(self, name)):
            super().__setattr__(name, value)


def _is_function(package: ModuleType, name: str) -> bool:
    """Whether a package shows a function under a name; it is loaded for that."""
    return name in getattr(package, "__all__", ()) and isinstance(
        getattr(package, name), FunctionType
    )
