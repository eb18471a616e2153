"""Places of values in buffers, and what a launch reads and writes."""

from __future__ import annotations

import numpy as np
import pytest

from max._backends.cpu.backend import cpu_backends
from max._backends.kernel_call import Arg, Geometry, Operand, Workspace
from max._backends.regions import ArgView
from max._compiler.lowering.kernel_tables import Argument, KernelTables
from max._compiler.lowering.lowered_graph import (
    Buffer,
    BufferBound,
    Number,
    Pointer,
    UnsupportedOpError,
)
from max._compiler.lowering.placing import Placing, operand_of
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops
from max.mlir import GraphOp, MoOp, ResourceAttr
from max.mlir.dims import DimExpr

DEVICE = DeviceRef.CPU()
LARGE = np.arange(4000, dtype=np.float32)


@pytest.fixture
def placing() -> Placing:
    """The places of a graph with a small constant and one that is a resource of the module; none is lowered yet."""
    with Graph("g", input_types=[TensorType(DType.float32, ["n"], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        large = ops.constant(LARGE, DType.float32, DEVICE)
        small = ops.constant(np.float32([2, 3]), DType.float32, DEVICE)
        graph.output(x, large, small)
    (op,) = [op for op in graph.to_mlir().body.block.ops if isinstance(op, GraphOp)]
    return Placing(op, KernelTables(cpu_backends()), {})


def argument(buffer: int) -> Argument:
    return Argument(Pointer(buffer), ArgView(DType.float32, (4,), (1,)))


def test_constants_have_buffers_with_the_names_of_their_resources(placing: Placing) -> None:
    constants = [op for op in placing.graph.body if op.name == "mo.constant"]
    pointers = placing.pointers([op.results[0] for op in constants])
    assert pointers == [Pointer(index) for index in range(len(constants))]
    assert placing.pointers([constants[0].results[0]]) == pointers[:1], "placed once"
    for op, buffer in zip(constants, placing.lowered.buffers, strict=True):
        value = op.attributes["value"]
        assert buffer.name == (value.key if isinstance(value, ResourceAttr) else "")
        assert buffer.kind == "constant" and buffer.bytes == buffer.array.nbytes
    assert [bool(buffer.name) for buffer in placing.lowered.buffers].count(True) == 1
    assert placing.staged_op == -1, "no op is being lowered"


def test_a_workspace_and_its_ends(placing: Placing) -> None:
    place = placing.workspace(Workspace(DType.float64, (3, 5)))
    assert placing.lowered.buffers[place.buffer].bytes == 120
    assert place.pointer(2) == Pointer(place.buffer, 16)
    ends = [placing.bound_address(BufferBound(place.buffer, end)) for end in (False, True)]
    assert ends == [Pointer(place.buffer, 0), Pointer(place.buffer, 120)]


@pytest.mark.parametrize("written", [False, True])
def test_a_launch_uses_the_memory_of_its_device_only(placing: Placing, written: bool) -> None:
    here, there = (placing.buffer(Buffer("temp", 16, device=device)) for device in (0, 1))
    placing.backends = (*placing.backends, *cpu_backends())
    placing.launch(("key", ()), [argument(here), argument(here)], [False, True], False, "add")
    (launch,) = placing.launches
    assert (launch.reads, launch.writes, launch.flops) == ((here,), (here,), 0)
    with pytest.raises(UnsupportedOpError, match="add runs on .*in the memory of"):
        placing.launch(
            ("key", ()), [argument(here), argument(there)], [False, written], False, "add"
        )


def test_kernels_are_those_of_the_device(placing: Placing) -> None:
    """Its library lowers an op; the dims of an operand are those of its type."""
    assert placing.kernels is placing.tables[0]
    x, n = placing.graph.args[0], DimExpr.symbol("n")
    operand = operand_of(x)
    assert operand == Operand(DType.float32, (n,))
    call = placing.lower_call(
        "mo.cumsum", [operand], [operand], {"axis": 0, "exclusive": False, "reverse": False}
    )
    assert [arg.source for arg in call.args if isinstance(arg, Arg)] == ["result", "operand"]


def test_a_value_without_a_place(placing: Placing) -> None:
    (x, *_) = placing.graph.args
    with pytest.raises(AssertionError, match="has no place"):
        placing.place(x)
    assert not isinstance(x.owner, MoOp)


def test_buffers_of_a_launch_are_in_order(placing: Placing) -> None:
    """Programs are compared, and found on the disk, by their text."""
    places = [placing.buffer(Buffer("temp", 16)) for _ in range(20)]
    reads, writes = [places[i] for i in (16, 8, 1)], [places[i] for i in (17, 9, 2)]
    arguments = [argument(buffer) for buffer in (*reads, *writes)]
    placing.launch(
        ("key", ()), arguments, [False] * 3 + [True] * 3, False, "add", also_read=writes[:2]
    )
    assert placing.launches[-1].reads == tuple(places[i] for i in (1, 8, 9, 16, 17))
    assert placing.launches[-1].writes == tuple(places[i] for i in (2, 9, 17))


def test_results_have_memory_of_their_size(placing: Placing) -> None:
    """Temporary, or kept for all executions; a view lies in its operand's."""
    with Graph("g", input_types=[TensorType(DType.bfloat16, ["n", 3], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        y = x + x
        graph.output(y, ops.transpose(y, 0, 1), y * y)
    (op,) = [op for op in graph.to_mlir().body.block.ops if isinstance(op, GraphOp)]
    placing = Placing(op, placing.tables, {})
    add, view, mul = [
        op for op in placing.graph.body if op.name in ("mo.add", "mo.transpose", "mo.mul")
    ]
    placing.kept.add(mul.results[0])
    for each, kind in ((add, "temp"), (mul, "kept")):
        place = placing.allocate(each.results[0])
        buffer = placing.lowered.buffers[place.buffer]
        assert (buffer.kind, str(buffer.bytes), buffer.device) == (kind, "n * 6", 0)
        assert placing.place(each.results[0]) is place and place.dtype is DType.bfloat16
    placing.view(view)
    seen, source = placing.place(view.results[0]), placing.place(add.results[0])
    assert seen.buffer == source.buffer and seen.layout == source.layout.transpose([1, 0])


def test_ends_of_buffers_and_grids_of_a_launch(placing: Placing) -> None:
    """A slot may be where a buffer begins or ends; a grid of numbers has numbers."""
    buffer = placing.buffer(Buffer("temp", 48))
    slots = (BufferBound(buffer, False), Number(7), BufferBound(buffer, True))
    one = DimExpr.of(1)
    placing.launch(
        ("key", slots),
        [argument(buffer)],
        [True],
        True,
        "add",
        geometry=Geometry((one + 2, 4), (32,)),
    )
    (launch,) = placing.launches
    assert launch.slots == (Pointer(buffer, 0), Number(7), Pointer(buffer, 48)) and launch.serial
    assert (
        launch.geometry == Geometry((3, 4), (32,), shared_bytes=0)
        and type(launch.geometry.grid[0]) is int
    )
