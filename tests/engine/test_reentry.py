"""Signal handlers, finalizers, trace functions and forks at any instruction of a use of a model.

They get right results, or an error if they use what they interrupt. What they interrupt gives right results.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from max._backends.cpu.runtime import compiler_forks, jit
from max._backends.cpu.runtime.pool import Pool
from max._host import reentry
from max._host.reentry import (
    LockLevel,
    exclusively,
    free,
    hold_lock,
    mark_guarded,
    reentrant_lock,
    refuse_second_use,
)
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental.tensor import Tensor as Eager
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.engine import reentry_storm

ROOT = Path(__file__).parents[2]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
needs_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")


def load_add(number=1.0):
    """A model that adds a number."""
    with Graph("add", input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0].tensor + number)
    return InferenceSession(devices=[CPU()]).load(graph)


def storm(*args, timeout=240):
    """Runs the script, and returns the words of the last line that it prints."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.engine.reentry_storm", *map(str, args)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout.split()


def tallies(action, strides, **more):
    """For each subject the number of bytecodes, and of uses that completed and that were refused."""
    words = storm("opcodes", action, *[f"{name}={n}" for name, n in strides.items()], **more)
    rows = [words[i : i + 4] for i in range(0, len(words), 4)]
    assert [row[0] for row in rows] == list(strides)
    return {row[0]: tuple(map(int, row[1:])) for row in rows}


# strides that reach other bytecodes of each; a use has 1,400 to 6,200
QUICK = {"execute": 23, "error": 27, "segments": 47, "replay": 21, "turns": 51, "eager": 71}


def test_a_second_use_at_any_bytecode_is_right_or_refused():
    for subject, (count, done, refused) in tallies("same", QUICK).items():
        # further uses have fewer bytecodes than the one that counts them
        assert count > 700 and done + refused > count // QUICK[subject] // 2
        assert done and refused


def test_another_model_runs_at_any_bytecode():
    strides = {subject: 2 * QUICK[subject] for subject in ("error", "turns", "eager")}
    for subject, (count, done, refused) in tallies("other", strides).items():
        assert done > count // strides[subject] // 2 and refused == 0


@needs_fork
def test_a_child_forked_at_any_bytecode_ends_the_use():
    tallies("fork", {"execute": 211, "turns": 311})


@needs_fork
def test_a_child_forked_at_each_bytecode_before_native_code_runs_alone():
    ((count, *_),) = tallies("fork", {"execute": "1:Pool.run"}).values()
    assert count > 20


@pytest.mark.long
@pytest.mark.parametrize("action", reentry_storm.ACTIONS)
@pytest.mark.parametrize("subject", reentry_storm.SUBJECTS)
def test_every_bytecode(subject, action):
    if action == "fork" and not hasattr(os, "fork"):
        pytest.skip("needs fork")
    tallies(action, {subject: 5 if action == "fork" else 1}, timeout=800)


@pytest.mark.long
@needs_fork
@needs_signals
@pytest.mark.parametrize("seed", range(8))
def test_signals_finalizers_threads_and_forks(seed):
    done, refused, _ = map(int, storm("storm", 30, seed))
    assert done > 100 and refused


@needs_signals
@pytest.mark.parametrize("threads", [1, 2])
def test_a_signal_handler_gets_right_results_or_an_error(threads):
    models = reentry_storm.Models(threads)
    models.execute(4)
    seen = [0, 0]

    def handler(number, frame):
        try:
            models.execute(11)
            seen[0] += 1
        except RuntimeError as error:
            assert "interrupts" in str(error) or "a signal handler cannot run" in str(error)
            seen[1] += 1
        if sum(seen) < 400:
            signal.setitimer(signal.ITIMER_REAL, 2e-4)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 2e-4)
        while sum(seen) < 400:
            models.execute(40)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen[1]


