"""The base classes of passes and the helpers that all passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy.typing as npt
from xdsl.ir import Block

from max._backends.backend import Backends
from max._compiler.mok import OnceOp
from max._dataclass import dataclass
from max.mlir import DenseAttr, GraphOp, MoOp, ResourceAttr, graphs
from max.mlir.builtin import ModuleOp

__all__ = ["DevicePass", "GraphPass", "ModulePass", "Pass", "blocks", "constant_of", "ops_of"]


@dataclass(frozen=True)
class Pass:
    """A named step over a module: valid IR in, valid IR out."""

    name: str

    def run(self, module: ModuleOp, backends: Backends) -> None:
        """Changes the module in place.

        Args:
            module: The module.
            backends: The devices that the module is compiled for.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class GraphPass(Pass):
    """A step that runs on each block separately: the body of a graph, or of a `mok.once`."""

    function: Callable[[Block], object]

    def run(self, module: ModuleOp, backends: Backends) -> None:
        for graph in graphs(module):
            for block in blocks(graph):
                self.function(block)


@dataclass(frozen=True)
class DevicePass(Pass):
    """A `GraphPass` whose decisions depend on the devices."""

    function: Callable[[Block, Backends], object]

    def run(self, module: ModuleOp, backends: Backends) -> None:
        for graph in graphs(module):
            for block in blocks(graph):
                self.function(block, backends)


@dataclass(frozen=True)
class ModulePass(Pass):
    """A step that runs on the whole module."""

    function: Callable[[ModuleOp], object]

    def run(self, module: ModuleOp, backends: Backends) -> None:
        self.function(module)


def blocks(graph: GraphOp) -> Iterator[Block]:
    """The body of a graph, and before it the body of its `mok.once`."""
    for op in list(graph.block.ops):
        if isinstance(op, OnceOp):
            yield op.block
    yield graph.block


def ops_of(block: Block) -> list[MoOp]:
    """The ops of a block as a list: a snapshot, safe to iterate over while the block changes."""
    return cast("list[MoOp]", list(block.ops))


def constant_of(op: object) -> npt.NDArray[Any] | None:
    """The elements of a `mo.constant`, else None."""
    if not isinstance(op, MoOp) or op.name != "mo.constant":
        return None
    value = op.attributes["value"]
    return value.array if isinstance(value, DenseAttr | ResourceAttr) else None
