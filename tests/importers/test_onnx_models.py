"""Models with structure: branches, loops, sequences, symbols, functions, weights in other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper, parser  # noqa: E402

import max.onnx  # noqa: E402
from max import _interpreter  # noqa: E402
from max.dtype import DType  # noqa: E402
from max.engine import InferenceSession, TorchInputSpec  # noqa: E402
from modular import engine as first_engine  # noqa: E402

HEADER = '<ir_version: 8, opset_import: ["" : 18]>\n'


def model(text: str) -> Any:
    return parser.parse_model(HEADER + text)


def run(text: str, *inputs: Any) -> list[Any]:
    session = max.onnx.InferenceSession(model(text))
    names = [argument.name for argument in session.get_inputs()]
    return session.run(None, dict(zip(names, inputs, strict=True)))


BRANCH = """
m (bool c, float[n] x) => (float[n] y) {
  y = If (c) <then_branch = t () => (float[n] a) { a = Neg (x) }, else_branch = e () => (float[n] b) { b = Exp (x) }>
}
"""


def test_a_branch_is_in_the_graph(rng: np.random.Generator) -> None:
    graph = max.onnx.from_onnx(model(BRANCH))
    loaded = InferenceSession().load(graph)
    for size, chosen in ((3, True), (5, False)):
        x = rng.standard_normal(size).astype(np.float32)
        expected = -x if chosen else np.exp(x)
        (got,) = loaded.execute(np.array(chosen), x)
        np.testing.assert_allclose(got.to_numpy(), expected, rtol=1e-6)
        np.testing.assert_allclose(
            _interpreter.run(graph, [np.array(chosen), x])[0], expected, rtol=1e-6
        )


DIFFERENT = """
m (bool c, float[n] x) => (float[k] y) {
  y = If (c) <
    then_branch = t () => (float[k] a) { a = Concat <axis = 0> (x, x) },
    else_branch = e () => (float[k] b) { b = Identity (x) }
  >
}
"""


def test_branches_of_different_shapes_run_in_a_session(rng: np.random.Generator) -> None:
    x = rng.standard_normal(3).astype(np.float32)
    assert run(DIFFERENT, np.array(True), x)[0].shape == (6,)
    assert run(DIFFERENT, np.array(False), x)[0].shape == (3,)
    with pytest.raises(max.onnx.UnsupportedOpsError, match="different types"):
        max.onnx.from_onnx(model(DIFFERENT))


LOOP = """
m (int64 count, float[4] x) => (float[4] last, float[k, 4] all) {
  start = Constant <value = bool {1}> ()
  last, all = Loop (count, start, x) <body = b (int64 i, bool go, float[4] s) => (bool next, float[4] t, float[4] row) {
    next = Identity (go)
    number = Cast <to = 1> (i)
    t = Add (s, number)
    row = Mul (t, t)
  }>
}
"""


@pytest.mark.parametrize("count", [0, 1, 6])
def test_a_loop_stacks_what_each_iteration_gives(rng: np.random.Generator, count: int) -> None:
    x = rng.standard_normal(4).astype(np.float32)
    state, rows = x.copy(), []
    for number in range(count):
        state = state + np.float32(number)
        rows.append(state * state)
    last, stacked = run(LOOP, np.array(count), x)
    np.testing.assert_allclose(last, state, rtol=1e-6)
    np.testing.assert_allclose(stacked, np.array(rows, np.float32).reshape(count, 4), rtol=1e-6)


GROWING = """
m (int64 count, float[1] x) => (float[k] y) {
  start = Constant <value = bool {1}> ()
  y = Loop (count, start, x) <body = b (int64 i, bool go, float[k] s) => (bool next, float[j] t) {
    next = Identity (go)
    t = Concat <axis = 0> (s, s)
  }>
}
"""


def test_a_loop_may_grow_its_state() -> None:
    assert run(GROWING, np.array(4), np.array([2], np.float32))[0].tolist() == [2.0] * 16


WHILE = """
m (float x) => (float y, int64 n) {
  start = Constant <value = bool {1}> ()
  zero = Constant <value = int64 {0}> ()
  y, n = Loop ("", start, x, zero) <body = b (int64 i, bool go, float s, int64 c) => (bool next, float t, int64 d) {
    two = Constant <value = float {2}> ()
    limit = Constant <value = float {100}> ()
    one = Constant <value = int64 {1}> ()
    t = Mul (s, two)
    d = Add (c, one)
    next = Less (t, limit)
  }>
}
"""


def test_a_loop_ends_by_its_condition() -> None:
    text = WHILE.replace('("", start', "(, start")
    graph = max.onnx.from_onnx(model(text))
    y, n = (t.to_numpy() for t in InferenceSession().load(graph).execute(np.array(3, np.float32)))
    assert float(y) == 192.0 and int(n) == 6


SCAN = """
m (float[2] start, float[t, 2] x) => (float[2] last, float[t, 2] all) {
  last, all = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = b (float[2] s, float[2] row) => (float[2] t, float[2] out) {
    t = Add (s, row)
    out = Identity (t)
  }> (start, x)
}
"""  # noqa: E501


def test_a_scan_runs_backwards_for_all_lengths(rng: np.random.Generator) -> None:
    graph = max.onnx.from_onnx(model(SCAN))
    loaded = InferenceSession().load(graph)
    for length in (1, 5):
        x, start = rng.standard_normal((length, 2)).astype(np.float32), np.ones(2, np.float32)
        last, rows = (t.to_numpy() for t in loaded.execute(start, x))
        np.testing.assert_allclose(rows, 1 + np.cumsum(x[::-1], 0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(last, rows[-1])


SEQUENCE = """
m (float[4, 3] x, int64 place) => (int64 n, float[k, 3] y, float[j, 3] z) {
  two = Constant <value = int64 {2}> ()
  parts = SplitToSequence <axis = 0> (x, two)
  first = SequenceAt (parts, place)
  more = SequenceInsert (parts, first)
  less = SequenceErase (more, place)
  n = SequenceLength (less)
  y = ConcatFromSequence <axis = 0> (less)
  some = SequenceConstruct (first, first)
  empty = SequenceEmpty <dtype = 1> ()
  filled = SequenceInsert (empty, first)
  wrapped = Optional (filled)
  there = OptionalHasElement (wrapped)
  inner = OptionalGetElement (wrapped)
  z = SequenceAt (inner, place)
}
"""


def test_sequences(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 3)).astype(np.float32)
    text = SEQUENCE.replace("SequenceAt (inner, place)", "SequenceAt (inner, zero)").replace(
        "  two =", "  zero = Constant <value = int64 {0}> ()\n  two ="
    )
    n, y, z = run(text, x, np.array(1))
    assert int(n) == 2
    np.testing.assert_array_equal(y, np.concatenate([x[:2], x[2:]]))
    np.testing.assert_array_equal(z, x[2:])


def test_one_graph_serves_all_sizes(rng: np.random.Generator) -> None:
    text = """
    m (float[batch, length, 6] x) => (float[batch, length, 6] y) {
      shape = Shape (x)
      zero = Constant <value = int64 {0}> ()
      batch = Gather (shape, zero)
      first = Constant <value = int64[1] {0}> ()
      one = Unsqueeze (batch, first)
      rest = Constant <value = int64[2] {-1, 6}> ()
      target = Concat <axis = 0> (one, rest)
      flat = Reshape (x, target)
      total = ReduceSum <keepdims = 1> (flat, axes)
      y = Add (x, total)
    }
    """.replace("total =", "axes = Constant <value = int64[1] {1}> ()\n      total =")
    read = max.onnx.from_onnx(model(text))
    assert [str(dim) for dim in read.inputs[0].tensor.shape] == ["batch", "length", "6"]
    session = max.onnx.InferenceSession(model(text))
    loaded = InferenceSession().load(read)
    for batch, length in ((1, 2), (3, 5)):
        x = rng.standard_normal((batch, length, 6)).astype(np.float32)
        expected = x + x.sum(1, keepdims=True)
        np.testing.assert_allclose(loaded.execute(x)[0].to_numpy(), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-5, atol=1e-5)
    assert session._program.segments == 1


def test_the_engine_loads_files(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "branch.onnx"
    path.write_bytes(model(BRANCH).SerializeToString())
    x = rng.standard_normal(3).astype(np.float32)
    session = InferenceSession()
    np.testing.assert_allclose(session.load(path).execute(np.array(True), x)[0].to_numpy(), -x)
    specs = [TorchInputSpec([]), TorchInputSpec([4], DType.float32)]
    assert session.load(str(path), input_specs=specs).input_metadata[1].shape == [4]
    for wrong in (
        [TorchInputSpec([])],
        [TorchInputSpec([]), TorchInputSpec([2, 2])],
        [TorchInputSpec([], DType.int8)] * 2,
    ):
        with pytest.raises(max.onnx.ImportFailure):
            session.load(path, input_specs=wrong)
    path.write_bytes(model(DIFFERENT).SerializeToString())
    with pytest.raises(max.onnx.UnsupportedOpsError, match="max.onnx.InferenceSession runs"):
        session.load(path)
    path.write_bytes(b"no model")
    with pytest.raises(max.onnx.ModelFileError):
        session.load(path)


def test_axes_that_are_inputs_are_learnt(rng: np.random.Generator) -> None:
    text = (
        "m (float[2, 3] x, int64[k] axes) => (float[] y) { y = ReduceSum <keepdims = 0> (x, axes) }"
    )
    x = rng.standard_normal((2, 3)).astype(np.float32)
    session = max.onnx.InferenceSession(model(text))
    for axes in ([0], [1], [0, 1]):
        (y,) = session.run(None, {"x": x, "axes": np.array(axes)})
        np.testing.assert_allclose(y, x.sum(tuple(axes)), rtol=1e-5)


def test_problems_are_reported_together() -> None:
    text = """
    m (float[2] x) => (float[2] y) {
      a = Unknown (x)
      b = Relu (a)
      c = Gather (x, x)
      d = AlsoUnknown (x)
      y = Add (b, d)
    }
    """
    with pytest.raises(max.onnx.UnsupportedOpsError) as caught:
        max.onnx.from_onnx(model(text))
    assert [problem.op for problem in caught.value.problems] == ["Unknown", "Gather", "AlsoUnknown"]


def test_local_functions_expand(rng: np.random.Generator) -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 18, "own" : 1]>
    m (float[3] x) => (float[3] y) { y = own.twice <factor: int = 3> (x) }
    <domain: "own", opset_import: ["" : 18]>
    twice <factor: int = 2> (a) => (b) {
      f = Constant <value_int: int = @factor> ()
      g = CastLike (f, a)
      b = Mul (a, g)
    }
    """
    x = rng.standard_normal(3).astype(np.float32)
    (y,) = max.onnx.InferenceSession(parser.parse_model(text)).run(None, {"x": x})
    np.testing.assert_allclose(y, 3 * x, rtol=1e-6)


