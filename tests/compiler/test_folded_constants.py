"""Ops on constants that are computed by the compiler; no other pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max._compiler.passes.base import constant_of
from max._compiler.passes.constants import fold_constants
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import MoOp, clone_module, entry, verify_module

Value = TensorValue
CPU = DeviceRef.CPU()


def folded(build: Callable[[Value], Value]) -> Any:
    """The elements of the output if the compiler computes it, else the name of its op."""
    with Graph("g", input_types=[TensorType(DType.float32, ["n", 4], CPU)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    module = clone_module(graph.to_mlir())
    fold_constants(entry(module).block)
    verify_module(module)
    # a value that a removed op still uses would never be dropped
    users = {use.operation for op in module.walk() for value in op.results for use in value.uses}
    assert users <= {*module.walk()}
    last = entry(module).block.last_op
    assert last is not None
    owner = last.operands[0].owner
    assert isinstance(owner, MoOp)
    array = constant_of(owner)
    return owner.name if array is None else array


def constant(values: Any, dtype: DType = DType.float32) -> Value:
    return ops.constant(np.asarray(values, dtype.to_numpy()), dtype, CPU)


F32, I32, BOOL = DType.float32, DType.int32, DType.bool
A, B = [[1.0, -2.5], [3.0, 0.0]], [[2.0, 2.0], [-4.0, 5.0]]
CASES: dict[str, tuple[Callable[[Value], Value], Any]] = {
    "add": (lambda x: constant(A) + constant(B), np.add(A, B)),
    "sub": (lambda x: constant(A) - constant(B), np.subtract(A, B)),
    "div": (lambda x: constant(A) / constant(B), np.divide(A, B)),
    "div of integers": (
        lambda x: ops.floor_div(constant([7, -7], I32), constant([2, 2], I32)),
        [3, -4],
    ),
    "select": (
        lambda x: ops.where(constant(A) > constant(B), constant(A), constant(B)),
        np.maximum(A, B),
    ),
    "not": (lambda x: ops.logical_not(constant([True, False], BOOL)), [False, True]),
    "to bool": (lambda x: constant([0.5, 0.0, np.nan]).cast(BOOL), [True, False, True]),
    "from bool": (lambda x: constant([True, False], BOOL).cast(F32), [1.0, 0.0]),
    "to integers": (lambda x: constant([2.9, -2.9]).cast(I32), [2, -2]),
    "to floats": (lambda x: constant([3, -3], I32).cast(F32), [3.0, -3.0]),
    "not finite": (lambda x: constant([1.0, np.inf]).cast(DType.float16), [1.0, np.inf]),
    "reshape": (lambda x: ops.reshape(constant(A), [4]), np.reshape(A, [4])),
    "transpose": (lambda x: ops.transpose(constant(A), 0, 1), np.transpose(A)),
    "concat": (lambda x: ops.concat([constant(A), constant(B)], 1), np.concatenate([A, B], 1)),
    "shape": (lambda x: ops.shape_to_tensor([x.shape[1], 7]), [4, 7]),
    "limit": (lambda x: -constant(np.ones(64)), -np.ones(64)),
}
STAYS: dict[str, tuple[Callable[[Value], Value], str]] = {
    "of an input": (lambda x: -x, "mo.neg"),
    "above the limit": (lambda x: -constant(np.ones(65)), "mo.neg"),
    "infinity as an integer": (lambda x: constant([np.inf]).cast(I32), "mo.cast"),
    "NaN as an integer": (lambda x: constant([1.0, np.nan]).cast(DType.int64), "mo.cast"),
    "an operand that is no constant": (lambda x: x[0] + constant(np.ones(4)), "mo.add"),
    "a size that is not known": (lambda x: ops.shape_to_tensor(x.shape), "mo.shape_to_tensor"),
    "an op without a rule": (lambda x: ops.tanh(constant(A)), "mo.tanh"),
}


@pytest.mark.parametrize("name", CASES)
def test_folded(name: str) -> None:
    build, expected = CASES[name]
    found = folded(build)
    assert not isinstance(found, str), found
    assert found.shape == np.shape(expected)
    np.testing.assert_array_equal(found.astype(np.float64), np.asarray(expected, np.float64))


@pytest.mark.parametrize("name", STAYS)
def test_not_folded(name: str) -> None:
    build, expected = STAYS[name]
    assert folded(build) == expected
