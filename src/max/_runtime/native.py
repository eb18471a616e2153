"""The native part of the pool and the executor, as LLVM IR: workers, barrier, walk over a program.

All workers walk the same program (SPMD). These functions are exported:

* ``max_run(pool, program, values) -> i64``: the caller, as worker 0, runs a program; the result is an
  `ErrorState`;
* ``max_worker(pool, worker)``: the life of another worker: waits for runs until the pool stops;
* ``max_barrier(ctx)``: the barrier that kernels call through their context;
* ``max_stop(pool)``: lets the workers leave ``max_worker``;
* ``max_nudge(pool)``: makes all workers of a run call ``max_poll`` soon, and wakes those that sleep;
* ``max_poll(ctx) -> i64``: a worker with a set alert word calls it: ends the run if it is to be
  interrupted, and on the calling thread lets Python handle signals; the error state.

The structs are those of `max._abi`; docs/runtime.md explains the protocols.
"""

from __future__ import annotations

from max import _abi
from max._runtime import platform

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
declare i32 @PyGILState_Ensure()
declare void @PyGILState_Release(i32)
declare i32 @PyErr_CheckSignals()
declare void @PyErr_Fetch(ptr, ptr, ptr)

; Ends the run if it is to be interrupted; on the calling thread, lets Python handle signals. Returns the error state.
define {convention} i64 @max_poll(ptr %ctx) noinline cold {{
entry:
  %alert.p = getelementptr i64, ptr %ctx, i64 {Context.ALERT}
  store atomic i64 0, ptr %alert.p seq_cst, align 8
  %pool.p = getelementptr i64, ptr %ctx, i64 {Context.POOL}
  %pool = load ptr, ptr %pool.p, align 8
  %run.p = getelementptr i64, ptr %pool, i64 {PoolState.RUN}
  %run = load atomic i64, ptr %run.p seq_cst, align 8
  %error.p = getelementptr i64, ptr %pool, i64 {ERROR_STATE}
  %error = load atomic i64, ptr %error.p acquire, align 8
  %sound = icmp eq i64 %error, 0
  br i1 %sound, label %compare, label %done
compare:
  ; a request for an earlier run does not apply to this one
  %interrupt.p = getelementptr i64, ptr %pool, i64 {PoolState.INTERRUPT}
  %interrupt = load atomic i64, ptr %interrupt.p seq_cst, align 8
  %requested = icmp eq i64 %interrupt, %run
  br i1 %requested, label %stop, label %signals
signals:
  %worker.p = getelementptr i64, ptr %ctx, i64 {Context.WORKER}
  %worker = load i64, ptr %worker.p, align 8
  %caller = icmp eq i64 %worker, 0
  %check.p = getelementptr i64, ptr %pool, i64 {PoolState.CHECK}
  %check = load atomic i64, ptr %check.p seq_cst, align 8
  %mine = icmp eq i64 %check, %run
  %looks = and i1 %caller, %mine
  br i1 %looks, label %look, label %done
look:
  store atomic i64 0, ptr %check.p seq_cst, align 8
  %gil = call i32 @PyGILState_Ensure()
  %handled = call i32 @PyErr_CheckSignals()
  %quiet = icmp eq i32 %handled, 0
  br i1 %quiet, label %calm, label %fetch
calm:
  call void @PyGILState_Release(i32 %gil)
  br label %done
fetch:
  %type.p = getelementptr i64, ptr %pool, i64 {PoolState.RAISED_TYPE}
  %value.p = getelementptr i64, ptr %pool, i64 {PoolState.RAISED_VALUE}
  %trace.p = getelementptr i64, ptr %pool, i64 {PoolState.RAISED_TRACE}
  call void @PyErr_Fetch(ptr %type.p, ptr %value.p, ptr %trace.p)
  call void @PyGILState_Release(i32 %gil)
  br label %stop
stop:
  %pair = cmpxchg ptr %error.p, i64 0, i64 {ErrorState.INTERRUPTED} acq_rel monotonic, align 8
  %generation.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION}
  %sleepers.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION_SLEEPERS}
  call void @max_advance(ptr %pool, ptr %generation.p, ptr %sleepers.p)
  br label %done
done:
  %state = load atomic i64, ptr %error.p acquire, align 8
  ret i64 %state
}}

