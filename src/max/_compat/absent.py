"""Errors for documented parts of MAX that this release lacks, with what to use instead.

`max._compat.finder` asks for them when a name or a module is not found. The names are in `max._compat.absent_names`.
"""

from __future__ import annotations

import fnmatch
import sys
from opcode import opmap

from max._compat import absent_names as tables


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
    for names, instead in tables.OF_26.get(module, {}).items():
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


def raise_for_module(fullname: str) -> None:
    """Raises the error of a module that this release lacks; does nothing for others.

    Args:
        fullname: The module's name.

    Raises:
        ModuleNotFoundError: The release lacks it.
    """
    text = message(fullname)
    if text is not None:
        # with a module's name, `from package import module` replaces the text
        raise ModuleNotFoundError(text, name=None if _in_from_import() else fullname)


def _in_from_import() -> bool:
    """Whether a module is searched for as a name in ``from package import``."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        frame = frame.f_back
    return False
