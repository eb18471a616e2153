"""The life of a pool: starting, stopping, forks, Ctrl-C, the end of the interpreter."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import numpy as np
import pytest

from max._backends.cpu.runtime import jit, platform
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool, shared_pool
from max._backends.program import Launch, Program
from max._config import flags
from max._host import interrupts
from max._host.threads import DaemonThread
from tests.runtime.ir_kernels import entry

PRELUDE = """
    import os, sys, threading, time
    import numpy as np
    from max._backends.cpu.runtime.pool import Pool, shared_pool
    from max._backends.cpu.runtime.executor import Executor
    from max._backends.program import Launch, Program
    from tests.runtime.ir_kernels import entry

    def counting(pool, out, rounds=1):
        launches = [Launch(entry("busy"), [(0, rounds)]), Launch(entry("count"), [(0, out.ctypes.data), (0, out.size)])]
        return Executor(pool, Program(launches, 1))

    zero = np.zeros(1, np.int64)
    out = np.zeros(16, np.int64)
"""


def run_script(script, timeout=60, **env):
    """Runs a script in an interpreter of its own; its standard error must stay empty."""
    text = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", text],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(["src", "."])} | env,
    )
    assert done.stderr == "", done.stderr
    assert done.returncode == 0, done
    return done.stdout


def counting(pool, out, rounds=1):
    launches = [
        Launch(entry("busy"), [(0, rounds)]),
        Launch(entry("count"), [(0, out.ctypes.data), (0, out.size)]),
    ]
    return Executor(pool, Program(launches, 1))


ZERO = np.zeros(1, np.int64)


@pytest.mark.parametrize("count", [0, -3])
def test_a_pool_has_at_least_one_worker(count):
    with pytest.raises(ValueError, match="1 or more would fit"):
        Pool(count)


def test_one_worker_makes_no_thread():
    out = np.zeros(4, np.int64)
    counting(Pool(1), out).run(ZERO)  # the first run starts the thread that watches for Ctrl-C
    before = threading.active_count()
    counting(Pool(1), out).run(ZERO)
    assert threading.active_count() == before and (out == 2).all()


def test_pools_are_shared_by_number_of_threads():
    assert shared_pool(2) is shared_pool(2) and shared_pool(2) is not shared_pool(3)
    assert shared_pool().num_threads == platform.default_num_threads()
    with flags.override(MAX_NUM_THREADS=5):
        assert shared_pool().num_threads == 5
    with flags.override(MAX_PARKING="portable"):
        assert shared_pool(2).parking in ("pthread", "address")


def test_threads_start_with_the_first_run_and_end_with_the_pool():
    pool, out = Pool(3), np.zeros(4, np.int64)
    assert pool._threads == []
    counting(pool, out).run(ZERO)
    workers = list(pool._threads)
    assert len(workers) == 2 and all(worker.is_alive() for worker in workers)
    dead = weakref.ref(pool)
    del pool
    gc.collect()
    assert dead() is None
    assert all(worker.join(10) and not worker.is_alive() for worker in workers)


def test_a_closed_pool_runs_on_the_calling_thread():
    pool, out = Pool(4), np.zeros(4, np.int64)
    run = counting(pool, out)
    run.run(ZERO)
    for _ in range(2):
        pool.close()
        run.run(ZERO)
    never_started = Pool(3)
    never_started.close()
    counting(never_started, out).run(ZERO)
    assert (out == 4).all()


def test_a_thread_that_cannot_be_had_leaves_the_pool_sound(monkeypatch):
    pool, out = Pool(4), np.zeros(4, np.int64)
    run, start, started = counting(pool, out), DaemonThread.start, []

    def limited(thread):
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(DaemonThread, "start", limited)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run.run(ZERO)
    monkeypatch.undo()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()
    run.run(ZERO)
    assert (out == 1).all()


def test_growing_buffers_keeps_programs_working():
    pool, out = Pool(2), np.zeros(4, np.int64)
    small = counting(pool, out)
    small.run(ZERO)
    many = [(0, out.ctypes.data), (0, 4), *[(0, i) for i in range(500)]]
    big = Executor(pool, Program([Launch(entry("count"), many)], 1, scratch_bytes=1 << 20))
    for _ in range(3):
        big.run(ZERO)
        small.run(ZERO)
    assert (out == 7).all()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs an interval timer")
@pytest.mark.parametrize("parking", ["auto", "portable"])
def test_ctrl_c_during_a_run_leaves_the_pool_sound(parking):
    pool, out = Pool(2, parking), np.zeros(4, np.int64)
    long, short = counting(pool, out, 40_000_000), counting(pool, out)
    short.run(ZERO)
    expected = 1
    for _ in range(3):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        try:
            with pytest.raises(KeyboardInterrupt):
                for _ in range(1000):
                    expected += 1
                    long.run(ZERO)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # the interrupted run was completed, unless the signal came before it was entered
        assert out[0] in (expected, expected - 1) and (out == out[0]).all()
        expected = int(out[0]) + 1
        short.run(ZERO)
        assert (out == expected).all()


def test_a_signal_to_a_parked_worker_is_harmless():
    pool, out = Pool(3), np.zeros(4, np.int64)
    run, seen = counting(pool, out), []
    run.run(ZERO)
    previous = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        time.sleep(0.02)
        for worker in pool._threads:
            signal.pthread_kill(worker.ident, signal.SIGUSR1)
            time.sleep(0.01)
        run.run(ZERO)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert seen and (out == 2).all()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("parking", ["auto", "portable"])
def test_a_forked_child_has_workers_of_its_own(parking):
    out = run_script(
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        pool = shared_pool(3)
        run = counting(pool, out)
        run.run(zero)
        for turn in range(5):
            child = os.fork()
            if child == 0:
                for _ in range(20):
                    run.run(zero)
                os._exit(0 if (out == out[0]).all() and len(pool._threads) == 2 else 3)
            for _ in range(20):
                run.run(zero)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
        assert (out == 101).all(), out
        # a child forked while another thread is in a run
        stop = threading.Event()
        def loop():
            while not stop.is_set():
                run.run(zero)
        thread = threading.Thread(target=loop)
        thread.start()
        for turn in range(5):
            child = os.fork()
            if child == 0:
                own = np.zeros(7, np.int64)
                counting(pool, own).run(zero)
                os._exit(0 if (own == 1).all() else 4)
            _, status = os.waitpid(child, 0)
            assert os.waitstatus_to_exitcode(status) == 0, status
        stop.set()
        thread.join()
        print("done")
        """,
        MAX_PARKING=parking,
    )
    assert out == "done\n"


