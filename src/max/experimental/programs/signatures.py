"""Signatures of calls: an argument tree, the types of its tensors and its numbers; and the types of its results.

A call is staged into a graph of its own when its signature is new, which also raises errors. Calls that
differ only in sizes and numbers are a family. From its third member on a family is staged with symbols, and the sizes
of later results are evaluated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from max._host.process_caches import process_cache
from max.dtype import DType
from max.experimental.programs.argument_trees import ArgumentTree
from max.experimental.programs.number_patterns import Details, Pattern
from max.experimental.programs.staging import Staged, Step, Structure, stage
from max.experimental.programs.value_types import CellType, Kind, cell_type
from max.graph import DeviceRef, TensorValue
from max.mlir.conditions import Condition, first_unmet
from max.mlir.dims import DimExpr

__all__ = ["EXAMPLES", "Family", "Signature", "signature_of"]

EXAMPLES = 2
"""The number of sets of sizes for which a computation is specialized before its sizes become symbols."""
_SIGNATURES = 1 << 15
"""The maximum number of signatures; the oldest are dropped."""
_FAMILIES = 1 << 13
"""The maximum number of families; those without a new signature for longest are dropped."""
_PATTERNS = 8
"""The maximum number of patterns of a family; the oldest are dropped."""
_FAILURES = 2
"""The number of failures to stage a family with symbols after which it is always specialized."""


class _Symbolic(NamedTuple):
    """The results of a family for the sizes of a pattern."""

    pattern: Pattern
    conditions: list[Condition]
    shapes: list[tuple[DimExpr, ...]]


class Family:
    """Calls that differ only in sizes and numbers.

    Args:
        arguments: Their argument tree.
        kinds: Dtype, rank and device of each tensor.
        numbers: The number of numbers among their arguments.
    """

    __slots__ = (
        "_examples",
        "_failures",
        "_outputs",
        "_symbolic",
        "kinds",
        "structure",
        "arguments",
        "_step",
    )

    def __init__(self, arguments: ArgumentTree, kinds: tuple[Kind, ...], numbers: int) -> None:
        self.arguments, self.kinds = arguments, kinds
        self.structure: Structure | None = None
        self._step = Step(arguments, tuple([(-1, i) for i in range(len(kinds))]), numbers, ("", 0))
        self._outputs: list[tuple[DType, DeviceRef]] = []
        self._examples: list[Details] = []
        self._symbolic: list[_Symbolic] = []
        self._failures = 0

    def results(self, details: Details, place: tuple[str, int]) -> list[CellType | None]:
        """The types of the results; None for one whose sizes only a run tells.

        Args:
            details: The sizes of the tensors, and the numbers.
            place: The source location for errors.

        Raises:
            ValueError, TypeError: What the op raises for tensors that do not fit.
        """
        cached_types = self._evaluated_type(details)
        if cached_types is not None:
            return cached_types
        staged = self._stage(Pattern(details), place)
        self.structure = staged.structure
        values = staged.values[0]
        types = [_static_type(value) for value in values]
        if None not in types:
            self._outputs = [(value.dtype, value.device) for value in values]
            self._learn(details, place)
        return types

    def _evaluated_type(self, details: Details) -> list[CellType | None] | None:
        for symbolic in reversed(self._symbolic):
            values = symbolic.pattern.match(details)
            if values is None:
                continue
            # without floats, which are no sizes and may be infinite
            sizes = {f"s{i}": value for i, value in enumerate(values) if isinstance(value, int)}
            if first_unmet(symbolic.conditions, sizes) is not None:
                continue
            shapes = [tuple([dim.evaluate(sizes) for dim in shape]) for shape in symbolic.shapes]
            if any([0 in shape for shape in shapes]):
                return None  # staged with its sizes: bounds of an empty slice are no conditions
            return [
                cell_type(dtype, shape, device)
                for shape, (dtype, device) in zip(shapes, self._outputs, strict=True)
            ]
        return None

    def _stage(self, pattern: Pattern, place: tuple[str, int]) -> Staged:
        return stage([self._step._replace(place=place)], self.kinds, pattern)

    def _learn(self, details: Details, place: tuple[str, int]) -> None:
        """Stages the family with symbols if enough members were recorded."""
        self._examples.append(details)
        if len(self._examples) <= EXAMPLES or self._failures >= _FAILURES:
            return
        pattern = Pattern.covering(self._examples)
        del self._examples[0]
        try:
            staged = self._stage(pattern, place)
        except (ValueError, TypeError, IndexError):
            self._failures += 1
            return
        conditions = staged.conditions()
        shapes = [tuple(value.mlir_type.shape) for value in staged.values[0]]
        symbols = {f"s{number}" for number in range(pattern.symbols)}
        # a size that only a run tells cannot be evaluated for later members
        if any(name not in symbols for shape in shapes for dim in shape for name in dim.symbols):
            self._failures += 1
            return
        self._symbolic = [*self._symbolic[1 - _PATTERNS :], _Symbolic(pattern, conditions, shapes)]


class Signature:
    """A call without its tensors. Equal signatures are one object while they are kept.

    Args:
        family: Its family.
        numbers: The numbers among its arguments.
        results: The types of its results; None for one whose sizes only a run tells.
    """

    __slots__ = ("family", "numbers", "results")

    def __init__(self, family: Family, numbers: Details, results: list[CellType | None]) -> None:
        self.family, self.numbers, self.results = family, numbers, results


_families: dict[object, Family] = process_cache({})
_signatures: dict[object, Signature] = process_cache({})


def signature_of(
    fields: tuple[Any, tuple[Any, ...], tuple[str, ...]],
    types: tuple[CellType, ...],
    numbers: Details,
    place: tuple[str, int],
) -> Signature:
    """The signature of a call.

    Args:
        fields: The fields of its argument tree.
        types: The types of the tensors that it reads.
        numbers: The numbers among its arguments.
        place: The source location for errors.

    Raises:
        ValueError, TypeError: What the op raises for tensors that do not fit.
    """
    key = (fields, types, numbers)
    signature = _signatures.get(key)
    if signature is None:
        arguments = ArgumentTree(*fields)
        kinds = tuple([type_.kind for type_ in types])
        family_key = (arguments, kinds, tuple([type(number) for number in numbers]))
        family = _families.get(family_key)
        if family is None:
            family = Family(arguments, kinds, len(numbers))
        details = (*[size for type_ in types for size in type_.shape], *numbers)
        signature = Signature(family, numbers, family.results(details, place))
        # at the end
        _families.pop(family_key, None)
        if len(_families) >= _FAMILIES:
            _families.pop(next(iter(_families)))
        _families[family_key] = family
        if len(_signatures) >= _SIGNATURES:
            _signatures.pop(next(iter(_signatures)))
        _signatures[key] = signature
    return signature


def _static_type(value: TensorValue) -> CellType | None:
    shape = value.mlir_type.shape
    if not all(dim.is_static for dim in shape):
        return None
    return cell_type(value.dtype, tuple([dim.value for dim in shape]), value.device)
