"""Profiles of executions: time per kernel, as a table or as data.

For each launch, worker 0 measures the time in it, and at the barrier before it. A :class:`Profile` is the difference of
two readings, joined with the compiler's data on each launch.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import numpy as np

from max._abi import Event, ProfileRecord
from max._dataclass import dataclass
from max.engine.run.linked_program import LinkedProgram

__all__ = ["KernelTime", "Profile", "keep_for_exit", "recording"]

EVENT_ROOM = 1 << 16
"""The maximum number of launches per program in a trace."""
_NUMBERED = re.compile(r"(?<![^.])\d+(?=\.)")  # a whole part of a dotted name


@dataclass
class KernelTime:
    """The sum over the launches of one kernel whose names differ only in numbers.

    Args:
        name: The prefix of the call and the kernel's ops; ``*`` stands for the numbers of equal layers. The names of
            `Graph.profile_scope` follow in brackets.
        kernel: The key of the code.
        launches: The number of launches in the program.
        calls: The number of executions of these launches.
        seconds: The time in the kernel, measured by worker 0.
        wait_seconds: The time at the barriers before it.
        bytes: The size of the touched buffers, workspaces included; a partially read buffer counts as a whole.
        flops: The arithmetic operations: two per product of a matmul or convolution, one per element and op of a fused
            region; 0 if unknown.
    """

    name: str
    kernel: str
    launches: int = 0
    calls: int = 0
    seconds: float = 0.0
    wait_seconds: float = 0.0
    bytes: int = 0
    flops: int = 0

    @property
    def gigaflops(self) -> float:
        """`flops / seconds / 1e9`; 0 if no time passed."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """`bytes / seconds / 1e9`; 0 if no time passed."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass
