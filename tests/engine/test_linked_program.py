"""A program with addresses: its plans for sizes, its checks, row thresholds and counts of a profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from max._backends.program import LaunchGeometry
from max._compiler.program.code import Check, GeometryCode, SlotCode
from max._config import flags
from max._host import guard
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.run import linked_program
from max.engine.run.linked_program import LinkedProgram
from max.graph import Graph, ops
from tests.engine.conftest import DEVICE, tensor


def loaded(guarded: bool = False) -> Model:
    """A product with a threshold, sums in temporary memory, and slices that need two rows."""
    rng = np.random.default_rng(0)
    with Graph("g", input_types=[tensor("n", 32), tensor("m", 8)]) as graph:
        x, y = (value.tensor for value in graph.inputs)
        weight = ops.constant(
            rng.standard_normal((32, 64)).astype(np.float32), DType.float32, DEVICE
        )
        sums = ops.cumsum(ops.tanh(y), axis=0)
        graph.output(ops.cumsum(x @ weight, 1), ops.cumsum(sums, 1)[2:], ops.argsort(y[:, 0]))
    with flags.override(MAX_GUARD=guarded):
        return InferenceSession(num_threads=1).load(graph)


@pytest.fixture(scope="module")
def model() -> Model:
    return loaded()


@pytest.fixture
def program(model: Model) -> Iterator[LinkedProgram]:
    assert model._linked is not None
    main = model._linked.main
    main._instances.clear()
    yield main
    main._instances.clear()


def test_plans_are_kept_for_some_sizes(
    program: LinkedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linked_program, "MAX_INSTANCES", 2)
    first, second = program.instance((3, 2)), program.instance((4, 2))
    assert program.instance((3, 2)) is first and program.instance((4, 2)) is second
    assert first.symbols == (3, 2) and first.arena_bytes < second.arena_bytes
    assert first.output_shapes == ((3, 64), (0, 8), (2,))
    third = program.instance((5, 2))
    assert program.instance((5, 2)) is third and program.instance((3, 2)) is not first


def test_sizes_of_an_execution_are_checked_before_it(program: LinkedProgram) -> None:
    program.instance((1, 2))
    place = r"size m - 2, .*: m is 1, .*\(staged at .*test_linked_program.py:\d+.*\)"
    with pytest.raises(ValueError, match=place):
        program.instance((1, 1))
    assert (1, 1) not in program._instances


def test_blocks_end_at_guard_pages() -> None:
    linked = loaded(guarded=True)._linked
    assert linked is not None
    for n, m in ((3, 2), (70, 900)):
        instance = linked.main.instance((n, m))
        holes = sorted(instance.holes)
        assert all(hole % guard.PAGE == 0 for hole in holes) and len(set(holes)) == len(holes)
        # a guard page follows each symbolic block, and the first one of an arena without a static part
        code = linked.main.code
        blocks = [block for segment, block in code.blocks if segment == code.segment]
        static = code.static_bytes[code.segment]
        assert len(holes) == len(blocks) + (static == 0)
        assert instance.arena_bytes == holes[-1] + guard.PAGE
        values = zip(instance.offsets.array, code.values, strict=True)
        places = [int(offset) for offset, value in values if value.block >= 0]
        assert not {place // guard.PAGE * guard.PAGE for place in places}.intersection(holes)
        # the result of tanh ends where a page begins
        assert any(
            (offset + m * 8 * 4) in holes
            for offset, value in zip(instance.offsets.array, code.values, strict=True)
            if value.block >= 0
        )


def test_thresholds_by_the_names_of_launches(
    program: LinkedProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {
        index: launch.limit
        for index, launch in enumerate(program.code.launches)
        if launch.limit is not None
    }
    assert limits and len(limits) < len(program.code.launches)
    set_to = list[tuple[Any, ...]]()
    monkeypatch.setattr(
        type(program.executor), "set_addend", lambda _, *values: set_to.append(values)
    )
    program.set_limits({"another": 9})
    assert set_to == []
    index, limit = next(iter(limits.items()))
    program.set_limits({limit.name: 5})
    assert (index, limit.slot, 5) in set_to and {values[2] for values in set_to} == {5}
    launch = program.code.launches[index]
    any_kernel: Any = _AnyKernel()
    fixed = [1 << 20] * 100
    linked = program._link(launch, any_kernel, any_kernel, fixed, {limit.name: 7})
    plain = program._link(launch, any_kernel, any_kernel, fixed, {})
    assert linked.slots[limit.slot] == (plain.slots[limit.slot][0], 7)


class _AnyKernel:
    """The table of kernels of a test: one for all keys."""

    phases, messages, number = 1, (), 1

    def __getitem__(self, key: str) -> Any:
        return self


def test_what_a_profile_counts(model: Model, program: LinkedProgram) -> None:
    """Runs by sizes while it is watched; the work of launches is summed over them."""
    inputs = {n: [np.ones((n, 32), np.float32), np.ones((3, 8), np.float32)] for n in (2, 5)}
    model.execute(*inputs[2])
    before = program.reading()
    assert before[1] == {}
    start = time.perf_counter_ns()
    program.watch(True)
    program.watch(True)
    program.watch(False)
    for n in (2, 5, 2):
        model.execute(*inputs[n])
    program.watch(False)
    ticks, runs, nanoseconds = program.reading()
    assert 0 < nanoseconds <= time.perf_counter_ns() - start
    model.execute(*inputs[5])
    assert runs == {(2, 3): 2, (5, 3): 1} == program.reading()[1]
    np.testing.assert_array_equal(program.reading()[0], ticks)
    assert (ticks[:, 2] - before[0][:, 2]).max() == 3
    # the product of x and the weight
    assert max(program.flops(runs)) == 2 * 32 * 64 * (2 * 2 + 5)
    moved, once = program.bytes_moved(runs), program.bytes_moved({(2, 3): 1})
    fives = program.bytes_moved({(5, 3): 1})
    assert (
        moved == [2 * two + five for two, five in zip(once, fives, strict=True)] and min(moved) > 0
    )


@pytest.mark.parametrize(("n", "m"), [(0, 2), (3, 2), (7, 11)])
def test_blocks_follow_one_another(model: Model, program: LinkedProgram, n: int, m: int) -> None:
    """From a multiple of 64 bytes on, after the static part; a block without elements takes nothing."""
    code = program.code
    sizes = [
        max(0, *[size if isinstance(size, int) else size.evaluate({"n": n, "m": m}) for size in block])
        for _, block in code.blocks
    ]  # fmt: skip
    assert not program.empty
    instance = program.instance((n, m))
    end = code.static_bytes[0] + sum(-(-size // 64) * 64 for size in sizes)
    assert instance.arena_bytes == end and instance.holes == ()
    kernels = model._compiled.kernels[0]
    needed = [kernels[launch.kernel].scratch_bytes for launch in code.launches if not launch.jump]
    assert program.executor.program.scratch_bytes == max(needed) > min(needed)


def test_a_check_of_the_device_says_what_the_host_would() -> None:
    """The launch has the name of the op, so the message lacks it."""
    check = Check(0, 0, "slice: 2:6:1 is out of range", False, 3)
    message = linked_program._CheckMessage(check)
    assert message.exception == "ValueError"
    found, expected = message.format((3, 6)), check.failure(3, 6)
    assert expected is not None and f"slice: {found}" == expected and "6" in found
    assert check.failure(6, 6) is None and message.format((6, 6)) == ""


def test_a_program_without_launches_needs_no_scratch_memory() -> None:
    with Graph("nothing", input_types=[tensor("n")]) as graph:
        graph.output()
    linked = InferenceSession(num_threads=1).load(graph)._linked
    assert linked is not None and linked.main.empty
    assert linked.main.executor.program.scratch_bytes == 0


def test_the_workers_of_a_launch() -> None:
    assert linked_program._geometry(None) is None
    code = GeometryCode((SlotCode(2, 5), SlotCode(0, 1)), (32, 4), 1024)
    assert linked_program._geometry(code) == LaunchGeometry(((2, 5), (0, 1)), (32, 4), 1024)
