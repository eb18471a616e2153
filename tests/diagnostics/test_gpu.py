"""Statistics of GPUs, with a stand-in for NVIDIA's library, and on a machine without GPUs."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from max.diagnostics import gpu


class FakeNvml(ModuleType):
    """NVML with two GPUs: one of an old driver, which has no second version of the memory's statistics."""

    class NVMLError(Exception):
        pass

    nvmlMemory_v2 = 2

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.open
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int = 1) -> SimpleNamespace:
        if handle == 1 and version == 2:
            raise self.NVMLError
        return SimpleNamespace(total=1000 + handle, free=600, used=350, reserved=50)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        if handle == 1:
            raise self.NVMLError
        return SimpleNamespace(gpu=73, memory=21)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_statistics(nvml: FakeNvml) -> None:
    with gpu.GPUDiagContext() as context:
        assert context.get_stats() == {
            "nv0": gpu.GPUStats(gpu.MemoryStats(1000, 600, 350, 50), gpu.UtilizationStats(73, 21)),
            "nv1": gpu.GPUStats(
                gpu.MemoryStats(1001, 600, 350, None), gpu.UtilizationStats(0, None)
            ),
        }
    assert nvml.open == 0 and context.get_stats() == {}


def test_a_recorder_samples_until_its_block_ends(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "INTERVAL", 0.01)
    with gpu.BackgroundRecorder() as recorder:
        while len(recorder._samples) < 3:
            pass
        with pytest.raises(RuntimeError, match="after the with block"):
            _ = recorder.stats
    assert len(recorder.stats) >= 3 and set(recorder.stats[0]) == {"nv0", "nv1"}
    with pytest.raises(RuntimeError, match="make another one"):
        recorder.__enter__()
    assert nvml.open == 0


def test_no_library_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoDriver(FakeNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    for module in (None, NoDriver()):
        monkeypatch.setitem(sys.modules, "pynvml", module)
        with gpu.GPUDiagContext() as context:
            assert context.get_stats() == {}
    code = "from max.diagnostics import gpu; import sys; assert 'pynvml' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
