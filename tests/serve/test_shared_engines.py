"""Engines with several users: an owner and routers, each with a connection of its own. No tensors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.channel import ConnectionChannel, MessageCodec
from max.pipelines.generation.process.commands import CancelRequest, GenerationRequest, Shutdown
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStopped,
    PagesChanged,
    TokensGenerated,
)
from max.pipelines.generation.process.service import serve
from max.pipelines.scheduler import SchedulerLimits
from max.serve.process.settings import WatchLimits
from max.serve.remote.connections import connect, shut_down
from max.serve.remote.worker import RemoteWorker
from max.serve.routers import shared_channel
from max.serve.routers.address import DoorAddress
from max.serve.routers.door import Door
from max.serve.routers.followed_engines import FollowedEngines
from max.serve.routers.shared_channel import SharedChannel
from max.serve.worker.client import EngineClient, EngineState
from max.serve.worker.life_signs import LifeSigns
from max.serve.worker.queued_channel import QueuedChannel
from tests.pipelines.counting_pipeline import CountingPipeline, expected
from tests.serve.test_engine_client import _all, until


class Engine:
    """An engine in threads of this process, with its owner's worker and its door.

    Args:
        folder: The folder of its door.
        seconds: How long a step takes.
    """

    exit_reason = "it was ended"
    pid = None

    def __init__(self, folder: Path, seconds: float = 0.002) -> None:
        self.pipeline = CountingPipeline(400, prefix=True, seconds=seconds)
        self.door = DoorAddress.in_folder(str(folder))
        self.signs = LifeSigns(5.0)
        self.signs.start()
        self._here, self._there = Pipe()
        self.channel = QueuedChannel(ConnectionChannel(self._here, MessageCodec()))
        self._door = Door.at(self.door)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        channel = self._door.open(self._there, self.signs)
        limits = SchedulerLimits(max_batch_size=8, max_num_steps=1)
        serve(self.pipeline, limits, channel, 0.05, self.signs)
        self._door.close()
        channel.close()

    def join(self, timeout: float | None = None) -> None:
        self.thread.join(timeout)

    def kill(self) -> None:
        if not self._here.closed:
            shut_down(self._here)
        self.channel.close()
        self.thread.join(10)


class Server:
    """The owner's client of engines, and routers that follow it.

    Args:
        folder: The folder of the doors.
        count: The number of engines.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.engines: list[Engine] = []
        self._folder = folder
        self._known: dict[int, DoorAddress] = {}
        self.owner = EngineClient(self._start)
        for _ in range(count - 1):
            self.owner.add_replica(self._start)
        self.owner.start()
        self.owner.followers.append(self)
        self.routers: list[FollowedEngines] = []

    def _start(self) -> Engine:
        self.engines.append(Engine(self._folder))
        return self.engines[-1]

    @property
    def doors(self) -> dict[int, DoorAddress]:
        """As a supervisor tells them: the earlier one of an engine that starts again."""
        for each in self.owner.taking:
            if each.state is EngineState.READY:
                self._known[each.number] = each.worker.door  # type: ignore[union-attr]
        numbers = {each.number for each in self.owner.taking}
        return {number: door for number, door in self._known.items() if number in numbers}

    def note_change(self) -> None:
        for router in self.routers:
            if self.doors:
                router.tell(self.doors)

    async def leave(self, replica) -> None:
        self.note_change()
        for router in self.routers:
            await router.wait_left()

    async def router(self) -> EngineClient:
        """The client of a new router."""
        router = FollowedEngines(WatchLimits(), False)
        self.routers.append(router)
        router.tell(self.doors)
        client = await router.client()
        await router.wait_connected()
        await until(lambda: all(each.state is EngineState.READY for each in client.replicas))
        return client


