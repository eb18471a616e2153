"""Loops whose iterations workers share, and loops over vectors."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from max.kernel.errors import KernelSyntaxError
from max.kernel.frontend.arithmetic import binary
from max.kernel.frontend.conversions import splat, type_of
from max.kernel.frontend.division import (
    MAX_SIZE,
    interval,
    is_multiple,
    note_chunk,
    note_loop,
    note_positive,
)
from max.kernel.frontend.state import FALLS, Frontend, Loop
from max.kernel.frontend.syntax.assignment import bind_target
from max.kernel.frontend.syntax.run_time_loops import loop_body, loop_target, run_time_loop
from max.kernel.frontend.values import ChunksValue, ParallelValue, VectorsValue
from max.kernel.ir.nodes import Atom, Block, For, If, Parallel, Ref, While
from max.kernel.language.source import assigned_names
from max.kernel.types import INDEX, scalar, scalar_type, vector


def _parallel(
    fe: Frontend,
    total: Atom,
    grain: Atom,
    multiple: int,
    node: ast.For,
    fill: Callable[[Ref, Ref], None],
) -> int:
    """A parallel loop over chunks of `total` indices; `fill` emits the body of a chunk from `begin` to `end`."""
    if fe.parallel_depth:
        fe.fail("a parallel loop cannot be inside another one")
    if fe.loop_depth:
        fe.fail(
            "a parallel loop cannot be inside a run-time loop: its counter works once per launch"
        )
    phase = fe.phases

    def build() -> None:
        fe.phases = phase + 1
        begin, end = fe.b.ref(INDEX), fe.b.ref(INDEX)
        scope = fe.b.open("loop")
        note_chunk(fe.b, scope, begin, end, total)
        fe.parallel_depth += 1
        fill(begin, end)
        fe.parallel_depth -= 1
        fe.b.close()
        fe.b.emit(
            Parallel(begin, end, total, grain, multiple, phase, tuple(scope.body), node.lineno)
        )

    run_time_loop(fe, assigned_names(node.body), assigned_names([loop_target(node)]), build)
    return FALLS


def for_parallel(fe: Frontend, node: ast.For, domain: ParallelValue) -> int:
    """``for i in ctx.parallel(shape)``: each worker iterates over the indices of its chunks."""
    total: Any = 1
    for size in domain.shape:
        total = fe.b.mul(total, size)

    def fill(begin: Ref, end: Ref) -> None:
        loop = Loop(fe.depth, False, True)
        if len(domain.shape) <= 1:
            _index_loop(fe, node, loop, begin, end, lambda i: i if domain.scalar else (i,))
        else:
            _grid_loop(fe, node, loop, domain.shape, begin, end)

    return _parallel(fe, fe.b.index(total), fe.b.index(domain.grain), 1, node, fill)


def _no_break(fe: Frontend, loop: Loop) -> None:
    if loop.break_label is not None:
        fe.fail("'break' cannot leave a parallel loop; use 'continue'", KernelSyntaxError)


def _index_loop(
    fe: Frontend, node: ast.For, loop: Loop, begin: Any, end: Any, indices: Callable[[Ref], Any]
) -> None:
    """The loop over the indices of a chunk; `indices` gives the loop's target for an index."""
    var = fe.b.ref(INDEX)
    scope = fe.b.open("loop")
    note_loop(fe.b, scope, var, fe.b.index(begin), fe.b.index(end), 1)
    fe.node = node.target
    bind_target(fe, node.target, indices(var))
    loop_body(fe, node, loop)
    _no_break(fe, loop)
    fe.b.close()
    fe.b.emit(For(var, fe.b.index(begin), fe.b.index(end), 1, tuple(scope.body), node.lineno))


def _grid_loop(
    fe: Frontend, node: ast.For, loop: Loop, shape: tuple[Any, ...], begin: Ref, end: Ref
) -> None:
    """Iterates over flat indices row by row, so that indices are divided once per row."""
    b = fe.b
    # the flat index where the next row starts
    slot = b.alloc(INDEX)
    b.assign(slot, begin)
    head = b.open("head")
    position = b.read(slot, INDEX)
    running = b.op("lt", (position, end), type_of(fe, True))
    b.close()
    body = b.open("loop")
    position = b.read(slot, INDEX)
    b.intervals[position.id] = 0, MAX_SIZE
    quotient: Any = position
    outer: list[Any] = []
    for size in reversed(shape[1:]):
        # no test of the divisor: a chunk is not empty, so no size of the grid is 0
        outer.append(b.op("umod", (quotient, b.index(size)), INDEX))
        quotient = b.op("udiv", (quotient, b.index(size)), INDEX)
    outer = [quotient, *reversed(outer)]
    first = outer.pop()
    last = b.index(shape[-1])
    # to the end of the row, or of the chunk
    count = b.op(
        "min",
        (b.op("sub", (last, first), INDEX, "nsw"), b.op("sub", (end, position), INDEX, "nsw")),
        INDEX,
    )
    stop = b.op("add", (first, count), INDEX, "nsw")
    b.assign(slot, b.op("add", (position, count), INDEX, "nsw"))
    _index_loop(fe, node, loop, first, stop, lambda i: (*outer, i))
    b.close()
    b.emit(While(tuple(head.body), running, tuple(body.body), node.lineno))


