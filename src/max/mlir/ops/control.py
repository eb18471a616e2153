"""Graphs, subgraphs, calls, control flow, custom ops, and the terminator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from xdsl.ir import Attribute, Block, BlockArgument, Operation, OpTraits
from xdsl.traits import IsolatedFromAbove
from xdsl.utils.exceptions import VerifyException

from max.dtype import DType
from max.mlir.builtin import StringAttr, SymbolRefAttr
from max.mlir.dims import DimExpr
from max.mlir.operation import OPS, Attrs, MoOp, OpSpec, Types, define
from max.mlir.types import (
    BufferType,
    ChainType,
    DeviceRefAttr,
    ShapedType,
    TensorType,
    short_types,
)

if TYPE_CHECKING:
    from xdsl.parser import Parser
    from xdsl.printer import Printer

__all__ = [
    "CallOp", "GraphOp", "IfOp", "SubgraphOp", "WhileOp", "bind_call", "control_callees", "substitute_type",
]  # fmt: skip


def _check_output(operands: Types, results: Types, attrs: Attrs) -> None:
    if any(isinstance(t, ChainType) for t in operands[:-1]):
        raise ValueError("output: a chain must be the last value")


OutputOp = define(
    OpSpec(
        "mo.output",
        (0, None),
        0,
        check=_check_output,
        pure=False,
        terminator=True,
        on_any_device=True,
        takes="values…",
        doc="terminator",
    )
)


class GraphOp(MoOp):
    """The entry of a module: ``mo.graph @name(%x: type, …) -> (types) { … }``, one block."""

    @property
    def sym_name(self) -> str:
        """The name of the graph."""
        return cast(StringAttr, self.attributes["sym_name"]).data

    @property
    def block(self) -> Block:
        """The body."""
        return self.regions[0].block

    @property
    def args(self) -> tuple[BlockArgument, ...]:
        """The inputs."""
        return self.block.args

    @property
    def input_types(self) -> Sequence[Attribute]:
        """The types of the inputs."""
        return self.block.arg_types

    @property
    def output(self) -> Operation:
        """The terminator.

        Raises:
            ValueError: The graph has no outputs yet.
        """
        last = self.block.last_op
        if last is None or last.name != "mo.output":
            raise ValueError(
                f"graph {self.sym_name}: the outputs are not set; graph.output(...) sets them"
            )
        return last

    @property
    def output_types(self) -> Sequence[Attribute]:
        """The types of the outputs.

        Raises:
            ValueError: The graph has no outputs yet.
        """
        return self.output.operand_types

    @property
    def body(self) -> Iterator[MoOp]:
        """The ops of the body, including the terminator."""
        return cast(Iterator[MoOp], iter(self.block.ops))

    def verify_(self) -> None:
        """Checks for one block that ends with `mo.output`, and for a chain as the last input only."""
        super().verify_()
        if len(self.regions) != 1 or len(self.regions[0].blocks) != 1:
            raise VerifyException("a graph has one region of one block")
        if (last := self.block.last_op) is None or last.name != "mo.output":
            raise VerifyException("a graph ends with mo.output")
        chains = [i for i, t in enumerate(self.input_types) if isinstance(t, ChainType)]
        if chains not in ([], [len(self.input_types) - 1]):
            raise VerifyException("a chain must be the last input")

    def print(self, printer: Printer) -> None:
        """Prints `@name(arguments) -> (result types) attributes {body}`."""
        printer.print_string(" ")
        printer.print_symbol_name(self.sym_name)
        with printer.in_parens():
            printer.print_list(self.args, printer.print_block_argument)
        last = self.block.last_op
        if last is not None and last.name == "mo.output":
            printer.print_string(" -> ")
            with printer.in_parens():
                printer.print_list(last.operand_types, printer.print_attribute)
        printer.print_op_attributes(
            self.attributes, reserved_attr_names=("sym_name",), print_keyword=True
        )
        printer.print_string(" ")
        printer.print_region(self.regions[0], print_entry_block_args=False)

    @classmethod
    def parse(cls, parser: Parser) -> GraphOp:
        """Parses the form that `print` writes; the result types must be those of `mo.output`."""
        name = parser.parse_symbol_name()
        args = parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_argument)
        results: list[Attribute] | None = None
        position = parser.pos
        if parser.parse_optional_punctuation("->") is not None:
            results = list(
                parser.parse_comma_separated_list(parser.Delimiter.PAREN, parser.parse_type)
            )
        attributes = parser.parse_optional_attr_dict_with_keyword()
        region = parser.parse_region(args)
        last = region.block.last_op
        if results is not None and last is not None and list(last.operand_types) != results:
            parser.raise_error(
                f"the graph returns {short_types(last.operand_types)}, its signature declares "
                f"{short_types(results)}",
                position,
            )
        extra = {} if attributes is None else dict(attributes.data)
        return cls.create(attributes={"sym_name": name, **extra}, regions=[region])


class SubgraphOp(GraphOp):
    """A graph called by other graphs: ``mo.subgraph @name(…) -> (…) { … }``."""


class CallOp(MoOp):
    """A call of a subgraph: ``mo.call(%x) {callee = @name, prefix = "layers.0."}``."""

    @property
    def callee(self) -> str:
        """The name of the subgraph."""
        return cast(SymbolRefAttr, self.attributes["callee"]).data

    @property
    def prefix(self) -> str:
        """The prefix of the names of the subgraph's weights."""
        return cast(StringAttr, self.attributes["prefix"]).data

    def target(self) -> SubgraphOp:
        """The called subgraph.

        Raises:
            ValueError: The module has no such subgraph.
        """
        return _subgraph(self, self.callee)

    def verify_(self) -> None:
        """Checks operands and results against the subgraph's signature, its symbols bound to the operands' sizes."""
        super().verify_()
        root: Operation = self
        while (parent := root.parent_op()) is not None:
            root = parent
        # under construction: the op is verified again in its module
        if root.name != "builtin.module":
            return
        try:
            target = self.target()
            # the callee's symbols are dims of the caller
            env = bind_call(self.callee, target.input_types, [v.type for v in self._operands])
            expected = [substitute_type(t, env) for t in target.output_types]
        except (ValueError, TypeError) as error:
            raise VerifyException(str(error)) from error
        if expected != [v.type for v in self.results]:
            raise VerifyException(
                f"the result types are {short_types([v.type for v in self.results])}, "
                f"@{self.callee} gives {short_types(expected)}"
            )


