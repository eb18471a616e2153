"""Programs of eager tensors, and copies of their weights in the layout of products.

Tensors are inputs of the program that reads them. Products read inputs row by row, while weights of a compiled model
are packed. So a program that has received the same weights in many runs is loaded once more with these as weights of
the model, and runs so while each is in the same unchanged memory.

A packed copy is stale after a write to the tensor. So a tensor is packed only if nothing outside of this package refers
to its memory (`_ownership`), and what gives others access to the memory or writes to it invalidates the copies
(`Cell.drop_copies`).
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_, itemgetter
from typing import Any, NamedTuple

import numpy as np

from max import driver
from max._config import flags
from max.engine import Model
from max.engine.run.output_memory import under_pressure
from max.experimental.programs.lazy_values import Cell, Reader
from max.experimental.programs.number_patterns import Pattern, Symbol
from max.experimental.programs.ownership import owned_cells
from max.experimental.programs.sessions import session_of
from max.experimental.programs.staging import Staged, Step, stage, weight_name
from max.experimental.programs.value_types import Kind
from max.graph import Graph

__all__ = ["Blueprint", "Extra", "Program", "packed_bytes", "packed_programs"]

RUNS = 8
"""The number of runs with the same weights before they are packed."""
COST = 1.0
"""The minimum time of these runs, as a multiple of the time to compile the program."""
LEAST_BYTES = 1 << 20
"""The minimum size of the weights of a program in bytes; smaller ones stay in the processor's caches anyway."""
SMALL_BYTES = 64 << 10
"""Other tensors up to this size in bytes become weights too, so that runs need not bind them."""
COPIES = 2
"""The maximum number of copies of a program, for different weights."""
BACKOFF = 4
"""The factor by which each further window of runs is longer, so that weights that change often are not packed."""
_LONGEST = 1 << 20
"""The maximum number of runs in a window."""

_PRODUCTS = frozenset({"matmul", "conv2d", "conv3d", "conv2d_transpose"})
"""Ops whose weights are packed."""
_LAYOUTS = frozenset({"transpose", "permute", "reshape", "cast"})
"""Ops through which a weight is traced to a product."""

Extra = np.ndarray[Any, np.dtype[Any]]
"""An input after the tensors: of a size or a number with a symbol."""


class Blueprint(NamedTuple):
    """The steps and types from which a program is staged."""

    steps: list[Step]
    kinds: list[Kind]
    """Dtype, rank and device of the tensors that it reads."""
    pattern: Pattern
    outputs: list[tuple[int, int]]
    """The step and result of each output."""
    devices: list[driver.Device]

    def stage(self, weights: Sequence[int] = ()) -> Staged:
        """The graph, with some of the tensors as weights."""
        staged = stage(self.steps, self.kinds, self.pattern, weights)
        staged.graph.output(*[staged.values[step][index] for step, index in self.outputs])
        return staged

    def load(self, graph: Graph, registry: Mapping[str, driver.Tensor] | None = None) -> Model:
        """The compiled graph.

        Args:
            graph: The graph.
            registry: The weights by name.
        """
        return session_of(self.devices).load(graph, weights_registry=registry)

    def weights(self, stable: Sequence[int], cells: Sequence[Cell]) -> list[int]:
        """The tensors that are worth packing: operands of products, and small tensors.

        Args:
            stable: The tensors that were the same in recent runs, by index.
            cells: The tensors.
        """
        dims = iter(self.pattern.positions)
        varying_dims = [
            any([isinstance(next(dims), Symbol) for _ in range(rank)]) for _, rank, _ in self.kinds
        ]
        sizes = [_num_bytes(cell) for cell in cells]
        weights = {index for index in stable if not varying_dims[index]}
        # the leaf that a result holds in another layout; None for what a run computes
        origins: list[int | None] = []
        operands: set[int] = set()
        for step in self.steps:
            sources = [i if s < 0 else origins[s] for s, i in step.inputs]
            leaves = {leaf for leaf in sources if leaf is not None}
            name = step.arguments.op.__name__
            if name in _LAYOUTS and len(sources) == 1:
                origins.append(sources[0])
                continue
            origins.append(None)
            if leaves and None not in sources and leaves <= weights:
                # one operand stays an input: a result of weights only would be computed at load, and take memory
                weights.discard(min(leaves, key=sizes.__getitem__))
            if name in _PRODUCTS:
                operands |= leaves
        operands &= weights
        if sum([sizes[index] for index in operands]) < LEAST_BYTES:
            return []
        return sorted(
            [index for index in weights if index in operands or sizes[index] <= SMALL_BYTES]
        )


