"""Uses models at any instruction of uses of models: a script for `test_reentry.py`, as failures may end the process.

``python -m tests.engine.reentry_storm opcodes ACTION SUBJECT=STRIDE[:FUNCTION]…``: a trace function acts at every
STRIDE-th bytecode of a use, or of one function in it. ``storm SECONDS SEED [threads=N] [SUBJECT…]``: signals and
finalizers act at random times, in several threads, with forks.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import max.experimental.functional as F
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.loop import ModelLoop
from max.experimental.tensor import Tensor as Eager
from max.graph import BufferType, DeviceRef, Graph, TensorType, Weight, ops

DEVICE = DeviceRef.CPU()
WIDTH = 16


def vector(dim: int | str) -> TensorType:
    return TensorType(DType.float32, [dim], DEVICE)


# not made in finalizers: NumPy sets a context variable, which CPython 3.11 does not survive inside such a change
ROWS = np.random.default_rng(0).normal(size=(64, WIDTH)).astype(np.float32)


def rows(n: int) -> np.ndarray:
    return ROWS[:n].copy()


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def close(got: Any, want: np.ndarray) -> None:
    array = got.to_numpy()
    if array.shape != want.shape or (abs(array - want) > 1e-6 + 1e-4 * abs(want)).any():
        print("wrong:", array.ravel()[:4], want.ravel()[:4], flush=True)
        os._exit(3)


class Models:
    """A use of each kind. A use has a size, and checks its results."""

    def __init__(self, threads: int) -> None:
        self.session = session = InferenceSession(devices=[CPU()], num_threads=threads)
        types = [TensorType(DType.float32, ["n", WIDTH], DEVICE)]
        with Graph(
            "products", input_types=[*types, TensorType(DType.float32, [WIDTH] * 2, DEVICE)]
        ) as graph:
            graph.output(ops.softmax(graph.inputs[0].tensor @ graph.inputs[1].tensor))
        self.products = session.load(graph)
        self.weights = np.eye(WIDTH, dtype=np.float32)
        with Graph("found", input_types=[vector("n")]) as graph:
            x = graph.inputs[0].tensor
            found = ops.squeeze(ops.nonzero(x > 0.0, "found"), 1)
            graph.output(ops.gather(x, found, axis=0) * 2.0)
        self.found = session.load(graph)
        with Graph("weighted", input_types=types) as graph:
            weight = Weight("w", DType.float32, [WIDTH, WIDTH], DEVICE)
            graph.output(graph.inputs[0].tensor @ weight)
        self.scale = 1.0
        self.weighted = session.load(graph, weights_registry={"w": self.weights})
        with Graph(
            "failing", input_types=[vector("n"), TensorType(DType.int64, ["m"], DEVICE)]
        ) as graph:
            graph.output(ops.gather(graph.inputs[0].tensor, graph.inputs[1].tensor, axis=0))
        self.gather = session.load(graph)
        with Graph(
            "step", input_types=[vector(4), BufferType(DType.float32, [4], DEVICE)]
        ) as graph:
            x, state = graph.inputs
            ops.buffer_store(state.buffer, state.buffer[...] + x.tensor)
            graph.output(ops.softmax(x.tensor))
        kinds = [BufferType(DType.int64, [1], DEVICE), BufferType(DType.uint8, [1], DEVICE)]
        with Graph("count", input_types=kinds) as count:
            steps, again = (value.buffer for value in count.inputs)
            following = steps[...] + 1
            ops.buffer_store(steps, following)
            ops.buffer_store(again, (following < 3).cast(DType.uint8))
            count.output()
        self.loop = ModelLoop(session.load(graph), session.load(count))
        self.captured: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self.overwrites = True
        """Whether replays overwrite the outputs first; not if threads share them."""

    def execute(self, n: int) -> None:
        x = rows(n)
        close(self.products.execute(x, self.weights)[0], softmax(x))

    def error(self, n: int) -> None:
        bad = 1000 + n
        try:
            self.gather.execute(np.ones(n, np.float32), np.array([0, bad], np.int64))
        except IndexError as error:
            if str(bad) not in str(error):
                print("wrong error:", error, flush=True)
                os._exit(3)
        else:
            os._exit(4)

    def segments(self, n: int) -> None:
        x = rows(n)[:, 0].copy()
        close(self.found.execute(x)[0], x[x > 0] * 2)

    def capture(self, n: int) -> None:
        x = Tensor.from_numpy(rows(n))
        outputs = self.products.capture(n, x, Tensor.from_numpy(self.weights))
        close(outputs[0], softmax(rows(n)))

    def replay(self, n: int) -> None:
        if n not in self.captured:
            inputs = [Tensor.from_numpy(rows(n)), Tensor.from_numpy(self.weights)]
            self.captured[n] = inputs, self.products.capture(n, *inputs)
        inputs, outputs = self.captured[n]
        if self.overwrites:
            outputs[0].to_numpy()[...] = -1
        self.products.replay(n, *inputs)
        close(outputs[0], softmax(rows(n)))

    def reload(self, n: int) -> None:
        self.weighted.reload({"w": self.weights * n})
        # a use inside this one may have reloaded it since
        got = self.weighted.execute(rows(4))[0].to_numpy()
        factor = float(np.round(got[0, 0] / rows(4)[0, 0]))
        if factor not in (5, 9) or not np.allclose(got, rows(4) * factor, rtol=1e-4):
            print("wrong:", got[0], flush=True)
            os._exit(3)

    def turns(self, n: int) -> None:
        x = rows(1)[0, :4].copy() * n
        state, steps = (
            Tensor.from_numpy(np.zeros(4, np.float32)),
            Tensor.from_numpy(np.zeros(1, np.int64)),
        )
        again = Tensor.from_numpy(np.ones(1, np.uint8))
        outputs = self.loop.run([x, state], lambda outputs: [steps, again], again)
        close(outputs[0], softmax(x))
        close(state, x * 3)

    def eager(self, n: int) -> None:
        x = Eager.constant(rows(n), dtype=DType.float32)
        y = x * 2.0
        z = F.softmax(y) + 1.0
        close(z, softmax(rows(n) * 2) + 1)
        close(y, rows(n) * 2)

    def store(self, n: int) -> None:
        x = Eager.constant(rows(n), dtype=DType.float32)
        y = x + 1.0
        x[0] = 7.0
        close(y, rows(n) + 1)
        want = rows(n)
        want[0] = 7
        close(x, want)


SUBJECTS = [
    "execute",
    "error",
    "segments",
    "capture",
    "replay",
    "reload",
    "turns",
    "eager",
    "store",
]
ACTIONS = ["same", "other", "fork"]


def refused(error: Exception) -> bool:
    """Whether it is an error of a use inside another one. Where a graph is being staged, eager calls are staged too."""
    text = (
        "interrupt" if isinstance(error, RuntimeError) else "value of a graph that is being built"
    )
    return text in str(error)


class Injector:
    """Calls a function at one bytecode of a use, counted from its begin.

    Args:
        at: Which bytecode.
        act: The function.
        within: Counts the bytecodes of functions with this qualified name only; empty: all.

    Attributes:
        count: The number of bytecodes so far.
    """

    def __init__(self, at: int, act: Callable[[], None], within: str = "") -> None:
        self.at, self.act, self.within, self.count = at, act, within, 0

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode" and self.within in ("", frame.f_code.co_qualname):
            self.count += 1
            if self.count == self.at:
                self.act()
        return self.trace

    def run(self, use: Callable[[int], None], n: int) -> None:
        sys.settrace(self.trace)
        try:
            use(n)
        finally:
            sys.settrace(None)


def opcodes(models: Models, subject: str, action: str, stride: int, within: str = "") -> None:
    """Acts at every `stride`-th bytecode of a use, or of one function; a fork's child ends with the use."""
    use = getattr(models, subject)
    for n in (5, 9, 5, 9):
        use(n)
        models.execute(n)
    counter = Injector(-1, lambda: None, within)
    counter.run(use, 5)
    tally = {"done": 0, "refused": 0}
    child: list[bool] = []

    def act() -> None:
        if action == "fork":
            pid = os.fork()
            if pid == 0:
                child.append(True)
                sys.settrace(None)
                faulthandler.register(signal.SIGALRM, chain=True)
                signal.alarm(30)
            elif code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                print("a child ended with", code, flush=True)
                os._exit(5)
            return
        try:
            (use if action == "same" else models.execute)(9)
            tally["done"] += 1
        except (RuntimeError, TypeError) as error:
            if not refused(error) or action == "other" and subject not in SAME:
                raise
            tally["refused"] += 1

    for at in range(1, counter.count + 1, stride):
        Injector(at, act, within).run(use, 5)
        if child:
            use(9)
            models.execute(9)
            os._exit(0)
    print(subject, counter.count, tally["done"], tally["refused"], flush=True)


