"""Lowers the kernel IR to LLVM IR text: control flow, memory and the ABI. ``lower_ops`` has the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max._abi import COUNTER_BYTES, Context, ErrorRecord, ErrorState
from max.kernel.ir.nodes import (
    LONG_SHARE,
    LONGS,
    SHORT_SHARE,
    Alloc,
    Assign,
    Atom,
    Barrier,
    Block,
    Effect,
    For,
    If,
    KernelIR,
    Leave,
    Let,
    Parallel,
    Raise,
    Ref,
    Stmt,
    Store,
    While,
)
from max.kernel.lowering.contraction import contraction
from max.kernel.lowering.ops import OpLowering
from max.kernel.lowering.tiles import uses_tiles
from max.kernel.lowering.types import MEMORY, atom_text, llvm_type
from max.kernel.targets.target import LLVMTarget
from max.kernel.types import f64


def emit_llvm(ir: KernelIR, target: LLVMTarget) -> str:
    """LLVM IR of a kernel, whose function is ``k_<key>``.

    Args:
        ir: the kernel.
        target: the processor; the kernel should have been specialised for one with the same features.
    """
    return _Lowering(ir, target).text()


class _Lowering(OpLowering):
    def __init__(self, ir: KernelIR, target: LLVMTarget) -> None:
        super().__init__(target)
        self.ir = ir
        self.slots: dict[int, str] = {}
        self.labels = 0
        self.loops = 0
        self.polls = False
        self.block = "entry"
        self._statements: dict[type[Any], Callable[[Any], None]] = {
            Let: self.let,
            Store: self._store,
            Assign: self._assign,
            Alloc: lambda s: None,
            Effect: self.effect,
            For: self._for,
            While: self._while,
            If: self._if,
            Block: self._block,
            Leave: self._leave,
            Parallel: self._parallel,
            Barrier: self._barrier,
            Raise: self._raise,
        }

    def text(self) -> str:
        """The whole module."""
        allocs: list[str] = []
        for alloc in _allocs(self.ir.body):
            name = self.slots[alloc.slot] = f"%s{alloc.slot}"
            type = llvm_type(alloc.type)
            allocs.append(
                f"  {name} = alloca [{max(alloc.count, 1)} x {type}], align {_alignment(alloc)}"
            )
        if self.target.has_fma:
            self.contraction = contraction(self.ir.body)
        self.tiles.configured = uses_tiles(self.ir.body)
        self.body(self.ir.body)
        self.out("ret void")
        lines = [
            f'target triple = "{self.target.triple}"',
            *self.globals,
            *self.tiles.globals,
            *self.tiles.functions.values(),
            f"define void @k_{self.ir.key}(ptr %args, ptr %ctx) #0 {{",
            "entry:",
            *allocs,
            *self.tiles.entry(),
            *self.lines,
            "}",
            *(f"declare {signature}" for signature in sorted(self.declarations)),
            self._attributes(),
            *(['!0 = !{!"branch_weights", i32 1048576, i32 1}'] if self.polls else []),
        ]
        return "\n".join(lines) + "\n"

    def _attributes(self) -> str:
        width = f'"prefer-vector-width"="{self.target.vector_bits}"'
        features = f'"target-features"="{self.target.feature_string}"'
        cpu = f'"target-cpu"="{self.target.cpu}"'
        if self.target.is_arm64 and self.target.cpu == "generic":
            # LLVM would order instructions for one that runs them as they come, and run out of registers
            cpu += ' "tune-cpu"="neoverse-n1"'
        return f"attributes #0 = {{ nounwind {cpu} {features} {width} }}"

    # ***** labels *****
    def label(self, kind: str) -> str:
        self.labels += 1
        return f"{kind}{self.labels}"

    def start(self, label: str) -> None:
        """Begins a basic block."""
        self.lines.append(f"{label}:")
        self.block = label

    def body(self, statements: Iterable[Stmt]) -> bool:
        """Lowers statements; whether the end is reached."""
        table = self._statements
        for s in statements:
            kind = s.__class__
            table[kind](s)
            if kind is Leave or kind is Raise:
                return False
        return True

    def jump(self, label: str) -> None:
        self.out(f"br label %{label}")

    # ***** memory *****
    def _slot_pointer(self, slot: int, index: Atom, type: str) -> str:
        base = self.slots[slot]
        if not isinstance(index, Ref):
            if index.value == 0:
                return base
            return self.temp(f"getelementptr inbounds {type}, ptr {base}, i64 {index.value}")
        return self.temp(f"getelementptr inbounds {type}, ptr {base}, i64 {self.atom(index)}")

    def read_slot(self, s: Let) -> None:
        type = llvm_type(s.ref.type)
        pointer = self._slot_pointer(s.attr, s.args[0], type)
        self.out(f"%v{s.ref.id} = load {type}, ptr {pointer}, align {_align_of(s.ref)}")

    def _assign(self, s: Assign) -> None:
        type = llvm_type(s.value.type)
        pointer = self._slot_pointer(s.slot, s.index, type)
        self.out(f"store {type} {self.atom(s.value)}, ptr {pointer}, align {_align_of(s.value)}")

    def _store(self, s: Store) -> None:
        self.store_memory(s.pointer, s.value, s.mask)

    # ***** control flow *****
    def _for(self, s: For) -> None:
        start, stop = self.atom(s.start), self.atom(s.stop)
        compare = "slt" if s.step > 0 else "sgt"
        enter, exit = self.label("enter"), self.label("exit")
        run = self.temp(f"icmp {compare} i64 {start}, {stop}")
        self.out(f"br i1 {run}, label %{enter}, label %{exit}")
        self.start(enter)
        inner = _depth(s.body)
        turns = _turns(s)
        if inner or (turns <= _PART if turns is not None else self.loops > _OUTER):
            # counted loops end: only those that may take long look up
            polls = inner > 0 and self.loops < _OUTER + min(inner - 1, 1)
            self._count(s, enter, start, stop, exit, polls)
        else:
            self._count_in_parts(s, start, stop, exit)
        self.start(exit)

    def _count(self, s: For, before: str, start: str, stop: str, exit: str, polls: bool) -> None:
        """The turns from `start` to `stop`, of which there is one at least; goes on at `exit`."""
        var = f"%v{s.var.id}"
        compare = "slt" if s.step > 0 else "sgt"
        body, latch = self.label("body"), self.label("latch")
        self.jump(body)
        self.start(body)
        self.out(f"{var} = phi i64 [ {start}, %{before} ], [ {var}.next, %{latch} ]")
        self.loops += 1
        falls = self.body(s.body)
        self.loops -= 1
        if falls:
            if polls:
                self._poll()
            self.jump(latch)
        self.start(latch)
        self.out(f"{var}.next = add nsw i64 {var}, {s.step}")
        again = self.temp(f"icmp {compare} i64 {var}.next, {stop}")
        self.out(f"br i1 {again}, label %{body}, label %{exit}")

    def _count_in_parts(self, s: For, start: str, stop: str, exit: str) -> None:
        """A loop of many short turns looks up between parts of them."""
        enter, compare = self.block, "slt" if s.step > 0 else "sgt"
        part, rest = self.label("part"), self.label("rest")
        more = f"%v{s.var.id}.next"
        self.jump(part)
        self.start(part)
        base = f"%v{s.var.id}.part"
        self.out(f"{base} = phi i64 [ {start}, %{enter} ], [ {more}, %{rest}.on ]")
        far = self.temp(f"add nsw i64 {base}, {_PART * s.step}")
        inside = self.temp(f"icmp {compare} i64 {far}, {stop}")
        end = self.temp(f"select i1 {inside}, i64 {far}, i64 {stop}")
        self._count(s, part, base, end, rest, False)
        self.start(rest)
        self._poll()
        again = self.temp(f"icmp {compare} i64 {more}, {stop}")
        # one block of a known name comes back, however the poll is made
        self.out(f"br i1 {again}, label %{rest}.on, label %{exit}")
        self.start(f"{rest}.on")
        self.jump(part)

    def _while(self, s: While) -> None:
        head, body, exit = (self.label(k) for k in ("head", "body", "exit"))
        self.jump(head)
        self.start(head)
        if self.body(s.head):
            self.out(f"br i1 {self.atom(s.cond)}, label %{body}, label %{exit}")
        self.start(body)
        self.loops += 1
        falls = self.body(s.body)
        self.loops -= 1
        if falls:
            if not _brief(s.body):
                self._poll()
            self.jump(head)
        self.start(exit)

    def _if(self, s: If) -> None:
        then, orelse, join = (self.label(k) for k in ("then", "else", "join"))
        self.out(f"br i1 {self.atom(s.cond)}, label %{then}, label %{orelse if s.orelse else join}")
        self.start(then)
        if self.body(s.then):
            self.jump(join)
        if s.orelse:
            self.start(orelse)
            if self.body(s.orelse):
                self.jump(join)
        self.start(join)

    def _block(self, s: Block) -> None:
        if self.body(s.body):
            self.jump(f"leave{s.label}")
        self.start(f"leave{s.label}")

    def _leave(self, s: Leave) -> None:
        self.jump(f"leave{s.label}")

    # ***** workers *****
    def context(self, field: Context, type: str) -> str:
        """The value of a field of the worker's context."""
        return self.temp(f"load {type}, ptr {self._field(field)}, align 8")

    def _field(self, field: Context) -> str:
        """The address of a field of the worker's context."""
        return self.temp(f"getelementptr inbounds i64, ptr %ctx, i64 {field}")

    def _error_state(self) -> tuple[str, str]:
        """The addresses of the error record and of its state."""
        record = self.context(Context.ERROR, "ptr")
        state = self.temp(f"getelementptr inbounds i64, ptr {record}, i64 {ErrorRecord.STATE}")
        return record, state

    def _parallel(self, s: Parallel) -> None:
        total = self.atom(s.total)
        begin, end = f"%v{s.begin.id}", f"%v{s.end.id}"
        first, fetch, chunk, latch, done = (
            self.label(k) for k in ("first", "fetch", "chunk", "next", "done")
        )
        workers = self.context(Context.WORKERS, "i64")
        single = self.temp(f"icmp eq i64 {workers}, 1")
        some = self.temp(f"icmp sgt i64 {total}, 0")
        # before the branch: they are used where a chunk of the single worker could, for all LLVM knows, come by too
        long, short, longs = self._chunk_sizes(s, total, workers)
        counters = self.context(Context.COUNTERS, "ptr")
        counter = self.temp(
            f"getelementptr inbounds i8, ptr {counters}, i64 {COUNTER_BYTES * s.phase}"
        )
        self.out(f"br i1 {single}, label %{first}, label %{fetch}")
        self.start(first)  # one worker takes all at once, without atomics
        self.out(f"br i1 {some}, label %{chunk}, label %{done}")
        self.start(fetch)
        number = self.temp(f"atomicrmw add ptr {counter}, i64 1 monotonic, align 8")
        if longs:
            is_long = self.temp(f"icmp slt i64 {number}, {longs}")
            size = self.temp(f"select i1 {is_long}, i64 {long}, i64 {short}")
            longs_before = self.temp(f"select i1 {is_long}, i64 {number}, i64 {longs}")
            in_longs = self.temp(f"mul i64 {longs_before}, {long}")
            shorts_before = self.temp(f"sub i64 {number}, {longs_before}")
            in_shorts = self.temp(f"mul i64 {shorts_before}, {short}")
            from_ = self.temp(f"add i64 {in_longs}, {in_shorts}")
        else:
            size = long
            from_ = self.temp(f"mul i64 {number}, {long}")
        more = self.temp(f"icmp slt i64 {from_}, {total}")
        after = self.temp(f"add i64 {from_}, {size}")
        inside = self.temp(f"icmp slt i64 {after}, {total}")
        to = self.temp(f"select i1 {inside}, i64 {after}, i64 {total}")
        self.out(f"br i1 {more}, label %{chunk}, label %{done}")
        self.start(chunk)
        self.out(f"{begin} = phi i64 [ 0, %{first} ], [ {from_}, %{fetch} ]")
        self.out(f"{end} = phi i64 [ {total}, %{first} ], [ {to}, %{fetch} ]")
        if self.body(s.body):
            self._poll()
            self.jump(latch)
        self.start(latch)
        self.out(f"br i1 {single}, label %{done}, label %{fetch}")
        self.start(done)

    def _chunk_sizes(self, s: Parallel, total: str, workers: str) -> tuple[str, str, str]:
        """The sizes of long and short chunks, and how many long ones there are; the last is empty where all have one size."""
        given = self.atom(s.grain)
        if not isinstance(s.grain, Ref) and given != "0":
            return self._whole(given, s.multiple), "", ""
        parts = self.temp(f"mul i64 {workers}, {LONG_SHARE}")
        long = self._at_least_one(self.temp(f"udiv i64 {total}, {parts}"))
        short = self._at_least_one(self.temp(f"udiv i64 {long}, {SHORT_SHARE}"))
        if isinstance(s.grain, Ref):
            wanted = self.temp(f"icmp sgt i64 {given}, 0")
            long = self.temp(f"select i1 {wanted}, i64 {given}, i64 {long}")
            short = self.temp(f"select i1 {wanted}, i64 {given}, i64 {short}")
        longs = self.temp(f"mul i64 {workers}, {LONGS}")
        return self._whole(long, s.multiple), self._whole(short, s.multiple), longs

    def _at_least_one(self, size: str) -> str:
        positive = self.temp(f"icmp sgt i64 {size}, 0")
        return self.temp(f"select i1 {positive}, i64 {size}, i64 1")

    def _whole(self, size: str, multiple: int) -> str:
        """`size`, rounded up to multiples."""
        if multiple == 1:
            return size
        up = self.temp(f"add i64 {size}, {multiple - 1}")
        count = self.temp(f"udiv i64 {up}, {multiple}")
        return self.temp(f"mul i64 {count}, {multiple}")

    def _barrier(self, s: Barrier) -> None:
        """A barrier lets everyone through once a worker has raised, wherever it did: the run is over, all return.

        Others may be in the middle of their phase at that moment, so nothing that follows may rely on it.
        """
        barrier = self.context(Context.BARRIER, "ptr")
        self.out(f"call void {barrier}(ptr %ctx)")
        _, pointer = self._error_state()
        state = self.temp(f"load atomic i64, ptr {pointer} acquire, align 8")
        on = self.label("on")
        self._leave_if_raised(state, on)
        self.start(on)

    def _leave_if_raised(self, state: str, on: str) -> None:
        raised = self.temp(f"icmp ne i64 {state}, {ErrorState.NONE}")
        stop = self.label("failed")
        self.out(f"br i1 {raised}, label %{stop}, label %{on}")
        self.start(stop)
        self.tiles.leave()
        self.out("ret void")

    def _poll(self) -> None:
        """Polls the worker's alert word, and leaves the kernel when the run has failed or was interrupted.

        The load is volatile and not atomic, as an atomic one would keep LLVM from moving others across it.
        """
        self.polls = True
        alert = self.temp(f"load volatile i64, ptr {self._field(Context.ALERT)}, align 8")
        quiet = self.temp(f"icmp eq i64 {alert}, 0")
        alarm, on = self.label("alarm"), self.label("on")
        self.out(f"br i1 {quiet}, label %{on}, label %{alarm}, !prof !0")
        self.start(alarm)
        poll = self.context(Context.POLL, "ptr")
        state = self.temp(f"call preserve_mostcc i64 {poll}(ptr %ctx)")
        self._leave_if_raised(state, on)
        self.start(on)

    def _raise(self, s: Raise) -> None:
        record, state = self._error_state()
        none, failed = ErrorState.NONE, ErrorState.FAILED
        pair = self.temp(
            f"cmpxchg ptr {state}, i64 {none}, i64 {failed} acq_rel monotonic, align 8"
        )
        won = self.temp(f"extractvalue {{ i64, i1 }} {pair}, 1")
        write, leave = self.label("write"), self.label("raised")
        self.out(f"br i1 {won}, label %{write}, label %{leave}")
        self.start(write)
        self._record(record, ErrorRecord.LAUNCH, self.context(Context.LAUNCH, "i64"))
        self._record(record, ErrorRecord.RAISE, str(s.message))
        for n, value in enumerate(s.values):
            self._record(record, ErrorRecord.VALUES + n, self.as_bits(value))
        self.jump(leave)
        self.start(leave)
        self.tiles.leave()
        self.out("ret void")

    def _record(self, record: str, field: int, value: str) -> None:
        pointer = self.temp(f"getelementptr inbounds i64, ptr {record}, i64 {field}")
        self.out(f"store atomic i64 {value}, ptr {pointer} monotonic, align 8")

    def as_bits(self, a: Atom) -> str:
        """A scalar as the 64 bits of the error record."""
        text, dtype = self.atom(a), a.type.dtype
        if dtype.is_float:
            wide = text
            if dtype is not f64:
                wide = self.temp(f"fpext float {self.to_f32(a)} to double")
            return self.temp(f"bitcast double {wide} to i64")
        if dtype.bits == 64:
            return text
        extend = "sext" if dtype.kind == "i" else "zext"
        return self.temp(f"{extend} {llvm_type(a.type)} {text} to i64")


