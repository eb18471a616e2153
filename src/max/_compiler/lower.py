"""From a graph of regions and library ops to a template: each op becomes a launch, each value a place in a buffer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Attribute, Operation, SSAValue

from max import kernel as k
from max._compiler.attention import attention_views
from max._compiler.codegen.epilogue import EpilogueText, write_epilogue, write_part_epilogues
from max._compiler.codegen.expressions import KERNEL_NAME, compute_dtype
from max._compiler.codegen.nest import ArgView, NestText, write_nest
from max._compiler.codegen.spec import Leaf, RegionSpec, Result
from max._compiler.kernels import Argument, KernelTable
from max._compiler.layout import Layout, collapse
from max._compiler.mok import BodyOp, MatmulOp, OnceOp, PackedProductsOp, PackOp, RegionOp
from max._compiler.passes.base import constant_of, ops_of
from max._compiler.passes.materialise import base_of
from max._compiler.products import plan_products
from max._compiler.region import RegionParts, epilogue_parts, region_parts
from max._compiler.shapes import is_view, shape_of, view_layout
from max._compiler.sizes import Size, may_be_negative, product, simplify
from max._compiler.template import (
    Buffer,
    CallStep,
    Check,
    Chosen,
    Discover,
    IfStep,
    Launch,
    Pointer,
    Template,
    TensorInfo,
    UnsupportedOpError,
    WhileStep,
)
from max._kernels import library
from max._kernels.strips import COLUMNS
from max.dtype import DType
from max.mlir import (
    OPS,
    BufferType,
    CallOp,
    ChainType,
    DimExpr,
    GraphOp,
    IfOp,
    MoOp,
    OpaqueType,
    ResourceAttr,
    ShapedType,
    SubgraphOp,
    WhileOp,
    bind_call,
)
from max.mlir.types import short_types

__all__ = ["UnsupportedOpError", "lower_graph", "scopes"]

DISCOVERING = {"mo.range": "range", "mo.slice_dynamic": "slice", "mo.nonzero": "count"}
"""Ops whose operands tell sizes when the program runs, and how."""
SERIAL_ELEMENTS = 2048
"""Regions of so few elements are not worth waking other workers for."""


@dataclass(frozen=True)
class Place:
    """Where a value is: a buffer and a layout, counted in elements."""

    buffer: int
    layout: Layout
    dtype: DType

    def pointer(self, offset: Size = 0) -> Pointer:
        """The address of an element."""
        elements = simplify(self.layout.offset + offset)
        return Pointer(self.buffer, simplify(elements * self.dtype.size_in_bytes))


class GraphLowering:
    """Lowers one graph.

    Args:
        graph: The graph.
        kernels: The kernels of the compilation.
        subgraphs: The subgraphs of the module, for the symbols of calls.
        scope: Symbols that mean here what they mean in the graph around.
    """

    def __init__(
        self,
        graph: GraphOp,
        kernels: KernelTable,
        subgraphs: Mapping[str, SubgraphOp],
        scope: Iterable[str] = (),
    ) -> None:
        self.graph = graph
        self.kernels = kernels
        self.subgraphs = subgraphs
        self.template = Template(graph.sym_name)
        self.places: dict[SSAValue, Place] = {}
        self.launches: list[Any] = self.template.steps
        self.kept: set[SSAValue] = set()
        self.least: dict[Check, None] = {}
        """Sizes that must not be negative."""
        self.known: set[str] = set(scope)
        """The symbols whose sizes are known where the lowering is."""

    # buffers -----------------------------------------------------------------------------------

    def buffer(self, buffer: Buffer) -> int:
        self.template.buffers.append(buffer)
        return len(self.template.buffers) - 1

    def allocate(self, value: SSAValue) -> Place:
        """A fresh buffer for a value."""
        type_ = value.type
        assert isinstance(type_, ShapedType)
        shape = shape_of(value)
        size = simplify(product(shape) * type_.dtype.size_in_bytes)
        kind = "kept" if value in self.kept else "temp"
        place = Place(self.buffer(Buffer(kind, size)), Layout.contiguous(shape), type_.dtype)
        self.places[value] = place
        self.check_size(value, shape)
        return place

    def check_size(self, value: SSAValue, shape: Sequence[Size]) -> None:
        """Notes what must not be negative when the program runs."""
        if any(map(may_be_negative, shape)):
            owner = value.owner
            assert isinstance(owner, Operation)  # sizes of inputs are bound, not computed
            name = region_name(owner) if isinstance(owner, RegionOp) else owner.name
            message = f"a result of {name.removeprefix('mo.')} would have a size of less than 0"
            self.least.update(
                (Check(dim, 0, message, least=True), None) for dim in shape if may_be_negative(dim)
            )

    def place(self, value: SSAValue) -> Place:
        """Where a value is."""
        found = self.places.get(value)
        if found is None:
            array = constant_of(value.owner)
            assert array is not None, f"{value.owner} has no place"
            owner = value.owner
            assert isinstance(owner, MoOp)
            attr = owner.attributes["value"]
            key = attr.key if isinstance(attr, ResourceAttr) else ""
            index = self.buffer(Buffer("constant", array.nbytes, key, np.ascontiguousarray(array)))
            found = Place(index, Layout.contiguous(array.shape), DType.from_numpy(array.dtype))
            self.places[value] = found
        return found

    def launch(
        self,
        kernel: tuple[str, tuple[Any, ...]],
        arguments: Sequence[Argument],
        written: Sequence[bool],
        serial: bool,
        name: str,
        in_place: tuple[tuple[int, int], ...] = (),
        both: Sequence[int] = (),
        parts: Sequence[int] = (),
        flops: Size = 0,
    ) -> None:
        key, slots = kernel
        reads = {a.pointer.buffer for a, w in zip(arguments, written, strict=True) if not w} | set(
            both
        )
        writes = {a.pointer.buffer for a, w in zip(arguments, written, strict=True) if w}
        self.launches.append(
            Launch(
                kernel=key,
                slots=slots,
                reads=tuple(sorted(reads)),
                writes=tuple(sorted(writes)),
                serial=serial,
                name=name,
                in_place=in_place,
                parts=tuple(parts),
                flops=flops,
            )
        )

    # the graph ---------------------------------------------------------------------------------

    def run(self) -> Template:
        template = self.template
        for argument in self.graph.args:
            if isinstance(argument.type, ChainType):
                continue
            type_ = argument.type
            if isinstance(type_, OpaqueType):
                raise UnsupportedOpError(f"input of type {type_}: opaque values are not supported")
            assert isinstance(type_, ShapedType)
            self.known.update(name for dim in type_.shape for name in dim.symbols)
            shape = shape_of(argument)
            info = TensorInfo(type_.dtype, shape, type_.device.data, isinstance(type_, BufferType))
            index = self.buffer(
                Buffer("input", simplify(product(shape) * type_.dtype.size_in_bytes))
            )
            template.inputs.append((index, info))
            self.places[argument] = Place(index, Layout.contiguous(shape), type_.dtype)
        for op in ops_of(self.graph.block):
            self.visit(op)
        template.checks = [*self.checks(), *self.least]
        return template

    def checks(self) -> list[Check]:
        """What rebinds promise, those inside of regions too."""
        found: dict[Check, None] = {}
        for op in self.graph.walk():
            if isinstance(op, MoOp) and op.name == "mo.rebind":
                pairs = zip(shape_of(op.operands[0]), shape_of(op.results[0]), strict=True)
                message = op.attr("message")
                found.update(
                    (Check(have, want, message), None) for have, want in pairs if have != want
                )
        return list(found)

    def visit(self, op: MoOp) -> None:
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
        """Ops that have no launch of their own."""

    def external(self, op: MoOp) -> None:
        type_ = op.results[0].type
        assert isinstance(type_, ShapedType)
        shape = shape_of(op.results[0])
        size = simplify(product(shape) * type_.dtype.size_in_bytes)
        index = self.buffer(
            Buffer("weight", size, name=op.attr("name"), dtype=type_.dtype, shape=shape)
        )
        self.places[op.results[0]] = Place(index, Layout.contiguous(shape), type_.dtype)

    def view(self, op: MoOp) -> None:
        source = self.place(op.operands[0])
        layout = view_layout(op, source.layout)
        assert layout is not None, f"{op.name} has no layout"
        self.places[op.results[0]] = replace(source, layout=layout)

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
        reveals = tuple(sorted(symbols - self.known))
        self.known.update(reveals)
        operands = self.pointers(op.operands)
        results = [self.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)]
        types = [v.type for v in op.operands]
        step = self.call_step(op.callee, types, operands, results, op.prefix)
        self.launches.append(replace(step, reveals=reveals))

    def pointers(self, values: Sequence[SSAValue]) -> list[Pointer]:
        """Where values are; those without memory are left out."""
        return [self.place(v).pointer() for v in values if isinstance(v.type, ShapedType)]

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
        """Both branches write to the same results."""
        predicate = self.place(op.operands[0]).pointer()
        operands = self.pointers(op.operands[1:])
        results = [self.allocate(v).buffer for v in op.results if isinstance(v.type, ShapedType)]
        types = [v.type for v in op.operands[1:]]
        then, otherwise = [
            replace(self.call_step(name, types, operands, results), inherit=True)
            for name in op.callees
        ]
        decided = constant_of(op.operands[0].owner)
        if decided is not None:
            self.launches.append(then if decided else otherwise)
            return
        self.launches.append(IfStep(predicate, then, otherwise))

    def loop(self, op: WhileOp) -> None:
        """What is carried is in the results' memory; the body computes the next values beside it."""
        carried = [v for v in op.results if isinstance(v.type, ShapedType)]
        sources = [self.place(v) for v in op.operands[: len(carried)]]
        states = [self.allocate(v) for v in carried]
        for source, state in zip(sources, states, strict=True):
            self.copy(source, state, "while")
        rest = self.pointers(op.operands[len(carried) :])
        operands = [*[state.pointer() for state in states], *rest]
        types = [v.type for v in op.operands]
        predicate = self.buffer(Buffer("temp", 1))
        following = [
            replace(
                state, buffer=self.buffer(Buffer("temp", self.template.buffers[state.buffer].bytes))
            )
            for state in states
        ]
        condition, body = op.callees
        results = [place.buffer for place in following]
        outside, self.launches = self.launches, []
        for source, state in zip(following, states, strict=True):
            self.copy(source, state, "while")
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
        """Ends a segment: between segments the host reads what is printed."""
        label, text = op.attr("label"), op.attr_or("text", None)
        if text is not None:
            self.launches.append(Discover("print", (), (), DType.int8, (), f"{label}: {text}"))
            return
        place = self.place(op.operands[0])
        shape = shape_of(op.operands[0])
        self.launches.append(
            Discover("print", (), (place.pointer(),), place.dtype, shape, str(label))
        )

    # buffers that change -----------------------------------------------------------------------

    def buffer_create(self, op: MoOp) -> None:
        self.allocate(op.results[0])

    def buffer_load(self, op: MoOp) -> None:
        """The buffer itself, where nothing writes to it afterwards, else a copy."""
        value = op.operands[0]
        place = self.place(value)
        later = False
        current = op.next_op
        while current is not None:
            touches = value in current.operands
            if touches and current.name not in ("mo.buffer_load", "mo.output"):
                later = True
                break
            current = current.next_op
        if not later:
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

    def copy(self, source: Place, target: Place, name: str, parts: Sequence[int] = ()) -> None:
        """A launch that copies from one layout to another."""
        shape = source.layout.shape
        dims, (read, written) = collapse(shape, [source.layout.strides, target.layout.strides])
        spec = RegionSpec(
            dims, False, (Leaf(source.dtype, read),), (Result(0, target.dtype, written),)
        )
        self.nest(spec, [(target, 0)], [(source, 0)], name, parts)

    def concat(self, op: MoOp) -> None:
        """Each operand is copied to its part of the result, where it was not computed there."""
        for index, operand in enumerate(op.operands):
            part = self.part_of_concat(op, index)
            source = self.place(operand)
            if source.buffer != part.buffer:
                self.copy(source, part, "concat", parts=[part.buffer])

    def part_of_concat(self, op: MoOp, index: int) -> Place:
        """Where an operand of a concatenation is in the result."""
        axis: int = op.attr("axis")
        result = self.places.get(op.results[0]) or self.allocate(op.results[0])
        shape = shape_of(op.operands[index])
        starts: list[Size] = [0] * len(shape)
        for operand in op.operands[:index]:
            starts[axis] = simplify(starts[axis] + shape_of(operand)[axis])
        return replace(result, layout=result.layout.slice(starts, [1] * len(shape), shape))

    def place_result(self, value: SSAValue) -> tuple[Place, bool]:
        """Where a region writes a result: a buffer of its own, or its part of the concatenation that alone needs it."""
        uses = list(value.uses)
        user = uses[0].operation if len(uses) == 1 else None
        if isinstance(user, MoOp) and user.name == "mo.concat":
            place = self.places[value] = self.part_of_concat(user, uses[0].index)
            return place, True
        return self.allocate(value), False

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

    # regions -----------------------------------------------------------------------------------

    def region(self, op: RegionOp) -> None:
        if op.kind == "library":
            self.library_region(op)
            return
        placed = [self.place_result(v) for v in op.results]
        parts = region_parts(op, layouts=[place.layout for place, _ in placed])
        operands = [self.place(v) for v in op.operands]
        results: list[tuple[Place, Size]] = [(place, 0) for place, _ in placed]
        sources = [(operands[index], offset) for index, offset in parts.sources]
        shared = [place.buffer for place, is_part in placed if is_part]
        self.nest(parts.spec, results, sources, region_name(op), shared, operations(op))

    def nest(
        self,
        spec: RegionSpec,
        results: Sequence[tuple[Place, Size]],
        sources: Sequence[tuple[Place, Size]],
        name: str,
        parts: Sequence[int] = (),
        flops: Size = 0,
    ) -> None:
        """A launch of the kernel of a region; places come with an offset in elements."""
        text = write_nest(spec, self.native_width(spec))
        count = len(results) + len(sources)
        workspaces = [
            self.workspace(library.Workspace(v.dtype, v.shape)) for v in text.args[count:]
        ]
        places = [*results, *sources, *((place, 0) for place in workspaces)]
        arguments = [
            Argument(place.pointer(offset), view)
            for (place, offset), view in zip(places, text.args, strict=True)
        ]
        size = spec.size
        serial = not text.parallel or (size is not None and size <= SERIAL_ELEMENTS)
        kernel = self.kernels.region(text, arguments)
        written = [True] * len(results) + [False] * len(sources) + [True] * len(workspaces)
        in_place = self.in_place(spec, results, sources)
        self.launch(kernel, arguments, written, serial, name, in_place, parts=parts, flops=flops)

    def native_width(self, spec: RegionSpec) -> int:
        widest = max((compute_dtype(v.dtype) for v in spec.values), key=lambda d: d.size_in_bytes)
        return min(
            self.kernels.target.width(KERNEL_NAME[widest]), self.kernels.target.width("f32") * 2
        )

    @staticmethod
    def in_place(
        spec: RegionSpec,
        results: Sequence[tuple[Place, Size]],
        sources: Sequence[tuple[Place, Size]],
        others: Sequence[Place] = (),
    ) -> tuple[tuple[int, int], ...]:
        """Pairs of result and operand buffers that may share memory: each is read before it is written.

        Args:
            spec: What is computed; where a kernel computes it after its own work, the first leaf has no source.
            results: Where the results are.
            sources: Where the leaves are.
            others: What the kernel reads besides, in an order of its own.
        """
        leaves = [v for v in spec.values if isinstance(v, Leaf)]
        leaves = leaves[len(leaves) - len(sources) :]
        elsewhere = {place.buffer for place in others}
        last = max(spec.stage, default=0)
        # an earlier walk must not overwrite what a later one reads
        if any(
            spec.stage[r.value] != last and r.strides and r.strides[-1] != 0 for r in spec.results
        ):
            return ()
        pairs: list[tuple[int, int]] = []
        for result, (target, _) in zip(spec.results, results, strict=True):
            for leaf, (source, offset) in zip(leaves, sources, strict=True):
                alone = sum(place.buffer == source.buffer for place, _ in sources) == 1
                alone = alone and source.buffer not in elsewhere
                whole = source.layout.is_contiguous and source.layout.offset == 0 and offset == 0
                same = (
                    leaf.strides == result.strides
                    and leaf.dtype.size_in_bytes == result.dtype.size_in_bytes
                )
                if alone and whole and same:
                    pairs.append((target.buffer, source.buffer))
        return tuple(pairs)

    def library_region(self, op: RegionOp) -> None:
        """A library op with its epilogues; one that cannot be written is a launch of its own."""
        for argument, value in zip(op.block.args, op.operands, strict=True):
            self.places[argument] = self.place(value)
        inner = ops_of(op.block)
        main = next(o for o in inner if isinstance(o, MatmulOp) or library.supports(o.name))
        for other in inner:
            if other is main:
                break
            if is_view(other):
                self.view(other)
        if isinstance(main, PackedProductsOp):
            self.packed_products(main, op)
            return
        parts = epilogue_parts(op, main)
        if parts is not None:
            self.library(main, op, parts)
            return
        self.library(main, main, None)
        self.rest(op, main, 0)

    def rest(self, op: RegionOp, main: MoOp, number: int) -> None:
        """What a library region computes after its first op for one of its results, as a launch of its own."""
        parts = region_parts(op, main, only=op.yielded[number])
        operands = [self.place(v) for v in op.operands]
        sources = [
            (self.place(main.results[-1 - index]) if index < 0 else operands[index], offset)
            for index, offset in parts.sources
        ]
        result = self.allocate(op.results[number])
        self.nest(parts.spec, [(result, 0)], sources, region_name(op))

    def packed_products(self, op: PackedProductsOp, outer: RegionOp | None = None) -> None:
        """A launch that makes several products, with an epilogue for each part of them."""
        jobs = plan_products(op, outer)
        operands = list(op.operands)
        outputs = [[self.allocate(v) for v in job.results] for job in jobs]
        attributes = {
            "encoding": op.attr("encoding"),
            "streamed": op.attr("streamed"),
            "parts": tuple([(job.products, len(job.results)) for job in jobs]),
        }
        results = [described(v) for job in jobs for v in job.results]
        call = library.lower(op.name, [described(v) for v in operands], results, attributes)
        places = [self.place(v) for v in operands]
        outers = [self.place(v) for v in outer.operands] if outer is not None else []
        read = [
            [(outers[index], offset) for index, offset in job.epilogue.sources]
            if job.epilogue is not None
            else []
            for job in jobs
        ]
        specs = [(job.epilogue.spec, job.products) if job.epilogue else None for job in jobs]
        made = write_part_epilogues(specs) if any(specs) else None
        in_place: list[tuple[int, int]] = []
        for number, job in enumerate(jobs):
            if job.epilogue is not None:
                others = [
                    place for n, views in enumerate(read) if n != number for place, _ in views
                ]
                target = (outputs[number][0], 0)
                in_place += self.in_place(
                    job.epilogue.spec, [target], read[number], [*places, *others]
                )
        flops = products(op.name, operands, op.results)
        if outer is not None:
            flops = simplify(flops + operations(outer))
        label = region_name(outer) if outer is not None else "packed_products"
        everywhere = [place for places_ in outputs for place in places_]
        views = [view for views in read for view in views]
        self.launch_call(call, places, everywhere, label, made, views, tuple(in_place), flops)
        for number in (job.later for job in jobs):
            if number is not None and outer is not None:
                self.rest(outer, op, number)

    def pack(self, op: MoOp) -> None:
        """A launch for each weight, into its part of the packed one."""
        assert isinstance(op, PackOp)
        whole = self.allocate(op.results[0])
        elements = shape_of(op.results[0])[1]
        for w, (first, strips, shares, share) in zip(op.operands, op.places(), strict=True):
            shape = (strips, elements)
            target = replace(whole, layout=whole.layout.slice([first, 0], [1, 1], shape))
            attributes = {"encoding": op.attr("encoding"), "shares": shares, "share": share}
            result = library.Operand(whole.dtype, shape)
            call = library.lower(op.name, [described(w)], [result], attributes)
            shared = [whole.buffer] if len(op.operands) > 1 else []
            self.launch_call(call, [self.place(w)], [target], "pack", parts=shared)

    # library ops -------------------------------------------------------------------------------

    def library(self, op: MoOp, outer: MoOp, epilogue: RegionParts | None) -> None:
        """A launch of a library kernel; `outer` is the region whose results it writes, or the op itself."""
        operands = [v for v in op.operands if isinstance(v.type, ShapedType)]
        results = [v for v in outer.results if isinstance(v.type, ShapedType)]
        name, attributes = op.name, op.attrs
        if op.name == "mo.custom":
            name, attributes = op.attr("symbol"), op.attr("parameters")
            if not library.supports(name):
                self.custom(op, name, attributes)
                return
        elif isinstance(op, MatmulOp):
            name = "mo.matmul"
        if not library.supports(name):
            types = short_types([v.type for v in op.operands])
            raise UnsupportedOpError(
                f"{op.name}: the compiler has no kernel for this op on {types}"
            )
        self.discover(op)
        call = library.lower(
            name,
            [described(v) for v in operands],
            [described(v) for v in results],
            plain(attributes),
        )
        places = [self.place(v) for v in operands]
        outputs = [self.allocate(v) for v in results]
        made: EpilogueText | None = None
        sources: list[tuple[Place, Size]] = []
        in_place = tuple([(outputs[r].buffer, places[o].buffer) for r, o in call.in_place])
        if epilogue is not None:
            made = write_epilogue(epilogue.spec)
            outers = [self.place(v) for v in outer.operands]
            sources = [(outers[index], offset) for index, offset in epilogue.sources]
            results_at = [(place, 0) for place in outputs]
            in_place = self.in_place(epilogue.spec, results_at, sources, places)
        flops = products(name, operands, results)
        if isinstance(outer, RegionOp) and epilogue is not None:
            flops = simplify(flops + operations(outer))
        label = region_name(outer) if isinstance(outer, RegionOp) else name.partition(".")[2]
        self.launch_call(call, places, outputs, label, made, sources, in_place, flops)

    def launch_call(
        self,
        call: library.KernelCall,
        places: Sequence[Place],
        outputs: Sequence[Place],
        label: str,
        epilogue: EpilogueText | None = None,
        sources: Sequence[tuple[Place, Size]] = (),
        in_place: tuple[tuple[int, int], ...] = (),
        flops: Size = 0,
        parts: Sequence[int] = (),
    ) -> None:
        """The launch of a library kernel.

        Args:
            call: What the library says of it.
            places: Where the operands are.
            outputs: Where the results are.
            label: The launch's name.
            epilogue: What the kernel does before it stores.
            sources: What the epilogue reads.
            in_place: Pairs of result and operand buffers that may share memory.
            flops: Its operations.
            parts: Buffers of which it writes a part that no other launch writes.
        """
        workspaces = [self.workspace(w) for w in call.workspaces]
        tables = {"operand": places, "result": outputs, "workspace": workspaces}
        may_write = self.kernels.writes(call.kernel)
        arguments: list[Argument] = []
        given: list[Argument | Chosen] = []
        written: list[bool] = []
        both: list[int] = []
        for position, arg in enumerate(call.args):
            if isinstance(arg, library.Limit):
                given.append(Chosen(arg.name, arg.guess, arg.most, simplify(arg.rows)))
                continue
            place = tables[arg.source][arg.index]
            shape = tuple(simplify(dim) for dim in arg.shape)
            arguments.append(
                Argument(place.pointer(), ArgView(arg.dtype, shape, None, True), arg.static)
            )
            given.append(arguments[-1])
            writes = arg.source != "operand" or may_write is None or position in may_write
            written.append(writes)
            if writes and arg.source == "operand":
                both.append(place.buffer)
        for (place, offset), view in zip(sources, epilogue.args if epilogue else (), strict=True):
            arguments.append(Argument(place.pointer(offset), view))
            given.append(arguments[-1])
            written.append(False)
        text = None if epilogue is None else epilogue.source
        kernel = self.kernels.library(call.kernel, given, (), call.params, text)
        self.launch(kernel, arguments, written, call.serial, label, in_place, both, parts, flops)

    def attention(self, op: MoOp) -> None:
        """A launch of the attention kernel, over views of any strides."""
        result = self.allocate(op.results[0])
        places = [self.place(v) for v in op.operands]
        views, columns = attention_views(
            result.layout, [place.layout for place in places], op.attr("axis")
        )
        described = [
            library.Operand(place.dtype, layout.shape)
            for place, layout in zip([result, *places], views, strict=True)
        ]
        params = {"scale": op.attr("scale"), "fills": op.attr("fills"), "columns": columns}
        call = library.lower(op.name, described[1:], described[:1], params)
        workspaces = [self.workspace(w) for w in call.workspaces]
        tables = {"operand": places, "result": [result], "workspace": workspaces}
        layouts = {"operand": views[1:], "result": views[:1]}
        arguments: list[Argument] = []
        for arg in call.args:
            assert isinstance(arg, library.Arg)
            pointer = tables[arg.source][arg.index].pointer()
            strides: tuple[Size, ...] | None = None
            if arg.source in layouts:
                strides = layouts[arg.source][arg.index].strides
            view = ArgView(arg.dtype, tuple(arg.shape), strides, arg.source != "operand")
            # strides come when the program runs, but for those of neighbours
            known = tuple([axis == len(arg.shape) - 1 for axis in range(len(arg.shape))])
            arguments.append(Argument(pointer, view, arg.static, known))
        kernel = self.kernels.library(call.kernel, arguments, (), call.params, None)
        written = [isinstance(arg, library.Arg) and arg.source != "operand" for arg in call.args]
        flops = products(op.name, op.operands, op.results)
        self.launch(kernel, arguments, written, call.serial, "attention", flops=flops)

    def discover(self, op: MoOp) -> None:
        """Notes which sizes of an op's results are told by its operands only when the program runs.

        Raises:
            UnsupportedOpError: A size that nothing tells.
        """
        for result in op.results:
            if not isinstance(result.type, ShapedType):
                continue
            unknown = [dim for dim in result.type.shape if not self.known.issuperset(dim.symbols)]
            if not unknown:
                continue
            rule = DISCOVERING.get(op.name)
            symbols = [dim.symbol_name if dim in unknown else "" for dim in result.type.shape]
            if rule is None or None in symbols:
                raise UnsupportedOpError(
                    f"{op.name}: the size {unknown[0]} of its result does not follow from the inputs of "
                    f"{self.graph.sym_name}"
                )
            sliced = rule == "slice"
            bounds = [self.place(v) for v in op.operands[0 if rule == "range" else 1 :]]
            shape = shape_of(op.operands[0]) if sliced else ()
            pointers = tuple([place.pointer() for place in bounds])
            names = tuple([name or "" for name in symbols])
            self.launches.append(Discover(rule, names, pointers, bounds[0].dtype, shape))
            self.known.update(filter(None, names))

    def workspace(self, workspace: library.Workspace) -> Place:
        shape = tuple(simplify(dim) for dim in workspace.shape)
        size = simplify(product(shape) * workspace.dtype.size_in_bytes)
        return Place(self.buffer(Buffer("temp", size)), Layout.contiguous(shape), workspace.dtype)

    def custom(self, op: MoOp, symbol: str, parameters: Mapping[str, Any]) -> None:
        """A kernel that was registered under the op's symbol: results first, then operands."""
        self.discover(op)
        kernel = k.registered(symbol)
        values = [v for v in (*op.results, *op.operands) if isinstance(v.type, ShapedType)]
        for result in op.results:
            if isinstance(result.type, ShapedType):
                self.allocate(result)
        may_write = self.kernels.writes(kernel)
        arguments, written, both = list[Argument](), list[bool](), list[int]()
        num_results = sum(isinstance(v.type, ShapedType) for v in op.results)
        for position, value in enumerate(values):
            place = self.place(value)
            arguments.append(
                Argument(place.pointer(), ArgView(place.dtype, place.layout.shape, None, True))
            )
            mutable = isinstance(value.type, BufferType) and (
                may_write is None or position in may_write
            )
            written.append(position < num_results or mutable)
            if mutable:
                both.append(place.buffer)
        made = self.kernels.library(kernel, arguments, (), dict(parameters), None)
        self.launch(made, arguments, written, False, symbol, (), both)

    METHODS: Mapping[str, Any] = {
        "mo.constant": nothing,
        "mo.chain_create": nothing,
        "mo.constant.external": external,
        "mo.output": output,
        "mo.buffer_create": buffer_create,
        "mo.buffer_load": buffer_load,
        "mo.buffer_store": buffer_store,
        "mo.buffer_store_slice": buffer_store_slice,
        "mo.concat": concat,
        "mo.shape_to_tensor": shape_to_tensor,
        "mo.print": print,
        "mok.attention": attention,
        "mok.pack": pack,
        "mok.packed_products": packed_products,
    }


