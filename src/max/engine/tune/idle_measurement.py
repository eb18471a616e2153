"""Measurement of row thresholds on a background thread, while a device is idle; between executions if it never is.

A program is measured after its first execution, when its device was idle for `IDLE_SECONDS` and the process used
little CPU. A measurement is abandoned when anything else runs on the device, and repeated later. The program uses the
result at once; the disk cache stores it with its quality, so that a result from a quiet machine replaces one from a
busy machine.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

from max._compiler.program.code import Compiled
from max._dataclass import dataclass
from max._host.reentry import in_child, reentrant_lock
from max._host.threads import DaemonThread
from max._lazy import lazy_module
from max.engine.run.linked_program import Linked
from max.engine.tune.row_thresholds import QUIET, USABLE, Threshold, Unsure, process_thresholds

if TYPE_CHECKING:
    from max.engine.tune import busy_measurement, threshold_measurement
    from max.engine.tune.threshold_measurement import Linker
else:
    busy_measurement = lazy_module("max.engine.tune.busy_measurement")
    threshold_measurement = lazy_module("max.engine.tune.threshold_measurement")

__all__ = ["measure_when_idle"]

logger = logging.getLogger("max.engine")

IDLE_SECONDS = 1.0
"""Time without an execution after which a device counts as idle."""
IDLE_CPU = 0.1
"""The maximum share of a core that the process uses meanwhile."""
RETRY_SECONDS = 60.0
"""The delay of the next measurement after one on a busy machine; it doubles each time."""
BUSY_OBSERVATIONS = 3
"""The number of observations of a busy device after which a threshold is measured between executions."""
ATTEMPTS = 3
"""The maximum number of measurements of one threshold per process."""


@dataclass
class _Job:
    """A threshold to measure, with weak references to its programs."""

    linked: weakref.ref[Linked]
    compiled: Compiled
    link: Linker
    unsure: Unsure
    attempts: int = 0
    due: float = 0.0
    busy: int = 0


class _Idler:
    """The thread and its jobs."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drops the jobs and the thread, which a forked child does not have."""
        self._jobs: list[_Job] = []
        self._lock = reentrant_lock()
        self._thread: DaemonThread | None = None
        self._ended = threading.Event()

    def add(self, jobs: Sequence[_Job]) -> None:
        """Adds jobs, and starts the thread if it does not run."""
        with self._lock:
            self._jobs.extend(jobs)
            if self._thread is not None or self._ended.is_set():
                return
            thread = DaemonThread(self._work, name="max measurement")
            try:
                thread.start()
            except RuntimeError:  # the system refused a thread, or the interpreter is shutting down
                logger.debug("row thresholds are not measured: no thread", exc_info=True)
                return
            self._thread = thread

    def end(self) -> None:
        """Abandons the current measurement, and waits for its last run."""
        self._ended.set()
        thread = self._thread
        if thread is not None:
            thread.join(1.0)

    def _work(self) -> None:
        """The thread: measures one due job at a time while its device is idle, and ends when no job is left."""
        while not self._ended.wait(IDLE_SECONDS / 4):
            with self._lock:
                # models that are gone need no thresholds
                self._jobs = [job for job in self._jobs if job.linked() is not None]
                if not self._jobs:
                    self._thread = None
                    return
                jobs = list(self._jobs)
            now = time.monotonic()
            job = next((j for j in jobs if j.due <= now and _was_run(j.linked())), None)
            if job is None:
                continue
            if not self._is_idle(job):
                self._measure_between(job)
            elif not self._measure(job):
                with self._lock:
                    self._jobs.remove(job)

    def _is_idle(self, job: _Job) -> bool:
        """Observes the job's device for `IDLE_SECONDS`."""
        linked = job.linked()
        if linked is None:
            return False
        backend = linked.main.backend
        del linked  # observing must not keep the model's memory alive
        before, cpu = backend.run_number(), time.process_time()
        if self._ended.wait(IDLE_SECONDS):
            return False
        return (
            backend.run_number() == before and time.process_time() - cpu < IDLE_CPU * IDLE_SECONDS
        )

    def _measure_between(self, job: _Job) -> None:
        """Lets a threshold be measured between the executions of its program, if the device was busy for long and no
        result is usable.
        """
        linked, unsure = job.linked(), job.unsure
        job.busy += 1
        if linked is None or job.busy < BUSY_OBSERVATIONS or linked.main.after_run is not None:
            return
        stored = process_thresholds.get(unsure.key)
        if stored is not None and stored.quality >= USABLE:
            return
        main, ref = linked.main, job.linked

        def keep(threshold: Threshold | None) -> None:
            """Uses a result, and makes room for the next measurement of this program."""
            if threshold is not None and process_thresholds.keep(unsure.key, threshold):
                logger.info("%s: row threshold %d, under load", unsure.name, threshold.rows)
            programs, found = ref(), process_thresholds.get(unsure.key)
            if programs is None:
                return
            if found is not None and found.quality >= USABLE:
                for program in (programs.main, *programs.later):
                    program.set_limits({unsure.name: found.rows})
            programs.main.after_run = None
            # the next attempts wait until the device is idle
            job.due = time.monotonic() + RETRY_SECONDS

        backend = main.backend

        def begin() -> Generator[None, None, Threshold | None]:
            """Begins the measurement."""
            return threshold_measurement.Measurement(
                job.compiled, job.link, unsure.sample, backend
            ).turns()

        main.after_run = busy_measurement.BusyMeasurement(begin, backend, keep).take_turn

    def _measure(self, job: _Job) -> bool:
        """Measures a threshold; returns whether to measure it again later."""
        linked, unsure = job.linked(), job.unsure
        if linked is None:
            return False
        start = time.perf_counter()
        stored = process_thresholds.get(unsure.key)
        if stored is None or stored.quality < QUIET:
            try:
                threshold = threshold_measurement.Measurement(
                    job.compiled, job.link, unsure.sample, linked.main.backend, self._ended.is_set
                ).threshold()
            except threshold_measurement.PoolIsBusyError:
                return True
            if threshold is None:
                return False
            logger.info(
                "%s: row threshold %d, %.0f %% of the processor (%.0f ms)",
                unsure.name,
                threshold.rows,
                100 * threshold.quality,
                1e3 * (time.perf_counter() - start),
            )
            if process_thresholds.keep(unsure.key, threshold):
                stored = threshold
        if stored is not None and stored.quality >= USABLE:
            for program in (linked.main, *linked.later):
                program.set_limits({unsure.name: stored.rows})
        job.attempts += 1
        # after one minute, then two, then four
        job.due = time.monotonic() + RETRY_SECONDS * 2 ** (job.attempts - 1)
        return stored is not None and stored.quality < QUIET and job.attempts < ATTEMPTS


def _was_run(linked: Linked | None) -> bool:
    return linked is not None and linked.main.executor.runs > 0


def measure_when_idle(
    linked: Linked, compiled: Compiled, link: Linker, unsure: Sequence[Unsure]
) -> None:
    """Schedules measurements of thresholds, after the model's first execution.

    Args:
        linked: The model's programs; scheduled jobs do not keep them alive.
        compiled: The compiled model.
        link: Links parts of the model; it must not reference `linked`.
        unsure: The thresholds to measure.
    """
    if unsure:
        ref = weakref.ref(linked)
        _idler.add([_Job(ref, compiled, link, item) for item in unsure])


_idler = _Idler()


atexit.register(_idler.end)
in_child(_idler.reset)