def external(path: Path, location: str, weight: np.ndarray, **entries: int) -> Any:
    tensor = numpy_helper.from_array(weight, "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    info = helper.make_tensor_value_info("x", TensorProto.FLOAT, weight.shape)
    result = helper.make_empty_tensor_value_info("y")
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])], "g", [info], [result], [tensor]
    )
    path.write_bytes(helper.make_model(graph).SerializeToString())
    return path


def test_external_data_lies_in_the_folder(tmp_path: Path, rng: np.random.Generator) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weight = rng.standard_normal(5).astype(np.float32)
    (folder / "data.bin").write_bytes(bytes(64) + weight.tobytes())
    (tmp_path / "outside.bin").write_bytes(weight.tobytes())
    path = external(folder / "m.onnx", "data.bin", weight, offset=64, length=20)
    x = rng.standard_normal(5).astype(np.float32)
    (y,) = max.onnx.InferenceSession(path).run(None, {"x": x})
    np.testing.assert_allclose(y, x + weight)
    (folder / "link.bin").symlink_to(tmp_path / "outside.bin")
    for location in (
        "../outside.bin",
        str(tmp_path / "outside.bin"),
        "link.bin",
        "missing.bin",
        "",
    ):
        bad = external(folder / "bad.onnx", location, weight)
        with pytest.raises(max.onnx.ModelFileError):
            max.onnx.from_onnx(bad)
    for entries in ({"offset": 70}, {"offset": -1}, {"length": 4}, {"offset": 10**18}):
        with pytest.raises(max.onnx.ModelFileError):
            max.onnx.from_onnx(external(folder / "bad.onnx", "data.bin", weight, **entries))
    with pytest.raises(max.onnx.ModelFileError, match="give the path"):
        max.onnx.from_onnx(path.read_bytes())


