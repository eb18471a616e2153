"""One process an engine, runs interleaved A B A B, medians and ratios."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def exit_on_sigterm() -> None:
    """Makes SIGTERM raise SystemExit, so that temporary folders with models and caches are deleted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


class Worker:
    """An engine in a process of its own that answers one JSON line a request.

    ``module`` is run as ``python -m module``; it reads ``{"op": …}`` lines and answers a JSON object, the
    protocol of ``serve`` below. Its stderr passes through, so that a failure is seen.

    Args:
        module: The worker's module.
        env: Variables of the environment that differ.
        python: The interpreter of the engine's own environment; ours where None.
        setup: Arguments of the worker's ``setup``, whose answer is ``setup``.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str] | None = None,
        python: Path | None = None,
        **setup: Any,
    ) -> None:
        self.name = module.rsplit(".", 1)[-1]
        self.process = subprocess.Popen(
            [str(python or sys.executable), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        )
        self.setup = self.call("setup", **setup)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer; raises RuntimeError when the worker died."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} died with exit code {self.process.wait()} in {op}")
        return json.loads(line)

    @property
    def ended(self) -> bool:
        """Whether the process has ended, of itself or by an error."""
        return self.process.poll() is not None

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=600)


def serve(handlers: Mapping[str, Any]) -> None:
    """The worker's side: answer requests until stdin ends. Whatever a library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = handlers[request.pop("op")](**request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_memory() -> dict[str, float]:
    """The most memory that this process has had, in bytes: its own, without the pages of mapped files."""
    status = Path("/proc/self/status").read_text()
    found = {key: int(value) * 1024 for key, value in re.findall(r"(\w+):\s+(\d+) kB", status)}
    return {"peak_bytes": found["VmHWM"], "own_bytes": found["RssAnon"]}


@dataclass
class Samples:
    """The figures of one measurement, one entry a run."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.values):.4g}–{max(self.values):.4g})"


PAUSE = 0.05
"""Seconds between two turns: threads of ONNX Runtime spin after a run, and took half of a core from the next engine."""


MOST_TURNS, SETTLED = 9, 1.08
"""The maximum number of turns of a short measurement, and the factor that the middle half of its ratios must lie within."""


def settled(ours: Samples, peers: Iterable[Samples]) -> bool:
    """Whether the turns agree on what ours takes against each peer."""
    for peer in peers:
        low, _, high = statistics.quantiles(_ratios(ours, peer), n=4)
        if high > SETTLED * low:
            return False
    return True


def interleave(
    workers: Sequence[Worker],
    op: str,
    runs: int,
    warmups: int = 1,
    settle: str | None = None,
    **arguments: Any,
) -> dict[str, dict[str, Samples]]:
    """Ask each worker in turn, ``runs`` times after ``warmups``; ``result[worker][figure]``.

    With a figure to ``settle`` there are up to `MOST_TURNS`, until the first worker's and the others' are `settled`.
    """
    for _ in range(warmups):
        for worker in workers:
            worker.call(op, **arguments)
    out: dict[str, dict[str, Samples]] = {worker.name: {} for worker in workers}
    for turn in range(max(runs, MOST_TURNS) if settle else runs):
        if settle and turn >= max(runs, 2):
            ours, *peers = (out[worker.name][settle] for worker in workers)
            if settled(ours, peers):
                break
        for worker in workers:
            time.sleep(PAUSE)
            for figure, value in worker.call(op, **arguments).items():
                out[worker.name].setdefault(figure, Samples()).values.append(value)
    return out


def ratio(ours: Samples, peer: Samples) -> float:
    """Median of the pairwise ratios ours / peer: robust when the machine's speed drifts."""
    return statistics.median(_ratios(ours, peer))


def _ratios(ours: Samples, peer: Samples) -> list[float]:
    return [a / b for a, b in zip(ours.values, peer.values, strict=True)]


def commit() -> str:
    """The id of the commit that is measured, with ``+changes`` where the working tree differs from it; empty outside of git."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip()


def machine() -> str:
    """One line on the machine, for the head of a table; processors of one name differ by their family and model."""
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = [line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines()]
        # those of the first processor
        found = {line[0].strip(): line[1].strip() for line in reversed(lines) if len(line) == 2}
        cpu = found.get("model name", cpu)
        if "cpu family" in found and "model" in found:
            cpu += f" (family {found['cpu family']} model {found['model']})"
    return f"{cpu}, {len(os.sched_getaffinity(0))} CPUs, Python {platform.python_version()}"