SAME = {"execute", "capture", "replay"}
"""Uses of the model that `Models.execute` uses."""


class Finalized:
    """Uses a model when the collector finds it in a cycle."""

    def __init__(self, use: Callable[[], None]) -> None:
        self.use, self.cycle = use, self

    def __del__(self) -> None:
        self.use()


def storm(seconds: float, seed: int, *options: str) -> None:
    """Signals, finalizers and forks at random times while three threads use the same models.

    Args:
        seconds: How long.
        seed: Chooses the uses and the times.
        options: ``threads=N`` for models with N threads each; the other words are the subjects, by default all.
    """
    rng = random.Random(seed)
    counts = [int(word.partition("=")[2]) for word in options if word.startswith("threads=")]
    subjects = [word for word in options if not word.startswith("threads=")] or SUBJECTS
    # a reload in one thread changes the results of the others
    subjects = [name for name in subjects if name != "reload"]
    models, others = (Models(count) for count in (2 * counts or [2, 3])[:2])
    models.overwrites = others.overwrites = False
    end = 0.0
    tally = {"done": 0, "refused": 0, "raised": 0}

    def attempt(both: tuple[Models, ...]) -> None:
        if child or time.monotonic() > end + 10:
            return  # the collector may find many cycles at once
        try:
            getattr(rng.choice(both), rng.choice(subjects))(rng.randrange(1, 40))
            tally["done"] += 1
        except Stop:
            raise
        except Exception as error:
            if not isinstance(error, RuntimeError | TypeError) or not refused(error):
                traceback.print_exc()
                print("wrong error:", repr(error), flush=True)
                os._exit(6)
            tally["refused"] += 1

    class Stop(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        if time.monotonic() > end:
            return
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
        kind = rng.random()
        if kind < 0.05 and catching[0]:
            catching[0] = False
            raise Stop
        if 0.05 <= kind < 0.07 and not forking[0]:
            forking[0] = True
            # Python ignores errors of handlers in what it calls before a fork, such as acquiring its own locks
            signal.setitimer(signal.ITIMER_REAL, 0)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                faulthandler.register(signal.SIGALRM, chain=True)
                signal.alarm(20)
                child.append(True)
                return
            if code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
                print("a child ended with", code, flush=True)
                os._exit(7)
            forking[0] = False
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
            return
        Finalized(lambda: attempt((models, others)))
        if kind < 0.2:
            gc.collect()
        attempt((models, others))

    child: list[bool] = []
    catching, forking = [False], [False]

    def work() -> None:
        while time.monotonic() < end:
            Finalized(lambda: attempt((models, others)))
            attempt((models, others))

    for name in subjects:
        getattr(models, name)(3)
        getattr(others, name)(3)
    # a child must not wait for an import of another thread: the modules of the compiler, eager programs of all sizes
    with Graph("imports", input_types=[vector(4)]) as graph:
        graph.output(ops.softmax(graph.inputs[0].tensor * os.getpid()))
    models.session.load(graph)
    for n in range(1, 40):
        models.eager(n)
        models.store(n)
    end = time.monotonic() + seconds
    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    while time.monotonic() < end and not child:
        try:
            catching[0] = True
            attempt((models, others))
            catching[0] = False
        except Stop:
            tally["raised"] += 1
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    if child:
        faulthandler.register(signal.SIGALRM, chain=True)
        models.execute(7)
        others.segments(7)
        os._exit(0)
    for thread in threads:
        thread.join(60)
        if thread.is_alive():
            print("a thread waits for ever", flush=True)
            faulthandler.dump_traceback()
            os._exit(8)
    models.execute(5)
    print(*tally.values(), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", DeprecationWarning)
    faulthandler.enable()
    faulthandler.dump_traceback_later(
        300 if sys.argv[1] == "opcodes" else float(sys.argv[2]) + 100, exit=True
    )
    if sys.argv[1] == "opcodes":
        all_models = Models(2)
        for item in sys.argv[3:]:
            name, _, count = item.partition("=")
            stride, _, within = count.partition(":")
            opcodes(all_models, name, sys.argv[2], int(stride), within)
    else:
        storm(float(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
