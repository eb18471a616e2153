"""Lowering of library ops, attention, packing, and custom kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from xdsl.ir import SSAValue

from max import kernel as k
from max._backends.kernel_call import Arg, KernelCall, Limit, Operand, Scalar
from max._backends.regions import ArgView, Leaf, RegionSpec
from max._compiler.analysis.attention_operands import attention_views
from max._compiler.analysis.shapes import shape_of
from max._compiler.codegen.epilogue import EpilogueText, write_epilogue
from max._compiler.lowering.flops import op_flops, region_flops, region_name
from max._compiler.lowering.kernel_tables import Argument
from max._compiler.lowering.lowered_graph import HostStep, LimitSlot, Number, UnsupportedOpError
from max._compiler.lowering.placing import Place, Placing, operand_of
from max._compiler.lowering.region_specs import RegionParts, norm_before
from max._compiler.mok import DeviceCopyOp, MatmulOp, PackingOp, RegionOp
from max._compiler.program.code import WorkCode
from max.mlir import BufferType, DimExpr, MoOp, ShapedType
from max.mlir.ops import matmul as staged
from max.mlir.sizes import Size, simplify
from max.mlir.types import short_types


class LibraryLowering:
    """Lowers the library ops of a graph: everything except regions of element-wise ops.

    Args:
        placing: The graph's buffers and launches, which this adds to.
    """

    def __init__(self, placing: Placing) -> None:
        self.placing = placing

    def read_sizes(self, op: MoOp) -> None:
        """Adds a host step that reads the sizes of an op's results which depend on values of its operands."""
        for result in op.results:
            if not isinstance(result.type, ShapedType):
                continue
            unknown = [
                dim
                for dim in result.type.shape
                if not self.placing.known_symbols.issuperset(dim.symbols)
            ]
            if not unknown:
                continue
            # `resolve_sizes` has checked that the op has a rule, and that each size is a symbol
            rule = op.spec.size_rule
            names = tuple([str(dim) if dim in unknown else "" for dim in result.type.shape])
            # its bounds count from the end where they are negative, so the host needs the shape
            sliced = rule == "slice"
            bounds = [
                self.placing.place(on_host(v)) for v in op.operands[0 if rule == "range" else 1 :]
            ]
            shape = shape_of(op.operands[0]) if sliced else ()
            pointers = tuple([place.pointer() for place in bounds])
            self.placing.launches.append(HostStep(rule, names, pointers, bounds[0].dtype, shape))
            self.placing.known_symbols.update(filter(None, names))

    def lower_op(self, op: MoOp, outer: MoOp, epilogue: RegionParts | None) -> bool:
        """Launches a library kernel; `outer` is the region whose results it writes, or the op itself.

        Returns:
            Whether a launch was added: False if the device's kernel takes no epilogue.
        """
        values, attributes = with_norm(op)
        operands = [v for v in values if isinstance(v.type, ShapedType)]
        results = [v for v in outer.results if isinstance(v.type, ShapedType)]
        name = op.name
        # the library has one product; `transpose_b` is an attribute of it
        if isinstance(op, MatmulOp):
            name = staged.MatmulOp.name
        if not self.placing.backend.library.supports(name):
            types = short_types([v.type for v in op.operands])
            raise UnsupportedOpError(
                f"{op.name}: the compiler has no kernel for this op on {types}"
            )
        self.read_sizes(op)
        call = self.placing.lower_call(
            name,
            [operand_of(v) for v in operands],
            [operand_of(v) for v in results],
            plain(attributes),
        )
        # before anything is allocated: the caller lowers the op again without the epilogue
        if epilogue is not None and not call.epilogue:
            return False
        places = [self.placing.place(v) for v in operands]
        outputs = [self.placing.allocate(v) for v in results]
        epilogue_text: EpilogueText | None = None
        sources: list[tuple[Place, Size]] = []
        in_place = tuple([(outputs[r].buffer, places[o].buffer) for r, o in call.in_place])
        if epilogue is not None:
            epilogue_text = write_epilogue(epilogue.spec)
            outers = [self.placing.place(v) for v in outer.operands]
            sources = [(outers[index], offset) for index, offset in epilogue.sources]
            results_at = [(place, 0) for place in outputs]
            in_place = in_place_pairs(epilogue.spec, results_at, sources)
        flops, label = op_flops(op, results), name.partition(".")[2]
        work = WorkCode("product", flops) if flops != 0 else None
        if isinstance(outer, RegionOp):
            flops, label = simplify(flops + region_flops(outer)), region_name(outer)
        self.launch_call(
            call, places, outputs, label, epilogue_text, sources, in_place, flops, work=work
        )
        return True

    def launch_call(
        self,
        call: KernelCall,
        places: Sequence[Place],
        outputs: Sequence[Place],
        label: str,
        epilogue: EpilogueText | None = None,
        sources: Sequence[tuple[Place, Size]] = (),
        in_place: tuple[tuple[int, int], ...] = (),
        flops: Size = 0,
        parts: Sequence[int] = (),
        work: WorkCode | None = None,
    ) -> None:
        """Launches a library kernel.

        Args:
            call: The kernel, its arguments and parameters.
            places: The places of the operands.
            outputs: The places of the results.
            label: The name of the launch.
            epilogue: The function that the kernel calls before it stores.
            sources: The operands of the epilogue.
            in_place: Pairs of result and operand buffers that may share memory.
            flops: The arithmetic operations.
            parts: Buffers of which this launch writes a part that no other launch writes.
            work: What other workers could share; default: the bytes of the buffers.
        """
        workspaces = [self.placing.workspace(w) for w in call.workspaces]
        tables = {"operand": places, "result": outputs, "workspace": workspaces}
        may_write = self.placing.kernels.writes(call.kernel)
        arguments: list[Argument] = []
        kernel_arguments: list[Argument | LimitSlot | Number] = []
        written: list[bool] = []
        also_read: list[int] = []
        for position, arg in enumerate(call.args):
            if isinstance(arg, Limit):
                kernel_arguments.append(
                    LimitSlot(arg.name, arg.default, arg.maximum, simplify(arg.rows))
                )
                continue
            if isinstance(arg, Scalar):
                kernel_arguments.append(Number(simplify(arg.value)))
                continue
            place = tables[arg.source][arg.index]
            shape = tuple(simplify(dim) for dim in arg.shape)
            argument = Argument(place.pointer(), ArgView(arg.dtype, shape, None), arg.static)
            arguments.append(argument)
            kernel_arguments.append(argument)
            # results and workspaces are always written
            written.append(arg.source != "operand" or position in may_write)
            if arg.source == "operand":
                # read, also where the kernel writes it
                also_read.append(place.buffer)
        for (place, offset), view in zip(sources, epilogue.args if epilogue else (), strict=True):
            argument = Argument(place.pointer(offset), view, *run_time_sizes(view))
            arguments.append(argument)
            kernel_arguments.append(argument)
            written.append(False)
        if work is None:
            buffers = {argument.pointer.buffer for argument in arguments}
            bytes_ = sum([self.placing.lowered.buffers[buffer].bytes for buffer in buffers])
            work = WorkCode("other", simplify(bytes_))
        text = None if epilogue is None else epilogue.source
        kernel = self.placing.kernels.library(call.kernel, kernel_arguments, call.params, text)
        self.placing.launch(
            kernel,
            arguments,
            written,
            call.serial,
            label,
            in_place,
            also_read,
            parts,
            flops,
            work,
            call.geometry,
        )

    def attention(self, op: MoOp) -> None:
        """Launches the attention kernel, over views of any strides."""
        result = self.placing.allocate(op.results[0])
        places = [self.placing.place(v) for v in op.operands]
        views, columns = attention_views(
            result.layout, [place.layout for place in places], op.attr("axis")
        )
        operand_of = [
            Operand(place.dtype, layout.shape)
            for place, layout in zip([result, *places], views, strict=True)
        ]
        params = {name: op.attr(name) for name in ("scale", "fills", "roundings")}
        params["columns"] = columns
        params["guard"] = op.attr_or("guard", "")
        call = self.placing.lower_call(op.name, operand_of[1:], [operand_of[0]], params)
        workspaces = [self.placing.workspace(w) for w in call.workspaces]
        tables = {"operand": places, "result": [result], "workspace": workspaces}
        layouts = {"operand": views[1:], "result": [views[0]]}
        arguments: list[Argument] = []
        written: list[bool] = []
        for arg in call.args:
            assert isinstance(arg, Arg)
            pointer = tables[arg.source][arg.index].pointer()
            strides: tuple[Size, ...] | None = None
            if arg.source in layouts:
                strides = layouts[arg.source][arg.index].strides
            view = ArgView(arg.dtype, tuple(arg.shape), strides)
            # only the stride of the last axis is a constant in the code: fewer specializations
            static_strides = tuple([axis == len(arg.shape) - 1 for axis in range(len(arg.shape))])
            arguments.append(Argument(pointer, view, arg.static, static_strides))
            written.append(arg.source != "operand")
        kernel = self.placing.kernels.library(call.kernel, arguments, call.params, None)
        flops = op_flops(op, op.results)
        self.placing.launch(
            kernel,
            arguments,
            written,
            call.serial,
            "attention",
            flops=flops,
            geometry=call.geometry,
        )

    def pack(self, op: PackingOp) -> None:
        """One launch per operand, into its piece of the result."""
        whole = self.placing.allocate(op.results[0])
        label = op.name.partition(".")[2]
        for w, piece in zip(op.operands, op.pieces(), strict=True):
            layout = whole.layout.slice(piece.start, [1] * len(piece.shape), piece.shape)
            result = Operand(whole.dtype, piece.shape)
            call = self.placing.lower_call(op.name, [operand_of(w)], [result], piece.attributes)
            target = replace(whole, layout=layout)
            self.launch_call(call, [self.placing.place(w)], [target], label, parts=[whole.buffer])

    def custom(self, op: MoOp) -> None:
        """Launches the kernel that is registered under the op's symbol, on the results, then the operands."""
        symbol: str = op.attr("symbol")
        kernel = k.kernel_of_op(symbol)
        values = [v for v in (*op.results, *op.operands) if isinstance(v.type, ShapedType)]
        for result in op.results:
            if isinstance(result.type, ShapedType):
                self.placing.allocate(result)
        may_write = self.placing.kernels.writes(kernel)
        arguments, written, also_read = list[Argument](), list[bool](), list[int]()
        num_results = sum(isinstance(v.type, ShapedType) for v in op.results)
        for position, value in enumerate(values):
            place = self.placing.place(value)
            arguments.append(
                Argument(place.pointer(), ArgView(place.dtype, place.layout.shape, None))
            )
            mutable = isinstance(value.type, BufferType) and position in may_write
            written.append(position < num_results or mutable)
            if mutable:
                also_read.append(place.buffer)
        specialized = self.placing.kernels.library(
            kernel, arguments, dict(op.attr("parameters")), None
        )
        self.placing.launch(specialized, arguments, written, False, symbol, (), also_read)


