"""The base class of `mo` ops, the record that specifies an op, and the table of all ops."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from xdsl.ir import (
    Attribute,
    Block,
    ErasedSSAValue,
    Operation,
    OpTraits,
    Region,
    SSAValue,
)
from xdsl.traits import IsTerminator
from xdsl.utils.exceptions import VerifyException

from max._dataclass import dataclass
from max.mlir.attributes import from_attr, to_attr
from max.mlir.builtin import UNKNOWN_LOC, LocationAttr
from max.mlir.conditions import MOST_ELEMENTS, Condition, count_conditions, size_conditions
from max.mlir.dims import DimExpr
from max.mlir.operand import Operand
from max.mlir.types import BufferType, ChainType, ShapedType, TensorType, short_types

if TYPE_CHECKING:
    from xdsl.parser import Parser
    from xdsl.printer import Printer

__all__ = ["OPS", "MoOp", "OpSpec", "build", "check_attributes", "define", "infer_types"]

Types = Sequence[Attribute]
Attrs = Mapping[str, Any]
Infer = Callable[[Types, Attrs], Types]
Check = Callable[[Types, Types, Attrs], None]
Conditions = Callable[[Types, Types, Attrs], Iterable[Condition]]
Flops = Callable[[Types, Types], DimExpr]


@dataclass(frozen=True)
class OpSpec:
    """The specification of an op.

    Either `infer` computes the result types from operand types and attributes, and the verifier compares, or the result
    types are free within the limits of `check` (a reshape, a custom op). Both raise ValueError or TypeError with a
    message that starts with the op's name.
    """

    name: str
    """The full name: ``mo.add``."""
    operands: tuple[int, int | None]
    """The minimum and maximum number of operands; a maximum of None is unlimited."""
    results: int | None
    """The number of results; None for any number."""
    attributes: Mapping[str, type[Any] | tuple[type[Any], ...]] = field(
        default_factory=dict[str, Any]
    )
    """The Python types of the required attributes."""
    optional: Mapping[str, type[Any] | tuple[type[Any], ...]] = field(
        default_factory=dict[str, Any]
    )
    """The Python types of the optional attributes."""
    infer: Infer | None = None
    """Computes the result types from operand types and attributes."""
    check: Check | None = None
    """Checks operand types, result types and attributes."""
    conditions: Conditions | None = None
    """Computes the run-time conditions over sizes, from operand types, result types and attributes. Conditions that no
    sizes meet are errors of `infer` and `check`; conditions that all sizes meet may be included."""
    elementwise: bool = False
    """Whether result element i depends on elements i of the operands only; all shapes are equal."""
    pure: bool = True
    """Whether the op may be removed, duplicated or moved. An op with a chain operand may not, whatever this says."""
    terminator: bool = False
    """Whether the op ends a block."""
    signature: tuple[Operand, ...] = ()
    """The declared operands, without the chain; empty where `infer` or `check` looks at them itself."""
    chained: bool = False
    """Whether a declared op has side effects: its last operand and its last result are a chain."""
    view: bool = False
    """Whether the result has the operand's elements: no kernel runs if a strided layout describes it."""
    movable: bool = False
    """Whether a view may move before element-wise ops."""
    cheap: bool = False
    """Whether an element-wise op costs so little that it may be repeated for each element of a broadcast."""
    in_order: bool = False
    """Whether a view's elements, repetitions aside, are all those of its operand, in their order."""
    resizes: bool = False
    """Whether a view selects elements of its operand, or repeats them."""
    reduction: bool = False
    """Whether the op reduces one axis, by a kernel of its region."""
    row_flops: int = 0
    """For an op that needs all elements along one axis and can be part of a region: its approximate arithmetic
    operations for each element. 0 for all other ops."""
    region_size: int = 1
    """The element-wise ops that the op counts as in a region, where code size bounds the region."""
    flops: Flops | None = None
    """Computes the multiplications and additions of a product, a convolution or attention, or the tests of trees, from
    operand and result types; None: unknown."""
    takes_epilogue: bool = False
    """Whether the op's kernels may compute element-wise ops on each result before they store it."""
    takes_norm: bool = False
    """Whether the op's kernels may compute the RMS norm of their left operand."""
    matmul: bool = False
    """Whether the op is a product of matrices in the form in which it is staged."""
    packable: bool = False
    """Whether the op's second operand may be packed if it is a weight."""
    source: bool = False
    """Whether the result is a constant or a weight."""
    borrows: bool = False
    """Whether the results are memory that the model or the caller owns."""
    reads_strided: bool = False
    """Whether the op reads operands of any layout, beside element-wise ops and those with `row_flops`."""
    on_any_device: bool = False
    """Whether operands may be in any memory: the host carries the op out, or its callees place the operands."""
    removable: bool = False
    """Whether the op may be removed if its results are unused, although it is not pure."""
    may_raise: bool = False
    """Whether the kernel of a region with the op raises for some values of its operands."""
    size_rule: str = ""
    """How the host computes result sizes from the values of operands: range, slice or count; empty: it does not."""
    introduces_symbols: bool = False
    """Whether result types may have symbols that no operand binds; their sizes are computed when the graph runs."""
    separates: bool = False
    """Whether values that are live across the op wait in memory: products before and after it are not merged."""
    hoistable: bool = True
    """Whether the op may run once, when a model is loaded, if it depends on weights and constants only."""
    takes: str = ""
    """The operands for the reference of the dialect, with their shapes."""
    gives: str = ""
    """The results for the reference, where they do not follow from `doc`."""
    doc: str = ""
    """What the op computes, and what its attributes mean, for the reference."""

    @property
    def mnemonic(self) -> str:
        """The name without its dialect: ``add``."""
        return self.name.removeprefix("mo.")


