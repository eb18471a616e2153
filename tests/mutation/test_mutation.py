"""The mutation tool: its changes, its report, and an up-to-date list of equivalent mutants."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.mutation import forked
from tests.mutation.__main__ import arguments
from tests.mutation.forked import compiled, replaced_code, run_forked
from tests.mutation.mutants import mutants_of, sample
from tests.mutation.runner import ROOT, Suite, equivalents, run_mutants


def changes(source: str) -> list[tuple[str, str]]:
    return [(mutant.kind, mutant.after) for mutant in mutants_of(source)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x < y", [("compare", "x <= y")]),
        ("x <= y < z", [("compare", "x < y < z"), ("compare", "x <= y <= z")]),
        ("x is not y", [("compare", "x is y")]),
        ("not x", [("not", "(x)")]),
        ("x and y", [("boolean", c) for c in ("(x or y)", "(y)", "(x)")]),
        ("x + y", [("operator", "(x - y)")]),
        ("x[a:b]", [("slice", f"x[{c}]") for c in ("(a) + 1:b", "(a) - 1:b", "a:(b) + 1", "a:(b) - 1")]),
        ("x[1:]", [("constant", "x[2:]"), ("constant", "x[0:]")]),
        ("0", [("constant", "1"), ("constant", "(-1)")]),
        ("True", [("constant", "False")]),
        ("x if y else z", [("branch", "x if not (y) else z")]),
        ("max(x)", [("call", "min(x)")]),
        ("f'{x + 1}'", []),
        ("'a' + x", []),
        ("zip(x, y, strict=True)", []),
    ],
)  # fmt: skip
def test_the_changes_of_an_expression(line, expected):
    found = [(kind, after.removeprefix("r = ")) for kind, after in changes(f"r = {line}\n")]
    assert sorted(found) == sorted(expected)


def test_the_changes_of_statements():
    source = '''
"""A page's docstring."""
import a
from b import c

def f(x: int = 1, *, y: bool = False) -> list[int]:
    """Text."""
    z: int = 5
    assert x > 3
    logger.info("x %d", 7)
    if x:
        raise ValueError(f"{x + 1}")
    x = g(x)
    h(x)
    x.y = z
    x += z
    for i in x:  # every one
        break
    return z
