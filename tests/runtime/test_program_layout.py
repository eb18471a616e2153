"""What an executor lays out besides launches: jumps, changed addends, logs of launches, and the memory of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from max._abi import (
    COUNTER_BYTES,
    ErrorRecord,
    Event,
    Instruction,
    PoolState,
    ProfileRecord,
    ProgramHeader,
)
from max._backends.cpu.runtime.executor import Executor
from max._backends.cpu.runtime.pool import Pool, shared_pool
from max._backends.program import (
    NO_VALUE,
    Jump,
    KernelRunError,
    Launch,
    NativeArray,
    Program,
    packed_words,
)
from tests.runtime.ir_kernels import entry


@pytest.fixture(params=[1, 2], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    pool = Pool(request.param)  # one that nothing else runs on
    yield pool
    pool.close()


def add(amount: int, to: int = 1, offset: int = 0, barrier: bool = True) -> Launch:
    """Adds to the word at the address in a value; by one worker."""
    return Launch(
        entry("add"), [(to, offset), (NO_VALUE, amount)], barrier, serial=True, name="add"
    )


def jump(kind: str, target: int, *slots: tuple[int, int]) -> Jump:
    return Jump(0, list(slots), barrier=False, phases=0, kind=kind, target=target, name=kind)


def values(*arrays: np.ndarray) -> np.ndarray:
    return np.array([0, *(array.ctypes.data for array in arrays)], np.int64)


def test_a_jump_is_taken_if_the_byte_is_0(pool: Pool) -> None:
    """A program of jumps and of launches of one worker wakes no other worker."""
    word, choices = np.zeros(1, np.int64), np.ones(8, np.uint8)
    launches = [
        add(1), jump("if_zero", 3, (2, 5)), add(10), add(100), jump("always", 6), add(1000), add(10_000),
    ]  # fmt: skip
    run = Executor(pool, Program(launches, 3))
    epoch = pool._words(PoolState.EPOCH)
    before = int(epoch[0])
    run.run(values(word, choices))
    assert word[0] == 10_111
    choices[5], word[0] = 0, 0
    run.run(values(word, choices))
    assert word[0] == 10_101 and int(epoch[0]) == before


def test_a_loop_counts_anew_in_each_turn(pool: Pool) -> None:
    """The counters of its launches are zeroed, those before it are not."""
    turns, sums = np.full(1, 3, np.int64), np.zeros((4, 5), np.int64)

    def count(index: int, barrier: bool = True) -> Launch:
        slots = [(2, index * sums.strides[0]), (NO_VALUE, 5)]
        return Launch(entry("count"), slots, barrier, phases=1 + index % 2, name="count")

    launches = [
        count(0), count(1), count(2), add(-1), count(3), jump("if_zero", 7, (1, 0)), jump("back", 2),
        add(100, to=2),
    ]  # fmt: skip
    run = Executor(pool, Program(launches, 3))
    for _ in range(2):
        turns[:], sums[:] = 3, 0
        run.run(values(turns, sums))
        assert turns[0] == 0
        sums[0, 0] -= 100
        np.testing.assert_array_equal(sums, np.repeat([[1], [1], [3], [3]], 5, 1))


def test_an_addend_is_replaced(pool: Pool) -> None:
    words = np.zeros(3, np.int64)
    run = Executor(pool, Program([add(1), add(5, offset=8), add(7, offset=16)], 2))
    run.set_addend(1, 1, 50)
    run.run(values(words))
    assert words.tolist() == [1, 50, 7]
    assert [launch.slots[1] for launch in run.program.launches] == [
        (NO_VALUE, amount) for amount in (1, 50, 7)
    ]
    run.set_addend(1, 0, 16)
    run.run(values(words))
    assert words.tolist() == [2, 50, 64]


def test_measurements_are_turned_on_and_off(pool: Pool) -> None:
    word = np.zeros(1, np.int64)
    run = Executor(pool, Program([add(1), add(2)], 2), profile=False)
    assert run.ticks().shape == (2, ProfileRecord.END) and not run.ticks().any()
    counts = []
    for on in (False, True, False, True, True):
        run.set_profiling(on)
        run.run(values(word))
        counts.append(run.ticks()[:, ProfileRecord.COUNT].tolist())
    assert counts == [[0, 0], [1, 1], [1, 1], [2, 2], [3, 3]]


def test_launches_are_logged_while_there_is_room(pool: Pool) -> None:
    word = np.zeros(1, np.int64)
    run = Executor(pool, Program([add(1), add(2)], 2), profile=True)
    assert run.events().shape == (0, Event.END)
    run.log_events(3)
    for logged in ([0, 1], [0, 1, 0], [0, 1, 0]):
        run.run(values(word))
        events = run.events()
        assert events[:, Event.LAUNCH].tolist() == logged
        assert (np.diff(events[:, [Event.ARRIVAL, Event.START, Event.FINISH]]) >= 0).all()
    run.log_events(0)
    run.run(values(word))
    assert run.events().shape == (0, Event.END)


def test_the_memory_of_a_run(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[tuple[int, int]] = []
    monkeypatch.setattr(pool, "reserve", lambda *sizes: reserved.append(sizes))
    launches = [Launch(entry("busy"), [(0, 1)]), add(1), Launch(entry("busy"), [(0, 1)])]
    run = Executor(pool, Program(launches, 7, scratch_bytes=64))
    empty = Executor(pool, Program([], 0))
    assert reserved == [(64, 2), (0, 0)]
    assert (run._values.size, empty._values.size) == (7, 1)


def test_a_jump_back_zeroes_the_counters_of_its_loop() -> None:
    phases = [2, 3, 5, 7, 11]
    launches: list[Launch] = [Launch(entry("count"), [], phases=number) for number in phases]
    launches.insert(4, jump("back", 1))
    run = Executor(shared_pool(1), Program(launches, 1))
    row = run._code[ProgramHeader.END :].reshape(-1, Instruction.END)[4]
    assert row[Instruction.COUNTERS] - run._counters.ctypes.data == 2 * COUNTER_BYTES
    assert row[Instruction.NUM_SLOTS] == (3 + 5 + 7) * COUNTER_BYTES
    assert run._counters.size == sum(phases) * COUNTER_BYTES


def test_values_are_bases_with_offsets(pool: Pool) -> None:
    words = np.zeros(4, np.int64)
    run = Executor(pool, Program([add(1), add(5, to=2)], 3))
    bases = packed_words([0, words.ctypes.data, words.ctypes.data + 8])
    index, offsets = (NativeArray.of(np.array(row)) for row in ([0, 2, 1], [0, 16, 8]))
    run.run_at(bases, index, offsets)
    assert words.tolist() == [0, 5, 0, 1]
    everyone = Launch(entry("add"), [(1, 0), (NO_VALUE, 1)])
    Executor(pool, Program([everyone], 2)).run_at(bases, NativeArray.of(np.arange(2)), offsets)
    assert words[2] == pool.num_threads


def test_a_program_without_values_runs(pool: Pool) -> None:
    run = Executor(pool, Program([], 0))
    run.run(np.zeros(0, np.int64))
    assert run.runs == 1


@pytest.mark.parametrize(("number", "text"), [(-1, "number -1"), (0, "only 3"), (1, "number 1")])
def test_an_error_has_all_words_of_its_record(pool: Pool, number: int, text: str) -> None:
    fail = Launch(entry("fail"), [(NO_VALUE, word) for word in (-1, number, 3, 4)], name="bad")
    run = Executor(pool, Program([replace(fail, messages=("only {}",))], 1))
    with pytest.raises(KernelRunError, match=text) as raised:
        run.run(np.zeros(1, np.int64))
    size = 0 if number else ErrorRecord.END - ErrorRecord.VALUES
    assert len(raised.value.values) == size
