"""The loops of a region's kernel.

Two kinds of loop nests cover all regions:

- *rows*: the last axis is vectorized. Without reductions it is cut into blocks that are shared out like the outer
  axes; with reductions it is walked once for each reduction and once more for the results that need them.
- *columns*: the reduction axis is not contiguous in memory, but another axis is. That one is vectorized, and the
  reduction is a plain loop in which every value is a vector.

A value that does not vary along the innermost loop is computed before it, as a scalar or, in columns, as a vector.
"""

from __future__ import annotations

from max import kernel as k
from max._backends.cpu import tuning
from max._backends.cpu.kernels.tiles.transpose import transpose
from max._backends.cpu.regions import accumulators
from max._backends.cpu.regions import axes as space
from max._backends.cpu.regions.accumulators import Accumulators, Lines
from max._backends.cpu.regions.vector_width import native_width, vectors_per_step
from max._backends.regions import ArgView, Leaf, Node, RegionKernel, RegionSpec, Result
from max._compiler.codegen import expressions
from max._compiler.codegen.centering import with_exact_centers
from max._compiler.codegen.values import ValueWriter
from max.dtype import DType
from max.mlir.sizes import Size, Sizes, divide, simplify

__all__ = ["write_nest", "write_region"]

FUNCTIONS = {"transpose": transpose}