def _subgraph(op: Operation, name: str) -> SubgraphOp:
    """Looks up a subgraph in the module of an op."""
    module = op
    while (parent := module.parent_op()) is not None:
        module = parent
    for other in module.regions[0].block.ops:
        if isinstance(other, SubgraphOp) and other.sym_name == name:
            return other
    raise ValueError(f"{op.name.removeprefix('mo.')}: the module has no subgraph @{name}")


def _in_module(op: Operation) -> bool:
    while (parent := op.parent_op()) is not None:
        op = parent
    return op.name == "builtin.module"


def _check_signature(op: MoOp, name: str, arguments: Types, results: Types) -> None:
    """Checks that a subgraph takes values of types `arguments` and returns values of types `results`."""
    target = _subgraph(op, name)
    try:
        env = bind_call(name, target.input_types, arguments)
    except (ValueError, TypeError) as error:
        # the message names the op that calls
        raise VerifyException(str(error).replace("call:", f"{op.spec.mnemonic}:", 1)) from error
    result_types = [substitute_type(t, env) for t in target.output_types]
    if result_types != list(results):
        raise VerifyException(
            f"{op.spec.mnemonic}: @{name} gives {short_types(result_types)}, expected {short_types(results)}"
        )


class IfOp(MoOp):
    """A conditional: ``mo.if(%pred, %x) {then = @a, otherwise = @b}`` calls one of two subgraphs.

    The subgraphs take all operands but the predicate. Names of their weights, and symbols that their inputs do not
    bind, are those of the enclosing graph.
    """

    @property
    def callees(self) -> tuple[str, str]:
        """The names of the subgraphs for a true and a false predicate."""
        return self.attr("then"), self.attr("otherwise")

    def verify_(self) -> None:
        """Checks that both subgraphs take the values and return the result types."""
        super().verify_()
        if not _in_module(self):
            return
        for name in self.callees:
            arguments = [v.type for v in self._operands[1:]]
            _check_signature(self, name, arguments, [v.type for v in self.results])


