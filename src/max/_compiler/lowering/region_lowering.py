"""Lowering of regions: element-wise ops over an iteration space, and library ops with epilogues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from xdsl.ir import SSAValue

from max._backends.kernel_call import Workspace
from max._backends.regions import Leaf, RegionSpec, Result
from max._compiler.analysis.layout import collapse
from max._compiler.analysis.shapes import is_view, shape_of
from max._compiler.codegen.epilogue import write_part_epilogues
from max._compiler.lowering.flops import op_flops, region_flops, region_name
from max._compiler.lowering.kernel_tables import Argument
from max._compiler.lowering.library_lowering import LibraryLowering, in_place_pairs, with_norm
from max._compiler.lowering.load_regions import SymbolicRegion
from max._compiler.lowering.placing import Place, Placing, operand_of
from max._compiler.lowering.product_parts import plan_products
from max._compiler.lowering.region_specs import epilogue_parts, region_parts
from max._compiler.mok import ProductsOp, RegionOp
from max._compiler.passes.base import ops_of
from max._compiler.program.code import WorkCode
from max.mlir import MoOp
from max.mlir.ops.shape import ConcatOp
from max.mlir.sizes import Size, simplify


class RegionLowering:
    """Lowers the regions, copies and concats of a graph.

    Args:
        placing: The graph's buffers and launches, which this adds to.
        library_ops: Lowers the library op of a region that has one.
    """

    def __init__(self, placing: Placing, library_ops: LibraryLowering) -> None:
        self.placing = placing
        self.library_ops = library_ops

    def copy(self, source: Place, target: Place, name: str, parts: Sequence[int] = ()) -> None:
        """Launches a copy from one layout to another."""
        shape = source.layout.shape
        # fewer axes: a copy between contiguous layouts is one flat loop
        dims, (read, written) = collapse(shape, [source.layout.strides, target.layout.strides])
        spec = RegionSpec(
            dims, False, (Leaf(source.dtype, read),), (Result(0, target.dtype, written),)
        )
        self.nest(spec, [(target, 0)], [(source, 0)], name, parts)

    def concat(self, op: MoOp) -> None:
        """Copies each operand that was not computed in place to its part of the result."""
        for index, operand in enumerate(op.operands):
            part = self.part_of_concat(op, index)
            source = self.placing.place(operand)
            # an operand that a region computed is in its part already (`place_result`)
            if source.buffer != part.buffer:
                self.copy(source, part, "concat", parts=[part.buffer])

    def part_of_concat(self, op: MoOp, index: int) -> Place:
        """The part of a concat's result that an operand fills."""
        axis: int = op.attr("axis")
        # the first operand's region may be lowered long before the concat: it allocates the result
        result = self.placing.places.get(op.results[0]) or self.placing.allocate(op.results[0])
        shape = shape_of(op.operands[index])
        starts: list[Size] = [0] * len(shape)
        for operand in op.operands[:index]:
            starts[axis] = simplify(starts[axis] + shape_of(operand)[axis])
        return replace(result, layout=result.layout.slice(starts, [1] * len(shape), shape))

    def place_result(self, value: SSAValue) -> tuple[Place, bool]:
        """The place of a region's result: a new buffer, or a part of a concat's result if the concat is the only use.

        Returns:
            The place, and whether it is a part of a concat's result.
        """
        uses = list(value.uses)
        user = uses[0].operation if len(uses) == 1 else None
        if isinstance(user, MoOp) and type(user) is ConcatOp:
            place = self.placing.places[value] = self.part_of_concat(user, uses[0].index)
            return place, True
        return self.placing.allocate(value), False

    def region(self, op: RegionOp) -> None:
        if op.kind == "library":
            self.library_region(op)
            return
        placed = [self.place_result(v) for v in op.results]
        parts = region_parts(op, layouts=[place.layout for place, _ in placed])
        operands = [self.placing.place(v) for v in op.operands]
        results: list[tuple[Place, Size]] = [(place, 0) for place, _ in placed]
        sources = [(operands[index], offset) for index, offset in parts.sources]
        shared = [place.buffer for place, is_part in placed if is_part]
        self.nest(parts.spec, results, sources, region_name(op), shared, region_flops(op))

    def nest(
        self,
        spec: RegionSpec,
        results: Sequence[tuple[Place, Size]],
        sources: Sequence[tuple[Place, Size]],
        name: str,
        parts: Sequence[int] = (),
        flops: Size = 0,
    ) -> None:
        """Launches the kernel of a region; places have an offset in elements."""
        # the kernel takes results, then sources, then memory that the writer asks for
        symbolic = self.symbolic_region(spec)
        text = self.placing.backend.write_region(spec if symbolic is None else symbolic.spec)
        count = len(results) + len(sources)
        workspaces = [
            self.placing.workspace(Workspace(v.dtype, v.shape)) for v in text.args[count:]
        ]
        places = [*results, *sources, *((place, 0) for place in workspaces)]
        pointers = [place.pointer(offset) for place, offset in places]
        if symbolic is None:
            arguments = list(map(Argument, pointers, text.args))
        else:
            arguments = symbolic.arguments(text, pointers)
            text = symbolic.with_sizes(text)
        kernel = self.placing.kernels.region(text, arguments)
        written = [True] * len(results) + [False] * len(sources) + [True] * len(workspaces)
        in_place = in_place_pairs(spec, results, sources)
        self.placing.launch(
            kernel,
            arguments,
            written,
            text.serial,
            name,
            in_place,
            parts=parts,
            flops=flops,
            work=WorkCode("region", spec.size),
            geometry=text.geometry,
        )

    def symbolic_region(self, spec: RegionSpec) -> SymbolicRegion | None:
        """The region with symbols in place of its sizes, if it runs at load; None: its sizes are part of the code."""
        at_load = self.placing.launches is self.placing.lowered.once
        return SymbolicRegion(spec) if at_load and not spec.reduces else None

    def library_region(self, op: RegionOp) -> None:
        """Launches a library op with its epilogue; an epilogue that cannot be fused becomes a second launch."""
        # values of the body stand for the operands: views of them need no launch
        for argument, value in zip(op.block.args, op.operands, strict=True):
            self.placing.places[argument] = self.placing.place(value)
        inner = ops_of(op.block)
        main = next(o for o in inner if o.spec.takes_epilogue)
        for other in takewhile(lambda o: o is not main, inner):
            if is_view(other):
                self.placing.view(other)
        if isinstance(main, ProductsOp):
            self.products(main, op)
            return
        # no epilogue: the region has the op and views of its operands only
        if op.results_in_body == tuple(main.results):
            self.library_ops.lower_op(main, op, None)
            return
        # None: an operand of the epilogue has no single stride over the merged rows
        parts = epilogue_parts(op, main)
        if parts is not None and self.library_ops.lower_op(main, op, parts):
            return
        self.library_ops.lower_op(main, main, None)
        self.separate_epilogue(op, main, 0)

    def separate_epilogue(self, op: RegionOp, main: MoOp, result_index: int) -> None:
        """Launches the ops after the library op separately, for one result of the region."""
        parts = region_parts(op, main, only_value=op.results_in_body[result_index])
        operands = [self.placing.place(v) for v in op.operands]
        # negative numbers are the library op's own results
        sources = [
            (self.placing.place(main.results[-1 - index]) if index < 0 else operands[index], offset)
            for index, offset in parts.sources
        ]
        result = self.placing.allocate(op.results[result_index])
        self.nest(parts.spec, [(result, 0)], sources, region_name(op))

    def products(self, op: ProductsOp, outer: RegionOp | None = None) -> None:
        """Launches several products, with one epilogue per part."""
        jobs = plan_products(op, outer)
        operands, attributes = with_norm(op)
        outputs = [[self.placing.allocate(v) for v in job.results] for job in jobs]
        attributes = {
            **attributes,
            "parts": tuple([(job.products, len(job.results)) for job in jobs]),
        }
        results = [operand_of(v) for job in jobs for v in job.results]
        call = self.placing.lower_call(
            op.name, [operand_of(v) for v in operands], results, attributes
        )
        places = [self.placing.place(v) for v in operands]
        outers = [self.placing.place(v) for v in outer.operands] if outer is not None else []
        # what each epilogue reads besides its sums: [part][operand]
        read = [
            [(outers[index], offset) for index, offset in job.epilogue.sources]
            if job.epilogue is not None
            else []
            for job in jobs
        ]
        specs = [(job.epilogue.spec, job.products) if job.epilogue else None for job in jobs]
        epilogues = write_part_epilogues(specs) if any(specs) else None
        in_place: list[tuple[int, int]] = []
        for number, job in enumerate(jobs):
            if job.epilogue is not None:
                target = (outputs[number][0], 0)
                in_place += in_place_pairs(job.epilogue.spec, [target], read[number])
        flops = op_flops(op, op.results)
        work = WorkCode("product", flops)
        if outer is not None:
            flops = simplify(flops + region_flops(outer))
        label = region_name(outer) if outer is not None else op.name.partition(".")[2]
        written = [place for places_ in outputs for place in places_]
        views = [view for views in read for view in views]
        self.library_ops.launch_call(
            call, places, written, label, epilogues, views, tuple(in_place), flops, work=work
        )
        # epilogues that could not be fused run after the products
        for number in (job.later for job in jobs):
            if number is not None and outer is not None:
                self.separate_epilogue(outer, op, number)
