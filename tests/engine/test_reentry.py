"""Signal handlers, finalizers, trace functions and forks at any instruction of a use of a model.

They get right results, or an error if they use what they interrupt. What they interrupt gives right results.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from max._backends.cpu.runtime.pool import Pool
from max._reentry import exclusively, guarded, reentrant_lock, refuse_second_use
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.engine import reentry_storm

ROOT = Path(__file__).parents[2]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
needs_signals = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs POSIX signals")


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
        assert count > 1000 and done + refused > count // QUICK[subject] // 2
        assert done and refused


def test_another_model_runs_at_any_bytecode():
    strides = {subject: 2 * QUICK[subject] for subject in ("error", "turns", "eager")}
    for subject, (count, done, refused) in tallies("other", strides).items():
        assert done > count // strides[subject] // 2 and refused == 0


@needs_fork
def test_a_child_forked_at_any_bytecode_ends_the_use():
    tallies("fork", {"execute": 211, "turns": 311})


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
    with Graph("add", input_types=[TensorType(DType.float32, ["n"], DeviceRef.CPU())]) as graph:
        graph.output(graph.inputs[0].tensor + 1.0)
    model = InferenceSession(devices=[CPU()]).load(graph)
    errors = []

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

    @guarded
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
