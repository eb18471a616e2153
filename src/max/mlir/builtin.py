"""Light classes for what `mo` needs of MLIR's `builtin` dialect: plain attributes, source locations, the module op.

xDSL's own dialect takes 0.12 s to import and defines a hundred classes that `mo` does not use. Only the printer and the
parser import it; there `to_xdsl` and `from_xdsl` convert attributes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

from xdsl import ir
from xdsl.ir import (
    Attribute,
    BlockArgument,
    BuiltinAttribute,
    Data,
    Operation,
    OpTraits,
    Region,
)
from xdsl.traits import IsolatedFromAbove, NoTerminator
from xdsl.utils.exceptions import VerifyException

if TYPE_CHECKING:
    from xdsl.dialects.builtin import LocationAttr
    from xdsl.parser import AttrParser
    from xdsl.printer import Printer
else:
    LocationAttr = Attribute


__all__ = [
    "UNKNOWN_LOC",
    "ArrayAttr",
    "Block",
    "BoolAttr",
    "DictionaryAttr",
    "FileLineColLoc",
    "FloatAttr",
    "IntAttr",
    "IntsAttr",
    "LocationAttr",
    "ModuleOp",
    "PlainAttr",
    "StringAttr",
    "SymbolRefAttr",
    "UnitAttr",
    "from_xdsl",
    "line_location",
    "to_xdsl",
]

Pairs = tuple[tuple[str, Attribute], ...]


class PlainAttr(Data[Any], BuiltinAttribute):
    """The base of attributes that hold a Python value and print as those of MLIR's `builtin` dialect."""

    def print_builtin(self, printer: Printer) -> None:
        printer.print_attribute(to_xdsl(self))

    def print_parameter(self, printer: Printer) -> None:
        self.print_builtin(printer)

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> Any:
        parser.raise_error(f"{cls.__name__} has no text of its own")


class BoolAttr(PlainAttr):
    """``true`` or ``false``."""

    name = "mo.bool"
    data: bool


class IntAttr(PlainAttr):
    """An integer of any size: ``5 : i64``."""

    name = "mo.int"
    data: int


class FloatAttr(PlainAttr):
    """A number, compared by its bits: ``0.5 : f64``."""

    name = "mo.float"
    data: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FloatAttr) and _bits(self.data) == _bits(other.data)

    def __hash__(self) -> int:
        return hash(_bits(self.data))


def _bits(number: float) -> bytes:
    return struct.pack("d", number)


class StringAttr(PlainAttr):
    """A string: ``"RSCF"``."""

    name = "mo.string"
    data: str


class IntsAttr(PlainAttr):
    """Integers of 64 bits: ``array<i64: 1, 2>``."""

    name = "mo.ints"
    data: tuple[int, ...]


class ArrayAttr(PlainAttr):
    """A sequence of attributes: ``["a", 1]``."""

    name = "mo.array"
    data: tuple[Attribute, ...]


class DictionaryAttr(PlainAttr):
    """Attributes by name, in order: ``{axis = 1 : i64}``."""

    name = "mo.dictionary"
    data: Pairs


class SymbolRefAttr(PlainAttr):
    """The name of a graph: ``@layer``."""

    name = "mo.symbol"
    data: str


class UnitAttr(PlainAttr):
    """No value, Python's None."""

    name = "mo.unit"
    data: None

    def __init__(self) -> None:
        super().__init__(None)


class UnknownLoc(PlainAttr):
    """The location of an op whose location is not known."""

    name = "mo.unknown_loc"
    data: None


class FileLineColLoc(PlainAttr):
    """A location: file name, line, column, and a name of the code around it, or ""."""

    name = "mo.file_line_col"
    data: tuple[str, int, int, str]

    @property
    def filename(self) -> str:
        """The file."""
        return self.data[0]

    @property
    def line(self) -> int:
        """The line, from 1."""
        return self.data[1]

    @property
    def scope(self) -> str:
        """The name of the code around it, or ""."""
        return self.data[3]


UNKNOWN_LOC = cast("LocationAttr", UnknownLoc(None))


def line_location(filename: str, line: int, scope: str = "") -> LocationAttr:
    """The location of a line, and a name of the code around it."""
    return cast("LocationAttr", FileLineColLoc((filename, line, 0, scope)))


class Block(ir.Block):
    """A block whose arguments have `UNKNOWN_LOC`; xDSL's would import its `builtin` dialect for that.

    Args:
        ops: The ops.
        arg_types: The types of the arguments.
    """

    def __init__(
        self, ops: Iterable[Operation] = (), *, arg_types: Iterable[Attribute] = ()
    ) -> None:
        super().__init__(ops)
        for index, arg_type in enumerate(arg_types):
            self.insert_arg(arg_type, index)

    def insert_arg(
        self, arg_type: Attribute, index: int, location: LocationAttr | None = None
    ) -> BlockArgument:
        """Inserts an argument at an index and returns it."""
        return super().insert_arg(arg_type, index, UNKNOWN_LOC if location is None else location)


