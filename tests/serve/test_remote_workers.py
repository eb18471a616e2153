"""Engines at addresses: connections, signs of life, losses; and the decisions of the autoscaler. No Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from max._host.machine import logical_cpus
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.events import TokensGenerated
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.process.settings import WatchLimits, WorkerSettings
from max.serve.remote import autoscaler, connections, host, ray_cluster
from max.serve.remote.autoscaler import Autoscaler, Load, ScaleDecision, ScalePolicy
from max.serve.remote.cluster import Node
from max.serve.remote.connections import Acceptor, accept, close_listener, connect, listen
from max.serve.remote.cores import ClaimedCores
from max.serve.remote.host import EngineHost
from max.serve.remote.ray_cluster import RayCluster
from max.serve.remote.worker import RemoteWorker
from max.serve.worker.client import EngineClient, EngineState
from max.serve.worker.engine_state import NoMachineError
from max.serve.worker.started_worker import refused_start
from tests.pipelines.counting_pipeline import CountingPipeline, expected
from tests.serve.test_engine_client import Workers, _all, until

KEY = b"k" * 32


class Host(RemoteWorker):
    """An engine in threads of this process, at an address."""

    def __init__(self, silence_s: float = 5.0) -> None:
        self.engine = EngineHost(KEY, "127.0.0.1")
        self.thread = threading.Thread(
            target=self.engine.run, args=(WorkerSettings({}, unhealthy_s=silence_s),), daemon=True
        )
        self.thread.start()
        super().__init__(
            "127.0.0.1", self.engine.port, KEY, silence_s, self.engine.close, self.thread.join
        )
        self.waits: list[float | None] = []

    def join(self, timeout: float | None = None) -> None:
        self.waits.append(timeout)
        super().join(timeout)


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines without tensors."""

    def run(settings: WorkerSettings, connection, signs, door=None) -> None:
        signs.note_load("opening the model", 1, 3)
        time.sleep(0.05)
        channel = ConnectionChannel(connection, MessageCodec())
        serve(
            CountingPipeline(400),
            SchedulerLimits(max_batch_size=8, max_num_steps=1),
            channel,
            0.1,
            signs,
        )

    monkeypatch.setattr(host, "run_engine", run)


def run(count: int, test: Callable, limits: WatchLimits | None = None) -> None:
    workers: list[Host] = []

    def start() -> Host:
        workers.append(Host())
        return workers[-1]

    async def whole() -> None:
        client = EngineClient(start, None, limits or WatchLimits())
        for _ in range(count - 1):
            client.add_replica(start)
        client.start()
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                await test(client, workers)
        finally:
            await client.close(finish=False, timeout=1)
        for worker in workers:
            worker.thread.join(10)
            assert not worker.thread.is_alive()

    asyncio.run(whole())


async def answer(client: EngineClient, name: str, *prompt: int, new: int = 20) -> list[int]:
    events = await _all(client, GenerationRequest(name, prompt, len(prompt) + new))
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.tokens]


def test_answers_of_engines_at_addresses() -> None:
    async def test(client: EngineClient, workers: list[Host]) -> None:
        draw = random.Random(0)
        prompts = [tuple(draw.choices(range(90), k=draw.randint(1, 9))) for _ in range(20)]
        answers = await asyncio.gather(
            *(answer(client, f"r{i}", *prompt) for i, prompt in enumerate(prompts))
        )
        assert answers == [expected(prompt, 20) for prompt in prompts]
        assert client.responds and client.worker_pid is None

    run(2, test)


def test_a_connection_that_is_lost() -> None:
    """The stream goes on with the other engine, and a new one is started in place of the lost one."""

    async def test(client: EngineClient, workers: list[Host]) -> None:
        reading = [asyncio.ensure_future(answer(client, f"r{i}", i, new=150)) for i in range(6)]
        await until(lambda: sum(len(client.of(each)) > 0 for each in client.replicas) == 2)
        lost = workers[0]
        lost.channel._channel._connection.close()  # as a network that ends it
        assert await asyncio.gather(*reading) == [expected((i,), 150) for i in range(6)]
        await until(lambda: [each.state for each in client.replicas] == [EngineState.READY] * 2)
        assert client.restarts == 1 and len(workers) == 3
        assert lost.waits[0] == 0.2

    # the engine does not know of the loss: it ends when it is killed
    run(2, test, WatchLimits(end_s=0.2))


