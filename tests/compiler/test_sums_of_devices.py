"""Collectives as casts, sums, joins and transfers; no other pass runs."""

from __future__ import annotations

import pytest
from xdsl.ir import SSAValue

from max._compiler.passes.collectives import expand_collectives
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import MoOp, clone_module, entry, verify_module
from max.mlir import TensorType as MoTensorType
from max.nn import Signals


def source(value: SSAValue) -> str:
    """How a value is computed: names of ops with the dtypes of casts, numbers of inputs."""
    owner = value.owner
    if not isinstance(owner, MoOp):
        return str(value.index)
    name = owner.name.removeprefix("mo.")
    assert isinstance(value.type, MoTensorType)
    if name in ("cast", "transfer"):
        name = value.type.dtype.name if name == "cast" else f"to {value.type.device.id}"
    return f"{name}({', '.join(map(source, owner.operands))})"


def summed(dtype: DType, count: int) -> list[str]:
    """The results of a sum over devices."""
    devices = [DeviceRef.GPU(i) for i in range(count)]
    tensors = [TensorType(dtype, [3, 4], device) for device in devices]
    signals = Signals(devices).input_types()
    with Graph("g", input_types=[*tensors, *signals]) as graph:
        inputs = [value.tensor for value in graph.inputs[:count]]
        buffers = [value.buffer for value in graph.inputs[count:]]
        # the second sum waits for the first
        ops.allreduce.sum(inputs, buffers)
        graph.output(*ops.allreduce.sum(inputs, buffers))
    module = clone_module(graph.to_mlir())
    expand_collectives(entry(module).block)
    verify_module(module)
    users = {use.operation for op in module.walk() for value in op.results for use in value.uses}
    assert users <= {*module.walk()}
    last = entry(module).block.last_op
    assert last is not None
    return [source(value) for value in last.operands]


@pytest.mark.parametrize("dtype", [DType.float32, DType.float64, DType.int8, DType.int32])
def test_wide_dtypes_and_integers_are_summed_as_they_are(dtype: DType) -> None:
    assert summed(dtype, 3) == [
        "add(add(0, to 0(1)), to 0(2))",
        "to 1(add(add(0, to 0(1)), to 0(2)))",
        "to 2(add(add(0, to 0(1)), to 0(2)))",
    ]


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16])
def test_narrow_floats_are_summed_in_float32(dtype: DType) -> None:
    total = f"{dtype.name}(add(float32(0), float32(to 0(1))))"
    assert summed(dtype, 2) == [total, f"to 1({total})"]


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32])
def test_the_sum_of_one_is_itself(dtype: DType) -> None:
    assert summed(dtype, 1) == ["0"]
