"""Where the time of executions goes: one line a kernel, as a table or as data.

The workers' walk over a program keeps, for each launch, the time at the barrier before it and the time in it, as worker 0
sees them. A :class:`Profile` is the difference of two readings, joined with what the compiler knows of each launch.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from max._abi import Event, ProfileRecord
from max._config import flags
from max.engine._program import LinkedProgram

__all__ = ["KernelTime", "Profile", "keep_for_exit", "recording"]

EVENT_ROOM = 1 << 16
"""Launches of a program that a trace has."""
_NUMBERED = re.compile(r"(?<![^.])\d+(?=\.)")


@dataclass
class KernelTime:
    """The launches of one kernel that differ only in the numbers of their names, summed.

    Args:
        name: What the kernel does, after where it stands; ``*`` stands for the numbers of equal layers.
        kernel: The key of its code.
        launches: How many launches of the program these are.
        calls: How often they ran.
        seconds: Time in the kernel, as worker 0 saw it.
        wait_seconds: Time at the barriers before it.
        bytes: Size of the buffers that it touched, workspaces included; a buffer of which only a part is read counts
            whole.
        flops: Operations on numbers: two for each product of a matmul or convolution, one for each element and op of
            a fused region; 0 where it is not known.
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
        """`flops` by `seconds`, in 1e9; 0 where no time passed."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gigabytes_per_second(self) -> float:
        """`bytes` by `seconds`; 0 where no time passed."""
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0


@dataclass
class Profile:
    """What was measured; complete when its ``with`` block has ended.

    Args:
        kernels: The kernels, the one with the most time first.
        runs: How many programs, or segments of one, ran.
        seconds: Time of these runs, waking the workers included; the checks of arguments are not.
    """

    kernels: list[KernelTime] = field(default_factory=list[KernelTime])
    runs: int = 0
    seconds: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]], repr=False)
    """Single launches and waits, as events of the Trace Event Format."""

    def write_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes what worker 0 did over time, for chrome://tracing or Perfetto.

        The file is in the Trace Event Format: complete events (``"ph": "X"``), times in microseconds. Up to 65,536
        launches of each program are kept.

        Args:
            path: The file.
        """
        whole = {"traceEvents": self.events, "displayTimeUnit": "ns"}
        Path(path).write_text(json.dumps(whole), encoding="utf-8")

    @property
    def around_seconds(self) -> float:
        """Time of the runs that is in no kernel and at no barrier: waking the workers, waiting for the last one."""
        inside = sum(kernel.seconds + kernel.wait_seconds for kernel in self.kernels)
        return max(self.seconds - inside, 0.0)

    def share(self, kernel: KernelTime) -> float:
        """A kernel's part of the time in kernels, from 0 to 1."""
        total = sum(k.seconds for k in self.kernels)
        return kernel.seconds / total if total else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The profile as JSON can hold it."""
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
                f"{k.launches:9} {1e3 * k.wait_seconds:10.3f} {k.gigabytes_per_second:8.1f} {k.gigaflops:8.1f}  {k.name}"
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
            if launch.jump:
                continue
            key = (_NUMBERED.sub("*", launch.name), launch.kernel)
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
    """Keeps the times of programs while the block runs.

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
    """The logged launches of programs, and the waits before them, in their order."""
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
            if launch.barrier:
                rows.append((arrived, began, "wait", "barrier"))
            rows.append((began, ended, launch.name, "kernel"))
    rows.sort()
    first = rows[0][0] if rows else 0
    return [
        {
            "name": name, "cat": kind, "ph": "X", "pid": 0, "tid": 0,
            "ts": (start - first) / hertz * 1e6, "dur": (end - start) / hertz * 1e6,
        }
        for start, end, name, kind in rows
    ]  # fmt: skip


_kept: list[LinkedProgram] = []


def keep_for_exit(programs: Iterable[LinkedProgram]) -> None:
    """With ``MAX_PROFILE``, has the times of programs shown when the process ends."""
    if not flags.MAX_PROFILE:
        return
    if not _kept:
        atexit.register(_show)
    for program in programs:
        program.watch(True)
        _kept.append(program)


def _show() -> None:
    """Writes the profile of the process to the logger ``max.profile``; to stderr where no logging is set up."""
    profile = Profile()
    _fill(profile, [(program, None) for program in _kept])
    log = logging.getLogger("max.profile")
    if not log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.info("%s", profile)
