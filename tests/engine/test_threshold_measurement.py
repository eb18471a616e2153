"""Measurements of row thresholds without models: which rows are tried, what times mean, and the memory of launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max._abi import BaseLayout
from max._backends.backend import Tuning
from max._compiler.program.code import (
    Check,
    Compiled,
    HostStepCode,
    LaunchCode,
    LimitCode,
    ProgramCode,
    SlotCode,
    TensorInfo,
    ValueCode,
)
from max.dtype import DType
from max.engine.tune import threshold_measurement
from max.engine.tune.row_thresholds import Threshold
from max.engine.tune.threshold_measurement import (
    CLEAR_GAIN,
    ENOUGH_SECONDS,
    FEWEST_ROUNDS,
    ROUNDS,
    TURN_RUNS,
    Measurement,
    PoolIsBusyError,
    stats,
)
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size

pytestmark = pytest.mark.any_target

TUNING = Tuning(least_bytes=100, sample_bytes=300, most_rows=128)


def measurement(default: int = 8, maximum: int = 64, most: int = 128) -> Measurement:
    """A measurement of which a test replaces what it needs."""
    made = object.__new__(Measurement)
    made._default, made._max_rows = min(default, most), min(maximum, most)
    made._limit = LimitCode(0, "x", maximum, SlotCode(0, 0))
    made._quality = 0.75
    return made


def ended(turns: Generator[None, None, Any]) -> tuple[int, Any]:
    """The number of turns, and the result."""
    for count in itertools.count():
        try:
            next(turns)
        except StopIteration as end:
            return count, end.value
    raise AssertionError


@pytest.mark.parametrize(
    ("options", "crossing", "asked", "rows"),
    [
        ({}, 0, [8, 4, 2], 1), ({}, 1, [8, 4, 2], 1), ({}, 2, [8, 4, 2, 3], 2), ({}, 3, [8, 4, 2, 3], 3),
        ({}, 7, [8, 4, 6], 6), ({}, 8, [8, 16, 12], 8), ({}, 12, [8, 16, 12], 12), ({}, 31, [8, 16, 32, 24], 24),
        ({}, 60, [8, 16, 32, 64, 48], 48), ({}, 64, [8, 16, 32, 64], 64), ({}, 9999, [8, 16, 32, 64], 64),
        # the greatest number that is measured stands for all above
        ({"maximum": 240}, 128, [8, 16, 32, 64, 128], 240), ({"maximum": 240}, 127, [8, 16, 32, 64, 128, 96], 96),
        ({"maximum": 50}, 50, [8, 16, 32, 50], 50), ({"maximum": 50}, 49, [8, 16, 32, 50, 41], 41),
        ({"maximum": 9}, 8, [8, 9], 8), ({"default": 3}, 2, [3, 2], 2), ({"default": 3}, 1, [3, 2], 1),
        ({"default": 2}, 0, [2], 1),
        ({"default": 64}, 64, [64], 64), ({"default": 1}, 9, [], 1),
    ],
)  # fmt: skip
def test_rows_are_doubled_or_halved_then_one_between_is_tried(
    monkeypatch: pytest.MonkeyPatch, options: Any, crossing: int, asked: list[int], rows: int
) -> None:
    seen: list[int] = []

    def few_is_faster(self: object, number: int) -> Generator[None, None, bool]:
        seen.append(number)
        yield
        return number <= crossing

    monkeypatch.setattr(Measurement, "_few_is_faster", few_is_faster)
    before = stats.num_measured
    assert ended(measurement(**options).turns()) == (len(asked), Threshold(rows, 0.75))
    assert seen == asked and stats.num_measured == before + 1


def test_rows_that_no_sizes_give_have_no_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    for impossible in (8, 16, 12):

        def few_is_faster(
            self: object, number: int, impossible: int = impossible
        ) -> Generator[None, None, bool | None]:
            yield from ()
            return None if number == impossible else number < 16

        monkeypatch.setattr(Measurement, "_few_is_faster", few_is_faster)
        before = stats.num_measured
        assert ended(measurement().turns()) == (0, None) and stats.num_measured == before


class Clock:
    """A clock that only runs of programs move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float = 1.0) -> None:
        self.now, self.cpu, self.share = 100.0, 50.0, share
        self.runs: list[int] = []
        monkeypatch.setattr(threshold_measurement.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(threshold_measurement.time, "process_time", lambda: self.cpu)

    def path(self, number: int, seconds: Callable[[int], float]) -> Any:
        """A program that takes some seconds in its first, second, … run."""
        count = itertools.count()

        def run_at(*where: Any) -> None:
            assert where == ("bases", f"program {number}", "offsets")
            self.runs.append(number)
            spent = seconds(next(count))
            self.now += spent
            self.cpu += 4 * spent * self.share

        return SimpleNamespace(executor=SimpleNamespace(run_at=run_at), bases=f"program {number}")


def compare(
    monkeypatch: pytest.MonkeyPatch,
    few: Callable[[int], float],
    many: Callable[[int], float],
    rows: int,
    share: float = 1.0,
) -> tuple[bool, int, float]:
    """Whether few rows are faster, the number of turns, and the quality."""
    clock, made = Clock(monkeypatch, share), measurement()
    made._backend, made._quality = cast("Any", SimpleNamespace(workers=4)), 1.0
    made._paths = [clock.path(0, few), clock.path(1, many)]
    monkeypatch.setattr(
        Measurement,
        "_prepare",
        lambda self, asked: SimpleNamespace(bases="bases", offsets="offsets"),
    )
    turns, is_faster = ended(made._few_is_faster(rows))
    assert clock.runs == [0, 1] * turns
    return is_faster, turns, made._quality


def steady(seconds: float) -> Callable[[int], float]:
    return lambda _: seconds


def test_a_path_replaces_the_default_if_it_is_clearly_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the path for few rows is the default up to 8 rows
    cases = [(1.0, 0.85, 8, False), (1.0, 0.95, 8, True), (1.0, 0.95, 9, False), (0.95, 1.0, 9, False),
        (0.85, 1.0, 9, True), (1.0, CLEAR_GAIN, 8, False), (CLEAR_GAIN, 1.0, 9, True)]  # fmt: skip
    for few, many, rows, expected in cases:
        assert compare(monkeypatch, steady(few / 1e4), steady(many / 1e4), rows)[0] == expected
    # in each half of the runs; the first one is for warming up
    for runs, clear in (
        (range(1, 5), False),
        (range(5, 9), False),
        (range(1, 9), True),
        (range(9), True),
    ):
        slow = [1e-4 if n in runs else 0.8e-4 for n in range(9)]
        assert compare(monkeypatch, slow.__getitem__, steady(0.85e-4), 8)[0] == (not clear)
        assert compare(monkeypatch, steady(0.85e-4), slow.__getitem__, 9)[0] == clear
    # the best time of a half counts
    for good, expected in (
        ((1, 5), True),
        ((4, 8), True),
        ((1, 4), False),
        ((5, 8), False),
        ((0, 5), False),
    ):
        times = [1e-4 if n in good else 9e-4 for n in range(9)]
        assert compare(monkeypatch, times.__getitem__, steady(2e-4), 9)[0] == expected


def test_equal_times_and_odd_numbers_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = 2.0**-10  # sums of ticks are exact
    monkeypatch.setattr(threshold_measurement, "CLEAR_GAIN", 0.875)
    assert not compare(monkeypatch, steady(tick), steady(0.875 * tick), 8)[0]
    assert compare(monkeypatch, steady(0.875 * tick), steady(tick), 9)[0]
    # a round that takes just as long is not the last one
    monkeypatch.setattr(threshold_measurement, "ENOUGH_SECONDS", FEWEST_ROUNDS * 2 * tick)
    assert compare(monkeypatch, steady(tick), steady(tick), 8)[1] == FEWEST_ROUNDS + 2
    # of six runs the halves are the second and third, and the last three
    for good, expected in (((1, 3), True), ((2, 3), True), ((1, 2), False), ((3, 4), False)):
        times = [tick if n in good else 4 * tick for n in range(9)]
        monkeypatch.setattr(threshold_measurement, "ENOUGH_SECONDS", 0.0)
        monkeypatch.setattr(threshold_measurement, "FEWEST_ROUNDS", 5)
        assert compare(monkeypatch, times.__getitem__, steady(2 * tick), 9)[:2] == (expected, 6)


def test_a_measurement_ends_when_enough_time_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(monkeypatch, steady(1e-5), steady(1e-5), 8)[1] == ROUNDS + 1
    assert compare(monkeypatch, steady(1.0), steady(1.0), 8)[1] == FEWEST_ROUNDS + 1
    # a round takes a fifth, of which the first does not count
    each = ENOUGH_SECONDS / 10 * 0.999
    assert compare(monkeypatch, steady(each), steady(each), 8)[1] == 7
    each *= 1.01
    assert compare(monkeypatch, steady(each), steady(each), 8)[1] == 6


def test_the_quality_is_the_share_of_the_workers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_first(n: int) -> float:
        return 1e-4 if n else 50.0

    for share in (0.25, 0.75, 1.0):
        assert compare(monkeypatch, slow_first, steady(1e-4), 8, share)[2] == pytest.approx(
            share, rel=1e-6
        )
    assert compare(monkeypatch, slow_first, steady(1e-4), 8, 1.5)[2] == 1.0
    # clocks of some systems go back
    assert compare(monkeypatch, slow_first, steady(1e-4), 8, -0.5)[2] == 0.0


def test_a_measurement_at_once_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(threshold_measurement.time, "sleep", pauses.append)

    def few_is_faster(self: Any, number: int) -> Generator[None, None, bool]:
        self._backend.runs += TURN_RUNS
        yield
        return number <= 3

    monkeypatch.setattr(Measurement, "_few_is_faster", few_is_faster)
    for other_run, stopped in ((None, None), (2, None), (None, 2), (0, None), (None, 0)):
        made = measurement()
        backend = SimpleNamespace(runs=7)
        backend.run_number = lambda backend=backend: backend.runs
        made._backend = cast("Any", backend)
        asked = itertools.count()

        def is_stopped(
            asked: Any = asked,
            backend: Any = backend,
            other: Any = other_run,
            stopped: Any = stopped,
        ) -> bool:
            number = next(asked)
            backend.runs += number == other
            return number == stopped

        made._stopped = is_stopped
        before = stats.given_up, stats.num_measured
        pauses.clear()
        if other_run is None and stopped is None:
            assert made.threshold() == Threshold(3, 0.75)
            assert (stats.given_up, stats.num_measured) == (before[0], before[1] + 1)
            assert pauses == [threshold_measurement.PAUSE] * 5
            continue
        with pytest.raises(PoolIsBusyError):
            made.threshold()
        assert (stats.given_up, stats.num_measured) == (before[0] + 1, before[1])
        assert len(pauses) == 1 + (other_run or stopped or 0)


N, M = DimExpr.symbol("n"), DimExpr.symbol("m")
K = 6


class Linked:
    """A program whose values are those of its code."""

    def __init__(self, code: ProgramCode, rows: Mapping[str, int]) -> None:
        self.code, self.rows = code, rows
        self.bases = SimpleNamespace(
            array=np.array([value.base for value in code.values], np.int64)
        )

    def instance(self, symbols: tuple[int, ...]) -> Any:
        at = dict(zip("nm", symbols, strict=True))
        sizes = [
            size if isinstance(size, int) else size.evaluate(at) for _, _, size in self.code.values
        ]
        offsets = SimpleNamespace(array=np.array(sizes, np.int64))
        return SimpleNamespace(offsets=offsets, arena_bytes=32 * symbols[0])


def prepared(
    rows: Size, addend: int = 0, slots: Sequence[int] = (2, 4), values: Sequence[ValueCode] = ()
) -> tuple[Measurement, list[tuple[int, bool]]]:
    """A measurement of a program with two inputs and two outputs, and the memory that it asks for."""
    layout = BaseLayout(2, 2)
    made = [
        ValueCode(layout.NOTHING, 0, rows), ValueCode(layout.arena(), 0, 64), ValueCode(layout.input(0), 0, 0),
        ValueCode(layout.input(1), 0, 0), ValueCode(layout.output(1), 0, 16), *values,
    ]  # fmt: skip
    limit = LimitCode(1, "x", 240, SlotCode(0, addend))
    arguments = (SlotCode(1, 0), SlotCode(0, 99), *(SlotCode(value, 0) for value in slots))
    first = LaunchCode("kernel", arguments, False, False, "first", limit=limit)
    lower = LimitCode(0, "x", 50, SlotCode(1, 0))
    others = (SlotCode(1, 0), SlotCode(0, 33), *arguments[2:])
    launches = [first, replace(first, name="second", slots=others, limit=lower)]
    # the threshold and its slot are those of the first launch
    other = LaunchCode("kernel", (SlotCode(0, 5), SlotCode(0, 7)), False, False, "other")
    main = ProgramCode(
        launches=[*launches, other], values=made, outputs=[0, 1],
        checks=[Check(N, 3, "n is {actual}")], host_steps=[HostStepCode("cut", (), (), DType.bool, ())],
    )  # fmt: skip
    tensors = [TensorInfo(dtype, shape, ("cpu", 0)) for dtype, shape in (
        (DType.float32, (N, K)), (DType.bfloat16, (M,)), (DType.int8, ()), (DType.float64, (N, M)))]  # fmt: skip
    compiled = Compiled(
        "products",
        ("n", "m"),
        tensors[:2],
        ["a", "b"],
        tensors[2:],
        [-1, -1],
        [],
        main,
        [],
        [],
        [{}],
    )
    asked: list[tuple[int, bool]] = []

    def allocate(num_bytes: int, zero: bool = False) -> Any:
        asked.append((num_bytes, zero))
        return SimpleNamespace(address=1000 * len(asked))

    backend: Any = SimpleNamespace(tuning=TUNING, allocate=allocate, workers=4)
    return Measurement(compiled, cast("Any", Linked), launches, backend), asked


def test_launches_are_measured_alone_on_both_paths() -> None:
    made, _ = prepared(N)
    assert (made._max_rows, made._default, made._quality) == (128, 99, 1.0) and not made._stopped()
    many, few = cast("list[Any]", made._paths)
    # rows up to the threshold take the path for few
    assert (many.rows, few.rows) == ({"x": 240}, {"x": 0})
    for path in (many, few):
        code = path.code
        assert [(each.name, each.barrier) for each in code.launches] == [
            ("first", True),
            ("second", True),
        ]
        assert not (code.checks or code.host_steps or code.outputs) and len(code.values) == 5


def test_sizes_are_chosen_so_that_the_launches_have_the_rows() -> None:
    f32_input, bf16_input, f64_output = 4 * K, 2, 8
    for rows, addend, asked, symbols in (
        (N, 0, 7, (7, 7)), (M, 0, 7, (7, 7)), (N + M - 1, 0, 7, (7, 1)), (N * M, 0, 7, (7, 1)),
        (N * N * M, 0, 7, (1, 7)), (N - 2, 2, 9, (9, 9)),
    ):  # fmt: skip
        made, memory = prepared(rows, addend)
        ready = made._prepare(asked)
        n, m = symbols
        assert ready is not None
        sizes = [32 * n, f32_input * n, f64_output * n * m]
        assert memory == [(size, True) for size in sizes] and len(ready.memory) == 3
        # nothing, the arena, both inputs, both outputs: what no launch uses has no memory
        assert np.frombuffer(ready.bases, np.int64).tolist() == [0, 1000, 2000, 0, 0, 3000]
        assert ready.offsets.array[0] == asked - addend
    made, memory = prepared(N, slots=(3, 2))
    assert made._prepare(5) is not None
    assert memory == [(160, True), (f32_input * 5, True), (bf16_input * 5, True)]
    # an empty arena has an address, too
    made, memory = prepared(N, slots=())
    assert made._prepare(0) is not None and memory == [(1, True)]


def test_rows_that_the_program_cannot_have_are_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for rows, asked, addend in ((N * 2, 7, 0), (5, 7, 0), (N + M, 1, 0), (N, 9, 2)):
        made, memory = prepared(rows, addend)
        assert made._prepare(asked) is None and not memory
    # results of later segments, and of others, have memory that a measurement does not know
    later = ValueCode(BaseLayout(2, 2).arena(1), 0, 0)
    made, memory = prepared(N, slots=(2, 5), values=[later])
    assert made._prepare(7) is None and not memory
    total = 4 * K * 7 + 8 * 7 * 7
    for most, fits in ((total, True), (total - 1, False)):
        monkeypatch.setattr(threshold_measurement, "MOST_INPUT_BYTES", most)
        made, memory = prepared(N + M - 7, slots=(2, 4))
        assert (made._prepare(7) is not None) is fits and bool(memory) is fits