class WhileOp(MoOp):
    """A loop: ``mo.while(%x, %y) {condition = @a, body = @b}``.

    Condition and body take all operands. The first operands are carried: while the condition returns true, the body
    returns their next values, and the results are the last ones. The other operands do not change. A chain, which is
    the last operand, result, input and output, is carried too.
    """

    @property
    def callees(self) -> tuple[str, str]:
        """The names of condition and body."""
        return self.attr("condition"), self.attr("body")

    def verify_(self) -> None:
        """Checks the signatures of condition and body."""
        super().verify_()
        if not _in_module(self):
            return
        condition, body = self.callees
        arguments = [v.type for v in self._operands]
        results = [v.type for v in self.results]
        chain = [t for t in results if isinstance(t, ChainType)]
        # a condition returns its predicate, and the chain if there is one
        outputs = _subgraph(self, condition).output_types
        _check_predicate("while: the condition's result", outputs[:1])
        _check_signature(self, condition, arguments, [*outputs[:1], *chain])
        _check_signature(self, body, arguments, results)


def control_callees(op: Operation) -> tuple[str, ...]:
    """The names of the subgraphs that an op may execute."""
    if isinstance(op, CallOp):
        return (op.callee,)
    return op.callees if isinstance(op, IfOp | WhileOp) else ()


def _check_predicate(name: str, types: Types) -> None:
    first = types[0] if types else None
    if not isinstance(first, TensorType) or first.dtype is not DType.bool or first.rank:
        raise TypeError(f"{name} is {short_types(types[:1])}, expected a bool of rank 0")


def _check_if(operands: Types, results: Types, attrs: Attrs) -> None:
    _check_predicate("if: the predicate", operands)
    _check_chains("if", operands, results)