def test_another_thread_waits_for_its_turn():
    models, errors = reentry_storm.Models(2), []

    def work():
        try:
            for n in range(1, 60):
                models.execute(n)
                models.turns(n)
                models.error(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and not any(thread.is_alive() for thread in threads)


def test_an_argument_cannot_use_the_model_that_binds_it():
    model, errors = load_add(), []

    class Array:
        """Uses the model while it exports its memory."""

        def __init__(self, array):
            self.array = array

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **more):
            for use in (model.execute, model.reload, lambda _: model.capture(1, array)):
                try:
                    use(np.ones(3, np.float32))
                except RuntimeError as error:
                    errors.append(str(error))
            return self.array.__dlpack__(**more)

    array = np.ones(5, np.float32)
    (result,) = model.execute(Array(array))
    assert result.to_numpy().tolist() == [2.0] * 5
    assert len(errors) == 3 and all("add is in use by the code" in text for text in errors)
    assert model.execute(array)[0].to_numpy().tolist() == [2.0] * 5


def test_a_use_that_a_trace_function_ended_is_forgotten():
    in_use: set[int] = set()

    def use(depth):
        if depth:
            exclusively(in_use, "it", use, depth - 1)

    exclusively(in_use, "it", use, 0)
    with pytest.raises(RuntimeError, match="it is in use by the code"):
        exclusively(in_use, "it", use, 1)
    assert in_use == set()
    in_use.add(threading.get_ident())
    exclusively(in_use, "it", use, 0)
    assert in_use == set()

    @mark_guarded
    def other():
        in_use = set()  # noqa: F841  another set than the caller's
        refuse()

    def refuse():
        refuse_second_use(in_use, "it")

    other()


@needs_fork
def test_a_child_gets_locks_of_other_threads_free_and_keeps_its_own():
    lock, others, begun, end = (
        reentrant_lock(),
        reentrant_lock(),
        threading.Event(),
        threading.Event(),
    )

    def hold():
        with others:
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    with lock:
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            is_free = others.acquire(timeout=5)
            os._exit(0 if is_free and lock._is_owned() else 1)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_run_inside_a_run_of_another_pool_does_not_wait_for_ever(monkeypatch):
    from max._backends.cpu.runtime import pool as pools

    monkeypatch.setattr(pools, "NESTED_SECONDS", 0.05)
    graph = Graph("add", input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())])
    with graph:
        graph.output(ops.softmax(graph.inputs[0].tensor))
    model = InferenceSession(devices=[CPU()], num_threads=2).load(graph)
    mine, busy = Pool(1), model._linked.main.executor.pool
    x = np.zeros(2, np.float32)
    begun, end = threading.Event(), threading.Event()

    def hold():
        with busy.lock:
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    with mine.lock, pytest.raises(RuntimeError, match="workers that are busy"):
        model.execute(x)
    end.set()
    thread.join()
    with mine.lock:
        assert model.execute(x)[0].to_numpy().tolist() == [0.5, 0.5]
    gc.collect()


FORKED_RUN = """
import os, signal, sys
from tests.engine import test_interrupts as t

model = t.load(t.endless, int(sys.argv[1]))
assert t.works(int(sys.argv[1]))
begun = []

def handler(number, frame):
    if begun:
        raise LookupError("enough")
    begun.append(os.fork())
    if begun[0]:
        signal.setitimer(signal.ITIMER_REAL, 0.2)

signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    model.execute(t.ZEROS)
except (LookupError, RuntimeError) as error:
    text = str(error)
signal.setitimer(signal.ITIMER_REAL, 0)
assert t.works(int(sys.argv[1]))
if begun[0] == 0:
    os._exit(0 if text.startswith("the process was forked") else 1)
print(text, os.waitstatus_to_exitcode(os.waitpid(begun[0], 0)[1]))
"""


@needs_fork
@needs_signals
@pytest.mark.parametrize("threads", [1, 3])
def test_a_child_that_a_handler_forks_in_a_run_gets_an_error(threads):
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED_RUN, str(threads)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.stdout.split() == ["enough", "0"], process.stdout + process.stderr