class _NestWriter:
    """Writes the loop nest of one region.

    Args:
        spec: The region; in `columns` its reduction axis is last, and the vectorized axis before it.
        columns: Whether the nest is of the second kind.
        width: Lanes of a vector.
    """

    def __init__(self, spec: RegionSpec, columns: bool, width: int) -> None:
        self.spec = spec
        self.columns = columns
        self.width = width
        self.out = Lines()
        self.leaves = [i for i, value in enumerate(spec.values) if isinstance(value, Leaf)]
        rank = len(spec.dims)
        self.last = rank - 1
        self.lane_axis = rank - 1
        # in columns the reduction axis is written last in the spec; lanes run along the axis before it
        if columns:
            self.lane_axis = rank - 2
        self.scalars: list[Size] = []
        self.scalar_names: list[str] = []
        self.dim_text: list[str] = []
        for axis, dim in enumerate(spec.dims):
            self.dim_text.append(str(dim) if isinstance(dim, int) else self.run_time_dim(axis, dim))
        self.values = ValueWriter(spec, self, self.lane_axis, str(width))
        self.sums = Accumulators(spec, self.values, self.out, columns, width)
        self.index = [f"i{axis}" for axis in range(rank)]
        self.tile_axis = space.tile_axis(spec)
        # a full reduction of a long row: all workers share the row
        self.split = (
            spec.reduces
            and rank == 1
            and not (isinstance(spec.dims[0], int) and spec.dims[0] < tuning.LONG_ROW)
        )
        self.workspaces: list[int] = []
        self.in_branch: set[int] = set()
        """Values that are computed only in the branch of a conditional walk."""
        self.start: str | None = None
        """The first index of the current block; None if the lane axis is not cut."""
        # leaves that are read along the tile axis and transposed in registers
        self.transposed = space.transposed_leaves(spec, self.tile_axis) if width in (8, 16) else []
        self.tile_rows = width if self.transposed else tuning.TILE_ROWS
        self.along_read = bool(self.transposed) and space.reads_longer_rows(
            spec, self.transposed, self.tile_axis
        )
        # the narrowest result decides how many lanes fill a cache line
        narrowest = min(r.dtype.size_in_bytes for r in spec.results)
        self.tile_lanes = tuning.TILE_LINE // narrowest if self.transposed else tuning.TILE_LANES

    # arguments ---------------------------------------------------------------------------------

    def run_time_dim(self, axis: int, dim: Size) -> str:
        """Adds the parameter of a dim that is known at run time; returns the dim's name."""
        name = f"n{axis}"
        # whole vectors: the loop over the lanes has no masked tail
        vectors = divide(dim, self.width) if axis == self.lane_axis else None
        if vectors is None:
            self.scalars.append(dim)
            self.scalar_names.append(name)
        else:
            self.scalars.append(vectors)
            self.scalar_names.append(f"v{axis}")
            self.out.add(f"{name} = v{axis} * {self.width}")
        return name

    def add(self, text: str) -> None:
        self.out.add(text)

    def size(self, axis: int) -> str:
        return self.dim_text[axis]

    def load(self, i: int, leaf: Leaf) -> str:
        """The text that reads a leaf at the current indices, as a vector or a scalar."""
        name = f"a{self.leaves.index(i)}"
        axes = self.view_order([axis for axis, stride in enumerate(leaf.strides) if stride != 0])
        index = ", ".join(self.index[axis] for axis in axes)
        if self.values.is_vector(i):
            return f"{name}.load({index}, width={self.width}, mask=m)"
        return f"{name}[{index or '0'}]"

    def view_order(self, axes: list[int]) -> list[int]:
        """The axes of an argument's view: in columns the lane axis comes last, as vectors are loaded along it."""
        if self.lane_axis in axes:
            return [axis for axis in axes if axis != self.lane_axis] + [self.lane_axis]
        return axes

    # statements --------------------------------------------------------------------------------

    def store(self, index: int, result: Result) -> None:
        """Adds the line that stores a result at the current indices, as a vector if it varies along the lane axis."""
        axes = self.view_order([axis for axis, stride in enumerate(result.strides) if stride != 0])
        where = ", ".join(self.index[axis] for axis in axes)
        lanes = self.lane_axis in axes
        text = self.values.operand(result.value, lanes, result.dtype)
        if lanes:
            self.out.add(f"o{index}.store({where}, value={text}, mask=m)")
        else:
            self.out.add(f"o{index}[{where or '0'}] = {text}")

    def write_level(self, level: int) -> None:
        """The values that need `level` finished reductions: row values first, then one walk of the last axis."""
        spec = self.spec
        for i in range(len(spec.values)):
            # reductions of this level were written by the walk before
            if not spec.inner[i] and spec.level[i] == level and i not in self.in_branch:
                self.values.value(i)
        inner_results = [
            (position, result)
            for position, result in enumerate(spec.results)
            if self.inner_result(result) and spec.level[result.value] == level
        ]
        reductions = [
            i
            for i, value in enumerate(spec.values)
            if accumulators.is_reduction(value) and spec.level[i] == level + 1
        ]
        if self.split and (inner_results or reductions):
            self.split_walk(inner_results, reductions)
        elif (
            reductions
            and not inner_results
            and None not in (accumulators.condition_of(spec.values[i]) for i in reductions)
        ):
            # a walk that stores nothing can be skipped
            self.conditional_walk(reductions)
        elif inner_results or reductions:
            self.walk(inner_results, reductions)
        for position, result in enumerate(spec.results):
            if not self.inner_result(result) and spec.level[result.value] == level:
                if self.split:
                    # all workers have the value of the only row
                    self.out.open("if ctx.worker == 0:")
                self.store(position, result)
                self.out.depth -= self.split

    def inner_result(self, result: Result) -> bool:
        """Whether a result is stored in the innermost loop, even if its value does not vary there."""
        return bool(result.strides) and result.strides[-1] != 0

    def split_walk(self, results: list[tuple[int, Result]], reductions: list[int]) -> None:
        """A walk of the only row, in blocks; workspaces collect the partial results in the order of the blocks."""
        out = self.out
        depth = out.depth
        out.open("for b in ctx.parallel(blocks):")
        out.add(f"start = b * {tuning.BLOCK}")
        out.add(f"count = k.min({self.dim_text[self.last]} - start, {tuning.BLOCK})")
        self.start = "start"
        self.walk(results, reductions)
        for i in reductions:
            self.workspaces.append(i)
            out.add(f"w{len(self.workspaces) - 1}[b] = {self.values.names[i]}")
        out.depth = depth
        if not reductions:
            return
        out.add("ctx.barrier()")
        # in the order of the blocks, whatever worker computed them
        for i in reductions:
            node = self.spec.values[i]
            assert isinstance(node, Node)
            name = self.values.names[i] = self.values.fresh()
            part = f"w{self.workspaces.index(i)}[b]"
            out.add(f"{name} = {expressions.identity(node.op, node.dtype)}")
            if accumulators.is_float_sum(node):
                wide = self.sums.wide_sum(name)
                out.open("for b in range(blocks):")
                out.add(f"{wide} = fn.add_part({wide}, {part})")
                out.depth = depth
                out.add(f"{name} = {self.sums.rounded_sum(i, wide)}")
                continue
            out.open("for b in range(blocks):")
            out.add(f"{name} = {expressions.combine(node.op, name, part)}")
            out.depth = depth

    def conditional_walk(self, reductions: list[int]) -> None:
        """A walk for reductions that few rows need, and the selects by this need, which use them."""
        out, values = self.out, self.spec.values
        conditions = {accumulators.condition_of(values[i]) for i in reductions}
        selects = [
            (i, v)
            for i, v in enumerate(values)
            if isinstance(v, Node) and v.op == "select" and v.args[0] in conditions
        ]
        names = {i: self.values.fresh() for i, _ in selects}
        for i, select in selects:
            out.add(f"{names[i]} = {self.values.value(select.args[2])}")
        needed = " | ".join(self.values.value(c) for c in conditions if c is not None)
        before = dict(self.values.names)
        out.open(f"if {needed}:")
        self.walk([], reductions)
        for i, _ in selects:
            out.add(f"{names[i]} = {self.values.value(i)}")
        out.depth -= 1
        self.in_branch.update(self.values.names.keys() - before.keys())
        # variables of the branch do not exist behind it
        self.values.names = {**before, **names}

    def walk(self, results: list[tuple[int, Result]], reductions: list[int]) -> None:
        """One loop over the last axis, which computes reductions and stores results."""
        spec, out = self.spec, self.out
        accumulators: dict[int, str] = {}
        for i in reductions:
            node = spec.values[i]
            assert isinstance(node, Node)
            accumulators[i] = name = self.values.fresh()
            out.add(f"{name} = {self.sums.start_of(i)}")
        depth = out.depth
        n = self.dim_text[self.last]
        sums = [i for i in reductions if self.sums.in_pieces(i, self.start is not None)]
        if not sums:
            self.steps(n, results, accumulators)
            return self.sums.finish_all(accumulators)
        # the shortest: in longer ones the error of a sum in f32 would exceed its bound
        piece = min(self.sums.piece(i) for i in sums)
        names = {i: self.values.fresh() for i in reductions}
        # a walk with results is not written twice
        if not results and not isinstance(spec.dims[-1], int):
            # rows of one piece have no wide sums
            out.open(f"if {n} <= {piece}:")
            self.steps(n, results, accumulators)
            self.sums.finish_all(accumulators)
            for i, name in names.items():
                out.add(f"{name} = {self.values.names.pop(i)}")
            out.depth = depth
            out.open("else:")
        totals: dict[int, str] = {}
        inner_depth = out.depth
        out.add(f"pieces = ({n} + {piece - 1}) // {piece}")
        for i in sums:
            part = accumulators[i] if self.columns else "k.f32(0)"
            totals[i] = self.sums.wide_sum(part)
        out.open("for p in range(pieces):")
        # a piece begins from nothing; other reductions go on through all pieces
        for i in sums:
            out.add(f"{accumulators[i]} = {self.sums.start_of(i)}")
        self.steps(f"p * {piece}, k.min(p * {piece} + {piece}, {n})", results, accumulators)
        for i in sums:
            part = accumulators[i] if self.columns else f"k.reduce_add({accumulators[i]})"
            out.add(f"{totals[i]} = fn.add_part({totals[i]}, {part})")
        out.depth = inner_depth
        self.sums.finish_all({i: name for i, name in accumulators.items() if i not in sums})
        for i in sums:
            self.values.names[i] = self.sums.rounded_sum(i, totals[i])
        for i, name in names.items():
            out.add(f"{name} = {self.values.names[i]}")
            self.values.names[i] = name
        out.depth = depth

    def steps(
        self, bounds: str, results: list[tuple[int, Result]], accumulators: dict[int, str]
    ) -> None:
        """The loop over some elements of the last axis, which computes reductions and stores results."""
        out, width, depth = self.out, self.width, self.out.depth
        if self.columns:
            out.open(f"for {self.index[self.last]} in range({bounds}):")
        elif self.start is None:
            out.open(f"for {self.index[self.last]}, m in k.vectors({bounds}, {width}):")
        else:
            out.open(f"for j, m in k.vectors(count, {width}):")
            out.add(f"{self.index[self.last]} = {self.start} + j")
        self.values.scope = {}
        for i, name in accumulators.items():
            self.sums.accumulate(i, name)
        # a result may overwrite an argument in place: all loads precede the stores
        for _, result in results:
            self.values.value(result.value)
        for position, result in results:
            self.store(position, result)
        self.values.scope = None
        out.depth = depth

    def transposed_walk(self, lanes: str, blocked: bool) -> None:
        """Walks tiles of rows: loads vectors along the tile axis, transposes them in registers, and continues row by
        row.
        """
        spec, out, width = self.spec, self.out, self.width
        tile, last = self.index[self.tile_axis], self.index[self.last]
        out.add(f"first = tile * {width}")
        out.add(f"rows = k.min({self.dim_text[self.tile_axis]} - first, {width})")
        out.add(f"here = k.iota(k.i64, {width}) < rows")
        out.open(f"for j, m in k.vectors({'count' if blocked else lanes}, {width}):")
        start = "start + j" if blocked else "j"
        names: dict[int, str] = {}
        for i in self.transposed:
            leaf = spec.values[i]
            assert isinstance(leaf, Leaf)
            names[i] = f"tile{i}"
            kind = expressions.KERNEL_NAME[expressions.compute_dtype(leaf.dtype)]
            out.add(f"{names[i]} = k.tile(k.{kind}, ({width},), width={width})")
            axes = [axis for axis, stride in enumerate(leaf.strides) if stride != 0]
            at = {self.tile_axis: "first", self.last: "at"}
            where = ", ".join(at.get(axis, self.index[axis]) for axis in axes)
            depth = out.depth
            out.open(f"for r in k.static_range({width}):")
            # rows past the end read the last row; their results are discarded
            out.add(f"at = k.min({start} + r, {lanes} - 1)")
            # the load runs along the tile axis, which is not the last one of the view
            along = axes.index(self.tile_axis)
            text = f"a{self.leaves.index(i)}.load({where}, width={width}, mask=here, axis={along})"
            out.add(f"{names[i]}[r] = {expressions.loaded_text(text, leaf.dtype)}")
            out.depth = depth
            out.add(f"transpose({names[i]}, {width})")
        out.open(f"for r in k.static_range({width}):")
        out.open("if r < rows:")
        out.add(f"{tile} = first + r")
        out.add(f"{last} = {start}")
        self.values.scope = {i: f"{name}[r]" for i, name in names.items()}
        for result in spec.results:
            self.values.value(result.value)
        for position, result in enumerate(spec.results):
            self.store(position, result)

    # the nest ----------------------------------------------------------------------------------

    def write(self) -> RegionKernel:
        """Writes the parallel loop over chunks, then the levels of the region inside it."""
        spec, out = self.spec, self.out
        rank = len(spec.dims)
        inner_axes = {self.last, self.lane_axis} if self.columns else {self.last}
        parallel = [(self.index[a], self.dim_text[a]) for a in range(rank) if a not in inner_axes]
        block = self.block_size()
        lanes = self.dim_text[self.lane_axis] if rank else "1"
        if self.tile_axis >= 0:
            rows = self.tile_rows
            out.add(f"tiles = ({self.dim_text[self.tile_axis]} + {rows - 1}) // {rows}")
            parallel = [pair for pair in parallel if pair[0] != self.index[self.tile_axis]]
            parallel.append(("tile", "tiles"))
        if block:
            out.add(f"blocks = ({lanes} + {block - 1}) // {block}")
            # blocks vary fastest, or tiles where they advance along the rows that are read
            parallel.insert(len(parallel) - self.along_read, ("b", "blocks"))
        if parallel:
            names = ", ".join(name for name, _ in parallel)
            shape = ", ".join(size for _, size in parallel)
            comma = "," if len(parallel) == 1 else ""
            grain = self.grain(block)
            if not self.transposed:
                # chunks grow with the work: long runs are read fastest
                steps = " * ".join(size for _, size in parallel)
                grain = f"k.max({grain}, {steps} // ({tuning.CHUNKS} * ctx.num_workers))"
            out.open(f"for {names}{comma} in ctx.parallel(({shape}{comma}), grain={grain}):")
        if block:
            out.add(f"start = b * {block}")
            out.add(f"count = k.min({lanes} - start, {block})")
            self.start = "start"
        if self.transposed:
            self.transposed_walk(lanes, bool(block))
            return self.finish_text(bool(parallel))
        if self.tile_axis >= 0:
            first = f"tile * {tuning.TILE_ROWS}"
            last = f"k.min({first} + {tuning.TILE_ROWS}, {self.dim_text[self.tile_axis]})"
            out.open(f"for {self.index[self.tile_axis]} in range({first}, {last}):")
        if self.columns:
            out.open(f"for j, m in k.vectors({'count' if block else lanes}, {self.width}):")
            out.add(f"{self.index[self.lane_axis]} = " + ("start + j" if block else "j"))
        if self.split:
            out.add(f"blocks = ({lanes} + {tuning.BLOCK - 1}) // {tuning.BLOCK}")
        for level in range(max(spec.level) + 1):
            self.write_level(level)
        return self.finish_text(bool(parallel) or self.split)

    def block_size(self) -> int:
        """Elements of the lane axis per chunk; 0 if the axis is not cut."""
        # a reduction needs its whole axis in one task
        if not self.spec.dims or (self.spec.reduces and not self.columns):
            return 0
        block = (
            8 * self.width
            if self.columns
            else self.tile_lanes
            if self.tile_axis >= 0
            else tuning.BLOCK
        )
        size = self.spec.dims[self.lane_axis]
        # an axis a little longer than a block is not worth a second task
        max_uncut = block if self.columns or self.tile_axis >= 0 else 2 * block
        return 0 if isinstance(size, int) and size <= max_uncut else block

    def grain(self, block: int) -> str:
        """The steps of the parallel loop that make up one chunk."""
        work = (block or 1) * (self.tile_rows if self.tile_axis >= 0 else 1)
        # axes that one step of the parallel loop walks completely
        walked = [self.last] if self.columns or not block else []
        if self.columns and not block:
            walked.append(self.lane_axis)
        texts = list[str]()
        for axis in walked:
            size = self.spec.dims[axis]
            if isinstance(size, int):
                work *= max(size, 1)
            else:
                texts.append(self.dim_text[axis])
        # a chunk has at least `REGION_CHUNK` elements of work
        min_steps = max(tuning.REGION_CHUNK // work, 1)
        return (
            f"k.max({min_steps} // k.max({' * '.join(texts)}, 1), 1)" if texts else str(min_steps)
        )

    def finish_text(self, parallel: bool) -> RegionKernel:
        """The kernel: signature, lines and parameters; one worker runs it unless it is `parallel`."""
        spec = self.spec
        args: list[ArgView] = []
        params: list[str] = []
        for position, result in enumerate(spec.results):
            args.append(self.view(result.dtype, result.strides))
            params.append(f"o{position}: k.Output")
        for position, i in enumerate(self.leaves):
            leaf = spec.values[i]
            assert isinstance(leaf, Leaf)
            args.append(self.view(leaf.dtype, leaf.strides))
            params.append(f"a{position}: k.Input")
        for position, i in enumerate(self.workspaces):
            blocks = simplify((spec.dims[self.last] + (tuning.BLOCK - 1)) // tuning.BLOCK)
            dtype = expressions.compute_dtype(spec.values[i].dtype)
            args.append(ArgView(dtype, (blocks,), None))
            params.append(f"w{position}: k.InOut")
        params += [f"{name}: k.i64" for name in self.scalar_names]
        header = f"def region({', '.join(params)}, ctx: k.Context):"
        size = spec.size
        serial = not parallel or (isinstance(size, int) and size <= tuning.SERIAL_ELEMENTS)
        return RegionKernel(
            "\n".join([header, *self.out.lines]) + "\n",
            tuple(args),
            tuple(self.scalars),
            serial,
            FUNCTIONS,
        )

    def view(self, dtype: DType, strides: Sizes) -> ArgView:
        axes = self.view_order([axis for axis, stride in enumerate(strides) if stride != 0])
        return ArgView.of(self.spec, dtype, strides, axes)


def write_nest(spec: RegionSpec, native_width: int) -> RegionKernel:
    """Writes the kernel of a region.

    Args:
        spec: The region.
        native_width: Lanes of the region's widest compute type in a vector register.
    """
    axis = space.column_axis(spec)
    # rows can be walked once more, but not columns, nor a single row that workers share
    spec = with_exact_centers(spec, axis is None and len(spec.dims) > 1)
    columns = axis is not None
    if axis is not None:
        spec = space.move_axis(spec, axis)
    vectors = vectors_per_step(spec, columns)
    return _NestWriter(spec, columns, vectors * native_width).write()


def write_region(spec: RegionSpec, target: k.Target) -> RegionKernel:
    """Writes the kernel of a region for a processor."""
    return write_nest(spec, native_width(spec, target))
