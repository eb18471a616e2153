"""Counts and turns that the processes of a server share in a file, against counts in memory."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from max.serve.errors import ApiError
from max.serve.http.middleware import key_digest
from max.serve.models.admission import Admission, KeyLimits
from max.serve.routers import count_file
from max.serve.routers.count_file import CountFile, counts_of

KEYS = ["", "a", "b"]


@contextmanager
def process(action: Callable[[], object]) -> Iterator[int]:
    """A process that has run an action and waits to be killed, as it is at the end."""
    done, told = os.pipe()
    with warnings.catch_warnings():
        # the child uses no thread of this process
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        try:
            action()
            os.write(told, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(told)
    try:
        assert os.read(done, 1) == b"1"
        yield pid
    finally:
        os.close(done)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_counts_are_the_sums_of_all_rows(tmp_path: Path) -> None:
    """Random changes by three processes of one file, each of its own row."""
    draw, path = random.Random(1), tmp_path / "counts"
    files = [CountFile(path, 3, row, 2, KEYS) for row in range(3)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "keys' counts are nobody else's"
    assert [file.row for file in files] == [0, 1, 2]
    names: list[Any] = ["bodies", 0, 1, *KEYS]
    expected = {(row, name): 0 for row in range(3) for name in names}
    buckets: dict[str, tuple[float, float]] = {}

    def total(name: Any) -> int:
        return sum(expected[row, name] for row in range(3))

    for _ in range(400):
        row, name, count = draw.randrange(3), draw.choice(names), draw.randrange(-3, 9)
        file = files[row]
        match draw.randrange(8):
            case 0:
                bucket = (draw.random() * 9, 1 + draw.random())
                buckets[draw.choice(KEYS)] = bucket
                key = next(key for key, each in buckets.items() if each == bucket)
                file.set_bucket(key, bucket)
                continue
            case 1 if draw.random() < 0.2:
                files[draw.randrange(3)].clear(row)
                expected |= {(row, each): 0 for each in names}
                continue
            case _:
                pass
        if isinstance(name, str) and name != "bodies":
            file.add_open(name, count)
            expected[row, name] += count
        else:
            tally = file.bodies if name == "bodies" else file.model(name)
            most = draw.choice([None, total(name) + count, total(name) + count - 1])
            fits = most is None or count <= 0 or most == total(name) + count
            assert tally.add(count, most) is fits
            expected[row, name] += count * fits
        for reader in files:
            assert reader.bodies.total == total("bodies")
            assert [reader.model(number).total for number in range(2)] == [total(0), total(1)]
            assert [reader.open(key) for key in KEYS] == [total(key) for key in KEYS]
            assert [reader.bucket(key) for key in KEYS] == [buckets.get(key) for key in KEYS]
    # a process that comes later finds them
    assert CountFile(path, 3, 2, 2, KEYS).bodies.total == total("bodies")


def test_counts_of_a_process_that_was_killed(tmp_path: Path) -> None:
    """They are gone with its row, and nothing else."""
    mine = CountFile(tmp_path / "counts", 4, 0, 2, KEYS)
    mine.model(0).add(7)

    def count(row: int) -> None:
        file = CountFile(tmp_path / "counts", 4, row, 2, KEYS)
        for _ in range(300):
            for step in (3, 2, -3):
                assert file.model(1).add(step, 10**9)
            file.bodies.add(10)

    with process(lambda: count(2)):
        with process(lambda: count(1)):
            assert mine.model(1).total == 2 * 600 and mine.bodies.total == 2 * 3000
        mine.clear(1)
        assert mine.model(1).total == 600 and mine.model(0).total == 7


def test_limits_are_those_of_all_processes(tmp_path: Path) -> None:
    """Two rows of one file stand for two processes."""
    keys, now = ["", "k"], [50.0]
    files = [CountFile(tmp_path / "counts", 3, row, 1, keys) for row in range(2)]
    queues = [Admission(2, 1) for _ in files]
    for queue, file in zip(queues, files, strict=True):
        queue.tally = file.model(0)
    with queues[0].enter(2), queues[1].enter():
        assert [queue.waiting for queue in queues] == [1, 1]
        for queue in queues:
            with pytest.raises(ApiError, match="1 requests wait"), queue.enter():
                pass
    assert queues[0].open == queues[1].open == 0
    limits = [KeyLimits(2, 4, clock=lambda: now[0], counts=file) for file in files]
    with limits[0].enter("k"), limits[1].enter("k"):
        for limit in limits:
            with pytest.raises(ApiError, match="2 open requests"), limit.enter("k"):
                pass
        with limits[1].enter(""):
            pass
    for _ in range(2):
        with limits[1].enter("k"):
            pass
    for limit in limits:  # four requests a minute, by whichever process
        with pytest.raises(ApiError, match="4 requests a minute") as refused, limit.enter("k"):
            pass
        assert refused.value.headers["Retry-After"] == "15"
    now[0] += 15
    with limits[0].enter("k"):
        pass
    with pytest.raises(ApiError, match="4 requests a minute"), limits[1].enter("k"):
        pass
    # a process that dies holds nothing, and the buckets stay
    files[1].add_open("k", 2)
    now[0] += 60
    with pytest.raises(ApiError, match="2 open requests"), limits[0].enter("k"):
        pass
    files[0].clear(1)
    with limits[0].enter("k"):
        pass


def test_a_limit_is_decided_by_one_process_at_a_time(tmp_path: Path) -> None:
    """Two processes that both see room for one more."""
    mine, path = CountFile(tmp_path / "counts", 2, 0, 1, KEYS), tmp_path / "added"

    def add() -> None:
        file = CountFile(tmp_path / "counts", 2, 1, 1, KEYS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            waiting = os.fork()
        if not waiting:
            path.write_text(str(file.model(0).add(1, 1)))
            os._exit(0)

    with mine.hold_lock():
        with process(add):
            time.sleep(0.02)
            assert not path.exists(), "it waits for the lock"
            mine.add(1, 1)
    for _ in range(1000):
        if path.exists() and path.read_text():
            break
        time.sleep(0.005)
    assert path.read_text() == "False" and mine.model(0).total == 1


def test_the_turn_to_try_a_request_is_that_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    file = CountFile(path, 2, 0, 3, [""])
    turn, other = file.turn(1), file.turn(2)
    held: list[CountFile] = []

    def take() -> None:
        held.append(CountFile(path, 2, 1, 3, [""]))  # the end of its memory would free its locks
        assert held[0].turn(0).take() and held[0].turn(1).take()

    with process(take):
        assert turn.is_taken and not turn.take() and not other.is_taken
        with file.hold_lock():  # counts are others' locks
            assert other.take()
    # a process that dies leaves its turn
    assert not turn.is_taken and turn.take() and not turn.is_taken and turn.take()
    turn.leave()
    turn.leave()


def test_a_turn_stays_taken_for_a_while_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(count_file, "HELD_S", 0.05)
    path = tmp_path / "counts"
    file = CountFile(path, 2, 0, 1, [""])
    turn = file.turn(0)

    def is_taken() -> bool:
        def look() -> None:
            found.write_text(str(CountFile(path, 2, 1, 1, [""]).turn(0).is_taken))

        found = tmp_path / "found"
        with process(look):
            return found.read_text() == "True"

    async def test() -> None:
        # two replicas of this process try requests
        assert turn.take() and turn.take()
        with file.hold_lock():  # of other bytes
            pass
        turn.leave()
        assert is_taken()
        begin = time.monotonic()
        turn.leave(has_lost=True)
        while is_taken():
            assert time.monotonic() - begin < 5
            await asyncio.sleep(0.005)
        assert time.monotonic() - begin >= 0.05

    asyncio.run(test())


def test_the_counts_of_a_server(tmp_path: Path) -> None:
    """A count for each key once, and one for clients without a key."""
    settings: Any = SimpleNamespace(api_keys=["k", "l", "k"])
    first, second = (counts_of(settings, str(tmp_path), 2, row, 1) for row in range(2))
    for count, key in enumerate(("", key_digest("k"), key_digest("l")), 1):
        first.add_open(key, count)
        assert second.open(key) == count
    assert (tmp_path / "counts").is_file() and (first.row, second.row) == (0, 1)
