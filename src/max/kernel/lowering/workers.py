"""Lowering of parallel loops, barriers, interrupts and errors."""

from __future__ import annotations

from max._abi import COUNTER_BYTES, Context, ErrorRecord, ErrorState, poll_convention
from max.kernel.ir.nodes import (
    LONG_SHARE,
    LONGS,
    MAX_SHARES,
    SHORT_SHARE,
    Atom,
    Barrier,
    Parallel,
    Raise,
    Ref,
)
from max.kernel.lowering.conversions import to_f32
from max.kernel.lowering.tiles import leave_tiles
from max.kernel.lowering.types import llvm_type
from max.kernel.lowering.writer import Writer
from max.kernel.types import f64


def context_value(w: Writer, field: Context, type: str) -> str:
    """The value of a field of the worker's context."""
    return w.temp(f"load {type}, ptr {context_field(w, field)}, align 8")


def context_field(w: Writer, field: Context) -> str:
    """The address of a field of the worker's context."""
    return w.temp(f"getelementptr inbounds i64, ptr %ctx, i64 {field}")


def _error_state(w: Writer) -> tuple[str, str]:
    """The addresses of the error record and of its state."""
    record = context_value(w, Context.ERROR, "ptr")
    state = w.temp(f"getelementptr inbounds i64, ptr {record}, i64 {ErrorRecord.STATE}")
    return record, state


def lower_parallel(w: Writer, s: Parallel) -> None:
    """A loop over chunks that workers take from shared counters.

    Each worker has a share of the range, and a counter of the chunks that were taken from it. It takes those of its own
    share first, whose data its caches may hold from launches that were shared out alike, and then those that others
    left. The first chunks of a share are long and the others short, so that workers finish at about the same time. A
    single worker takes the whole range at once, without atomics.
    """
    total = w.atom(s.total)
    begin, end = f"%v{s.begin.id}", f"%v{s.end.id}"
    first, several, visit, take, chunk, latch, drained, done = (
        w.label(k)
        for k in ("first", "several", "visit", "take", "chunk", "next", "drained", "done")
    )
    workers = context_value(w, Context.WORKERS, "i64")
    single = w.temp(f"icmp eq i64 {workers}, 1")
    some = w.temp(f"icmp sgt i64 {total}, 0")
    w.out(f"br i1 {single}, label %{first}, label %{several}")
    w.start(first)  # one worker takes all at once, without atomics
    w.out(f"br i1 {some}, label %{chunk}, label %{done}")
    w.start(several)
    w.out(f"br i1 {some}, label %{visit}, label %{done}")
    w.start(visit)
    visited, kept, following = f"%{visit}.share", f"%{chunk}.share", f"%{drained}.share"
    w.out(
        f"{visited} = phi i64 [ 0, %{several} ], [ {kept}, %{latch} ], [ {following}, %{drained} ]"
    )
    # computed for each chunk, from the context: values from before the loop would take registers in its body
    workers = context_value(w, Context.WORKERS, "i64")
    long, short = _chunk_sizes(w, s, total, workers)
    shares, share, own = _shares(w, s, total, workers)
    counters = context_value(w, Context.COUNTERS, "ptr")
    counter = w.temp(f"getelementptr inbounds i8, ptr {counters}, i64 {COUNTER_BYTES * s.phase}")
    # `own + visited` modulo the number of shares, without a division
    turned = w.temp(f"add i64 {own}, {visited}")
    turned_back = w.temp(f"sub i64 {turned}, {shares}")
    inside = w.temp(f"icmp ult i64 {turned}, {shares}")
    which = w.temp(f"select i1 {inside}, i64 {turned}, i64 {turned_back}")
    base = w.temp(f"mul i64 {which}, {share}")
    limit = _least(w, w.temp(f"add i64 {base}, {share}"), total)
    holds = w.temp(f"icmp slt i64 {base}, {limit}")
    w.out(f"br i1 {holds}, label %{take}, label %{drained}")
    w.start(take)
    slot = w.temp(f"getelementptr inbounds i64, ptr {counter}, i64 {which}")
    # monotonic: numbers only have to differ, no other memory depends on their order
    number = w.temp(f"atomicrmw add ptr {slot}, i64 1 monotonic, align 8")
    if short:
        is_long = w.temp(f"icmp slt i64 {number}, {LONGS}")
        size = w.temp(f"select i1 {is_long}, i64 {long}, i64 {short}")
        longs_before = w.temp(f"select i1 {is_long}, i64 {number}, i64 {LONGS}")
        in_longs = w.temp(f"mul i64 {longs_before}, {long}")
        shorts_before = w.temp(f"sub i64 {number}, {longs_before}")
        in_shorts = w.temp(f"mul i64 {shorts_before}, {short}")
        before = w.temp(f"add i64 {in_longs}, {in_shorts}")
    else:
        size = long
        before = w.temp(f"mul i64 {number}, {long}")
    from_ = w.temp(f"add i64 {base}, {before}")
    more = w.temp(f"icmp slt i64 {from_}, {limit}")
    to = _least(w, w.temp(f"add i64 {from_}, {size}"), limit)
    w.out(f"br i1 {more}, label %{chunk}, label %{drained}")
    w.start(drained)
    w.out(f"{following} = add i64 {visited}, 1")
    left = w.temp(f"icmp ult i64 {following}, {shares}")
    w.out(f"br i1 {left}, label %{visit}, label %{done}")
    w.start(chunk)
    w.out(f"{kept} = phi i64 [ 0, %{first} ], [ {visited}, %{take} ]")
    w.out(f"{begin} = phi i64 [ 0, %{first} ], [ {from_}, %{take} ]")
    w.out(f"{end} = phi i64 [ {total}, %{first} ], [ {to}, %{take} ]")
    if w.body(s.body):
        poll(w)
        w.jump(latch)
    w.start(latch)
    # a single worker has had the whole range
    w.out(f"br i1 {single}, label %{done}, label %{visit}")
    w.start(done)


