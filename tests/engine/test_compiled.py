"""Models that are compiled before their weights are known, modules of several graphs, and their files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, read
from max.graph import DeviceRef, Graph, Module, TensorType, Weight, ops

VECTOR = [TensorType(DType.float32, ("n",), DeviceRef.CPU())]
X = np.array([1.0, -2.0, 3.0], np.float32)


def scaled(name: str = "scaled", module: Module | None = None) -> Graph:
    weight = Weight("w", DType.float32, (3,), DeviceRef.CPU())
    return Graph(name, lambda x: ops.rebind(x.tensor, (3,)) * weight, VECTOR, module=module)


def doubled(name: str = "doubled", module: Module | None = None) -> Graph:
    return Graph(name, lambda x: x.tensor * 2, VECTOR, module=module)


def test_a_compiled_model_takes_other_weights_each_time() -> None:
    session = InferenceSession()
    compiled = session.compile(scaled(), tile_based_fusion=True)
    assert isinstance(compiled, CompiledModel) and repr(compiled) == "CompiledModel(scaled)"
    for weights in (X, X * 5):
        for of in (session, InferenceSession(num_threads=1)):
            model = of.init(compiled, weights_registry={"w": weights})
            np.testing.assert_array_equal(model(X)[0].to_numpy(), X * weights)
    with pytest.raises(ValueError, match="w"):
        session.init(compiled)
    with pytest.raises(TypeError, match=r"expected a CompiledModel, which compile\(\) returns"):
        session.init(scaled())
    with pytest.raises(TypeError, match="init_all: expected a CompiledModel"):
        session.init_all([compiled])
    with pytest.raises(TypeError, match="compile: expected a Graph"):
        session.compile(3)


def test_the_graphs_of_a_module_are_loaded_together() -> None:
    module, session = Module(), InferenceSession()
    first, second = doubled(module=module), scaled(module=module)
    assert module.top_level_graph_names() == ["doubled", "scaled"] and module.graphs[1] is second
    assert first.module is second.module is module and repr(module) == "Module(doubled, scaled)"
    for models in (
        session.load_all(module, weights_registry={"w": X}),
        session.load_all(first, weights_registry={"w": X}),
        session.init_all(session.compile_async(module), weights_registry={"w": X}),
    ):
        assert list(models) == ["doubled", "scaled"]
        np.testing.assert_array_equal(models["doubled"](X)[0].to_numpy(), X * 2)
        np.testing.assert_array_equal(models["scaled"](X)[0].to_numpy(), X * X)
    np.testing.assert_array_equal(session.load(first)(X)[0].to_numpy(), X * 2)
    for load in (session.load, lambda m: session.init(session.compile(m))):
        with pytest.raises(ValueError, match=r"2 graphs \(doubled, scaled\), expected one"):
            load(module)
    with pytest.raises(ValueError, match=r"0 graphs \(none\)"):
        session.load(Module())
    assert session.load_all(Module()) == {}
    doubled(module=module)
    with pytest.raises(ValueError, match="two graphs of the module have the name 'doubled'"):
        session.load_all(module)


def test_a_graph_has_a_module_of_its_own() -> None:
    graph = doubled()
    assert graph.module.graphs == (graph,) and graph.module is graph.module
    assert list(InferenceSession().load_all(graph)) == ["doubled"]


def test_a_compiled_model_is_written_and_read(tmp_path: Path) -> None:
    session, path = InferenceSession(), tmp_path / "model.mef"
    session.compile(scaled()).export_mef(path)
    for model in (
        session.load(path, weights_registry={"w": X}),
        session.init(session.compile(str(path)), weights_registry={"w": X}),
        session.init(read(path), weights_registry={"w": X}),
    ):
        np.testing.assert_array_equal(model(X)[0].to_numpy(), X * X)
    path.write_bytes(b"\x00\xff of another engine")
    with pytest.raises(RuntimeError, match=r"read: .*a compiled model of MAX"):
        read(path)
    with pytest.raises(RuntimeError, match="does not exist"):
        read(tmp_path / "nothing")
    with pytest.raises(TypeError, match="path of a saved graph, got int"):
        read(3)
    module = Module()
    doubled(module=module), scaled(module=module)
    with pytest.raises(ValueError, match="export_mef: the model has 2 graphs"):
        session.compile(module).export_mef(path)


def test_a_device_that_the_session_lacks_is_an_error() -> None:
    graph = Graph("far", lambda x: x, [TensorType(DType.float32, (3,), DeviceRef.CPU(1))])
    with pytest.raises(ValueError, match="input 0 of far is on cpu:1"):
        InferenceSession().compile(graph)
    compiled = InferenceSession(devices=[CPU(), CPU(1)]).compile(graph)
    with pytest.raises(ValueError, match="input 0 of far is on cpu:1"):
        InferenceSession().init(compiled)


def test_a_copy_of_a_graph_is_its_own() -> None:
    graph = scaled()
    copy = graph.copy()
    assert str(copy) == str(graph) and copy.name == "scaled" and copy.mlir_op is not graph.mlir_op
    assert copy.module is not graph.module
    model = InferenceSession().load(copy, weights_registry={"w": X})
    np.testing.assert_array_equal(model(X)[0].to_numpy(), X * X)
    unfinished = Graph("unfinished", input_types=VECTOR)
    with pytest.raises(ValueError, match="unfinished: it cannot be copied; the outputs are not"):
        unfinished.copy()
    inner = unfinished.add_subgraph("inner", lambda x: x, VECTOR)
    with pytest.raises(ValueError, match="inner: it cannot be copied; copy the graph around it"):
        inner.copy()


def test_a_choice_of_kernels_is_a_text() -> None:
    session = InferenceSession()
    session.use_fi_topk_kernel("true")
    with pytest.raises(TypeError, match="expected text such as 'true', got True"):
        session.use_fi_topk_kernel(True)
