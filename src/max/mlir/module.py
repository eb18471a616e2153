"""Construction, printing, parsing and verification of `mo` modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, cast

import numpy.typing as npt
from xdsl.ir import Block, BlockArgument, Dialect, Operation, SSAValue

from max.mlir.attributes import DenseAttr, ResourceAttr
from max.mlir.builtin import ModuleOp
from max.mlir.operation import OPS, MoOp
from max.mlir.ops.control import GraphOp, SubgraphOp
from max.mlir.types import (
    BufferType,
    ChainType,
    DeviceRefAttr,
    DimAttr,
    DTypeAttr,
    OpaqueType,
    ShapeAttr,
    TensorType,
)

__all__ = [
    "MO",
    "ParseError",
    "VerifyError",
    "clone_module",
    "entry",
    "graphs",
    "new_module",
    "parse_module",
    "print_module",
    "resources",
    "subgraphs",
    "verify_module",
    "walk",
]

MO = Dialect(
    "mo",
    list(OPS.values()),
    [
        TensorType,
        BufferType,
        ChainType,
        OpaqueType,
        DeviceRefAttr,
        DimAttr,
        ShapeAttr,
        DTypeAttr,
        DenseAttr,
        ResourceAttr,
    ],
)
"""The dialect as an xDSL object."""


class ParseError(ValueError):
    """A text is not a valid module; the message shows the position."""


class VerifyError(ValueError):
    """A module violates a rule of the dialect; the message shows the op."""


def new_module() -> ModuleOp:
    """An empty module."""
    return ModuleOp()


def graphs(module: ModuleOp) -> Iterator[GraphOp]:
    """All graphs and subgraphs of a module, in order."""
    for op in module.body.block.ops:
        if isinstance(op, GraphOp):
            yield op


def entry(module: ModuleOp) -> GraphOp:
    """The entry graph.

    Raises:
        ValueError: The module has no entry graph, or more than one.
    """
    entries = [g for g in graphs(module) if not isinstance(g, SubgraphOp)]
    if len(entries) != 1:
        raise ValueError(f"a module has one mo.graph, this one has {len(entries)}")
    return entries[0]


def subgraphs(module: ModuleOp) -> dict[str, SubgraphOp]:
    """The subgraphs by name."""
    return {g.sym_name: g for g in graphs(module) if isinstance(g, SubgraphOp)}


def block_of(value: SSAValue) -> Block | None:
    """The block that defines a value, to compare it by identity; None for an op outside of any block."""
    return value.block if isinstance(value, BlockArgument) else value.owner.parent_block()


def walk(module: Operation) -> Iterator[MoOp]:
    """All ops in the bodies of all graphs, in order, without the graph ops."""
    for op in module.walk():
        if isinstance(op, MoOp) and not isinstance(op, GraphOp):
            yield op


def resources(module: Operation) -> dict[str, npt.NDArray[Any]]:
    """The large constants of a module by name, the argument of `parse_module`."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for op in module.walk():
        for attr in op.attributes.values():
            if isinstance(attr, ResourceAttr):
                arrays[attr.key] = attr.array
    return arrays


def clone_module(module: ModuleOp) -> ModuleOp:
    """A deep copy of the ops; constants are shared."""
    return module.clone()


def print_module(module: Operation, locations: bool = False) -> str:
    """Formats a module (or one op) as text for `parse_module`.

    Args:
        module: The module.
        locations: Whether to include the file and line of each op.
    """
    from xdsl.printer import Printer  # slow to import: few modules are printed

    stream = StringIO()
    Printer(stream=stream, print_debuginfo=locations).print_op(module)
    return stream.getvalue()


def parse_module(
    text: str,
    resources: Mapping[str, npt.NDArray[Any]] | None = None,
    name: str = "<unknown>",
) -> ModuleOp:
    """Parses a module.

    Args:
        text: Text in the format of `print_module`.
        resources: The large constants by name (`resources(module)`).
        name: The name of the text in messages.

    Raises:
        ParseError: The text is not a valid module, or a resource is missing.
    """
    # slow to import: most modules are staged, not parsed
    from xdsl.context import Context
    from xdsl.dialects.builtin import Builtin
    from xdsl.parser import Parser
    from xdsl.utils import exceptions

    class _Context(Context):
        resources: Mapping[str, npt.NDArray[Any]] = {}

    context = _Context()
    context.resources = {} if resources is None else resources
    context.load_dialect(Builtin)
    context.load_dialect(MO)
    try:
        return ModuleOp.adopt(Parser(context, text, name).parse_module())
    except (exceptions.ParseError, exceptions.MultipleSpansParseError) as error:
        raise ParseError(str(error)) from error
    except exceptions.VerifyException as error:
        raise ParseError(str(error)) from error


def verify_module(module: ModuleOp) -> None:
    """Verifies each op of a module, and its structure.

    Raises:
        VerifyError: An op violates a rule of the dialect.
    """
    # a start from the disk cache verifies nothing
    from xdsl.utils.exceptions import VerifyException

    try:
        module.verify()
        entry(module)
        _verify_dominance(module)
    except (VerifyException, ValueError) as error:
        raise VerifyError(str(error)) from error


def _verify_dominance(module: ModuleOp) -> None:
    """Checks that each operand is defined before its use, in the same graph."""
    for graph in graphs(module):
        # values of other graphs are not visible
        defined = set(cast("tuple[object, ...]", graph.args))
        for op in graph.body:
            for index, operand in enumerate(op.operands):
                if operand not in defined:
                    raise ValueError(
                        f"operand {index} of {op.name} in @{graph.sym_name} does not come "
                        "before its use"
                    )
            defined.update(op.results)
