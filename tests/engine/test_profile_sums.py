"""Sums of profiles without models: times, calls and bytes by kernel, shares, tables, traces, the end of a process."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max._abi import Event, ProfileRecord
from max.engine.run import profile as profiles
from max.engine.run.profile import KernelTime, Profile, recording

pytestmark = pytest.mark.any_target

HERTZ = 1000.0
"""Ticks a second."""


class Program:
    """A program whose launches are told what they measured."""

    def __init__(self, names: Sequence[str], jump: int = -1) -> None:
        launches = [
            SimpleNamespace(
                name=name,
                kernel=f"k{len(name)}",
                jump="loop" * (number == jump),
                barrier=number != 1,
            )
            for number, name in enumerate(names)
        ]
        self.code = SimpleNamespace(launches=launches)
        self.ticks = np.zeros((len(names), ProfileRecord.END), np.int64)
        self.runs: dict[tuple[int, ...], int] = {}
        self.nanoseconds = 0
        self.log: list[tuple[str, Any]] = []
        self.events: list[tuple[int, int, int, int]] = []
        self.executor = SimpleNamespace(
            clock_hz=HERTZ,
            log_events=lambda room: self.log.append(("events", room)),
            events=self._events,
        )

    def watch(self, on: bool) -> None:
        self.log.append(("watch", on))

    def _events(self) -> np.ndarray:
        rows = np.zeros((len(self.events), Event.END), np.int64)
        for row, (launch, arrived, began, ended) in zip(rows, self.events, strict=True):
            row[[Event.LAUNCH, Event.ARRIVAL, Event.START, Event.FINISH]] = (
                launch,
                arrived,
                began,
                ended,
            )
        return rows

    def reading(self) -> tuple[Any, ...]:
        return self.ticks.copy(), dict(self.runs), self.nanoseconds

    def run(self, size: int, times: Sequence[tuple[int, int, int]], nanoseconds: int) -> None:
        """A run with a size; for each launch the ticks of waiting and running, and how often it ran."""
        self.runs[size,] = self.runs.get((size,), 0) + 1
        self.nanoseconds += nanoseconds
        for row, (wait, run, count) in zip(self.ticks, times, strict=True):
            row[[ProfileRecord.WAIT, ProfileRecord.RUN, ProfileRecord.COUNT]] += [wait, run, count]

    def bytes_moved(self, runs: Mapping[tuple[int, ...], int]) -> list[int]:
        return self._sums(runs, 100)

    def flops(self, runs: Mapping[tuple[int, ...], int]) -> list[int]:
        return self._sums(runs, 7)

    def _sums(self, runs: Mapping[tuple[int, ...], int], amount: int) -> list[int]:
        total = sum(size * count for (size,), count in runs.items())
        return [amount * (number + 1) * total for number in range(len(self.code.launches))]

    def scope_of(self, launch: Any) -> str:
        return " [s]" if launch.name == "tanh" else ""


def recorded(*programs: Program) -> Any:
    return recording(cast("Any", programs))


def test_layers_that_differ_in_numbers_are_summed() -> None:
    program = Program(["0.matmul", "tanh", "11.matmul", "2.3.add", "x2.add"])
    program.run(2, [(900, 900, 1)] * 5, 10**12)  # before the profile
    with recorded(program) as profile:
        program.run(2, [(1, 10, 1), (2, 20, 1), (3, 30, 1), (4, 40, 1), (0, 5, 1)], 200_000_000)
        program.run(3, [(1, 10, 1), (2, 20, 1), (3, 30, 1), (4, 40, 1), (0, 5, 1)], 300_000_000)
        # programs without a run in the block have no part
        assert profile.kernels == []
    assert (profile.runs, profile.seconds) == (2, 0.5)
    found = {(kernel.name, kernel.kernel): kernel for kernel in profile.kernels}
    # 2 + 3 rows, one launch after the other with 100, 200, … bytes a row
    assert found == {
        ("*.*.add", "k7"): KernelTime("*.*.add", "k7", 1, 2, 0.08, 0.008, 2000, 140),
        ("*.matmul", "k8"): KernelTime("*.matmul", "k8", 1, 2, 0.02, 0.002, 500, 35),
        ("*.matmul", "k9"): KernelTime("*.matmul", "k9", 1, 2, 0.06, 0.006, 1500, 105),
        ("tanh [s]", "k4"): KernelTime("tanh [s]", "k4", 1, 2, 0.04, 0.004, 1000, 70),
        ("x2.add", "k6"): KernelTime("x2.add", "k6", 1, 2, 0.01, 0.0, 2500, 175),
    }
    times = [kernel.seconds for kernel in profile.kernels]
    assert times == sorted(times, reverse=True)
    assert profile.around_seconds == pytest.approx(0.5 - 0.21 - 0.02)
    assert profile.share(profile.kernels[0]) == pytest.approx(0.08 / 0.21)


def test_equal_kernels_of_two_programs_are_one_and_loops_count_their_turns() -> None:
    first, second, idle = Program(["1.add", "end"], jump=1), Program(["2.add"]), Program(["3.add"])
    idle.run(9, [(9, 9, 9)], 9)
    with recorded(first, second, idle) as profile:
        # the body of a loop ran three times in one run, and never in another
        first.run(1, [(0, 12, 3), (5, 5, 5)], 50_000_000)
        first.run(1, [(0, 0, 0), (5, 5, 5)], 10_000_000)
        second.run(4, [(1, 4, 1)], 5_000_000)
    (kernel,) = profile.kernels
    # 100 bytes a run of size 1, 3 turns of 2 runs; and 400 of the second program
    assert kernel == KernelTime(
        "*.add", "k5", 2, 4, 0.016, 0.001, 200 * 3 // 2 + 400, 14 * 3 // 2 + 28
    )
    assert (profile.runs, profile.seconds) == (3, 0.065)


def test_rates_and_shares_without_time_are_zero() -> None:
    nothing = KernelTime("a", "k", bytes=8, flops=8)
    assert (nothing.gigaflops, nothing.gigabytes_per_second) == (0.0, 0.0)
    kernel = KernelTime("a", "k", seconds=0.5, bytes=3 * 10**9, flops=10**9)
    assert (kernel.gigaflops, kernel.gigabytes_per_second) == (2.0, 6.0)
    profile = Profile([nothing])
    assert profile.share(nothing) == 0.0 and profile.around_seconds == 0.0
    # clocks of several processors differ: no time is negative
    assert (
        Profile([KernelTime("a", "k", seconds=2.0, wait_seconds=1.0)], 1, 2.5).around_seconds == 0.0
    )
    assert (
        Profile([KernelTime("a", "k", seconds=2.0, wait_seconds=1.0)], 1, 3.5).around_seconds == 0.5
    )


def test_the_table_and_the_data() -> None:
    kernels = [
        KernelTime("mat", "k1", 2, 4, 0.75, 0.002, 3 * 10**9, 15 * 10**8),
        KernelTime("add", "k2", 1, 0, 0.25, 0.0, 0, 0),
    ]  # fmt: skip
    profile = Profile(kernels, 4, 1.5)
    header, first, second, last = str(profile).splitlines()
    assert (
        header.split()
        == "share total ms mean us calls launches wait ms GB/s GFLOP/s kernel".split()
    )
    assert first.split() == [
        "75.0%",
        "750.000",
        "187500.00",
        "4",
        "2",
        "2.000",
        "4.0",
        "2.0",
        "mat",
    ]
    assert second.split() == ["25.0%", "250.000", "0.00", "0", "1", "0.000", "0.0", "0.0", "add"]
    assert last == "4 runs, 1500.000 ms, of which 498.000 ms are in no kernel and at no barrier"
    data = json.loads(json.dumps(profile.to_dict()))
    assert (data["runs"], data["seconds"], data["around_seconds"]) == (4, 1.5, pytest.approx(0.498))
    assert data["kernels"][0] == {
        "name": "mat", "kernel": "k1", "launches": 2, "calls": 4, "seconds": 0.75, "wait_seconds": 0.002,
        "bytes": 3 * 10**9, "flops": 15 * 10**8, "share": 0.75, "gigabytes_per_second": 4.0, "gigaflops": 2.0,
    }  # fmt: skip


def test_a_trace_has_waits_and_launches_in_the_order_of_time(tmp_path: Path) -> None:
    first, second = Program(["matmul", "tanh"]), Program(["add"])
    with recorded(first, second) as profile:
        # launch, arrival, start, end; tanh waits at no barrier
        first.events = [(0, 3010, 3012, 3020), (1, 3021, 3021, 3030)]
        second.events = [(0, 3000, 3004, 3009)]
    assert [(e["cat"], e["name"], e["ts"], e["dur"]) for e in profile.events] == [
        ("barrier", "wait", 0.0, 4000.0), ("kernel", "add", 4000.0, 5000.0), ("barrier", "wait", 10_000.0, 2000.0),
        ("kernel", "matmul", 12_000.0, 8000.0), ("kernel", "tanh [s]", 21_000.0, 9000.0),
    ]  # fmt: skip
    assert {(e["ph"], e["pid"], e["tid"]) for e in profile.events} == {("X", 0, 0)}
    profile.write_chrome_trace(tmp_path / "trace.json")
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written == {"traceEvents": profile.events, "displayTimeUnit": "ns"}
    # measured in the block only, also if it fails
    for program in (first, second):
        assert program.log == [
            ("watch", True),
            ("events", 65536),
            ("events", 0),
            ("watch", False),
        ]
    with pytest.raises(KeyError), recorded(first):
        raise KeyError
    assert first.log[4:] == first.log[:4]
    with recorded() as empty:
        pass
    assert empty.events == []


def test_programs_are_shown_once_at_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(profiles.atexit, "register", registered.append)
    kept = profiles._ExitProfile()
    monkeypatch.setattr(profiles, "_exit_profile", kept)
    first, second = Program(["matmul"]), Program(["add"])
    first.run(1, [(0, 30, 1)], 10**9)
    for program in (first, second):
        profiles.keep_for_exit(cast("Any", [program]))
        assert program.log == [("watch", True)]
        assert registered == [kept.show]
    second.run(1, [(0, 40, 1)], 10**9)
    log = logging.Logger("max.profile")
    fake = SimpleNamespace(**{name: getattr(logging, name) for name in ("StreamHandler", "INFO")})
    fake.getLogger = lambda name: {"max.profile": log}[name]
    monkeypatch.setattr(profiles, "logging", fake)
    kept.show()
    # from the start of the programs, not of the profile
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines[1:-1]] == ["add", "matmul"]
    assert lines[0].startswith("  share") and lines[-1].startswith("2 runs, 2000.000 ms")
    assert log.level == logging.INFO
    # a program that has configured logging gets the message as a log record
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    log.handlers[:] = [handler]
    kept.show()
    assert log.handlers == [handler] and records[0].splitlines() == lines
    assert capsys.readouterr().err == ""
