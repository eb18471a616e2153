"""Waiting and waking of workers, as LLVM IR: part of `max._backends.cpu.runtime.native`.

``max_wait`` spins on a word of the pool, yields the core, and sleeps in the end; ``max_advance`` changes the word and
wakes the sleepers. ``max_barrier`` uses both. ``max_nudge`` and ``max_poll`` interrupt a run.

The text is a format string whose names are the layouts of `max._abi`.
"""

WAITING = """
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
"""