def test_a_rolling_upgrade_under_load() -> None:
    async def test(client: EngineClient, workers: list[Host]) -> None:
        ended = asyncio.Event()
        answers = 0

        async def ask(number: int) -> None:
            nonlocal answers
            while not ended.is_set():
                assert await answer(client, f"r{number}-{answers}", number) == expected(
                    (number,), 20
                )
                answers += 1

        asking = [asyncio.ensure_future(ask(number)) for number in range(5)]
        before = list(client.replicas)
        for replica in before:
            await client.replace_replica(replica)
        await asyncio.sleep(0.1)
        ended.set()
        await asyncio.gather(*asking)
        assert answers > 5 and len(workers) == 4
        assert not set(before) & set(client.replicas) and client.restarts == 0

    run(2, test)


def test_a_client_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "CONNECT_S", 1.0)
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    accepted = []
    purposes = ("b", "a")

    def take() -> None:
        accepted.extend(accept(Acceptor(listener, KEY), purposes))
        close_listener(listener)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    with pytest.raises(OSError, match="does not know the key"):
        connect("127.0.0.1", port, b"x" * 32, "a")
    draw = random.Random(1)
    for size in (0, 1, 4, 5000):
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.sendall(draw.randbytes(size))
    with socket.create_connection(("127.0.0.1", port), 10):  # one that is silent
        own = connect("127.0.0.1", port, KEY, "a")
        again = connect("127.0.0.1", port, KEY, "a")
        other = connect("127.0.0.1", port, KEY, "neither")
        last = connect("127.0.0.1", port, KEY, "b")
    thread.join(20)
    for refused in (again, other):
        with pytest.raises((OSError, EOFError)):
            refused.recv_bytes()
    last.send_bytes(b"last")
    assert accepted.pop(0).recv_bytes() == b"last"
    own.send_bytes(b"x" * 100_000)
    assert accepted[0].recv_bytes() == b"x" * 100_000
    time.sleep(1.5)  # the timeout is of the proof only
    accepted[0].send_bytes(b"y")
    assert own.recv_bytes() == b"y"
    own.close()
    with pytest.raises(OSError):
        connect("127.0.0.1", port, KEY, "a")


def test_connections_that_nobody_asks_for_end_with_the_socket() -> None:
    listener = listen("127.0.0.1")
    port = listener.getsockname()[1]
    acceptor = Acceptor(listener, KEY)
    own, late = connect("127.0.0.1", port, KEY, "a"), connect("127.0.0.1", port, KEY, "b")
    taken = accept(acceptor, ["a"])
    gc.disable()
    try:
        close_listener(listener)
        del acceptor
        assert late.poll(10)
        with pytest.raises((OSError, EOFError)):
            late.recv_bytes()
    finally:
        gc.enable()
    own.send_bytes(b"x")
    assert taken[0].recv_bytes() == b"x"


def test_signs_of_life() -> None:
    worker = Host(silence_s=0.25)
    until_s = time.monotonic() + 20
    seen = set()
    while time.monotonic() < until_s and "opening the model 1/3" not in seen:
        seen.add(worker.signs.loading)
        time.sleep(0.005)
    assert "opening the model 1/3" in seen
    first = worker.signs.last_beat
    while worker.signs.last_beat == first:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert worker.signs.step_begin is None and abs(worker.signs.interval_s - 0.1) < 1e-9
    worker.kill()
    worker.thread.join(10)


