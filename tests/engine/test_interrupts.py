"""Ctrl-C and events end executions: signals to subprocesses, endless loops, barriers that some workers never reach."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from max import kernel as k
from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import ExecutionInterrupted, InferenceSession, interrupt_on
from max.engine.loop import ModelLoop
from max.graph import BufferType, DeviceRef, Graph, TensorType, ops

# a process that hangs in native code handles no Python signal
pytestmark = pytest.mark.timeout(120, method="thread")

DEVICE = DeviceRef.CPU()
SECONDS = 0.1
"""The documented limit, with slack for a busy test machine."""
ALLOWED = 10 * SECONDS
STARTED = 0.05
"""When an execution has begun on a quiet machine. Until it is ended its workers spin."""


@k.register("test_interrupt_spin")
def spin(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    """A loop that does not terminate."""
    y[0] = 0
    while x[0] + y[0] < 1:
        y[0] = y[0] * 0


@k.register("test_interrupt_lost")
def lost(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    """The last worker never reaches the barrier; a barrier of one worker does not wait."""
    if ctx.worker == ctx.num_workers - 1:
        while x[0] < 1:
            y[1] = x[0]
    else:
        ctx.barrier()
    y[0] = x[0]


@k.register("test_interrupt_divergent")
def divergent(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context):
    """Worker 0 waits at the barrier twice, the others once."""
    ctx.barrier()
    if ctx.worker == 0:
        ctx.barrier()
    y[ctx.worker % y.shape[0]] = x[0]


@k.register("test_interrupt_rows")
def rows(y: k.Output[k.f32, 1], x: k.Input[k.f32, 1], ctx: k.Context, *, count: int, length: int):
    """Counted loops that run for minutes."""
    for row in ctx.parallel(count):
        total = x[0]
        for _ in range(length):
            total = total * 0.5 + k.f32(row)
        y[row % 4] = total


def custom(name, **parameters):
    def build(x):
        return ops.custom(name, DEVICE, [x], [TensorType(DType.float32, [4], DEVICE)], parameters)[
            0
        ]

    return build


def endless(x):
    return ops.while_loop([x], lambda y: y[0] < 1.0, lambda y: [y * 0.5])[0]


def endless_told_by_the_host(x):
    def body(y):
        ones = ops.nonzero(y * 0.0 + 1.0, "found")
        return [y * 0.5 + ops.cast(ops.sum(ops.sum(ones, 0), 1), DType.float32)[0] * 0.0]

    return ops.while_loop([x], lambda y: y[0] < 1.0, body)[0]


KINDS = {
    "endless while_loop": endless,
    "endless while_loop with sizes told at run time": endless_told_by_the_host,
    "endless loop in a kernel": custom("test_interrupt_spin"),
    "a worker that never comes": custom("test_interrupt_lost"),
    "a barrier too many": custom("test_interrupt_divergent"),
    "counted loops": custom("test_interrupt_rows", count=1_000_000, length=1_000_000),
}
NEEDS_TWO = {"a barrier too many"}


def load(build, threads):
    with Graph("graph", input_types=[TensorType(DType.float32, (4,), DEVICE)]) as graph:
        graph.output(build(graph.inputs[0].tensor))
    return InferenceSession(devices=[CPU()], num_threads=threads).load(graph)


ZEROS = np.zeros(4, np.float32)


def works(threads):
    """Returns whether the pool still runs a program."""
    model = load(lambda x: ops.softmax(x + 1), threads)
    return all(np.allclose(model.execute(ZEROS)[0].to_numpy(), 0.25) for _ in range(3))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_an_event_ends_an_execution(kind, threads):
    if kind in NEEDS_TWO and threads == 1:
        pytest.skip("needs two workers")
    model, stop, spent = load(KINDS[kind], threads), threading.Event(), []
    for _ in range(2):
        stop.clear()
        timer = threading.Timer(STARTED, lambda: (spent.append(time.perf_counter()), stop.set()))
        timer.start()
        with interrupt_on(stop), pytest.raises(ExecutionInterrupted, match="event"):
            model.execute(ZEROS)
        spent[-1] = time.perf_counter() - spent[-1]
        assert spent[-1] < ALLOWED, spent
        assert works(threads)


def test_an_event_ends_what_another_thread_executes_and_nothing_else():
    first, second = load(endless, 2), load(endless, 3)
    stops = [threading.Event(), threading.Event()]
    ends: list[object] = [None, None]

    def run(index, model):
        with (
            interrupt_on(threading.Event()),
            interrupt_on(stops[index]),
            interrupt_on(threading.Event()),
        ):
            try:
                model.execute(ZEROS)
            except ExecutionInterrupted as error:
                ends[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    for index in (1, 0):
        assert threads[index].is_alive() and ends[index] is None
        stops[index].set()
        threads[index].join(5)
        assert ends[index] is not None
    # outside the block the event has no effect
    assert load(lambda x: x + 1, 2).execute(ZEROS)[0].to_numpy().tolist() == [1.0] * 4


def test_an_event_ends_an_interpreted_model():
    """Events are checked between two ops, also in a loop, here one of a million iterations."""
    with Graph("interpreted", input_types=[TensorType(DType.float32, (4,), DEVICE)]) as graph:
        turns = ops.constant(0, DType.int64, DEVICE)
        _, x = ops.while_loop(
            [turns, graph.inputs[0].tensor], lambda i, _: i < 10**6, lambda i, x: [i + 1, x + 1]
        )
        graph.output(x)
    with flags.override(MAX_INTERPRET=True):
        model = InferenceSession(devices=[CPU()]).load(graph)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with interrupt_on(stop), pytest.raises(ExecutionInterrupted, match="event"):
        model.execute(ZEROS)


def test_short_executions_under_an_event_are_as_ever():
    model, stop, completed = load(lambda x: x + 1, 2), threading.Event(), 0
    stop.set()
    with interrupt_on(stop):
        for _ in range(100):
            # on a busy machine even a short execution may be interrupted
            with contextlib.suppress(ExecutionInterrupted):
                assert model.execute(ZEROS)[0].to_numpy()[0] == 1
                completed += 1
    assert completed > 50
    with (
        pytest.raises(TypeError, match=r"got str, expected a threading\.Event"),
        interrupt_on("stop"),
    ):
        pass


def test_a_model_loop_ends_too():
    types = [
        TensorType(DType.uint8, (1,), DEVICE),
        BufferType(DType.uint8, (1,), DEVICE),
    ]
    with Graph("after", input_types=types) as graph:
        given, again = graph.inputs
        ops.buffer_store(again.buffer, ops.max(given.tensor * 0, axis=0) + 1)
        graph.output()
    session = InferenceSession(devices=[CPU()])
    after = session.load(graph)
    with Graph("body", input_types=types[:1]) as graph:
        graph.output(graph.inputs[0].tensor + 1)
    loop, again, stop = (
        ModelLoop(session.load(graph), after),
        Tensor.zeros((1,), DType.uint8),
        threading.Event(),
    )
    threading.Timer(0.1, stop.set).start()
    with interrupt_on(stop), pytest.raises(ExecutionInterrupted):
        loop.run([np.zeros(1, np.uint8)], lambda outputs: [outputs[0], again], again)


PRELUDE = """
import faulthandler, os, signal, sys, threading, time, warnings
faulthandler.dump_traceback_later(90, exit=True)
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np
import tests.engine.test_interrupts as t

