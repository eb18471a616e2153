"""Forks of a process that compiles: which locks a fork takes, how long it waits, and what its child may do."""

from __future__ import annotations

import os
import sys
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from max._backends.cpu.runtime import compiler_forks
from max._backends.cpu.runtime.compiler_forks import FORK_SECONDS, ForkGuard

MESSAGE = "forked while another thread of its parent compiled"


class Lock:
    """A lock that takes `seconds` to be free; it writes down what is done with it."""

    def __init__(self, world: World, name: str, seconds: float = 0.0) -> None:
        self.world, self.name, self.seconds = world, name, seconds

    def acquire(self, timeout: float) -> bool:
        assert timeout >= 0.0
        self.world.now += min(self.seconds, timeout)
        taken = self.seconds <= timeout
        self.world.log.append(f"{'take' if taken else 'miss'} {self.name}")
        return taken

    def release(self) -> None:
        self.world.log.append(f"free {self.name}")


class World:
    """The clock, the locks and the compilations of a process, and the hooks of its guard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.log = 1000.0, list[str]()
        self.locks: list[Any] = [Lock(self, "a"), Lock(self, "b")]
        self.tasks: list[Any] = []
        self.ends = 0.0
        """When the last of the compilations ends."""
        self.hooks: dict[str, Any] = {}
        self.freed: list[Any] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(compiler_forks, "time", clock)
        monkeypatch.setattr(compiler_forks, "free", self.freed.append)
        monkeypatch.setattr(compiler_forks, "in_child", self.children)
        monkeypatch.setattr(os, "register_at_fork", self.hooks.update, raising=False)
        ffi = SimpleNamespace(lib=SimpleNamespace(_lock=SimpleNamespace(_lock=Lock(self, "llvm"))))
        monkeypatch.setitem(sys.modules, "llvmlite.binding.ffi", ffi)
        self.guard = ForkGuard(
            lambda: self.locks,
            lambda: self.tasks if self.now < self.ends else [],
            lambda: self.log.append("forget"),
        )

    def children(self, function: Any) -> None:
        self.hooks["child"] = function

    def sleep(self, seconds: float) -> None:
        assert seconds == 0.001
        self.now += seconds

    def fork(self, side: str) -> list[str]:
        """What a fork does with locks, on the side of the parent or of the child."""
        self.log = []
        self.hooks["before"]()
        self.hooks["after_in_parent" if side == "parent" else "child"]()
        return self.log

    def refuses(self) -> bool:
        """Whether LLVM cannot be used."""
        try:
            self.guard.check()
        except RuntimeError as error:
            assert MESSAGE in str(error)
            return True
        return False


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


TAKEN, FREED = ["take a", "take b", "take llvm"], ["free llvm", "free b", "free a"]


def test_a_fork_holds_all_locks(world: World) -> None:
    """In their order, that of llvmlite last."""
    world.hooks["child"]()
    assert not world.refuses()
    assert world.fork("parent") == TAKEN + FREED and not world.refuses()
    assert world.fork("child") == [*TAKEN, "forget", *FREED] and not world.refuses()
    assert not world.freed
    del sys.modules["llvmlite.binding.ffi"]
    assert world.fork("parent") == ["take a", "take b", "free b", "free a"]


def test_forks_inside_forks_free_their_own_locks(world: World) -> None:
    world.hooks["before"]()
    world.locks = [Lock(world, "c")]
    world.hooks["before"]()
    world.log.clear()
    world.hooks["after_in_parent"]()
    assert world.log == ["free llvm", "free c"]
    world.hooks["after_in_parent"]()
    assert world.log[2:] == FREED
    # of a fork whose first hook a signal handler has left out
    world.hooks["after_in_parent"]()
    assert world.log[2:] == FREED


@pytest.mark.parametrize(
    ("seconds", "takes"),
    [((4.0, 6.0), True), ((4.0, 6.5), False), ((11.0, 0.0), False), ((10.0, 1.0), False)],
)
def test_a_fork_waits_for_locks_up_to_a_limit(
    world: World, seconds: tuple[float, float], takes: bool
) -> None:
    """The limit is that of all locks together."""
    world.locks = [Lock(world, name, s) for name, s in zip("ab", seconds, strict=True)]
    log = world.fork("parent")
    assert world.now == 1000.0 + FORK_SECONDS
    assert not world.refuses()
    if takes:
        assert log == TAKEN + FREED
    else:
        held = ["a"] if seconds[0] <= FORK_SECONDS else []
        assert [entry for entry in log if "miss" not in entry] == [
            *(f"take {name}" for name in held),
            *(f"free {name}" for name in held),
        ]


@pytest.mark.parametrize("missed", ["a", "b", "llvm"])
def test_a_child_without_a_lock_cannot_compile(
    world: World, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    """Its parent can, and so can the children of later forks."""
    late = Lock(world, missed, FORK_SECONDS + 1.0)
    world.tasks = [Future(), Future()]
    if missed == "llvm":
        ffi = SimpleNamespace(lib=SimpleNamespace(_lock=SimpleNamespace(_lock=late)))
        monkeypatch.setitem(sys.modules, "llvmlite.binding.ffi", ffi)
    else:
        world.locks["ab".index(missed)] = late
    world.fork("parent")
    assert not world.refuses()
    late.seconds = 0.0
    assert world.fork("child")[-1] == "free a" and not world.refuses()
    assert not world.freed
    late.seconds = FORK_SECONDS + 1.0
    world.hooks["before"]()
    world.log.clear()
    world.ends = world.now + 1.0
    world.hooks["child"]()
    assert world.refuses()
    # threads of the parent may have had the locks of its tasks
    assert world.freed == [task._condition._lock for task in world.tasks]
    held = {"a": [], "b": ["free a"], "llvm": ["free b", "free a"]}[missed]
    assert world.log == ["forget", *held]


@pytest.mark.parametrize(("seconds", "fits"), [(0.0105, True), (9.999, True), (10.5, False)])
def test_a_fork_waits_for_compilations(world: World, seconds: float, fits: bool) -> None:
    """They need the lock of llvmlite, which a fork takes after them."""
    world.tasks, world.ends = [Future()], world.now + seconds
    assert world.fork("child") == (
        [*TAKEN, "forget", *FREED] if fits else ["take a", "take b", "forget", "free b", "free a"]
    )
    assert world.refuses() is not fits
    assert world.now - 1000.0 == pytest.approx(min(seconds, FORK_SECONDS), abs=0.0011)
    assert bool(world.freed) is not fits


def test_a_compilation_may_end_at_the_limit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for once more at the limit itself."""
    world.tasks, world.ends = [Future()], world.now + FORK_SECONDS + 0.25
    monkeypatch.setattr(world, "sleep", None)
    moves = iter((FORK_SECONDS, 0.25))
    clock = SimpleNamespace(monotonic=lambda: world.now)
    clock.sleep = lambda seconds: setattr(world, "now", world.now + next(moves))
    monkeypatch.setattr(compiler_forks, "time", clock)
    assert world.fork("child") == [*TAKEN, "forget", *FREED] and not world.refuses()


def test_a_system_without_forks(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    monkeypatch.delattr(os, "register_at_fork")
    world.hooks.clear()
    ForkGuard(lambda: [], list, lambda: None).check()
    assert [*world.hooks] == ["child"]