def test_an_exception_in_a_followed_call_does_not_shift_the_values_of_later_calls():
    """A handler may end a call after it was compared in part; the calls before it keep their values."""

    class Stop(Exception):
        pass

    def stop():
        raise Stop

    def stretch(n, at=-1):
        """The result of five calls; a trace function raises at one bytecode of the third."""
        x = Eager.constant(np.full(n, 3, np.float32), dtype=DType.float32)
        y = x * 2.0
        z = y + x
        injector = reentry_storm.Injector(at, stop)
        w = None

        def third(_):
            nonlocal w
            w = z - 1.0

        with contextlib.suppress(Stop):
            injector.run(third, 0) if at else third(0)
        u = z * y
        assert u.to_numpy().tolist() == [54.0] * n and z.to_numpy().tolist() == [9.0] * n
        assert y.to_numpy().tolist() == [6.0] * n
        assert w is None or w.to_numpy().tolist() == [8.0] * n
        return injector.count

    for _ in range(3):
        stretch(4, 0)
    count = stretch(4)
    assert count > 50
    for at in range(1, count, 7):
        stretch(4, 0)
        stretch(4, at)


def test_a_handler_that_raises_leaves_other_tensors_computable():
    """What ends the run of values that nobody needs yet is not their error."""
    from max.experimental.record import recorder

    class Stop(Exception):
        pass

    kept = Eager.constant(np.arange(5, dtype=np.float32), dtype=DType.float32) + 1.0
    other = Eager.constant(np.zeros(3, np.float32), dtype=DType.float32)
    raised = []

    def trace(frame, event, arg):
        if frame.f_code is recorder.program_of.__code__ and not raised:
            raised.append(True)
            raise Stop

    sys.settrace(trace)
    try:
        with pytest.raises(Stop):
            other[0] = 4.0
    finally:
        sys.settrace(None)
    assert raised and kept.to_numpy().tolist() == [1, 2, 3, 4, 5]
    other[0] = 4.0
    assert other.to_numpy().tolist() == [4, 0, 0]


@needs_fork
@needs_signals
def test_a_child_gets_a_lock_that_a_thread_has_but_did_not_count():
    """The thread waits for Python's lock. A handler of the main thread, which waits for the lock too, forks."""
    interval, seen = sys.getswitchinterval(), 0
    sys.setswitchinterval(1e-5)

    def handler(number, frame):
        nonlocal seen
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            children.append(True)
            return
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        seen += 1

    before, children = signal.signal(signal.SIGUSR1, handler), []
    try:
        for _ in range(12):
            lock, end = reentrant_lock(), threading.Event()

            def fight(lock=lock, end=end):
                while not end.is_set():
                    with lock:
                        sum(range(300))

            threads = [threading.Thread(target=fight, daemon=True) for _ in range(3)]
            for thread in threads:
                thread.start()
            killer = threading.Timer(
                0.02, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)
            )
            killer.start()
            deadline = time.monotonic() + 0.1
            while time.monotonic() < deadline and not children:
                with lock:
                    pass
            if children:
                os._exit(0)
            end.set()
            for thread in [*threads, killer]:
                thread.join(30)
    finally:
        sys.setswitchinterval(interval)
        signal.signal(signal.SIGUSR1, before)
    assert seen == 12


def test_a_free_lock_whose_word_is_taken_is_released_in_place():
    """The state of an uncounted lock, made by hand: the lock of the system is taken, and the count is 0."""
    lock = reentrant_lock()
    if not reentry._IS_WORD_OF_LOCK_KNOWN:
        pytest.skip("the layout of locks of this Python is not known")
    import ctypes

    word = ctypes.c_void_p.from_address(id(lock) + object.__basicsize__)
    before = word.value
    assert ctypes.pythonapi.PyThread_acquire_lock(word, 0) == 1
    assert not lock.acquire(blocking=False)
    free(lock)
    assert lock.acquire(blocking=False) and word.value == before
    lock.release()


