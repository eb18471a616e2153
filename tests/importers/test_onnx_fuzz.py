"""Damaged ONNX files: an error of a few kinds, in bounded time and memory."""

from __future__ import annotations

import random
import resource
import sys
import time
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper, parser  # noqa: E402

import max.onnx  # noqa: E402
from max.onnx import ModelFileError, from_onnx  # noqa: E402

ERRORS = (ValueError, NotImplementedError, TypeError)
SECONDS = 20
"""No damaged model takes longer, on a busy machine."""

TEXTS = [
    """
    <ir_version: 8, opset_import: ["" : 18]>
    m (float[n, 3, 8, 8] x, int64[2] sizes, bool c) => (float[n, k] y) {
      w = Constant <value = float[4, 3, 2, 2] {0.5}> ()
      a = Conv <strides = [2, 2], pads = [1, 1, 0, 0]> (x, w)
      b = Relu (a)
      p = MaxPool <kernel_shape = [2, 2]> (b)
      f = Reshape (p, sizes)
      y = If (c) <
        then_branch = t () => (float[n, k] u) { u = Neg (f) },
        else_branch = e () => (float[n, k] v) { v = Exp (f) }
      >
    }
    """,
    """
    <ir_version: 8, opset_import: ["" : 18]>
    m (int64 count, float[4] x) => (float[4] last, float[k, 4] all) {
      start = Constant <value = bool {1}> ()
      zero = Constant <value = int64[1] {0}> ()
      four = Constant <value = int64[1] {4}> ()
      last, all = Loop (count, start, x) <
        body = b (int64 i, bool go, float[4] s) => (bool next, float[4] t, float[4] row) {
          next = Identity (go)
          number = Cast <to = 1> (i)
          t = Add (s, number)
          row = Slice (t, zero, four)
        }
      >
    }
    """,
    """
    <ir_version: 8, opset_import: ["" : 18]>
    m (float[2, 5] x, int64[k] i) => (float[2, 5] y, int64 n) {
      shape = Constant <value = int64[3] {2, 1, 1}> ()
      twice = Constant <value = int64[3] {1, 2, 1}> ()
      one = Constant <value = int64 {1}> ()
      pads = Constant <value = int64[4] {0, 0, 0, 0}> ()
      g = Gather <axis = 1> (x, i)
      e = Expand (g, shape)
      t = Tile (e, twice)
      parts = SplitToSequence <axis = 0> (t, one)
      n = SequenceLength (parts)
      y = Pad <mode = "edge"> (x, pads)
    }
    """,
]


def attempt(data: bytes) -> str:
    """What becomes of a file: it is read, staged and run on inputs of its declared types, or refused."""
    try:
        session = max.onnx.InferenceSession(data)
        feeds = {}
        for argument in session.get_inputs():
            shape = [size if isinstance(size, int) and size < 100 else 2 for size in argument.shape]
            name = argument.type.removeprefix("tensor(").removesuffix(")")
            dtype = {"float": "float32", "double": "float64"}.get(name, name)
            feeds[argument.name] = np.ones(shape, dtype)
        session.run(None, feeds)
    except ERRORS as error:
        assert str(error)
        return type(error).__name__
    return "ran"


def mutated(data: bytes, draw: random.Random) -> bytes:
    """A file with some bytes changed, removed, repeated or swapped."""
    bytes_ = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(bytes_))
        match draw.randrange(5):
            case 0:
                bytes_[place] = draw.randrange(256)
            case 1:
                bytes_[place] ^= 1 << draw.randrange(8)
            case 2:
                del bytes_[place : place + draw.randint(1, 8)]
            case 3:
                bytes_[place:place] = bytes_[place : place + draw.randint(1, 16)]
            case _:
                bytes_[place : place + 4] = draw.choice(
                    [b"\xff\xff\xff\x7f", bytes(4), b"\x80\x80\x80\x08"]
                )
    return bytes(bytes_) or b"\0"


