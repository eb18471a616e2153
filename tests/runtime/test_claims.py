"""Claims of entries: one process makes what others wait for, and no wait is for nothing."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from max._host import claims
from max._host.claims import CLAIMS_FOLDER, claim_entry

fcntl = pytest.importorskip("fcntl")

# is given a folder, a name, what becomes of the entry, the seconds that it takes, and a file that it waits for
PROCESS = """
import os, sys, time
from pathlib import Path
from max._host import claims
folder, name, how, seconds = Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4])
entry = folder / name
claims.HEARTBEAT_TIMEOUT_S = claims.WAIT_LIMIT_S = 300  # the machine may be busy
with claims.claim_entry(folder, name, entry.exists, lambda: print("waits", flush=True)) as claim:
    if claim.is_made:
        print("takes", flush=True)
    else:
        print("makes", flush=True)
        time.sleep(seconds)
        if how == "other":
            (folder / f"{name}.claimed").touch()
        while len(sys.argv) > 5 and not (folder / sys.argv[5]).exists():
            time.sleep(0.01)
        if how == "other":
            begin = time.monotonic()
            with claims.claim_entry(folder, sys.argv[6], (folder / sys.argv[6]).exists) as inner:
                pass
            print(f"{time.monotonic() - begin:.3f}", flush=True)
        if how != "drop":
            entry.write_text("made")
"""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process begins."""
    monkeypatch.setattr(claims, "_process", claims._Process())  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Any]:
    """Starts a process that claims a name; it has printed its first word when it is returned, if it has to."""
    started: list[subprocess.Popen[str]] = []

    def start(name: str, how: str = "keep", seconds: float = 0.0, *more: str) -> Any:
        command = [sys.executable, "-c", PROCESS, str(tmp_path), name, how, str(seconds), *more]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def hold(folder: Path, name: str) -> int:
    """A claim of somebody else, until its descriptor is closed."""
    (folder / CLAIMS_FOLDER).mkdir(exist_ok=True)
    file = os.open(folder / CLAIMS_FOLDER / name, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


def take(folder: Path, name: str = "a") -> bool:
    """Whether an entry was made by another process."""
    with claim_entry(folder, name, (folder / name).exists) as claim:
        return claim.is_made


def test_one_of_several_processes_makes_an_entry(tmp_path: Path, processes: Any) -> None:
    first = processes("a", "keep", 0.0, "all wait")
    assert first.stdout.readline() == "makes\n"
    others = [processes("a") for _ in range(3)]
    assert [each.stdout.readline() for each in others] == ["waits\n"] * 3
    (tmp_path / "all wait").touch()
    assert [each.communicate(timeout=60)[0] for each in others] == ["takes\n"] * 3
    assert first.wait(60) == 0
    assert not list((tmp_path / CLAIMS_FOLDER).iterdir())


def test_the_entry_of_a_process_that_is_killed_is_made_by_one_other(processes: Any) -> None:
    first = processes("a", "keep", 600)
    assert first.stdout.readline() == "makes\n"
    others = [processes("a", "keep", 0.5) for _ in range(3)]
    assert [each.stdout.readline() for each in others] == ["waits\n"] * 3
    first.send_signal(signal.SIGKILL)
    words = sorted(each.communicate(timeout=60)[0] for each in others)
    assert words == ["makes\n", "takes\n", "takes\n"]


def test_processes_do_not_wait_for_each_other(processes: Any) -> None:
    # each asks for the other's entry when both have claimed their own
    pair = [processes(*words) for words in [
        ("a", "other", 0, "b.claimed", "b"), ("b", "other", 0, "a.claimed", "a"),
    ]]  # fmt: skip
    for each in pair:
        assert each.stdout.readline() == "makes\n"
        assert float(each.stdout.readline()) < 60


class Clock:
    """The seconds of `max._host.claims`, in which a sleep takes no time.

    Args:
        after: Is called with the seconds after each sleep.
    """

    def __init__(self, after: Callable[[float], None] = lambda now: None) -> None:
        self.now, self._after = 0.0, after

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self._after(self.now)


def test_a_silent_holder_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(claims, "time", clock)
    files = [hold(tmp_path, name) for name in "ab"]
    assert not take(tmp_path, "a")
    assert claims.HEARTBEAT_TIMEOUT_S <= clock.now < claims.HEARTBEAT_TIMEOUT_S + 1
    # nor is it, or another one, ever again
    clock.now = 0.0
    assert not take(tmp_path, "a") and not take(tmp_path, "b")
    assert clock.now == 0
    for file in files:
        os.close(file)


@pytest.mark.parametrize("made_at", [30.0, 1e6])
def test_steps_prolong_a_wait_up_to_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_at: float
) -> None:
    file = hold(tmp_path, "a")
    holder, steps = claims.Claim(file), [0.0]

    def work(now: float) -> None:
        if now - steps[-1] > claims.HEARTBEAT_TIMEOUT_S - 1:
            steps.append(now)
            time.sleep(0.02)  # a file's time has ticks
            holder.heartbeat("a step", 1, 2)
        if now > made_at:
            (tmp_path / "a").touch()

    clock = Clock(work)
    monkeypatch.setattr(claims, "time", clock)
    is_made = take(tmp_path)
    os.close(file)
    end = min(made_at, claims.WAIT_LIMIT_S)
    assert is_made is (made_at < claims.WAIT_LIMIT_S)
    assert end <= clock.now < end + 1 and len(steps) > 3


