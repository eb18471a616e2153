"""Files with kernels: executed once each, so that their ops are registered."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

__all__ = ["load_extensions", "mojo_hint"]

_extensions: dict[Path, ModuleType] = {}


def load_extensions(extensions: Any) -> None:
    """Executes files with custom ops, once each, so that their kernels are registered.

    Args:
        extensions: A path or a list of paths: Python files, or folders of them. Modules that are already imported
            are taken as they are.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A file is no Python file, or a folder has kernels in Mojo only.
    """
    if extensions is None:
        return
    several = isinstance(extensions, list | tuple)
    items = cast("list[Any]", extensions if several else [extensions])
    for item in items:
        if isinstance(item, ModuleType):
            continue
        path = Path(item).resolve()
        if not path.exists():
            raise FileNotFoundError(f"custom_extensions: {path} does not exist")
        files = sorted(path.glob("**/*.py")) if path.is_dir() else [path]
        if not files and (hint := mojo_hint(path.glob("**/*"))):
            raise ValueError(f"custom_extensions: the folder {path} has no .py file{hint}")
        for file in files:
            if file.suffix != ".py":
                raise ValueError(
                    f"custom_extensions: {file} is not a Python file with ops registered by "
                    f"k.register{mojo_hint([file])}"
                )
            if file not in _extensions:
                # numbered: files of two folders may have the same name
                spec = importlib.util.spec_from_file_location(
                    f"max_extension_{len(_extensions)}", file
                )
                assert spec is not None and spec.loader is not None
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                _extensions[file] = module


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
