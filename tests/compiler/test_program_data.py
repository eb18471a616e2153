"""Launches, steps and programs as data: what they are where nothing is said, and what follows from their fields."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest

from max._abi import BaseLayout
from max._compiler.lowering.lowered_graph import (
    Buffer,
    CallStep,
    HostStep,
    IfStep,
    Launch,
    LoweredGraph,
    Pointer,
    WhileStep,
    callees_of,
    computed_symbols,
    mark,
    symbols_computed_by,
)
from max._compiler.program.code import (
    ALIGNMENT,
    Check,
    Compiled,
    FixedBuffer,
    HostStepCode,
    LaunchCode,
    ProgramCode,
    SlotCode,
    TensorInfo,
)
from max.dtype import DType
from max.mlir.dims import DimExpr

pytestmark = pytest.mark.any_target

N, M = DimExpr.symbol("n"), DimExpr.symbol("m")


def defaults(kind: Any) -> dict[str, Any]:
    return {each.name: each.default for each in fields(kind) if each.default is not MISSING}


def test_what_is_not_said_is_absent_the_first_device_and_not_in_the_program() -> None:
    nothing = {"name": "", "array": None, "dtype": None, "shape": (), "device": 0}
    assert defaults(Buffer) == defaults(FixedBuffer) == nothing
    assert defaults(Pointer) == {"offset": 0}
    assert defaults(Launch) == {
        "in_place": (), "parts": (), "jump": None, "flops": 0, "staged_op": -1, "check": None, "device": 0,
        "work": None, "geometry": None,
    }  # fmt: skip
    assert defaults(CallStep) == {"reveals": (), "inherit": False}
    assert defaults(HostStep) == {"shape": (), "label": "", "target": -1}
    assert defaults(HostStepCode) == {"label": "", "target": -1, "devices": ()}
    assert defaults(TensorInfo) == {"mutable": False}
    assert defaults(Check) == {"exact": True, "staged_op": -1}
    assert defaults(LaunchCode) == {
        "jump": "", "target": -1, "limit": None, "staged_op": -1, "check": None, "work": None, "geometry": None,
    }  # fmt: skip
    assert defaults(ProgramCode) == {"segment": 0, "device": 0}
    assert defaults(Compiled) == {"guarded": False}
    assert SlotCode(3, 4).fixed_buffer == -1
    # whole cache lines, and the largest vector
    assert ALIGNMENT == 64


@pytest.mark.parametrize("exact", [True, False])
def test_a_check_fails_where_its_condition_does_not_hold(exact: bool) -> None:
    check = Check(N, M + 1, "add: sizes differ", exact)
    for actual in range(4):
        for required in range(4):
            holds = actual == required if exact else actual >= required
            text = check.failure(actual, required)
            assert (text is None) is holds
            if text is not None:
                assert text == check.condition.text(actual, required)
                assert text.startswith("add: sizes differ")
    condition = check.condition
    assert (condition.actual, condition.required, condition.exact) == (N, M + 1, exact)


def test_symbols_of_the_inputs_are_those_that_the_host_does_not_read() -> None:
    def part(*symbols: str) -> ProgramCode:
        return ProgramCode(host_steps=[HostStepCode("count", symbols, (), DType.int64, ())])

    tensor = TensorInfo(DType.float32, (N,), ("cpu", 0))
    compiled = Compiled(
        "g", ("n", "a", "m", "b"), [tensor], ["x"], [tensor] * 2, [-1, -1], [], part("a", ""), [part("b")], [], [{}]
    )  # fmt: skip
    assert compiled.input_symbols == ("n", "m")
    assert compiled.bases == BaseLayout(1, 2)


def test_a_mark_is_a_launch_without_effect() -> None:
    launch = mark([3, 1])
    assert (launch.kernel, launch.slots, launch.reads, launch.writes) == ("", (), (), (3, 1))
    assert (launch.serial, launch.name, launch.device) == (False, "mark", 0)
    assert launch.jump is not None and (launch.jump.kind, launch.jump.label) == ("next", -1)
    assert mark([], 2).device == 2


def test_callees_and_symbols_of_steps() -> None:
    def call(name: str, *reveals: str) -> CallStep:
        return CallStep(name, (), (), (), "", reveals)

    branch = IfStep(Pointer(0), call("then", "t"), call("otherwise"))
    loop = WhileStep(call("condition"), Pointer(0), call("body", "b"), ())
    host = HostStep("slice", ("a", "", "c"), (), DType.int64)
    steps = {
        mark([]): ((), ()), call("f", "r", "s"): (("f",), ("r", "s")), branch: (("then", "otherwise"), ()),
        loop: (("condition", "body"), ()), host: ((), ("a", "c")),
    }  # fmt: skip
    for step, (callees, symbols) in steps.items():
        assert (callees_of(step), symbols_computed_by(step)) == (callees, symbols)
    assert computed_symbols(LoweredGraph("g", steps=list(steps))) == ["r", "s", "a", "c"]