def test_programs_of_onnx_runtime_find_their_names(rng: np.random.Generator) -> None:
    ort = max.onnx
    ort.disable_telemetry_events()
    ort.set_default_logger_severity(3)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("a", "b")
    providers = ["CUDAExecutionProvider", ("CPUExecutionProvider", {})]
    session = ort.InferenceSession(model(BRANCH).SerializeToString(), options, providers=providers)
    assert [(a.name, a.shape, a.type) for a in session.get_inputs()] == [
        ("c", [], "tensor(bool)"), ("x", ["n"], "tensor(float)"),
    ]  # fmt: skip
    assert [a.name for a in session.get_outputs()] == ["y"]
    assert session.get_providers() == ort.get_available_providers() == ["CPUExecutionProvider"]
    assert session.get_modelmeta().graph_name == "m" and ort.get_device() == "CPU"
    # lists take the element type of the input
    (y,) = session.run(["y"], {"c": True, "x": [1, 2]})
    assert y.tolist() == [-1.0, -2.0]
    for feeds in ({"c": np.array(True)}, {"c": np.array(True), "x": np.ones(2)}, {"z": 1}):
        with pytest.raises(ValueError):
            session.run(None, feeds)
    with pytest.raises(ValueError):
        session.run(["z"], {"c": True, "x": [1.0]})
    with pytest.raises(ValueError):
        ort.InferenceSession(model(BRANCH), providers=["CUDAExecutionProvider"])


