"""Devices, streams and device specifications on a machine without an accelerator."""

from __future__ import annotations

import copy
import os
import pickle

import pytest

from max.driver import (
    CPU,
    Accelerator,
    Device,
    DeviceSpec,
    DeviceStream,
    accelerator_api,
    accelerator_architecture_name,
    accelerator_count,
    devices_exist,
    load_devices,
    scan_available_devices,
)


def test_cpu_is_one_object_per_id() -> None:
    assert CPU() is CPU(0) is CPU(id=-1) is Device.cpu()
    assert CPU(1) is Device.cpu(1) is not CPU(0)
    assert CPU(1) != CPU(0) and len({CPU(0), CPU(1), CPU()}) == 2
    assert pickle.loads(pickle.dumps(CPU(1))) is copy.deepcopy(CPU(1)) is copy.copy(CPU(1))
    with pytest.raises(ValueError, match="id -2"):
        CPU(-2)
    with pytest.raises(TypeError, match="use CPU"):
        Device()


def test_properties() -> None:
    cpu = CPU(1)
    assert (cpu.id, cpu.label, cpu.api) == (1, "cpu", "cpu")
    assert cpu.is_host and cpu.is_compatible and cpu.can_access(CPU(0))
    assert str(cpu) == repr(cpu) == "Device(type=cpu,id=1)"
    cpu.synchronize()
    with pytest.raises(ValueError, match="cpu:1 has no architecture name"):
        _ = cpu.architecture_name


def test_stats() -> None:
    stats = CPU().stats
    assert 1 <= stats["num_cores"] <= (os.cpu_count() or 1)
    if "total_memory" in stats and "free_memory" in stats:
        assert 0 < stats["free_memory"] <= stats["total_memory"]


def test_streams() -> None:
    cpu = CPU()
    assert cpu.default_stream is cpu.default_stream and cpu.default_stream.device is cpu
    stream = DeviceStream(cpu)
    assert stream.device is cpu and stream is not cpu.default_stream
    stream.synchronize()
    stream.wait_for(cpu.default_stream)
    stream.wait_for(stream=cpu.default_stream)
    stream.wait_for(CPU(1))
    stream.wait_for(device=CPU(1))
    with pytest.raises(TypeError, match="one stream or one device"):
        stream.wait_for()
    with pytest.raises(TypeError, match="got int"):
        stream.wait_for(3)
    with pytest.raises(TypeError, match="got str"):
        DeviceStream("cpu")


def test_no_accelerator() -> None:
    assert accelerator_count() == 0 and accelerator_api() == "cpu"
    for make in (Accelerator, lambda: Accelerator(2), accelerator_architecture_name):
        with pytest.raises(ValueError, match=r"use CPU\(\)"):
            make()
    with pytest.raises(ValueError, match="id -2"):
        Accelerator(-2)


def test_specs() -> None:
    assert DeviceSpec.cpu() == DeviceSpec(-1) == DeviceSpec(id=-1, device_type="cpu")
    assert DeviceSpec.accelerator() == DeviceSpec(0, "gpu")
    assert len({DeviceSpec.cpu(0), DeviceSpec.cpu(0), DeviceSpec.cpu(1)}) == 2
    with pytest.raises(ValueError, match="'tpu' is not cpu or gpu"):
        DeviceSpec(0, "tpu")
    with pytest.raises(ValueError, match="id -3"):
        DeviceSpec(-3)


def test_loading() -> None:
    assert scan_available_devices() == [DeviceSpec.cpu()]
    assert load_devices([DeviceSpec.cpu(1), DeviceSpec.cpu()]) == [CPU(1), CPU(0)]
    assert devices_exist([]) and devices_exist([DeviceSpec.cpu()])
    assert not devices_exist([DeviceSpec.cpu(), DeviceSpec.accelerator()])
    with pytest.raises(ValueError, match="gpu:0 does not exist"):
        load_devices([DeviceSpec.cpu(), DeviceSpec.accelerator()])
