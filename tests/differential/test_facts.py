"""Our answers against the recorded ones, and the harness against itself."""

from __future__ import annotations

import sys

import pytest

from tests.differential import facts, page
from tests.differential.differences import DIFFERENCES
from tests.differential.program import CRASH, agree, dim_text, family_names, load
from tests.differential.record import run_all


@pytest.mark.parametrize("family", family_names())
def test_answers_as_recorded(family: str) -> None:
    """Every difference is covered by a rule, and every rule of the family covers one."""
    assert facts.answers_there(family), f"no facts for {family}; tests/differential/README.md"
    used, unexplained = set(), []
    for program, there, here in facts.differences(family):
        rules = [d for d in DIFFERENCES if d.covers(family, program, there, here)]
        used.update(rules)
        if not rules:
            unexplained.append(f"{program}\n    there {' | '.join(there)}\n    here  {here}")
    assert not unexplained, f"{len(unexplained)} differences:\n" + "\n".join(unexplained[:40])
    idle = [d.what for d in DIFFERENCES if family in d.families and d not in used]
    assert not idle, f"rules that cover no difference in {family}: {idle}"


@pytest.mark.parametrize("family", family_names())
def test_facts_are_of_the_programs(family: str) -> None:
    """The facts are of the programs that the family makes now: else record them again."""
    assert set(facts.read(facts.OLDER, family)) == set(load(family).programs(0))
    assert set(facts.read(facts.NEWER, family)) <= set(load(family).programs(0))


def test_families_of_rules_exist() -> None:
    assert {f for d in DIFFERENCES for f in d.families} <= set(family_names())


@pytest.mark.parametrize("name", page.TABLES)
def test_page_has_the_table(name: str) -> None:
    assert page.marked()[name] == page.TABLES[name](), "run python -m tests.differential.page"


def test_page_is_made_of_tables() -> None:
    assert page.marked().keys() == page.TABLES.keys()
    assert page.generated_share() > 0.8


def test_dims_of_the_other_system_are_read() -> None:
    ref, i64 = '#kgen.param.decl.ref<"a"> : si64', ": !kgen.scalar<si64>"
    product = f"ParamOperatorAttr(#kgen.param.expr<mul, {ref}, 2 : si64> : si64)"
    assert dim_text(product) == "(a * 2)"
    assert dim_text(f"({product}) + -1") == "((a * 2)) + -1"
    nested = f'#kgen.param.expr<mul, #kgen.param.decl.ref<"b"> {i64}, #kgen<simd 3> {i64}> {i64}'
    text = f"ParamOperatorAttr(#kgen.param.expr<add, {nested}, #kgen<simd -4> {i64}> {i64})"
    assert dim_text(text) == "((b * 3) + -4)"


@pytest.mark.parametrize(
    ("there", "here", "serves"),
    [
        ("f32[a, 4]", "f32[a, 4]", True),
        ("f32[(a * 2) + -1]", "f32[a * 2 - 1]", True),
        ("f32[a // 2 * 2]", "f32[a]", False),
        ("f32[a, 4]", "f32[4, a]", False),
        ("f32[a]", "f16[a]", False),
        ("[f32[a]; f32[2]]", "[f32[a]]", False),
        ("!ValueError", "!ValueError", True),
        ("!LookupError", "!IndexError", True),
        ("!IndexError", "!LookupError", False),
        ("!ValueError", "!IndexError ValueError", True),
        ("!IndexError ValueError", "!ValueError", False),
        ("!ValueError", "f32[a]", False),
        ("f32[a]", "!ValueError", False),
        (CRASH, "!ValueError", False),
        ("[values f32[2] 1.5 nan]", "[values f32[2] 1.5001 nan]", True),
        ("[values f32[2] 1.5 2]", "[values f32[2] 1.6 2]", False),
        ("[values f32[2] 1.5 2]", "[values f32[2, 1] 1.5 2]", False),
        ("[values int64[1] 100000]", "[values int64[1] 100001]", False),
        ("[values bool[1] 1]", "!ValueError", False),
    ],
)
def test_agreement(there: str, here: str, serves: bool) -> None:
    assert agree(there, here) is serves


def test_recorder_survives_crashes() -> None:
    programs = ["none: 1 + 1", "none: __import__('os')._exit(3)", "none: 1 // 0", "none: [2]"]
    assert run_all(sys.executable, "graph_types", programs, limit=60) == [
        "2",
        CRASH,
        "!ZeroDivisionError",
        "[2]",
    ]
