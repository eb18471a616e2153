"""A new op is its spec, its interpreter, its kernel, its staging function and its test: no other file changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max import kernel as k
from max._backends.cpu.kernels.library import CPU_KERNELS
from max._backends.kernel_call import KernelCall, Operand, view
from max._compiler.codegen.expressions import _TABLE, register_expression
from max._interpreter.core import IMPLEMENTATIONS, implements
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue
from max.graph.ops.staging.stage import stage
from max.mlir import OPS, OpSpec
from max.mlir.operation import Attrs, Types, define, tensor

TABLES: list[dict[str, Any]] = [OPS, IMPLEMENTATIONS, _TABLE, CPU_KERNELS.families]


@pytest.fixture(autouse=True)
def _tables() -> Iterator[None]:
    """Leaves the tables as they were."""
    before = [dict(table) for table in TABLES]
    yield
    for table, entries in zip(TABLES, before, strict=True):
        table.clear()
        table.update(entries)


def compare(graph: Graph, x: np.ndarray, expected: np.ndarray, launches: int) -> None:
    """Compares a graph, compiled and interpreted, with NumPy."""
    model = InferenceSession(devices=[CPU()]).load(graph)
    (interpreted,) = _interpreter.run(graph, [x])
    np.testing.assert_allclose(interpreted, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.execute(x)[0].to_numpy(), expected, rtol=1e-5, atol=1e-6)
    assert len(model.kernel_summaries) == launches, model.kernel_summaries


@pytest.mark.parametrize("columns", [0, 1, 17, 4099])
def test_an_element_wise_op(columns: int) -> None:
    define(replace(OPS["mo.log"].spec, name="mo.softsign"))

    @implements("softsign")
    def _(frame: Any, op: Any, operands: Any) -> Any:
        return operands[0] / (1 + abs(operands[0]))

    register_expression(
        "softsign", lambda dtype, attr, args: f"{args[0]} / (1.0 + k.abs({args[0]}))"
    )

    def softsign(x: TensorValue) -> TensorValue:
        return stage("softsign", (x,))

    kind = TensorType(DType.float32, [3, "n"], DeviceRef.CPU())
    with Graph("softsign", input_types=[kind]) as graph:
        graph.output(softsign(graph.inputs[0].tensor * 2) + 1)
    x = np.random.default_rng(columns).standard_normal((3, columns)).astype(np.float32)
    compare(graph, x, 2 * x / (1 + abs(2 * x)) + 1, launches=1)
    with pytest.raises(ValueError, match="softsign"):
        register_expression("softsign", lambda dtype, attr, args: "")


@k.kernel
def running_maximum(out: k.Output, x: k.Input, ctx: k.Context) -> None:
    """`out[i, j] = max(x[i, 0], ..., x[i, j])`."""
    for (row,) in ctx.parallel((x.shape[0],)):
        if x.shape[1] > 0:
            best = x[row, 0]
            for column in range(x.shape[1]):
                best = k.max(x[row, column], best)
                out[row, column] = best


@pytest.mark.parametrize("columns", [0, 1, 37])
def test_an_op_with_a_library_kernel(columns: int) -> None:
    def infer(types: Types, attrs: Attrs) -> Types:
        x = tensor("running_maximum", types, 0)
        if x.rank != 2:
            raise ValueError(f"running_maximum: {x.short}, expected rank 2")
        return (x,)

    define(OpSpec("mo.running_maximum", (1, 1), 1, infer=infer))

    @implements("running_maximum")
    def _(frame: Any, op: Any, operands: Any) -> Any:
        return np.maximum.accumulate(operands[0], axis=1)

    def lower(
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
        target: k.Target,
    ) -> KernelCall:
        args = (view("result", 0, results[0]), view("operand", 0, operands[0]))
        return KernelCall(running_maximum, args, {})

    CPU_KERNELS.register("mo.running_maximum", lower)

    def largest_so_far(x: TensorValue) -> TensorValue:
        return stage("running_maximum", (x,))

    kind = TensorType(DType.float32, ["m", "n"], DeviceRef.CPU())
    with Graph("maximum", input_types=[kind]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(ValueError, match="expected rank 2"):
            largest_so_far(x.reshape([-1]))
        graph.output(largest_so_far(-x) * 0.5)
    x = np.random.default_rng(columns).standard_normal((5, columns)).astype(np.float32)
    compare(graph, x, np.maximum.accumulate(-x, axis=1) * 0.5, launches=3)
    with pytest.raises(ValueError, match="running_maximum"):
        CPU_KERNELS.register("mo.running_maximum", lower)
