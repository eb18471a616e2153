"""Memory of programs with several segments: it is used again, and never by two executions at once."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple, cast

import numpy as np
import pytest

from max._backends.cpu.backend import CPUBackend
from max._backends.cpu.runtime.pool import shared_pool
from max._compiler.program.code import ALIGNMENT
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.engine.run.arena import MOST_SPARE, Arena, ArenaBlock, arena_of
from max.engine.run.output_memory import LEAST_KEPT
from max.graph import DeviceRef, Graph, TensorType, ops

WIDTH = 1 << 15
DEVICE = DeviceRef.CPU()


@pytest.fixture
def arena() -> Arena:
    return Arena(CPUBackend(shared_pool(None)))


def test_a_block_that_was_given_back_is_taken_again(arena: Arena) -> None:
    first = arena.separate(4 * LEAST_KEPT)
    other = arena.separate(4 * LEAST_KEPT)
    assert first.address != other.address
    arena.give_back(first)
    assert arena.separate(3 * LEAST_KEPT) == first
    assert arena.separate(3 * LEAST_KEPT).address not in (first.address, other.address)


def test_blocks_that_are_too_small_make_room_for_greater_ones(arena: Arena) -> None:
    small = arena.separate(LEAST_KEPT)
    arena.give_back(small)
    assert arena.separate(LEAST_KEPT + 1).size == LEAST_KEPT + 1
    assert arena.separate(LEAST_KEPT) is not small


def test_few_blocks_are_kept_and_none_that_is_small_or_guarded(arena: Arena) -> None:
    blocks = [arena.separate(LEAST_KEPT + n) for n in range(MOST_SPARE + 2)]
    for block in blocks:
        arena.give_back(block)
    arena.give_back(arena.separate(LEAST_KEPT - 1, holes=(0,)))
    taken = [arena.separate(1) for _ in blocks]
    assert {block.address for block in taken if block.size > 1} == {
        block.address for block in blocks[-MOST_SPARE:]
    }
    small = arena.separate(LEAST_KEPT - 1)
    arena.give_back(small)
    assert arena.separate(LEAST_KEPT - 1) is not small


def test_trim_frees_the_blocks(arena: Arena) -> None:
    block = arena.separate(LEAST_KEPT)
    arena.give_back(block)
    arena.trim()
    assert arena.separate(LEAST_KEPT) is not block


def test_no_block_is_kept_while_little_memory_is_left(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("max.engine.run.arena.under_pressure", lambda nbytes: True)
    block = arena.separate(LEAST_KEPT)
    arena.give_back(block)
    assert arena.separate(LEAST_KEPT) is not block


@pytest.fixture
def repeated() -> Model:
    """Sums of sums in rows whose number is read from memory; the second segment needs a temporary of the first."""
    types = [TensorType(DType.float32, [WIDTH], DEVICE), TensorType(DType.int64, [], DEVICE)]
    with Graph("repeated", input_types=types) as graph:
        x, rows = (value.tensor for value in graph.inputs)
        squares = ops.cumsum(x * x, axis=-1)  # a temporary of the first segment
        count = ops.range(0, rows, 1, "rows", dtype=DType.int64, device=DEVICE)
        powers = ops.cast(ops.unsqueeze(count, -1), DType.float32)
        graph.output(ops.cumsum(squares * 1e-3 + powers, axis=-1))
    return InferenceSession(devices=[CPU()]).load(graph)


def expected(x: np.ndarray[Any, Any], rows: int) -> np.ndarray[Any, Any]:
    squares = np.cumsum(x.astype(np.float64) ** 2)
    return np.cumsum(1e-3 * squares + np.arange(rows, dtype=np.float64)[:, None], -1)


def test_executions_that_share_spare_memory_do_not_disturb_each_other(repeated: Model) -> None:
    assert repeated._linked is not None and repeated._linked.later
    rng, failures = np.random.default_rng(0), list[str]()
    inputs = [
        (np.float32(n + 1) * rng.random(WIDTH, np.float32), int(rng.integers(1, 9)))
        for n in range(36)
    ]

    def work(own: list[tuple[np.ndarray[Any, Any], int]]) -> None:
        held: list[Any] = []
        for x, rows in own:
            (made,) = repeated.execute(x, np.int64(rows))
            held.append((made.to_numpy(), x, rows))
        for made, x, rows in held:
            if made.shape != (rows, WIDTH) or not np.allclose(made, expected(x, rows), rtol=1e-3):
                failures.append(f"{rows} rows")

    threads = [threading.Thread(target=work, args=(inputs[n::3],)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_results_of_several_segments_lie_in_memory_that_is_used_again(repeated: Model) -> None:
    x = np.ones(WIDTH, np.float32)
    places = {repeated.execute(x, np.int64(4))[0]._ptr for _ in range(6)}
    assert len(places) == 1
    held = repeated.execute(x, np.int64(4))[0]
    assert repeated.execute(x, np.int64(4))[0]._ptr != held._ptr


class FakeQueue:
    """Stands for a device's queue."""