def run_time_sizes(view: ArgView) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Which sizes and strides of an epilogue's operand are part of the code: one kernel serves layers of all sizes.

    A size of 1 stays, as a view of one element has no run-time index, and the last stride, which says how vectors are
    loaded.
    """
    axes = range(len(view.shape))
    return tuple([dim == 1 for dim in view.shape]), tuple([axis == axes[-1] for axis in axes])


def in_place_pairs(
    spec: RegionSpec,
    results: Sequence[tuple[Place, Size]],
    sources: Sequence[tuple[Place, Size]],
) -> tuple[tuple[int, int], ...]:
    """Pairs of result and operand buffers that may share memory, as each element is read before it is written.

    They may if no other operand is a view of the buffer: `Placing.launch` leaves out the others.

    Args:
        spec: The region. In an epilogue the first leaf, the kernel's own result, has no source.
        results: The places of the results, each with an offset in elements.
        sources: The places of the leaves, likewise.
    """
    leaves = [v for v in spec.values if isinstance(v, Leaf)]
    # the first leaves of an epilogue are sums, which are not in memory
    leaves = leaves[len(leaves) - len(sources) :]
    last = max(spec.level)
    # each level walks the row again: an earlier one must not overwrite operands of a later one
    if any(spec.level[r.value] != last and r.strides[-1] != 0 for r in spec.results):
        return ()
    pairs: list[tuple[int, int]] = []
    for result, (target, target_offset) in zip(spec.results, results, strict=True):
        if target.layout.offset != 0 or target_offset != 0:
            continue  # a part of a larger value: its element positions differ from those of a source
        for leaf, (source, offset) in zip(leaves, sources, strict=True):
            whole = source.layout.is_contiguous and source.layout.offset == 0 and offset == 0
            same_elements = (
                leaf.strides == result.strides
                and leaf.dtype.size_in_bytes == result.dtype.size_in_bytes
            )
            if whole and same_elements:
                pairs.append((target.buffer, source.buffer))
    return tuple(pairs)


def on_host(value: SSAValue) -> SSAValue:
    """The source of a copy to a device; other values are returned unchanged."""
    return value.owner.operands[0] if isinstance(value.owner, DeviceCopyOp) else value


def with_norm(op: MoOp) -> tuple[list[SSAValue], Mapping[str, Any]]:
    """The operands and attributes of an op's launch.

    A product that computes the norm before it takes the norm's x instead of its result, gamma as the last operand, and
    the attribute `norm`.
    """
    norm = norm_before(op) if op.spec.takes_norm else None
    if norm is None:
        return list(op.operands), op.attrs
    x, gamma = norm.operands
    norm_attrs = (
        norm.attr("epsilon"),
        norm.attr("weight_offset"),
        norm.attr("multiply_before_cast"),
    )
    return [x, *op.operands[1:], gamma], {**op.attrs, "norm": norm_attrs}


def plain(value: Any) -> Any:
    """Converts static dims in an attribute's value to ints."""
    if isinstance(value, DimExpr):
        return simplify(value)
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, tuple):
        return tuple([plain(item) for item in cast("tuple[Any, ...]", value)])
    return value
