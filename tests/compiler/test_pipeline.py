"""The order of a compilation: checks between passes, times and counts, records, passes of backends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from xdsl.ir import Block

from max._backends import BackendOptions, Backends, backends_for
from max._backends.cpu.backend import CPUBackend
from max._compiler import mok, pipeline, record
from max._compiler import stats as counts
from max._compiler.passes.base import (
    BackendStep,
    DevicePass,
    GraphPass,
    ModulePass,
    Pass,
    PassesOfBackends,
    blocks,
    constant_of,
    ops_of,
)
from max._config import flags
from max.mlir import ModuleOp, VerifyError, graphs, print_module
from tests.devices.fake import fake_devices

X, Y = "!mo.tensor<[n], f32, cpu:0>", "!mo.tensor<[n], f32, gpu:0>"
SOURCE = f"""builtin.module {{ mo.graph @g(%x: {X}) -> ({X}) {{
    %a = mo.exp(%x) : ({X}) -> {X}
    %b = mo.sub(%a, %x) : ({X}, {X}) -> {X}
    mo.output(%b) : ({X}) -> ()
}} }}"""
ELEVEN = ", ".join(f"{n}.0" for n in range(11))


@pytest.fixture
def backends() -> Backends:
    return backends_for((), BackendOptions())


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that moves by one with each look at it, and new counts."""
    now = [0]

    def look() -> int:
        now[0] += 1
        return now[0]

    clock = SimpleNamespace(perf_counter=look)
    monkeypatch.setattr(counts, "time", clock)
    monkeypatch.setattr(pipeline, "time", clock)
    monkeypatch.setattr(counts.stats, "seconds", {})
    yield now


def swap(block: Block) -> None:
    """Exchanges the operands of differences."""
    for op in ops_of(block):
        if op.name == "mo.sub":
            op.operands = (*reversed(op.operands),)


def break_types(block: Block) -> None:
    """Leaves an op with an operand too many."""
    (op,) = [op for op in ops_of(block) if op.name == "mo.exp"]
    op.operands = (*op.operands, *op.operands)


def use_passes(monkeypatch: pytest.MonkeyPatch, *passes: Pass) -> None:
    monkeypatch.setattr(pipeline, "PASSES", passes)


