"""Lowers a graph of regions and library ops to a template: ops become launches, values places in buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xdsl.ir import Attribute

from max._compiler.code import Check, TensorInfo
from max._compiler.codegen.nest import NestText
from max._compiler.codegen.spec import ArgView
from max._compiler.devices import device_of, index_of
from max._compiler.kernels import Argument, KernelTables
from max._compiler.layout import Layout
from max._compiler.lower_regions import RegionLowering
from max._compiler.mok import CheckOp, OnceOp, RegionOp
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.materialise import base_of
from max._compiler.placing import Place
from max._compiler.shapes import is_view, shape_of
from max._compiler.sites import site_of
from max._compiler.sizes import product, simplify
from max._compiler.template import (
    Buffer,
    CallStep,
    Discover,
    IfStep,
    Pointer,
    Template,
    UnsupportedOpError,
    WhileStep,
    mark,
)
from max.dtype import DType
from max.mlir import (
    BufferType,
    CallOp,
    ChainType,
    GraphOp,
    IfOp,
    MoOp,
    OpaqueType,
    ShapedType,
    SubgraphOp,
    WhileOp,
    bind_call,
)

__all__ = ["UnsupportedOpError", "lower_graph"]


class GraphLowering(RegionLowering):
    """Lowers one graph: its inputs and outputs, buffers, calls, branches and loops."""

    def run(self) -> Template:
        template = self.template
        for argument in self.graph.args:
            if isinstance(argument.type, ChainType):
                continue
            type_ = argument.type
            if isinstance(type_, OpaqueType):
                raise UnsupportedOpError(f"input of type {type_}: opaque values are not supported")
            assert isinstance(type_, ShapedType)
            self.known_symbols.update(name for dim in type_.shape for name in dim.symbols)
            shape = shape_of(argument)
            info = TensorInfo(type_.dtype, shape, type_.device.data, isinstance(type_, BufferType))
            index = self.buffer(
                Buffer(
                    "input",
                    simplify(product(shape) * type_.dtype.size_in_bytes),
                    device=index_of(type_, self.backends),
                )
            )
            template.inputs.append((index, info))
            self.places[argument] = Place(index, Layout.contiguous(shape), type_.dtype)
        for op in ops_of(self.graph.block):
            self.visit(op)
        return template

    def visit(self, op: MoOp) -> None:
        self.site = site_of(op)
        self.device = device_of(op, self.backends)
        if isinstance(op, OnceOp):
            self.once(op)
        elif isinstance(op, RegionOp):
            self.region(op)
        elif isinstance(op, CallOp):
            self.call(op)
        elif isinstance(op, IfOp):
            self.choice(op)
        elif isinstance(op, WhileOp):
            self.loop(op)
        elif is_view(op):
            self.view(op)
        elif (method := self.METHODS.get(op.name)) is not None:
            method(self, op)
        else:
            self.library(op, op, None)

    def nothing(self, op: MoOp) -> None:
        """Ops without a launch."""

    def check(self, op: CheckOp) -> None:
        condition = op.condition
        have, want = simplify(condition.have), simplify(condition.want)
        self.template.checks.append(
            Check(have, want, condition.message, condition.exact, self.site)
        )

    def external(self, op: MoOp) -> None:
        type_ = op.results[0].type
        assert isinstance(type_, ShapedType)
        shape = shape_of(op.results[0])
        size = simplify(product(shape) * type_.dtype.size_in_bytes)
        index = self.buffer(
            Buffer(
                "weight",
                size,
                name=op.attr("name"),
                dtype=type_.dtype,
                shape=shape,
                device=self.device,
            )
        )
        self.places[op.results[0]] = Place(index, Layout.contiguous(shape), type_.dtype)

    def output(self, op: MoOp) -> None:
        for value in op.operands:
            if isinstance(value.type, ChainType):
                continue
            type_ = value.type
            assert isinstance(type_, ShapedType)
            place = self.place(value)
            info = TensorInfo(
                type_.dtype, shape_of(value), type_.device.data, isinstance(type_, BufferType)
            )
            self.template.outputs.append((place.buffer, info))

    def once(self, op: OnceOp) -> None:
        block = op.block
        for argument, value in zip(block.args, op.operands, strict=True):
            self.places[argument] = self.place(value)
        self.launches = self.template.once
        yielded = block.last_op
        assert yielded is not None
        self.kept.update(base_of(value) for value in yielded.operands)
        for inner in ops_of(block):
            if inner.name == "mok.yield":
                for result, value in zip(op.results, inner.operands, strict=True):
                    self.places[result] = self.place(value)
            else:
                self.visit(inner)
        self.launches = self.template.steps

    def call(self, op: CallOp) -> None:
        shapes = [v.type.shape for v in op.results if isinstance(v.type, ShapedType)]
        symbols = {name for shape in shapes for dim in shape for name in dim.symbols}
        reveals = tuple(sorted(symbols - self.known_symbols))
        self.known_symbols.update(reveals)
        operands = self.pointers(op.operands)
        results = [self.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)]
        types = [v.type for v in op.operands]
        step = self.call_step(op.callee, types, operands, results, op.prefix)
        self.launches.append(replace(step, reveals=reveals))

    def call_step(
        self,
        callee: str,
        types: Sequence[Attribute],
        operands: Sequence[Pointer],
        results: Sequence[int],
        prefix: str = "",
    ) -> CallStep:
        env = bind_call(callee, self.subgraphs[callee].input_types, types)
        pairs = tuple((name, simplify(dim)) for name, dim in env.items())
        return CallStep(callee, tuple(operands), tuple(results), pairs, prefix)

    def choice(self, op: IfOp) -> None:
        """Calls both branches, which write to the same results; only one if the predicate is constant."""
        predicate = self.place(op.operands[0]).pointer()
        operands = self.pointers(op.operands[1:])
        results = [self.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)]
        types = [v.type for v in op.operands[1:]]
        then, otherwise = [
            replace(self.call_step(name, types, operands, results), inherit=True)
            for name in op.callees
        ]
        constant_predicate = constant_of(op.operands[0].owner)
        if constant_predicate is not None:
            self.launches.append(then if constant_predicate else otherwise)
            return
        self.launches.append(IfStep(predicate, then, otherwise))

    def loop(self, op: WhileOp) -> None:
        """Lowers a loop. The results' buffers hold the carried values; the body writes the next ones to other buffers."""
        carried = [v for v in op.results if isinstance(v.type, ShapedType)]
        sources = [self.place(v) for v in op.operands[: len(carried)]]
        states = [self.allocate(v) for v in carried]
        for source, state in zip(sources, states, strict=True):
            self.copy_in_memory(source, state, "while")
        captured = self.pointers(op.operands[len(carried) :])
        operands = [*[state.pointer() for state in states], *captured]
        types = [v.type for v in op.operands]
        condition, body = op.callees
        decision = self.subgraphs[condition].output_types[0]
        predicate = self.buffer(Buffer("temp", 1, device=index_of(decision, self.backends)))
        following = [
            replace(state, buffer=self.buffer(replace(self.template.buffers[state.buffer])))
            for state in states
        ]
        results = [place.buffer for place in following]
        outside, self.launches = self.launches, []
        for source, state in zip(following, states, strict=True):
            self.copy_in_memory(source, state, "while")
        update, self.launches = tuple(self.launches), outside
        self.launches.append(
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
            self.launches.append(Discover("print", (), (), DType.int8, (), f"{label}: {text}"))
            return
        place = self.place(op.operands[0])
        shape = shape_of(op.operands[0])
        self.launches.append(
            Discover("print", (), (place.pointer(),), place.dtype, shape, str(label))
        )

    def copy_in_memory(self, source: Place, target: Place, name: str) -> None:
        """Launches a copy on the device of both places."""
        self.device = self.template.buffers[target.buffer].device
        self.copy(source, target, name)

    def device_copy(self, op: MoOp) -> None:
        """Ends a segment: between segments the host copies from one memory to another."""
        source, target = self.place(op.operands[0]), self.allocate(op.results[0])
        # the target is written in a segment of its own device
        self.launches.append(mark([target.buffer], self.device))
        nbytes = self.template.buffers[target.buffer].bytes
        bounds = (source.pointer(), target.pointer())
        self.launches.append(Discover("copy", (), bounds, DType.uint8, (nbytes,)))

    def buffer_create(self, op: MoOp) -> None:
        self.allocate(op.results[0])

    def buffer_load(self, op: MoOp) -> None:
        """The buffer itself if no later op uses it, else a copy."""
        value = op.operands[0]
        place = self.place(value)
        used_later = False
        current = op.next_op
        while current is not None:
            touches = value in current.operands
            if touches and current.name not in ("mo.buffer_load", "mo.output"):
                used_later = True
                break
            current = current.next_op
        if not used_later:
            self.places[op.results[0]] = place
            return
        self.copy(place, self.allocate(op.results[0]), "copy")

    def buffer_store(self, op: MoOp) -> None:
        self.copy(self.place(op.operands[0]), self.place(op.operands[1]), "buffer_store")

    def buffer_store_slice(self, op: MoOp) -> None:
        target = self.place(op.operands[1])
        starts = [simplify(s) if not isinstance(s, int) else s for s in op.attr("start")]
        steps = [s if isinstance(s, int) else s.value for s in op.attr("step")]
        layout = target.layout.slice(starts, steps, shape_of(op.operands[0]))
        self.copy(self.place(op.operands[0]), replace(target, layout=layout), "buffer_store_slice")

    def shape_to_tensor(self, op: MoOp) -> None:
        place = self.allocate(op.results[0])
        dims = [simplify(dim) if not isinstance(dim, int) else dim for dim in op.attr("shape")]
        lines = "".join(f"    o0[{i}] = d{i}\n" for i in range(len(dims)))
        params = "".join(f", d{i}: k.i64" for i in range(len(dims)))
        source = f"def region(o0: k.Output{params}, ctx: k.Context):\n{lines or '    pass'}\n"
        view = ArgView(place.dtype, (len(dims),), None, True)
        argument = Argument(place.pointer(), view)
        kernel = self.kernels.region(NestText(source, (view,), tuple(dims), False), [argument])
        self.launch(kernel, [argument], [True], True, "shape_to_tensor")

    METHODS: Mapping[str, Any] = {
        "mo.constant": nothing,
        "mo.chain_create": nothing,
        "mo.constant.external": external,
        "mo.output": output,
        "mo.buffer_create": buffer_create,
        "mo.buffer_load": buffer_load,
        "mo.buffer_store": buffer_store,
        "mo.buffer_store_slice": buffer_store_slice,
        "mo.concat": RegionLowering.concat,
        "mo.shape_to_tensor": shape_to_tensor,
        "mo.print": print,
        "mok.check": check,
        "mok.device_copy": device_copy,
        "mok.attention": RegionLowering.attention,
        "mok.pack": RegionLowering.pack,
        "mok.packed_products": RegionLowering.packed_products,
        "mok.grouped_products": RegionLowering.packed_products,
    }


def lower_graph(
    graph: GraphOp,
    tables: KernelTables,
    subgraphs: Mapping[str, SubgraphOp],
    scope: Iterable[str] = (),
) -> Template:
    """Lowers a graph or subgraph after all passes.

    Args:
        graph: The graph.
        tables: The kernels of the compilation, by device.
        subgraphs: The subgraphs that it may call, by name.
        scope: Symbols that the graph shares with the enclosing graph; see `scopes`.

    Raises:
        UnsupportedOpError: An op has no kernel.
    """
    return GraphLowering(graph, tables, subgraphs, scope).run()
