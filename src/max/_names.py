"""Names of a module that are loaded when they are used, parameters with two names, and a hook for other names.

A module that shows names of other modules has them in a table, and nothing of them is imported before it is used::

    __getattr__ = lazy_names(__name__, {"Linear": "max.nn.layers.linear"})

Names and modules that nothing in `max` defines are looked up in a *fallback*, which `max` installs.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Protocol, TypeVar

__all__ = ["Fallback", "install", "keyword_aliases", "lazy_names", "load_name", "module_exists"]


class Fallback(Protocol):
    """Finds names and modules that nothing in `max` defines."""

    def lookup(self, module: str, name: str) -> Any:
        """The object of a name that a module lacks; called by a function that the user's frame calls.

        Raises:
            AttributeError: There is none.
            ImportError: There is none, and an import asks for it.
        """

    def find_spec(self, fullname: str) -> ModuleSpec | None:
        """The spec of a module that no file defines; None if there is none.

        Raises:
            ModuleNotFoundError: The module is known to be absent.
        """


_fallback: Fallback | None = None


class _FileFinder:
    """Lets files have modules below them, which the fallback finds.

    Args:
        packages: The names of the files.
    """

    def __init__(self, packages: Collection[str]) -> None:
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.packages:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.submodule_search_locations is None:
            spec.submodule_search_locations = []
        return spec


class _FallbackFinder:
    """Finds modules in the fallback, after all files."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _fallback is None or not fullname.startswith(("max.", "modular.")):
            return None
        return _fallback.find_spec(fullname)


def install(fallback: Fallback, packages: Collection[str]) -> None:
    """Sets the fallback; a second call changes nothing.

    Args:
        fallback: Finds names and modules that nothing defines.
        packages: Files with modules below them that the fallback finds.
    """
    global _fallback
    if _fallback is None:
        _fallback = fallback
        sys.meta_path.insert(0, _FileFinder(packages))
        sys.meta_path.append(_FallbackFinder())


def module_exists(name: str) -> bool:
    """Whether a module can be imported.

    Args:
        name: Its full name.
    """
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def load_name(where: str, name: str) -> Any:
    """An object by the place that a table has for its name.

    Args:
        where: The module that has it under this name, or the module and another name: ``max.nn.Conv2d``. Names of
            modules are lower case, those of objects are not.
        name: The name.
    """
    if where.rpartition(".")[2][0].isupper():
        where, _, name = where.rpartition(".")
    return getattr(importlib.import_module(where), name)


def lazy_names(
    module: str,
    own: Mapping[str, str] | None = None,
    *,
    submodules: bool = False,
    wrap: Callable[[Any], Any] | None = None,
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module: loads names when they are used, and asks the fallback for others.

    Args:
        module: Its ``__name__``.
        own: Its names, and the places that define them.
        submodules: Whether its modules are loaded when they are used as attributes.
        wrap: Makes of an object what the module shows under its name; None: the object.
    """
    names = own or {}

    def lookup(name: str) -> Any:
        if name in names:
            value = load_name(names[name], name)
            if wrap is not None:
                value = wrap(value)
            setattr(sys.modules[module], name, value)
            return value
        # Python reads attributes such as __path__ of any module, and `from package import module` first reads an
        # attribute, then searches for the module, then reads the attribute again
        by_import = sys._getframe(1).f_code.co_filename.startswith("<frozen importlib")
        if by_import or name.startswith("__") or _fallback is None:
            raise AttributeError(
                f"module {module!r} has no attribute {name!r}", name=name, obj=sys.modules[module]
            )
        if submodules and name[0] != "_" and module_exists(f"{module}.{name}"):
            return importlib.import_module(f"{module}.{name}")
        return _fallback.lookup(module, name)

    return lookup


_F = TypeVar("_F", bound=Callable[..., Any])


def keyword_aliases(**names: str) -> Callable[[_F], _F]:
    """Lets a function take arguments by other keywords too.

    Args:
        names: For each other keyword the name of the parameter.
    """

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call_by_new_names(*args: Any, **kwargs: Any) -> Any:
            for other in names.keys() & kwargs.keys():
                own = names[other]
                if own in kwargs:
                    raise TypeError(f"{function.__name__}: {other} and {own} are one argument")
                kwargs[own] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call_by_new_names  # pyright: ignore[reportReturnType]

    return decorate