; Sets the alert words of all workers, and wakes those of a run.
define void @max_nudge(ptr %pool) noinline {{
entry:
  %contexts.p = getelementptr i64, ptr %pool, i64 {PoolState.CONTEXTS}
  %contexts = load ptr, ptr %contexts.p, align 8
  %active.p = getelementptr i64, ptr %pool, i64 {PoolState.ACTIVE}
  %active = load i64, ptr %active.p, align 8
  br label %each
each:
  %i = phi i64 [ 0, %entry ], [ %i.next, %each ]
  %offset = mul i64 %i, {CONTEXT_BYTES}
  %ctx = getelementptr i8, ptr %contexts, i64 %offset
  %alert.p = getelementptr i64, ptr %ctx, i64 {Context.ALERT}
  store atomic i64 1, ptr %alert.p seq_cst, align 8
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %active
  br i1 %more, label %each, label %wake
wake:
  %generation.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION}
  call void @max_wake(ptr %pool, ptr %generation.p)
  %finished.p = getelementptr i64, ptr %pool, i64 {PoolState.FINISHED}
  call void @max_wake(ptr %pool, ptr %finished.p)
  ret void
}}

; Polls for a waiting worker if its alert word is set; %ctx is null for idle workers.
define internal void @max_heed(ptr %ctx) noinline {{
entry:
  %nobody = icmp eq ptr %ctx, null
  br i1 %nobody, label %done, label %look
look:
  %alert.p = getelementptr i64, ptr %ctx, i64 {Context.ALERT}
  %alert = load atomic i64, ptr %alert.p monotonic, align 8
  %quiet = icmp eq i64 %alert, 0
  br i1 %quiet, label %done, label %poll
poll:
  %state = call {convention} i64 @max_poll(ptr %ctx)
  br label %done
done:
  ret void
}}

; Returns when the word differs from %old: spins, yields the core now and then, and sleeps after %limit pauses.
define internal void @max_wait(ptr %pool, ptr %word, i32 %old, ptr %sleepers, i64 %limit, ptr %ctx) noinline {{
entry:
  %mask.p = getelementptr i64, ptr %pool, i64 {PoolState.YIELD_MASK}
  %mask = load i64, ptr %mask.p, align 8
  br label %spin
spin:
  %i = phi i64 [ 0, %entry ], [ %i.next, %pause ], [ %i.next, %yield ]
  %now = load atomic i32, ptr %word acquire, align 4
  %same = icmp eq i32 %now, %old
  br i1 %same, label %again, label %done
again:
  %i.next = add i64 %i, 1
  %spent = icmp ugt i64 %i.next, %limit
  br i1 %spent, label %sleep, label %step
step:
  %phase = and i64 %i.next, %mask
  %turn = icmp eq i64 %phase, 0
  br i1 %turn, label %yield, label %pause
pause:
  call void @max_pause()
  br label %spin
yield:
  call void @max_yield()
  call void @max_heed(ptr %ctx)
  br label %spin
sleep:
  %before = atomicrmw add ptr %sleepers, i32 1 seq_cst, align 4
  br label %check
check:
  %seen = load atomic i32, ptr %word seq_cst, align 4
  %still = icmp eq i32 %seen, %old
  br i1 %still, label %park, label %awake
park:
  call void @max_park(ptr %pool, ptr %word, i32 %old)
  call void @max_heed(ptr %ctx)
  br label %check
awake:
  %after = atomicrmw sub ptr %sleepers, i32 1 seq_cst, align 4
  br label %done
done:
  ret void
}}

; Adds 1 to the word and wakes the workers that sleep on it.
define internal void @max_advance(ptr %pool, ptr %word, ptr %sleepers) noinline {{
entry:
  %before = atomicrmw add ptr %word, i32 1 seq_cst, align 4
  %asleep = load atomic i32, ptr %sleepers seq_cst, align 4
  %none = icmp eq i32 %asleep, 0
  br i1 %none, label %done, label %wake
wake:
  call void @max_wake(ptr %pool, ptr %word)
  br label %done
done:
  ret void
}}

; Returns when all workers of the run have arrived, or the error record is set.
define void @max_barrier(ptr %ctx) noinline {{
entry:
  %workers.p = getelementptr i64, ptr %ctx, i64 {Context.WORKERS}
  %workers = load i64, ptr %workers.p, align 8
  %alone = icmp eq i64 %workers, 1
  br i1 %alone, label %done, label %join
join:
  %pool.p = getelementptr i64, ptr %ctx, i64 {Context.POOL}
  %pool = load ptr, ptr %pool.p, align 8
  %generation.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION}
  %sleepers.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION_SLEEPERS}
  ; the generation is read before the error: a worker that reads a generation advanced by an error also
  ; reads the error
  %generation = load atomic i32, ptr %generation.p acquire, align 4
  %error.p = getelementptr i64, ptr %pool, i64 {ERROR_STATE}
  %error = load atomic i64, ptr %error.p acquire, align 8
  %sound = icmp eq i64 %error, 0
  br i1 %sound, label %arrive, label %done
