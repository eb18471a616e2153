"""Runs programs with other layouts under the names of `max._abi`: code with a number of its own breaks.

A script for `test_abi.py`: the layouts change before anything else is imported.
"""

# ruff: noqa: E402
from __future__ import annotations

from max import _abi
from max._abi import Words


def reordered(struct, order):
    names = [m.name for m in struct if m.name != "END"]
    assert sorted(names) == sorted(order), names
    members = {name: i for i, name in enumerate(order)}
    if "END" in struct.__members__:
        members["END"] = int(struct.END)
    return Words(struct.__name__, members)


def backwards(struct):
    return reordered(struct, [m.name for m in struct if m.name != "END"][::-1])


for name in ("Context", "Instruction", "SlotPair", "ProfileRecord", "EventLog", "Event"):
    setattr(_abi, name, backwards(getattr(_abi, name)))
header = {
    "PROFILE": 7, "EVENTS": 4, "COUNTERS": 3, "COUNTER_BYTES": 1, "NUM_VALUES": 0, "VALUES": 6, "RAISED": 8,
    "ERROR": 16, "END": 24,
}  # fmt: skip
_abi.ProgramHeader = Words("ProgramHeader", header)
_abi.ErrorRecord = Words(
    "ErrorRecord", {"VALUES": 2, "LAUNCH": 1, "RAISE": 0, "STATE": 7, "END": 8}
)
moved = {m.name: int(m) + 64 for m in _abi.PoolState}
moved["ERROR"] = 0
_abi.PoolState = Words("PoolState", moved)
_abi.POOL_BYTES += 8 * 64
_abi.CONTEXT_BYTES, _abi.COUNTER_BYTES = 256, 192


class Bases(_abi.BaseLayout):
    """[arena of segment 0, 0, outputs, inputs, a gap, later arenas]"""

    ARENA, NOTHING = 0, 1

    @property
    def outputs(self):
        return slice(2, 2 + self.num_outputs)

    @property
    def inputs(self):
        return slice(self.outputs.stop, self.outputs.stop + self.num_inputs)

    def arena(self, segment=0):
        return 0 if segment == 0 else self.inputs.stop + 3 + segment

    def count(self, num_segments=1):
        return self.inputs.stop + 3 + num_segments

    @staticmethod
    def addresses(arena, inputs, outputs):
        return [arena, 0, *outputs, *inputs, -1, -2, -3]


_abi.BaseLayout = Bases

import threading

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import ExecutionInterrupted, InferenceSession, interrupt_on
from max.engine.loop import ModelLoop
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops
from tests.kernel_language.harness import compiled
from tests.runtime.test_abi import probe

for plain in (False, True):
    with flags.override(MAX_KERNEL_INTERPRET=plain):
        for workers in (1, 3):
            out, partial = np.zeros(2 * workers, np.int64), np.zeros(5, np.int64)
            compiled(probe, [out, partial, np.int64(15)], {}, workers)
            assert out.tolist() == [n for w in range(workers) for n in (workers, w + 10)], out
            assert partial.tolist() == [1, 2, 3, 4, 5]
            with pytest.raises(ValueError, match="15 is more than 9"):
                compiled(probe, [out, partial, np.int64(9)], {}, workers)

DEVICE = DeviceRef.CPU()
session = InferenceSession(devices=[CPU()])


def vector(dim):
    return TensorType(DType.float32, [dim], DEVICE)


# segments: the sizes of what is selected are known while the program runs; a loop in each
def body(i, x):
    return i + 1, ops.softmax(x) * 2.0


with Graph("segments", input_types=[vector("n"), vector(3)]) as graph:
    x, y = (value.tensor for value in graph.inputs)
    zero = ops.constant(0, DType.int64, DEVICE)
    _, x2 = ops.while_loop((zero, x), lambda i, x: i < 3, body)
    picked = ops.gather(x2, ops.squeeze(ops.nonzero(x2 > 0.1, "picked"), 1), axis=0)
    graph.output(picked, ops.softmax(picked * 3.0), x + ops.sum(y), y)