def described(value: SSAValue) -> library.Operand:
    """A value for the library."""
    type_ = value.type
    assert isinstance(type_, ShapedType)
    return library.Operand(type_.dtype, shape_of(value))


def plain(value: Any) -> Any:
    """An attribute's value with ints for dims that are static."""
    if isinstance(value, DimExpr):
        return simplify(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple([plain(item) for item in cast("tuple[Any, ...]", value)])
    return value


def operations(op: BodyOp) -> Size:
    """The operations of a region on numbers: one for each element and op that computes."""
    total: Size = 0
    for inner in ops_of(op.block):
        counted = inner.spec.elementwise if inner.name in OPS else False
        if inner.name.startswith("mo.reduce_") or inner.name in _ROWWISE or counted:
            if inner.name != "mo.cast":
                weight = _ROWWISE.get(inner.name, 1)
                total = simplify(total + weight * product(shape_of(inner.operands[0])))
    return total


_ROWWISE = {"mo.softmax": 4, "mo.logsoftmax": 4, "mo.layer_norm": 6, "mo.rms_norm": 4}
"""Ops over rows, and about how many operations an element takes."""


def products(name: str, operands: Sequence[SSAValue], results: Sequence[SSAValue]) -> Size:
    """Twice the products that a matmul or a convolution sums; 0 for other ops."""
    if name in ("mo.matmul", "mo.qmatmul", "mok.packed_matmul"):
        return simplify(2 * product(shape_of(results[0])) * shape_of(operands[0])[-1])
    if name == "mok.packed_products":
        columns: Size = 0
        for result in results:
            columns = simplify(columns + shape_of(result)[-1])
        return simplify(2 * product(shape_of(operands[0])) * columns)
    if name == "mok.attention":
        q, keys, values = (shape_of(v) for v in operands[:3])
        return simplify(2 * product(q[:-1]) * keys[-2] * (q[-1] + values[-1]))
    if name == "mo.conv":
        taps = product(shape_of(operands[1])[:-1])
        return simplify(2 * product(shape_of(results[0])) * taps)
    if name == "mok.packed_conv":
        strip = shape_of(operands[1])[-1]
        return simplify(2 * product(shape_of(results[0])) * (strip // COLUMNS))
    return 0


def region_name(op: BodyOp) -> str:
    """What a region does, in the order of its ops."""
    names = [o.name.partition(".")[2] for o in ops_of(op.block)]
    hidden = {"yield", "constant", "reshape", "rebind", "transfer", "broadcast_to"}
    shown = [name for name in names if name not in hidden]
    return "+".join(shown) or "copy"


def scopes(module: ModuleOp) -> dict[str, set[str]]:
    """For each branch and body the symbols of the graphs around it, which mean the same there."""
    graphs = {op.sym_name: op for op in module.body.block.ops if isinstance(op, GraphOp)}
    inner: dict[str, set[str]] = {}

    def visit(name: str, around: set[str]) -> None:
        here = around | _symbols_of(graphs[name])
        for op in graphs[name].body:
            if isinstance(op, IfOp | WhileOp):
                for callee in op.callees:
                    inner.setdefault(callee, set()).update(here)
                    visit(callee, here)

    branches = {
        callee
        for graph in graphs.values()
        for op in graph.body
        if isinstance(op, IfOp | WhileOp)
        for callee in op.callees
    }
    for name in graphs:
        if name not in branches:
            visit(name, set())
    return inner


def _symbols_of(graph: GraphOp) -> set[str]:
    values = [*graph.args, *[result for op in graph.body for result in op.results]]
    types = [v.type for v in values if isinstance(v.type, ShapedType)]
    return {name for type_ in types for dim in type_.shape for name in dim.symbols}


def lower_graph(
    graph: GraphOp,
    kernels: KernelTable,
    subgraphs: Mapping[str, SubgraphOp],
    scope: Iterable[str] = (),
) -> Template:
    """Lowers a graph or subgraph after all passes.

    Args:
        graph: The graph.
        kernels: Where kernels are made.
        subgraphs: The subgraphs that it may call, by name.
        scope: Symbols that mean here what they mean in the graph around; see `scopes`.

    Raises:
        UnsupportedOpError: An op that has no kernel.
    """
    return GraphLowering(graph, kernels, subgraphs, scope).run()