class MoOp(Operation):
    """An op of the `mo` dialect. `define` creates the class of each op from its `OpSpec`."""

    spec: ClassVar[OpSpec]
    traits: ClassVar[OpTraits] = OpTraits(lambda: ())
    """What xDSL's verifier looks at; whether an op may be removed is in its spec."""
    _verified_state: tuple[object, ...] | None = None
    """What the last verification looked at, if the op was right."""

    @classmethod
    def create(
        cls,
        *,
        operands: Sequence[SSAValue] = (),
        result_types: Sequence[Attribute] = (),
        properties: Mapping[str, Attribute] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        location: LocationAttr | None = None,
        successors: Sequence[Block] = (),
        regions: Sequence[Region] = (),
    ) -> Self:
        """Creates an op, not yet in a block; xDSL imports its `builtin` dialect for an op without a location."""
        return super().create(
            operands=operands,
            result_types=result_types,
            properties=properties or {},
            attributes=attributes or {},
            location=UNKNOWN_LOC if location is None else location,
            successors=successors,
            regions=regions,
        )

    def attr(self, name: str) -> Any:
        """The Python value of an attribute.

        Raises:
            KeyError: The op has no such attribute.
        """
        return from_attr(self.attributes[name])

    def attr_or(self, name: str, default: Any) -> Any:
        """The Python value of an attribute, or `default` if the op does not have it."""
        attr = self.attributes.get(name)
        return default if attr is None else from_attr(attr)

    @property
    def attrs(self) -> dict[str, Any]:
        """The Python values of all attributes."""
        return {name: from_attr(attr) for name, attr in self.attributes.items()}

    @property
    def is_pure(self) -> bool:
        """Whether the op may be removed if unused, duplicated and moved."""
        return self.spec.pure and not any(
            isinstance(v.type, ChainType) for v in (*self._operands, *self.results)
        )

    def conditions(self) -> list[Condition]:
        """The run-time conditions: those of the spec, and valid sizes of the results; without proved ones."""
        spec = self.spec
        conditions: list[Condition] = []
        if spec.conditions is not None:
            operand_types = [v.type for v in self._operands]
            result_types = [v.type for v in self.results]
            conditions += spec.conditions(operand_types, result_types, self.attrs)
        for result in self.results:
            if isinstance(result.type, ShapedType):
                shape = result.type.shape
                conditions += size_conditions(spec.mnemonic, shape)
                # an element-wise result is as large as its operands
                if not spec.elementwise:
                    operands = [
                        v.type.shape for v in self._operands if isinstance(v.type, ShapedType)
                    ]
                    conditions += count_conditions(spec.mnemonic, shape, operands)
        return [condition for condition in conditions if not condition.always_holds]

    def verify(self, verify_nested_ops: bool = True) -> None:
        """Verifies the op, unless nothing changed since it was verified: a pass changes few ops."""
        block = self.parent
        if (
            # the rules of a call, and those about blocks, depend on more than the op
            type(self).verify_ is not MoOp.verify_
            or self.regions
            or self._successors
            or block is None
            or block.last_op is self
        ):
            super().verify(verify_nested_ops)
            return
        operands = self._operands
        # types and attributes are immutable
        looked_at = (
            [v.type for v in operands],
            [v.type for v in self.results],
            [*self.attributes.items()],
        )
        if looked_at != self._verified_state or any(
            isinstance(v, ErasedSSAValue) for v in operands
        ):
            super().verify(verify_nested_ops)
            self._verified_state = looked_at

    def verify_(self) -> None:
        """Checks the op against its `OpSpec`: place, numbers of operands and results, attributes, and result types."""
        spec = self.spec
        if spec.terminator and self.parent is not None and self.parent.last_op is not self:
            raise VerifyException(f"{spec.name} is not the last op of its block")
        operand_types = [v.type for v in self._operands]
        result_types = [v.type for v in self.results]
        low, high = spec.operands
        if len(operand_types) < low or (high is not None and len(operand_types) > high):
            count = str(low) if low == high else f"{low} to {high}" if high else f"at least {low}"
            raise VerifyException(f"{spec.name} takes {count} operands, got {len(operand_types)}")
        if spec.results is not None and len(result_types) != spec.results:
            raise VerifyException(
                f"{spec.name} has {spec.results} results, got {len(result_types)}"
            )
        attrs = self._verified_attributes()
        try:
            if spec.infer is not None:
                expected = spec.infer(operand_types, attrs)
                if list(expected) != result_types:
                    raise ValueError(
                        f"{spec.mnemonic}: the result types are {short_types(result_types)}, "
                        f"expected {short_types(expected)}"
                    )
            if spec.check is not None:
                spec.check(operand_types, result_types, attrs)
        except (ValueError, TypeError) as error:
            raise VerifyException(str(error)) from error
        except (AttributeError, LookupError) as error:
            # elements of a list attribute of another kind, which only a text can have
            shown = ", ".join(f"{name} = {attr}" for name, attr in self.attributes.items())
            raise VerifyException(
                f"{spec.mnemonic}: the attributes {{{shown}}} are not of the form that the op has: {error}"
            ) from error

    def _verified_attributes(self) -> dict[str, Any]:
        """The op's attributes as Python values; raises for unknown, missing and mistyped ones."""
        values = {name: from_attr(attr) for name, attr in self.attributes.items()}
        try:
            check_attributes(self.spec, values, self.attributes)
        except (ValueError, TypeError) as error:
            raise VerifyException(str(error)) from None
        return values

    def print(self, printer: Printer) -> None:
        """Prints `(operands) attributes : type`."""
        with printer.in_parens():
            printer.print_list(self._operands, printer.print_operand)
        printer.print_op_attributes(self.attributes)
        printer.print_string(" : ")
        # no location here: the printer adds it
        printer.print_function_type(self.operand_types, self.result_types)

    @classmethod
    def parse(cls, parser: Parser) -> MoOp:
        """Parses the form that `print` writes."""
        operands = parser.parse_op_args_list()
        attributes = parser.parse_optional_attr_dict()
        parser.parse_punctuation(":")
        position = parser.pos
        types = parser.parse_function_type()
        return cls.create(
            operands=parser.resolve_operands(operands, types.inputs.data, position),
            result_types=types.outputs.data,
            attributes=attributes,
        )


