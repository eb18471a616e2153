"""Memory of outputs: which blocks are kept, used again and freed, without models and with readings of memory given."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest

from max._host.machine import SystemMemory
from max.driver import CPU, Accelerator, Tensor
from max.driver._memory import ALIGNMENT, address
from max.dtype import DType
from max.engine.run import output_memory
from max.engine.run.output_memory import (
    FRESH_SECONDS,
    KEPT_PER_OUTPUT,
    LEAST_CHECKED,
    LEAST_KEPT,
    KeptBlocks,
    OutputMemory,
    kept_blocks,
    trim_all,
)
from tests.devices.fake import fake_devices

U8 = DType.uint8


class Process(KeptBlocks):
    """The blocks of a process of its own, with as much memory as a test says."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.released = 0
        self.readings: list[float] = []
        self.system = SystemMemory(1 << 50, 1 << 50)

    def release(self) -> None:
        self.released += 1

    def read(self) -> SystemMemory:
        self.readings.append(self.now)
        return self.system


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr(output_memory, "_process", made)
    monkeypatch.setattr(output_memory, "system_memory", made.read)
    monkeypatch.setattr(output_memory.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(output_memory.host_memory, "release_free_memory", made.release)
    return made


def one(dtype: DType = U8, guarded: bool = False) -> OutputMemory:
    return OutputMemory([(dtype, CPU())], guarded)


def kept(memory: OutputMemory) -> list[int]:
    return [block.size - ALIGNMENT for block in memory._kept[0]]


@pytest.mark.parametrize("size", [0, 1, (64 << 10) - 1])
def test_small_outputs_are_not_kept(process: Process, size: int) -> None:
    memory = one()
    assert memory.tensor(0, (size,)).shape == (size,) and kept(memory) == []


@pytest.mark.parametrize("size", [64 << 10, (64 << 10) + 1])
def test_a_free_block_of_a_fitting_size_is_used_again(process: Process, size: int) -> None:
    memory = one()
    first = memory.tensor(0, (size,))
    assert kept(memory) == [size] and memory.kept_bytes() == size + ALIGNMENT
    second = memory.tensor(0, (size,))
    assert first._ptr != second._ptr and kept(memory) == [size, size]
    assert not first._ptr % ALIGNMENT and not second._ptr % ALIGNMENT
    place, block = first._ptr, weakref.ref(memory._kept[0][0])
    del first
    third = memory.tensor(0, (max(size - 1, LEAST_KEPT),))
    assert block() is not None and third._ptr == place and len(kept(memory)) == 2
    third[:] = 7
    second[:] = 5
    assert (third.to_numpy() == 7).all() and (second.to_numpy() == 5).all()


@pytest.mark.parametrize(("more", "again"), [(0, True), (1, False)])
def test_the_most_that_a_block_wastes(process: Process, more: int, again: bool) -> None:
    memory = one()
    size = 4 * LEAST_KEPT + more
    place = memory.tensor(0, (size,))._ptr
    smaller = memory.tensor(0, (LEAST_KEPT,))
    assert kept(memory) == ([size] if again else [LEAST_KEPT])
    assert not again or smaller._ptr == place


def test_a_free_block_that_is_too_small_is_freed_and_others_stay(process: Process) -> None:
    memory = one()
    held = memory.tensor(0, (LEAST_KEPT,))
    memory.tensor(0, (2 * LEAST_KEPT,))
    assert kept(memory) == [LEAST_KEPT, 2 * LEAST_KEPT]
    memory.tensor(0, (2 * LEAST_KEPT + 1,))
    assert kept(memory) == [LEAST_KEPT, 2 * LEAST_KEPT + 1]
    assert held.shape == (LEAST_KEPT,)


def test_the_newest_blocks_of_each_output_are_kept(process: Process) -> None:
    memory = OutputMemory([(U8, CPU()), (DType.float32, CPU())])
    held = [memory.tensor(0, (LEAST_KEPT + n,)) for n in range(4)]
    assert kept(memory) == [LEAST_KEPT + 2, LEAST_KEPT + 3] and KEPT_PER_OUTPUT == 2
    wide = memory.tensor(1, (LEAST_KEPT // 4,))
    blocks = [block for blocks in memory._kept for block in blocks]
    assert kept_blocks() == {id(block): 1 for block in blocks} and len(blocks) == 3
    assert memory.kept_bytes() == sum(block.nbytes for block in blocks)
    assert wide.dtype is DType.float32 and len(held) == 4
    trim_all()
    assert memory.kept_bytes() == 0 and not kept_blocks() and process.released == 1
    assert process.memories() == [memory]
    del memory
    gc.collect()
    assert process.memories() == []


def test_large_outputs_are_not_kept_while_little_memory_is_left(process: Process) -> None:
    memory, other = one(), one()
    other.tensor(0, (LEAST_KEPT,))
    large = one()
    large.tensor(0, (2 * LEAST_CHECKED,))
    assert kept(large) == [2 * LEAST_CHECKED] and LEAST_CHECKED == 1 << 20
    process.system, process.now = SystemMemory(available=1 << 20, total=1 << 40), process.now + 1
    memory.tensor(0, (LEAST_CHECKED - 1,))
    assert kept(memory) == [LEAST_CHECKED - 1] and kept(other) == [LEAST_KEPT]
    held = memory.tensor(0, (LEAST_CHECKED,))
    assert held.shape == (LEAST_CHECKED,) and kept(memory) == kept(other) == []


def test_blocks_are_freed_where_memory_ends(
    process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = one()
    memory.tensor(0, (LEAST_KEPT,))
    empty, failures = Tensor._empty, [MemoryError()]

    def fail_once(*args: Any) -> Tensor:
        if failures:
            assert kept(other) == [LEAST_KEPT]
            raise failures.pop()
        return empty(*args)

    other = one()
    other.tensor(0, (LEAST_KEPT,))
    monkeypatch.setattr(Tensor, "_empty", fail_once)
    held = memory.tensor(0, (9 * LEAST_KEPT,))
    assert held.shape == (9 * LEAST_KEPT,) and kept(memory) == kept(other) == []


def test_when_memory_is_short(process: Process) -> None:
    """A tenth stays free, and a quarter is for blocks."""
    process.system = SystemMemory(available=300, total=1000)
    assert not process.under_pressure(200) and process.under_pressure(201)
    process.system, process.now = SystemMemory(10_000, 10_000), process.now + 1
    assert not process.under_pressure(2500) and process.under_pressure(2501)
    size = LEAST_KEPT + ALIGNMENT
    process.system, process.now = SystemMemory(8 * size, 8 * size), process.now + 1
    memory = one()
    memory.tensor(0, (LEAST_KEPT,))
    assert not process.under_pressure(size) and process.under_pressure(size + 1)
    assert output_memory.under_pressure(size + 1) and not output_memory.under_pressure(size)


def test_readings_hold_for_a_while(process: Process) -> None:
    for share in (0.0, 0.5, 1.0, 1.25, 1.5, 2.25, 2.5):
        process.now = share * FRESH_SECONDS
        process.under_pressure(1)
    assert process.readings == [0.0, 1.25 * FRESH_SECONDS, 2.5 * FRESH_SECONDS]
    assert math.isinf(KeptBlocks()._read_s)


@pytest.mark.parametrize("size", [0, 1, 37, LEAST_KEPT // 4 - 1, LEAST_KEPT // 4, LEAST_KEPT])
def test_arrays_of_outputs(process: Process, size: int) -> None:
    memory = one(DType.float32)
    for _ in range(9):
        (place,), (array,) = memory.arrays([(1, size)])
        assert array.shape == (1, size) and array.dtype == np.float32
        assert place == address(array) and not place % ALIGNMENT
        array[...] = 3
    # the last array is held while the next one is made
    assert kept(memory) == ([4 * size] * 2 if 4 * size >= LEAST_KEPT else [])


def test_outputs_between_guard_pages(process: Process) -> None:
    memory = one(guarded=True)
    for size in (3, LEAST_KEPT):
        tensor = memory.tensor(0, (size,))
        assert (tensor._ptr + size) % 4096 == 0 or tensor._ptr % 4096 == 0
        (place,), (array,) = memory.arrays([(size,)])
        assert (place + size) % 4096 == 0 or place % 4096 == 0
        assert array.shape == (size,)
    assert kept(memory) == []


def test_outputs_of_other_devices(process: Process) -> None:
    with fake_devices(1):
        memory = OutputMemory([(U8, Accelerator(0))])
        for size in (3, LEAST_KEPT):
            tensor = memory.tensor(0, (size,))
            assert tensor.device is Accelerator(0) and tensor.shape == (size,)
            with pytest.raises((ValueError, BufferError), match="gpu:0"):
                memory.arrays([(size,)])
        assert kept(memory) == []