def run(count: int, test: Callable[[Server], Awaitable[None]]) -> None:
    async def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:  # pytest's own are too long for a socket
            server = Server(Path(folder), count)
            try:
                async with asyncio.timeout(60):
                    await server.owner.wait_ready()
                    await test(server)
            finally:
                for router in server.routers:
                    router.close()
                    if router._client is not None:
                        await router._client.close(finish=False, timeout=1)
                await server.owner.close(finish=False, timeout=5)
            for engine in server.engines:
                engine.thread.join(10)
                assert not engine.thread.is_alive()
            assert not list(Path(folder).iterdir())
            # readers end with their connections
            await until(lambda: readers() <= before)

    before = readers()
    asyncio.run(whole())


def readers() -> int:
    """The threads that receive the events of engines."""
    return sum(thread.name == "engine events" for thread in threading.enumerate())


async def answer(client: EngineClient, name: str, *prompt: int, new: int = 20) -> list[int]:
    events = await _all(client, GenerationRequest(name, prompt, len(prompt) + new))
    return [t for event in events if isinstance(event, TokensGenerated) for t in event.tokens]


def test_requests_of_the_same_name_are_those_of_their_connection() -> None:
    async def test(server: Server) -> None:
        clients = [server.owner, *[await server.router() for _ in range(3)]]
        draw = random.Random(0)
        prompts = [tuple(draw.choices(range(90), k=draw.randint(1, 9))) for _ in range(24)]
        answers = await asyncio.gather(
            *(answer(clients[i % 4], f"r{i // 4}", *p) for i, p in enumerate(prompts))
        )
        assert answers == [expected(prompt, 20) for prompt in prompts]
        # cancelled by one, and not the other's of the same name
        with clients[1].open([GenerationRequest("a", (1,), 300)]):
            others = asyncio.ensure_future(answer(clients[2], "a", 2, new=60))
            await until(lambda: clients[2].stats.running)
        assert await others == expected((2,), 60)
        await until(lambda: not server.owner.stats.running)

    run(2, test)


def test_a_router_that_is_lost_ends_its_requests_only() -> None:
    async def test(server: Server) -> None:
        router = await server.router()
        (engine,) = server.engines
        reading = asyncio.ensure_future(answer(server.owner, "a", 1, new=150))
        lost = asyncio.ensure_future(answer(router, "b", 2, new=300))
        await until(lambda: server.owner.stats.running == 2)
        server.routers[0].close()
        router.replicas[0].worker.kill()  # type: ignore[union-attr]
        await until(lambda: server.owner.stats.running == 1)
        assert not reading.done()
        assert await reading == expected((1,), 150)
        assert server.owner.restarts == 0 and engine.thread.is_alive()
        lost.cancel()  # or its router has given up
        await asyncio.gather(lost, return_exceptions=True)
        await until(lambda: not server.owner.stats.used_pages)

    run(1, test)