'''
    expected = [
        ("constant", "def f(x: int = 2, *, y: bool = False) -> list[int]:"),
        ("constant", "def f(x: int = 0, *, y: bool = False) -> list[int]:"),
        ("constant", "def f(x: int = 1, *, y: bool = True) -> list[int]:"),
        ("constant", "z: int = 6"),
        ("constant", "z: int = 4"),
        ("branch", "if not (x):"),
        ("drop", "pass"),  # raise
        ("drop", "pass"),  # x = g(x)
        ("drop", "pass"),  # h(x)
        ("drop", "pass"),  # x.y = z
        ("drop", "pass"),  # x += z
        ("operator", "x -= z"),
        ("drop", "pass"),  # break
        ("drop", "return None"),
    ]
    assert sorted(changes(source)) == sorted(expected)
    mutants = mutants_of(source)
    assert {mutant.function for mutant in mutants} == {"f"}
    assert 'raise ValueError(f"{x + 1}")' in [mutant.before for mutant in mutants]
    for mutant in mutants:
        assert mutant.apply(source).count("# every one") == 1, "what is around a mutant stays"


def test_a_mutant_that_is_no_python_is_left_out():
    assert changes("def f(x):\n    while x:\n        continue\n") == [("drop", "pass")]


@pytest.mark.parametrize(
    ("base", "mutated"),
    [("Protocol", False), ("typing.Protocol[T]", False), ("HttpToolsProtocol", True), ("Protocols", True)],
)  # fmt: skip
def test_bodies_of_protocols_are_left_out(base, mutated):
    source = f"class C({base}):\n    def f(self):\n        return self.x\n"
    assert changes(source) == [("drop", "return None")] * mutated


def test_offsets_count_bytes():
    source = "x = 'ä'; y = 1 < 2\n"
    (mutant,) = [m for m in mutants_of(source) if m.kind == "compare"]
    assert mutant.apply(source) == "x = 'ä'; y = 1 <= 2\n"


def test_a_sample_is_the_same_for_the_same_seed():
    mutants = mutants_of((ROOT / "tests/mutation/mutants.py").read_text())
    assert sample(mutants, 20, 3) == sample(mutants, 20, 3) != sample(mutants, 20, 4)
    assert [m for m in mutants if m in sample(mutants, 20, 3)] == sample(mutants, 20, 3)
    assert sample(mutants[:5], 20, 0) == mutants[:5]


SOURCE = """
def clamp(x):
    if x > 3:
        return 3
    while x < 0:
        x = x + 1
    return x
"""
TEST = """
from package.clamped import clamp

def test_clamp():
    assert clamp(7) == 3 and clamp(-2) == 0 and clamp(2) == 2
"""


@pytest.fixture
def suite(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # imports of plugins take seconds
    (tmp_path / "source/package").mkdir(parents=True)
    (tmp_path / "source/package/__init__.py").touch()
    (tmp_path / "source/package/clamped.py").write_text(SOURCE)
    (tmp_path / "test_clamped.py").write_text(TEST)
    return Suite(tmp_path, tmp_path / "source", ("test_clamped.py",))


def test_survivors_are_what_the_tests_do_not_notice(suite):
    file = suite.source / "package/clamped.py"
    mutants = {mutant.after: mutant for mutant in mutants_of(SOURCE)}
    outcomes = {
        "if x >= 3:": "survived",  # it returns 3 either way
        "if x > 4:": "survived",
        "while x <= 0:": "killed",
    }
    results = run_mutants(suite, file, [mutants[after] for after in outcomes], timeout=200)
    assert {result.mutant.after: result.outcome for result in results} == outcomes
    (endless,) = run_mutants(suite, file, [mutants["x = (x - 1)"]], timeout=3)
    assert endless.outcome == "timeout"
    assert file.read_text() == SOURCE


def test_tests_that_fail_anyway_are_an_error(suite):
    (suite.root / "test_clamped.py").write_text(TEST.replace("== 2", "== 3"))
    file = suite.source / "package/clamped.py"
    with pytest.raises(RuntimeError, match="the tests fail without a mutant"):
        list(run_mutants(suite, file, mutants_of(SOURCE)))
    with pytest.raises(ValueError, match=r"clamped.py is not below .*tests"):
        list(run_mutants(Suite(ROOT, ROOT / "tests", ()), file, []))


FORKED_SOURCE = """
from functools import cache

class Account:
    limit = 3

    def take(self, amount, fee=0):
        if amount > self.limit:
            raise ValueError
        return [part - fee for part in range(amount)]

@cache
def counter(step):
    total = 0
    def count():
        nonlocal total
        total += step
        return total
    return count

ONE = counter(1)

def endless(x):
    while x > 0:
        x = x - 1

def unused(x):
    return x + 1
"""
FORKED_TEST = """
import pytest

def test_take(tmp_path):
    (tmp_path / "file").touch()
    from package.account import Account
    assert Account().take(2) == [0, 1]
    with pytest.raises(ValueError):
        Account().take(9)

def test_the_closure_that_is_there_already():
    from package.account import ONE
    assert ONE() == 1 and ONE() == 2

def test_endless():
    from package.account import endless
    endless(3)
"""


def test_changed_functions_are_replaced_with_those_around_them():
    code = compiled(Path("account.py"), FORKED_SOURCE)
    mutants = {mutant.after: mutant for mutant in mutants_of(FORKED_SOURCE)}

    def replaced(after):
        pairs = replaced_code(
            code, compiled(Path("account.py"), mutants[after].apply(FORKED_SOURCE))
        )
        return None if pairs is None else [new.co_name for _, new in pairs]

    assert replaced("total -= step") == ["count", "counter"]
    assert replaced("if amount >= self.limit:") == ["take"]
    assert replaced("return [(part + fee) for part in range(amount)]")[-1] == "take"
    assert replaced("limit = 4") is None, "a class's body ran at import"
    assert replaced("def take(self, amount, fee=1):") is None, "as did defaults"
    assert replaced("ONE = counter(2)") is None


def fork_outcomes(
    suite: Suite, source: str, test: str, after: Iterable[str], timeout: float
) -> dict[str, str]:
    """The outcomes in forks of the mutants whose changed lines are `after`; the source must stay as it was."""
    file = suite.source / "package/account.py"
    file.write_text(source)
    (suite.root / "test_account.py").write_text(test)
    suite = Suite(suite.root, suite.source, ("test_account.py",))
    mutants = {mutant.after: mutant for mutant in mutants_of(source)}
    results = run_forked(suite, file, [mutants[line] for line in after], timeout=timeout)
    assert file.read_text() == source
    return {result.mutant.after: result.outcome for result in results}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_forks_notice_what_processes_notice(suite):
    outcomes = {
        "if amount >= self.limit:": "survived",  # no test takes the limit
        "if not (amount > self.limit):": "killed",
        "total -= step": "killed",
        "return [(part + fee) for part in range(amount)]": "survived",  # no test has a fee
        "x = (x + 1)": "timeout",
        "return (x - 1)": "uncovered",
    }
    assert fork_outcomes(suite, FORKED_SOURCE, FORKED_TEST, outcomes, timeout=5) == outcomes


KERNEL_SOURCE = """
from max import kernel as k

@k.kernel
def first(out: k.Output, x: k.Input):
    for i in range(3):
        out[i] = x[0]
"""
KERNEL_TEST = f"""
import sys
sys.path.append({str(ROOT / "src")!r})
from max import kernel as k
from package.account import first

def test_of_something_else():
    pass

def test_first():
    spec = k.TensorSpec(k.f32, (None,))
    assert ":i64 to 3:i64" in str(k.specialize(first, [spec, spec]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_kernels_are_compiled_from_the_text_of_the_mutant(suite):
    outcomes = {
        "for i in range(2):": "killed",
        "out[i] = x[1]": "survived",
    }
    assert fork_outcomes(suite, KERNEL_SOURCE, KERNEL_TEST, outcomes, timeout=200) == outcomes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_mutants_of_code_that_runs_at_import_get_a_process(suite, monkeypatch):
    file = suite.source / "package/account.py"
    file.write_text(FORKED_SOURCE)
    mutants = [m for m in mutants_of(FORKED_SOURCE) if m.after in ("limit = 4", "ONE = counter(2)")]
    monkeypatch.setattr(forked, "run_mutants", lambda *args, **options: [(*args, options)])
    (call,) = run_forked(suite, file, mutants, jobs=3, timeout=7)
    assert call == (suite, file, mutants, {"jobs": 3, "timeout": 7})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_forks_need_tests_that_pass(suite):
    file = suite.source / "package/clamped.py"
    (suite.root / "test_clamped.py").write_text(TEST.replace("== 2", "== 3"))
    with pytest.raises(RuntimeError, match=r"the tests fail without a mutant(?s:.)*test_clamp"):
        list(run_forked(suite, file, mutants_of(SOURCE)))
    with pytest.raises(ValueError, match=r"clamped.py is not below .*tests"):
        list(run_forked(Suite(ROOT, ROOT / "tests", ()), file, []))


def test_a_system_without_forks_is_an_error(suite, monkeypatch):
    monkeypatch.delattr(os, "fork", raising=False)
    file = suite.source / "package/clamped.py"
    with pytest.raises(OSError, match="has no fork: run the mutants without --fork"):
        list(run_forked(suite, file, mutants_of(SOURCE)))
    monkeypatch.setattr(sys, "argv", ["mutation", "--fork", "--tests=x", str(file)])
    with pytest.raises(SystemExit):
        arguments()


def test_the_command_line():
    command = [sys.executable, "-m", "tests.mutation", "src/max/interfaces/context.py", "--list"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "compare" in line]
    assert line.startswith("src/max/interfaces/context.py:")
    assert line.endswith(
        "return self is not GenerationStatus.ACTIVE  ->  return self is GenerationStatus.ACTIVE"
    )


def test_each_equivalent_is_a_mutant_of_its_file():
    files = {entry.file for entry in equivalents()}
    mutants = {file: mutants_of(Path(ROOT, file).read_text()) for file in files}
    stale = [
        entry for entry in equivalents()
        if not entry.reason or not any(entry.is_of(entry.file, m) for m in mutants[entry.file])
    ]  # fmt: skip
    assert not stale
