"""Several users of engines learn the load of each other. No tensors."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import pytest

from max.interfaces import GenerationStatus
from max.pipelines.generation.process.commands import GenerationRequest
from max.pipelines.generation.process.encoder_messages import EncodeRequest, RankRequest
from max.pipelines.generation.process.events import (
    EngineReady,
    EngineStats,
    ErrorInfo,
    OthersLoad,
    PagesChanged,
    PredictionVerified,
    PromptStarted,
    RequestFailed,
    TokensGenerated,
)
from max.serve.remote.autoscaler import Autoscaler, ScalePolicy
from max.serve.routers import shared_channel
from max.serve.worker.client import EngineClient, EngineState
from tests.pipelines.counting_pipeline import expected
from tests.serve.test_engine_client import until
from tests.serve.test_shared_engines import Server, Shared, answer, pages, run


def replica_of(client: EngineClient, name: str) -> int:
    """The owner's number of the replica that a router's request runs on."""
    replica = client.entries[name].replica
    assert replica is not None
    return int(replica.worker.name)  # type: ignore[union-attr]


def others(client: EngineClient) -> int:
    """The requests of others on all replicas."""
    return client.all_open_requests - client.open_requests


def test_routers_weigh_the_requests_of_each_other() -> None:
    """Each begins with the same engine, and takes the one that the others have not chosen."""

    async def test(server: Server) -> None:
        clients = [await server.router() for _ in range(3)]
        for engine in server.engines:
            # so that none ends meanwhile
            engine.pipeline.before = lambda batch: time.sleep(0.05)
        with contextlib.ExitStack() as held:
            for number in range(12):
                client = clients[number % 3]
                await until(lambda c=client, n=number: c.open_requests + others(c) == n)
                held.enter_context(client.open([GenerationRequest(f"r{number}", (number,), 390)]))
                taken = [
                    sum(replica_of(each, name) == n for each in clients for name in each.entries)
                    for n in range(4)
                ]
                assert max(taken) - min(taken) <= 1, taken
            # one long prompt weighs as much as many requests
            held.enter_context(clients[0].open([GenerationRequest("long", tuple(range(300)), 390)]))
            await until(lambda: others(clients[1]) == 9)
        # cancelled requests are no load any more
        await until(lambda: [others(each) for each in clients] == [0, 0, 0])
        await until(lambda: server.owner.all_open_requests == 0)

    run(4, test)


def test_the_load_of_encode_requests() -> None:
    """Four characters of a text are about one token; texts that are tokens already weigh as much as they have."""
    texts = ("x" * 300, tuple(range(50)), "y" * 102, (7,))
    assert shared_channel.unread_tokens(EncodeRequest("a", texts)) == 402 // 4 + 51
    assert shared_channel.unread_tokens(RankRequest("b", "query", ("z" * 44,))) == 11
    assert shared_channel.unread_tokens(GenerationRequest("c", (1, 2, 3), 9)) == 3


def test_the_owner_starts_engines_by_the_load_of_routers() -> None:
    async def test(server: Server) -> None:
        router = await server.router()
        policy = ScalePolicy(1, 2, wait_s=-1.0, patience_s=0.0, idle_s=0.0)
        scaler = Autoscaler(server.owner, server._start, policy, lambda: None)
        server.owner.close_before(scaler.close)
        with router.open([GenerationRequest(f"r{n}", (n,), 390) for n in range(6)]):
            await until(lambda: scaler.load().open == 6)
        await until(lambda: len(router.replicas) == 2)
        await until(lambda: all(each.state is EngineState.READY for each in router.replicas))
        prompts = [(n,) for n in range(8)]
        found = await asyncio.gather(*(answer(router, f"s{p[0]}", *p) for p in prompts))
        assert found == [expected(prompt, 20) for prompt in prompts]
        assert all(each.stats.prompt_tokens for each in router.replicas)

    run(1, test)


def test_the_load_that_each_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the sums over the requests of all others, after random events."""
    monkeypatch.setattr(shared_channel, "LOAD_S", 0.0)
    shared, draw = Shared(), random.Random(3)
    shared.channel.send(EngineReady(4, 2, 100))
    users = [shared.router() for _ in range(3)]
    told = [OthersLoad()] * 3
    open_requests: dict[tuple[int, str], int] = {}  # the tokens to read

    def check() -> None:
        shared.channel.send(EngineStats())  # after it, each knows the last load
        shared.channel.send(PagesChanged(pages(1)))
        for number, user in enumerate(users):
            while not isinstance(message := user.receive(), PagesChanged) or message.is_anew:
                if isinstance(message, OthersLoad):
                    told[number] = message
            other = [n for (of, _), n in open_requests.items() if of != number]
            assert told[number] == OthersLoad(len(other), sum(other))

    engines: dict[tuple[int, str], str] = {}
    for step in range(120):
        number, name = draw.randrange(3), f"r{draw.randrange(4)}"
        key = (number, name)
        if key not in open_requests:
            size = draw.randrange(1, 50)
            users[number].send(GenerationRequest(name, tuple(range(size)), size + 9))
            engines[key] = shared.channel.receive().request_id
            open_requests[key] = size
        elif step % 3 == 0 and open_requests[key]:
            cached = draw.randrange(open_requests[key])
            shared.channel.send(PromptStarted(engines[key], 0.0, cached))
            open_requests[key] -= cached
            shared.channel.send(PredictionVerified(engines[key], 3, 1))  # says nothing of loads
        elif step % 3 == 1:
            shared.channel.send(TokensGenerated(engines[key], (1,), GenerationStatus.ACTIVE))
            open_requests[key] = 0
        elif draw.randrange(2):
            end = GenerationStatus.END_OF_SEQUENCE
            shared.channel.send(TokensGenerated(engines[key], (), end))
            del open_requests[key]
        else:
            error = ErrorInfo("ValueError", "no")
            shared.channel.send(RequestFailed(engines[key], error))
            del open_requests[key]
        check()
    shared.channel.close()
