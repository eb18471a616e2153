"""Where the weights, constants and results of a model that are computed once lie; no model is loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from max._backends import BackendOptions, Backends, backends_for
from max._compiler.program.code import FixedBuffer
from max._host import guard
from max.driver import Tensor
from max.dtype import DType
from max.engine.load.fixed_memory import FixedMemory
from max.graph.weights import LaterCast
from tests.devices.fake import FakeDevice, fake_devices

GPU = 1
ROW = np.arange(5, dtype=np.float32)


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    with fake_devices(1) as (found,):
        yield found


@pytest.fixture
def backends(device: FakeDevice) -> Backends:
    return backends_for([device], BackendOptions())


def fixed(items: Sequence[FixedBuffer], guarded: bool = False) -> Any:
    return SimpleNamespace(fixed_buffers=list(items), guarded=guarded)


def memory_of(
    backends: Backends, items: Sequence[FixedBuffer], guarded: bool = False, **changes: Any
) -> tuple[FixedMemory, list[int]]:
    """The memory, and the sizes that were allocated for results."""
    sizes = list[int]()

    def allocate(num_bytes: int) -> np.ndarray:
        sizes.append(num_bytes)
        return np.zeros(num_bytes, np.uint8)

    weights, constants = changes.pop("weights", {}), changes.pop("constants", {})
    memory = FixedMemory(
        fixed(items, guarded), backends, weights, constants, allocate=allocate, **changes
    )
    assert len(memory.addresses) == len(items)
    return memory, sizes


def bytes_at(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def kept(num_bytes: int, device: int = 0) -> FixedBuffer:
    return FixedBuffer("kept", num_bytes, device=device)


def test_results_computed_once_share_an_allocation(backends: Backends) -> None:
    """Each begins at a multiple of 64 bytes; those of other devices, weights and constants are not in it."""
    items = [kept(10), FixedBuffer("constant", 20), kept(65), kept(1000, GPU), kept(64)]
    memory, sizes = memory_of(backends, items, constants={1: ROW})
    start = memory.kept_results.ctypes.data
    assert sizes == [64 + 128 + 64] and not memory.is_computed
    assert [memory.addresses[i] - start for i in (0, 2, 4)] == [0, 64, 192]
    assert memory.addresses[1] == ROW.ctypes.data


def test_results_that_are_on_the_disk_are_not_computed(backends: Backends) -> None:
    asked = list[int]()
    ready = np.ones(192, np.uint8)

    def packed(num_bytes: int) -> np.ndarray:
        asked.append(num_bytes)
        return ready

    memory, sizes = memory_of(backends, [kept(10), kept(128)], packed=packed)
    assert (asked, sizes, memory.is_computed) == ([192], [], True) and memory.kept_results is ready
    assert memory.addresses == [ready.ctypes.data, ready.ctypes.data + 64]
    # there may be none
    memory, sizes = memory_of(backends, [kept(10)], packed=lambda num_bytes: None)
    assert sizes == [64] and not memory.is_computed


def test_values_of_the_host_are_used_in_place(backends: Backends) -> None:
    weight = Tensor.from_numpy(ROW)
    items = [FixedBuffer("weight", 20, "w"), FixedBuffer("constant", 20)]
    memory, _ = memory_of(backends, items, weights={"w": weight}, constants={1: ROW + 1})
    assert memory.addresses[0] == ROW.ctypes.data
    assert bytes_at(memory.addresses[1], 20) == (ROW + 1).tobytes()
    assert len(memory.owners) == 3
    memory.release(0)
    assert not any(owner is weight for owner in memory.owners) and len(memory.owners) == 2
    memory.release(0)


def test_values_of_other_devices_are_copied_there(backends: Backends, device: FakeDevice) -> None:
    """Transposed elements in their order; a tensor that is there is not copied."""
    there = Tensor.from_numpy(ROW).to(device)
    grid = np.arange(6, dtype=np.float32).reshape(2, 3)
    items = [
        FixedBuffer("weight", 20, "there", device=GPU),
        FixedBuffer("weight", 24, "here", device=GPU),
        FixedBuffer("constant", 24, device=GPU),
        FixedBuffer("constant", 0, device=GPU),
        kept(16, GPU),
    ]
    weights = {"there": there, "here": Tensor.from_numpy(grid)}
    before = device.memory.written_bytes  # type: ignore[attr-defined]
    memory, sizes = memory_of(
        backends, items, weights=weights, constants={2: grid.T, 3: np.zeros(0, np.float32)}
    )
    assert memory.addresses[0] == there._ptr and sizes == [0]
    assert device.memory.read(memory.addresses[1], 24).tobytes() == grid.tobytes()
    assert device.memory.read(memory.addresses[2], 24).tobytes() == grid.T.tobytes()
    assert device.memory.written_bytes == before + 48  # type: ignore[attr-defined]
    assert len(set(memory.addresses)) == 5 and len(memory.owners) == 6


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("place", [0, GPU])
def test_casts_are_left_for_kernels_of_the_host(
    backends: Backends, device: FakeDevice, guarded: bool, place: int
) -> None:
    wide = Tensor.from_numpy(ROW)
    cast = ROW.astype(ml_dtypes.bfloat16)
    weight = LaterCast(wide, DType.bfloat16, lambda: Tensor.from_numpy(cast.view(np.uint16)))
    items = [FixedBuffer("weight", 10, "w", device=place), kept(8)]
    memory, _ = memory_of(backends, items, guarded, weights={"w": weight})
    later = place == 0 and not guarded
    assert memory.casts == ({0: weight} if later else {})
    if later:
        ctypes.memmove(memory.addresses[0], cast.ctypes.data, 10)
    address = memory.addresses[0]
    found = device.memory.read(address, 10).tobytes() if place else bytes_at(address, 10)
    assert found == cast.tobytes()


def test_guarded_buffers_end_at_a_page_each(backends: Backends) -> None:
    items = [FixedBuffer("constant", 20), kept(100), FixedBuffer("weight", 20, "w"), kept(8, GPU)]
    weights = {"w": Tensor.from_numpy(ROW)}
    memory, sizes = memory_of(backends, items, True, weights=weights, constants={0: ROW + 1})
    assert sizes == [0]
    for address, item in zip(memory.addresses[:3], items, strict=False):
        assert (address + item.bytes) % guard.PAGE == 0
    assert bytes_at(memory.addresses[0], 20) == (ROW + 1).tobytes()
    assert bytes_at(memory.addresses[1], 100) == bytes([guard.PATTERN]) * 100
    assert bytes_at(memory.addresses[2], 20) == ROW.tobytes()
