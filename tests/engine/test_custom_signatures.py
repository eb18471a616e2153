"""Custom ops are checked against their kernels when they are staged; opaque values keep state across calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max import kernel as k
from max import mlir
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load.opaque_buffers import with_buffers
from max.graph import BufferType, DeviceRef, Graph, TensorType, _OpaqueType, ops

DEVICE = DeviceRef.CPU()
FLOATS = TensorType(DType.float32, ["n", 3], DEVICE)
INTS = TensorType(DType.int32, ["n", 3], DEVICE)
SOURCE = """from max import kernel as k

@k.register("signature.scale")
def scale(out: k.Output[k.f32, 2], x: k.Input[k.f32, 2], *, factor: int, ctx: k.Context):
    for i, j in ctx.parallel(out.shape):
        out[i, j] = x[i, j] * factor

@k.register("signature.bump")
def bump(state: k.InOut[k.f32, 2], ctx: k.Context):
    for i, j in ctx.parallel(state.shape):
        state[i, j] = state[i, j] + 1
"""

MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "dtype": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [i], [x.type], {"factor": 2}),
        r"signature\.scale.*kernels\.py:4:36: x has dtype f32, got i32",
    ),
    "rank": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [x[0]], [x.type], {"factor": 2}),
        "x has rank 2, got 1",
    ),
    "dtype of a result": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [x], [i.type], {"factor": 2}),
        r"kernels\.py:4:11: out has dtype f32, got i32",
    ),
    "too many": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [x, x], [x.type], {"factor": 2}),
        r"scale takes 2 arguments \(out, x\), got 3",
    ),
    "too few": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [], [x.type], {"factor": 2}),
        "none for 'x'",
    ),
    "parameter missing": (
        lambda x, i, b: ops.custom("signature.scale", DEVICE, [x], [x.type]),
        "compile-time parameter 'factor'",
    ),
    "parameter unknown": (
        lambda x, i, b: ops.custom(
            "signature.scale", DEVICE, [x], [x.type], {"factor": 2, "factr": 3}
        ),
        "no parameter factr; its compile-time parameters: factor",
    ),
    "result where the kernel reads and writes": (
        lambda x, i, b: ops.custom("signature.bump", DEVICE, [], [x.type]),
        r"state is k\.InOut, but stands where result 0",
    ),
    "tensor that would be written": (
        lambda x, i, b: ops.custom("signature.bump", DEVICE, [x], []),
        r"state is k\.InOut, but operand 0 of the op is a tensor, which cannot be written",
    ),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(SOURCE)
    return path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_call_fails_when_it_is_staged(name: str, file: Path) -> None:
    call, message = MISTAKES[name]
    types = [FLOATS, INTS, BufferType(DType.float32, ["n", 3], DEVICE)]
    with Graph("wrong", input_types=types, custom_extensions=[file]) as graph:
        x, i = [v.tensor for v in graph.inputs[:2]]
        with pytest.raises(k.KernelTypeError, match=message):
            call(x, i, graph.inputs[2].buffer)
        graph.output(x)


def test_a_right_call_runs(file: Path) -> None:
    types = [FLOATS, BufferType(DType.float32, [2, 3], DEVICE)]
    with Graph("right", input_types=types, custom_extensions=[file]) as graph:
        x, b = graph.inputs[0].tensor, graph.inputs[1].buffer
        ops.inplace_custom("signature.bump", DEVICE, [b])
        graph.output(*ops.custom("signature.scale", DEVICE, [x], [x.type], {"factor": 3}))
    held = np.zeros((2, 3), np.float32)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    (out,) = InferenceSession(devices=[CPU()]).load(graph).execute(x, held)
    np.testing.assert_array_equal(out.to_numpy(), x * 3)
    assert (held == 1).all()


@pytest.mark.parametrize("kind", [ValueError, NameError, k.KernelError])
def test_an_op_without_a_kernel(kind: type[Exception]) -> None:
    with Graph("unknown", input_types=[FLOATS, BufferType(DType.float32, [2], DEVICE)]) as graph:
        x, buffer = graph.inputs
        with pytest.raises(
            kind, match=r"custom 'signature.scal': no kernel.*did you mean.*custom_extensions"
        ):
            ops.custom("signature.scal", DEVICE, [x], [FLOATS], {"factor": 2})
        with pytest.raises(kind, match="no kernel is registered as 'nothing.like.it'"):
            ops.inplace_custom("nothing.like.it", DEVICE, [buffer])


@k.register("signature.histogram")
def histogram(state: k.InOut[k.i64, 1], x: k.Input[k.i32, 1], ctx: k.Context):
    for _ in ctx.parallel(1):
        for i in range(x.shape[0]):
            state[x[i]] = state[x[i]] + 1


def test_results_are_not_opaque() -> None:
    """Also where no input is."""
    with Graph("g", input_types=[_OpaqueType("bins", {"size": 4})]) as graph:
        kind = str(graph.inputs[0].type.to_mlir())
    module = mlir.parse_module(
        f"""builtin.module {{ mo.graph @g() -> () {{
            %a = mo.custom() {{symbol = "new", parameters = {{}}, device = #mo.device<cpu:0>}} : () -> {kind}
            mo.output() : () -> () }} }}"""
    )
    with pytest.raises(
        NotImplementedError, match=r"mo.custom: a result is the opaque value 'bins'"
    ):
        with_buffers(module)


def test_state_across_calls() -> None:
    """Updates happen in program order, through subgraphs and loops too."""
    bins = _OpaqueType("histogram", {"size": 4, "dtype": DType.int64})
    line = TensorType(DType.int32, ["n"], DEVICE)
    with Graph("count", input_types=[bins, line]) as graph:
        state, x = graph.inputs[0].opaque, graph.inputs[1].tensor
        sub = graph.add_subgraph("once", input_types=[bins, TensorType(DType.int32, ["m"], DEVICE)])
        with sub:
            ops.inplace_custom("signature.histogram", DEVICE, list(sub.inputs))
            sub.output()
        ops.call(sub, state, x)

        def body(i: Any) -> Any:
            ops.inplace_custom("signature.histogram", DEVICE, [state, x])
            return i + 1

        ops.while_loop(ops.constant(0, DType.int32, device=DEVICE), lambda i: i < 2, body)
        graph.output()
    model = InferenceSession(devices=[CPU()]).load(graph)
    held = np.zeros(4, np.int64)
    for x in ([0, 1, 1, 3], [3]):
        model.execute(held, np.array(x, np.int32))
    assert held.tolist() == [3, 6, 0, 6]
    with pytest.raises(ValueError, match="got shape"):
        model.execute(np.zeros(5, np.int64), np.array([1], np.int32))


def test_opaque_types_without_a_size() -> None:
    with Graph("state", input_types=[_OpaqueType("state")]) as graph:
        graph.output()
    with pytest.raises(TypeError, match="opaque type 'state'.*needs size"):
        InferenceSession(devices=[CPU()]).load(graph)
