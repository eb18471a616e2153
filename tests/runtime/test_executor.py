"""Programs on pools: order, slots, counters, errors; on each way of parking, with too few and too many workers."""

from __future__ import annotations

import dataclasses
import gc
import threading
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max._abi import PoolState, ProfileRecord
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool, shared_pool
from max._backends.program import KernelRunError, Launch, Program
from max._config import flags
from tests.runtime.ir_kernels import entry

PARKING = ("auto", "portable")


@pytest.fixture(
    params=[(n, mode) for mode in PARKING for n in (1, 2, 5)],
    ids=lambda p: f"{p[0]}-{p[1]}",
    scope="module",
)
def pool(request):
    pool = Pool(*request.param)
    yield pool
    pool.close()


def executor(pool, launches, num_values=1, **more):
    return Executor(pool, Program(launches, num_values, **more))


def values(*words):
    return np.array([0, *words], np.int64)


def address(array):
    return array.ctypes.data


def expected_affine(x, times):
    x = x.copy()
    for _ in range(times):
        x = x * 3 + 1
    return x


@given(data=st.data())
def test_slots_are_values_plus_addends(data):
    pool = shared_pool(2)
    words = data.draw(st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=20))
    picks = data.draw(
        st.lists(st.tuples(st.integers(0, len(words)), st.integers(-(2**62), 2**62)), max_size=40)
    )
    n = len(picks) + 2
    out = np.zeros((2, n), np.int64)
    launch = Launch(entry("copy_slots"), [(0, address(out)), (0, n), *picks])
    given_values = values(*words)
    executor(pool, [launch], len(words) + 1).run(given_values)
    expected = [int(given_values[i]) + addend for i, addend in picks]
    np.testing.assert_array_equal(
        out[:, 2:], np.broadcast_to(np.array(expected, np.int64), (2, n - 2))
    )


def test_context_has_the_fields_of_the_contract(pool):
    n, scratch_bytes = pool.num_threads, 1000
    out = np.zeros((3, n, 9), np.int64)
    launches = [
        Launch(entry("copy_context"), [(0, address(out[i]))], phases=i, serial=i == 2)
        for i in range(3)
    ]
    executor(pool, launches, scratch_bytes=scratch_bytes).run(values())
    worker, workers, counters, barrier, private, error, scratch, size, launch = np.moveaxis(
        out, 2, 0
    )
    np.testing.assert_array_equal(worker[:2], [np.arange(n)] * 2)
    assert (workers[:2] == n).all()
    assert workers[2, 0] == 1 and (workers[2, 1:] == 0).all(), "a serial launch has one worker"
    assert (launch[:, 0] == [0, 1, 2]).all()
    assert len(np.unique(counters[1])) == 1 and (counters[:2] % 64 == 0).all()
    assert len(np.unique([barrier[:2], private[:2], error[:2]])) == 3
    assert (scratch[:2] % 64 == 0).all() and (size[:2] >= scratch_bytes).all()
    starts = np.sort(scratch[0])
    assert (np.diff(starts) >= scratch_bytes).all(), "the workers' scratch overlaps"


@pytest.mark.parametrize("num_launches", [1, 2, 200])
def test_barriers_order_launches(pool, rng, num_launches):
    n = 37
    start = rng.integers(-1000, 1000, n)
    buffers = [start.copy(), np.zeros(n, np.int64)]
    launches = [
        Launch(entry("affine"), [(1 + (i + 1) % 2, 0), (1 + i % 2, 0), (3, 0)])
        for i in range(num_launches)
    ]
    executor(pool, launches, 4).run(values(address(buffers[0]), address(buffers[1]), n))
    np.testing.assert_array_equal(buffers[num_launches % 2], expected_affine(start, num_launches))


def test_counters_are_zero_at_each_launch_of_each_run(pool):
    out = np.zeros((3, 211), np.int64)
    run = executor(
        pool,
        [Launch(entry("count"), [(1, 8 * 211 * i), (0, 211)], barrier=i == 2) for i in range(3)],
        2,
    )
    for _ in range(50):
        run.run(values(address(out)))
    assert (out == 50).all()


