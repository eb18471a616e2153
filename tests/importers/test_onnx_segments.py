"""Sessions whose models are compiled in parts: what decides about the structure, and how many parts there are."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
from onnx import parser

import max.onnx

HEADER = '<ir_version: 8, opset_import: ["" : 18]>\n'
BRANCHES = """If (c) <
    then_branch = t () => (float[k] a) { a = Concat <axis = 0> (h, h) },
    else_branch = e () => (float[k] b) { b = Neg (h) }
  >"""
"""Results of two shapes: the condition must be known when they are staged."""


def session_of(text):
    return max.onnx.InferenceSession(
        parser.parse_model(HEADER + text.replace("BRANCHES", BRANCHES))
    )


def expected(x, is_first):
    h = np.tanh(x)
    return np.concatenate([h, h]) if is_first else -h


def vector(size=3):
    return np.linspace(-1, 1, size, dtype=np.float32)


def check(session, is_first, **feed):
    (got,) = session.run(None, feed)
    np.testing.assert_allclose(got, expected(feed["x"], is_first), 1e-5, 1e-6)


RATE = """m (float[n] x, int64 rate) => (float[k] y) {
  h = Tanh (x)
  wanted = Constant <value = int64 {16000}> ()
  c = Equal (rate, wanted)
  y = BRANCHES
}"""


def test_an_input_decides_without_a_part_of_its_own():
    session = session_of(RATE)
    for size, rate in ((3, 16000), (4, 16000), (3, 8000), (5, 8000)):
        check(session, rate == 16000, x=vector(size), rate=np.array(rate, np.int64))
    # one for each rate, for all sizes
    assert session._program.segments == 2


def test_an_input_of_many_values_decides_no_longer():
    session = session_of(RATE.replace("Equal", "Less"))
    for rate in (*range(15995, 16005), 1, 2):
        check(session, rate < 16000, x=vector(), rate=np.array(rate, np.int64))
    # what the condition needs, and a part for either branch
    assert session._program.segments == 3


def test_two_inputs_decide_about_one_value():
    session = session_of(
        """m (float[n] x, int64 first, bool[1] second) => (float[k] y) {
          h = Tanh (x)
          zero = Constant <value = int64 {0}> ()
          positive = Greater (first, zero)
          both = And (positive, second)
          c = Squeeze (both)
          y = BRANCHES
        }"""
    )
    for first, second in ((1, True), (1, False), (0, True), (0, False)):
        flag = np.array([second])
        check(
            session, first > 0 and second, x=vector(), first=np.array(first, np.int64), second=flag
        )
    assert session._program.segments == 4


@pytest.mark.parametrize("kind", ["float", "int64[5]"])
def test_numbers_and_longer_inputs_do_not_decide(kind):
    text = """m (float[n] x, KIND rate) => (float[k] y) {
      h = Tanh (x)
      total = ReduceSum <keepdims = 0> (rate)
      limit = Constant <value = LIMIT> ()
      c = Greater (total, limit)
      y = BRANCHES
    }""".replace("KIND", kind)
    session = session_of(text.replace("LIMIT", "float {2}" if kind == "float" else "int64 {2}"))
    shape, dtype = ((), np.float32) if kind == "float" else (5, np.int64)
    for number in (0, 1, 3):
        rate = np.full(shape, number, dtype)
        check(session, rate.sum() > 2, x=vector(), rate=rate)
    assert session._program.segments == 3


def test_elements_decide_by_a_part_before():
    session = session_of(
        """m (float[n] x) => (float[k] y) {
          h = Tanh (x)
          zero = Constant <value = float {0}> ()
          total = ReduceSum <keepdims = 0> (h)
          c = Greater (total, zero)
          y = BRANCHES
        }"""
    )
    for sign in (1, -1, 1):
        x = vector() + sign * np.float32(0.5)
        check(session, sign > 0, x=x)
    assert session._program.segments == 3


def test_sizes_decide_without_a_part_before():
    session = session_of(
        """m (float[n] x) => (float[k] y) {
          h = Tanh (x)
          shape = Shape (h)
          zero = Constant <value = int64 {0}> ()
          size = Gather (shape, zero)
          four = Constant <value = int64 {4}> ()
          c = Equal (size, four)
          y = BRANCHES
        }"""
    )
    for size in (4, 3, 4, 5):
        check(session, size == 4, x=vector(size))
    # a part for each size, none before it
    assert session._program.segments == 3


def test_sizes_of_one_name_may_differ():
    session = session_of(
        """m (float[n, m] x, float[m, n] y, float[n] z) => (float[a, b] s) {
          p = MatMul (x, y)
          s = Add (p, z)
        }"""
    )
    rng = np.random.default_rng(0)
    for shapes in (((2, 3), (3, 2), (2,)), ((3, 3), (3, 3), (1,)), ((2, 3), (3, 2), (1,))):
        x, y, z = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        (got,) = session.run(None, {"x": x, "y": y, "z": z})
        np.testing.assert_allclose(got, x @ y + z, 1e-4, 1e-5)


WHOLE = """m (float[n, 3] x, float[n, 3] y) => (float[n, 3] d, float[n, 3] s) {
  s = Add (x, y)
  d = Sub (x, y)
}"""


def matrix(rows, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "form", ["plain", "strided", "frozen", "list", "columns", "subclass", "keys in any order"]
)
def test_a_model_of_one_graph_takes_what_any_model_takes(form):
    session = session_of(WHOLE)
    for rows in (2, 5, 0, 2):
        x, y = matrix(rows), matrix(rows, 1)
        given = x
        match form:
            case "strided":
                given = np.repeat(x, 2, 1)[:, ::2]
            case "frozen":
                given = x.copy()
                given.flags.writeable = False
            case "list":
                given = x.tolist() if rows else x
            case "columns":
                given = np.asfortranarray(x)
            case "subclass":
                given = x.view(np.recarray)
        feed = {"y": y, "x": given} if form == "keys in any order" else {"x": given, "y": y}
        difference, total = session.run(None, feed)
        np.testing.assert_array_equal(difference, x - y)
        np.testing.assert_array_equal(total, x + y)


def test_a_model_of_one_graph_returns_the_outputs_that_are_named():
    session = session_of(WHOLE)
    for rows in (2, 3):
        feed = {"x": matrix(rows), "y": matrix(rows, 1)}
        total, difference, again = session.run(("s", "d", "s"), feed)
        np.testing.assert_array_equal(total, feed["x"] + feed["y"])
        np.testing.assert_array_equal(again, total)
        np.testing.assert_array_equal(difference, feed["x"] - feed["y"])
        with pytest.raises(ValueError, match="no output 't'"):
            session.run(["s", "t"], feed)


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({"x": matrix(2)}, "'y' is missing"),
        ({"x": matrix(2), "z": matrix(2)}, "no input 'z'"),
        ({"x": matrix(2), "y": matrix(2), "z": matrix(2)}, "no input 'z'"),
        ({"x": matrix(2), "y": matrix(2).astype(np.float64)}, "element type float64"),
        ({"x": matrix(2), "y": matrix(2)[:, :2].copy()}, r"shape \[2, 2\]"),
        ({"x": matrix(2), "y": matrix(2)[0]}, r"shape \[3\]"),
        ({"x": matrix(2), "y": None}, "'y' is None"),
    ],
)  # fmt: skip
def test_a_model_of_one_graph_refuses_what_any_model_refuses(feed, message):
    session = session_of(WHOLE)
    right = {"x": matrix(2), "y": matrix(2, 1)}
    for _ in range(2):
        # the same before the model is compiled, and after
        with pytest.raises(ValueError, match=message):
            session.run(None, feed)
        np.testing.assert_array_equal(session.run(["s"], right)[0], right["x"] + right["y"])


def test_sizes_of_one_name_that_differ_end_the_whole_graph():
    """Broadcasting by ONNX's rules, after the graph for all sizes took equal ones."""
    session = session_of(WHOLE)
    for x_rows, y_rows in ((3, 3), (3, 1), (4, 4), (1, 5), (3, 3)):
        feed = {"x": matrix(x_rows), "y": matrix(y_rows, 1)}
        difference, total = session.run(None, feed)
        np.testing.assert_array_equal(difference, feed["x"] - feed["y"])
        np.testing.assert_array_equal(total, feed["x"] + feed["y"])


@pytest.mark.parametrize("text", [
    "m (float[n] x, float[n] unused) => (float[n] t) { t = Tanh (x) }",
    "m (float[n] x, float[n] unused) => (float[n] t, float[n] x) { t = Tanh (x) }",
])  # fmt: skip
def test_inputs_that_no_node_reads_are_checked(text):
    session = session_of(text)
    for size in (2, 3):
        x = vector(size)
        results = session.run(None, {"x": x, "unused": x})
        np.testing.assert_allclose(results[0], np.tanh(x), 1e-5, 1e-6)
        if len(results) > 1:
            np.testing.assert_array_equal(results[1], x)
        for wrong in (x.astype(np.float64), x[None]):
            with pytest.raises(ValueError, match="'unused'"):
                session.run(None, {"x": x, "unused": wrong})
        with pytest.raises(ValueError, match="'unused' is missing"):
            session.run(None, {"x": x})
