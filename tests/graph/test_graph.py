"""Graphs: building, outputs, subgraphs, side effects, weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max import _interpreter, mlir
from max import kernel as k
from max.dtype import DType
from max.experimental import functional
from max.graph import (
    BufferType,
    BufferValue,
    DeviceRef,
    Dim,
    Graph,
    KernelLibrary,
    TensorType,
    TensorValue,
    Value,
    Weight,
    ops,
)
from max.graph.quantization import QuantizationEncoding
from tests.tolerance import assert_close

CPU = DeviceRef.CPU()


def f32(*shape: Any) -> TensorType:
    return TensorType(DType.float32, shape, CPU)


def buffer(*shape: Any) -> BufferType:
    return BufferType(DType.float32, shape, CPU)


def run(graph: Graph, *inputs: Any, **weights: Any) -> list[np.ndarray]:
    mlir.verify_module(graph.to_mlir())
    return _interpreter.run(graph, inputs, {k.replace("__", "."): v for k, v in weights.items()})


# Building


def test_both_styles_give_one_graph() -> None:
    with Graph("add", input_types=[f32("n"), f32("n")]) as staged:
        x, y = staged.inputs
        staged.output(x.tensor + y.tensor)
    called = Graph("add", lambda x, y: x + y, [f32("n"), f32("n")])
    assert str(called) == str(staged)
    assert called.output_types == [f32("n")]
    assert_close(run(called, np.ones(3, np.float32), np.ones(3, np.float32))[0], np.full(3, 2.0))


def test_forward_takes_more_arguments_and_may_give_any_number_of_outputs() -> None:
    graph = Graph("g", lambda x, k, *, b: (x * k, x + b), [f32(2)], None, 3, b=1)
    assert [a.tolist() for a in run(graph, np.ones(2, np.float32))] == [[3, 3], [2, 2]]
    assert Graph("none", lambda: None).output_types == []
    assert Graph("one", lambda x: [x], [f32(2)]).output_types == [f32(2)]


def test_forward_may_set_the_outputs_itself() -> None:
    def forward(x: Value) -> None:
        Graph.current.output(x.tensor * 2)

    assert Graph("g", forward, [f32(2)]).output_types == [f32(2)]


def test_module_of_a_layer() -> None:
    class Linear:
        def __init__(self, weight: np.ndarray, bias: np.ndarray) -> None:
            self.weight, self.bias = weight, bias

        def __call__(self, x: TensorValue) -> TensorValue:
            weight = ops.constant(self.weight, dtype=DType.float32, device=CPU)
            return ops.matmul(x, weight) + ops.constant(self.bias, DType.float32, CPU)

    graph = Graph("linear", Linear(np.ones((2, 2)), np.ones(2)), input_types=[f32(2)])
    assert run(graph, np.array([1, 2], np.float32))[0].tolist() == [4, 4]


def test_outputs_become_tensors() -> None:
    graph = Graph("g", lambda x: (x.shape, x.shape[0] * 2, 3, np.ones(2, np.int8)), [f32("n", 4)])
    shape, dim, number, array = run(graph, np.zeros((5, 4), np.float32))
    assert shape.tolist() == [5, 4] and dim == 10 and number == 3
    assert array.dtype == np.int8 and dim.shape == number.shape == ()


def test_current() -> None:
    with pytest.raises(LookupError, match="no graph is being built"):
        Graph.current  # noqa: B018
    with pytest.raises(LookupError, match="no graph is being built"):
        ops.constant(1)
    with Graph("a") as a:
        with Graph("b") as b:
            assert Graph.current is b
        assert Graph.current is a


def test_errors_of_building() -> None:
    with pytest.raises(ValueError, match="the name is empty"):
        Graph("")
    with pytest.raises(TypeError, match=r"input type 0 is \(2, 3\), expected a TensorType"):
        Graph("g", input_types=[(2, 3)])  # type: ignore[list-item]
    with pytest.raises(
        ValueError, match=r"input dimension n \* 2 depends on n, which is not itself a dimension"
    ):
        Graph("g", input_types=[f32(Dim("n") * 2)])
    Graph("g", input_types=[f32(Dim("n") * 2), f32("n")])
    with pytest.raises(TypeError, match="arguments for forward, but no forward"):
        Graph("g", None, (), None, 1)
    graph = Graph("g", lambda x: x, [f32(2)])
    with pytest.raises(ValueError, match="the outputs are set already"):
        graph.output()
    with pytest.raises(ValueError, match="neg: the graph g has its outputs already"), graph:
        ops.negate(graph.inputs[0])
    with pytest.raises(ValueError, match="the outputs are not set"):
        Graph("open", input_types=[]).output_types  # noqa: B018
    with pytest.raises(TypeError, match="output 0 is a buffer; load it"):
        Graph("g", lambda b: b, [buffer(2)])


def test_values_of_another_graph() -> None:
    a = Graph("a", input_types=[f32(2)])
    with Graph("b", input_types=[f32(2)]) as b:
        with pytest.raises(ValueError, match=r"add: operand 1 .* is not of the graph b"):
            b.inputs[0].tensor + a.inputs[0].tensor
        with pytest.raises(ValueError, match=r"output: operand 0 .* is not of the graph b"):
            b.output(a.inputs[0])


def test_an_error_leaves_no_graph_behind() -> None:
    with pytest.raises(ZeroDivisionError):
        Graph("g", lambda x: 1 // 0, [f32(2)])
    with pytest.raises(LookupError):
        Graph.current  # noqa: B018


def test_saved_graph(tmp_path: Path) -> None:
    graph = Graph("g", lambda x: x[1:] * 2, [f32("n")])
    path = tmp_path / "graph.mlir"
    path.write_text(str(graph))
    loaded = Graph("g", path=path)
    assert str(loaded) == str(graph) and loaded.output_types == graph.output_types
    assert run(loaded, np.arange(3, dtype=np.float32))[0].tolist() == [2, 4]


def test_locations_are_of_the_user() -> None:
    graph = Graph("g", lambda x: ops.softmax(x.reshape([2, 2])), [f32(4)])
    text = mlir.print_module(graph.to_mlir(), locations=True)
    assert text.count("test_graph.py") == 3


def test_locations_of_functions_with_other_keywords_are_of_the_user() -> None:
    with Graph("where", input_types=[f32(4)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(functional.where(x > 0, x, -x))
    text = mlir.print_module(graph.to_mlir(), locations=True)
    assert f'loc("{__file__}":' in text and "_names.py" not in text


# Values


def test_value_classes() -> None:
    with Graph("g", input_types=[f32("n", 4), buffer(3)]) as graph:
        x, b = graph.inputs
        assert isinstance(x, TensorValue) and isinstance(b, BufferValue)
        assert x.tensor is x and b.buffer is b
        assert x.type == f32("n", 4) and b.type == buffer(3)
        assert x.shape == ["n", 4] and x.dtype is DType.float32 and x.rank == 2 and x.device == CPU
        assert b.shape == [3] and b.dtype is DType.float32 and b.rank == 1 and b.device == CPU
        assert repr(x) == "TensorValue(f32[n, 4])" and "buffer f32[3]" in repr(b)
        with pytest.raises(TypeError, match="the value is a TensorValue, expected a BufferValue"):
            x.buffer  # noqa: B018
        with pytest.raises(TypeError, match="expected a TensorValue"):
            b.tensor  # noqa: B018
        with pytest.raises(TypeError, match="expected a _OpaqueValue"):
            b.opaque  # noqa: B018
        with pytest.raises(TypeError, match="of type buffer f32.3. is not a tensor"):
            TensorValue(b)
        with pytest.raises(TypeError, match="is not a buffer"):
            BufferValue(x)
        with pytest.raises(TypeError, match="Value is abstract"):
            Value(x)
        assert TensorValue.from_mlir(x.to_mlir()).shape == x.shape
        with pytest.raises(TypeError, match="is not a BufferValue"):
            BufferValue.from_mlir(x.to_mlir())
        with pytest.raises(TypeError, match="has no truth value"):
            bool(x)
        with pytest.raises(TypeError, match="size of axis 0 is not static"):
            list(x)
        assert len(list(x.reshape([4, "n"]))) == 4


def test_objects_that_stand_for_values() -> None:
    class Stands:
        def __init__(self, value: Value) -> None:
            self.value = value

        def __tensorvalue__(self) -> TensorValue:
            return self.value.tensor

        def __buffervalue__(self) -> BufferValue:
            return self.value.buffer

    def forward(x: Value, b: Value) -> Any:
        ops.buffer_store(Stands(b), Stands(x))
        return ops.add(Stands(x), 1), BufferValue(Stands(b))[...]

    graph = Graph("g", forward, [f32(2), buffer(2)])
    x, b = np.array([1, 2], np.float32), np.zeros(2, np.float32)
    assert [a.tolist() for a in run(graph, x, b)] == [[2, 3], [1, 2]]


# Buffers and side effects


def test_buffers_change_in_order() -> None:
    def forward(b: BufferValue) -> Any:
        before = b[...]
        b[1:] = 5
        middle = b[0:2]
        b[...] = before * 2
        b[-1] = before[0]
        return before, middle, b[...]

    array = np.array([1, 2, 3], np.float32)
    outputs = run(Graph("g", forward, [buffer(3)]), array)
    assert [a.tolist() for a in outputs] == [[1, 2, 3], [1, 5], [2, 4, 1]]
    assert array.tolist() == [2, 4, 1]


def test_buffer_of_one_run() -> None:
    def forward(x: TensorValue) -> TensorValue:
        scratch = ops.buffer_create(BufferType(DType.float32, (x.shape[0], 2), CPU))
        scratch[...] = 0
        scratch[:, 1] = x
        return scratch[...]

    graph = Graph("g", forward, [f32("n")])
    assert run(graph, np.array([3, 4], np.float32))[0].tolist() == [[0, 3], [0, 4]]


def test_buffer_errors() -> None:
    with Graph("g", input_types=[buffer("n", 3), f32(2), TensorType(DType.int32, (3,), CPU)]) as g:
        b, x, i = g.inputs[0].buffer, g.inputs[1].tensor, g.inputs[2].tensor
        with pytest.raises(ValueError, match=r"buffer_store: the source is f32\[2\], the buffer"):
            b[...] = x
        with pytest.raises(ValueError, match="buffer_store_slice: the source is"):
            b[0] = x
        with pytest.raises(TypeError, match="buffer_store_slice: the source is int32"):
            b[0] = i
        with pytest.raises(TypeError, match=r"for many indices use ops\.gather"):
            b[i] = 1
        with pytest.raises(TypeError, match="abs: operand 0|is not a tensor"):
            ops.abs(b)  # type: ignore[arg-type]


def test_chains() -> None:
    with Graph("g", input_types=[buffer(3)]) as graph:
        first = graph.device_chains[CPU]
        graph.inputs[0].buffer[...] = 1
        assert graph.device_chains[CPU].to_mlir() is not first.to_mlir()
        assert list(graph.device_chains) == [CPU] and len(graph.device_chains) == 1
        graph.device_chains[DeviceRef.GPU()] = first
        assert graph.device_chains[CPU].to_mlir() is first.to_mlir()
        assert graph.always_ready_chain is graph.always_ready_chain
        assert repr(first) == "_ChainValue(chain)"


# Subgraphs


def test_subgraph_with_weights_and_side_effects(rng: np.random.Generator) -> None:
    with Graph("main", input_types=[f32("b", 3), buffer("p")]) as graph:

        def layer(x: TensorValue, log: BufferValue) -> TensorValue:
            log[0] = log[0] * 2 + x[0, 0]
            return x @ Weight("w", DType.float32, (3, 3), CPU)

        sub = graph.add_subgraph("layer", layer, [f32("n", 3), buffer("p")])
        x, log = graph.inputs
        (y,) = ops.call(sub, x, log, prefix="layers.0.")
        (z,) = ops.call(sub, y, log, prefix="layers.1.")
        assert y.tensor.shape == ["b", 3] and sub.output_types == [f32("n", 3)]
        graph.output(z)
    x, log = rng.random((2, 3), np.float32), np.array([1, 7], np.float32)
    w = [rng.random((3, 3), np.float32) for _ in range(2)]
    (out,) = run(graph, x, log, layers__0__w=w[0], layers__1__w=w[1])
    assert_close(out, x @ w[0] @ w[1])
    assert_close(log[0], (2 + x[0, 0]) * 2 + (x @ w[0])[0, 0])
    assert str(graph).count("mo.subgraph") == 1 and str(graph).count("-> !mo.chain") >= 1


def test_subgraph_without_side_effects_takes_no_chain() -> None:
    with Graph("main", input_types=[f32("b")]) as graph:
        sub = graph.add_subgraph("double", lambda x: x * 2, [f32("n")])
        assert len(sub.inputs) == 1
        (y,) = ops.call(sub, graph.inputs[0])
        (z,) = ops.call(sub, y.tensor[1:])
        graph.output(z)
    assert "chain" not in str(graph)
    assert graph.output_types == [f32(Dim("b") - 1)]
    assert run(graph, np.arange(3, dtype=np.float32))[0].tolist() == [4, 8]


def test_subgraph_built_by_a_context_and_nested() -> None:
    with Graph("main", input_types=[f32("b"), buffer(1)]) as graph:
        with graph.add_subgraph("inner", input_types=[f32("n"), buffer(1)]) as inner:
            inner.inputs[1].buffer[0] = inner.inputs[0].tensor[0]
            inner.output()
        with inner.add_subgraph("outer", input_types=[f32("n"), buffer(1)]) as outer:
            assert ops.call(inner, *outer.inputs) == []
            outer.output(outer.inputs[0].tensor + 1)
        (y,) = ops.call(outer, *graph.inputs)
        graph.output(y)
    log = np.zeros(1, np.float32)
    assert run(graph, np.array([5, 6], np.float32), log)[0].tolist() == [6, 7]
    assert log.tolist() == [5]


def test_subgraph_results_with_sizes_of_their_own() -> None:
    def part(x: TensorValue, n: TensorValue) -> TensorValue:
        return x[(slice(None, n), Dim("kept")),]

    with Graph("main", input_types=[f32("b"), TensorType(DType.int64, (), CPU)]) as graph:
        sub = graph.add_subgraph("part", part, [f32("n"), TensorType(DType.int64, (), CPU)])
        (y,) = ops.call(sub, *graph.inputs)
        graph.output(y.tensor.reshape(["kept", 1]))
    assert run(graph, np.arange(5, dtype=np.float32), np.array(2))[0].shape == (2, 1)


def test_subgraph_errors() -> None:
    with Graph("main", input_types=[f32("b", 3), f32("b", 4)]) as graph:
        x, y = graph.inputs
        sub = graph.add_subgraph("f", lambda x, y: x, [f32("n", 3), f32("n", 3)])
        with pytest.raises(ValueError, match="there is a graph of the name 'f' already"):
            graph.add_subgraph("f", lambda: None)
        with pytest.raises(ValueError, match="there is a graph of the name 'main' already"):
            sub.add_subgraph("main", lambda: None)
        with pytest.raises(ValueError, match=r"call: @f takes 2 values .*, got 1 \(f32\[b, 3\]\)"):
            ops.call(sub, x)
        with pytest.raises(ValueError, match="call: axis 1 of input 1 of @f is 3, got 4"):
            ops.call(sub, x, y)
        with pytest.raises(
            ValueError, match="call: axis 0 of input 1 of @f is n, here b, got b - 1"
        ):
            ops.call(sub, x, x.tensor[1:])
        with pytest.raises(TypeError, match=r"call: input 1 of @f is f32\[n, 3\], got si64"):
            ops.call(sub, x, ops.cast(x.tensor, DType.int64))
        with pytest.raises(ValueError, match="main is not a subgraph of main"):
            ops.call(graph, x)
        with pytest.raises(ValueError, match="the subgraph open has no outputs yet"):
            ops.call(graph.add_subgraph("open", None, []))
        with Graph("other"), pytest.raises(ValueError, match="f is not a subgraph of other"):
            ops.call(sub, x, x)


# Weights


def test_weights(rng: np.random.Generator) -> None:
    w = Weight("layer.w", DType.float32, (2, 3), CPU)
    assert (w.name, w.dtype, w.shape, w.rank, w.device) == (
        "layer.w",
        DType.float32,
        [2, 3],
        2,
        CPU,
    )
    assert repr(w) == "Weight('layer.w', float32[2, 3], cpu:0)"
    assert isinstance(w, TensorValue)
    with Graph("g", input_types=[f32("n", 2)]) as graph:
        value = graph.add_weight(w)
        assert graph.add_weight(w) is value
        graph.output(graph.inputs[0].tensor @ w + w[0] * w[0, 1], w)
        assert list(graph.added_weights) == ["layer.w"] and graph.added_weights["layer.w"] is w
    x, array = rng.random((4, 2), np.float32), rng.random((2, 3), np.float32)
    out, same = _interpreter.run(graph, [x], {"layer.w": array})
    assert_close(out, x @ array + array[0] * array[0, 1])
    assert_close(same, array)
    assert str(graph).count("mo.constant.external") == 1


def test_one_weight_in_two_graphs() -> None:
    w = Weight("w", DType.float32, (2,), CPU)
    for name in "ab":
        graph = Graph(name, lambda x: x * w, [f32(2)])
        assert "mo.constant.external" in str(graph)


def test_weight_on_a_device() -> None:
    w = Weight("w", DType.float32, (2,), DeviceRef.GPU(), align=64)
    on_host = str(Graph("g", lambda: w))
    assert "mo.transfer" in on_host and "align = 64" in on_host
    with Graph("g") as graph:
        graph.output(graph.add_weight(w, force_initial_weight_on_host=False))
    assert "mo.transfer" not in str(graph) and "gpu:0" in str(graph)


def test_branches_share_weights_of_one_name() -> None:
    def weight(size: int = 2) -> Weight:
        return Weight("w", DType.float32, (size,), CPU)

    def forward(x: TensorValue, pick: TensorValue) -> Any:
        return ops.cond(pick, [x.type], lambda: weight() + x, lambda: weight() * x)

    graph = Graph("g", forward, [f32(2), TensorType(DType.bool, [], CPU)])
    x, w = np.array([2, 3], np.float32), np.array([5, 7], np.float32)
    for pick, expected in ((True, x + w), (False, x * w)):
        (out,) = _interpreter.run(graph, [x, np.array(pick)], {"w": w})
        np.testing.assert_array_equal(out, expected)
    for wrong in (
        lambda x, pick: ops.cond(pick, [x.type], lambda: weight() + x, lambda: weight(1) * x),
        lambda x, pick: ops.cond(pick, [x.type], lambda: weight() + weight() + x, lambda: x),
    ):
        with pytest.raises(ValueError, match="another weight of the name 'w'"):
            Graph("g", wrong, [f32(2), TensorType(DType.bool, [], CPU)])
    with Graph("g", input_types=[f32(2), TensorType(DType.bool, [], CPU)]) as graph:
        x, pick = (v.tensor for v in graph.inputs)
        graph.add_weight(weight())
        with pytest.raises(ValueError, match="another weight of the name 'w'"):
            forward(x, pick)


def test_placeholders_in_subgraphs_are_named_by_calls() -> None:
    def body(x: TensorValue) -> TensorValue:
        return x + Weight("w", DType.float32, (2,), CPU, _placeholder=True)

    with Graph("g", input_types=[f32(2)]) as graph:
        sub = graph.add_subgraph("layer", body, [f32(2)])
        (x,) = ops.call(sub, graph.inputs[0], prefix="0.")
        graph.output(*ops.call(sub, x, prefix="1."))
    weights = {"0.w": np.array([1, 2], np.float32), "1.w": np.array([10, 20], np.float32)}
    (out,) = _interpreter.run(graph, [np.zeros(2, np.float32)], weights)
    assert out.tolist() == [11, 22]


def test_weight_errors() -> None:
    w = Weight("w", DType.float32, (2,), CPU)
    with pytest.raises(LookupError, match="no graph is being built"):
        w + 1
    with Graph("g") as graph:
        graph.add_weight(w)
        with pytest.raises(ValueError, match="another weight of the name 'w' is in the graph"):
            graph.add_weight(Weight("w", DType.float32, (2,), CPU))
        with pytest.raises(ValueError, match="the outputs are not set yet"):
            _ = graph.output_types
    with pytest.raises(ValueError, match="the name is empty"):
        Weight("", DType.float32, (2,), CPU)


def test_quantized_weight_is_a_matrix_of_blocks() -> None:
    w = Weight("w", DType.float32, (8, 512), CPU, QuantizationEncoding.Q4_K)
    assert w.dtype is DType.uint8 and w.shape == [8, 2 * 144]
    assert w.original_dtype_and_shape == (DType.float32, [8, 512])
    raw = Weight(
        "w", DType.uint8, [4096, 4096], CPU, quantization_encoding=QuantizationEncoding.Q4_K
    )
    assert raw.shape == [4096, 4096] and "q4_k" in repr(raw)
    with pytest.raises(ValueError, match="q4_k encodes 256 elements at a time"):
        Weight("w", DType.float32, (8, 100), CPU, QuantizationEncoding.Q4_K)


def test_encodings() -> None:
    found = {
        e.name: (e.elements_per_block, e.block_size) for e in QuantizationEncoding if e.is_gguf
    }
    assert found == {
        "q4_0": (32, 18),
        "q4_k": (256, 144),
        "q5_k": (256, 176),
        "q6_k": (256, 210),
        "q8_0": (32, 34),
        "q2_k": (256, 84),
        "q3_k": (256, 110),
        "iq4_nl": (32, 18),
        "iq4_xs": (256, 136),
    }
    with pytest.raises(ValueError, match="gptq has no fixed block size"):
        QuantizationEncoding.GPTQ.block_size  # noqa: B018


# Custom ops


@k.register("test.scale")
def scale_kernel(out: k.Output, x: k.Input, *, by, of, ctx: k.Context):
    pass


@k.register("test.count")
def count_kernel(out: k.Output, b: k.InOut, x: k.Input, ctx: k.Context):
    pass


@k.register("test.unknown")
def unknown_kernel(out: k.Output, x: k.Input, ctx: k.Context):
    pass


def test_custom_ops() -> None:
    @_interpreter.register("test.scale")
    def scale(x: np.ndarray, *, by: float, of: DType) -> np.ndarray:
        assert of is DType.int8
        return x * np.float32(by)

    @_interpreter.register("test.count")
    def count(b: np.ndarray, x: np.ndarray) -> np.ndarray:
        b += 1
        return x[x > b[0]]

    def forward(x: TensorValue, b: BufferValue) -> Any:
        (y,) = ops.custom("test.scale", CPU, [x], [x.type], {"by": 2.0, "of": DType.int8})
        (z,) = ops.inplace_custom("test.count", CPU, [b, y], [f32("found")])
        return z.tensor.reshape(["found", 1]), b[...]

    graph = Graph("g", forward, [f32("n"), buffer(1)])
    log = np.array([2], np.float32)
    found, after = run(graph, np.array([1, 2, 3], np.float32), log)
    assert found.tolist() == [[4], [6]] and after.tolist() == log.tolist() == [3]
    del _interpreter.REFERENCES["test.scale"], _interpreter.REFERENCES["test.count"]


def test_custom_op_errors() -> None:
    with Graph("g", input_types=[f32(2), buffer(2)]) as graph:
        x, b = graph.inputs
        with pytest.raises(TypeError, match="custom f: operand 1 is a buffer; .* inplace_custom"):
            ops.custom("f", CPU, [x, b], [x.type])
        with pytest.raises(TypeError, match="inplace_custom f: expected at least one buffer"):
            ops.inplace_custom("f", CPU, [x])
        with pytest.raises(TypeError, match=r"the parameter k is \[1\], expected a bool, an int"):
            ops.custom("f", CPU, [x], [x.type], {"k": [1]})  # type: ignore[dict-item]
        with pytest.raises(TypeError, match="the result type is 3, expected a TensorType"):
            ops.custom("f", CPU, [x], [3])  # type: ignore[list-item]
        with pytest.raises(ValueError, match="the name of the op is empty"):
            ops.custom("", CPU, [x], [x.type])
        graph.output(*ops.custom("test.unknown", CPU, [x], [x.type]))
    with pytest.raises(NotImplementedError, match="'test.unknown' has no NumPy reference"):
        run(graph, np.zeros(2, np.float32), np.zeros(2, np.float32))


def test_kernel_library(tmp_path: Path) -> None:
    source = tmp_path / "ops.py"
    source.write_text(
        "from max import kernel as k\n\n@k.register('add_one')\n"
        "def f(out: k.Output, x: k.Input, ctx: k.Context):\n    out[0] = x[0] + 1\n"
    )
    library = KernelLibrary(None, [source])
    assert library.library_paths() == [source]
    graph = Graph("g", input_types=[f32(2)], custom_extensions=[tmp_path])
    assert graph.kernel_libraries_paths == [tmp_path]
    with graph:
        for name in ("add_one", "test.unknown"):
            ops.custom(name, CPU, graph.inputs, [f32(2)])
        with pytest.raises(ValueError, match="custom 'add_two': no kernel is registered.*add_one"):
            ops.custom("add_two", CPU, graph.inputs, [f32(2)])
        graph.output()
    first, second, _ = mlir.entry(graph.to_mlir()).body
    library.verify_custom_op(first)
    with pytest.raises(
        ValueError, match="no library registers 'test.unknown'; registered: add_one"
    ):
        library.verify_custom_op(second)
    with pytest.raises(FileNotFoundError, match="none.py does not exist"):
        library.add_path(tmp_path / "none.py")
    package = tmp_path / "ops.mojopkg"
    package.touch()
    with pytest.raises(ValueError, match=r"is not a library of custom ops; expected a \.py file"):
        library.add_path(package)


def test_a_thousand_ops_are_staged_quickly_enough_to_count() -> None:
    """Each op stages one MLIR op, with no auxiliary ops."""
    graph = Graph("g", lambda x: sum((x for _ in range(1000)), start=x), [f32("n")])
    assert len(list(mlir.walk(graph.to_mlir()))) == 1001


def test_the_module_of_graphs_has_the_names_that_programs_import_from_it() -> None:
    names = "DevicePlacementPolicy Graph GraphDebugConfig KernelLibrary Module ProfileScopeColor"
    module = import_module("max.graph.graph")
    assert [name for name in names.split() if not hasattr(module, name)] == []
