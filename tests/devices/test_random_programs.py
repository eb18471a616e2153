"""Random graphs of integers in float32, with branches and loops, on each kind of device: equal to the interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from max.driver import CPU
from max.engine import InferenceSession
from max.graph import DeviceRef
from tests.compiler.test_random_graphs import ExactBuilder, draw_case
from tests.devices.fake import FakeDevice, fake_devices
from tests.devices.grid import grid_devices
from tests.devices.mixed import arrays, on
from tests.sensitivity import interpret


class OnDevice(ExactBuilder):
    """All values are on the device, also what branches and trip counts depend on."""

    DEVICE = DeviceRef.GPU(0)


@given(st.data(), st.booleans())
@settings(max_examples=10)
def test_random_programs(data: st.DataObject, grid: bool) -> None:
    found: Sequence[FakeDevice]
    with grid_devices(1) if grid else fake_devices(1) as found:
        graph, given_arrays, drawn = draw_case(data, data.draw(st.integers(2, 9)), OnDevice)
        expected = interpret(graph, given_arrays)
        model = InferenceSession(devices=[CPU(), *found]).load(graph)
        inputs = [on(found[0], x) for x in given_arrays]
        for _ in range(2):
            for ours, (value, _) in zip(arrays(model.execute(*inputs)), expected, strict=True):
                np.testing.assert_array_equal(ours, value, f"{drawn}\n{graph}")
