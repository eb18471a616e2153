"""The finder of names and modules of other versions, on packages and tables that the tests make."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

import pytest

from max._compat import absent, finder

FILES = {
    "__init__.py": "__all__ = ['sort', 'VALUE', 'Type']\nVALUE, Type = 7, int\ndef sort(): return 'op'\n",
    "first.py": "__all__ = ['b', 'late', 'a']\na, b, _own = 1, 2, 3\n"
    "def __getattr__(name):\n    if name == 'late': return 'loaded'\n    raise AttributeError(name)\n",
    "second.py": "a, z, _own = 10, 26, 30\n",
    "sort.py": "",
    "VALUE.py": "",
    "inner/__init__.py": "",
    "inner/deep.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of files, of which nothing is imported."""
    for name, text in FILES.items():
        path = tmp_path / "made" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield "made"
    for name in [name for name in sys.modules if name.split(".")[0] == "made"]:
        del sys.modules[name]


def alias_of(monkeypatch: pytest.MonkeyPatch, *targets: str) -> ModuleType:
    """The module `made.other`, which the table says is the given ones."""
    monkeypatch.setitem(finder.MODULES, "made.other", targets)
    importlib.import_module("made")
    spec = finder.find_spec("made.other")
    assert spec is not None and spec.loader is not None
    assert spec.submodule_search_locations == []
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_name_is_found_once(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = importlib.import_module(package)
    monkeypatch.setitem(finder.NAMES, package, {"a": "made.first", "New": "made.first.B"})
    assert finder.lookup(package, "a") == 1
    assert vars(made)["a"] == 1
    with pytest.raises(AttributeError, match="'made' has no attribute 'gone'") as error:
        finder.lookup(package, "gone")
    assert error.value.obj is made and error.value.name == "gone"


def test_a_module_of_the_table_is_imported(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(finder.MODULES, "made.inner", ("made.second",))
    assert finder.lookup(package, "inner") is sys.modules["made.inner"]


def test_modules_below_a_name_of_the_table(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(finder.MODULES, "old.one", ("made.first", "made"))
    monkeypatch.setitem(finder.MODULES, "old.one.two", ("made.inner",))
    assert finder._targets("old.one") == ("made.first", "made")
    assert finder._targets("old.one.x.y") == ("made.first.x.y", "made.x.y")
    assert finder._targets("old.one.two.deep") == ("made.inner.deep",)
    assert finder._targets("old") == finder._targets("new.one") == ()
    assert finder.find_spec("old.one.x.y") is None and finder.find_spec("old.one.two.x") is None
    assert finder.find_spec("old.one.two.deep") is not None


def test_names_of_an_alias(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    importlib.import_module("made.first")
    monkeypatch.setitem(finder.NAMES, "made.first", {"c": "made.first.x", "d": "made.second"})
    monkeypatch.setattr(sys.modules["made.first"], "c", 3, raising=False)
    module = alias_of(monkeypatch, "made.first", "made.second")
    assert module.__all__ == dir(module) == ["a", "b", "late", "z"]
    # what needs no import is an attribute at once, and the first module comes first
    assert {name: vars(module).get(name) for name in "abcdz"} == dict(a=1, b=2, c=3, d=None, z=None)
    assert module.z == 26 and module.late == "loaded" and module._own == 3
    with pytest.raises(
        AttributeError,
        match="module 'made.other' has no attribute 'y'; its names are in made.first or made.second",
    ):
        _ = module.y


def test_absent_names_of_an_alias(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = alias_of(monkeypatch, "made.first")
    monkeypatch.setitem(absent.tables.OF_26, "made.other", {"gone": "Use another."})
    monkeypatch.setitem(sys.modules, "made.other", module)
    with pytest.raises(AttributeError) as error:
        _ = module.gone
    assert str(error.value) == "made.other.gone is not in this release. Use another."
    with pytest.raises(ImportError) as failure:
        exec("from made.other import gone")
    assert str(failure.value) == str(error.value)


@pytest.mark.parametrize("kept", [True, False])
def test_functions_stay_beside_modules_of_their_names(
    package: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = importlib.import_module(package)
    function, name = made.sort, "sort" if kept else "VALUE"
    monkeypatch.setitem(finder.MODULES, f"made.{name}", ("made.first",))
    spec = finder.find_spec(f"made.{name}")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module_from_spec(spec))
    assert (type(made) is not ModuleType) is kept
    importlib.import_module(f"made.{name}")
    if kept:
        assert made.sort is function
        made.sort = made.other = 5
        assert made.sort == made.other == 5
        # a function that is not public may be replaced, and public values may be
        made.hidden = function
        made.hidden = made.VALUE = sys
        assert made.hidden is made.VALUE is sys
    else:
        assert made.VALUE is sys.modules["made.VALUE"]


def test_which_import_a_module_is_searched_for(package: str, tmp_path: Path) -> None:
    """The name of a missing module: Python replaces the text of an error of ``from package import``."""
    (tmp_path / package / "asks.py").write_text(
        "try:\n    import max.kernels\nexcept ModuleNotFoundError as error:\n    caught = error\n"
    )
    with pytest.raises(ImportError, match=r"max\.kernels is not in this release") as error:
        exec("from max import kernels")
    assert error.value.name is None
    scope: dict[str, ModuleType] = {}
    exec(f"from {package} import asks", scope)  # a search within that of another module
    assert scope["asks"].caught.name == "max.kernels"