def test_a_lock_out_of_order_is_refused_and_one_in_order_is_waited_for():
    outer, inner = reentrant_lock(LockLevel.EAGER), reentrant_lock(LockLevel.JIT)
    begun, end = threading.Event(), threading.Event()

    @hold_lock(outer)
    def with_outer(function, *args):
        return function(*args)

    @hold_lock(inner)
    def with_inner(function, *args):
        return function(*args)

    def wait():
        begun.set()
        end.wait(30)

    for hold, first, then in ((with_outer, with_inner, with_outer), (with_inner, with_outer, None)):
        begun.clear(), end.clear()
        thread = threading.Thread(target=hold, args=(wait,))
        thread.start()
        begun.wait(30)
        if then is not None:
            with pytest.raises(RuntimeError, match="interrupts"):
                first(then, int)
            end.set()
        else:
            threading.Timer(3 * reentry.INVERTED_SECONDS, end.set).start()
            assert first(with_inner, int) == 0
        thread.join(30)
    assert with_outer(with_inner, with_outer, int) == 0
    assert not outer._is_owned() and not inner._is_owned()


@needs_fork
def test_a_child_of_a_process_that_compiles_gets_an_error_at_once(monkeypatch):
    monkeypatch.setattr(compiler_forks, "FORK_SECONDS", 0.05)
    model = load_add()
    locks, begun, end = jit._locks(), threading.Event(), threading.Event()

    def hold():
        with locks[-1]:
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        code = 1
        try:
            right = model.execute(np.ones(3, np.float32))[0].to_numpy().tolist() == [2.0] * 3
            try:
                load_add(7.5)
            except RuntimeError as error:
                code = 0 if right and "forked while another thread" in str(error) else 2
        finally:
            os._exit(code)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert load_add(8.5).execute(np.ones(3, np.float32))[0].to_numpy().tolist() == [9.5] * 3


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the collector runs between instructions")
def test_a_finalizer_of_the_collector_cannot_build_a_graph():
    errors = []

    class Cycle:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            try:
                load_add()
            except RuntimeError as error:
                errors.append(str(error))

    Cycle()
    gc.collect()
    assert len(errors) == 1 and "finalizer that the garbage collector" in errors[0]
    assert load_add().execute(np.ones(1, np.float32))[0].to_numpy().tolist() == [2.0]


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the collector runs between instructions")
def test_only_the_thread_that_collects_is_refused():
    """Another thread runs while a finalizer waits, and builds a graph."""
    begun, built = threading.Event(), []

    class Cycle:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            begun.set()
            thread.join(60)

    def build():
        begun.wait(60)
        built.append(load_add(3.5).execute(np.ones(1, np.float32))[0].to_numpy().tolist())

    thread = threading.Thread(target=build)
    thread.start()
    Cycle()
    gc.collect()
    assert built == [[4.5]]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_no_exception_of_a_signal_handler_is_lost_in_the_collector():
    """In a process of its own: hooks and finalizers of other packages lose them too."""
    script = """
import signal, sys, time
import max._host.reentry
class Stop(Exception): pass
def stop(*_): raise Stop
lost, raised = [], 0
sys.unraisablehook = lost.append
signal.signal(signal.SIGALRM, stop)
for each in range(100):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005 + each * 1e-5)
        for _ in range(200):
            list(map(list, [()] * 10_000))  # many objects by one instruction
        time.sleep(0.1)
    except Stop:
        raised += 1
print(raised, len(lost))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.split() == ["100", "0"], done.stdout + done.stderr


@needs_fork
def test_finalizers_do_not_run_before_the_locks_of_a_child_are_free():
    """The hooks of other packages make objects, and so may start the garbage collector."""
    lock, begun, end = reentrant_lock(), threading.Event(), threading.Event()

    def hold():
        with lock:
            begun.set()
            end.wait(60)

    class Cycle:
        def __init__(self):
            self.cycle = self

        def __del__(self):
            if os.getpid() != parent:
                states.append(lock.acquire(blocking=False))

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait(60)
    states, parent, thresholds = [], os.getpid(), gc.get_threshold()
    gc.collect()
    gc.set_threshold(100_000)
    for _ in range(20):
        Cycle()
    gc.set_threshold(1)  # the next new object starts the collector
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        gc.collect()
        os._exit(0 if gc.isenabled() and False not in states else 1)
    gc.set_threshold(*thresholds)
    end.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 and gc.isenabled()
