"""Errors for documented parts of MAX that this release lacks, with what to use instead.

The names are in `max._absent_names`, which is imported when a name is not found. A finder at the end of `sys.meta_path`
raises the errors of modules, a module's ``__getattr__`` (`max._earlier`) those of names. Existing modules and names
never get there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from opcode import opmap
from types import ModuleType
from typing import TYPE_CHECKING

from max._lazy import lazy_module

if TYPE_CHECKING:
    import fnmatch
    from pathlib import Path

    from max import _absent_names as tables
else:
    # every `import max` comes here
    fnmatch = lazy_module("fnmatch")
    tables = lazy_module("max._absent_names")


def message(name: str) -> str | None:
    """The message for a name that was not found; None if MAX does not document it either.

    Args:
        name: Its dotted name.
    """
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        prefix = ".".join(parts[:end])
        for pattern, instead in tables.ABSENT.items():
            if fnmatch.fnmatchcase(prefix, pattern):
                return f"{prefix} is not in this release. {instead}"
    module, _, last = name.rpartition(".")
    for names, instead in tables.LATER.get(module, {}).items():
        if last in names.split():
            return f"{name} is not in this release. {instead}"
    return None


def missing(module: str, name: str, depth: int = 2) -> AttributeError | ImportError:
    """The error for a name that a module does not have.

    Args:
        module: The module.
        name: The name.
        depth: The number of calls between this one and the user's frame.
    """
    frame = sys._getframe(depth)
    # `from package import module` reads an attribute before it searches for the module
    by_import = frame.f_code.co_filename.startswith("<frozen importlib")
    text = None if by_import else message(f"{module}.{name}")
    if text is None:
        text = f"module {module!r} has no attribute {name!r}"
    else:
        # `from module import name` replaces the text of an AttributeError, but not that of an ImportError
        if frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]:
            return ImportError(text, name=module)
    return AttributeError(text, name=name, obj=sys.modules.get(module))


_MOJO = {".mojo", ".mojopkg", ".🔥"}


def mojo_hint(files: Iterable[Path]) -> str:
    """The end of an error message about kernels in Mojo; empty if there are none.

    Args:
        files: Files, any of which may be one.
    """
    mojo_files = sorted(file.name for file in files if file.suffix in _MOJO)
    if not mojo_files:
        return ""
    return (
        f"; {mojo_files[0]} is a kernel in Mojo, which is not compiled here: write it in the kernel language, "
        "a Python function under @max.kernel.register(name), and graphs that use it stay as they are"
    )


class _Finder:
    """Raises errors for absent modules; finds none."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.startswith(("max.", "modular.")) and (text := message(fullname)):
            # with a module's name, `from package import module` replaces the text
            raise ModuleNotFoundError(text, name=None if _in_from_import() else fullname)
        return None


def _in_from_import() -> bool:
    """Whether a module is searched for as a name in ``from package import``."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Adds the finder, once."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
