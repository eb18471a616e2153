"""Lowering of loops and branches, with polls for interrupts."""

from __future__ import annotations

from collections.abc import Iterable

from max.kernel.ir.nodes import Block, Effect, For, If, Leave, Parallel, Ref, Stmt, While
from max.kernel.lowering.functions import call_outlined
from max.kernel.lowering.workers import poll
from max.kernel.lowering.writer import Writer


def lower_for(w: Writer, s: For) -> None:
    """A counted loop; it polls for interrupts unless it ends soon."""
    start, stop = w.atom(s.start), w.atom(s.stop)
    compare = "slt" if s.step > 0 else "sgt"
    enter, exit = w.label("enter"), w.label("exit")
    # tested once before the loop: from here on there is at least one iteration
    run = w.temp(f"icmp {compare} i64 {start}, {stop}")
    w.out(f"br i1 {run}, label %{enter}, label %{exit}")
    w.start(enter)
    inner = _depth(s.body)
    trips = _trip_count(s)
    max_trips = s.max_iterations if trips is None else trips
    is_short = max_trips is not None and max_trips <= _PART
    if inner or is_short or (trips is None and w.loop_depth > _OUTER):
        # counted loops terminate: only long ones poll
        polls = inner > 0 and w.loop_depth < _OUTER + min(inner - 1, 1)
        _count(w, s, enter, start, stop, exit, polls)
    else:
        _count_in_parts(w, s, start, stop, exit)
    w.start(exit)


def _count(w: Writer, s: For, before: str, start: str, stop: str, exit: str, polls: bool) -> None:
    """The iterations from `start` to `stop`, at least one; then control continues at `exit`."""
    var = f"%v{s.var.id}"
    compare = "slt" if s.step > 0 else "sgt"
    body, latch = w.label("body"), w.label("latch")
    w.jump(body)
    w.start(body)
    w.out(f"{var} = phi i64 [ {start}, %{before} ], [ {var}.next, %{latch} ]")
    w.loop_depth += 1
    falls = w.body(s.body)
    w.loop_depth -= 1
    if falls:
        if polls:
            poll(w)
        w.jump(latch)
    # the latch stays even if no path reaches it: the phi above names it
    w.start(latch)
    w.out(f"{var}.next = add nsw i64 {var}, {s.step}")
    again = w.temp(f"icmp {compare} i64 {var}.next, {stop}")
    w.out(f"br i1 {again}, label %{body}, label %{exit}")


def _count_in_parts(w: Writer, s: For, start: str, stop: str, exit: str) -> None:
    """A long innermost loop, split into parts of `_PART` iterations with a poll between parts."""
    enter, compare = w.block, "slt" if s.step > 0 else "sgt"
    part, after = w.label("part"), w.label("rest")
    more = f"%v{s.var.id}.next"
    w.jump(part)
    w.start(part)
    base = f"%v{s.var.id}.part"
    w.out(f"{base} = phi i64 [ {start}, %{enter} ], [ {more}, %{after}.on ]")
    far = w.temp(f"add nsw i64 {base}, {_PART * s.step}")
    inside = w.temp(f"icmp {compare} i64 {far}, {stop}")
    end = w.temp(f"select i1 {inside}, i64 {far}, i64 {stop}")
    _count(w, s, part, base, end, after, False)
    w.start(after)
    poll(w)
    again = w.temp(f"icmp {compare} i64 {more}, {stop}")
    # the poll may consist of several blocks, so a named block continues after it
    w.out(f"br i1 {again}, label %{after}.on, label %{exit}")
    w.start(f"{after}.on")
    w.jump(part)


def lower_while(w: Writer, s: While) -> None:
    """A loop that runs as long as a condition holds."""
    head, body, exit = (w.label(k) for k in ("head", "body", "exit"))
    w.jump(head)
    w.start(head)
    # a head that raises on every path has no test
    if w.body(s.head):
        w.out(f"br i1 {w.atom(s.cond)}, label %{body}, label %{exit}")
    w.start(body)
    w.loop_depth += 1
    falls = w.body(s.body)
    w.loop_depth -= 1
    if falls:
        if not _brief(s.body):
            poll(w)
        w.jump(head)
    w.start(exit)


def lower_if(w: Writer, s: If) -> None:
    """A branch."""
    then, orelse, join = (w.label(k) for k in ("then", "else", "join"))
    w.out(f"br i1 {w.atom(s.cond)}, label %{then}, label %{orelse if s.orelse else join}")
    w.start(then)
    if w.body(s.then):
        w.jump(join)
    if s.orelse:
        w.start(orelse)
        if w.body(s.orelse):
            w.jump(join)
    w.start(join)


def lower_block(w: Writer, s: Block) -> None:
    """A body that `Leave` can end early, or an outlined function."""
    if s.label in w.outlined:
        call_outlined(w, s)
        return
    if w.body(s.body):
        w.jump(f"leave{s.label}")
    w.start(f"leave{s.label}")


def lower_leave(w: Writer, s: Leave) -> None:
    """A jump to the end of a block."""
    w.jump(f"leave{s.label}")


_OUTER = 2
"""Counted loops that contain loops poll for interrupts above this nesting depth, one level deeper if three or more
loops nest.

An innermost loop up to this depth polls every `_PART` iterations, unless it is known to have no more.
"""
_PART = 1 << 16
"""The number of iterations of an innermost loop between two polls."""


def _brief(body: Iterable[Stmt]) -> bool:
    """Whether a loop is marked with `k.brief`, which disables polling."""
    return any(
        (isinstance(s, Effect) and s.op == "brief") or (isinstance(s, Block) and _brief(s.body))
        for s in body
    )


def _trip_count(s: For) -> int | None:
    """The maximum number of iterations of a loop if its bounds are constants, else None."""
    if isinstance(s.start, Ref) or isinstance(s.stop, Ref):
        return None
    return -(-abs(s.stop.value - s.start.value) // abs(s.step))


def _depth(body: Iterable[Stmt]) -> int:
    """The nesting depth of run-time loops."""
    greatest = 0
    for s in body:
        kind = s.__class__
        if kind is If:
            depth = max(_depth(s.then), _depth(s.orelse))  # type: ignore[union-attr]
        elif kind is For or kind is While or kind is Parallel:
            depth = 1 + _depth(s.body)  # type: ignore[union-attr]
        elif kind is Block:
            depth = _depth(s.body)  # type: ignore[union-attr]
        else:
            continue
        greatest = max(greatest, depth)
    return greatest
