"""The walk of one worker over a program, as LLVM IR: part of `max._backends.cpu.runtime.native`.

``max_walk(pool, worker, active)`` executes launches, branches and jumps until another opcode or an error ends the run.
Before each instruction it polls if the alert word is set. For a launch it waits at the barrier if there is one,
computes the arguments from the slots, and calls the kernel.

The text is a format string whose names are the layouts of `max._abi`.
"""

WALK = """
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
  %target.p = getelementptr i64, ptr %ip, i64 {Instruction.KERNEL}
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
  %kernel.p = getelementptr i64, ptr %ip, i64 {Instruction.KERNEL}
  %kernel = load ptr, ptr %kernel.p, align 8
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
"""
