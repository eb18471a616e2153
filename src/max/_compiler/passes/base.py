"""The base classes of passes and the helpers that all passes share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy.typing as npt
from xdsl.ir import Block, Operation

from max._backends.backend import Backends, PassPlace, RunsHere
from max._compiler.analysis.devices import device_of
from max._compiler.mok import OnceOp
from max._dataclass import dataclass
from max.mlir import DenseAttr, GraphOp, MoOp, ResourceAttr, graphs
from max.mlir.builtin import ModuleOp
from max.mlir.ops.constant import ConstantOp

__all__ = [
    "DevicePass",
    "GraphPass",
    "ModulePass",
    "Pass",
    "PassesOfBackends",
    "blocks",
    "constant_of",
    "ops_of",
]


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


@dataclass(frozen=True)
class PassesOfBackends(Pass):
    """A place of `PASSES` where the backends have their own passes; `name` is that of the place."""

    name: PassPlace

    def of(self, backends: Backends) -> list[Pass]:
        """The passes of all backends."""
        return [
            BackendStep(step.name, step.function, index)
            # the index binds a pass to the ops of its own backend
            for index, backend in enumerate(backends)
            for step in backend.passes(self.name)
        ]

    def run(self, module: ModuleOp, backends: Backends) -> None:
        for step in self.of(backends):
            step.run(module, backends)


@dataclass(frozen=True)
class BackendStep(Pass):
    """A pass of one backend, on each block; `index` is that of the backend."""

    function: Callable[[Block, RunsHere], object]
    index: int

    def run(self, module: ModuleOp, backends: Backends) -> None:
        def runs_here(op: Operation) -> bool:
            return isinstance(op, MoOp) and device_of(op, backends) == self.index

        for graph in graphs(module):
            for block in blocks(graph):
                self.function(block, runs_here)


def blocks(graph: GraphOp) -> Iterator[Block]:
    """The body of a graph, and before it the body of its `mok.once`."""
    # a pass may insert a `mok.once` meanwhile
    for op in list(graph.block.ops):
        if isinstance(op, OnceOp):
            yield op.block
    yield graph.block


def ops_of(block: Block) -> list[MoOp]:
    """The ops of a block as a list: a snapshot, safe to iterate over while the block changes."""
    return cast("list[MoOp]", list(block.ops))


def constant_of(op: object) -> npt.NDArray[Any] | None:
    """The elements of a `mo.constant`, else None."""
    if type(op) is not ConstantOp:
        return None
    assert isinstance(op, MoOp)
    value = op.attributes["value"]
    return value.array if isinstance(value, DenseAttr | ResourceAttr) else None
