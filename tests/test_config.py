"""The flag registry: parsing, errors with the nearest name, overrides, the generated page."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from max import _config
from max._config import FlagError, Flags, flags
from max._host.cache_folders import cache_dir

ROOT = Path(__file__).parents[1]


def test_defaults_and_types() -> None:
    for name, flag in flags.declared_flags().items():
        assert name.startswith(("MAX_", "MODULAR_")) and flag.name == name
        assert flag.help.endswith(".") and flag.read and flag.values
        assert flag.convert("") == flag.default


def test_environment_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_NUM_THREADS", "3")
    assert flags.MAX_NUM_THREADS == 3
    monkeypatch.setenv("MAX_NUM_THREADS", "5")
    assert flags.MAX_NUM_THREADS == 5
    monkeypatch.delenv("MAX_NUM_THREADS")
    assert flags.MAX_NUM_THREADS == 0
    monkeypatch.setenv("MAX_DUMP", " kernels, llvm ")
    assert flags.MAX_DUMP == frozenset({"kernels", "llvm"})
    monkeypatch.setenv("MAX_CPU_FEATURES", "avx2,FMA")
    assert flags.MAX_CPU_FEATURES == frozenset({"avx2", "fma"})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("MAX_NUM_THREADS", "two", "expected an integer from 0 to 4096"),
        ("MAX_NUM_THREADS", "-1", "expected an integer from 0 to 4096"),
        ("MAX_CHECK", "4", "expected an integer from 0 to 3"),
        ("MAX_DUMP", "kernel", "did you mean 'kernels'"),
        ("MAX_PARKING", "futux", "did you mean 'futex'"),
        ("MAX_KERNEL_CHECK", "maybe", "expected an integer from 0 to 2"),
        ("MAX_INTERPRET", "maybe", "expected 1 or 0"),
        ("MAX_CPU_FEATURES", "+avx2", "LLVM feature names"),
        ("MAX_LOG_LEVEL", "loud", "is none of debug, info"),
    ],
)
def test_bad_value(monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(FlagError, match=message) as error:
        getattr(flags, name)
    assert str(error.value).startswith(f"{name}={text}: ")


def test_override_nests_and_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_CHECK", "1")
    with flags.override(MAX_CHECK=2, MAX_DUMP="passes"):
        assert flags.MAX_CHECK == 2 and flags.MAX_DUMP == frozenset({"passes"})
        with flags.override(MAX_CHECK=3, MAX_DUMP={"asm", "llvm"}):
            assert flags.MAX_CHECK == 3 and flags.MAX_DUMP == frozenset({"asm", "llvm"})
        assert flags.MAX_CHECK == 2
        with pytest.raises(RuntimeError), flags.override(MAX_INTERPRET=True):
            assert flags.MAX_INTERPRET is True
            raise RuntimeError
        assert flags.MAX_INTERPRET is False
    assert flags.MAX_CHECK == 1 and flags.MAX_DUMP == frozenset()


def test_override_checks_names_and_values() -> None:
    with pytest.raises(FlagError, match="MAX_THREADS is not a flag; did you mean"):
        flags.override(MAX_THREADS=1)
    with pytest.raises(FlagError, match="MAX_CHECK=9"):
        flags.override(MAX_CHECK=9)
    with pytest.raises(AttributeError, match="override"):
        flags.MAX_CHECK = 2


def test_misspelt_names_of_the_environment() -> None:
    environ = {"MAX_NUM_THREAD": "3", "MAX_CHECK": "1", "MAX_SERVE_PORT": "80", "PATH": ""}
    assert flags.misspelt(environ) == [
        "MAX_NUM_THREAD is not a flag; did you mean 'MAX_NUM_THREADS'?"
    ]


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("MAX_CACHE_DIR")
    assert "supremum" in cache_dir().parts


def test_page_is_current() -> None:
    page = ROOT / "docs" / "environment.md"
    assert page.read_text() == _config.documentation(), (
        "run `python -m max._config > docs/environment.md`"
    )


def test_nothing_else_reads_the_environment() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        if path.name == "_config.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.attr] if isinstance(node, ast.Attribute) else []
            names += [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "name")]
            assert not {"environ", "getenv", "putenv"} & set(names), (
                f"{path}:{getattr(node, 'lineno', 0)}: declare a flag in src/max/_config.py"
            )


def test_import_is_light() -> None:
    script = "import sys, max._config; print(len(sys.modules.keys() & {'numpy', 'dataclasses'}))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"


def test_declared_order_is_stable() -> None:
    assert list(flags.declared_flags()) == [
        n for n in vars(Flags) if n.startswith(("MAX_", "MODULAR_"))
    ]