class Packed(Reader):
    """A program with some tensors as weights, valid until one of them is shared, written or freed.

    Args:
        indices: The inputs of the program that are weights.
        cells: The tensors of all inputs.
    """

    __slots__ = (
        "__weakref__", "_cells", "_others", "_select", "_storages", "indices", "model", "num_bytes",
        "used", "valid",
    )  # fmt: skip

    def __init__(self, indices: list[int], cells: Sequence[Cell]) -> None:
        self.model: Model | None = None
        """The loaded program; None if it is not valid."""
        self.valid = True
        self.num_bytes = sum([_num_bytes(cells[index]) for index in indices])
        """The size of the weights."""
        self.used = 0
        """The time of its last run, as a number of `_clock`."""
        self._storages: tuple[Any, ...] = tuple([cells[index].storage for index in indices])
        # itemgetter returns a tuple for two indices or more
        self._select: Callable[[Any], tuple[Any, ...]] = itemgetter(*indices, indices[0])
        chosen = set(indices)
        self._others = [index for index in range(len(cells)) if index not in chosen]
        drop = partial(_drop, weakref.ref(self))
        self._cells = [weakref.ref(cells[index], drop) for index in indices]
        for index in indices:
            cells[index].add_reader(self)

    def fits(self, storages: Sequence[driver.Tensor | None]) -> bool:
        """Whether these tensors are the packed ones."""
        return all(map(is_, self._select(storages), self._storages))

    def drop_copies(self) -> None:
        self.valid, self.model = False, None
        self._storages, self.num_bytes = (), 0

    def holds(self, storage: driver.Tensor) -> bool:
        return any([each is storage for each in self._storages])

    def inputs(self, storages: Sequence[driver.Tensor | None]) -> list[driver.Tensor | None]:
        """The tensors that are not weights."""
        return [storages[index] for index in self._others]


def _drop(packed: weakref.ref[Packed], _: object) -> None:
    if (target := packed()) is not None:
        target.drop_copies()


class PackedCopies:
    """All packed copies of this process, for the limit of their total size."""

    def __init__(self) -> None:
        self.alive: weakref.WeakSet[Packed] = weakref.WeakSet()
        self.loaded = 0
        """The number of programs that were loaded with packed weights."""
        self._clock = itertools.count()

    def next_use(self) -> int:
        """A number greater than those of all earlier uses: the least recently used copies are dropped first."""
        return next(self._clock)


COPIES_OF_ALL = PackedCopies()


def packed_bytes() -> int:
    """The bytes of all packed copies."""
    return sum([packed.num_bytes for packed in list(COPIES_OF_ALL.alive)])


def packed_programs() -> int:
    """The number of programs that this process has loaded with packed weights."""
    return COPIES_OF_ALL.loaded


class _Window:
    """Compares the tensors of some runs of a program with those of the first of them."""

    def __init__(self, storages: Sequence[driver.Tensor | None], runs: int) -> None:
        self.left = runs
        self.spent = 0
        """The total time of the runs in nanoseconds."""
        # weak references, so that a loop can free its tensors
        self._stable = [(index, weakref.ref(storage)) for index, storage in enumerate(storages)]

    def add(self, storages: Sequence[driver.Tensor | None], nanoseconds: int) -> None:
        """Adds a run."""
        self.left -= 1
        self.spent += nanoseconds
        self._stable = [pair for pair in self._stable if pair[1]() is storages[pair[0]]]

    def stable(self) -> list[int]:
        """The indices of the tensors that were the same in all runs."""
        return [index for index, _ in self._stable]