class ModuleOp(Operation):
    """A module: one block with all graphs."""

    name = "builtin.module"
    traits = OpTraits(lambda: (IsolatedFromAbove(), NoTerminator()))

    def __init__(self, ops: Iterable[Operation] = ()) -> None:
        super().__init__(regions=[Region(Block(ops))], location=UNKNOWN_LOC)

    @property
    def body(self) -> Region:
        """The region of the block."""
        return self.regions[0]

    @property
    def ops(self) -> Iterator[Operation]:
        """The ops of the block."""
        return iter(self.body.block.ops)

    def verify_(self) -> None:
        """Checks that no two graphs have one name."""
        names: set[str] = set()
        for op in self.ops:
            attr = op.attributes.get("sym_name")
            if isinstance(attr, StringAttr):
                if attr.data in names:
                    raise VerifyException(f"the module has two graphs @{attr.data}")
                names.add(attr.data)

    def print(self, printer: Printer) -> None:
        """Prints the attributes and the body."""
        printer.print_op_attributes(self.attributes, print_keyword=True)
        if self.body.block.is_empty:
            printer.print_string(" {\n}")
        else:
            printer.print_string(" ")
            printer.print_region(self.body)

    @staticmethod
    def adopt(parsed_module: Operation) -> ModuleOp:
        """The module that xDSL's parser made, with the attributes of this file.

        Args:
            parsed_module: xDSL's module, which is empty afterwards.
        """
        module = ModuleOp.create(
            regions=[parsed_module.detach_region(0)],
            attributes=parsed_module.attributes,
            location=UNKNOWN_LOC,
        )
        # the parser makes attributes of xDSL's own dialect
        for op in module.walk():
            op.attributes = {name: from_xdsl(attr) for name, attr in op.attributes.items()}
            op.location = cast("LocationAttr", from_xdsl(op.location))
        return module


def to_xdsl(attr: Attribute) -> Attribute:
    """The attribute of xDSL's `builtin` dialect that prints as a `PlainAttr`; any other attribute itself."""
    from xdsl.dialects import builtin

    match attr:
        case BoolAttr():
            return builtin.IntegerAttr(int(attr.data), builtin.IntegerType(1))
        case IntAttr():
            # numbers of u64 do not all fit i64
            fits_64_bits = -(1 << 63) <= attr.data < 1 << 63
            return builtin.IntegerAttr(attr.data, builtin.IntegerType(64 if fits_64_bits else 128))
        case FloatAttr():
            return builtin.FloatAttr(attr.data, builtin.f64)
        case StringAttr():
            return builtin.StringAttr(attr.data)
        case IntsAttr():
            return builtin.DenseArrayBase.from_list(builtin.i64, attr.data)
        case ArrayAttr():
            return builtin.ArrayAttr([to_xdsl(item) for item in attr.data])
        case DictionaryAttr():
            return builtin.DictionaryAttr({key: to_xdsl(item) for key, item in attr.data})
        case SymbolRefAttr():
            return builtin.SymbolRefAttr(attr.data)
        case UnitAttr():
            return builtin.UnitAttr()
        case UnknownLoc():
            return builtin.UNKNOWN_LOC
        case FileLineColLoc():
            # the scope of a profile has no place there
            filename, line, column, _ = attr.data
            return builtin.FileLineColLoc(
                builtin.StringAttr(filename), builtin.IntAttr(line), builtin.IntAttr(column)
            )
        case _:
            return attr


def from_xdsl(attr: Attribute) -> Attribute:
    """The `PlainAttr` of an attribute of xDSL's `builtin` dialect, as its parser makes them; any other itself."""
    from xdsl.dialects import builtin

    match attr:
        case builtin.IntegerAttr():
            number = attr.value.data
            # MLIR's bool is an integer of one bit
            return BoolAttr(bool(number)) if attr.type == builtin.i1 else IntAttr(number)
        case builtin.FloatAttr():
            return FloatAttr(attr.value.data)
        case builtin.StringAttr():
            return StringAttr(attr.data)
        case builtin.DenseArrayBase():
            return IntsAttr(tuple(cast(Any, attr).get_values()))
        case builtin.ArrayAttr():
            return ArrayAttr(tuple([from_xdsl(item) for item in attr.data]))
        case builtin.DictionaryAttr():
            return DictionaryAttr(tuple([(key, from_xdsl(a)) for key, a in attr.data.items()]))
        case builtin.SymbolRefAttr():
            return SymbolRefAttr(attr.root_reference.data)
        case builtin.UnitAttr():
            return UnitAttr()
        case builtin.UnknownLoc():
            return UNKNOWN_LOC
        case builtin.FileLineColLoc():
            return FileLineColLoc((attr.filename.data, attr.line.data, attr.column.data, ""))
        case _:
            return attr