def _allocs(body: Iterable[Stmt]) -> Iterable[Alloc]:
    for s in body:
        kind = s.__class__
        if kind is Alloc:
            yield s  # type: ignore[misc]
        elif kind is If:
            yield from _allocs(s.then)  # type: ignore[union-attr]
            yield from _allocs(s.orelse)  # type: ignore[union-attr]
        elif kind is While:
            yield from _allocs(s.head)  # type: ignore[union-attr]
            yield from _allocs(s.body)  # type: ignore[union-attr]
        elif kind in (For, Parallel, Block):
            yield from _allocs(s.body)  # type: ignore[union-attr]


_OUTER = 2
"""Counted loops that contain loops poll for interrupts above this nesting depth, one level deeper if three or more loops nest.

An innermost loop at most this deep, if its length is unknown, polls every `_PART` iterations.
"""
_PART = 1 << 16
"""Iterations of an innermost loop between two polls."""


def _brief(body: Iterable[Stmt]) -> bool:
    """Whether a loop is marked with `k.brief`: it ends soon and needs no polls."""
    return any(
        (isinstance(s, Effect) and s.op == "brief") or (isinstance(s, Block) and _brief(s.body))
        for s in body
    )


def _turns(s: For) -> int | None:
    """The greatest number of iterations of a loop, if its bounds are constants."""
    if isinstance(s.start, Ref) or isinstance(s.stop, Ref):
        return None
    return -(-abs(s.stop.value - s.start.value) // abs(s.step))


def _depth(body: Iterable[Stmt]) -> int:
    """The nesting depth of run-time loops."""
    deepest = 0
    for s in body:
        kind = s.__class__
        if kind is If:
            found = max(_depth(s.then), _depth(s.orelse))  # type: ignore[union-attr]
        elif kind is For or kind is While or kind is Parallel:
            found = 1 + _depth(s.body)  # type: ignore[union-attr]
        elif kind is Block:
            found = _depth(s.body)  # type: ignore[union-attr]
        else:
            continue
        deepest = max(deepest, found)
    return deepest


def _alignment(s: Alloc) -> int:
    return _natural(s.type.dtype.size * max(s.type.width, 1)) if s.type.dtype.kind != "b" else 8


def _align_of(a: Atom) -> int:
    if a.type.dtype.kind == "b":
        return 1
    return _natural(a.type.dtype.size * max(a.type.width, 1))


def _natural(size: int) -> int:
    return min(64, size & -size)


__all__ = ["MEMORY", "atom_text", "emit_llvm"]
