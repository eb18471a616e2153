"""Stages recorded calls into a graph, with constants or symbols for their sizes and numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from max.dtype import DType
from max.experimental.programs.argument_trees import ArgumentTree
from max.experimental.programs.number_patterns import Pattern, Symbol
from max.graph import DeviceRef, Dim, Graph, TensorType, TensorValue, Value, ops
from max.graph.ops.staging.promotion import greatest_integer
from max.mlir import DimExpr, walk
from max.mlir.conditions import Condition

__all__ = [
    "Staged", "Step", "Structure", "VaryingNumberError", "stage", "values_of", "weight_name", "with_dims",
]  # fmt: skip

SCALAR_OPS = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "floor_div",
        "mod",
        "equal",
        "not_equal",
        "greater",
        "greater_equal",
        "where",
        "max",
        "min",
    }
)
"""Ops whose numbers are operands: a number that varies is an input of the program."""
SIZE_OPS = frozenset(
    {
        "reshape",
        "broadcast_to",
        "slice_tensor",
        "split",
        "range",
        "_uniform",
        "_gaussian",
        "_custom",
    }
)
"""Ops whose integers are sizes or bounds: one that varies is a symbol."""

_CPU = DeviceRef.CPU()
Structure = Callable[[list[Any]], Any]
"""Makes the structure that an op returns, of a list of its tensors."""


class VaryingNumberError(ValueError):
    """An op takes a number that varies neither as an operand nor as a size."""


class Step(NamedTuple):
    """A call in a program."""

    arguments: ArgumentTree
    inputs: tuple[tuple[int, int], ...]
    """The step and result that each tensor comes from; for inputs of the program -1 and their index."""
    numbers: int
    """The number of numbers that its arguments take."""
    place: tuple[str, int]
    """The source location of its ops."""


class Staged(NamedTuple):
    """A graph, and its inputs besides the tensors."""

    graph: Graph
    sizes: list[int]
    """The symbols of sizes that inputs of their own introduce: uint8 tensors of that size, after the tensors."""
    scalars: list[int]
    """The symbols of numbers, whose values are inputs of rank 0, after the sizes."""
    structure: Structure | None
    """Makes the structure that the last step returns: None for one tensor, else `list`, `tuple`, …."""
    values: list[list[TensorValue]]
    """The results of each step."""
    exact: list[Condition]
    """The conditions under which integers that vary are exact in the dtype of the floats that they meet."""

    def conditions(self) -> list[Condition]:
        """The conditions on sizes and numbers under which the ops are valid."""
        return [*self.exact, *(c for op in walk(self.graph.mlir_op) for c in op.conditions())]


def values_of(results: Any) -> tuple[Structure | None, list[TensorValue]]:
    """Splits the results of an op into their structure (None for one tensor) and a list of tensors."""
    if isinstance(results, TensorValue):
        return None, [results]
    if isinstance(results, list | tuple) and all(isinstance(item, Value) for item in results):
        kind = type(results)
        return getattr(kind, "_make", kind), [item.tensor for item in results]
    raise TypeError(
        f"an op on eager tensors returned {results!r}, expected a tensor, or a list or tuple of tensors"
    )


def weight_name(index: int) -> str:
    """The name of the weight in place of an input."""
    return f"leaf{index}"


def with_dims(pattern: Pattern) -> list[Any]:
    """The positions of a pattern: constants, and dims of the symbols ``s0``, ``s1``, …."""
    dims = [Dim(f"s{number}") for number in range(pattern.symbols)]
    return [
        dims[p.number] * p.factor + p.offset if isinstance(p, Symbol) else p
        for p in pattern.positions
    ]


def stage(
    steps: Sequence[Step],
    kinds: Sequence[tuple[DType, int, DeviceRef]],
    pattern: Pattern,
    weights: Collection[int] = (),
) -> Staged:
    """Stages steps into a new graph, which has no outputs yet.

    Args:
        steps: The calls, in order.
        kinds: Dtype, rank and device of the tensors that are the inputs of the program.
        pattern: The sizes of the inputs, and the numbers of the steps after them.
        weights: The inputs that become weights, see `weight_name`; their sizes do not vary.

    Raises:
        VaryingNumberError: A number varies that must be a constant.
        ValueError, TypeError: What an op raises for tensors that do not fit.
    """
    sizes = with_dims(pattern)
    types: list[TensorType] = []
    end = 0
    for dtype, rank, device in kinds:
        types.append(TensorType(dtype, sizes[end : end + rank], device))
        end += rank
    introduced = {p.number for p in pattern.positions[:end] if isinstance(p, Symbol)}
    size_symbols, scalar_symbols = _uses(steps, pattern, end, introduced)
    # a symbol that is the size of no tensor is bound by an input of that size, never read
    symbol_inputs = [TensorType(DType.uint8, (Dim(f"s{number}"),), _CPU) for number in size_symbols]
    scalars = [TensorType(pattern.dtype(number), (), _CPU) for number in scalar_symbols]
    bound = [type_ for index, type_ in enumerate(types) if index not in weights]
    graph = Graph("eager", input_types=[*bound, *symbol_inputs, *scalars])
    graph_inputs = [value.tensor for value in graph.inputs]
    values_by_symbol = dict(
        zip(scalar_symbols, graph_inputs[len(graph_inputs) - len(scalars) :], strict=True)
    )
    structure: Structure | None = None
    values: list[list[TensorValue]] = []
    exact: list[Condition] = []
    with graph:
        unpacked_inputs = iter(graph_inputs)
        inputs = [
            ops.constant_external(weight_name(index), type_)
            if index in weights
            else next(unpacked_inputs)
            for index, type_ in enumerate(types)
        ]
        for step in steps:
            tensors = [inputs[i] if s < 0 else values[s][i] for s, i in step.inputs]
            numbers: list[Any] = []
            for index in range(end, end + step.numbers):
                position = pattern.positions[index]
                if not isinstance(position, Symbol) or step.arguments.op.__name__ in SIZE_OPS:
                    numbers.append(sizes[index])
                    continue
                # cast to the dtype that the number would have as a constant
                value = values_by_symbol[position.number]
                if position.factor != 1 or position.offset:
                    value = value * position.factor + position.offset
                dtype = _float_operand(tensors).dtype
                if pattern.dtype(position.number) is DType.int64:
                    exact.append(_exact_integer(position, dtype))
                numbers.append(value.cast(dtype))
            end += step.numbers
            with graph.at_place(*step.place):
                structure, results = values_of(step.arguments.call(tensors, numbers))
            values.append(results)
    return Staged(graph, size_symbols, scalar_symbols, structure, values, exact)


def _exact_integer(symbol: Symbol, dtype: DType) -> Condition:
    """An integer is exact in a float dtype; a call with another one is staged with it, which is an error."""
    greatest = greatest_integer(dtype)
    value = DimExpr.symbol(f"s{symbol.number}") * symbol.factor + symbol.offset
    # squares, as symbols of conditions are never negative
    return Condition.at_least(
        DimExpr.constant(greatest * greatest), value * value, f"an integer beside {dtype.name}"
    )


def _float_operand(tensors: Sequence[TensorValue]) -> TensorValue:
    for tensor in tensors:
        if tensor.dtype.is_float():
            return tensor
    raise VaryingNumberError("a number that varies meets integers, whose range it may leave")


def _uses(
    steps: Sequence[Step], pattern: Pattern, start: int, new_symbols: set[int]
) -> tuple[list[int], list[int]]:
    """The symbols that need inputs of their own: for sizes, and for numbers."""
    sizes: dict[int, None] = {}
    scalars: dict[int, None] = {}
    for step in steps:
        for position in pattern.positions[start : start + step.numbers]:
            if not isinstance(position, Symbol):
                continue
            name = step.arguments.op.__name__
            if name in SCALAR_OPS:
                scalars[position.number] = None
            elif name not in SIZE_OPS or pattern.dtype(position.number) is not DType.int64:
                raise VaryingNumberError(f"{name} takes a number that varies as a constant only")
            elif position.number in pattern.signed:
                raise VaryingNumberError(f"{name} counts negative bounds from the end")
            elif position.number not in new_symbols:
                sizes[position.number] = None
        start += step.numbers
    return list(sizes), list(scalars)