def test_barrier_inside_a_kernel(pool):
    n, rounds = pool.num_threads, 300
    out, shared = np.zeros(n, np.int64), np.zeros(n, np.int64)
    executor(pool, [Launch(entry("phases"), [(1, 0), (2, 0), (0, rounds)])], 3).run(
        values(address(out), address(shared))
    )
    assert (out == rounds * (rounds - 1) // 2).all()


def test_serial_launches_run_once(pool):
    words = np.zeros(2, np.int64)
    launches = [
        Launch(entry("add"), [(1, 8 * (i % 2)), (0, 1)], serial=i % 2 == 0, barrier=i % 3 == 0)
        for i in range(40)
    ]
    executor(pool, launches, 2).run(values(address(words)))
    assert words.tolist() == [20, 20 * pool.num_threads]


@pytest.mark.parametrize("others", [0, 1])
def test_only_programs_with_parallel_launches_wake_the_other_workers(pool, others):
    words = np.zeros(1, np.int64)
    launches = [
        Launch(entry("add"), [(1, 0), (0, 1)], serial=i >= others, barrier=i % 2 == 0)
        for i in range(5)
    ]
    run = executor(pool, launches, 2)  # makes the pool's memory
    epoch = pool._words(PoolState.EPOCH)
    before = int(epoch[0])
    for _ in range(3):
        run.run(values(address(words)))
    alone = pool.num_threads == 1 or not others
    assert int(epoch[0]) - before == (0 if alone else 3)
    assert words[0] == 3 * (5 - others + others * pool.num_threads)


def test_a_run_alone_is_a_run_of_one_worker(pool):
    """The contexts, launches and barriers of a run alone between runs that all workers share."""
    count, n = np.zeros(1, np.int64), pool.num_threads
    out = np.zeros((2, n, 9), np.int64)
    launches = [
        Launch(entry("add"), [(1, 0), (0, 1)]),
        *(
            Launch(entry("copy_context"), [(0, address(part))], serial=i)
            for i, part in enumerate(out)
        ),
        Launch(entry("phases"), [(2, 0), (3, 0), (0, 5)]),
    ]
    sums, shared = np.zeros(n, np.int64), np.zeros(n, np.int64)
    run = executor(pool, launches, 4)
    given_values = values(address(count), address(sums), address(shared))
    epoch, added = pool._words(PoolState.EPOCH), 0
    for alone in (True, True, False, True):
        out[:], sums[:], shared[:] = -1, 0, 0
        before, workers = int(epoch[0]), 1 if alone else n
        run.run(given_values, alone)
        added += workers
        assert int(epoch[0]) - before == (0 if alone or n == 1 else 1)
        assert count[0] == added
        assert (out[0, :workers, 1] == workers).all() and (out[0, workers:] == -1).all()
        assert out[1, 0, 1] == 1
        assert (sums[:workers] == 10).all() and (sums[workers:] == 0).all()


def test_a_kernel_may_write_values_that_later_launches_read(pool):
    """Late-bound values: the program hands out an address inside of the values."""
    n = pool.num_threads
    word, given_values = np.zeros(1, np.int64), values(0, 0, 5)
    given_values[1:3] = address(word), 0
    launches = [
        Launch(entry("add"), [(0, address(given_values) + 16), (3, 2)], serial=True),
        Launch(entry("add"), [(1, 0), (2, 100)]),
    ]
    executor(pool, launches, 4).run(given_values)
    assert given_values[2] == 7 and word[0] == 107 * n


def test_an_empty_program_runs(pool):
    executor(pool, []).run(values())


# Errors ------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Message:
    exception: str
    text: str

    def format(self, words):
        return self.text.format(*words)


def failing(pool, out, who, messages=("first", "index {} out of {}"), number=1):
    """Counts, fails in the middle, and has more launches that must not run."""
    count = Launch(entry("add"), [(0, address(out)), (0, 1)])
    after = Launch(entry("add"), [(0, address(out) + 8), (0, 1)])
    fail = Launch(
        entry("fail"), [(1, 0), (0, number), (0, 11), (0, -7)], name="bad", messages=messages
    )
    return executor(pool, [count, fail, after, after], 2), values(who)


def test_an_error_in_any_worker_reaches_the_caller_and_the_pool_survives(pool):
    n = pool.num_threads
    out, good = np.zeros(2, np.int64), np.zeros(1, np.int64)
    sound = executor(pool, [Launch(entry("add"), [(0, address(good)), (0, 1)])] * 3)
    for turn in range(60):
        who = [*range(n), -1][turn % (n + 1)]
        run, words = failing(pool, out, who)
        with pytest.raises(KernelRunError, match=r"^bad: index 11 out of -7$") as error:
            run.run(words)
        assert error.value.launch == "bad" and error.value.values[:2] == (11, -7)
        sound.run(values())
    assert out.tolist() == [60 * n, 0], "launches after the failed one ran"
    assert good[0] == 60 * n * 3


def test_an_error_without_anyone_at_a_barrier(pool):
    out = np.zeros(1, np.int64)
    fail = Launch(entry("fail"), [(0, -1), (0, 0), (0, 0), (0, 0)], barrier=False, messages=("no",))
    skipped = Launch(entry("add"), [(0, address(out)), (0, 1)], barrier=False)
    run = executor(pool, [fail, skipped])
    for _ in range(100):
        with pytest.raises(KernelRunError, match="no"):
            run.run(values())
    # without a barrier a worker may be past the failed launch before another raises, here none is
    assert out[0] == 0


@pytest.mark.parametrize(
    ("exception", "kind"),
    [
        ("ValueError", ValueError),
        ("IndexError", LookupError),
        ("OSError", KernelRunError),
        ("Mine", KernelRunError),
        ("print", KernelRunError),
    ],
)
def test_an_error_is_of_the_class_that_the_kernel_named(exception, kind):
    run, words = failing(
        shared_pool(2), np.zeros(2, np.int64), 1, (Message(exception, "{} {}"),), 0
    )
    with pytest.raises(kind, match="bad: 11 -7") as error:
        run.run(words)
    assert isinstance(error.value, KernelRunError) and error.value.exception == exception


def test_an_unknown_message_number_still_names_the_launch():
    run, words = failing(shared_pool(2), np.zeros(2, np.int64), 0, ())
    with pytest.raises(KernelRunError, match=r"bad: a kernel raised \(number 1\)"):
        run.run(words)


# What callers may get wrong ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        np.zeros(3, np.int64),
        np.zeros(2, np.int32),
        np.zeros((1, 2), np.int64),
        np.zeros(4, np.int64)[::2],
    ],
)
def test_values_that_do_not_fit_are_refused(bad):
    with pytest.raises(ValueError, match=r"contiguous int64\[2\]"):
        executor(shared_pool(1), [], 2).run(bad)


