"""Lowers a graph of regions and library ops: ops become launches, values places in buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xdsl.ir import Attribute

from max._backends.regions import ArgView, RegionKernel
from max._compiler.analysis.devices import device_of, index_of
from max._compiler.analysis.layout import Layout
from max._compiler.analysis.shapes import is_view, shape_of
from max._compiler.locations import staged_op_of
from max._compiler.lowering.kernel_tables import Argument, KernelTables
from max._compiler.lowering.library_lowering import LibraryLowering
from max._compiler.lowering.lowered_graph import (
    Buffer,
    CallStep,
    HostStep,
    IfStep,
    LoweredGraph,
    Pointer,
    UnsupportedOpError,
    WhileStep,
    mark,
)
from max._compiler.lowering.placing import Place, Placing
from max._compiler.lowering.region_lowering import RegionLowering
from max._compiler.mok import (
    AttentionOp,
    CheckOp,
    DeviceCopyOp,
    OnceOp,
    PackingOp,
    ProductsOp,
    RegionOp,
)
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.materialize import base_of
from max._compiler.program.code import Check, TensorInfo
from max.dtype import DType
from max.mlir import (
    BufferType,
    CallOp,
    ChainType,
    GraphOp,
    IfOp,
    MoOp,
    ShapedType,
    SubgraphOp,
    WhileOp,
    bind_call,
)
from max.mlir.ops.buffer import (
    BufferCreateOp,
    BufferLoadOp,
    BufferStoreOp,
    BufferStoreSliceOp,
    ChainCreateOp,
    PrintOp,
)
from max.mlir.ops.constant import ConstantExternalOp, ConstantOp
from max.mlir.ops.control import CustomOp, OutputOp
from max.mlir.ops.shape import ConcatOp, ShapeToTensorOp
from max.mlir.sizes import product, simplify

__all__ = ["UnsupportedOpError", "lower_graph"]


class GraphLowering:
    """Lowers one graph: its inputs and outputs, buffers, calls, branches and loops; the other ops by family.

    Args:
        placing: The graph, and the buffers and launches that it becomes.
    """

    def __init__(self, placing: Placing) -> None:
        self.placing = placing
        self.library_ops = LibraryLowering(placing)
        self.regions = RegionLowering(placing, self.library_ops)
        self.methods: Mapping[type[MoOp], Callable[[Any], None]] = {
            ConstantOp: self.no_launch,
            ChainCreateOp: self.no_launch,
            ConstantExternalOp: self.external,
            OutputOp: self.output,
            BufferCreateOp: self.buffer_create,
            BufferLoadOp: self.buffer_load,
            BufferStoreOp: self.buffer_store,
            BufferStoreSliceOp: self.buffer_store_slice,
            ConcatOp: self.regions.concat,
            ShapeToTensorOp: self.shape_to_tensor,
            PrintOp: self.print,
            CustomOp: self.library_ops.custom,
            CheckOp: self.check,
            DeviceCopyOp: self.device_copy,
            AttentionOp: self.library_ops.attention,
        }

    def run(self) -> LoweredGraph:
        lowered = self.placing.lowered
        for argument in self.placing.graph.args:
            if isinstance(argument.type, ChainType):
                continue
            type_ = argument.type
            assert isinstance(type_, ShapedType)
            # sizes of inputs are known before the first launch
            self.placing.known_symbols.update(name for dim in type_.shape for name in dim.symbols)
            shape = shape_of(argument)
            info = TensorInfo(type_.dtype, shape, type_.device.data, isinstance(type_, BufferType))
            index = self.placing.buffer(
                Buffer(
                    "input",
                    simplify(product(shape) * type_.dtype.size_in_bytes),
                    device=index_of(type_, self.placing.backends),
                )
            )
            lowered.inputs.append((index, info))
            self.placing.places[argument] = Place(index, Layout.contiguous(shape), type_.dtype)
        for op in ops_of(self.placing.graph.block):
            self.visit(op)
        return lowered

    def visit(self, op: MoOp) -> None:
        # what the op becomes (launches, checks) carries the line of the user's program
        self.placing.staged_op = staged_op_of(op)
        self.placing.device = device_of(op, self.placing.backends)
        if isinstance(op, OnceOp):
            self.once(op)
        elif isinstance(op, RegionOp):
            self.regions.region(op)
        elif isinstance(op, CallOp):
            self.call(op)
        elif isinstance(op, IfOp):
            self.branch(op)
        elif isinstance(op, WhileOp):
            self.loop(op)
        elif isinstance(op, ProductsOp):
            self.regions.products(op)
        elif isinstance(op, PackingOp):
            self.library_ops.pack(op)
        elif is_view(op):
            self.placing.view(op)
        elif (method := self.methods.get(type(op))) is not None:
            method(op)
        else:
            self.library_ops.lower_op(op, op, None)

    def no_launch(self, op: MoOp) -> None:
        """Constants and chains need no launch."""

    def check(self, op: CheckOp) -> None:
        condition = op.condition
        actual, required = simplify(condition.actual), simplify(condition.required)
        self.placing.lowered.checks.append(
            Check(actual, required, condition.message, condition.exact, self.placing.staged_op)
        )

    def external(self, op: MoOp) -> None:
        type_ = op.results[0].type
        assert isinstance(type_, ShapedType)
        shape = shape_of(op.results[0])
        size = simplify(product(shape) * type_.dtype.size_in_bytes)
        index = self.placing.buffer(
            Buffer(
                "weight",
                size,
                name=op.attr("name"),
                dtype=type_.dtype,
                shape=shape,
                device=self.placing.device,
            )
        )
        self.placing.places[op.results[0]] = Place(index, Layout.contiguous(shape), type_.dtype)

    def output(self, op: MoOp) -> None:
        for value in op.operands:
            if isinstance(value.type, ChainType):
                continue
            type_ = value.type
            assert isinstance(type_, ShapedType)
            place = self.placing.place(value)
            info = TensorInfo(
                type_.dtype, shape_of(value), type_.device.data, isinstance(type_, BufferType)
            )
            self.placing.lowered.outputs.append((place.buffer, info))

    def once(self, op: OnceOp) -> None:
        block = op.block
        for argument, value in zip(block.args, op.operands, strict=True):
            self.placing.places[argument] = self.placing.place(value)
        # the ops of the body are lowered as all others; only their launches go elsewhere
        self.placing.launches = self.placing.lowered.once
        yielded = block.last_op
        assert yielded is not None
        self.placing.kept.update(base_of(value) for value in yielded.operands)
        for inner in ops_of(block):
            if inner.spec.terminator:
                for result, value in zip(op.results, inner.operands, strict=True):
                    self.placing.places[result] = self.placing.place(value)
            else:
                self.visit(inner)
        self.placing.launches = self.placing.lowered.steps

    def call(self, op: CallOp) -> None:
        shapes = [v.type.shape for v in op.results if isinstance(v.type, ShapedType)]
        symbols = {name for shape in shapes for dim in shape for name in dim.symbols}
        # sizes that only the callee can compute; later launches of the caller may have them in their slots
        reveals = tuple(sorted(symbols - self.placing.known_symbols))
        self.placing.known_symbols.update(reveals)
        operands = self.placing.pointers(op.operands)
        results = [
            self.placing.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)
        ]
        types = [v.type for v in op.operands]
        step = self.call_step(op.callee, types, operands, results, op.prefix)
        self.placing.launches.append(replace(step, reveals=reveals))

    def call_step(
        self,
        callee: str,
        types: Sequence[Attribute],
        operands: Sequence[Pointer],
        results: Sequence[int],
        prefix: str = "",
    ) -> CallStep:
        env = bind_call(callee, self.placing.subgraphs[callee].input_types, types)
        pairs = tuple((name, simplify(dim)) for name, dim in env.items())
        return CallStep(callee, tuple(operands), tuple(results), pairs, prefix)

    def branch(self, op: IfOp) -> None:
        """Calls both branches, which write to the same results; only one if the predicate is constant."""
        predicate = self.placing.place(op.operands[0]).pointer()
        operands = self.placing.pointers(op.operands[1:])
        results = [
            self.placing.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)
        ]
        types = [v.type for v in op.operands[1:]]
        then, otherwise = [
            # branches see the symbols of the graph around them
            replace(self.call_step(name, types, operands, results), inherit=True)
            for name in op.callees
        ]
        # the branch that is never taken would only cost compile time and memory
        constant_predicate = constant_of(op.operands[0].owner)
        if constant_predicate is not None:
            self.placing.launches.append(then if constant_predicate else otherwise)
            return
        self.placing.launches.append(IfStep(predicate, then, otherwise))

    def loop(self, op: WhileOp) -> None:
        """Lowers a loop. The results' buffers hold the carried values; the body writes the next values elsewhere."""
        carried = [v for v in op.results if isinstance(v.type, ShapedType)]
        sources = [self.placing.place(v) for v in op.operands[: len(carried)]]
        states = [self.placing.allocate(v) for v in carried]
        # the initial values may be used after the loop, whose states are overwritten
        for source, state in zip(sources, states, strict=True):
            self.copy_in_memory(source, state, "while")
        captured = self.placing.pointers(op.operands[len(carried) :])
        operands = [*[state.pointer() for state in states], *captured]
        types = [v.type for v in op.operands]
        condition, body = op.callees
        predicate_type = self.placing.subgraphs[condition].output_types[0]
        predicate = self.placing.buffer(
            Buffer(
                "temp",
                DType.bool.size_in_bytes,
                device=index_of(predicate_type, self.placing.backends),
            )
        )
        next_states = [
            replace(
                state,
                buffer=self.placing.buffer(replace(self.placing.lowered.buffers[state.buffer])),
            )
            for state in states
        ]
        results = [place.buffer for place in next_states]
        # collect the copies of the next values apart: they run after the body, in each iteration
        enclosing_launches, self.placing.launches = self.placing.launches, []
        for source, state in zip(next_states, states, strict=True):
            self.copy_in_memory(source, state, "while")
        update, self.placing.launches = tuple(self.placing.launches), enclosing_launches
        self.placing.launches.append(
            WhileStep(
                replace(self.call_step(condition, types, operands, [predicate]), inherit=True),
                Pointer(predicate),
                replace(self.call_step(body, types, operands, results), inherit=True),
                update,
            )
        )

    def print(self, op: MoOp) -> None:
        """Ends a segment: between segments the host reads and prints the value."""
        label, text = op.attr("label"), op.attr_or("text", None)
        if text is not None:
            self.placing.launches.append(
                HostStep("print", (), (), DType.int8, (), f"{label}: {text}")
            )
            return
        place = self.placing.place(op.operands[0])
        shape = shape_of(op.operands[0])
        self.placing.launches.append(
            HostStep("print", (), (place.pointer(),), place.dtype, shape, str(label))
        )

    def copy_in_memory(self, source: Place, target: Place, name: str) -> None:
        """Launches a copy on the device of both places."""
        self.placing.device = self.placing.lowered.buffers[target.buffer].device
        self.regions.copy(source, target, name)

    def device_copy(self, op: MoOp) -> None:
        """Ends a segment: between segments the host copies from one memory to another."""
        source, target = self.placing.place(op.operands[0]), self.placing.allocate(op.results[0])
        # the target is written in a segment of its own device
        self.placing.launches.append(mark([target.buffer], self.placing.device))
        nbytes = self.placing.lowered.buffers[target.buffer].bytes
        bounds = (source.pointer(), target.pointer())
        self.placing.launches.append(HostStep("copy", (), bounds, DType.uint8, (nbytes,)))

    def buffer_create(self, op: MoOp) -> None:
        self.placing.allocate(op.results[0])

    def buffer_load(self, op: MoOp) -> None:
        """The buffer itself if no later op uses it, else a copy."""
        value = op.operands[0]
        place = self.placing.place(value)
        same = {value}
        inputs = self.placing.graph.args
        # a call may pass one buffer as several; an execution of the entry may not
        if isinstance(self.placing.graph, SubgraphOp) and value in inputs:
            same.update(other for other in inputs if isinstance(other.type, BufferType))
        used_later = False
        current = op.next_op
        while current is not None:
            touches = not same.isdisjoint(current.operands)
            if touches and type(current) not in (BufferLoadOp, OutputOp):
                used_later = True
                break
            current = current.next_op
        # nothing writes to the buffer before the output is read: no copy
        if not used_later:
            self.placing.places[op.results[0]] = place
            return
        self.regions.copy(place, self.placing.allocate(op.results[0]), "copy")

    def buffer_store(self, op: MoOp) -> None:
        self.regions.copy(
            self.placing.place(op.operands[0]), self.placing.place(op.operands[1]), "buffer_store"
        )

    def buffer_store_slice(self, op: MoOp) -> None:
        target = self.placing.place(op.operands[1])
        # a slice that is written needs a layout: its steps are static
        steps = [step.value for step in op.attr("step")]
        layout = target.layout.slice(op.attr("start"), steps, shape_of(op.operands[0]))
        self.regions.copy(
            self.placing.place(op.operands[0]), replace(target, layout=layout), "buffer_store_slice"
        )

    def shape_to_tensor(self, op: MoOp) -> None:
        place = self.placing.allocate(op.results[0])
        dims = [simplify(dim) for dim in op.attr("shape")]
        # a kernel with an argument for each dim: the sizes may depend on symbols
        lines = "".join(f"    o0[{i}] = d{i}\n" for i in range(len(dims)))
        params = "".join(f", d{i}: k.i64" for i in range(len(dims)))
        source = f"def region(o0: k.Output{params}, ctx: k.Context):\n{lines or '    pass'}\n"
        view = ArgView(place.dtype, (len(dims),), None)
        argument = Argument(place.pointer(), view)
        kernel = self.placing.kernels.region(
            RegionKernel(source, (view,), tuple(dims), serial=True), [argument]
        )
        self.placing.launch(kernel, [argument], [True], True, "shape_to_tensor")


def lower_graph(
    graph: GraphOp,
    tables: KernelTables,
    subgraphs: Mapping[str, SubgraphOp],
    scope: Iterable[str] = (),
) -> LoweredGraph:
    """Lowers a graph or subgraph after all passes.

    Args:
        graph: The graph.
        tables: The kernels of the compilation, by device.
        subgraphs: The subgraphs that it may call, by name.
        scope: Symbols that the graph shares with the enclosing graph; see `scopes`.

    Raises:
        UnsupportedOpError: An op has no kernel.
    """
    return GraphLowering(Placing(graph, tables, subgraphs, scope)).run()