class Profile:
    """The measurements of a ``with`` block, complete when it has ended.

    Args:
        kernels: The kernels, by decreasing time.
        runs: The number of runs of programs, or of their segments.
        seconds: The time of these runs, including waking the workers, without checks of arguments.
    """

    kernels: list[KernelTime] = field(default_factory=list[KernelTime])
    runs: int = 0
    seconds: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], repr=False)
    """Launches and waits, as events of the Trace Event Format."""

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace of worker 0, for chrome://tracing or Perfetto.

        The file is in the Trace Event Format: complete events (``"ph": "X"``), times in microseconds. Up to 65,536
        launches of each program are kept.

        Args:
            path: The file.
        """
        trace = {"traceEvents": self.events, "displayTimeUnit": "ns"}
        Path(path).write_text(json.dumps(trace), encoding="utf-8")

    @property
    def around_seconds(self) -> float:
        """The time of runs outside of kernels and barriers: waking the workers, waiting for the last one."""
        inside = sum(kernel.seconds + kernel.wait_seconds for kernel in self.kernels)
        return max(self.seconds - inside, 0.0)

    def share(self, kernel: KernelTime) -> float:
        """A kernel's share of the time in kernels, from 0 to 1."""
        total = sum(k.seconds for k in self.kernels)
        return kernel.seconds / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON data."""
        return {
            "runs": self.runs,
            "seconds": self.seconds,
            "around_seconds": self.around_seconds,
            "kernels": [
                {
                    **asdict(kernel),
                    "share": self.share(kernel),
                    "gigabytes_per_second": kernel.gigabytes_per_second,
                    "gigaflops": kernel.gigaflops,
                }
                for kernel in self.kernels
            ],
        }

    def __str__(self) -> str:
        lines = [
            "  share   total ms    mean us      calls  launches    wait ms     GB/s  GFLOP/s  kernel"
        ]
        for k in self.kernels:
            mean = k.seconds / k.calls if k.calls else 0.0
            lines.append(
                f"{100 * self.share(k):6.1f}% {1e3 * k.seconds:10.3f} {1e6 * mean:10.2f} {k.calls:10} "
                f"{k.launches:9} {1e3 * k.wait_seconds:10.3f} {k.gigabytes_per_second:8.1f} {k.gigaflops:8.1f}  "
                f"{k.name}"
            )
        lines.append(
            f"{self.runs} runs, {1e3 * self.seconds:.3f} ms, of which {1e3 * self.around_seconds:.3f} ms are in no "
            "kernel and at no barrier"
        )
        return "\n".join(lines)


_Reading = tuple[np.ndarray[Any, Any], dict[tuple[int, ...], int], int]


def _fill(profile: Profile, parts: Iterable[tuple[LinkedProgram, _Reading | None]]) -> None:
    """Adds what programs did since a reading, or ever."""
    kernels: dict[tuple[str, str], KernelTime] = {}
    for program, before in parts:
        ticks, runs, nanoseconds = program.reading()
        # the counters run on: only what came since the reading is of the block
        if before is not None:
            ticks = ticks - before[0]
            runs = {key: count - before[1].get(key, 0) for key, count in runs.items()}
            nanoseconds -= before[2]
        calls = sum(runs.values())
        profile.runs += calls
        profile.seconds += nanoseconds / 1e9
        if not calls:
            continue
        moved, operations = program.bytes_moved(runs), program.flops(runs)
        hertz = program.executor.clock_hz
        for launch, row, size, flops in zip(
            program.code.launches, ticks.tolist(), moved, operations, strict=True
        ):
            # jumps of loops and branches run no kernel
            if launch.jump:
                continue
            name = _NUMBERED.sub("*", launch.name) + program.scope_of(launch)
            key = (name, launch.kernel)
            kernel = kernels.setdefault(key, KernelTime(*key))
            kernel.launches += 1
            times = row[ProfileRecord.COUNT]
            kernel.calls += times
            kernel.seconds += row[ProfileRecord.RUN] / hertz
            kernel.wait_seconds += row[ProfileRecord.WAIT] / hertz
            # a launch in a loop ran more or less often than the program
            kernel.bytes += size * times // calls
            kernel.flops += flops * times // calls
    profile.kernels = sorted(kernels.values(), key=lambda kernel: -kernel.seconds)


@contextmanager
def recording(programs: Iterable[LinkedProgram]) -> Generator[Profile]:
    """Measures the times of programs in a ``with`` block.

    Args:
        programs: The programs.
    """
    watched = list(programs)
    profile = Profile()
    for program in watched:
        program.watch(True)
        program.executor.log_events(EVENT_ROOM)
    readings = [program.reading() for program in watched]
    try:
        yield profile
    finally:
        _fill(profile, zip(watched, readings, strict=True))
        profile.events = _trace(watched)
        for program in watched:
            program.executor.log_events(0)
            program.watch(False)


def _trace(programs: Iterable[LinkedProgram]) -> list[dict[str, Any]]:
    """The logged launches of programs and the waits before them, in order."""
    rows: list[tuple[int, int, str, str]] = []
    hertz = 1.0
    for program in programs:
        hertz = program.executor.clock_hz
        events: list[list[int]] = program.executor.events().tolist()
        for event in events:
            launch = program.code.launches[event[Event.LAUNCH]]
            arrived, began, ended = (
                event[field] for field in (Event.ARRIVAL, Event.START, Event.FINISH)
            )
            # a launch behind a barrier waited for the other workers
            if launch.barrier:
                rows.append((arrived, began, "wait", "barrier"))
            rows.append((began, ended, launch.name + program.scope_of(launch), "kernel"))
    if not rows:
        return []
    rows.sort()
    first = rows[0][0]
    # ticks to microseconds, from the first event on
    return [
        {
            "name": name, "cat": kind, "ph": "X", "pid": 0, "tid": 0,
            "ts": (start - first) / hertz * 1e6, "dur": (end - start) / hertz * 1e6,
        }
        for start, end, name, kind in rows
    ]  # fmt: skip


class _ExitProfile:
    """The programs whose times are shown when the process ends."""

    def __init__(self) -> None:
        self._programs: list[LinkedProgram] = []

    def add(self, programs: Iterable[LinkedProgram]) -> None:
        """Watches programs."""
        if not self._programs:
            atexit.register(self.show)
        for program in programs:
            program.watch(True)
            self._programs.append(program)

    def show(self) -> None:
        """Writes the profile of the process to the logger ``max.profile``, or to stderr if no logging is configured."""
        profile = Profile()
        _fill(profile, [(program, None) for program in self._programs])
        log = logging.getLogger("max.profile")
        if not log.hasHandlers():
            log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
        log.info("%s", profile)


_exit_profile = _ExitProfile()


def keep_for_exit(programs: Iterable[LinkedProgram]) -> None:
    """Registers programs whose times are shown when the process ends, for ``MAX_PROFILE``."""
    _exit_profile.add(programs)