def test_a_router_that_comes_later_knows_the_pages() -> None:
    """Its first requests go where their prefixes are."""

    async def test(server: Server) -> None:
        prompts = [tuple(range(50 * i, 50 * i + 40)) for i in range(4)]
        for number, prompt in enumerate(prompts):
            replica = server.owner.replicas[number % 2]
            request = GenerationRequest(f"p{number}", prompt, 42)
            with server.owner.open([request], on=replica) as subscription:
                while replica.stats.prompt_tokens < 40 * (number // 2 + 1):
                    await asyncio.wait_for(subscription.next_events(), 5)
                    await asyncio.sleep(0.06)
        for _ in range(2):
            router = await server.router()
            await until(lambda r=router: len(r._router._holders) >= 4 * 20)
            before = [each.stats.reused_tokens for each in server.owner.replicas]
            for number in (2, 1, 0, 3):
                await answer(router, f"q{number}", *prompts[number], 9, new=2)
            await until(
                lambda b=before: (
                    sum(each.stats.reused_tokens for each in server.owner.replicas) - sum(b)
                    >= 4 * 40
                )
            )
            server.routers[-1].close()
            await router.close(finish=False, timeout=1)

    run(2, test)


def test_routers_follow_engines_that_are_replaced_and_those_that_are_lost() -> None:
    async def test(server: Server) -> None:
        routers = [await server.router() for _ in range(2)]
        ended, answers = asyncio.Event(), 0

        async def ask(number: int) -> None:
            nonlocal answers
            while not ended.is_set():
                name = f"r{number}-{answers}"
                found = await answer(routers[number % 2], name, number)
                assert found == expected((number,), 20)
                answers += 1

        asking = [asyncio.ensure_future(ask(number)) for number in range(6)]
        for replica in list(server.owner.replicas):
            await server.owner.replace_replica(replica)
            assert not any(each.done() for each in asking)
        before = answers
        await until(lambda: answers > before + 6)
        assert len(server.engines) == 4
        assert all(not engine.thread.is_alive() for engine in server.engines[:2])
        server.engines[2].kill()
        await until(lambda: len(server.engines) == 5)
        before = answers
        await until(lambda: answers > before + 6)
        await until(
            lambda: all(
                each.state is EngineState.READY for router in routers for each in router.replicas
            )
        )
        ended.set()
        await asyncio.gather(*asking)
        assert [len(router.replicas) for router in routers] == [2, 2]
        assert sum(router.restarts for router in routers) == 2

    run(2, test)


def test_the_only_engine_is_replaced_before_a_router_has_the_next_one() -> None:
    async def test(server: Server) -> None:
        client = await server.router()
        (router,) = server.routers
        (before,), connect_to = client.replicas, router._connect

        def slow(number: int) -> RemoteWorker:
            time.sleep(0.5)
            return connect_to(number)

        router._connect = slow  # type: ignore[method-assign]
        await server.owner.replace_replica(server.owner.replicas[0])
        assert before not in client.replicas and len(client.replicas) == 1
        assert await answer(client, "a", 5) == expected((5,), 20)
        assert before.restarts == 0

    run(1, test)


def test_a_router_ends_while_its_engines_are_lost() -> None:
    """As when their owner was killed: nobody starts the next engine."""

    async def test(server: Server) -> None:
        router = await server.router()
        server.owner.followers.clear()
        await server.owner.close(finish=False, timeout=5)
        await until(lambda: router.state is EngineState.RESTARTING)
        async with asyncio.timeout(10):
            await router.close(finish=False, timeout=1)
        assert router.state is EngineState.STOPPED

    run(1, test)


class Shared:
    """A shared channel, and its owner's end."""

    def __init__(self) -> None:
        here, there = Pipe()
        self.owner = ConnectionChannel(here, MessageCodec())
        self.channel = SharedChannel(there)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                self.owner.receive_all()

    def router(self):
        """The connection of a new router."""
        ours, theirs = socket.socketpair()
        self.channel.add(Connection(theirs.detach()))
        return ConnectionChannel(Connection(ours.detach()), MessageCodec())


def pages(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def test_what_a_router_is_told_at_first() -> None:
    """All pages that the changes before it leave, then the changes."""
    shared, draw, held = Shared(), random.Random(1), set[int]()
    shared.channel.send(EngineReady(4, 2, 100))
    for step in range(300):
        added = {draw.randrange(200) for _ in range(5)} - held
        dropped = set(draw.sample(sorted(held), min(len(held), draw.randrange(6))))
        is_anew = step == 100
        held = (set() if is_anew else held - dropped) | added
        shared.channel.send(PagesChanged(pages(*added), pages(*dropped), is_anew, b"key"))
        if step % 50 == 49:
            router = shared.router()
            ready, _, first = (router.receive() for _ in range(3))
            assert ready == EngineReady(4, 2, 100) and first.is_anew and first.salt_key == b"key"
            assert set(PagesChanged.hashes(first.new_pages)) == {pages(each) for each in held}
            shared.channel.send(PagesChanged(pages(999)))
            assert router.receive() == PagesChanged(pages(999))
            shared.channel.send(PagesChanged(lost_pages=pages(999)))
            assert router.receive() == PagesChanged(lost_pages=pages(999))
    shared.channel.close()


def test_a_router_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_channel, "MOST_UNREAD_BYTES", 3 << 20)
    shared = Shared()
    silent, other = shared.router(), shared.router()
    for router, name in ((silent, "a"), (other, "a")):
        router.send(GenerationRequest(name, (1, 2), 9))
    names = [shared.channel.receive().request_id for _ in range(2)]
    assert len(set(names)) == 2 and all(name.endswith("|a") for name in names)
    silent_name = next(name for name in names if name.startswith("1|"))
    other_name = next(name for name in names if name != silent_name)
    received: list[TokensGenerated] = []
    has_read = threading.Semaphore(0)

    def read() -> None:
        while len(received) < 400:
            received.extend(m for m in other.receive_all() if isinstance(m, TokensGenerated))
            has_read.release()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    begin = time.monotonic()
    for number in range(400):
        many = tuple(range(number, number + 4000))
        for name in (silent_name, other_name):
            shared.channel.send(TokensGenerated(name, many, GenerationStatus.ACTIVE))
        assert has_read.acquire(timeout=20)
    reader.join(20)
    assert [event.tokens[0] for event in received] == list(range(400))
    assert {event.request_id for event in received} == {"a"}
    # the silent one has lost its connection, and its request is cancelled
    assert shared.channel.receive() == CancelRequest(silent_name)
    assert time.monotonic() - begin < 20
    shared.channel.close()


def test_frames_arrive_whole_and_in_order_at_a_slow_router() -> None:
    shared = Shared()
    router = shared.router()
    router.send(GenerationRequest("a", (1,), 9))
    name = shared.channel.receive().request_id
    sizes = [1, 40, 5000, 60_000, 3, 200_000, 2] * 8
    for number, size in enumerate(sizes):
        event = TokensGenerated(name, (number,) * size, GenerationStatus.ACTIVE)
        shared.channel.send(event)
    time.sleep(0.05)
    for number, size in enumerate(sizes):
        event = router.receive()
        assert event.tokens == (number,) * size and event.request_id == "a"
    shared.channel.close()


def test_the_end_of_an_engine_is_told_before_its_last_events() -> None:
    """Requests that a shutdown cancels go on elsewhere: they have not ended."""
    shared = Shared()
    router = shared.router()
    router.send(GenerationRequest("a", (1,), 9))
    name = shared.channel.receive().request_id
    shared.owner.send(Shutdown())
    assert shared.channel.receive() == Shutdown()
    shared.channel.send(TokensGenerated(name, (), GenerationStatus.CANCELLED))
    assert router.receive() == EngineStopped()
    with pytest.raises(EOFError):
        router.receive()
    late = shared.router()
    with pytest.raises(EOFError):
        late.receive()
    shut_down(shared.owner._connection)
    with pytest.raises(EOFError):
        while True:
            shared.channel.receive()


def test_a_router_cannot_do_what_the_owner_does() -> None:
    shared = Shared()
    router = shared.router()
    router.send(Shutdown())
    router.send(CancelRequest("x"))
    assert shared.channel.receive() == CancelRequest("1|x")
    shared.channel.close()


def test_a_door_with_another_key(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(Path(folder))
        door = engine.door
        with pytest.raises(OSError, match="does not know the key"):
            connect(door.host, 0, b"x" * 32, "commands")
        worker = RemoteWorker(door.host, 0, door.key, 0.5, lambda: None, lambda timeout: None)
        first = worker.signs.last_beat
        end = time.monotonic() + 20
        while worker.signs.last_beat == first:
            assert time.monotonic() < end
            time.sleep(0.01)
        worker.kill()
        engine.kill()
        assert not engine.thread.is_alive()
