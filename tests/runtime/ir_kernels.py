"""Kernels for the tests of the runtime, written as LLVM IR by hand against the ABI of docs/contracts.md."""

from __future__ import annotations

import functools

from max._backends.cpu.runtime import jit

# %args: slots; %ctx: worker 0, workers 8, counters 16, barrier 24, pool 32, error 40, scratch 48, size 56, launch 64
_HEAD = """
define void @k_{name}(ptr %args, ptr %ctx) {{
entry:
  %worker = load i64, ptr %ctx
  %workers.p = getelementptr i8, ptr %ctx, i64 8
  %workers = load i64, ptr %workers.p
  %counters.p = getelementptr i8, ptr %ctx, i64 16
  %counters = load ptr, ptr %counters.p
  %barrier.p = getelementptr i8, ptr %ctx, i64 24
  %barrier = load ptr, ptr %barrier.p
  %error.p = getelementptr i8, ptr %ctx, i64 40
  %error = load ptr, ptr %error.p
  %launch.p = getelementptr i8, ptr %ctx, i64 64
  %launch = load i64, ptr %launch.p
  %a0.p = getelementptr i64, ptr %args, i64 0
  %a1.p = getelementptr i64, ptr %args, i64 1
  %a2.p = getelementptr i64, ptr %args, i64 2
  %a3.p = getelementptr i64, ptr %args, i64 3
"""

# slots: n, pointer to (n + 1) x 8 words per worker; the rest of the slots are copied
_BODIES = {
    # out[worker, i] = slot i, for i < n
    "copy_slots": """
  %out = load ptr, ptr %a0.p
  %n = load i64, ptr %a1.p
  %base = mul i64 %worker, %n
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %from = getelementptr i64, ptr %args, i64 %i
  %x = load i64, ptr %from
  %at = add i64 %base, %i
  %to = getelementptr i64, ptr %out, i64 %at
  store i64 %x, ptr %to
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %loop, label %done
done:
  ret void
}
""",
    # out[worker, 0..8] = the fields of the context
    "copy_context": """
  %out = load ptr, ptr %a0.p
  %base = mul i64 %worker, 9
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %i.next, %loop ]
  %from = getelementptr i64, ptr %ctx, i64 %i
  %x = load i64, ptr %from
  %at = add i64 %base, %i
  %to = getelementptr i64, ptr %out, i64 %at
  store i64 %x, ptr %to
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, 9
  br i1 %more, label %loop, label %done
done:
  ret void
}
""",
    # slots: y, x, n; y[i] = 3 x[i] + 1 for this worker's part, which moves from launch to launch
    "affine": """
  %y = load ptr, ptr %a0.p
  %x = load ptr, ptr %a1.p
  %n = load i64, ptr %a2.p
  %turned = add i64 %worker, %launch
  %part = urem i64 %turned, %workers
  br label %head
head:
  %i = phi i64 [ %part, %entry ], [ %i.next, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %done
body:
  %from = getelementptr i64, ptr %x, i64 %i
  %v = load i64, ptr %from
  %triple = mul i64 %v, 3
  %w = add i64 %triple, 1
  %to = getelementptr i64, ptr %y, i64 %i
  store i64 %w, ptr %to
  %i.next = add i64 %i, %workers
  br label %head
done:
  ret void
}
""",
    # slots: out, n; chunks of one element from the counter: out[i] += 1
    "count": """
  %out = load ptr, ptr %a0.p
  %n = load i64, ptr %a1.p
  br label %head
head:
  %i = atomicrmw add ptr %counters, i64 1 monotonic
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %done
body:
  %to = getelementptr i64, ptr %out, i64 %i
  %old = load i64, ptr %to
  %new = add i64 %old, 1
  store i64 %new, ptr %to
  br label %head
done:
  ret void
}
""",
    # slots: out, shared, n; n times: shared[worker] = i, barrier, out[worker] += shared[worker + 1], barrier
    "phases": """
  %out = load ptr, ptr %a0.p
  %shared = load ptr, ptr %a1.p
  %n = load i64, ptr %a2.p
  %mine = getelementptr i64, ptr %shared, i64 %worker
  %next = add i64 %worker, 1
  %wrapped = urem i64 %next, %workers
  %theirs = getelementptr i64, ptr %shared, i64 %wrapped
  %sum.p = getelementptr i64, ptr %out, i64 %worker
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %body ]
  %more = icmp ult i64 %i, %n
  br i1 %more, label %body, label %done
body:
  store i64 %i, ptr %mine
  call void %barrier(ptr %ctx)
  %v = load i64, ptr %theirs
  %old = load i64, ptr %sum.p
  %new = add i64 %old, %v
  store i64 %new, ptr %sum.p
  call void %barrier(ptr %ctx)
  %i.next = add i64 %i, 1
  br label %head
done:
  ret void
}
""",
    # slots: who, number, v0, v1; worker `who` (or all, if -1) raises, the others go to three barriers
    "fail": """
  %who = load i64, ptr %a0.p
  %number = load i64, ptr %a1.p
  %all = icmp eq i64 %who, -1
  %mine = icmp eq i64 %who, %worker
  %raises = or i1 %all, %mine
  br i1 %raises, label %raise, label %wait
raise:
  %won = cmpxchg ptr %error, i64 0, i64 1 acq_rel monotonic
  %first = extractvalue { i64, i1 } %won, 1
  br i1 %first, label %fill, label %done
fill:
  %e1 = getelementptr i64, ptr %error, i64 1
  store i64 %launch, ptr %e1
  %e2 = getelementptr i64, ptr %error, i64 2
  store i64 %number, ptr %e2
  %v0 = load i64, ptr %a2.p
  %e3 = getelementptr i64, ptr %error, i64 3
  store i64 %v0, ptr %e3
  %v1 = load i64, ptr %a3.p
  %e4 = getelementptr i64, ptr %error, i64 4
  store i64 %v1, ptr %e4
  br label %done
wait:
  call void %barrier(ptr %ctx)
  call void %barrier(ptr %ctx)
  call void %barrier(ptr %ctx)
  br label %done
done:
  ret void
}
""",
    # slots: word, amount; adds to the word atomically
    "add": """
  %word = load ptr, ptr %a0.p
  %amount = load i64, ptr %a1.p
  %old = atomicrmw add ptr %word, i64 %amount monotonic
  ret void
}
""",
    # slots: n; keeps each worker busy for n rounds of dependent work
    "busy": """
  %n = load i64, ptr %a0.p
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %i.next, %head ]
  %seed.p = getelementptr i64, ptr %counters, i64 1
  store volatile i64 %i, ptr %seed.p
  %i.next = add i64 %i, 1
  %more = icmp ult i64 %i.next, %n
  br i1 %more, label %head, label %done
done:
  ret void
}
""",
    # no slots
    "nothing": "  ret void\n}\n",
}


def text(name: str) -> str:
    """The LLVM IR of a test kernel."""
    return _HEAD.format(name=name) + _BODIES[name]


@functools.cache
def entry(name: str) -> int:
    """The address of a test kernel."""
    return jit.compile_llvm({name: text(name)}, jit.Machine.host())[name]
