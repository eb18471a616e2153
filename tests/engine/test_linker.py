"""What linking a model does beside binding weights: thresholds, profiles, memory that is not kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max._config import flags
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load.fixed_memory import FixedMemory
from max.engine.run import profile
from max.engine.tune import row_thresholds
from max.graph import DeviceRef, Graph, TensorType, Weight, ops

CPU = DeviceRef.CPU()


def product() -> Graph:
    """A product with a weight, which is packed at load, and has a row threshold."""
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 32], CPU)]) as graph:
        x = graph.inputs[0].tensor
        # the sums are a launch without a threshold
        graph.output(x @ Weight("w", DType.float32, [32, 64], CPU), ops.cumsum(x, 1))
    return graph


def elements() -> Graph:
    with Graph("g", input_types=[TensorType(DType.float32, ["n"], CPU)]) as graph:
        graph.output(ops.tanh(graph.inputs[0].tensor))
    return graph


WEIGHTS = {"w": np.ones((32, 64), np.float32)}


def test_thresholds_are_asked_for_where_a_launch_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    find = row_thresholds.find_thresholds

    def recorded(compiled: Any, backend: Any) -> Any:
        asked.append(compiled.name)
        return find(compiled, backend)

    monkeypatch.setattr(row_thresholds, "find_thresholds", recorded)
    InferenceSession().load(elements())
    assert asked == []
    model = InferenceSession().load(product(), weights_registry=WEIGHTS)
    assert asked == ["g"]
    x = np.ones((3, 32), np.float32)
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), np.full((3, 64), 32.0))


@pytest.mark.parametrize("wanted", [False, True])
def test_profiles_are_kept_where_they_are_asked_for(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = list[Any]()
    monkeypatch.setattr(profile, "keep_for_exit", kept.append)
    with flags.override(MAX_PROFILE=wanted):
        InferenceSession().load(elements())
    assert [len(programs) for programs in kept] == [1] * wanted


def test_a_weight_that_only_its_packing_reads_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    memories = list[FixedMemory]()
    make = FixedMemory.__init__

    def recorded(self: FixedMemory, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        memories.append(self)

    monkeypatch.setattr(FixedMemory, "__init__", recorded)
    with flags.override(MAX_GUARD=False):
        InferenceSession().load(product(), weights_registry=WEIGHTS)
    (memory,) = memories
    # the packed copy is the only owner that is left
    assert memory.owners == [memory.kept_results] and memory.kept_results.nbytes >= 32 * 64 * 4