class CountedDevice:
    """A device whose memory is numbers: what was asked of it, with a limit of one allocation."""

    def __init__(self) -> None:
        self.queue: object = FakeQueue()
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.limit = 1 << 40

    def allocate(self, size: int, holes: tuple[int, ...] = ()) -> Any:
        self.asked.append((size, holes))
        if size > self.limit:
            raise MemoryError
        return FakeMemory(1000 * len(self.asked), f"owner {len(self.asked)}")


class FakeMemory(NamedTuple):
    address: int
    owner: str


@pytest.fixture
def device() -> Any:
    return CountedDevice()


def test_temporaries_share_memory_that_grows_by_half(device: Any) -> None:
    arena = Arena(device)
    assert arena.take(ALIGNMENT) == (1000, "owner 1")
    for size, made in ((1000, 1000), (1001, 1500), (1502, 2250), (9000, 9000), (9001, 13_500)):
        place = arena.take(size)
        assert device.asked[-1] == (made, ())
        count = len(device.asked)
        # what fits, and all that was asked before, lies in the same memory
        assert arena.take(made) == arena.take(1) == place == (1000 * count, f"owner {count}")
        assert len(device.asked) == count


def test_memory_with_guard_pages_is_new_each_time(device: Any) -> None:
    arena = Arena(device)
    assert arena.take(8, (64,)) == (2000, "owner 2")
    assert arena.take(8, (64,)) == (3000, "owner 3")
    assert arena.separate(4 * LEAST_KEPT, (64,)) == (4000, "owner 4", 0)
    assert device.asked[1:] == [(8, (64,)), (8, (64,)), (4 * LEAST_KEPT, (64,))]
    arena.give_back(ArenaBlock(5, "spare", 8 * LEAST_KEPT))
    assert arena.separate(LEAST_KEPT, (64,)).address == 5000
    assert arena.separate(LEAST_KEPT).address == 5


def test_segments_without_temporaries_have_an_address(device: Any) -> None:
    assert Arena(device).separate(0) == (2000, "owner 2", 0)
    assert device.asked[-1] == (1, ())


def test_spare_memory_is_freed_before_less_is_asked_for(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[int] = []
    monkeypatch.setattr("max.engine.run.arena.trim_all", lambda: freed.append(len(device.asked)))
    arena = Arena(device)
    arena.take(1000)
    arena.give_back(ArenaBlock(5, "spare", 8 * LEAST_KEPT))
    device.limit = 1200
    assert arena.take(1100) == (5000, "owner 5")
    # more than half as much again, the least there is, and then no more than is needed
    assert [size for size, _ in device.asked[2:]] == [1500, ALIGNMENT, 1100]
    assert freed == [4]
    assert arena.separate(1).address == 6000  # the spare block is gone
    with pytest.raises(MemoryError):
        arena.take(1201)
    arena.take(1150)
    arena.trim()
    assert device.asked[-1] == (ALIGNMENT, ())
    assert arena.take(ALIGNMENT) == (1000 * len(device.asked), f"owner {len(device.asked)}")


def test_the_last_two_blocks_of_some_size_are_kept(device: Any) -> None:
    arena = Arena(device)
    for number in (1, 2, 3):
        arena.give_back(ArenaBlock(number, "spare", LEAST_KEPT))
    arena.give_back(ArenaBlock(4, "small", LEAST_KEPT - 1))
    assert [arena.separate(LEAST_KEPT).address for _ in range(3)] == [3, 2, 2000]


def test_each_queue_has_one_arena() -> None:
    backend, same, other = CountedDevice(), CountedDevice(), CountedDevice()
    same.queue = backend.queue
    arenas = [arena_of(cast("Any", each)) for each in (backend, same, other)]
    assert arenas[0] is arenas[1] is arena_of(cast("Any", backend)) is not arenas[2]
    assert not same.asked
