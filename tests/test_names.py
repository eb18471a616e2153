"""`max._names`: names that are loaded when they are used, and the fallback for those that nothing defines."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from max import _names
from max._names import install, keyword_aliases, lazy_names


class Recorded:
    """A fallback that records what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def lookup(self, module: str, name: str) -> Any:
        self.asked.append((module, name))
        return 5

    def find_spec(self, fullname: str) -> None:
        self.asked.append((fullname,))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    fallback = Recorded()
    monkeypatch.setattr(_names, "_fallback", fallback)
    return fallback


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of names that are loaded when they are used."""
    monkeypatch.setitem(sys.modules, "own_names", ModuleType("own_names"))
    return "own_names"


def test_own_names_are_loaded_once(recorded: Recorded, module: str) -> None:
    lookup = lazy_names(module, {"sqrt": "math", "Root": "fractions.Fraction"})
    import fractions
    import math

    shown = lazy_names(module, {"pi": "math"}, wrap=int)
    assert shown("pi") == vars(sys.modules[module])["pi"] == 3
    assert lookup("sqrt") is vars(sys.modules[module])["sqrt"] is math.sqrt
    assert lookup("Root") is fractions.Fraction
    assert recorded.asked == [] and lookup("other") == 5
    assert recorded.asked == [(module, "other")]


def test_python_itself_asks_for_nothing(recorded: Recorded, module: str) -> None:
    lookup = lazy_names(module)
    with pytest.raises(AttributeError, match=r"'own_names' has no attribute '__path__'") as error:
        lookup("__path__")
    assert error.value.name == "__path__" and error.value.obj is sys.modules[module]
    # the frame of an import, which searches for a module next
    by_import = compile("lookup('other')", "<frozen importlib._bootstrap>", "eval")
    with pytest.raises(AttributeError):
        eval(by_import, {"lookup": lookup})
    assert recorded.asked == []
    assert lookup("_private") == 5


def test_without_a_fallback(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setattr(_names, "_fallback", None)
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        lazy_names(module)("other")
    assert _names._FallbackFinder().find_spec("max.other", None) is None


def test_modules_as_attributes(recorded: Recorded) -> None:
    import max.graph.ops

    for name, submodules, found in (
        ("ops", True, max.graph.ops),
        ("o_", True, 5),
        ("ops", False, 5),
        ("_ops", True, 5),
    ):
        assert lazy_names("max.graph", submodules=submodules)(name) == found
    assert lazy_names("max.graph")("ops") == 5 and recorded.asked.pop() == ("max.graph", "ops")
    # a module is searched for first
    assert recorded.asked == [
        ("max.graph.o_",),
        ("max.graph", "o_"),
        ("max.graph", "ops"),
        ("max.graph", "_ops"),
    ]


def test_finders_are_installed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_names, "_fallback", None)
    before = [object(), object()]
    monkeypatch.setattr(sys, "meta_path", [*before])
    first: Any = Recorded()
    try:
        install(first, {"max.own"})
        install(Recorded(), {"max.other"})  # type: ignore[arg-type]
        files, *middle, last = sys.meta_path
    finally:
        monkeypatch.undo()
    assert middle == before and files.packages == {"max.own"}  # type: ignore[attr-defined]
    assert type(last) is _names._FallbackFinder


def test_what_the_finders_find(recorded: Recorded) -> None:
    files = _names._FileFinder({"max._names", "max.graph", "max.nothing"})
    import max as package

    made = files.find_spec("max._names", package.__path__)
    assert made is not None and made.submodule_search_locations == []
    made = files.find_spec("max.graph", package.__path__)
    assert made is not None and made.submodule_search_locations != []
    assert files.find_spec("max.nothing", package.__path__) is None
    assert files.find_spec("max._lazy", package.__path__) is None
    finder = _names._FallbackFinder()
    for name in ("max.own", "modular.own", "numpy.own"):
        assert finder.find_spec(name, None) is None
    assert recorded.asked == [("max.own",), ("modular.own",)]
    assert _names.module_exists("max._names")
    assert not _names.module_exists("max.nothing.below") and not _names.module_exists("max.nothing")


def test_parameters_with_two_names() -> None:
    @keyword_aliases(other="own")
    def function(own: int, rest: int = 0) -> tuple[int, int]:
        return own, rest

    assert function(1) == function(own=1) == function(other=1) == (1, 0)  # type: ignore[call-arg]
    assert function(rest=2, other=1) == (1, 2) and function.__name__ == "function"  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="function: other and own are one argument"):
        function(own=1, other=1)  # type: ignore[call-arg]