a, b = np.random.default_rng(0).normal(size=9).astype(np.float32), np.arange(3, dtype=np.float32)
model = session.load(graph)
got = [t.to_numpy() for t in model.execute(a, b)]


def softmax(x):
    """Over the first axis."""
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


x = a
for _ in range(3):
    x = softmax(x) * 2
want = x[x > 0.1], softmax(x[x > 0.1] * 3), a + b.sum(), b
for g, w in zip(got, want, strict=True):
    np.testing.assert_allclose(g, w, rtol=1e-5)

# two models in turn, and a profile of each
with Graph("step", input_types=[vector(4), BufferType(DType.float32, [4], DEVICE)]) as step:
    x, state = step.inputs
    ops.buffer_store(state.buffer, state.buffer[...] + x.tensor)
    step.output(ops.softmax(x.tensor))
types = [BufferType(DType.int64, [1], DEVICE), BufferType(DType.uint8, [1], DEVICE)]
with Graph("count", input_types=types) as count:
    steps, again = (value.buffer for value in count.inputs)
    following = steps[...] + 1
    ops.buffer_store(steps, following)
    ops.buffer_store(again, (following < 5).cast(DType.uint8))
    count.output()
first, second = session.load(step), session.load(count)
state, steps = Tensor.from_numpy(np.zeros(4, np.float32)), Tensor.from_numpy(np.zeros(1, np.int64))
again = Tensor.from_numpy(np.ones(1, np.uint8))
x = np.arange(4, dtype=np.float32)
result = ModelLoop(first, second).run([x, state], lambda outputs: [steps, again], again)
assert steps.to_numpy()[0] == 5
np.testing.assert_allclose(state.to_numpy(), 5 * x)
np.testing.assert_allclose(result[0].to_numpy(), softmax(x), rtol=1e-5)
with first.profile() as profile:
    for _ in range(3):
        first.execute(x, state)
assert profile.runs == 3 and all(kernel.calls == 3 * kernel.launches for kernel in profile.kernels)
assert 0 < sum(kernel.seconds for kernel in profile.kernels) < profile.seconds
assert len(profile.events) >= 3

# what is computed when the model is loaded has temporaries of its own
weight = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
with Graph("loaded", input_types=[vector(4)]) as loaded:
    w = ops.constant(weight, DType.float32, DEVICE)
    w = ops.softmax(ops.softmax(w, axis=0) * 3.0, axis=0)
    loaded.output(w + loaded.inputs[0].tensor, ops.cumsum(ops.sum(w, axis=0), axis=1) * 2.0)
e = softmax(softmax(weight) * 3)
got = [t.to_numpy() for t in session.load(loaded).execute(x)]
np.testing.assert_allclose(got[0], e + x, rtol=1e-5)
np.testing.assert_allclose(got[1], 2 * np.cumsum(e.sum(0, keepdims=True), 1), rtol=1e-5)


# endless loops end by an event: one of the program, one of a kernel
def interrupted(graph):
    slow, stop = session.load(graph), threading.Event()
    threading.Timer(0.3, stop.set).start()
    with interrupt_on(stop), pytest.raises(ExecutionInterrupted):
        slow.execute(x)


@k.register("test_abi_spin")
def spin(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    y[0] = 0
    while x[0] + y[0] < 1:
        y[0] = y[0] * 0


with Graph("spin", input_types=[vector(4)]) as spinning:
    spinning.output(*ops.custom("test_abi_spin", DEVICE, [spinning.inputs[0]], [vector(4)]))
interrupted(spinning)
with Graph("endless", input_types=[vector(4)]) as endless:
    zero = ops.constant(0, DType.int64, DEVICE)
    _, y = ops.while_loop(
        (zero, endless.inputs[0].tensor), lambda i, x: i < 1 << 60, lambda i, x: (i + 1, x)
    )
    endless.output(y)
interrupted(endless)
print("sound")
