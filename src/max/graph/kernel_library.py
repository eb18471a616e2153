"""Files that define a graph's custom ops."""

from __future__ import annotations

import ast
import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import cast

from max import mlir
from max.kernel.language.extensions import mojo_hint

__all__ = ["KernelLibrary", "default_custom_extensions", "default_custom_extensions_scope"]


class KernelLibrary:
    """Files and folders with custom ops, written in the kernel language.

    A path is a ``.py`` file, or a folder whose ``.py`` files are searched recursively. Files are only parsed here, for
    the names they register; they are executed when the graph is loaded.

    Args:
        context: A `max.mlir.Context`, which has no effect; or the paths, if `paths` is not given.
        paths: The files and folders.

    Raises:
        FileNotFoundError: A path does not exist (also a ValueError).
        ValueError: A path is neither a ``.py`` file nor a folder, or has kernels in Mojo.
    """

    def __init__(self, context: object = None, paths: Iterable[Path] | None = None) -> None:
        self._paths: list[Path] = []
        self._symbols: dict[str, Path] = {}
        if context is not None or paths is not None:
            self.load_paths(context, paths)

    def add_path(self, path: Path) -> None:
        """Adds a file or folder.

        Args:
            path: The file or folder.

        Raises:
            FileNotFoundError: The path does not exist.
            ValueError: The path is neither a ``.py`` file nor a folder.
        """
        path = Path(path)
        if not path.exists():
            raise MissingLibraryError(
                f"KernelLibrary: {path} does not exist; expected a .py file with ops registered by "
                "max.kernel.register, or a folder of such files"
            )
        if path.is_file() and path.suffix != ".py":
            raise ValueError(
                f"KernelLibrary: {path} is not a library of custom ops; expected a .py file with "
                f"ops registered by max.kernel.register, or a folder of such files{mojo_hint([path])}"
            )
        if (
            path.is_dir()
            and not any(path.glob("**/*.py"))
            and (hint := mojo_hint(path.glob("**/*")))
        ):
            raise ValueError(f"KernelLibrary: the folder {path} has no .py file{hint}")
        if path in self._paths:
            return
        self._paths.append(path)
        for source in sorted(path.glob("**/*.py")) if path.is_dir() else [path]:
            for symbol in _registered_names(source):
                self._symbols.setdefault(symbol, source)

    def library_paths(self) -> list[Path]:
        """The files and folders that were added."""
        return list(self._paths)

    def symbols(self) -> list[str]:
        """The names of the registered ops, sorted."""
        return sorted(self._symbols)

    def __contains__(self, kernel: object) -> bool:
        """Whether a library registers an op of this name."""
        return kernel in self._symbols

    def __iter__(self) -> Iterator[str]:
        """The names of the registered ops, sorted."""
        return iter(self.symbols())

    def __getitem__(self, kernel: str) -> Path:
        """The file that registers an op.

        Raises:
            KeyError: No library registers it.
        """
        return self._symbols[kernel]

    def file_of(self, symbol: str) -> Path | None:
        """The file that registers an op, or None."""
        return self._symbols.get(symbol)

    def load_paths(self, context: object, custom_extensions: Iterable[Path] | None = None) -> None:
        """Adds files and folders.

        Args:
            context: A `max.mlir.Context`, which has no effect; or the paths, if `custom_extensions` is not given.
            custom_extensions: The files and folders.

        Raises:
            FileNotFoundError: A path does not exist.
            ValueError: A path is neither a ``.py`` file nor a folder.
            TypeError: The argument is not a list of paths.
        """
        paths: object = context if custom_extensions is None else custom_extensions
        if not isinstance(paths, Iterable) and isinstance(paths, mlir.Context):
            return
        if isinstance(paths, (str, os.PathLike)) or not isinstance(paths, Iterable):
            raise TypeError(f"KernelLibrary: got {paths!r}, expected a list of files and folders")
        for path in cast("Iterable[Path]", paths):
            self.add_path(path)

    def verify_custom_op(self, custom_op: mlir.MoOp) -> None:
        """Checks a custom op against the libraries.

        Args:
            custom_op: A ``mo.custom`` op.

        Raises:
            ValueError: The op is not a custom op, or no library registers it.
        """
        if custom_op.name != "mo.custom":
            raise ValueError(f"{custom_op.name} is not a custom op")
        symbol: str = custom_op.attr("symbol")
        if symbol not in self._symbols:
            registered = ", ".join(sorted(self._symbols)) or "none"
            raise ValueError(f"custom: no library registers {symbol!r}; registered: {registered}")


_DEFAULT: ContextVar[tuple[Path, ...]] = ContextVar("max_default_custom_extensions", default=())


def default_custom_extensions() -> tuple[Path, ...]:
    """The files and folders with custom ops that each new graph has, beside its own."""
    return _DEFAULT.get()


@contextmanager
def default_custom_extensions_scope(*paths: Path) -> Generator[None]:
    """Adds files and folders to those that each new graph has, while a ``with`` block runs.

    Args:
        paths: The files and folders with custom ops.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A path is neither a ``.py`` file nor a folder.
    """
    # raises for a path that is no library
    KernelLibrary(paths=paths)
    token = _DEFAULT.set((*_DEFAULT.get(), *map(Path, paths)))
    try:
        yield
    finally:
        _DEFAULT.reset(token)


class MissingLibraryError(FileNotFoundError, ValueError):
    """A path of custom ops does not exist."""


def _registered_names(source: Path) -> Iterator[str]:
    """The names in ``@register("name")`` decorators of a file."""
    tree = ast.parse(source.read_text(encoding="utf-8"), filename=str(source))
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call) or not decorator.args:
                continue
            # `max.kernel.register`, or the function by another path
            name = ast.unparse(decorator.func).rpartition(".")[2]
            first = decorator.args[0]
            if name == "register" and isinstance(first, ast.Constant):
                if isinstance(first.value, str):
                    yield first.value
