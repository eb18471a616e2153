"""Row thresholds of products: looked up when a program is loaded, measured when its pool is idle.

A kernel with a GEMV and a GEMM path takes the threshold between them as an argument
(`max._backends.kernel_call.Limit`). The best threshold depends on the processor, its caches and the shape. Loading
takes it from the disk cache, or the compiler's default, and never measures. After the first execution
`max.engine.tune.idle_measurement` measures thresholds without a measurement, or with one from a busy machine, and
stores them for later processes.
Both paths compute the same result.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import field
from typing import NamedTuple

from max._backends.backend import Backend, Tuning
from max._compiler.program.code import Compiled, LaunchCode
from max._config import flags
from max._dataclass import dataclass
from max._host.disk_cache import content_key, default_cache, source_fingerprint

__all__ = [
    "QUIET",
    "Threshold",
    "Thresholds",
    "Unsure",
    "find_thresholds",
    "process_thresholds",
]

QUIET = 0.9
"""The minimum quality of a measurement on a quiet machine."""
USABLE = 0.5
"""The minimum quality of a useful measurement; below it the path with smaller tasks seems faster than it is."""

_KIND = "limits"
_FORMAT = struct.Struct("<Id")  # rows, quality


class Threshold(NamedTuple):
    """A measured row threshold.

    Args:
        rows: The maximum number of rows for the GEMV path.
        quality: The share of the workers' time that the process got during the measurement, 0 to 1.
    """

    rows: int
    quality: float


@dataclass(frozen=True)
class Unsure:
    """A threshold to measure.

    Args:
        name: The name that its launches share.
        key: Its key in the disk cache.
        sample: Launches to measure with.
    """

    name: str
    key: str
    sample: list[LaunchCode]


@dataclass
class Thresholds:
    """The thresholds of a program that is being loaded.

    Args:
        rows: Thresholds by name; other launches keep the compiler's default.
        unsure: Thresholds that are worth a measurement.
    """

    rows: dict[str, int] = field(default_factory=dict[str, int])
    unsure: list[Unsure] = field(default_factory=list[Unsure])


class ThresholdStore:
    """Thresholds by key: those of the process, and below them those of the disk cache."""

    def __init__(self) -> None:
        self._known: dict[str, Threshold] = {}

    def get(self, key: str) -> Threshold | None:
        """The threshold of a key; None if none was measured.

        Args:
            key: The key.
        """
        threshold = self._known.get(key)
        if threshold is None and (stored := default_cache().get(_KIND, key)) is not None:
            # a damaged entry
            if len(stored) != _FORMAT.size:
                return None
            threshold = self._known[key] = Threshold(*_FORMAT.unpack(stored))
        return threshold

    def keep(self, key: str, threshold: Threshold) -> bool:
        """Stores a threshold, unless a better one is stored; returns whether it was stored.

        Args:
            key: The key.
            threshold: The threshold.
        """
        before = self.get(key)
        if before is not None and before.quality >= threshold.quality:
            return False
        self._known[key] = threshold
        default_cache().put(_KIND, key, _FORMAT.pack(*threshold))
        return True


process_thresholds = ThresholdStore()
"""The thresholds that all sessions of this process use."""


def find_thresholds(compiled: Compiled, backend: Backend) -> Thresholds:
    """Looks up the thresholds of a program's launches.

    Args:
        compiled: The program.
        backend: The device that it runs on.
    """
    thresholds = Thresholds()
    tuning = backend.tuning
    if tuning is None:
        return thresholds
    groups: dict[str, list[LaunchCode]] = {}
    for launch in compiled.main.launches:
        if launch.limit is not None:
            groups.setdefault(launch.limit.name, []).append(launch)
    if not groups or not flags.MAX_AUTOTUNE or flags.MAX_KERNEL_INTERPRET:
        return thresholds
    # other kernels have other thresholds
    makers = [source_fingerprint(package) for package in ("_backends", "kernel", "engine")]
    for name, launches in groups.items():
        sample = _sample(compiled, launches, tuning)
        if not sample:
            continue
        key = content_key(
            name, backend.target.cache_key, str(backend.workers), *makers,
        )  # fmt: skip
        threshold = process_thresholds.get(key)
        if threshold is not None and threshold.quality >= USABLE:
            thresholds.rows[name] = threshold.rows
        if threshold is None or threshold.quality < QUIET:
            thresholds.unsure.append(Unsure(name, key, sample))
    return thresholds


def _sample(compiled: Compiled, launches: Sequence[LaunchCode], tuning: Tuning) -> list[LaunchCode]:
    """A sample of the launches, smallest weights first; empty if all of them together read little."""
    sizes = [
        sum(
            compiled.fixed_buffers[fixed].bytes
            for fixed in {slot.fixed_buffer for slot in launch.slots}
            if fixed >= 0
        )
        for launch in launches
    ]
    if sum(sizes) < tuning.least_bytes:
        return []
    order = sorted(range(len(launches)), key=sizes.__getitem__)
    ends = itertools.accumulate(sizes[i] for i in order)
    sample = [launches[i] for i, end in zip(order, ends, strict=True) if end <= tuning.sample_bytes]
    # the smallest weight alone exceeds the sample
    return sample or [launches[order[0]]]
