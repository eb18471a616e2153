"""Graphs that run on the CPU and on fake devices, compared with the CPU alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from max.driver import CPU, Device, Tensor
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType
from tests.devices.fake import FakeDevice, fake_devices
from tests.devices.grid import grid_devices

HOST, ONE, TWO = DeviceRef.CPU(), DeviceRef.GPU(0), DeviceRef.GPU(1)
Array = npt.NDArray[Any]
Forward = Callable[..., Any]


WATCHED: dict[str, Callable[[int], AbstractContextManager[Sequence[FakeDevice]]]] = {
    "fake": fake_devices,
    "grid": grid_devices,
}
"""Kinds of devices that record launches and copies: one group of workers; a grid of blocks."""
KINDS: dict[str, Callable[[int], AbstractContextManager[Sequence[Device]]]] = {**WATCHED}
"""All kinds of devices; an entry registers a number of devices for a while."""


@pytest.fixture(params=KINDS)
def devices(request: pytest.FixtureRequest) -> Iterator[Sequence[Device]]:
    """Two devices of each kind."""
    with KINDS[request.param](2) as found:
        yield found


@pytest.fixture(params=WATCHED)
def watched_devices(request: pytest.FixtureRequest) -> Iterator[Sequence[FakeDevice]]:
    """Two devices of each kind that records what it does."""
    with WATCHED[request.param](2) as found:
        yield found


def on(device: Device, x: Array) -> Tensor:
    """Returns a tensor with the elements of an array."""
    return Tensor.from_numpy(np.array(x, order="C")).to(device)


def arrays(outputs: Sequence[Tensor]) -> list[Array]:
    """Returns the elements of outputs on any device."""
    return [np.array(y.to(CPU()).to_numpy()) for y in outputs]


def on_cpu(ref: DeviceRef) -> DeviceRef:
    """Returns the device that replaces the given one in the graph that runs on the CPU alone."""
    return HOST


def build(
    forward: Forward,
    inputs: Sequence[tuple[Array, DeviceRef]],
    place: Callable[[DeviceRef], DeviceRef],
    dims: Sequence[Sequence[Any]] | None,
) -> Graph:
    types = [
        TensorType(DType.from_numpy(x.dtype), x.shape if dims is None else dims[i], place(where))
        for i, (x, where) in enumerate(inputs)
    ]
    with Graph("mixed", input_types=types) as graph:
        results = forward(place, *[value.tensor for value in graph.inputs])
        graph.output(*results)
    return graph


def compare(
    devices: Sequence[Device],
    forward: Forward,
    inputs: Sequence[tuple[Array, DeviceRef]],
    dims: Sequence[Sequence[Any]] | None = None,
    weights: dict[str, Array] | None = None,
    tolerance: float = 2e-6,
) -> Model:
    """Runs a function of tensors on all devices, and on the CPU only; the results must be equal. Returns the mixed
    model.

    Args:
        devices: The devices.
        forward: Takes a function from a device to where it is in this graph, then the inputs.
        inputs: Each with its device.
        dims: The shapes of the inputs in the graph.
        weights: The weights.
        tolerance: Relative to the greatest element: kernels of the two sum in other orders.
    """
    alone = InferenceSession(devices=[CPU()])
    mixed = InferenceSession(devices=[CPU(), *devices])
    reference = alone.load(build(forward, inputs, on_cpu, dims), weights_registry=weights)
    model = mixed.load(build(forward, inputs, lambda ref: ref, dims), weights_registry=weights)
    for _ in range(2):  # memory is reused
        want = arrays(reference.execute(*[x for x, _ in inputs]))
        outputs = model.execute(*[on(where.to_device(), x) for x, where in inputs])
        assert [y.device for y in outputs] == model.output_devices
        for ours, theirs in zip(arrays(outputs), want, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            if ours.dtype.kind in "iub":
                np.testing.assert_array_equal(ours, theirs)
            else:
                scale = max(float(np.abs(theirs.astype(np.float64)).max(initial=0)), 1e-3)
                np.testing.assert_allclose(
                    ours.astype(np.float64), theirs.astype(np.float64), 0, tolerance * scale
                )
    return model


def floats(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)