def test_the_api_of_2023(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "branch.onnx"
    path.write_bytes(model(BRANCH).SerializeToString())
    session = first_engine.InferenceSession(num_threads=1)
    loaded = session.load(path, first_engine.CommonLoadOptions())
    assert [(s.name, s.shape, s.dtype) for s in loaded.input_metadata] == [
        ("c", [], first_engine.DType.bool), ("x", [None], first_engine.DType.float32),
    ]  # fmt: skip
    x = rng.standard_normal(3)
    outputs = loaded.execute(c=True, x=x)
    assert list(outputs) == [spec.name for spec in loaded.output_metadata] == ["y"]
    np.testing.assert_allclose(outputs["y"], -x.astype(np.float32))
    for wrong in ({"x": x}, {"c": True, "x": x, "z": x}, {"c": True, "x": np.ones((2, 2))}):
        with pytest.raises(RuntimeError):
            loaded.execute(**wrong)
    with pytest.raises(TypeError):
        loaded.execute(c=True, x=np.array(["text"]))
    path.write_bytes(b"damaged")
    for bad in (path, tmp_path, tmp_path / "missing.onnx"):
        with pytest.raises(RuntimeError):
            session.load(bad)
    with pytest.raises(RuntimeError):
        first_engine.InferenceSession(device="gpu")
