"""Meshes of one device and their placements: tensors, creation, operations, modules; several devices are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.experimental import Tensor, random
from max.experimental import functional as F
from max.experimental.nn import Linear, Module
from max.experimental.sharding import (
    BufferLayout,
    DeviceMapping,
    DeviceMesh,
    NamedMapping,
    Partial,
    Placement,
    Replicated,
    Sharded,
    ShardingError,
    TensorLayout,
    Unknown,
    auto_reshard,
)
from max.experimental.tensor import default_device, defaults
from max.graph import BufferType, DeviceRef, TensorType

ONE = DeviceMesh((CPU(1),), (1,), ("tp",))
GRID = DeviceMesh([CPU(i) for i in range(6)], [2, 3], ["dp", "tp"])  # pyright: ignore[reportArgumentType]
SPLIT, WHOLE = DeviceMapping(ONE, (Sharded(0),)), DeviceMapping.replicated(ONE)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray[Any, Any]:
    return rng.standard_normal(shape).astype(np.float32)


def test_meshes() -> None:
    assert repr(GRID) == "DeviceMesh(dp=2, tp=3)" and (GRID.ndim, GRID.num_devices) == (2, 6)
    assert [GRID.axis_size(axis) for axis in ("dp", 1, ("dp", "tp"))] == [2, 3, 6]
    places = np.arange(6).reshape(2, 3)
    for device in range(6):
        row, column = (int(i) for i in np.argwhere(places == device)[0])
        assert GRID.device_coord(device, "dp") == row and GRID.device_coord(device, 1) == column
        assert GRID.device_coord(device, ("tp", "dp")) == column * 2 + row
    single = DeviceMesh.single(CPU())
    assert single == DeviceMesh((CPU(),), (1,), ("_",)) and hash(single) == hash(
        DeviceMesh.single(CPU())
    )
    for args, error in (
        (((), (), ()), ValueError),
        (((CPU(),), (2,), ("a",)), ValueError),
        (((CPU(), CPU()), (2, 1), ("a", "a")), ValueError),
        (((CPU(),), (1,), ("a", "b")), ValueError),
        ((("cpu",), (1,), ("a",)), TypeError),
    ):
        with pytest.raises(error, match="DeviceMesh"):
            DeviceMesh(*args)
    for call, error in (
        (lambda: GRID.axis_size("x"), ValueError),
        (lambda: GRID.axis_size(2), IndexError),
        (lambda: GRID.device_coord(6, 0), IndexError),
    ):
        with pytest.raises(error, match="DeviceMesh"):
            call()


def test_mappings() -> None:
    assert [repr(p) for p in (Replicated(), Sharded(1), Partial(), Unknown())] == [
        "Replicated()", "Sharded(axis=1)", "Partial()", "Unknown()",
    ]  # fmt: skip
    assert Sharded(1) == Sharded(1) != Sharded(0) and len({Partial(), Partial(), Unknown()}) == 2
    assert Sharded(1).localized_axis() == 1 and Partial().localized_axis() is None
    assert WHOLE.is_fully_replicated and not SPLIT.is_fully_replicated
    named = NamedMapping(GRID, ("tp", None), unreduced=["dp"])
    assert named.placements == (Partial(), Sharded(0)) and isinstance(named, DeviceMapping)
    assert NamedMapping(GRID, (("tp", "dp"), "elsewhere")).placements == (Sharded(0), Sharded(0))
    SPLIT.check_shape((3,))
    for call, error in (
        (lambda: DeviceMapping(GRID, (Replicated(),)), ValueError),
        (lambda: DeviceMapping(CPU(), (Replicated(),)), TypeError),
        (lambda: DeviceMapping(ONE, (0,)), TypeError),
        (lambda: DeviceMapping(ONE, (Sharded(1),)).check_shape((3,)), ValueError),
        (lambda: NamedMapping(None, ("tp",)), ValueError),
        (lambda: NamedMapping(GRID, ("tp", "tp")), ValueError),
        (lambda: NamedMapping(GRID, ("tp",), unreduced=["tp"]), ValueError),
        (lambda: Placement(), TypeError),
    ):
        with pytest.raises(error):
            call()
    with default_device(ONE):
        assert NamedMapping(None, ("tp",)).placements == (Sharded(0),)


def test_tensors_on_a_mesh_of_one_device(rng: np.random.Generator) -> None:
    data = floats(rng, 2, 3)
    there = DeviceMesh.single(CPU(1))
    made = [
        Tensor(data, device=ONE), Tensor.zeros((2, 3), device=SPLIT), Tensor.ones((2, 3), device=WHOLE),
        Tensor.full((2, 3), 2.0, device=ONE), Tensor.arange(3, device=SPLIT), random.uniform((2, 3), device=ONE),
        Tensor(data).to(ONE), Tensor(data).to(SPLIT), F.transfer_to(Tensor(data), WHOLE),
        F.distributed_broadcast(Tensor(data), ONE),
    ]  # fmt: skip
    with default_device(ONE):
        made += [Tensor.ones((2,)), Linear(3, 2).weight]
        assert defaults() == (DType.float32, CPU(1))
    made.append(Linear(3, 2).to(WHOLE).weight)
    for tensor in made:
        assert (
            tensor.device == CPU(1)
            and tensor.mesh == there
            and tensor.placements == (Replicated(),)
        )
        assert not tensor.is_distributed and tensor.mapping == DeviceMapping.replicated(there)
        assert tensor.rebind_mapping(tensor.mapping) is tensor
    np.testing.assert_array_equal(made[7].to_numpy(), data)
    both = F.relu(made[0] + made[6])
    assert both.mesh == there
    np.testing.assert_array_equal(both.to_numpy(), np.maximum(2 * data, 0))
    for collective in (F.allgather, F.allreduce_sum):
        assert collective(both) is both
    assert Tensor.from_shard_values([both]) is both is Tensor.from_shard_values([both], SPLIT)
    with auto_reshard({(Sharded, Replicated)}, mode="raise"):
        np.testing.assert_array_equal((both + 1).to_numpy(), both.to_numpy() + 1)
    ran = F.call_on_mesh(lambda x: (x + 1, Tensor.ones((2,))), ONE, out_specs=SPLIT)
    total, ones = ran(both)
    np.testing.assert_array_equal(total.to_numpy(), both.to_numpy() + 1)
    assert ones.device == CPU(1)


def test_several_devices_are_refused(rng: np.random.Generator) -> None:
    x = Tensor(floats(rng, 2, 3))
    several = DeviceMapping.replicated(GRID)
    for call in (
        lambda: Tensor([1.0], device=GRID),
        lambda: Tensor.zeros((2,), device=several),
        lambda: x.to(several),
        lambda: F.transfer_to(x, GRID),
        lambda: F.distributed_broadcast(x, GRID),
        lambda: F.call_on_mesh(F.relu, GRID),
        lambda: Linear(3, 2).to(GRID),
        lambda: default_device(GRID),
        lambda: Tensor.from_shard_values([x], several),
        lambda: TensorLayout(DType.float32, (2,), GRID).device,
        lambda: Linear(3, 2).compile(TensorLayout(DType.float32, (2, 3), GRID)),
    ):
        with pytest.raises(ShardingError, match="has 6 devices, and a tensor is on one"):
            call()
    with pytest.raises(ShardingError, match="is whole"):
        x.to(DeviceMapping(ONE, (Partial(),)))
    for call, error in (
        (lambda: Tensor.from_shard_values([x, x]), ValueError),
        (lambda: x.rebind_mapping(SPLIT), ValueError),
        (lambda: F.distributed_broadcast(x, CPU()), TypeError),
        (lambda: F.call_on_mesh(F.relu, CPU()), TypeError),
        (lambda: F.call_on_mesh(F.relu, ONE, ("tp",)), NotImplementedError),
        (lambda: F.functional(F.relu, rule=3), TypeError),
        (lambda: auto_reshard(mode="loud").__enter__(), ValueError),
        (lambda: auto_reshard({3}).__enter__(), TypeError),
        (lambda: auto_reshard({(Sharded, 3)}).__enter__(), TypeError),
    ):
        with pytest.raises(error):
            call()


def test_layouts(rng: np.random.Generator) -> None:
    layout = TensorLayout(DType.float32, ("n", 3), SPLIT)
    ref = DeviceRef.from_device(CPU(1))
    assert layout.local_types == [TensorType(DType.float32, ("n", 3), ref)]
    buffer = layout.as_buffer()
    assert isinstance(buffer, BufferLayout) and buffer != layout
    assert buffer.local_types == [BufferType(DType.float32, ("n", 3), ref)]
    assert buffer.as_tensor() == layout and hash(buffer.as_tensor()) == hash(layout)
    assert (layout.rank, layout.mesh, layout.placements) == (2, ONE, (Sharded(0),))
    for where in (CPU(1), ref, DeviceMesh.single(CPU(1))):
        assert TensorLayout(DType.float32, (2,), where).device == CPU(1)
    with pytest.raises(ValueError, match="Sharded"):
        TensorLayout(DType.float32, (2,), DeviceMapping(ONE, (Sharded(1),)))

    class Adding(Module):
        def forward(self, total: Tensor, x: Tensor) -> Tensor:
            F.buffer_store(total, total[...] + x)
            return F.functional(F.relu, rule=lambda x: [])(x.to(WHOLE))

    compiled = Adding().compile(buffer, layout)
    total, x = floats(rng, 2, 3), floats(rng, 2, 3)
    want = total + x
    on_device = Tensor(total, device=ONE)
    got = compiled(on_device, Tensor(x, device=ONE))
    np.testing.assert_array_equal(got.to_numpy(), np.maximum(x, 0))
    np.testing.assert_array_equal(on_device.to_numpy(), want)
