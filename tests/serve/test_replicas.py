"""A client with several replicas: where requests go, and what happens to them when a replica is lost or removed."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from max._host.machine import logical_cpus
from max.pipelines.generation.process.commands import CancelRequest, GenerationRequest
from max.pipelines.generation.process.events import (
    EngineReady,
    PagesChanged,
    PromptStarted,
    TokensGenerated,
)
from max.pipelines.kv_cache.page_tables import page_hash_of
from max.pipelines.kv_cache.salts import Salt
from max.serve.process.settings import WorkerSettings
from max.serve.worker.client import EngineClient, EngineState, EngineUnavailableError
from max.serve.worker.placement import replica_settings
from tests.pipelines.counting_pipeline import expected
from tests.serve.conftest import RunningServer
from tests.serve.hanging_worker import HangingWorker
from tests.serve.test_engine_client import END, FakeWorker, Workers, _all, tokens, until

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


class Silent(Workers):
    """Workers that are ready when the test says so."""

    def start(self) -> FakeWorker:
        worker = FakeWorker()
        self.started.append(worker)
        return worker

    def set_ready(self, number: int) -> None:
        self.started[number].events.put(EngineReady(4, 4, 1000))


def request(name: str, *prompt: int) -> GenerationRequest:
    return GenerationRequest(name, prompt or (1, 2), 99)


def run(count: int, test: Callable[[EngineClient, Silent], Awaitable[None]]) -> None:
    async def whole() -> None:
        workers = Silent()
        client = EngineClient(workers.start)
        for _ in range(count - 1):
            client.add_replica(workers.start)
        client.start()
        try:
            async with asyncio.timeout(60):
                await test(client, workers)
        finally:
            await client.close(finish=False, timeout=0.1)
        assert client.open_requests == 0 and client.state is EngineState.STOPPED
        with pytest.raises(EngineUnavailableError):
            await _all(client, request("late"))

    asyncio.run(whole())


async def ready(client: EngineClient, workers: Silent, *numbers: int) -> None:
    for number in numbers:
        workers.set_ready(number)
        await until(lambda n=number: client.replicas[n].state is EngineState.READY)


def names(worker: FakeWorker) -> list[str]:
    return [each.request_id for each in worker.commands if isinstance(each, GenerationRequest)]


def test_prompts_follow_their_prefixes_and_others_are_spread() -> None:
    async def test(client: EngineClient, workers: Silent) -> None:
        await ready(client, workers, 0, 1)
        assert await client.wait_ready() == EngineReady(8, 4, 2000)
        prompt = tuple(range(400))
        with client.open([request("a", *prompt), request("b"), request("c", *prompt, 5)]):
            assert [names(worker) for worker in workers.started] == [["a", "c"], ["b"]]
            with client.open([replace(request("d", *prompt), cache_salt="tenant")]):
                assert names(workers.started[1]) == ["b", "d"]
        assert CancelRequest("b") in workers.started[1].commands

    run(2, test)


def test_prompts_follow_the_pages_that_replicas_report() -> None:
    prompt, salted = tuple(range(400)), tuple(range(400, 800))

    def hashes(tokens: tuple[int, ...], salt: bytes = b"") -> bytes:
        chain = [salt]
        for page in range(100):
            chain.append(page_hash_of(chain[-1], np.array(tokens), page, 4))
        return b"".join(chain[1:])

    async def test(client: EngineClient, workers: Silent) -> None:
        await ready(client, workers, 0, 1)
        first, second = workers.started
        second.events.put(PagesChanged(hashes(prompt)))
        first.events.put(
            PagesChanged(hashes(salted, Salt(text="x").digest(b"key")), salt_key=b"key")
        )
        await until(lambda: len(client._router._holders) == 200)
        with client.open([request("a", *prompt), replace(request("b", *salted), cache_salt="x")]):
            assert [names(worker) for worker in workers.started] == [["b"], ["a"]]
        second.events.put(PagesChanged(lost_pages=hashes(prompt)))
        await until(lambda: len(client._router._holders) == 100)
        first.events.put(PagesChanged(hashes(prompt), is_anew=True))
        await until(lambda: client._router._places[1].reported_pages == set())
        await until(lambda: len(client._router._places[0].reported_pages) == 100)
        with client.open([request("c", *prompt)]):
            assert names(first) == ["b", "c"]
        second.die()
        await until(lambda: client._router.replicas == [0])
        assert set(client._router._holders) == {*PagesChanged.hashes(hashes(prompt))}

    run(2, test)


def test_requests_of_a_replica_that_dies_go_on_with_another() -> None:
    async def test(client: EngineClient, workers: Silent) -> None:
        await ready(client, workers, 0, 1)
        first, second = workers.started
        begun = asyncio.ensure_future(_all(client, request("begun", *range(90))))
        await until(lambda: names(first) == ["begun"])
        first.events.put(tokens(5, 6, name="begun"))
        await until(lambda: client.entries["begun"].generated)
        waiting = asyncio.ensure_future(_all(client, request("waiting", *range(90))))
        await until(lambda: names(first) == ["begun", "waiting"])
        first.die()
        await until(lambda: names(second) == ["begun"])
        assert second.commands[-1] == replace(request("begun", *range(90)), generated_tokens=(5, 6))
        # late events of the first one are void, also those of the next worker of its replica
        await until(lambda: len(workers.started) == 3)
        workers.set_ready(2)
        workers.started[2].events.put(tokens(9, name="begun", status=END))
        second.events.put(tokens(7, name="begun"))
        await until(lambda: names(second) == ["begun", "waiting"])
        second.events.put(tokens(8, name="begun", status=END))
        second.events.put(tokens(1, name="waiting", status=END))
        events = await begun
        assert [t for e in events if isinstance(e, TokensGenerated) for t in e.tokens] == [
            5,
            6,
            7,
            8,
        ]
        assert await waiting == [tokens(1, name="waiting", status=END)]
        assert client.restarts == 1

    run(2, test)


def test_requests_wait_while_no_replica_is_ready() -> None:
    """The first one that is ready gets those that wait for others too."""

    async def test(client: EngineClient, workers: Silent) -> None:
        with client.open([request(name) for name in "abcdef"]):
            assert not any(worker.commands for worker in workers.started)
            assert client.state is EngineState.STARTING and client.ready is None
            workers.set_ready(1)
            await until(lambda: names(workers.started[1]) == list("abcdef"))
            assert client.state is EngineState.READY and client.responds
            await ready(client, workers, 0)
            with client.open([request("g")]):
                assert names(workers.started[0]) == ["g"]

    run(3, test)


def test_a_replica_is_added_and_removed() -> None:
    async def test(client: EngineClient, workers: Silent) -> None:
        await ready(client, workers, 0)
        with pytest.raises(ValueError, match="replica 0 is the only one"):
            await client.remove_replica(client.replicas[0])
        stays = asyncio.ensure_future(_all(client, request("stays")))
        ends = asyncio.ensure_future(_all(client, request("ends")))
        await until(lambda: len(workers.started[0].commands) == 2)
        added = client.add_replica(workers.start)
        added.start()
        await ready(client, workers, 1)
        removing = asyncio.ensure_future(client.remove_replica(client.replicas[0], timeout=0.3))
        await asyncio.sleep(0)
        with client.open([request("new")]):
            assert names(workers.started[1]) == ["new"]
        workers.started[0].events.put(tokens(3, name="ends", status=END))
        assert await ends == [tokens(3, name="ends", status=END)]
        await removing
        # it had not ended in time
        assert names(workers.started[1]) == ["new", "stays"]
        workers.started[1].events.put(PromptStarted("stays", 1.0))
        workers.started[1].events.put(tokens(4, name="stays", status=END))
        assert (await stays)[-1] == tokens(4, name="stays", status=END)
        assert client.replicas == [added] and workers.started[0].dead
        with pytest.raises(ValueError, match="none of this model"):
            await client.remove_replica(added)

    run(1, test)


def test_each_answer_is_whole_while_workers_are_killed() -> None:
    """Processes; each of three replicas is killed once or more."""
    draw, workers = random.Random(3), list[HangingWorker]()

    def start() -> HangingWorker:
        workers.append(HangingWorker(5))
        return workers[-1]

    requests = [
        GenerationRequest(f"r{i}", (draw.randrange(90), i), 2 + draw.randrange(20, 120))
        for i in range(60)
    ]

    async def read(client: EngineClient, each: GenerationRequest) -> list[int]:
        events = await _all(client, each)
        return [t for event in events if isinstance(event, TokensGenerated) for t in event.tokens]

    async def whole() -> None:
        client = EngineClient(start)
        for _ in range(2):
            client.add_replica(start)
        client.start()
        try:
            async with asyncio.timeout(100):
                await client.wait_ready()
                reading = [asyncio.ensure_future(read(client, each)) for each in requests]
                for number in (0, 1, 2):
                    await until(lambda n=number: sum(each.done() for each in reading) > 10 * n)
                    workers[number]._process.kill()
                answers = await asyncio.gather(*reading)
        finally:
            await client.close(finish=False, timeout=0.1)
        for each, answer in zip(requests, answers, strict=True):
            assert answer == expected(each.tokens, each.max_length - 2)

    asyncio.run(whole())


def test_replicas_divide_the_machine() -> None:
    settings = WorkerSettings({"model_path": "m", "max_length": 9}, "info")
    assert replica_settings(settings, 1) == [settings]
    draw = random.Random(0)
    for _ in range(50):
        cores = sorted(draw.sample(range(99), draw.randint(2, 40)))
        count = draw.randint(2, len(cores))
        shares = replica_settings(settings, count, cores)
        assert [core for share in shares for core in share.cores] == cores
        sizes = [len(share.cores) for share in shares]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        for share in shares:
            assert share.config == {**settings.config, "device_memory_utilization": 0.9 / count}
            assert replace(share, cores=(), config=settings.config) == settings
    given = replace(settings, config={"device_memory_utilization": 0.5})
    assert replica_settings(given, 2, (0, 1))[1].config == {"device_memory_utilization": 0.25}


@pytest.mark.parametrize(
    ("count", "held"), [(3, [4, 4, 6]), (4, [4, 4, 6, 6]), (5, [4, 4, 4, 6, 6])]
)
def test_more_replicas_than_cores_share_them(count: int, held: list[int]) -> None:
    shares = replica_settings(WorkerSettings({"model_path": "m"}), count, (4, 6))
    assert [share.cores for share in shares] == [(core,) for core in held]


@pytest.mark.skipif(len(logical_cpus()) < 2, reason="one core")
def test_a_server_with_two_replicas(start_server: Callable[..., RunningServer]) -> None:
    """Answers are those of one engine, also of streams whose engine is killed."""
    server = start_server(
        "--model", str(TINY), "--replicas", "2", "--max-length", "1024", "--quantization-encoding", "float32",
    ).wait_ready()  # fmt: skip
    killed = server.worker
    assert len({tuple(worker.cpu_affinity()) for worker in server.workers}) == 2
    body = {"prompt": "import os", "ignore_eos": True, "temperature": 0.8, "max_tokens": 300}

    def stream(seed: int) -> str:
        with httpx.Client(base_url=server.url, timeout=300) as own:
            asked = {**body, "seed": seed, "stream": True}
            with own.stream("POST", "/v1/completions", json=asked) as lines:
                data = [line[6:] for line in lines.iter_lines() if line.startswith("data: {")]
        return "".join(json.loads(each)["choices"][0]["text"] for each in data)

    with httpx.Client(base_url=server.url, timeout=300) as http, ThreadPoolExecutor(6) as pool:
        answers = [http.post("/v1/completions", json={**body, "seed": n}).json() for n in range(3)]
        streams = [pool.submit(stream, n % 3) for n in range(6)]
        while http.get("/load").json()["server_load"] < 6:
            time.sleep(0.01)
        killed.kill()
        for number, each in enumerate(streams):
            assert each.result(300) == answers[number % 3]["choices"][0]["text"]
        assert "maxserve_worker_restarts 1.0" in http.get("/metrics").text
    assert server.stop() == 0


@pytest.mark.skipif(len(logical_cpus()) < 2, reason="one core")
def test_upgrades_at_once_and_one_that_fails(
    start_server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    server = start_server("--model", str(folder), "--replicas", "2", "--max-length", "256")
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=300) as http, ThreadPoolExecutor(3) as pool:
        upgrades = [pool.submit(http.post, "/cluster/upgrade", json={}) for _ in range(2)]
        drain = pool.submit(http.post, "/cluster/drain", json={"replica": 1})
        replaced = [each.result(300) for each in upgrades]
        assert [answer.status_code for answer in replaced] == [200, 200], replaced[0].text
        # the one that came last finds another number there, and says so
        assert drain.result(300).status_code in (200, 400)

        def replicas() -> list[dict[str, Any]]:
            (model,) = http.get("/cluster").json()["models"]
            assert [each["state"] for each in model["replicas"]] == ["ready", "ready"]
            return [each["replica"] for each in model["replicas"]]

        earlier = replicas()
        assert len(server.workers) == 2
        # the new one is lost while it loads, and then cannot read the files
        known = set(server.workers)
        upgrade = pool.submit(http.post, "/cluster/upgrade", json={})
        while not (new := set(server.workers) - known):
            time.sleep(0.01)
        new.pop().kill()
        answer = upgrade.result(300)
        assert answer.status_code == 503 and "while it loaded" in answer.text, answer.text
        (tmp_path / "broken").write_bytes(b"no weights")
        (tmp_path / "broken").replace(folder / "model.safetensors")
        answer = http.post("/cluster/upgrade", json={})
        assert answer.status_code == 400 and "model.safetensors" in answer.text, answer.text
        assert replicas() == earlier
        asked = {"prompt": "a", "max_tokens": 3}
        assert http.post("/v1/completions", json=asked).status_code == 200
    assert server.stop() == 0