def test_value_0_is_0():
    with pytest.raises(ValueError, match=r"values\[0\] is 4"):
        executor(shared_pool(1), [], 2).run(np.array([4, 0], np.int64))


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (Launch(0, [], name="lost"), r"launch 0 \(lost\): kernel 0"),
        (Launch(1, [], phases=-1), "phases -1"),
        (Launch(1, [(2, 0)]), "slot of value 2, the program has 2"),
        (Launch(1, [(-1, 0)]), "slot of value -1"),
    ],
)
def test_programs_are_checked(launch, message):
    with pytest.raises(ValueError, match=message):
        executor(shared_pool(1), [launch], 2)


def test_a_program_prints():
    launches = [
        Launch(1, [(0, 5), (1, 0), (2, -8)], name="a"),
        Launch(1, [], False, serial=True, name="b"),
    ]
    assert str(Program(launches, 3, 64)) == (
        "program: 3 values, 64 bytes of scratch a worker\n   0 |  a(5, v1, v2-8)\n   1 1  b()"
    )


# Profiles ----------------------------------------------------------------------------------------


def test_profile_tells_the_time_of_each_launch(pool):
    rounds = 200_000
    launches = [
        Launch(entry("busy"), [(0, rounds)], name="long"),
        Launch(entry("busy"), [(0, 1)], name="short"),
    ]
    run = Executor(pool, Program(launches, 1), profile=True)
    start = time.perf_counter()
    for _ in range(5):
        run.run(values())
    elapsed = (time.perf_counter() - start) * 1e9
    ticks = run.ticks()
    assert ticks[:, ProfileRecord.COUNT].tolist() == [5, 5] and run.runs == 5
    waits, runs = (ticks[:, [ProfileRecord.WAIT, ProfileRecord.RUN]] * (1e9 / run.clock_hz)).T
    assert 0 < runs[1] < runs[0] < elapsed
    assert 0 <= waits[0] and waits.sum() + runs.sum() <= elapsed