arrive:
  %arrived.p = getelementptr i64, ptr %pool, i64 {PoolState.ARRIVED}
  %before = atomicrmw add ptr %arrived.p, i32 1 acq_rel, align 4
  %workers32 = trunc i64 %workers to i32
  %mine = add i32 %before, 1
  %last = icmp eq i32 %mine, %workers32
  br i1 %last, label %open, label %wait
open:
  store atomic i32 0, ptr %arrived.p monotonic, align 4
  call void @max_advance(ptr %pool, ptr %generation.p, ptr %sleepers.p)
  br label %done
wait:
  %spins.p = getelementptr i64, ptr %pool, i64 {PoolState.RUN_SPINS}
  %spins = load i64, ptr %spins.p, align 8
  call void @max_wait(ptr %pool, ptr %generation.p, i32 %generation, ptr %sleepers.p, i64 %spins, ptr %ctx)
  br label %done
done:
  ret void
}}

; Runs a program as one worker.
define internal void @max_walk(ptr %pool, i64 %worker, i64 %active) noinline {{
entry:
  %contexts.p = getelementptr i64, ptr %pool, i64 {PoolState.CONTEXTS}
  %contexts = load ptr, ptr %contexts.p, align 8
  %ctx.offset = mul i64 %worker, {CONTEXT_BYTES}
  %ctx = getelementptr i8, ptr %contexts, i64 %ctx.offset
  %program.p = getelementptr i64, ptr %pool, i64 {PoolState.PROGRAM}
  %program = load ptr, ptr %program.p, align 8
  %values.p = getelementptr i64, ptr %pool, i64 {PoolState.VALUES}
  %values = load ptr, ptr %values.p, align 8
  %error.p = getelementptr i64, ptr %pool, i64 {ERROR_STATE}
  %workers.p = getelementptr i64, ptr %ctx, i64 {Context.WORKERS}
  store i64 %active, ptr %workers.p, align 8
  %counters.p = getelementptr i64, ptr %ctx, i64 {Context.COUNTERS}
  %launch.p = getelementptr i64, ptr %ctx, i64 {Context.LAUNCH}
  %alert.p = getelementptr i64, ptr %ctx, i64 {Context.ALERT}
  %args.p = getelementptr i64, ptr %ctx, i64 {Context.ARGS}
  %args = load ptr, ptr %args.p, align 8
  %first = getelementptr i64, ptr %program, i64 {ProgramHeader.END}
  %caller = icmp eq i64 %worker, 0
  %profile.p = getelementptr i64, ptr %program, i64 {ProgramHeader.PROFILE}
  %profile = load ptr, ptr %profile.p, align 8
  %has.profile = icmp ne ptr %profile, null
  %timed = and i1 %caller, %has.profile
  %events.p = getelementptr i64, ptr %program, i64 {ProgramHeader.EVENTS}
  %events = load ptr, ptr %events.p, align 8
  %has.events = icmp ne ptr %events, null
  br label %fetch

fetch:
  %ip = phi ptr [ %first, %entry ], [ %ip.next, %next ], [ %ip.target, %follow ]
  %alert = load atomic i64, ptr %alert.p monotonic, align 8
  %quiet = icmp eq i64 %alert, 0
  br i1 %quiet, label %decode, label %alarm
alarm:
  %polled = call {convention} i64 @max_poll(ptr %ctx)
  br label %decode
decode:
  %opcode.p = getelementptr i64, ptr %ip, i64 {Instruction.OPCODE}
  %opcode = load i64, ptr %opcode.p, align 8
  switch i64 %opcode, label %leave [
    i64 {Opcode.LAUNCH}, label %launch
    i64 {Opcode.IF_ZERO}, label %choose
    i64 {Opcode.JUMP}, label %jump
  ]

; After the barrier the predicate is written, and all workers read the same value.
choose:
  call void @max_barrier(ptr %ctx)
  %choose.error = load atomic i64, ptr %error.p acquire, align 8
  %choose.sound = icmp eq i64 %choose.error, 0
  br i1 %choose.sound, label %test, label %leave
test:
  %test.slots.p = getelementptr i64, ptr %ip, i64 {Instruction.SLOTS}
  %test.slot = load ptr, ptr %test.slots.p, align 8
  %test.index.p = getelementptr i64, ptr %test.slot, i64 {SlotPair.VALUE}
  %test.index = load i64, ptr %test.index.p, align 8
  %test.addend.p = getelementptr i64, ptr %test.slot, i64 {SlotPair.ADDEND}
  %test.addend = load i64, ptr %test.addend.p, align 8
  %test.value.p = getelementptr i64, ptr %values, i64 %test.index
  %test.value = load i64, ptr %test.value.p, align 8
  %test.address = add i64 %test.value, %test.addend
  %test.p = inttoptr i64 %test.address to ptr
  %predicate = load i8, ptr %test.p, align 1
  %is.zero = icmp eq i8 %predicate, 0
  br i1 %is.zero, label %follow, label %next

; A jump back to a loop's head zeroes the loop's counters after all workers are done with them; the head starts with
; a barrier.
jump:
  %jump.flags.p = getelementptr i64, ptr %ip, i64 {Instruction.FLAGS}
  %jump.flags = load i64, ptr %jump.flags.p, align 8
  %jump.bit = and i64 %jump.flags, {Flag.BARRIER}
  %jump.waits = icmp ne i64 %jump.bit, 0
  br i1 %jump.waits, label %back, label %follow
back:
  call void @max_barrier(ptr %ctx)
  %back.error = load atomic i64, ptr %error.p acquire, align 8
  %back.sound = icmp eq i64 %back.error, 0
  br i1 %back.sound, label %turn, label %leave
turn:
  br i1 %caller, label %zero, label %follow
zero:
  %zero.counters.p = getelementptr i64, ptr %ip, i64 {Instruction.COUNTERS}
  %zero.counters = load ptr, ptr %zero.counters.p, align 8
  %zero.bytes.p = getelementptr i64, ptr %ip, i64 {Instruction.NUM_SLOTS}
  %zero.bytes = load i64, ptr %zero.bytes.p, align 8
  call void @llvm.memset.p0.i64(ptr align 64 %zero.counters, i8 0, i64 %zero.bytes, i1 false)
  br label %follow
follow:
  %target.p = getelementptr i64, ptr %ip, i64 {Instruction.ENTRY}
  %ip.target = load ptr, ptr %target.p, align 8
  br label %fetch

launch:
  %flags.p = getelementptr i64, ptr %ip, i64 {Instruction.FLAGS}
  %flags = load i64, ptr %flags.p, align 8
  %index.p = getelementptr i64, ptr %ip, i64 {Instruction.LAUNCH}
  %index = load i64, ptr %index.p, align 8
  br i1 %timed, label %clock.in, label %order
clock.in:
  %time.in = call i64 @max_clock()
  br label %order
order:
  %t0 = phi i64 [ 0, %launch ], [ %time.in, %clock.in ]
  %barrier.bit = and i64 %flags, {Flag.BARRIER}
  %has.barrier = icmp ne i64 %barrier.bit, 0
  br i1 %has.barrier, label %barrier, label %ready
barrier:
  call void @max_barrier(ptr %ctx)
  br label %ready
ready:
  %error = load atomic i64, ptr %error.p acquire, align 8
  %sound = icmp eq i64 %error, 0
  br i1 %sound, label %place, label %leave
place:
  %serial.bit = and i64 %flags, {Flag.SERIAL}
  %serial = icmp ne i64 %serial.bit, 0
  %other = xor i1 %caller, true
  %skip = and i1 %serial, %other
  br i1 %skip, label %next, label %prepare
prepare:
  %width = select i1 %serial, i64 1, i64 %active
  store i64 %width, ptr %workers.p, align 8
  store i64 %index, ptr %launch.p, align 8
  %ins.counters.p = getelementptr i64, ptr %ip, i64 {Instruction.COUNTERS}
  %ins.counters = load ptr, ptr %ins.counters.p, align 8
  store ptr %ins.counters, ptr %counters.p, align 8
  %slots.p = getelementptr i64, ptr %ip, i64 {Instruction.SLOTS}
  %slots = load ptr, ptr %slots.p, align 8
  %num.p = getelementptr i64, ptr %ip, i64 {Instruction.NUM_SLOTS}
  %num = load i64, ptr %num.p, align 8
  br label %relocate
relocate:
  %s = phi i64 [ 0, %prepare ], [ %s.next, %slot ]
  %more = icmp ult i64 %s, %num
  br i1 %more, label %slot, label %enter
slot:
  %pair = getelementptr [{SlotPair.END} x i64], ptr %slots, i64 %s
  %value.index.p = getelementptr i64, ptr %pair, i64 {SlotPair.VALUE}
  %value.index = load i64, ptr %value.index.p, align 8
  %addend.p = getelementptr i64, ptr %pair, i64 {SlotPair.ADDEND}
  %addend = load i64, ptr %addend.p, align 8
  %value.p = getelementptr i64, ptr %values, i64 %value.index
  %value = load i64, ptr %value.p, align 8
  %sum = add i64 %value, %addend
  %arg.p = getelementptr i64, ptr %args, i64 %s
  store i64 %sum, ptr %arg.p, align 8
  %s.next = add i64 %s, 1
  br label %relocate
enter:
  %entry.p = getelementptr i64, ptr %ip, i64 {Instruction.ENTRY}
  %kernel = load ptr, ptr %entry.p, align 8
  br i1 %timed, label %timed.call, label %plain.call
plain.call:
  call void %kernel(ptr %args, ptr %ctx)
  br label %after
timed.call:
  %t1 = call i64 @max_clock()
  call void %kernel(ptr %args, ptr %ctx)
  %t2 = call i64 @max_clock()
  %waited = sub i64 %t1, %t0
  %ran = sub i64 %t2, %t1
  %record = getelementptr [{ProfileRecord.END} x i64], ptr %profile, i64 %index
  %waited.p = getelementptr i64, ptr %record, i64 {ProfileRecord.WAIT}
  %waited.old = load i64, ptr %waited.p, align 8
  %waited.new = add i64 %waited.old, %waited
  store i64 %waited.new, ptr %waited.p, align 8
  %ran.p = getelementptr i64, ptr %record, i64 {ProfileRecord.RUN}
  %ran.old = load i64, ptr %ran.p, align 8
  %ran.new = add i64 %ran.old, %ran
  store i64 %ran.new, ptr %ran.p, align 8
  %times.p = getelementptr i64, ptr %record, i64 {ProfileRecord.COUNT}
  %times.old = load i64, ptr %times.p, align 8
  %times.new = add i64 %times.old, 1
  store i64 %times.new, ptr %times.p, align 8
  br i1 %has.events, label %log, label %after
log:
  %logged.p = getelementptr i64, ptr %events, i64 {EventLog.COUNT}
  %logged = load i64, ptr %logged.p, align 8
  %room.p = getelementptr i64, ptr %events, i64 {EventLog.CAPACITY}
  %room = load i64, ptr %room.p, align 8
  %fits = icmp ult i64 %logged, %room
  br i1 %fits, label %append, label %after
append:
  %first.event = getelementptr i64, ptr %events, i64 {EventLog.END}
  %event = getelementptr [{Event.END} x i64], ptr %first.event, i64 %logged
  %event.launch = getelementptr i64, ptr %event, i64 {Event.LAUNCH}
  store i64 %index, ptr %event.launch, align 8
  %event.t0 = getelementptr i64, ptr %event, i64 {Event.ARRIVAL}
  store i64 %t0, ptr %event.t0, align 8
  %event.t1 = getelementptr i64, ptr %event, i64 {Event.START}
  store i64 %t1, ptr %event.t1, align 8
  %event.t2 = getelementptr i64, ptr %event, i64 {Event.FINISH}
  store i64 %t2, ptr %event.t2, align 8
  %logged.next = add i64 %logged, 1
  store i64 %logged.next, ptr %logged.p, align 8
  br label %after
after:
  store i64 %active, ptr %workers.p, align 8
  br label %next
next:
  %ip.next = getelementptr i64, ptr %ip, i64 {Instruction.END}
  br label %fetch

leave:
  %final = load atomic i64, ptr %error.p acquire, align 8
  %failed = icmp ne i64 %final, 0
  br i1 %failed, label %release, label %done
release:
  ; other workers may wait at a barrier that not all will reach
  %generation.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION}
  %sleepers.p = getelementptr i64, ptr %pool, i64 {PoolState.GENERATION_SLEEPERS}
  call void @max_advance(ptr %pool, ptr %generation.p, ptr %sleepers.p)
  br label %done
done:
  ret void
}}

define i64 @max_run(ptr %pool, ptr %program, ptr %values) noinline {{
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
  %serial.p = getelementptr i64, ptr %program, i64 {ProgramHeader.SERIAL}
  %serial = load i64, ptr %serial.p, align 8
  %is.serial = icmp ne i64 %serial, 0
  %one.worker = icmp eq i64 %active, 1
  %alone = or i1 %is.serial, %one.worker
  br i1 %alone, label %single, label %many
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
  store atomic i64 %ended, ptr %run.p release, align 8
  ret i64 %error
}}

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
    layouts = {name: getattr(_abi, name) for name in _abi.__all__}
    return _TEXT.format(
        primitives=primitives.ir,
        parking_mode=primitives.parking,
        triple=triple,
        convention=_abi.poll_convention(triple),
        ERROR_STATE=_abi.PoolState.ERROR + _abi.ErrorRecord.STATE,
        **layouts,
    )
