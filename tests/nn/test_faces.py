"""The documented modules of `max.nn`: each of their names is there, under its documented module."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import max.nn

LAZY = ("max.nn", "max.nn.attention", "max.nn.kv_cache", "max.nn.transformer")
OTHER_ROOMS = ("max.graph", "max.graph.ops", "max.graph.weights", "max.experimental")


def imports_for_types(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The names that type checkers see, and the modules that have them."""
    assert module.__file__ is not None
    for block in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom) and node.module is not None
                yield from ((alias.name, node.module) for alias in node.names)


def imports_at_load(module: ModuleType) -> Iterator[str]:
    """The names that a module imports when it is loaded."""
    assert module.__file__ is not None
    for node in ast.parse(Path(module.__file__).read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("name", [*LAZY, *OTHER_ROOMS])
def test_a_package_that_loads_names_at_their_use_has_those_that_type_checkers_see(name) -> None:
    package = import_module(name)
    seen = dict(imports_for_types(package))
    assert {*seen} - {*package.__all__} <= {"complex", "elementwise", "allreduce"}, (
        "modules that are no names"
    )
    # names that this module alone documents are there without a load: tools that run no code find them
    assert {*package.__all__} - {*imports_at_load(package)} <= {*seen}
    for one, module in seen.items():
        value = getattr(package, one)
        # an op that users see adds its name to errors
        assert getattr(value, "__wrapped__", value) is getattr(import_module(module), one)


def test_packages_have_their_modules_as_attributes() -> None:
    for name in ("kernels", "kv_cache", "linear", "attention"):
        assert getattr(max.nn, name) is import_module(f"max.nn.{name}")
    assert max.nn.clamp is import_module("max.nn.clamp").clamp
    with pytest.raises(AttributeError):
        _ = max.nn.nothing_of_that_name  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAZY)
def test_classes_are_found_by_their_module_and_name(name) -> None:
    """Pickles, and the texts of classes, name a public module."""
    package = import_module(name)
    for one in package.__all__:
        value = getattr(package, one)
        if inspect.isclass(value):
            assert "._" not in value.__module__, value
            assert getattr(import_module(value.__module__), value.__qualname__) is value


def test_folders_have_at_most_20_files() -> None:
    root = Path(next(iter(max.nn.__path__)))
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir() and p.name != "__pycache__")]:
        files = [path.name for path in folder.glob("*.py")]
        assert len(files) <= 20, (folder, sorted(files))
