"""Operation counts and names of regions, counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from max._compiler.lowering.flops import op_flops, region_flops, region_name
from max._compiler.mok import RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.passes.fuse import fuse
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.mlir import DimExpr, clone_module, entry
from max.mlir.ops.elementwise import CastOp

pytestmark = pytest.mark.any_target
CPU, F32 = DeviceRef.CPU(), DType.float32
N = DimExpr.symbol("n")
Value = TensorValue


def region_of(build: Callable[[Value], Value]) -> RegionOp:
    """The region of a function of `n` rows of 8 floats."""
    with Graph("g", input_types=[TensorType(F32, ["n", 8], CPU)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    module = clone_module(graph.to_mlir())
    fuse(entry(module).block)
    (region,) = [op for op in ops_of(entry(module).block) if isinstance(op, RegionOp)]
    return region


def constant(size: int) -> Value:
    return ops.constant([1.0] * size, F32, CPU)


@pytest.mark.parametrize(
    ("build", "flops", "name"),
    [
        (lambda x: ops.tanh(x), 1, "tanh"),
        (lambda x: ops.tanh(x) * x - x, 3, "tanh+mul+sub"),
        # a cast counts nothing
        (lambda x: ops.cast(ops.cast(x, DType.int32), F32) + x, 1, "cast+cast+add"),
        (lambda x: ops.cast(x, DType.int32), 0, "cast"),
        # one per element that is read
        (lambda x: ops.sum(x * x, axis=1), 2, "mul+reduce_sum"),
        (lambda x: ops.softmax(x), 4, "softmax"),
        (lambda x: ops.layer_norm(x, constant(8), constant(8), 1e-5) * 2.0, 7, "layer_norm+mul"),
        (lambda x: ops.reshape(x, ["n", 8, 1]) + constant(3), 3, "add"),
    ],
)
def test_regions(build: Callable[[Value], Value], flops: int, name: str) -> None:
    region = region_of(build)
    count = region_flops(region)
    assert region_name(region) == name
    assert (count if isinstance(count, int) else count.evaluate({"n": 5})) == flops * 5 * 8


def test_single_ops() -> None:
    body = ops_of(region_of(lambda x: ops.cast(x, DType.int32)).block)
    (cast,) = [op for op in body if type(op) is CastOp]
    assert op_flops(cast, cast.results) == 0
    with Graph("g", input_types=[TensorType(F32, ["n", 8], CPU)]) as graph:
        graph.output(graph.inputs[0].tensor @ ops.constant([[1.0] * 3] * 8, F32, CPU))
    (product,) = [op for op in ops_of(entry(graph.to_mlir()).block) if op.name == "mo.matmul"]
    assert op_flops(product, product.results) == N * (2 * 8 * 3)


def test_a_region_that_only_copies() -> None:
    region = region_of(ops.tanh)
    (tanh,) = [op for op in ops_of(region.block) if op.name == "mo.tanh"]
    tanh.results[0].replace_all_uses_with(tanh.operands[0])
    tanh.detach()
    tanh.erase()
    assert (region_name(region), region_flops(region)) == ("copy", 0)