def _shares(w: Writer, s: Parallel, total: str, workers: str) -> tuple[str, str, str]:
    """The number of shares of a range, the size of each, and the share that this worker begins with."""
    few = w.temp(f"icmp ult i64 {workers}, {MAX_SHARES}")
    shares = w.temp(f"select i1 {few}, i64 {workers}, i64 {MAX_SHARES}")
    up = w.temp(f"add i64 {total}, {w.temp(f'sub i64 {shares}, 1')}")
    share = _whole(w, w.temp(f"udiv i64 {up}, {shares}"), s.multiple)
    return shares, share, w.temp(f"urem i64 {context_value(w, Context.WORKER, 'i64')}, {shares}")


def _least(w: Writer, a: str, b: str) -> str:
    """The smaller of two numbers."""
    return w.temp(f"select i1 {w.temp(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


def _chunk_sizes(w: Writer, s: Parallel, total: str, workers: str) -> tuple[str, str]:
    """The sizes of long and short chunks; the latter is empty if all chunks have the same size."""
    grain = w.atom(s.grain)
    if not isinstance(s.grain, Ref) and grain != "0":
        return _whole(w, grain, s.multiple), ""
    parts = w.temp(f"mul i64 {workers}, {LONG_SHARE}")
    long_size = _at_least_one(w, w.temp(f"udiv i64 {total}, {parts}"))
    short_size = _at_least_one(w, w.temp(f"udiv i64 {long_size}, {SHORT_SHARE}"))
    if isinstance(s.grain, Ref):
        has_grain = w.temp(f"icmp sgt i64 {grain}, 0")
        long_size = w.temp(f"select i1 {has_grain}, i64 {grain}, i64 {long_size}")
        short_size = w.temp(f"select i1 {has_grain}, i64 {grain}, i64 {short_size}")
    return _whole(w, long_size, s.multiple), _whole(w, short_size, s.multiple)


def _at_least_one(w: Writer, size: str) -> str:
    positive = w.temp(f"icmp sgt i64 {size}, 0")
    return w.temp(f"select i1 {positive}, i64 {size}, i64 1")


def _whole(w: Writer, size: str, multiple: int) -> str:
    """Rounds `size` up to a multiple."""
    if multiple == 1:
        return size
    up = w.temp(f"add i64 {size}, {multiple - 1}")
    count = w.temp(f"udiv i64 {up}, {multiple}")
    return w.temp(f"mul i64 {count}, {multiple}")


def lower_barrier(w: Writer, s: Barrier) -> None:
    """A barrier. After a worker has raised an error, barriers do not wait and all workers return.

    Other workers may then be in an earlier phase, so code after the barrier must not run.
    """
    barrier = context_value(w, Context.BARRIER, "ptr")
    w.out(f"call void {barrier}(ptr %ctx)")
    _, pointer = _error_state(w)
    state = w.temp(f"load atomic i64, ptr {pointer} acquire, align 8")
    on = w.label("on")
    _leave_if_raised(w, state, on)
    w.start(on)


def _leave_if_raised(w: Writer, state: str, on: str) -> None:
    """Returns from the kernel if the error state is set, else continues at the label `on`."""
    raised = w.temp(f"icmp ne i64 {state}, {ErrorState.NONE}")
    stop = w.label("failed")
    w.out(f"br i1 {raised}, label %{stop}, label %{on}")
    w.start(stop)
    leave_tiles(w)
    w.out("ret void")


def poll(w: Writer) -> None:
    """Polls the worker's alert word, and leaves the kernel if the run has failed or was interrupted.

    The load is volatile instead of atomic, as an atomic load would prevent LLVM from moving other loads across it.
    """
    w.polls = True
    alert = w.temp(f"load volatile i64, ptr {context_field(w, Context.ALERT)}, align 8")
    quiet = w.temp(f"icmp eq i64 {alert}, 0")
    alarm, on = w.label("alarm"), w.label("on")
    w.out(f"br i1 {quiet}, label %{on}, label %{alarm}, !prof !0")
    w.start(alarm)
    poll, convention = context_value(w, Context.POLL, "ptr"), poll_convention(w.target.triple)
    state = w.temp(f"call {convention} i64 {poll}(ptr %ctx)")
    _leave_if_raised(w, state, on)
    w.start(on)


def lower_raise(w: Writer, s: Raise) -> None:
    """Jumps to the block that writes the error record."""
    words = [str(s.message), *(as_bits(w, value) for value in s.values)]
    w.raises.append((w.block, words))
    w.jump(_RAISE)


def finish_raises(w: Writer) -> None:
    """Emits the shared block of all errors, if there are any: it writes the error record unless another worker has, and
    leaves the kernel.

    A single block serves all errors, as a kernel may have many tests that rarely fail.
    """
    if not w.raises:
        return
    w.start(_RAISE)
    words: list[str] = []
    for n in range(max(len(values) for _, values in w.raises)):
        # words beyond those of a message are not read
        sources = [f"[ {v[n] if n < len(v) else 0}, %{block} ]" for block, v in w.raises]
        words.append(w.temp(f"phi i64 {', '.join(sources)}"))
    record, state = _error_state(w)
    none, failed = ErrorState.NONE, ErrorState.FAILED
    pair = w.temp(f"cmpxchg ptr {state}, i64 {none}, i64 {failed} acq_rel monotonic, align 8")
    # the first error stays
    won = w.temp(f"extractvalue {{ i64, i1 }} {pair}, 1")
    write, leave = w.label("write"), w.label("raised")
    w.out(f"br i1 {won}, label %{write}, label %{leave}")
    w.start(write)
    _set_record(w, record, ErrorRecord.LAUNCH, context_value(w, Context.LAUNCH, "i64"))
    # fields beyond the longest message stay as they are
    for field, word in zip(_MESSAGE_FIELDS, words, strict=False):
        _set_record(w, record, field, word)
    w.jump(leave)
    w.start(leave)
    leave_tiles(w)
    w.out("ret void")


_RAISE = "raise"
_MESSAGE_FIELDS = (ErrorRecord.RAISE, *range(ErrorRecord.VALUES, ErrorRecord.END))


def _set_record(w: Writer, record: str, field: int, value: str) -> None:
    pointer = w.temp(f"getelementptr inbounds i64, ptr {record}, i64 {field}")
    w.out(f"store atomic i64 {value}, ptr {pointer} monotonic, align 8")


def as_bits(w: Writer, a: Atom) -> str:
    """Converts a scalar to the 64 bits of the error record."""
    text, dtype = w.atom(a), a.type.dtype
    if dtype.is_float:
        wide = text
        if dtype is not f64:
            wide = w.temp(f"fpext float {to_f32(w, a)} to double")
        return w.temp(f"bitcast double {wide} to i64")
    if dtype.bits == 64:
        return text
    extend = "sext" if dtype.kind == "i" else "zext"
    return w.temp(f"{extend} {llvm_type(a.type)} {text} to i64")
