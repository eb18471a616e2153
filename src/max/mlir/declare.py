"""Specifications of ops with declared operands.

`declare` makes the spec: it counts the operands, checks the kind, dtype, rank and device of each one, handles the
chain, and passes the types by name to the op's own rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from max.mlir.operand import FLOATS, Operand
from max.mlir.operation import Attrs, Conditions, Flops, OpSpec, Types, check_attributes
from max.mlir.types import ChainType, ShapedType, TensorType, short_types

__all__ = ["NamedTypes", "check_float_result", "declare", "static_dims"]

_CHAIN = ChainType.get()

NamedTypes = Mapping[str, ShapedType]
"""The types of an op's operands by name, without those that are absent."""

Rule = Callable[[NamedTypes, Attrs], Types]
"""Computes the result types without the chain; raises ValueError or TypeError for operands that do not fit."""

ResultRule = Callable[[NamedTypes, Types, Attrs], None]
"""Checks result types without the chain."""


def declare(
    name: str,
    signature: Sequence[Operand],
    results: int,
    rule: Rule | None = None,
    *,
    result_rule: ResultRule | None = None,
    chained: bool = False,
    attributes: Mapping[str, type] | None = None,
    optional: Mapping[str, type] | None = None,
    conditions: Conditions | None = None,
    flops: Flops | None = None,
    takes: str = "",
    gives: str = "",
    doc: str = "",
) -> OpSpec:
    """The specification of an op with declared operands.

    Args:
        name: The full name, such as ``mo.sample.token``.
        signature: The operands, without the chain.
        results: The number of results, without the chain.
        rule: The result types follow from the operands by this rule.
        result_rule: The result types are free within this rule. One of the two is given.
        chained: Whether the op has side effects: its last operand and its last result are a chain.
        attributes: The Python types of the required attributes.
        optional: The Python types of the optional attributes.
        conditions: The run-time conditions over sizes.
        flops: The number of its operations.
        takes: The operands for the reference of the dialect.
        gives: The results for the reference.
        doc: What the op computes, for the reference.
    """
    op = name.removeprefix("mo.")
    operands = tuple(signature)

    def types_by_name(types: Types, attrs: Attrs) -> NamedTypes:
        # bound below: rules run when the op exists
        check_attributes(spec, attrs, attrs)
        return _named_types(op, operands, chained, types, attrs)

    def infer(types: Types, attrs: Attrs) -> Types:
        assert rule is not None
        inferred = rule(types_by_name(types, attrs), attrs)
        return (*inferred, _CHAIN) if chained else inferred

    def check(types: Types, result_types: Types, attrs: Attrs) -> None:
        assert result_rule is not None
        plain = result_types
        if chained:
            if not plain or plain[-1] != _CHAIN:
                raise TypeError(
                    f"{op}: the results are {short_types(plain)}, expected a chain as the last one"
                )
            plain = plain[:-1]
        if len(plain) != results:
            raise ValueError(
                f"{op}: the results are {short_types(plain)}, expected {results} of them"
            )
        result_rule(types_by_name(types, attrs), plain, attrs)

    # operands that depend on attributes are not required
    required = sum([o.present is None and not o.optional for o in operands])
    spec = OpSpec(
        name,
        (required + chained, len(operands) + chained),
        results + chained,
        attributes=attributes or {},
        optional=optional or {},
        infer=None if rule is None else infer,
        check=None if result_rule is None else check,
        conditions=conditions,
        flops=flops,
        pure=not chained,
        signature=operands,
        chained=chained,
        separates=True,
        hoistable=False,
        takes=takes,
        gives=gives,
        doc=doc,
    )
    return spec


def _named_types(
    op: str, signature: Sequence[Operand], chained: bool, types: Types, attrs: Attrs
) -> NamedTypes:
    """Checks the operands of an op, and returns their types by name."""
    if chained:
        if not types or types[-1] != _CHAIN:
            last = short_types(types[-1:]) or "absent"
            raise TypeError(f"{op}: the last operand is {last}, expected a chain")
        types = types[:-1]
    expected = [operand for operand in signature if not operand.present or operand.present(attrs)]
    if len(types) < len(expected):
        # optional operands are all there, or none of them
        expected = [operand for operand in expected if not operand.optional]
    if len(types) != len(expected):
        names = ", ".join([operand.name for operand in expected])
        raise ValueError(
            f"{op}: got {len(types)} operands ({short_types(types)}), expected {len(expected)}: {names}"
        )
    named: dict[str, ShapedType] = {}
    first: Operand | None = None
    for operand, type_ in zip(expected, types, strict=True):
        checked = named[operand.name] = operand.check(op, type_)
        # numbers that the host reads may be on any device
        if operand.on_any_device:
            continue
        if first is None:
            first = operand
        elif checked.device != named[first.name].device:
            raise ValueError(
                f"{op}: {operand.name} is {checked.short}, {first.name} is {named[first.name].short}: "
                "they are on different devices; transfer one of them"
            )
    return named


def static_dims(op: str, name: str, type_: ShapedType, *axes: int) -> tuple[int, ...]:
    """The sizes of axes as ints.

    Args:
        op: The op, for messages.
        name: The name of the operand.
        type_: The type of the operand.
        axes: The axes.

    Raises:
        ValueError: One of the sizes is symbolic.
    """
    dims = [type_.shape[axis] for axis in axes]
    for axis, dim in zip(axes, dims, strict=True):
        if not dim.is_static:
            raise ValueError(
                f"{op}: {name} is {type_.short}; the size of axis {axis} must be static"
            )
    return tuple([dim.value for dim in dims])


def check_float_result(op: str, results: Types, expected: TensorType) -> None:
    """Checks the only result of an op that may have any float dtype.

    Args:
        op: The op, for messages.
        results: The types of its results.
        expected: A type with the shape and the device of the result.

    Raises:
        TypeError: The result is no tensor of floats.
        ValueError: The shape or the device differs.
    """
    (result,) = results
    if not isinstance(result, TensorType) or result.dtype not in FLOATS:
        raise TypeError(
            f"{op}: the result is {short_types(results)}, expected a floating-point type"
        )
    if result.shape != expected.shape or result.device != expected.device:
        raise ValueError(
            f"{op}: the result is {result.short}, expected the shape of {expected.short}"
        )
