"""A module as text that identifies its program, without xDSL's printer, which takes 0.1 s to import."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from xdsl.ir import Attribute, Data, Operation, Region, SSAValue

from max.mlir.attributes import INLINE_LIMIT, DenseAttr, ResourceAttr
from max.mlir.builtin import ArrayAttr, DictionaryAttr, PlainAttr

if TYPE_CHECKING:
    from xdsl.printer import Printer

__all__ = ["key_text"]


def key_text(module: Operation) -> str:
    """The ops of a module, their operands, attributes, types and regions, as text.

    Modules have equal texts if and only if they print alike, apart from locations and names of values, and their small
    resources have equal elements: constants with more than `INLINE_LIMIT` elements count by their names only.
    """
    writer = _Writer()
    writer.op(module)
    return "\n".join(writer.lines)


class _Writer:
    """The lines of a text; values have numbers in the order in which they occur."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._numbers: dict[SSAValue, int] = {}
        self._texts: dict[int, str] = {}

    def op(self, op: Operation) -> None:
        """Adds a line for an op, then the lines of its regions."""
        operands = self._values(op.operands)
        attributes = [f"{name!r}: {self._text(attr)}" for name, attr in op.attributes.items()]
        types = [self._text(value.type) for value in op.results]
        results = self._values(op.results)
        self.lines.append(f"{results} {op.name} {operands} {attributes} {types}")
        for region in op.regions:
            self._region(region)

    def _region(self, region: Region) -> None:
        """Adds the lines of a region's blocks."""
        for block in region.blocks:
            types = [self._text(value.type) for value in block.args]
            self.lines.append(f"{{ {self._values(block.args)} {types}")
            for op in block.ops:
                self.op(op)
            self.lines.append("}")

    def _values(self, values: Iterable[SSAValue]) -> list[int]:
        numbers = self._numbers
        return [numbers.setdefault(value, len(numbers)) for value in values]

    def _text(self, attr: Attribute) -> str:
        # attributes are shared and live as long as the module, and their own hashes are deep
        if (text := self._texts.get(id(attr))) is None:
            text = self._texts[id(attr)] = _attribute(attr)
        return text


def _attribute(attr: Attribute) -> str:
    """A text that determines an attribute."""
    match attr:
        case ArrayAttr():
            value: Any = [_attribute(item) for item in attr.data]
        case DictionaryAttr():
            value = [(key, _attribute(item)) for key, item in attr.data]
        case PlainAttr():
            value = attr.data
        case ResourceAttr() if attr.array.size <= INLINE_LIMIT:
            # a file may hold small constants apart: the compiler reads their elements as those of others
            value = [attr.key, _attribute(DenseAttr.of(attr.array))]
        case Data():
            # as the printer writes it
            parameter = _Parameter()
            cast("Data[Any]", attr).print_parameter(cast("Printer", parameter))
            value = "".join(parameter.parts)
        case _:
            value = str(attr)
    return f"{attr.name} {value!r}"


class _Parameter:
    """What the parameters of `mo` attributes need of a printer."""

    def __init__(self) -> None:
        self.parts: list[str] = []

    def print_string(self, text: str) -> None:
        self.parts.append(text)

    def print_string_literal(self, text: str) -> None:
        self.parts.append(repr(text))

    def print_attr_dict(self, attributes: Mapping[str, Attribute]) -> None:
        self.parts.append(repr([(key, _attribute(attr)) for key, attr in attributes.items()]))

    @contextmanager
    def in_angle_brackets(self) -> Generator[None]:
        self.parts.append("<")
        yield
        self.parts.append(">")