class Program:
    """A compiled program.

    Args:
        blueprint: Stages its copies with weights.
        model: The model.
        compile_ns: The time to compile it, in nanoseconds.
    """

    __slots__ = ("_blueprint", "_compile_ns", "_packed", "_runs", "_window", "model")

    def __init__(self, blueprint: Blueprint, model: Model, compile_ns: int) -> None:
        self.model = model
        self._blueprint = blueprint
        self._compile_ns = compile_ns
        self._packed: list[Packed] = []
        self._window: _Window | None = None
        products = any(step.arguments.op.__name__ in _PRODUCTS for step in blueprint.steps)
        self._runs = RUNS if products else 0
        """The length of the next window; 0 if nothing can be packed."""

    def execute(self, cells: Sequence[Cell], extra: Sequence[Extra]) -> list[driver.Tensor]:
        """Runs the program. One thread at a time calls it.

        Args:
            cells: The tensors in memory that it reads.
            extra: The inputs after these.
        """
        storages = [cell.storage for cell in cells]
        for packed in self._packed:
            model = packed.model
            if model is not None and packed.fits(storages):
                packed.used = COPIES_OF_ALL.next_use()
                return model.execute(*packed.inputs(storages), *extra)
        if not self._runs:
            return self.model.execute(*storages, *extra)
        start = time.perf_counter_ns()
        results = self.model.execute(*storages, *extra)
        window = self._window
        if window is None:
            window = self._window = _Window(storages, self._runs)
        window.add(storages, time.perf_counter_ns() - start)
        # a copy takes about as long to make as the program
        if window.left <= 0 and window.spent >= COST * self._compile_ns:
            self._window = None
            self._runs = min(BACKOFF * self._runs, _LONGEST)
            del storages  # `owned_cells` counts references
            self._pack(cells, window.stable())
        return results

    def _pack(self, cells: Sequence[Cell], stable: Sequence[int]) -> None:
        """Loads a copy of the program with unchanged tensors as weights, if nothing else can write to them."""
        limit = flags.MAX_EAGER_PACKED_SIZE << 20
        if not limit or flags.MAX_INTERPRET:
            return
        own = owned_cells([cells[index] for index in stable])
        stable = [index for index, is_own in zip(stable, own, strict=True) if is_own]
        indices = self._blueprint.weights(stable, cells)
        size = sum([_num_bytes(cells[index]) for index in indices])
        if not indices or size > limit or under_pressure(size):
            return
        packed = Packed(indices, cells)
        # checked again: an access between the first check and the registration of `packed` was not reported to it
        if not all(owned_cells([cells[index] for index in indices])):
            return
        self._make_room(limit - size)
        registry = {weight_name(index): cells[index].borrowed_storage() for index in indices}
        packed.model = self._blueprint.load(self._blueprint.stage(indices).graph, registry)
        COPIES_OF_ALL.loaded += 1
        if not packed.valid:
            packed.model = None
            return
        packed.used = COPIES_OF_ALL.next_use()
        self._packed.append(packed)
        COPIES_OF_ALL.alive.add(packed)

    def _make_room(self, limit: int) -> None:
        """Drops the least recently used copies of this program beyond `COPIES`, and of all beyond a size in bytes."""
        self._packed = [packed for packed in self._packed if packed.valid]
        by_use = sorted(self._packed, key=lambda packed: packed.used)
        for packed in by_use[: max(0, len(by_use) - COPIES + 1)]:
            packed.drop_copies()
        for packed in sorted(COPIES_OF_ALL.alive, key=lambda packed: packed.used):
            if packed_bytes() <= limit:
                break
            packed.drop_copies()
        self._packed = [packed for packed in self._packed if packed.valid]


def _num_bytes(cell: Cell) -> int:
    type_ = cell.type
    return math.prod(type_.shape) * type_.dtype.size_in_bytes
