"""Annotations of kernel parameters, and records of operands, which stand for several arguments."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from max.kernel.errors import KernelTypeError
from max.kernel.types import Access, Context, InOut, Input, Output, ScalarType


class OperandRecord(NamedTuple):
    """A `typing.NamedTuple` as the annotation of a parameter: each field takes an argument, in order.

    Args:
        kind: The class.
        fields: Name and annotation of each field: an `Access`, an element type, or a record.
    """

    kind: Any
    fields: tuple[tuple[str, Any], ...]

    def bind(self, name: str, argument: Callable[[str, Any], Any]) -> Any:
        """The record of its arguments.

        Args:
            name: The record's name; a field's name is appended to it.
            argument: Gives the argument of a name and an annotation; called in the order of the fields.
        """
        return self.kind._make(
            annotation.bind(f"{name}.{field}", argument)
            if isinstance(annotation, OperandRecord)
            else argument(f"{name}.{field}", annotation)
            for field, annotation in self.fields
        )

    def leaves(self) -> Iterator[Any]:
        """The annotations of its arguments, in order."""
        for _, annotation in self.fields:
            if isinstance(annotation, OperandRecord):
                yield from annotation.leaves()
            else:
                yield annotation


def parameter_annotation(value: Any, name: str, scope: Mapping[str, Any]) -> Any:
    """The annotation of a positional parameter: `Context`, an `Access`, an element type, or an `OperandRecord`.

    Args:
        value: The value of the annotation in the source.
        name: The parameter's name, for errors.
        scope: Values of names that annotations of a record's fields may use besides those of the record's module.

    Raises:
        KernelTypeError: It is not an annotation of a kernel's parameter.
    """
    if value is Context:
        return Context
    return _operand_annotation(value, name, scope, ())


def _operand_annotation(
    value: Any, name: str, scope: Mapping[str, Any], outer: tuple[type, ...]
) -> Any:
    """The access, scalar type or record of an annotation; `outer` are the records around it."""
    if value in (Input, Output, InOut):
        return value.access
    if isinstance(value, (Access, ScalarType)):
        return value
    if isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields"):
        return _operand_record(value, name, scope, outer)
    if value is Context:
        raise KernelTypeError(
            f"{name}: a record holds operands; k.Context is a parameter of its own"
        )
    raise KernelTypeError(
        f"{name}: {value!r} is not an annotation of a kernel's parameter; k.Input, k.Output, k.InOut, an element type "
        "or a NamedTuple of them fits"
    )


def _operand_record(
    record: Any, name: str, scope: Mapping[str, Any], outer: tuple[type, ...]
) -> OperandRecord:
    """The fields of a NamedTuple of operands with their annotations."""
    if record in outer:
        raise KernelTypeError(f"{name}: the record {record.__name__} contains itself")
    try:
        try:
            hints = typing.get_type_hints(record)
        except NameError:  # the class was defined in a function, next to its kernel
            hints = typing.get_type_hints(record, localns=dict(scope))
    except Exception as error:  # any exception of a user's annotation
        raise KernelTypeError(
            f"{name}: the annotations of {record.__name__} have no value: {type(error).__name__}: {error}"
        ) from None
    fields: list[tuple[str, Any]] = []
    for field in record._fields:
        if field not in hints:
            raise KernelTypeError(
                f"{name}.{field} needs an annotation: k.Input, k.Output, k.InOut or an element type"
            )
        path = f"{name}.{field}"
        fields.append((field, _operand_annotation(hints[field], path, scope, (*outer, record))))
    return OperandRecord(record, tuple(fields))


__all__ = ["OperandRecord", "parameter_annotation"]
