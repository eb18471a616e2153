"""What linking a model does beside binding weights: thresholds, profiles, memory that is not kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from max._compiler.program.code import ProgramCode
from max._config import flags
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load import linker as linker_module
from max.engine.load import packed_weights
from max.engine.load.fixed_memory import FixedMemory
from max.engine.load.linker import ModelLinker
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


class Captured(Exception):
    """Ends a link where its arguments are known."""


def captured_link(
    monkeypatch: pytest.MonkeyPatch, graph: Graph, **more: Any
) -> tuple[ModelLinker, Any]:
    """The linker of a graph, and the compiled model that it links."""
    found: list[Any] = []

    def link(self: ModelLinker, compiled: Any, *_: Any, **__: Any) -> Any:
        found.append((self, compiled))
        raise Captured

    with monkeypatch.context() as patches:
        patches.setattr(ModelLinker, "link", link)
        with pytest.raises(Captured):
            InferenceSession().load(graph, **more)
    return found[0]


def test_when_something_is_computed_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts, copies, or a launch in any of the programs that run once."""
    linker, compiled = captured_link(monkeypatch, elements())
    casts, copies, computed = dict[int, Any](), dict[int, Any](), list[Any]()
    made = FixedMemory.__init__

    def init(self: FixedMemory, *arguments: Any) -> None:
        made(self, *arguments)
        self.casts, self.copies = dict(casts), dict(copies)

    monkeypatch.setattr(FixedMemory, "__init__", init)
    monkeypatch.setattr(linker, "_compute_once", lambda *parts: computed.append(parts))
    launching = replace(compiled.main)
    assert launching.launches and not any(part.launches for part in compiled.once)
    empty = ProgramCode(0)
    for some_casts, some_copies, once, expected in (
        ({}, {}, compiled.once, False),
        ({}, {}, [], False),
        ({}, {}, [empty, empty], False),
        ({0: None}, {}, compiled.once, True),
        ({}, {0: None}, compiled.once, True),
        ({}, {}, [launching, empty], True),
        ({}, {}, [empty, launching], True),
    ):
        casts, copies = some_casts, some_copies
        computed.clear()
        linker.link(replace(compiled, once=once), None)
        assert len(computed) == expected


def test_a_packed_copy_is_mapped_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    linker, compiled = captured_link(monkeypatch, product(), weights_registry=WEIGHTS)
    maps, sizes = list[Any](), list[int]()
    copies: list[Any] = [None, SimpleNamespace(map_file=lambda: "memory")]

    def memory(*arguments: Any) -> Any:
        maps.append(arguments[4])
        raise Captured

    def of(key: Any, model: Any, num_bytes: int, weights: Any, constants: Any) -> Any:
        assert model is compiled and set(weights) == {"w"}
        sizes.append(num_bytes)
        return copies[len(sizes) - 1]

    monkeypatch.setattr(linker_module, "FixedMemory", memory)
    monkeypatch.setattr(packed_weights.PackedCopy, "of", of)
    with pytest.raises(Captured):
        linker.link(compiled, WEIGHTS)
    assert [maps[0](100), maps[0](200)] == [None, "memory"] and sizes == [100, 200]


def test_only_programs_with_launches_run_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    linker, compiled = captured_link(monkeypatch, elements())
    runs, memory = list[Any](), SimpleNamespace(casts={}, copies={}, is_computed=False, addresses=[])  # fmt: skip
    monkeypatch.setattr(linker_module, "run_once", lambda *parts: runs.append(parts[0]))
    empty = ProgramCode(0)
    for once, count in (([compiled.main, empty], 1), ([empty, compiled.main], 1), ([empty], 0)):
        runs.clear()
        linker._compute_once(replace(compiled, once=once), lambda part: part, memory)  # type: ignore[arg-type]
        assert len(runs) == count
