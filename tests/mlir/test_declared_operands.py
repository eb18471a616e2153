"""Ops with declared operands: calls that fit are staged, and each way to spoil one is an error at staging."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from max import mlir
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph.ops.staging.stage import stage_declared
from tests.cpu_kernels.test_interpreted import CASES

CPU, OTHER = DeviceRef.CPU(), DeviceRef.CPU(1)
Type = TensorType | BufferType
Call = tuple[list[Type], dict[str, Any], list[TensorType]]

DECLARED = {name for name, op in mlir.OPS.items() if op.spec.signature}
EXAMPLES = {name: case for name, case in CASES.items() if case[0] in DECLARED}


def present(symbol: str, attrs: Mapping[str, Any], count: int) -> list[Any]:
    """The declared operands that a call with these attributes has."""
    operands = [o for o in mlir.OPS[symbol].spec.signature if not o.present or o.present(attrs)]
    return operands if len(operands) == count else [o for o in operands if not o.optional]


def example(name: str) -> Call:
    """The types of a call of the kernels' tests, its attributes, and the types of its results."""
    symbol, arrays, results, attrs = EXAMPLES[name]
    types: list[Type] = []
    for operand, array in zip(present(symbol, attrs, len(arrays)), arrays, strict=True):
        kind = BufferType if operand.is_buffer else TensorType
        types.append(kind(DType.from_numpy(array.dtype), array.shape, CPU))
    outputs = [
        TensorType(DType.from_numpy(np.dtype(dtype)), shape, CPU) for dtype, shape in results
    ]
    return types, dict(attrs), outputs


def staged(symbol: str, call: Call) -> list[Any]:
    types, attrs, outputs = call
    free = mlir.OPS[symbol].spec.check is not None
    with Graph("g", input_types=types) as graph:
        return stage_declared(
            symbol.removeprefix("mo."), list(graph.inputs), attrs, outputs if free else None
        )


def test_each_declared_op_has_an_example() -> None:
    assert {case[0] for case in EXAMPLES.values()} == DECLARED


@pytest.mark.parametrize("name", EXAMPLES)
def test_calls_of_the_kernels_are_staged(name: str) -> None:
    symbol, (types, attrs, outputs) = EXAMPLES[name][0], example(name)
    results = staged(symbol, (types, attrs, outputs))
    assert [result.type for result in results] == outputs


def with_type(call: Call, index: int, type_: Type) -> Call:
    types, attrs, outputs = call
    return [*types[:index], type_, *types[index + 1 :]], attrs, outputs


def changed(type_: Type, **changes: Any) -> Type:
    fields = {"dtype": type_.dtype, "shape": type_.shape, "device": type_.device, **changes}
    return type(type_)(**fields)


def spoilt(symbol: str, call: Call) -> Iterator[tuple[str, Call]]:
    """Calls with one fault each, and the word of the message that names it."""
    types, attrs, outputs = call
    signature = present(symbol, attrs, len(types))
    required = {o.name for o in mlir.OPS[symbol].spec.signature if not o.optional}
    first = next((i for i, o in enumerate(signature) if not o.on_any_device), None)
    for index, operand in enumerate(signature):
        type_ = types[index]
        if operand.name in required or index < len(types) - 1:
            yield "operands", ([*types[:index], *types[index + 1 :]], attrs, outputs)
        kind = TensorType if operand.is_buffer else BufferType
        swapped = kind(type_.dtype, type_.shape, type_.device)
        yield operand.name, with_type(call, index, swapped)
        wrong = next(
            d for d in (DType.bool, DType.float64, DType.uint16) if d not in operand.dtypes
        )
        yield operand.name, with_type(call, index, changed(type_, dtype=wrong))
        yield operand.name, with_type(call, index, changed(type_, shape=[*type_.shape, 1]))
        if operand.rank:
            yield operand.name, with_type(call, index, changed(type_, shape=type_.shape[1:]))
        if not operand.on_any_device and index != first:
            yield "different devices", with_type(call, index, changed(type_, device=OTHER))
    yield "operands", ([*types, types[-1], types[-1], types[-1]], attrs, outputs)
    yield "unknown attribute", (types, {**attrs, "surplus": 1}, outputs)
    spec = mlir.OPS[symbol].spec
    for name in spec.attributes:
        rest = {key: value for key, value in attrs.items() if key != name}
        yield "is missing", (types, rest, outputs)
    for name in (*spec.attributes, *spec.optional):
        yield f"attribute '{name}'", (types, {**attrs, name: [1]}, outputs)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_fault_is_an_error_where_the_op_is_staged(name: str) -> None:
    symbol, call = EXAMPLES[name][0], example(name)
    for word, fault in spoilt(symbol, call):
        with pytest.raises((ValueError, TypeError)) as raised:
            staged(symbol, fault)
        message = str(raised.value)
        assert symbol.removeprefix("mo.") in message and word in message, (message, word)


def sizes(call: Call) -> Iterator[tuple[int, int]]:
    for index, type_ in enumerate(call[0]):
        yield from ((index, axis) for axis in range(type_.rank))


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_sizes_are_refused_or_give_results_of_fitting_sizes(name: str) -> None:
    """No size makes staging raise anything but an error of the op."""
    symbol, call = EXAMPLES[name][0], example(name)
    choose = random.Random(name)
    for index, axis in sizes(call):
        for size in ("other", 0, 1, choose.randrange(2, 70)):
            shape: Sequence[Any] = call[0][index].shape
            shape = [*shape[:axis], size, *shape[axis + 1 :]]
            fault = with_type(call, index, changed(call[0][index], shape=shape))
            try:
                results = staged(symbol, fault)
            except (ValueError, TypeError) as error:
                assert symbol.removeprefix("mo.") in str(error)
            else:
                ranks = [result.rank for result in results]
                assert ranks == [output.rank for output in call[2]]