ENDINGS = {
    "after a run": "counting(shared_pool(3), out).run(zero)",
    "after sleeping": "counting(shared_pool(3), out).run(zero); time.sleep(0.05)",
    "without a run": "counting(shared_pool(3), out)",
    "sys.exit": "counting(shared_pool(3), out).run(zero); sys.exit(0)",
    "in an exit handler": """
import atexit
run = counting(shared_pool(3), out)
run.run(zero)
import max._backends.cpu.runtime.pool as p
# handlers run in reverse order: this one comes after the pool's own
atexit.unregister(p.POOLS.close)
atexit.register(lambda: run.run(zero))
atexit.register(p.POOLS.close)
""",
    "with a busy daemon thread": """
run = counting(shared_pool(3), out, 100000)
def loop():
    while True:
        run.run(zero)
threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
""",
    "with a busy thread that ends": """
run = counting(shared_pool(3), out, 10000)
def loop():
    for _ in range(300):
        run.run(zero)
threading.Thread(target=loop).start()
""",
}


@pytest.mark.parametrize("parking", ["auto", "portable"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_cleanly(ending, parking):
    run_script(ENDINGS[ending], MAX_PARKING=parking)


def test_more_workers_than_cores_make_progress():
    pool, out = Pool(16), np.zeros(50, np.int64)
    launches = [Launch(entry("count"), [(0, out.ctypes.data), (0, 50)]) for _ in range(20)]
    run = Executor(pool, Program(launches, 1))
    start = time.perf_counter()
    for _ in range(20):
        run.run(ZERO)
    assert (out == 400).all()
    assert time.perf_counter() - start < 30
    pool.close()


def test_a_new_pool_has_no_native_part() -> None:
    """A session makes a pool before anything is known of its programs."""
    before = jit.stats.linked
    pool = Pool(3)
    assert pool.run_number() == 0 and not pool._threads
    gc.collect()
    interrupts.WATCH.wake()
    assert pool.run_number() == 0 and pool._native is None
    native = pool.prepare()
    assert pool.prepare() is native and native.clock_hz == pool.clock_hz > 0
    assert jit.stats.linked - before <= 1
    assert pool.run_number() == 0
    pool.close()


@pytest.mark.parametrize("prepared", [False, True])
def test_a_pool_that_was_closed_first_runs_on_the_caller(prepared: bool) -> None:
    pool, out = Pool(3), np.zeros(1, np.int64)
    if prepared:
        pool.prepare()
    pool.close()
    Executor(pool, Program([Launch(entry("add"), [(0, out.ctypes.data), (0, 1)])], 1)).run(
        np.zeros(1, np.int64)
    )
    assert out[0] == 1 and not pool._threads