@pytest.mark.parametrize("level", range(4))
def test_the_module_is_checked_after_each_pass(
    level: int, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From level 2; and before the first pass from level 1."""
    use_passes(monkeypatch, GraphPass("break", break_types), GraphPass("swap", swap))
    module = mok.parse(SOURCE)
    with flags.override(MAX_CHECK=level):
        if level < 2:
            pipeline.optimize(module, backends)
        else:
            with pytest.raises(VerifyError):
                pipeline.optimize(module, backends)
    (body,) = graphs(module)
    (difference,) = [op for op in ops_of(body.block) if op.name == "mo.sub"]
    assert (difference.operands[0] is body.block.args[0]) is (level < 2)
    use_passes(monkeypatch)
    with flags.override(MAX_CHECK=level):
        try:
            pipeline.compile_module(module, ["x"], backends)
        except VerifyError:
            assert level >= 1
        except Exception:
            assert level == 0
        else:
            assert level == 0


@pytest.mark.parametrize("level", [2, 3])
def test_the_text_is_checked_after_each_pass(
    level: int, backends: Backends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At level 3: it must parse to the same module."""
    use_passes(monkeypatch, GraphPass("swap", swap))
    with flags.override(MAX_CHECK=level):
        pipeline.optimize(mok.parse(SOURCE), backends)
        monkeypatch.setattr(pipeline, "print_module", lambda module: SOURCE)
        if level == 2:
            pipeline.optimize(mok.parse(SOURCE), backends)
        else:
            with pytest.raises(VerifyError, match="after swap: the printed module does not"):
                pipeline.optimize(mok.parse(SOURCE), backends)


def test_passes_run_up_to_the_last_and_are_shown(
    backends: Backends, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_passes(monkeypatch, *(GraphPass(name, swap) for name in ("one", "two", "three")))
    whole, part = mok.parse(SOURCE), mok.parse(SOURCE)
    pipeline.optimize(whole, backends)
    with flags.override(MAX_DUMP="passes"), caplog.at_level(logging.INFO, "max.dump"):
        pipeline.optimize(part, backends, "two")
    once = mok.parse(SOURCE)
    pipeline.optimize(once, backends, "one")
    swapped, original = print_module(once), print_module(mok.parse(SOURCE))
    assert print_module(whole) == swapped != original == print_module(part)
    assert caplog.messages == [
        f"// ----- after {name} -----\n{text}"
        for name, text in (("one", swapped), ("two", original))
    ]


def test_records(backends: Backends, monkeypatch: pytest.MonkeyPatch, ticks: list[int]) -> None:
    """The module as staged and after each pass, with the ops inside regions and the times."""

    def wait(block: Block) -> None:
        ticks[0] += 5

    use_passes(monkeypatch, GraphPass("swap", swap), GraphPass("wait", wait), *pipeline.PASSES)
    assert not record.is_recording() and record.new_record() is None
    with record.record() as found:
        assert record.is_recording() and not found
        pipeline.compile_module(mok.parse(SOURCE), ["x"], backends)
        with record.record() as inner:
            assert record.new_record() is inner[0] and len(found) == 1
        second = record.new_record()
        assert second is found[1]
    assert not record.is_recording()
    told = found[0]
    assert [(p.name, p.seconds) for p in told.passes[:3]] == [
        ("as staged", 0.0),
        ("swap", 1),
        ("wait", 6),
    ]
    assert [p.name for p in told.passes[1:]] == [step.name for step in pipeline.steps(backends)]
    # at the end the region, what is in it, and the output
    assert [p.ops for p in told.passes] == [3] * (len(told.passes) - 3) + [5] * 3
    assert "mo.sub(%a, %x)" in told.passes[0].text and "mo.sub(%x, %a)" in told.passes[1].text
    assert told.backends is backends and told.compiled is not None and told.plan is not None
    assert [*told.irs[0]] == list(told.compiled.kernels[0])


def test_times_and_counts(backends: Backends, ticks: list[int]) -> None:
    """Each phase counts once, and the time of passes as theirs only."""
    new = counts.CompileStats()
    assert (new.modules, new.from_disk, new.recipes, new.kernels, new.seconds) == (0, 0, 0, 0, {})
    stats = counts.stats
    module = mok.parse(SOURCE)
    text = print_module(module)
    for times in (1, 2):
        before = stats.modules, stats.kernels
        compiled, irs = pipeline.compile_module(module, ["x"], backends)
        assert (stats.modules, stats.kernels) == (before[0] + 1, before[1] + 1)
        passes = {step.name for step in pipeline.steps(backends)}
        phases = {"verify", "clone", "lower", "flatten", "emit"}
        assert stats.seconds == dict.fromkeys(passes | phases, times)
        assert [len(used) for used in irs] == [1] and [*irs[0]] == list(compiled.kernels[0])
        assert print_module(module) == text


def test_kernels_are_started_on_demand(backends: Backends, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(backends.host, "start", lambda ir: started.append(ir.key))
    _, irs = pipeline.compile_module(mok.parse(SOURCE), ["x"], backends)
    assert not started
    pipeline.compile_module(mok.parse(SOURCE), ["x"], backends, ahead=True)
    assert started == [*irs[0]]


def test_ops_have_numbers(backends: Backends) -> None:
    """The locations that errors and profiles tell apart, of the copy only."""
    module = mok.parse(SOURCE)
    with record.record() as found:
        pipeline.compile_module(module, ["x"], backends)
    flat = found[0].flat
    assert flat is not None
    (launch,) = flat.launches
    assert launch.staged_op == 1


ONCE = f"""builtin.module {{
    mo.graph @g(%x: {X}) -> ({X}) {{
        %w = mo.exp(%x) : ({X}) -> {X}
        %k = mok.once(%w) : ({X}) -> {X} {{
        ^bb0(%p: {X}):
            %q = mo.neg(%p) : ({X}) -> {X}
            mok.yield(%q) : ({X}) -> ()
        }}
        mo.output(%k) : ({X}) -> ()
    }}
    mo.subgraph @h(%x: {X}) -> ({X}) {{ mo.output(%x) : ({X}) -> () }}
}}"""


def names(block: Block) -> list[str]:
    return [op.name for op in ops_of(block)]


def test_a_pass_runs_on_each_body(backends: Backends) -> None:
    """Before that of a graph those of its `mok.once`."""
    module = mok.parse(ONCE)
    bodies = [
        ["mo.neg", "mok.yield"],
        ["mo.exp", "mok.once", "mo.output"],
        ["mo.output"],
    ]
    seen: list[Any] = []
    GraphPass("look", lambda block: seen.append(names(block))).run(module, backends)
    assert seen == bodies
    seen.clear()

    def look(block: Block, given: Backends) -> None:
        assert given is backends
        seen.append(names(block))

    DevicePass("look", look).run(module, backends)
    assert seen == bodies


def test_passes_of_modules(backends: Backends) -> None:
    module, seen = mok.parse(SOURCE), list[ModuleOp]()
    ModulePass("look", seen.append).run(module, backends)
    assert seen == [module]
    with pytest.raises(NotImplementedError):
        Pass("none").run(module, backends)


def test_ops_that_a_pass_adds_meanwhile_are_not_visited() -> None:
    module = mok.parse(ONCE)
    (graph, _) = graphs(module)
    visited = blocks(graph)
    first = next(visited)
    (once,) = [op for op in ops_of(graph.block) if op.name == "mok.once"]
    graph.block.insert_ops_after([once.clone()], once)
    assert [first, *visited] == [once.regions[0].block, graph.block]


def test_passes_of_backends_see_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = f"""builtin.module {{ mo.graph @g(%x: {X}) -> ({Y}) {{
        %a = mo.exp(%x) : ({X}) -> {X}
        %t = mo.transfer(%a) : ({X}) -> {Y}
        %b = mo.neg(%t) : ({Y}) -> {Y}
        mo.output(%b) : ({Y}) -> ()
    }} }}"""
    seen: list[tuple[int, list[str]]] = []

    def passes(index: int) -> Callable[..., list[SimpleNamespace]]:
        def look(block: Block, runs_here: Callable[[object], bool]) -> None:
            seen.append((index, [op.name for op in ops_of(block) if runs_here(op)]))
            assert not runs_here(object())

        return lambda place: (
            [SimpleNamespace(name=f"{place} of {index}", function=look)] * (place == "regions")
        )

    with fake_devices(1) as devices:
        both = backends_for(devices, BackendOptions())
        assert isinstance(both.host, CPUBackend)
        for index, backend in enumerate(both):
            monkeypatch.setattr(backend, "passes", passes(index))
        steps = PassesOfBackends("regions").of(both)
        assert [step.name for step in steps] == ["regions of 0", "regions of 1"]
        assert all(isinstance(step, BackendStep) for step in steps)
        module = mok.parse(moved)
        PassesOfBackends("regions").run(module, both)
        PassesOfBackends("weights").run(module, both)
        (on_host, on_device) = seen
        assert on_host[0] == 0 and "mo.exp" in on_host[1] and "mo.neg" not in on_host[1]
        assert on_device[0] == 1 and "mo.neg" in on_device[1] and "mo.exp" not in on_device[1]
        own = [step for step in pipeline.steps(both) if isinstance(step, BackendStep)]
        assert [step.name for step in own] == ["regions of 0", "regions of 1"]
        assert [step.index for step in own] == [0, 1]


def test_constants() -> None:
    """Arrays of constants in the text and of resources; nothing else is one."""
    module = mok.parse(f"""builtin.module {{ mo.graph @g() -> (!mo.tensor<[11], f32, cpu:0>) {{
        %a = mo.constant() {{value = #mo.dense<f32, [11], [{ELEVEN}]>}} : () -> !mo.tensor<[11], f32, cpu:0>
        %b = mo.neg(%a) : (!mo.tensor<[11], f32, cpu:0>) -> !mo.tensor<[11], f32, cpu:0>
        mo.output(%b) : (!mo.tensor<[11], f32, cpu:0>) -> ()
    }} }}""")
    constant, other, _ = ops_of(next(iter(graphs(module))).block)
    np.testing.assert_array_equal(constant_of(constant), np.arange(11, dtype=np.float32))
    assert constant_of(other) is None and constant_of(object()) is None
