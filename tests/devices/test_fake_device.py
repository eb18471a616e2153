"""A second kind of device beside the CPU, with its own memory, queue and kernels: results equal the CPU's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.driver import CPU, Accelerator, Device, Tensor, accelerator_count
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorType, Weight, ops
from tests.devices.fake import FakeDevice
from tests.devices.mixed import (
    HOST,
    ONE,
    TWO,
    arrays,
    compare,
    devices,
    floats,
    on,
    watched_devices,
)

F32, I64 = DType.float32, DType.int64
ROOT = Path(__file__).parents[2]
__all__ = ["devices", "watched_devices"]


# memory ------------------------------------------------------------------------------------------


def test_tensors_of_a_device(devices: list[Device], rng: np.random.Generator) -> None:
    assert accelerator_count() == 2 and Accelerator() is devices[0] and Accelerator(1) is devices[1]
    with pytest.raises(ValueError, match=r"no accelerator with id 2.*is 2"):
        Accelerator(2)
    x = floats(rng, 3, 5)
    there = on(devices[1], x)
    assert not there.is_host
    for refused in (there.to_numpy, lambda: np.asarray(there), there.__dlpack_device__):
        with pytest.raises((ValueError, BufferError), match=r"gpu:1.*to\(CPU\(\)\)"):
            refused()
    np.testing.assert_array_equal(there.to(CPU()).to_numpy(), x)
    # strides, views, writes of parts
    np.testing.assert_array_equal(there[1:, ::-2].to(CPU()).to_numpy(), x[1:, ::-2])
    there[:, 1] = 4.0
    there[0, ::2] = on(devices[0], np.arange(3, dtype=np.float32))
    x[:, 1], x[0, ::2] = 4.0, np.arange(3)
    np.testing.assert_array_equal(there.copy(device=devices[0]).to(CPU()).to_numpy(), x)
    assert there[2, 1].item() == 4.0
    np.testing.assert_array_equal(Tensor.zeros([2, 0], F32, devices[0]).to(CPU()), x[:2, :0])
    assert not Tensor.zeros([7], I64, devices[0]).to(CPU()).to_numpy().any()
    target = Tensor(F32, [5, 3], devices[0])
    target.inplace_copy_from(on(devices[1], x.T))
    np.testing.assert_array_equal(target.to(CPU()).to_numpy(), x.T)


def test_memory_is_freed(watched_devices: list[FakeDevice]) -> None:
    devices = watched_devices
    before = devices[0].stats["used_memory"]
    tensor = Tensor(DType.uint8, [1000], devices[0])
    part = tensor[10:20]
    del tensor
    devices[0].synchronize()
    assert devices[0].stats["used_memory"] == before + 1000
    del part
    devices[0].synchronize()
    assert devices[0].stats["used_memory"] == before


def test_the_host_cannot_touch_it() -> None:
    """A host read of a device address ends the process."""
    code = (
        "from tests.devices.fake import fake_devices\n"
        "from max.driver import Tensor\n"
        "from max.dtype import DType\n"
        "with fake_devices(1) as (device,):\n"
        "    there = Tensor.zeros([4], DType.float32, device)\n"
        "    print(Tensor._wrap(there._ptr, DType.float32, (4,)).to_numpy().sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert done.returncode < 0 and not done.stdout


# graphs ------------------------------------------------------------------------------------------


def test_transfers(devices: list[Device], rng: np.random.Generator) -> None:
    def forward(at: Any, x: Any, w: Any) -> Any:
        y = ops.relu(x.to(at(ONE)) @ w + 1.0)
        z = ops.softmax(y.to(at(TWO)) * 2)
        back = z.to(at(HOST))
        return (
            y,
            z,
            back - ops.sum(x.to(at(ONE)).to(at(HOST))),
            ops.transpose(back, 0, 1).to(at(ONE)),
        )

    for n in (1, 7):
        inputs = [(floats(rng, n, 6), HOST), (floats(rng, 6, 9), ONE)]
        model = compare(devices, forward, inputs, [["n", 6], [6, 9]])
        assert model.devices == [CPU(), *devices]
        parts = [model._compiled.main, *model._compiled.later]
        assert {part.device for part in parts if part.launches} == {0, 1, 2}, "nothing ran there"


def test_operands_of_the_cpu_are_copied(devices: list[Device], rng: np.random.Generator) -> None:
    """Sizes, bounds and seeds are on the CPU, whatever the op's device."""

    def forward(at: Any, x: Any, n: Any) -> Any:
        steps = ops.range(0, n, 1, out_dim="m", dtype=I64, device=at(ONE))
        part = x[(slice(n, None), "rest"), :]
        mask = ops.nonzero(x > 0.5, "found")
        return steps * 2, part + 1, mask

    n = np.array(3, np.int64)
    compare(devices, forward, [(floats(rng, 8, 5), ONE), (n, HOST)])


def test_weights_and_constants(devices: list[Device], rng: np.random.Generator) -> None:
    weights = {"own": floats(rng, 40, 48), "host": floats(rng, 48), "bf16": floats(rng, 48, 40)}

    def forward(at: Any, x: Any) -> Any:
        own = Weight("own", F32, [40, 48], at(ONE))
        host = Weight("host", F32, [48], HOST)
        two = Weight("bf16", F32, [48, 40], HOST)
        y = x @ own + host.to(at(ONE)) + ops.constant(np.arange(48, dtype=np.float32), F32, at(ONE))
        # packed for the CPU, as it is for the device
        on_host = y.to(at(HOST)) @ two
        return (
            on_host,
            y @ two.to(at(ONE)),
            ops.rms_norm(on_host.to(at(TWO)), two.to(at(TWO))[0], 1e-5),
        )

    model = compare(devices, forward, [(floats(rng, 5, 40), ONE)], weights=weights, tolerance=1e-5)
    names = [launch.name for part in model._compiled.once for launch in part.launches]
    assert names.count("pack") == 1


def test_a_weight_that_is_on_the_device_is_not_copied(
    watched_devices: list[FakeDevice], rng: np.random.Generator
) -> None:
    devices, weights = watched_devices, {"own": floats(rng, 40, 48)}
    session = InferenceSession(devices=[CPU(), *devices])
    with Graph("there", input_types=[TensorType(F32, [40, 48], ONE)]) as graph:
        own = Weight("own", F32, [40, 48], ONE)
        graph.output(graph.inputs[0].tensor * graph.add_weight(own, False))
    value = on(devices[0], weights["own"])
    written = devices[0].memory.written_bytes  # type: ignore[attr-defined]
    loaded = session.load(graph, weights_registry={"own": value})
    assert devices[0].memory.written_bytes == written  # type: ignore[attr-defined]
    (squares,) = arrays(loaded.execute(value))
    np.testing.assert_array_equal(squares, weights["own"] ** 2)
    loaded.reload({"own": weights["own"] + 1})
    (product,) = arrays(loaded.execute(value))
    np.testing.assert_array_equal(product, weights["own"] * (weights["own"] + 1))