def ready():
    print("ready", flush=True)
    return time.perf_counter()

"""

BODY = """
for kind, build in t.KINDS.items():
    if kind in t.NEEDS_TWO and {threads} == 1:
        continue
    model = t.load(build, {threads})
    for turn in range(2):
        try:
            ready()
            model.execute(t.ZEROS)
            print("completed", kind, flush=True)
        except KeyboardInterrupt:
            print("interrupted", time.time(), flush=True)
        assert t.works({threads})
print("sound", flush=True)
"""


class Child:
    """Starts a script in a subprocess, to which the test sends signals."""

    def __init__(self, script, **env):
        self.process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", PRELUDE + textwrap.dedent(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])} | env,
        )

    def line(self):
        return self.process.stdout.readline().strip()

    def end(self):
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        assert err == "" and self.process.returncode == 0, err
        return out.split("\n")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
@pytest.mark.parametrize("parking", ["auto", "portable"])
@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_an_execution(threads, parking):
    child = Child(BODY.format(threads=threads), MAX_PARKING=parking)
    spent = []
    while child.line() == "ready":
        time.sleep(STARTED)
        sent = time.time()
        child.process.send_signal(signal.SIGINT)
        word, when = child.line().split()
        spent.append(float(when) - sent)
        assert word == "interrupted" and spent[-1] < ALLOWED
    child.end()
    assert len(spent) == 2 * (len(KINDS) - (len(NEEDS_TWO) if threads == 1 else 0))
    assert sorted(spent)[len(spent) // 2] < 3 * SECONDS


def test_ctrl_c_ends_a_kernel_in_plain_python():
    child = Child(
        """
        model = t.load(t.KINDS["endless loop in a kernel"], 1)
        ready()
        try:
            model.execute(t.ZEROS)
        except KeyboardInterrupt:
            print("interrupted", t.works(1))
        """,
        MAX_KERNEL_INTERPRET="1",
    )
    assert child.line() == "ready"
    time.sleep(0.2)
    child.process.send_signal(signal.SIGINT)
    assert child.end()[0] == "interrupted True"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_ctrl_c_ends_an_execution_in_a_forked_child():
    child = Child(
        """
        model = t.load(t.endless, 2)
        assert t.works(2)
        if (pid := os.fork()) == 0:
            signal.alarm(60)  # where the interrupt does not arrive
            ready()
            try:
                model.execute(t.ZEROS)
            except KeyboardInterrupt:
                os._exit(0 if t.works(2) else 3)
            os._exit(4)
        time.sleep(0.4)
        os.kill(pid, signal.SIGINT)
        begin = time.perf_counter()
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), time.perf_counter() - begin)
        """
    )
    assert child.line() == "ready"
    status, seconds = child.line().split()
    assert status == "0" and float(seconds) < 3
    child.end()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
def test_signal_handlers_run_during_an_execution_and_need_not_end_it():
    child = Child(
        """
        model, quick, seen = t.load(t.endless, 2), t.load(lambda x: x + 1, 2), []

        def handler(number, frame):
            seen.append(number)
            if len(seen) == 2:
                try:
                    quick.execute(t.ZEROS)
                except RuntimeError as error:
                    seen.append(str(error))
            if len(seen) > 4:
                raise LookupError("enough")

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        try:
            model.execute(t.ZEROS)
        except LookupError as error:
            print(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(seen.count(signal.SIGALRM), [text for text in seen if isinstance(text, str)])
        print(t.works(2))
        """
    )
    lines = child.end()
    assert lines[0] == "enough" and lines[1].startswith(
        "4 ['a signal handler cannot run a model while"
    )
    assert lines[2] == "True"


def test_ctrl_c_reaches_the_main_thread_while_another_one_executes():
    child = Child(
        """
        model, stop, printed = t.load(t.endless, 2), threading.Event(), threading.Event()
        def run():
            with t.interrupt_on(stop):
                try:
                    model.execute(t.ZEROS)
                except t.ExecutionInterrupted:
                    print("ended", flush=True)
                    printed.set()
        thread = threading.Thread(target=run)
        thread.start()
        ready()
        try:
            thread.join()
        except KeyboardInterrupt:
            stop.set()
        printed.wait()  # a join that an interrupt ended does not wait again
        print(t.works(2))
        """
    )
    assert child.line() == "ready"
    time.sleep(0.2)
    child.process.send_signal(signal.SIGINT)
    assert child.end()[:2] == ["ended", "True"]
