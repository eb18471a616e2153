"""The native part of the pool and the executor, as LLVM IR: workers, barrier, walk over a program.

All workers walk the same program (SPMD). These functions are exported:

* ``max_run(pool, program, bases, index, offsets, alone) -> i64``: the caller, as worker 0, runs a program with the
  values ``bases[index] + offsets``, or ``bases`` itself if `index` is null, and without the other workers if `alone`
  is not 0; the result is an `ErrorState`, and the program gets a copy of the error record;
* ``max_worker(pool, worker)``: the life of another worker: waits for runs until the pool stops;
* ``max_barrier(ctx)``: the barrier that kernels call through their context;
* ``max_stop(pool)``: lets the workers leave ``max_worker``;
* ``max_nudge(pool)``: makes all workers of a run call ``max_poll`` soon, and wakes those that sleep;
* ``max_poll(ctx) -> i64``: a worker with a set alert word calls it: ends the run if it is to be
  interrupted, and on the calling thread lets Python handle signals; the error state.

The structs are those of `max._abi`; docs/runtime.md explains the protocols.
"""

from __future__ import annotations

from typing import Any

from max import _abi
from max._backends.cpu.runtime import platform
from max._backends.cpu.runtime.native_waiting import WAITING
from max._backends.cpu.runtime.native_walk import WALK

EXPORTS = ("max_run", "max_worker", "max_barrier", "max_stop", "max_nudge", "max_poll")
PYTHON_FUNCTIONS = (
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyErr_CheckSignals",
    "PyErr_Fetch",
)