def _check_while(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks that the first operands are the carried values, of the result types, and that none is a buffer."""
    _check_chains("while", operands, results)
    carried = [t for t in results if not isinstance(t, ChainType)]
    if not carried:
        raise ValueError("while: no value is carried")
    if any(isinstance(t, BufferType) for t in carried):
        raise TypeError("while: a buffer cannot be carried; the body may store to it")
    if list(operands[: len(carried)]) != carried:
        raise ValueError(
            f"while: the first values are {short_types(operands[: len(carried)])}, "
            f"the results {short_types(carried)}"
        )


def bind_call(callee: str, parameters: Types, arguments: Types) -> dict[str, DimExpr]:
    """Binds the symbols of a subgraph's inputs to the dimensions of a call's arguments.

    Args:
        callee: The name of the subgraph, for messages.
        parameters: The types of the subgraph's inputs.
        arguments: The types of the arguments.

    Raises:
        ValueError: The number of arguments, a rank, a device or a dimension differs.
        TypeError: The kind of a type or a dtype differs.
    """
    if len(parameters) != len(arguments):
        raise ValueError(
            f"call: @{callee} takes {len(parameters)} values ({short_types(parameters)}), got "
            f"{len(arguments)} ({short_types(arguments)})"
        )
    env: dict[str, DimExpr] = {}
    expressions: list[tuple[int, int, DimExpr, DimExpr]] = []
    for index, (expected, actual) in enumerate(zip(parameters, arguments, strict=True)):
        if not (isinstance(expected, ShapedType) and isinstance(actual, ShapedType)):
            if expected != actual:
                raise TypeError(
                    f"call: input {index} of @{callee} is {short_types([expected])}, got "
                    f"{short_types([actual])}"
                )
            continue
        if type(expected) is not type(actual) or expected.dtype is not actual.dtype:
            raise TypeError(
                f"call: input {index} of @{callee} is {expected.short}, got {actual.short}"
            )
        if expected.device != actual.device or expected.rank != actual.rank:
            raise ValueError(
                f"call: input {index} of @{callee} is {expected.short}, got {actual.short}"
            )
        for axis, (p, a) in enumerate(zip(expected.shape, actual.shape, strict=True)):
            name = p.symbol_name
            if name is not None and name not in env:
                env[name] = a
            else:
                # compared when all symbols are bound: an expression may come before its symbols
                expressions.append((index, axis, p, a))
    for index, axis, p, a in expressions:
        expected = p.substitute(env)
        if expected != a:
            raise ValueError(
                f"call: axis {axis} of input {index} of @{callee} is {p}"
                + (f", here {expected}" if expected != p else "")
                + f", got {a}"
            )
    return env


def substitute_type(type_: Attribute, env: Mapping[str, DimExpr]) -> Attribute:
    """Replaces the symbols in a type's shape."""
    if not isinstance(type_, ShapedType):
        return type_
    shape = tuple([dim.substitute(env) for dim in type_.shape])
    if shape == type_.shape:
        return type_
    tensor_type = TensorType.get(type_.dtype, shape, type_.device, type_.layout)
    return tensor_type.as_buffer() if isinstance(type_, BufferType) else tensor_type


def _check_call(operands: Types, results: Types, attrs: Attrs) -> None:
    _check_chains("call", operands, results)


def _check_chains(op: str, operands: Types, results: Types) -> None:
    """Checks that operands and results both end with a chain, or both have none."""
    chains = [[isinstance(t, ChainType) for t in types] for types in (operands, results)]
    if any(any(flags[:-1]) for flags in chains):
        raise ValueError(f"{op}: a chain must be the last operand and the last result")
    has = [any(flags) for flags in chains]
    if has[0] != has[1]:
        raise ValueError(f"{op}: expected a chain among both operands and results, or in neither")


def _check_custom(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks the op's name and its chains; a result cannot be a buffer."""
    symbol = attrs["symbol"]
    if not symbol:
        raise ValueError("custom: the name of the op is empty")
    _check_chains(f"custom {symbol}", operands, results)
    if any(isinstance(t, BufferType) for t in results):
        raise TypeError(f"custom {symbol}: a result cannot be a buffer")


_GRAPH = {"sym_name": str}

define(OpSpec("mo.graph", (0, 0), 0, attributes=_GRAPH, pure=False), GraphOp)
define(OpSpec("mo.subgraph", (0, 0), 0, attributes=_GRAPH, pure=False), SubgraphOp)
define(
    OpSpec(
        "mo.call",
        (0, None),
        None,
        attributes={"callee": str, "prefix": str},
        check=_check_call,
        separates=True,
        hoistable=False,
        on_any_device=True,
        introduces_symbols=True,
        takes="values…, [chain]",
        doc="calls a subgraph; the names of its weights begin with `prefix`",
    ),
    CallOp,
)
define(
    OpSpec(
        "mo.if",
        (1, None),
        None,
        attributes={"then": str, "otherwise": str},
        check=_check_if,
        separates=True,
        hoistable=False,
        on_any_device=True,
        takes="predicate (bool, rank 0), values…, [chain]",
        doc="calls one of two subgraphs with the values, without prefix",
    ),
    IfOp,
)
define(
    OpSpec(
        "mo.while",
        (1, None),
        None,
        attributes={"condition": str, "body": str},
        check=_check_while,
        separates=True,
        hoistable=False,
        on_any_device=True,
        takes="carried values…, other values…, [chain]",
        doc=(
            "subgraphs that take all values; while the condition holds, the body computes "
            "the next carried values"
        ),
    ),
    WhileOp,
)
CustomOp = define(
    OpSpec(
        "mo.custom",
        (0, None),
        None,
        attributes={"symbol": str, "parameters": dict},
        optional={"device": DeviceRefAttr},
        check=_check_custom,
        separates=True,
        hoistable=False,
        introduces_symbols=True,
        takes="values…, [chain]",
        doc=(
            "`symbol`, `parameters` (dictionary), optional `device`; a kernel registered "
            "with `k.register(symbol)`; results, then a chain if there is a chain operand. "
            "Opaque operands are memory of the `size` and `dtype` in their type's "
            "parameters"
        ),
    )
)

for _name in ("mo.graph", "mo.subgraph"):
    OPS[_name].traits = OpTraits(lambda: (IsolatedFromAbove(),))