def test_what_is_not_kept_is_waited_for_once(tmp_path: Path, processes: Any) -> None:
    first = processes("a", "drop", 0.0, "first")
    assert first.stdout.readline() == "makes\n"
    others = [processes("a", "drop", 0.0, "others") for _ in range(3)]
    assert [each.stdout.readline() for each in others] == ["waits\n"] * 3
    (tmp_path / "first").touch()
    # side by side, not one after another
    assert [each.stdout.readline() for each in others] == ["makes\n"] * 3
    (tmp_path / "others").touch()
    assert [each.wait(60) for each in others] == [0] * 3


def test_an_entry_that_was_made_before_the_claim_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert take(tmp_path)
    assert not list((tmp_path / CLAIMS_FOLDER).iterdir())


def test_a_claim_says_whether_it_is_awaited(tmp_path: Path, processes: Any) -> None:
    with claim_entry(tmp_path, "a", (tmp_path / "a").exists) as claim:
        assert not claim.is_awaited
        other = processes("a")
        assert other.stdout.readline() == "waits\n"
        end = time.monotonic() + 60
        while not claim.is_awaited:
            assert time.monotonic() < end
        (tmp_path / "a").touch()
    assert other.communicate(timeout=60)[0] == "takes\n"
    assert not claims.Claim(None).is_awaited


def test_a_claim_ends_with_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), claim_entry(tmp_path, "a", (tmp_path / "a").exists):
        raise KeyError
    os.close(hold(tmp_path, "a"))
    # and others are waited for again: only who holds a claim waits for none
    file = hold(tmp_path, "b")
    threading.Timer(0.3, (tmp_path / "b").touch).start()
    assert take(tmp_path, "b")
    os.close(file)


@pytest.fixture
def no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait is an error."""
    monkeypatch.setattr(claims, "POLL_S", -1.0)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_without_locks_nobody_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_sleep: None, number: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(claims.fcntl, "flock", refuse)
    assert not take(tmp_path)


def test_a_file_system_that_is_lost_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, clock = hold(tmp_path, "a"), Clock()
    monkeypatch.setattr(claims, "time", clock)

    def lost(*_: Any) -> None:
        raise OSError(errno.ESTALE, "stale")

    with monkeypatch.context() as patched:
        patched.setattr(claims.os, "fstat", lost)
        assert not take(tmp_path)
    assert clock.now == 0
    os.close(file)


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not take(tmp_path / "file" / "below")


def test_a_link_is_not_followed(tmp_path: Path, no_sleep: None) -> None:
    foreign = tmp_path / "foreign"
    foreign.touch()
    file = os.open(foreign, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_EX)
    (tmp_path / CLAIMS_FOLDER).mkdir()
    (tmp_path / CLAIMS_FOLDER / "a").symlink_to(foreign)
    assert not take(tmp_path)
    os.close(file)
