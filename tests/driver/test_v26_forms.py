"""Names of `max.driver` that 26.7 has: queues, events, usages, and copies of several tensors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from max import driver
from max.driver import CPU, Buffer, DeviceEvent, DeviceSpec, Usage
from max.driver import buffer as later_buffer
from max.driver import driver as later_driver
from max.dtype import DType


def test_queues_and_events_of_a_cpu_are_ready() -> None:
    cpu = CPU(1)
    assert driver.DeviceQueue is driver.DeviceStream and cpu.default_queue is cpu.default_stream
    event = cpu.default_queue.record_event()
    assert isinstance(event, DeviceEvent) and event.is_ready() and DeviceEvent(cpu, True).is_ready()
    event.synchronize()
    cpu.default_queue.wait_for(event)
    assert repr(event) == "cpu[1]:event" and cpu.default_queue.native_stream_handle == 0
    with pytest.raises(RuntimeError, match=r"cpu:1 keeps no times .* Model\.profile"):
        event.elapsed_time(DeviceEvent(cpu))
    with pytest.raises(TypeError, match="expected a Device, got int"):
        DeviceEvent(1)


def test_what_a_cpu_is() -> None:
    cpu = CPU()
    assert cpu.is_host_unified and cpu.model_name == "cpu"
    assert cpu.max_single_alloc_size == cpu.stats["total_memory"]


def test_usage_is_a_flag_and_staging_is_pinned() -> None:
    assert [usage.value for usage in (Usage.DEFAULT, Usage.STAGING, Usage.UNTRACKED)] == [0, 1, 2]
    plain = Buffer(DType.float32, (2,))
    assert plain.usage is Usage.DEFAULT and not plain.pinned
    both = Usage.STAGING | Usage.UNTRACKED
    for made in (
        Buffer(DType.float32, (2,), CPU(), Usage.STAGING),
        Buffer(DType.float32, (2,), pinned=True),
        Buffer.zeros((2,), DType.float32, usage=both),
    ):
        assert made.pinned and Usage.STAGING in made.usage and made[:1].usage == made.usage
    assert Buffer(DType.float32, (2,), usage=Usage.UNTRACKED).usage is Usage.UNTRACKED
    assert not Buffer(DType.float32, (2,), usage=Usage.UNTRACKED).pinned
    assert Buffer.from_numpy(np.ones(2)).usage is Buffer(DType.int8, (1,)).copy().usage
    with pytest.raises(TypeError, match=r"usage is 3, expected a max\.driver\.Usage"):
        Buffer(DType.float32, (2,), usage=3)
    with pytest.raises(TypeError, match="pinned or usage, got both"):
        Buffer(DType.float32, (2,), pinned=True, usage=Usage.STAGING)


def test_several_tensors_are_copied_in_one_call() -> None:
    sources = [np.arange(7, dtype=np.float32), np.array([[1, -2], [3, 4]], np.int64)]
    results = [np.zeros(7, np.float32), np.zeros((2, 2), np.int64)]
    driver.batch_inplace_copy(
        [Buffer.from_numpy(array) for array in results],
        [Buffer.from_numpy(array) for array in sources],
    )
    for result, source in zip(results, sources, strict=True):
        np.testing.assert_array_equal(result, source)
    # bytes are copied: of another dtype and shape too
    half = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    bits = np.zeros((2, 1), np.uint16)
    driver.batch_inplace_copy([Buffer.from_numpy(bits)], [Buffer.from_numpy(half)])
    np.testing.assert_array_equal(bits[:, 0], half.view(np.uint16))
    driver.batch_inplace_copy([], [])


def test_one_tensor_is_copied_to_several() -> None:
    results = [np.zeros(3, np.float32) for _ in range(2)]
    source = Buffer.from_numpy(np.array([1, 2, 3], np.float32))
    driver.copy_pinned_to_destinations(source, [Buffer.from_numpy(array) for array in results])
    assert [array.tolist() for array in results] == [[1, 2, 3]] * 2
    later_buffer.inplace_copy_from(Buffer.from_numpy(results[0]), Buffer.from_numpy(results[1] * 2))
    assert results[0].tolist() == [2, 4, 6]


def test_nothing_is_written_if_a_pair_does_not_fit() -> None:
    fits, source = np.zeros(2, np.float32), Buffer.from_numpy(np.ones(2, np.float32))
    pairs = [Buffer.from_numpy(fits), Buffer(DType.float32, (3,))]
    with pytest.raises(ValueError, match="destination 1 has 12 bytes, its source 8"):
        driver.batch_inplace_copy(pairs, [source, source])
    with pytest.raises(ValueError, match="2 destinations and 1 sources"):
        driver.batch_inplace_copy(pairs, [source])
    with pytest.raises(ValueError, match="a tensor of pair 1 has strides"):
        driver.copy_pinned_to_destinations(source, [pairs[0], Buffer(DType.float32, (4,))[::2]])
    with pytest.raises(TypeError, match="pair 0 has a ndarray"):
        driver.batch_inplace_copy([fits], [source])
    assert fits.tolist() == [0, 0]


def test_one_device_is_opened() -> None:
    assert later_driver.load_device(DeviceSpec.cpu(1)) is CPU(1)
    with pytest.raises(ValueError, match="gpu:0 does not exist; there are the CPU and 0"):
        later_driver.load_device(DeviceSpec.accelerator())
    with pytest.raises(TypeError, match="expected a DeviceSpec, got int"):
        later_driver.load_device(3)