_TEXT = """
; {triple}, parking {parking_mode}
{primitives}

declare void @llvm.memset.p0.i64(ptr, i8, i64, i1 immarg)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1 immarg)
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare i32 @PyErr_CheckSignals()
declare void @PyErr_Fetch(ptr, ptr, ptr)

{waiting}

{walk}

; Runs a program; the calling thread is worker 0, and the only one of a run alone.
define i64 @max_run(ptr %pool, ptr %program, ptr %bases, ptr %index, ptr %offsets, i64 %alone) noinline {{
entry:
  %run.p = getelementptr i64, ptr %pool, i64 {PoolState.RUN}
  %idle = load atomic i64, ptr %run.p monotonic, align 8
  %running = and i64 %idle, 1
  %nested = icmp ne i64 %running, 0
  br i1 %nested, label %refuse, label %begin
refuse:
  ret i64 {ErrorState.NESTED}
begin:
  %run = add i64 %idle, 1
  %ended = add i64 %idle, 2
  %self = call i64 @max_self()
  %caller.p = getelementptr i64, ptr %pool, i64 {PoolState.CALLER}
  store atomic i64 %self, ptr %caller.p monotonic, align 8
  store atomic i64 %run, ptr %run.p release, align 8
  %program.p = getelementptr i64, ptr %pool, i64 {PoolState.PROGRAM}
  store ptr %program, ptr %program.p, align 8
  %as.is = icmp eq ptr %index, null
  br i1 %as.is, label %start, label %compute
; the values are computed in the run, so that no other run changes them
compute:
  %own.p = getelementptr i64, ptr %program, i64 {ProgramHeader.VALUES}
  %own = load ptr, ptr %own.p, align 8
  %count.p = getelementptr i64, ptr %program, i64 {ProgramHeader.NUM_VALUES}
  %count = load i64, ptr %count.p, align 8
  br label %more
more:
  %i = phi i64 [ 0, %compute ], [ %i.next, %add ]
  %any = icmp ult i64 %i, %count
  br i1 %any, label %add, label %start
add:
  %index.p = getelementptr i64, ptr %index, i64 %i
  %position = load i64, ptr %index.p, align 8
  %base.p = getelementptr i64, ptr %bases, i64 %position
  %base = load i64, ptr %base.p, align 8
  %offset.p = getelementptr i64, ptr %offsets, i64 %i
  %offset = load i64, ptr %offset.p, align 8
  %value = add i64 %base, %offset
  %value.p = getelementptr i64, ptr %own, i64 %i
  store i64 %value, ptr %value.p, align 8
  %i.next = add i64 %i, 1
  br label %more
start:
  %values = phi ptr [ %bases, %begin ], [ %own, %more ]
  %values.p = getelementptr i64, ptr %pool, i64 {PoolState.VALUES}
  store ptr %values, ptr %values.p, align 8
  %arrived.p = getelementptr i64, ptr %pool, i64 {PoolState.ARRIVED}
  store atomic i32 0, ptr %arrived.p monotonic, align 4
  %error.p = getelementptr i64, ptr %pool, i64 {ERROR_STATE}
  %record.p = getelementptr i64, ptr %pool, i64 {PoolState.ERROR}
  call void @llvm.memset.p0.i64(ptr align 64 %record.p, i8 0, i64 {ErrorRecord.END.offset}, i1 false)
  %counters.p = getelementptr i64, ptr %program, i64 {ProgramHeader.COUNTERS}
  %counters = load ptr, ptr %counters.p, align 8
  %bytes.p = getelementptr i64, ptr %program, i64 {ProgramHeader.COUNTER_BYTES}
  %bytes = load i64, ptr %bytes.p, align 8
  call void @llvm.memset.p0.i64(ptr align 64 %counters, i8 0, i64 %bytes, i1 false)
  %active.p = getelementptr i64, ptr %pool, i64 {PoolState.ACTIVE}
  %active = load i64, ptr %active.p, align 8
  %is.alone = icmp ne i64 %alone, 0
  %one.worker = icmp eq i64 %active, 1
  %by.one = or i1 %is.alone, %one.worker
  br i1 %by.one, label %single, label %many
single:
  call void @max_walk(ptr %pool, i64 0, i64 1)
  br label %done
many:
  %others64 = sub i64 %active, 1
  %others = trunc i64 %others64 to i32
  %remaining.p = getelementptr i64, ptr %pool, i64 {PoolState.REMAINING}
  store atomic i32 %others, ptr %remaining.p monotonic, align 4
  %finished.p = getelementptr i64, ptr %pool, i64 {PoolState.FINISHED}
  %finished = load atomic i32, ptr %finished.p acquire, align 4
  %finished.sleepers = getelementptr i64, ptr %pool, i64 {PoolState.FINISHED_SLEEPERS}
  %epoch.p = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH}
  %epoch.sleepers = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH_SLEEPERS}
  call void @max_advance(ptr %pool, ptr %epoch.p, ptr %epoch.sleepers)
  call void @max_walk(ptr %pool, i64 0, i64 %active)
  %spins.p = getelementptr i64, ptr %pool, i64 {PoolState.RUN_SPINS}
  %spins = load i64, ptr %spins.p, align 8
  %contexts.p = getelementptr i64, ptr %pool, i64 {PoolState.CONTEXTS}
  %mine = load ptr, ptr %contexts.p, align 8
  call void @max_wait(ptr %pool, ptr %finished.p, i32 %finished, ptr %finished.sleepers, i64 %spins, ptr %mine)
  br label %done
done:
  %error = load atomic i64, ptr %error.p acquire, align 8
  %sound = icmp eq i64 %error, 0
  br i1 %sound, label %end, label %keep
; a signal handler may run another program before Python reads the record
keep:
  %kept.p = getelementptr i64, ptr %program, i64 {ProgramHeader.ERROR}
  call void @llvm.memcpy.p0.p0.i64(ptr %kept.p, ptr %record.p, i64 {ErrorRecord.END.offset}, i1 false)
  %raised.p = getelementptr i64, ptr %pool, i64 {PoolState.RAISED_TYPE}
  %kept.raised = getelementptr i64, ptr %program, i64 {ProgramHeader.RAISED}
  call void @llvm.memcpy.p0.p0.i64(ptr %kept.raised, ptr %raised.p, i64 {RAISED_BYTES}, i1 false)
  call void @llvm.memset.p0.i64(ptr %raised.p, i8 0, i64 {RAISED_BYTES}, i1 false)
  br label %end
end:
  store atomic i64 %ended, ptr %run.p release, align 8
  ret i64 %error
}}

; The life of another worker: runs a program at each epoch, until the pool stops.
define void @max_worker(ptr %pool, i64 %worker) noinline {{
entry:
  %epoch.p = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH}
  %epoch.sleepers = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH_SLEEPERS}
  %stop.p = getelementptr i64, ptr %pool, i64 {PoolState.STOP}
  %remaining.p = getelementptr i64, ptr %pool, i64 {PoolState.REMAINING}
  %finished.p = getelementptr i64, ptr %pool, i64 {PoolState.FINISHED}
  %finished.sleepers = getelementptr i64, ptr %pool, i64 {PoolState.FINISHED_SLEEPERS}
  %spins.p = getelementptr i64, ptr %pool, i64 {PoolState.IDLE_SPINS}
  %spins = load i64, ptr %spins.p, align 8
  br label %idle
idle:
  ; a new pool is at epoch 0: a thread that starts late still joins the first run
  %seen = phi i32 [ 0, %entry ], [ %epoch, %work ], [ %epoch, %report ]
  call void @max_wait(ptr %pool, ptr %epoch.p, i32 %seen, ptr %epoch.sleepers, i64 %spins, ptr null)
  %epoch = load atomic i32, ptr %epoch.p acquire, align 4
  %stop = load atomic i64, ptr %stop.p acquire, align 8
  %stopping = icmp ne i64 %stop, 0
  br i1 %stopping, label %done, label %work
work:
  %active.p = getelementptr i64, ptr %pool, i64 {PoolState.ACTIVE}
  %active = load i64, ptr %active.p, align 8
  call void @max_walk(ptr %pool, i64 %worker, i64 %active)
  %before = atomicrmw sub ptr %remaining.p, i32 1 acq_rel, align 4
  %last = icmp eq i32 %before, 1
  br i1 %last, label %report, label %idle
report:
  call void @max_advance(ptr %pool, ptr %finished.p, ptr %finished.sleepers)
  br label %idle
done:
  ret void
}}

; Makes the workers leave max_worker.
define void @max_stop(ptr %pool) noinline {{
entry:
  %stop.p = getelementptr i64, ptr %pool, i64 {PoolState.STOP}
  store atomic i64 1, ptr %stop.p seq_cst, align 8
  %epoch.p = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH}
  %epoch.sleepers = getelementptr i64, ptr %pool, i64 {PoolState.EPOCH_SLEEPERS}
  call void @max_advance(ptr %pool, ptr %epoch.p, ptr %epoch.sleepers)
  ret void
}}
"""


def native_ir(primitives: platform.Primitives, triple: str) -> str:
    """The LLVM IR of the native part.

    Args:
        primitives: Pause, yield, park, wake, clock and thread of the platform.
        triple: The target, as a comment in the text.
    """
    names: dict[str, Any] = {name: getattr(_abi, name) for name in _abi.__all__}
    names["convention"] = _abi.poll_convention(triple)
    names["RAISED_BYTES"] = _abi.RAISED_WORDS * _abi.WORD_BYTES
    names["ERROR_STATE"] = _abi.PoolState.ERROR + _abi.ErrorRecord.STATE
    return _TEXT.format(
        primitives=primitives.ir,
        parking_mode=primitives.parking,
        triple=triple,
        waiting=WAITING.format(**names).strip(),
        walk=WALK.format(**names).strip(),
        **names,
    )