def check_attributes(spec: OpSpec, values: Attrs, shown_attributes: Attrs) -> None:
    """Checks that an op has all required attributes, no unknown one, and that each is of its type.

    Args:
        spec: The specification of the op.
        values: The attributes as Python values.
        shown_attributes: The attributes as a message shows them.

    Raises:
        ValueError: An attribute is unknown or missing.
        TypeError: An attribute is of another type.
    """
    for name, value in values.items():
        expected = spec.attributes.get(name) or spec.optional.get(name)
        if expected is None:
            names = ", ".join((*spec.attributes, *spec.optional)) or "none"
            raise ValueError(f"{spec.name}: unknown attribute '{name}'; expected: {names}")
        # bool is an int in Python, and another attribute in MLIR
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            raise TypeError(
                f"{spec.name}: attribute '{name}' is {shown_attributes[name]}, expected {_kind(expected)}"
            )
    for name in spec.attributes:
        if name not in values:
            raise ValueError(f"{spec.name}: the attribute '{name}' is missing")


def _kind(expected: type | tuple[type, ...]) -> str:
    kinds = expected if isinstance(expected, tuple) else (expected,)
    return " or ".join(kind.__name__ for kind in kinds)


OPS: dict[str, type[MoOp]] = {}
"""All ops of the dialect, by full name."""


def define(spec: OpSpec, base: type[MoOp] = MoOp) -> type[MoOp]:
    """Creates the class of an op and registers it in `OPS`."""
    members: dict[str, object] = {"name": spec.name, "spec": spec}
    if spec.terminator:
        members["traits"] = OpTraits(lambda: (IsTerminator(),))
    # the module of the op's family, which calls this function
    family: str = sys._getframe(1).f_globals["__name__"]  # pyright: ignore[reportPrivateUsage]
    title = "".join(part.title() for part in spec.mnemonic.replace(".", "_").split("_"))
    cls = type(f"{title}Op", (base,), {**members, "__module__": family})
    if spec.name in OPS:
        raise ValueError(f"{spec.name} is defined twice")
    OPS[spec.name] = cls
    return cls