def test_profile_follows_the_flag():
    def counts() -> list[int]:
        run = executor(shared_pool(1), [Launch(entry("busy"), [(0, 1)])])
        run.run(values())
        return run.ticks()[:, ProfileRecord.COUNT].tolist()

    with flags.override(MAX_PROFILE=1):
        assert counts() == [1]
    assert counts() == [0]


# Many runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("parking", PARKING)
def test_ten_thousand_runs_leak_nothing(parking):
    pool = Pool(2, parking)
    out = np.zeros(64, np.int64)
    run = executor(
        pool, [Launch(entry("count"), [(1, 0), (0, 64)]), Launch(entry("nothing"), [])], 2
    )
    words, process = values(address(out)), psutil.Process()
    for _ in range(1000):
        run.run(words)
    gc.collect()
    before, threads = process.memory_info().rss, process.num_threads()
    for _ in range(10_000):
        run.run(words)
    gc.collect()
    assert (out == 11_000).all()
    assert process.memory_info().rss - before < 1 << 20
    assert process.num_threads() <= threads


def test_executors_and_pools_come_and_go_without_a_leak():
    process, num_threads = psutil.Process(), psutil.Process().num_threads()

    def churn(times):
        for _ in range(times):
            pool, out = Pool(3), np.zeros(8, np.int64)
            executor(
                pool, [Launch(entry("count"), [(0, address(out)), (0, 8)])], scratch_bytes=1 << 16
            ).run(values())
            assert (out == 1).all()

    churn(30)
    gc.collect()
    before = process.memory_info().rss
    churn(150)
    gc.collect()
    deadline = time.monotonic() + 20
    while process.num_threads() > num_threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert process.num_threads() <= num_threads
    assert process.memory_info().rss - before < 8 << 20


def test_two_threads_share_a_pool_and_an_executor(pool):
    n = 23
    start = np.arange(n)
    failures = []

    def work(shared, own, turns):
        try:
            for _ in range(turns):
                a, b = start.copy(), np.zeros(n, np.int64)
                own.run(values(address(a), address(b), n))
                np.testing.assert_array_equal(a, expected_affine(start, 6))
                shared.run(values(address(total)))
        except BaseException as error:
            failures.append(error)

    total = np.zeros(n, np.int64)
    shared = executor(pool, [Launch(entry("count"), [(1, 0), (0, n)])], 2)
    chain = [
        Launch(entry("affine"), [(1 + (i + 1) % 2, 0), (1 + i % 2, 0), (3, 0)]) for i in range(6)
    ]
    threads = [
        threading.Thread(target=work, args=(shared, executor(pool, chain, 4), 150))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures and (total == 450).all()


def test_threads_with_pools_of_their_own_do_not_meet():
    results = {}

    def work(n):
        own, out = Pool(n), np.zeros(100, np.int64)
        run = executor(own, [Launch(entry("count"), [(0, address(out)), (0, 100)])])
        for _ in range(200):
            run.run(values())
        results[n] = out

    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert all((results[n] == 200).all() for n in (1, 2, 3))
