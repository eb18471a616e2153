"""Tensors and texts that a graph prints at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from max import _interpreter
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, Graph, ops
from tests.engine.conftest import DEVICE, tensor

Load = Callable[..., Model]


def test_prints_in_order(session: InferenceSession, capsys: pytest.CaptureFixture[str]) -> None:
    types = [tensor("n", 2), BufferType(DType.int32, [2], DEVICE)]
    with Graph("prints", input_types=types) as graph:
        x, counts = graph.inputs[0].tensor, graph.inputs[1].buffer
        ops.print("begin")
        y = x * 2
        y.print("y")
        y.T.print()
        counts.print()
        counts[...] = counts[...] + 1
        counts.print("counts")
        ops.print(ops.nonzero(y > 0, "found"), label="found")
        graph.output(y + 1)
    model = session.load(graph)
    x = np.array([[1, -2], [0.5, 3]], np.float32)
    expected = (
        "debug_tensor: begin\n"
        "y: float32[2, 2]\n[[ 2., -4.],\n [ 1.,  6.]]\n"
        "debug_tensor: float32[2, 2]\n[[ 2.,  1.],\n [-4.,  6.]]\n"
        "debug_buffer: int32[2]\n[3, 4]\n"
        "counts: int32[2]\n[4, 5]\n"
        "found: int64[3, 2]\n[[0, 0],\n [1, 0],\n [1, 1]]\n"
    )
    for _ in range(2):
        counts = np.array([3, 4], np.int32)
        np.testing.assert_array_equal(model.execute(x, counts)[0].to_numpy(), 2 * x + 1)
        assert capsys.readouterr().out == expected
        assert counts.tolist() == [4, 5]
    _interpreter.run(graph, [x, np.array([3, 4], np.int32)])
    assert capsys.readouterr().out == expected
    with pytest.raises(RuntimeError, match="printed while the model runs cannot be captured"):
        model.capture(1, x, counts)


def test_what_is_printed_is_not_overwritten(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    def build(x):
        first = ops.cumsum(x)
        # only the print uses it, and other ops run in between
        others = [ops.cumsum(x + float(i), 0) for i in range(6)]
        total = others[0]
        for other in others[1:]:
            total = ops.softmax(total * other)
        total.print("total")
        first.print("first")
        return total

    model = load([tensor(2, 3)], build)
    model.execute(np.ones((2, 3), np.float32))
    assert capsys.readouterr().out.endswith(
        "first: float32[2, 3]\n[[1., 2., 3.],\n [1., 2., 3.]]\n"
    )


def test_prints_of_subgraphs_empty_and_large_tensors(
    session: InferenceSession, capsys: pytest.CaptureFixture[str]
) -> None:
    with Graph("calls", input_types=[tensor("n")]) as graph:
        with graph.add_subgraph("inner", input_types=[tensor("m")]) as inner:
            inner.inputs[0].tensor.print("inner")
            inner.output(inner.inputs[0].tensor + 1)
        (x,) = ops.call(inner, graph.inputs[0])
        (x,) = ops.call(inner, x)
        graph.output(x)
    model = session.load(graph)
    model.execute(np.zeros(2, np.float32))
    assert capsys.readouterr().out == "inner: float32[2]\n[0., 0.]\ninner: float32[2]\n[1., 1.]\n"
    model.execute(np.zeros(0, np.float32))
    assert capsys.readouterr().out == "inner: float32[0]\n[]\n" * 2
    model.execute(np.arange(5000, dtype=np.float32))
    assert "4.997e+03, 4.998e+03, 4.999e+03" in capsys.readouterr().out


def test_mistakes() -> None:
    with Graph("mistakes", input_types=[tensor(2)]) as graph:
        with pytest.raises(TypeError, match="print: the value is 3, expected a str"):
            ops.print(3)  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match="print: the label is 4, expected a str"):
            graph.inputs[0].tensor.print(4)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="print: expected either a tensor or"):
            graph.stage_effect("mo.print", (), {"label": "x"})


@pytest.mark.parametrize("interpret", [False, True])
def test_print_options(
    interpret: bool,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The options of a session hold for its models, loaded before or after; other sessions keep theirs."""
    if interpret:
        monkeypatch.setenv("MAX_INTERPRET", "1")
    one, other = InferenceSession([CPU()]), InferenceSession([CPU()])
    with Graph("shown", input_types=[tensor("n")]) as graph:
        graph.inputs[0].tensor.print("a/x")
        graph.output(graph.inputs[0])
    models = [one.load(graph), other.load(graph)]
    x = np.arange(2000, dtype=np.float32) / 3

    def shown(index: int) -> str:
        models[index].execute(x)
        return capsys.readouterr().out

    usual = shown(0)
    assert "..., " in usual and usual == shown(1)
    one.set_debug_print_options("FULL", precision=2)
    full = shown(0)
    assert full.startswith("a/x: float32[2000]\n[0.00e+00, 3.33e-01, ") and "..." not in full
    assert shown(1) == usual
    one.set_debug_print_options("NONE")
    assert shown(0) == ""
    one.set_debug_print_options("BINARY", output_directory=tmp_path)
    assert shown(0) == ""
    assert (tmp_path / "a_x").read_bytes() == x.tobytes()
    one.set_debug_print_options()
    assert shown(0) == usual


def test_print_options_that_do_not_fit() -> None:
    session = InferenceSession([CPU()])
    for options in (("full",), (3,), ("FULL", -1), ("FULL", "a"), ("FULL", 2.5)):
        with pytest.raises(TypeError, match="set_debug_print_options: the (style|precision) is"):
            session.set_debug_print_options(*options)
    for folder in (None, "", "/no/such/folder"):
        with pytest.raises(ValueError, match="writes to the folder output_directory"):
            session.set_debug_print_options("BINARY", output_directory=folder)