def infer_types(name: str, operand_types: Types, attrs: Attrs) -> Types:
    """Computes the result types of an op with an `infer` function.

    Raises:
        ValueError: The operands violate a rule of the op.
        TypeError: An operand's type is wrong, or the op has no `infer` function.
    """
    infer = OPS[name].spec.infer
    if infer is None:
        raise TypeError(f"{name}: the result types do not follow from the operands")
    return infer(operand_types, attrs)


def build(
    op: str | type[MoOp],
    operands: Sequence[SSAValue] = (),
    attrs: Attrs | None = None,
    result_types: Types | None = None,
    location: LocationAttr | None = None,
    regions: Sequence[Region] = (),
) -> MoOp:
    """Creates an op, not yet in a block.

    Args:
        op: The class of the op, or its full name, such as ``mo.add``.
        operands: The operands.
        attrs: The attributes, as Python values (see `to_attr`) or attributes.
        result_types: The types of the results; inferred if None.
        location: The source location.
        regions: The regions of a graph.

    Raises:
        ValueError: The operands violate a rule of the op; checked if types are inferred or the op has a `check`.
        TypeError: An operand's type is wrong.
    """
    cls = OPS[op] if isinstance(op, str) else op
    spec = cls.spec
    values: Attrs = attrs if attrs is not None else {}
    if result_types is None or spec.check is not None:
        operand_types = [v.type for v in operands]
        if result_types is None:
            if spec.results == 0:
                result_types = ()
            elif spec.infer is None:
                raise TypeError(f"{spec.name}: the result types do not follow from the operands")
            else:
                result_types = spec.infer(operand_types, values)
        if spec.check is not None:
            spec.check(operand_types, result_types, values)
    # before the op exists: kernels compute positions from these numbers in 64 bits
    _check_steps(spec.mnemonic, values)
    for result_type in result_types:
        if isinstance(result_type, ShapedType):
            _check_sizes(spec.mnemonic, result_type)
    return cls.create(
        operands=operands,
        result_types=result_types,
        attributes={key: to_attr(value) for key, value in values.items()},
        location=location,
        regions=regions,
    )


def _check_sizes(op: str, type_: ShapedType) -> None:
    for axis, dim in enumerate(type_.shape):
        if dim.is_static and dim.value < 0:
            raise ValueError(f"{op}: axis {axis} of the result would have size {dim}")
    sizes = [dim.value for dim in type_.shape if dim.is_static]
    # symbolic sizes are checked when the program runs
    count = math.prod(sizes) if len(sizes) == len(type_.shape) else 0
    # one size may exceed 64 bits where another is 0
    if count > MOST_ELEMENTS or max(sizes, default=0) >= 1 << 63:
        raise ValueError(
            f"{op}: the result would be {type_.short}, of {count} elements; expected at most {MOST_ELEMENTS}"
        )


_STEPS = frozenset({"stride", "dilation", "padding", "output_padding", "kernel", "low", "high"})
"""Attributes whose numbers are multiplied by sizes and added to them."""


def _check_steps(op: str, attrs: Attrs) -> None:
    """Raises ValueError for steps and amounts for which positions could exceed 64 bits."""
    for name in _STEPS.intersection(attrs):
        numbers = attrs[name] if isinstance(attrs[name], tuple) else (attrs[name],)
        if any([isinstance(n, int) and abs(n) > MOST_ELEMENTS for n in numbers]):
            raise ValueError(
                f"{op}: {name} is {numbers}, expected numbers of at most {MOST_ELEMENTS}"
            )


# Helpers of `infer` and `check` functions


def tensor(op: str, types: Types, index: int) -> TensorType:
    """The tensor type of operand `index`.

    Raises:
        TypeError: The operand is not a tensor.
    """
    type_ = types[index]
    if not isinstance(type_, TensorType):
        raise TypeError(
            f"{op}: operand {index} is {short_types([type_])}, expected a tensor"
            + ("; load the buffer first" if isinstance(type_, BufferType) else "")
        )
    return type_


def axis_of(op: str, axis: int, rank: int) -> int:
    """Checks that an axis is in ``[0, rank)``, and returns it.

    Raises:
        ValueError: The axis is out of range.
    """
    if not 0 <= axis < rank:
        raise ValueError(f"{op}: axis {axis} is out of range for a tensor of rank {rank}")
    return axis


def same_device(op: str, types: Sequence[TensorType]) -> None:
    """Checks that all tensors are on one device.

    Raises:
        ValueError: Devices differ.
    """
    if any(t.device != types[0].device for t in types[1:]):
        where = ", ".join(t.device.text for t in types)
        raise ValueError(
            f"{op}: the operands are on different devices ({where}); transfer them first"
        )
