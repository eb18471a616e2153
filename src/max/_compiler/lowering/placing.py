"""The places of a graph's values in buffers, and the launches that write them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from xdsl.ir import SSAValue

from max._backends.backend import HOST, Backend
from max._backends.kernel_call import Geometry, KernelCall, Operand, Workspace
from max._compiler.analysis.devices import index_of
from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import shape_of, view_layout
from max._compiler.lowering.kernel_tables import Argument, KernelTable, KernelTables
from max._compiler.lowering.lowered_graph import (
    Buffer,
    BufferBound,
    Launch,
    LoweredGraph,
    Pointer,
    Slot,
    UnsupportedOpError,
)
from max._compiler.passes.base import constant_of
from max._compiler.program.code import WorkCode
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir import GraphOp, MoOp, ResourceAttr, ShapedType, SubgraphOp
from max.mlir.sizes import Size, product, simplify


@dataclass(frozen=True)
class Place:
    """The place of a value: a buffer, and a layout in elements."""

    buffer: int
    layout: Layout
    dtype: DType

    def pointer(self, offset: Size = 0) -> Pointer:
        """The address of the element at `offset`."""
        elements = simplify(self.layout.offset + offset)
        return Pointer(self.buffer, simplify(elements * self.dtype.size_in_bytes))


class Placing:
    """The buffers and launches of one graph that is being lowered.

    Args:
        graph: The graph.
        tables: The kernels of the compilation, by device.
        subgraphs: The subgraphs of the module, for the symbols of calls.
        scope: Symbols that the graph shares with the enclosing graph.
    """

    def __init__(
        self,
        graph: GraphOp,
        tables: KernelTables,
        subgraphs: Mapping[str, SubgraphOp],
        scope: Iterable[str] = (),
    ) -> None:
        self.graph = graph
        self.tables = tables
        self.backends = tables.backends
        self.device = HOST
        """The index of the backend that the current op runs on."""
        self.subgraphs = subgraphs
        self.lowered = LoweredGraph(graph.sym_name)
        self.places: dict[SSAValue, Place] = {}
        self.launches: list[Any] = self.lowered.steps
        self.kept: set[SSAValue] = set()
        self.staged_op = -1
        """The number of the staged op that is being lowered."""
        self.known_symbols: set[str] = set(scope)
        """The symbols whose sizes are known at the op that is being lowered."""

    @property
    def kernels(self) -> KernelTable:
        """The kernels of the device that the current op runs on."""
        return self.tables[self.device]

    @property
    def backend(self) -> Backend:
        """The device that the current op runs on."""
        return self.tables[self.device].backend

    def lower_call(
        self,
        name: str,
        operands: Sequence[Operand],
        results: Sequence[Operand],
        attributes: Mapping[str, Any],
    ) -> KernelCall:
        """The kernel call that the device's kernel library chooses for an op."""
        backend = self.backend
        return backend.library.lower(name, operands, results, attributes, backend.target)

    def buffer(self, buffer: Buffer) -> int:
        """Adds a buffer to the lowered graph; returns its index."""
        self.lowered.buffers.append(buffer)
        return len(self.lowered.buffers) - 1

    def allocate(self, value: SSAValue) -> Place:
        """Allocates a buffer for a value."""
        type_ = value.type
        assert isinstance(type_, ShapedType)
        shape = shape_of(value)
        size = simplify(product(shape) * type_.dtype.size_in_bytes)
        # results of `mok.once` outlive an execution
        kind = "kept" if value in self.kept else "temp"
        buffer = Buffer(kind, size, device=index_of(type_, self.backends))
        place = Place(self.buffer(buffer), Layout.contiguous(shape), type_.dtype)
        self.places[value] = place
        return place

    def place(self, value: SSAValue) -> Place:
        """The place of a value; a constant gets its buffer here."""
        place = self.places.get(value)
        if place is None:
            array = constant_of(value.owner)
            assert array is not None, f"{value.owner} has no place"
            owner = value.owner
            assert isinstance(owner, MoOp)
            attr = owner.attributes["value"]
            # large constants are resources of the module, which have a name across processes
            key = attr.key if isinstance(attr, ResourceAttr) else ""
            buffer = Buffer(
                "constant",
                array.nbytes,
                key,
                np.ascontiguousarray(array),
                device=index_of(value.type, self.backends),
            )
            index = self.buffer(buffer)
            place = Place(index, Layout.contiguous(array.shape), DType.from_numpy(array.dtype))
            self.places[value] = place
        return place

    def pointers(self, values: Sequence[SSAValue]) -> list[Pointer]:
        """The addresses of the values that have memory."""
        return [self.place(v).pointer() for v in values if isinstance(v.type, ShapedType)]

    def view(self, op: MoOp) -> None:
        """Places the result of a view in its operand's buffer: no launch."""
        (operand,), (result,) = op.operands, op.results
        source = self.place(operand)
        # `materialize` has copied what no strides describe
        layout = view_layout(op, source.layout)
        assert layout is not None, f"{op.name} has no layout"
        self.places[result] = replace(source, layout=layout)

    def workspace(self, workspace: Workspace) -> Place:
        """Allocates temporary memory that only one kernel uses."""
        # temporary for the memory plan: the next launch may have the same memory
        shape = tuple(simplify(dim) for dim in workspace.shape)
        size = simplify(product(shape) * workspace.dtype.size_in_bytes)
        buffer = Buffer("temp", size, device=self.device)
        return Place(self.buffer(buffer), Layout.contiguous(shape), workspace.dtype)

    def bound_address(self, limit: BufferBound) -> Pointer:
        """The start or end address of a buffer."""
        # for kernels that check each address against the ends of their buffers
        size = self.lowered.buffers[limit.buffer].bytes
        return Pointer(limit.buffer, size if limit.end else 0)

    def launch(
        self,
        kernel: tuple[str, tuple[Slot | BufferBound, ...]],
        arguments: Sequence[Argument],
        is_written: Sequence[bool],
        serial: bool,
        name: str,
        in_place: tuple[tuple[int, int], ...] = (),
        also_read: Sequence[int] = (),
        parts: Sequence[int] = (),
        flops: Size = 0,
        work: WorkCode | None = None,
        geometry: Geometry | None = None,
    ) -> None:
        """Appends the launch of a kernel.

        Args:
            kernel: The kernel's key and its argument slots.
            arguments: The tensors among the arguments.
            is_written: For each tensor whether the kernel writes it, else it reads it.
            serial: Whether one worker runs the launch.
            name: The name in errors and profiles.
            in_place: Pairs (written, read) of buffers that may share memory if no other operand is in the second.
            also_read: Written buffers that the kernel also reads.
            parts: Buffers of which the kernel writes a part that no other launch writes.
            flops: The number of arithmetic operations; 0 if unknown.
            work: As for `Launch`.
            geometry: The workers, for a device with a grid of blocks.

        Raises:
            UnsupportedOpError: A buffer is in the memory of another device.
        """
        key, slots = kernel
        # barriers and the memory plan follow from what a launch reads and writes
        read = [a.pointer.buffer for a, w in zip(arguments, is_written, strict=True) if not w]
        reads = {*read, *also_read}
        writes = {a.pointer.buffer for a, w in zip(arguments, is_written, strict=True) if w}
        # `place-operands` copied all others; a buffer that is written cannot be copied
        elsewhere = {self.lowered.buffers[b].device for b in reads | writes} - {self.device}
        if elsewhere:
            names = ", ".join(str(self.backends[index].device) for index in elsewhere)
            raise UnsupportedOpError(
                f"{name} runs on {self.backend.device}, and has operands in the memory of {names}"
            )
        self.launches.append(
            Launch(
                kernel=key,
                slots=tuple(
                    [self.bound_address(s) if isinstance(s, BufferBound) else s for s in slots]
                ),
                reads=tuple(sorted(reads)),
                writes=tuple(sorted(writes)),
                serial=serial,
                name=name,
                in_place=pairs_read_once(in_place, read),
                parts=tuple(parts),
                flops=flops,
                staged_op=self.staged_op,
                device=self.device,
                work=work,
                geometry=geometry and replace(geometry, grid=tuple(map(simplify, geometry.grid))),
            )
        )


def operand_of(value: SSAValue) -> Operand:
    """The dtype and shape of a value, for the kernel library."""
    type_ = value.type
    assert isinstance(type_, ShapedType)
    return Operand(type_.dtype, shape_of(value))


def pairs_read_once(
    pairs: Iterable[tuple[int, int]], read: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The pairs (written, read) of buffers whose operand a kernel reads at one place only.

    A buffer that several operands are views of may be read at one place after it is written at another.

    Args:
        pairs: The pairs of buffers that may share memory if nothing else reads the second.
        read: The buffer of each operand that the kernel reads.
    """
    count = Counter(read)
    return tuple([pair for pair in pairs if count[pair[1]] == 1])
