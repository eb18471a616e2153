"""Processes of a cluster that are kept ready: which one is taken, and when others are started. No Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from max.serve.process.settings import WorkerSettings
from max.serve.remote import ray_engine, ray_spares
from max.serve.remote.cluster import Node
from max.serve.remote.ray_cluster import RayCluster
from max.serve.remote.ray_engine import ActorEngine, EngineActor, EngineAddress
from max.serve.remote.ray_spares import Spares
from max.serve.routers.address import DoorAddress


class Ready:
    """A process that is ready, on a machine."""

    def __init__(self, node: str) -> None:
        self.found = EngineAddress("h", 1, node, DoorAddress("h", 2, b"k"))
        self.is_lost = self.is_prepared = False
        self.free_cores: Any = 4

    def address(self, timeout: float) -> EngineAddress:
        return self.found

    def prepare(self) -> None:
        self.is_prepared = True

    def has_ended(self) -> bool:
        return self.is_lost

    def reserve(self, cpus: int, seconds: float) -> bool:
        return cpus <= self.free_cores


class Machines:
    """Starts such processes on three machines."""

    def __init__(self) -> None:
        self.excluded: list[str] = []
        self.look: Callable[[], None] = lambda: None
        self.started: list[Ready] = []
        self.ended: list[Ready] = []
        self.fails = False

    @property
    def excluded_nodes(self) -> list[str]:
        """What each look asks for first."""
        self.look()
        return self.excluded

    def start_spare(self, besides: Any) -> Any:
        if self.fails:
            raise OSError("no machine")
        nodes = [node for node in "abc" if node not in {*besides, *self.excluded}]
        if not nodes:
            return None
        self.started.append(Ready(nodes[0]))
        return self.started[-1]

    def end(self, engine: Any) -> None:
        self.ended.append(engine)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def is_over() -> bool:
    """Whether nothing looks after ready processes any more."""
    return all(thread.name != "ready processes" for thread in threading.enumerate())


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Machines:
    monkeypatch.setattr(ray_spares, "LOOK_S", 0.005)
    monkeypatch.setattr(ray_spares, "REST_S", 0.05)
    return Machines()


@pytest.fixture
def spares(machines: Machines) -> Iterator[Spares]:
    spares = Spares(machines, 2)
    until(lambda: len(spares._ready) == 2)
    yield spares
    spares.close()


def test_one_is_taken_where_the_engine_may_run(machines: Machines, spares: Spares) -> None:
    first, second = machines.started
    assert first.is_prepared and second.is_prepared
    assert spares.take({"d"}, 1) is None
    assert spares.take({"b", "d"}, 1) is second  # pyright: ignore[reportComparisonOverlap]
    assert spares.take({"b"}, 1) is None
    # a while later there is another one
    until(lambda: len(spares._ready) == 2)
    assert len(machines.started) == 3 and not machines.ended


def test_one_whose_cores_are_taken_is_ended(machines: Machines, spares: Spares) -> None:
    machines.started[0].free_cores = 1
    assert spares.take({"a"}, 2) is None
    assert machines.ended == machines.started[:1]
    machines.started[1].free_cores = None  # the cluster is lost
    assert spares.take({"b"}, 2) is None
    assert machines.ended == machines.started[:2]


def test_those_that_are_lost_or_on_a_drained_machine_are_replaced(
    machines: Machines, spares: Spares
) -> None:
    first, second = machines.started
    first.is_lost = True
    until(lambda: first in machines.ended and len(spares._ready) == 2)
    machines.excluded.append("b")
    until(lambda: second in machines.ended and len(spares._ready) == 2)
    assert {each.found and each.found.node for each in spares._ready} == {"a", "c"}
    # a machine has one at the most
    machines.excluded.append("c")
    until(lambda: len(machines.ended) == 3)
    time.sleep(0.1)
    assert {each.found and each.found.node for each in spares._ready} == {"a"}
    machines.excluded.clear()
    until(lambda: len(spares._ready) == 2)
    machines.fails = True
    machines.started[-1].is_lost = True
    time.sleep(0.1)
    machines.fails = False
    until(lambda: len(spares._ready) == 2 and machines.started[-1] in spares._ready)


def test_after_the_end_none_is_started(machines: Machines, spares: Spares) -> None:
    spares.close()
    assert machines.ended == machines.started
    assert spares.take({"a", "b"}, 1) is None
    until(is_over)
    spares._look()
    assert len(machines.started) == 2
    spares.close()
    assert machines.ended == machines.started


def test_one_that_a_look_starts_at_the_end_is_ended(machines: Machines) -> None:
    """The look has seen that one is missing, and has not started it yet."""
    starts, go_on = threading.Event(), threading.Event()

    def start_spare(besides: Any) -> Any:
        starts.set()
        assert go_on.wait(20)
        return Machines.start_spare(machines, besides)

    machines.start_spare = start_spare
    spares = Spares(machines, 1)
    assert starts.wait(20)
    closing = threading.Thread(target=spares.close)
    closing.start()
    until(spares._closing.is_set)
    go_on.set()
    closing.join(20)
    assert not closing.is_alive()
    # whoever has closed them may rely on it
    assert len(machines.started) == 1 and machines.started[0] in machines.ended
    until(is_over)
    assert not spares._ready


@pytest.mark.parametrize("is_late", [False, True])
def test_one_that_starts_at_the_end_is_ended(machines: Machines, is_late: bool) -> None:
    """Before its address is known, and (late) when it is found ready just after the end."""
    asked, is_ended = threading.Event(), threading.Event()

    class Slow(Ready):
        def address(self, timeout: float) -> EngineAddress:
            asked.set()
            assert is_ended.wait(20)
            if not is_late:
                raise OSError("the engine was ended while it started")
            return self.found

    made = Slow("a")
    machines.start_spare = lambda besides: made
    spares = Spares(machines, 1)
    assert asked.wait(20)
    spares.close()
    assert made in machines.ended
    is_ended.set()
    until(is_over)
    assert not spares._ready and spares.take({"a"}, 1) is None


def test_one_that_is_missing_when_they_are_closed_is_not_started(machines: Machines) -> None:
    """The look began before the end, and comes to the start after it."""
    looks, go_on = threading.Event(), threading.Event()

    def look() -> None:
        looks.set()
        assert go_on.wait(20)

    machines.look = look
    spares = Spares(machines, 1)
    assert looks.wait(20)
    spares.close()
    go_on.set()
    until(is_over)
    assert not machines.started


class FakeRay:
    """A cluster whose actors reserve cores by placement groups; an actor is also the handle of its methods."""

    def __init__(self, is_free: bool) -> None:
        self.is_free = is_free
        self.made, self.removed, self.killed = [], [], []
        self.util = SimpleNamespace(
            placement_group=self.place, remove_placement_group=self.removed.append
        )
        self.reserve = SimpleNamespace(remote=self.call)
        self.answers = True

    def call(self, cpus: int, seconds: int) -> Any:
        return lambda: EngineActor.reserve(None, cpus, seconds)  # pyright: ignore[reportArgumentType]

    def wait(self, asked: list[Any], timeout: float) -> Any:
        time.sleep(0 if self.answers else timeout)
        return (asked, []) if self.answers else ([], asked)

    def get(self, asked: Any) -> Any:
        return asked()

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "node")

    def place(self, bundles: Any, bundle_label_selector: Any) -> Any:
        self.made.append((bundles, bundle_label_selector))
        return SimpleNamespace(wait=lambda seconds: self.is_free)

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed.append(actor)


@pytest.mark.parametrize("is_free", [True, False])
def test_cores_are_given_back_once(is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(is_free)
    monkeypatch.setattr(ray_engine, "ray_module", lambda: ray)
    engine = ActorEngine(ray, ray, b"key")
    assert engine.reserve(2, 1) is is_free
    # on its own machine
    assert ray.made == [([{"CPU": 2}], [{"ray.io/node-id": "node"}])]
    assert len(ray.removed) == (0 if is_free else 1)
    engine.end()
    engine.end()
    assert len(ray.removed) == 1 and ray.killed == [ray]
    assert not engine.reserve(2, 1) and len(ray.made) == 1
    with pytest.raises(OSError, match="was ended"):
        engine.prepare()
    with pytest.raises(OSError, match="was ended"):
        engine.run(WorkerSettings({}))


def test_a_process_that_does_not_say_whether_cores_are_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_engine, "_ASK_S", 0.2)
    ray = FakeRay(True)
    ray.answers = False
    with pytest.raises(TimeoutError):
        ActorEngine(ray, ray).reserve(2, 0)


def test_one_that_would_outlive_its_owner_ends_when_nobody_asks_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()
    monkeypatch.setattr(ray_engine, "OWNER_S", 0.4)
    monkeypatch.setattr(ray_engine, "end_soon", ends.set)
    actor = EngineActor(b"k" * 32, 0, outlives_owner=True)
    try:
        for _ in range(8):
            assert not actor.has_ended(0.1)
        assert not ends.is_set()
        assert ends.wait(10)
    finally:
        actor._host.close()
        actor._host.shared_cache.close()


@pytest.mark.parametrize("outlives", [False, True])
def test_those_of_a_server_with_routers_have_names(outlives: bool) -> None:
    """By its name the next owner finds the engine that one of them has become."""
    made: list[dict[str, Any]] = []

    class Remote:
        def __init__(self, _: Any) -> None:
            pass

        def options(self, **options: Any) -> Remote:
            made.append(options)
            return self

        def remote(self, key: bytes, cpus: int, outlives_owner: bool) -> str:
            assert cpus == 0 and outlives_owner is outlives
            return "actor"

    cluster = RayCluster.__new__(RayCluster)
    cluster._engines, cluster._excluded, cluster._outlives = set(), set(), outlives
    cluster._ray, cluster.cpus = SimpleNamespace(remote=Remote), 3
    cluster.nodes = lambda: [Node("x", "h", 4, True)]  # pyright: ignore[reportAttributeAccessIssue]
    cluster._starts, cluster._is_closed = threading.Lock(), False
    spare = cluster.start_spare(())
    assert spare is not None and made[0]["num_cpus"] == 0
    assert spare.name == made[0].get("name", "") and bool(spare.name) is outlives
    assert made[0].get("lifetime") == ("detached" if outlives else None)
    # Ray would start a cluster of its own for one more
    cluster._started = False
    cluster.close()
    with pytest.raises(OSError, match="was left"):
        cluster.start_spare(())
    assert len(made) == 1


def test_an_engine_whose_ready_process_is_lost_gets_a_new_one() -> None:
    """What is ready is tried first; one that cannot be reached is ended, and a process is started."""
    cluster = RayCluster.__new__(RayCluster)
    cluster._engines, cluster._excluded, cluster._outlives = set(), {"drained"}, False
    cluster.nodes = lambda: [Node(n, "h", 4, n != "lost") for n in ("x", "drained", "lost")]  # pyright: ignore[reportAttributeAccessIssue]
    cluster.cpus = 3
    asked: list[Any] = []
    left = [Ready("x"), Ready("x")]

    def take(nodes: Any, cpus: int) -> Any:
        asked.append((nodes, cpus))
        return left.pop() if left else None

    cluster._spares = SimpleNamespace(take=take)  # pyright: ignore[reportAttributeAccessIssue]
    ran: list[Any] = []
    made = SimpleNamespace(address=lambda seconds: None)

    def run(engine: Any, settings: Any, cpus: int = 0) -> Any:
        ran.append((engine, cpus))
        if engine is not made:
            raise ConnectionRefusedError("gone")
        return "worker"

    ended: list[Any] = []
    cluster._run, cluster.end = run, ended.append  # pyright: ignore[reportAttributeAccessIssue]
    cluster._actor = lambda cpus, placement: made  # pyright: ignore[reportAttributeAccessIssue]
    assert cluster.start_worker(WorkerSettings({})) == "worker"
    assert asked == [({"x"}, 3)] * 3 and len(ended) == 2
    assert [cpus for _, cpus in ran] == [3, 3, 0]
    assert threading.active_count() < 50
