"""Memory and load of GPUs, as their driver reports them.

Needs the package ``nvidia-ml-py`` (``pip install "supremum[gpu]"``) and the driver of NVIDIA's GPUs. Where either is
missing there are no GPUs to report. AMD's are not looked for.
"""

from __future__ import annotations

import importlib
import logging
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Any

__all__ = ["BackgroundRecorder", "GPUDiagContext", "GPUStats", "MemoryStats", "UtilizationStats"]

logger = logging.getLogger("max.diagnostics")

INTERVAL = 1.0
"""Seconds between two samples of a `BackgroundRecorder`."""


@dataclass(frozen=True)
class MemoryStats:
    """The memory of a GPU, in bytes."""

    total_bytes: int
    """The total memory."""
    free_bytes: int
    """The free memory."""
    used_bytes: int
    """The allocated memory."""
    reserved_bytes: int | None
    """The memory that the driver reserves for itself; None if it does not tell."""


@dataclass(frozen=True)
class UtilizationStats:
    """The load of a GPU over the driver's last sampling period."""

    gpu_usage_percent: int
    """The percentage of the time in which a kernel ran, 0 to 100."""
    memory_activity_percent: int | None
    """The percentage of the time in which memory was read or written, 0 to 100; None if the driver does not tell."""


@dataclass(frozen=True)
class GPUStats:
    """Memory and load of a GPU."""

    memory: MemoryStats
    """Its memory."""
    utilization: UtilizationStats
    """Its load."""


class GPUDiagContext:
    """Access to the statistics of all GPUs, in a ``with`` block.

    ::

        with GPUDiagContext() as context:
            for name, stats in context.get_stats().items():
                print(name, stats.memory.used_bytes)
    """

    def __init__(self) -> None:
        self._nvml: Any = None

    def __enter__(self) -> GPUDiagContext:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.info("nvidia-ml-py is not installed, so no NVIDIA GPU is reported")
            return self
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            logger.info("NVML reports no NVIDIA GPU: %s", error)
        else:
            self._nvml = nvml
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        nvml, self._nvml = self._nvml, None
        if nvml is not None:
            nvml.nvmlShutdown()

    def get_stats(self) -> dict[str, GPUStats]:
        """The statistics of each GPU now, by name: ``nv0``, ``nv1`` and so on. Empty if there is none."""
        nvml = self._nvml
        if nvml is None:
            return {}
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {f"nv{index}": _stats(nvml, handle) for index, handle in enumerate(handles)}


def _stats(nvml: Any, handle: Any) -> GPUStats:
    reserved = None
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        reserved = int(memory.reserved)
    except nvml.NVMLError:
        # drivers before 510 have the first version only
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        load = UtilizationStats(int(rates.gpu), int(rates.memory))
    except nvml.NVMLError:
        # not reported in MIG mode and in some virtual machines
        load = UtilizationStats(0, None)
    return GPUStats(
        MemoryStats(int(memory.total), int(memory.free), int(memory.used), reserved), load
    )


class BackgroundRecorder:
    """Records the statistics of all GPUs once a second while a ``with`` block runs, in a thread of its own.

    ::

        with BackgroundRecorder() as recorder:
            run()
        print(len(recorder.stats))
    """

    def __init__(self) -> None:
        self._samples: list[dict[str, GPUStats]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._complete = False

    def __enter__(self) -> BackgroundRecorder:
        if self._thread is not None:
            raise RuntimeError(
                "BackgroundRecorder: it records already, or has recorded; make another one"
            )
        self._thread = threading.Thread(target=self._record, name="gpu-recorder", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._thread is not None
        self._ended.set()
        self._thread.join()
        self._complete = True

    def _record(self) -> None:
        with GPUDiagContext() as context:
            while True:
                self._samples.append(context.get_stats())
                if self._ended.wait(INTERVAL):
                    return

    @property
    def stats(self) -> list[dict[str, GPUStats]]:
        """The samples, in order: for each the statistics by GPU.

        Raises:
            RuntimeError: The ``with`` block has not ended.
        """
        if not self._complete:
            raise RuntimeError("BackgroundRecorder: read stats after the with block has ended")
        return self._samples