def test_cores_are_claimed_once(tmp_path) -> None:
    cores = sorted(logical_cpus())
    one = ClaimedCores(1, tmp_path / "locks")
    other = ClaimedCores(len(cores), tmp_path / "locks")
    assert one.cores == (cores[0],) and other.cores == ()
    rest = ClaimedCores(len(cores) - 1, tmp_path / "locks")
    assert rest.cores == tuple(cores[1:])
    one.release()
    code = (
        "import sys, pathlib; from max.serve.remote.cores import ClaimedCores;"
        "print(ClaimedCores(1, pathlib.Path(sys.argv[1])).cores)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "locks")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.strip() == f"({cores[0]},)"
    assert ClaimedCores(1, tmp_path / "locks").cores == (cores[0],)  # the process has ended
    assert ClaimedCores(0, tmp_path / "locks").cores == ()


def test_the_decisions_of_the_autoscaler() -> None:
    """In virtual time: patience, one start at a time, both bounds, and no change to and fro under a steady load."""
    policy = ScalePolicy(least=1, most=4, wait_s=2, patience_s=3, idle_s=20)
    decision, now, replicas, starts = ScaleDecision(policy), 100.0, 1, []

    def step(seconds: float, wait_s: float, open_requests: int, start_s: float = 5.0) -> None:
        nonlocal now, replicas
        for _ in range(int(seconds)):
            now += 1
            starting = sum(now - at < start_s for at in starts)
            change = decision.change(
                now, Load(replicas, starting, 8 * (replicas - starting), open_requests, wait_s)
            )
            assert change in (-1, 0, 1)
            if change > 0:
                starts.append(now)
            replicas += change

    step(2, 9.0, 50)
    assert replicas == 1
    step(3, 9.0, 50)
    assert replicas == 2
    step(1, 0.1, 3)  # a short pause resets the patience
    step(60, 9.0, 50)
    assert replicas == 4
    assert all(b - a >= 5 for a, b in zip(starts, starts[1:], strict=False))
    step(300, 0.5, 14)  # more than half of the places of three
    assert replicas == 4
    step(300, 0.5, 11)
    assert replicas == 3
    step(300, 0.0, 0)
    assert replicas == 1
    assert ScaleDecision(ScalePolicy(3, 5)).change(0.0, Load(1, 0, 8, 0, 0.0)) == 2


def test_an_autoscaler_starts_and_ends_engines() -> None:
    workers: list[Host] = []

    def start() -> Host:
        workers.append(Host())
        return workers[-1]

    changes: list[int] = []

    async def whole() -> None:
        client = EngineClient(start)
        client.start()
        await client.wait_ready()
        policy = ScalePolicy(1, 2, wait_s=-1.0, patience_s=0.0, idle_s=0.0)
        scaler = Autoscaler(client, start, policy, lambda: changes.append(len(client.replicas)))
        client.close_before(scaler.close)
        try:
            async with asyncio.timeout(60):
                await until(lambda: changes == [2])
                assert await answer(client, "a", 3) == expected((3,), 20)
                assert scaler.load().slots == 16
        finally:
            await client.close(finish=False, timeout=1)

    asyncio.run(whole())
    assert len(workers) == 2


def test_a_long_request_does_not_keep_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that the load does not need ends, and its request goes on with the other one."""
    monkeypatch.setattr(autoscaler, "LOOK_S", 0.01)
    monkeypatch.setattr(autoscaler, "DRAIN_S", 0.2)

    async def whole() -> None:
        workers = Workers()
        client = EngineClient(workers.start)
        client.add_replica(workers.start)
        client.start()
        try:
            async with asyncio.timeout(60):
                await client.wait_ready()
                with client.open([GenerationRequest(name, (1, 2), 9) for name in "ab"]):
                    assert [each.replica for each in client.entries.values()] == client.replicas
                    first = client.replicas[0]
                    policy = ScalePolicy(1, 2, idle_s=0.0, use=1.0)
                    scaler = Autoscaler(client, workers.start, policy, lambda: None)
                    client.close_before(scaler.close)
                    await until(lambda: client.replicas == [first])
                    assert [each.replica for each in client.entries.values()] == [first, first]
        finally:
            await client.close(finish=False, timeout=0.1)

    asyncio.run(whole())


class FakeRay:
    """A cluster whose actors say where they are, or why they cannot, when the test lets them.

    Args:
        error: What they say; None: they are not started.
    """

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.killed = error, 0

    def remote(self, *_: Any) -> Any:
        actor = SimpleNamespace(address=SimpleNamespace(remote=lambda: "address"))
        started = SimpleNamespace(remote=lambda *_: actor)
        return SimpleNamespace(options=lambda **_: started)

    def wait(self, asked: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        assert timeout == 0
        return (asked, []) if self.error is not None else ([], asked)

    def get(self, asked: Any) -> Any:
        assert asked == "address" and self.error is not None
        raise self.error

    def kill(self, *_: Any, **__: Any) -> None:
        self.killed += 1

    def shutdown(self) -> None: ...


def cluster_of(ray: FakeRay) -> RayCluster:
    cluster = RayCluster.__new__(RayCluster)
    cluster._ray, cluster._engines, cluster._excluded = ray, set(), set()
    cluster._outlives, cluster._started, cluster._is_closed, cluster.cpus = True, True, False, 3
    cluster._starts = threading.Lock()
    cluster.nodes = lambda: [Node("aa", "10.0.0.1", 3, True)]  # pyright: ignore[reportAttributeAccessIssue]
    return cluster


def test_an_engine_that_no_machine_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason is a line that says what to do, and the wait ends with the server."""
    stacks = RuntimeError("The actor died\n  File x\nModuleNotFoundError: No module named 'max'\n")
    ray = FakeRay(stacks)
    with pytest.raises(OSError) as caught:
        cluster_of(ray).start_worker(WorkerSettings({}))
    told = refused_start(caught.value)
    assert told.problem.endswith(
        "starts no engine of 3 cores: ModuleNotFoundError: No module named 'max'"
    )
    assert "same version" in told.remedy and ray.killed == 1
    monkeypatch.setattr(ray_cluster, "START_S", 0.1)
    with pytest.raises(NoMachineError, match="3 free cores") as caught:
        cluster_of(FakeRay()).start_worker(WorkerSettings({}))
    assert "fewer replicas" in refused_start(caught.value).remedy
    monkeypatch.setattr(ray_cluster, "START_S", 300)
    cluster = cluster_of(FakeRay())
    threading.Timer(0.2, cluster.close).start()
    with pytest.raises(OSError, match="ended while it started"):
        cluster.start_worker(WorkerSettings({}))
    assert "ulimit" in refused_start(OSError(11, "no process")).remedy


@pytest.mark.skipif(
    os.name != "posix" or os.geteuid() != 0, reason="needs the right to run earlier"
)
def test_an_actor_does_not_run_after_all_other_work() -> None:
    """Ray starts actors with a niceness of 15, with which an engine on a busy machine does not go on."""
    code = (
        "import os; os.nice(3); from max.serve.remote.ray_cluster import EngineActor\n"
        "EngineActor(b'k' * 32, 0)._host.close(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [str(os.getpriority(os.PRIO_PROCESS, 0))], done.stderr


def test_the_machines_of_an_engine() -> None:
    cluster = RayCluster.__new__(RayCluster)  # no Ray: it only asks for the machines
    nodes = [
        Node("aa11", "10.0.0.1", 2, True),
        Node("aa22", "10.0.0.2", 2, True),
        Node("bb33", "10.0.0.3", 2, False),
        Node("bb44", "10.0.0.4", 2, True),
    ]
    cluster.nodes = lambda: nodes  # pyright: ignore[reportAttributeAccessIssue]
    cluster._excluded = set()

    def labels(*only: str) -> str:
        return cluster._placement(only)["label_selector"]["ray.io/node-id"]

    assert cluster._placement(()) == {"scheduling_strategy": "SPREAD"}
    assert labels("10.0.0.2") == "in(aa22)"
    assert cluster._placement(("aa", "bb")) == {"scheduling_strategy": "SPREAD"}
    assert labels("aa") == "in(aa11,aa22)"
    cluster._excluded = {"aa11", "bb33"}
    assert labels() == "in(aa22,bb44)" and labels("aa") == "in(aa22)"
    for only, says in (
        (("10.0.0.1",), "is drained"),
        (("10.0.0.9", "cc"), "is none of 10.0.0.9, cc"),
        (("bb33",), "is none of"),
    ):
        with pytest.raises(OSError, match=says):
            cluster._placement(only)
    cluster._excluded = {"aa11", "aa22", "bb44"}
    with pytest.raises(OSError, match="is drained; they are aa11"):
        cluster._placement(())