def changed(proto: Any, draw: random.Random) -> Any:
    """A valid message with senseless contents: names, sizes, attributes, types."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    nodes = list(copy.graph.node)
    names = [name for node in nodes for name in (*node.input, *node.output)]
    node = draw.choice(nodes)
    match draw.randrange(7):
        case 0 if node.input:
            node.input[draw.randrange(len(node.input))] = draw.choice([*names, "", "nowhere"])
        case 1:
            node.op_type = draw.choice(
                [
                    "Add",
                    "Conv",
                    "Reshape",
                    "Loop",
                    "If",
                    "Scan",
                    "Einsum",
                    "LSTM",
                    "Resize",
                    "Nothing",
                ]
            )
        case 2 if node.attribute:
            attribute = draw.choice(list(node.attribute))
            attribute.i = draw.choice([0, -1, 2**62, -(2**63)])
            attribute.ints.extend([draw.choice([-1, 0, 2**40])])
            attribute.type = draw.choice([1, 2, 3, 7])
        case 3 if copy.graph.input:
            info = draw.choice(list(copy.graph.input)).type.tensor_type
            info.elem_type = draw.choice([1, 7, 8, 9, 14, 16, 22, 99])
            for dim in info.shape.dim:
                dim.dim_value = draw.choice([0, 1, 3, 2**40, -5])
        case 4:
            for other in nodes:
                for attribute in other.attribute:
                    if attribute.HasField("t"):
                        attribute.t.dims[:] = [
                            draw.choice([0, 1, 2, 2**33, -1]) for _ in range(draw.randint(0, 3))
                        ]
        case 5:
            node.output[0] = draw.choice(names)
        case _:
            copy.graph.node.remove(node)
    return copy


def check(count: int, seed: int) -> None:
    draw = random.Random(seed)
    outcomes: dict[str, int] = {}
    for _ in range(count):
        proto = parser.parse_model(draw.choice(TEXTS))
        data = changed(proto, draw).SerializeToString()
        data = data if draw.random() < 0.7 else mutated(data, draw)
        start = time.monotonic()
        outcome = attempt(data)
        assert time.monotonic() - start < SECONDS * 6, outcome
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    assert len(outcomes) > 1


def test_a_few_damaged_files() -> None:
    check(12, 3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_many_damaged_files(seed: int) -> None:
    check(100, 100 + seed)


def graph_of(nodes: Any, constants: Any = (), inputs: Any = ()) -> Any:
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs
    ]
    result = helper.make_empty_tensor_value_info("y")
    return helper.make_model(helper.make_graph(list(nodes), "g", infos, [result], list(constants)))


def test_bombs_are_refused_at_once() -> None:
    """Small files that ask for much memory or depth."""
    huge = numpy_helper.from_array(np.array([2**40, 2**20]), "s")
    expand = graph_of([helper.make_node("ConstantOfShape", ["s"], ["y"])], [huge])
    sized = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    sized.dims[:] = [2**50]
    deep = helper.make_node("Identity", ["x"], ["y"])
    for _ in range(20):
        body = helper.make_graph([deep], "b", [], [helper.make_empty_tensor_value_info("y")])
        deep = helper.make_node("If", ["c"], ["y"], then_branch=body)
    cycle = [
        helper.make_node("Neg", ["b"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Neg", ["b"], ["y"]),
    ]
    models = [
        graph_of([helper.make_node("Neg", ["w"], ["y"])], [sized]),
        graph_of([deep], inputs=[("x", [1]), ("c", [])]),
        graph_of(cycle),
        graph_of([helper.make_node("Neg", ["nowhere"], ["y"])]),
        graph_of([helper.make_node("Neg", ["x"], ["z"])], inputs=[("x", [1])]),
        graph_of(
            [helper.make_node("Neg", ["x"], ["y"]), helper.make_node("Exp", ["x"], ["y"])],
            inputs=[("x", [1])],
        ),
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for model in models:
        with pytest.raises(ModelFileError):
            from_onnx(model.SerializeToString())
    with pytest.raises((ValueError, MemoryError)):
        max.onnx.InferenceSession(expand.SerializeToString()).run(None, {})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (1 << 20 if sys.platform != "darwin" else 1 << 30)


def test_functions_that_call_themselves_end() -> None:
    text = """
    <ir_version: 8, opset_import: ["" : 18, "own" : 1]>
    m (float[3] x) => (float[3] y) { y = own.again (x) }
    <domain: "own", opset_import: ["" : 18, "own" : 1]>
    again (a) => (b) { c = own.again (a)  b = own.again (c) }
    """
    with pytest.raises((ModelFileError, max.onnx.ImportFailure)):
        from_onnx(parser.parse_model(text))