def for_chunks(fe: Frontend, node: ast.For, domain: ChunksValue) -> int:
    """``for lo, hi in ctx.chunks(n)``: each worker iterates over the bounds of its chunks."""

    def fill(begin: Ref, end: Ref) -> None:
        loop = Loop(fe.depth, False, True)
        fe.node = node.target
        bind_target(fe, node.target, (begin, end))
        loop_body(fe, node, loop)
        _no_break(fe, loop)

    return _parallel(
        fe, fe.b.index(domain.total), fe.b.index(domain.grain), domain.multiple, node, fill
    )


# ***** vector loops *****
def for_vectors(fe: Frontend, node: ast.For, domain: VectorsValue) -> int:
    """``for j, mask in k.vectors(n, width)``: a loop over whole vectors, then a masked tail if there may be one."""
    b, width = fe.b, domain.width
    start = domain.start
    count = b.sub(domain.stop, start)
    full: Any
    tail_size: Any
    if isinstance(count, int):
        full, tail_size = max(count, 0) // width * width, max(count, 0) % width
    else:
        count = b.op("max", (count, b.const(0, INDEX)), INDEX)
        full, tail_size = count, 0
        # a count that is known to consist of whole vectors needs no tail
        if width & (width - 1) or not is_multiple(b, count, width):
            tail_size = binary(fe, "mod", count, width)
            full = b.op("sub", (count, tail_size), INDEX, "nsw")
    full_stop = b.add(start, full)
    # inside the loop stop > start, so stop is positive then
    from_zero = interval(b, b.index(start))[0] >= 0

    def build() -> None:
        loop = Loop(fe.depth, False, True)
        block = b.open("branch")
        if full != 0:
            var = b.ref(INDEX)
            max_iterations = interval(b, b.index(full))[1] // width
            scope = b.open("loop")
            note_loop(b, scope, var, b.index(start), b.index(full_stop), width)
            if from_zero:
                note_positive(b, scope, domain.stop)
            fe.node = node.target
            bind_target(fe, node.target, (var, None))
            fe.tail_masks.append(None)
            loop_body(fe, node, loop)
            fe.tail_masks.pop()
            b.close()
            b.emit(
                For(
                    var,
                    b.index(start),
                    b.index(full_stop),
                    width,
                    tuple(scope.body),
                    node.lineno,
                    max_iterations,
                )
            )
        if tail_size != 0:
            mask = tail_mask(fe, tail_size, width)
            tail = b.open("branch")
            if from_zero:
                note_positive(b, tail, domain.stop)
            fe.node = node.target
            bind_target(fe, node.target, (b.index(full_stop), mask))
            fe.tail_masks.append(mask)
            loop_body(fe, node, loop)
            fe.tail_masks.pop()
            b.close()
            has_tail = (
                True
                if isinstance(tail_size, int)
                else b.op("gt", (tail_size, b.const(0, INDEX)), type_of(fe, True))
            )
            if has_tail is True:
                b.splice(tail)
            else:
                b.emit(If(has_tail, tuple(tail.body), (), node.lineno))
        b.close()
        if loop.break_label is None:
            b.splice(block)
        else:
            b.emit(Block(loop.break_label, tuple(block.body)))

    run_time_loop(fe, assigned_names(node.body), assigned_names([loop_target(node)]), build)
    return FALLS


def tail_mask(fe: Frontend, tail_size: Any, width: int) -> Atom:
    """The first ``tail_size`` of ``width`` lanes."""
    b = fe.b
    lanes = vector(scalar_type("i32"), width)
    if isinstance(tail_size, int):
        return b.const(
            tuple(k < tail_size for k in range(width)), lanes.with_dtype(scalar_type("bool"))
        )
    # 32 bits suffice: a tail is shorter than a vector
    narrow = splat(fe, b.op("cast", (tail_size,), scalar(lanes.dtype)), width)
    return b.op(
        "lt",
        (b.const(tuple(range(width)), lanes), narrow),
        lanes.with_dtype(scalar_type("bool")),
    )
