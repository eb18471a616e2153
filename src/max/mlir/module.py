"""Builds, prints, parses and verifies modules of `mo`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, cast

import numpy.typing as npt
from xdsl.dialects.builtin import Builtin, ModuleOp
from xdsl.ir import Dialect, Operation

from max.mlir.attributes import DenseAttr, ResourceAttr
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
    "ModuleOp",
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
"""The dialect, as xDSL's tools take it."""


class ParseError(ValueError):
    """A text is not a module of `mo`; the message shows the place."""


class VerifyError(ValueError):
    """A module breaks a rule of the dialect; the message shows the op."""


def new_module() -> ModuleOp:
    """An empty module."""
    return ModuleOp([])


def graphs(module: ModuleOp) -> Iterator[GraphOp]:
    """All graphs and subgraphs of a module, in their order."""
    for op in module.body.block.ops:
        if isinstance(op, GraphOp):
            yield op


def entry(module: ModuleOp) -> GraphOp:
    """The entry graph.

    Raises:
        ValueError: The module has none, or more than one.
    """
    entries = [g for g in graphs(module) if not isinstance(g, SubgraphOp)]
    if len(entries) != 1:
        raise ValueError(f"a module has one mo.graph, this one has {len(entries)}")
    return entries[0]


def subgraphs(module: ModuleOp) -> dict[str, SubgraphOp]:
    """The subgraphs by name."""
    return {g.sym_name: g for g in graphs(module) if isinstance(g, SubgraphOp)}


def walk(module: Operation) -> Iterator[MoOp]:
    """All ops of the bodies of all graphs, in order; not the graphs themselves."""
    for op in module.walk():
        if isinstance(op, MoOp) and not isinstance(op, GraphOp):
            yield op


def resources(module: Operation) -> dict[str, npt.NDArray[Any]]:
    """The large constants of a module by name, as `parse_module` takes them."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for op in module.walk():
        for attr in op.attributes.values():
            if isinstance(attr, ResourceAttr):
                arrays[attr.key] = attr.array
    return arrays


def clone_module(module: ModuleOp) -> ModuleOp:
    """A copy whose ops may be changed; constants are shared."""
    return module.clone()


def print_module(module: Operation, locations: bool = False) -> str:
    """The text of a module (or of one op), which `parse_module` reads.

    Args:
        module: The module.
        locations: Whether to write the file and line that each op comes from.
    """
    from xdsl.printer import Printer

    stream = StringIO()
    Printer(stream=stream, print_debuginfo=locations).print_op(module)
    return stream.getvalue()


def parse_module(
    text: str,
    resources: Mapping[str, npt.NDArray[Any]] | None = None,
    name: str = "<unknown>",
) -> ModuleOp:
    """Reads a module.

    Args:
        text: What `print_module` gives.
        resources: The big constants, by name (`resources(module)`).
        name: Names the text in messages.

    Raises:
        ParseError: The text is not a module, or a resource is missing.
    """
    from xdsl.context import Context
    from xdsl.parser import Parser
    from xdsl.utils import exceptions

    class _Context(Context):
        resources: Mapping[str, npt.NDArray[Any]] = {}

    context = _Context()
    context.resources = {} if resources is None else resources
    context.load_dialect(Builtin)
    context.load_dialect(MO)
    try:
        return Parser(context, text, name).parse_module()
    except (exceptions.ParseError, exceptions.MultipleSpansParseError) as error:
        raise ParseError(str(error)) from error
    except exceptions.VerifyException as error:
        raise ParseError(str(error)) from error


def verify_module(module: ModuleOp) -> None:
    """Checks every op of a module, and its structure.

    Raises:
        VerifyError: An op breaks a rule.
    """
    from xdsl.utils.exceptions import VerifyException

    try:
        module.verify()
        entry(module)
        _verify_dominance(module)
    except (VerifyException, ValueError) as error:
        raise VerifyError(str(error)) from error


def _verify_dominance(module: ModuleOp) -> None:
    """Checks that each operand comes before its use, in the same graph."""
    for graph in graphs(module):
        seen = set(cast("tuple[object, ...]", graph.args))
        for op in graph.body:
            for index, operand in enumerate(op.operands):
                if operand not in seen:
                    raise ValueError(
                        f"operand {index} of {op.name} in @{graph.sym_name} does not come "
                        "before its use"
                    )
            seen.update(op.results)
