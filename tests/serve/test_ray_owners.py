"""Processes of a server on a Ray cluster are lost under load: the owner, a router, an engine, all of Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.serve.conftest import TINY, RunningServer

pytestmark = pytest.mark.long
pytest.importorskip("ray")
WHILE_S = 300
BODY = {"prompt": "import os", "ignore_eos": True, "temperature": 0.8, "seed": 5, "max_tokens": 400}
OPTIONS = (
    "--model", str(TINY), "--ray", "--replicas", "2", "--ray-cpus", "1", "--routers", "2",
    "--max-length", "512", "--quantization-encoding", "float32", "--restart-wait", "240",
    "--batch-invariant",
)  # fmt: skip


def engines() -> dict[int, psutil.Process]:
    """The processes of engines in Ray clusters of this machine."""
    return {
        each.pid: each
        for each in psutil.process_iter(["cmdline", "status"])
        if "EngineActor" in "".join(each.info["cmdline"] or [])
        and each.info["status"] != psutil.STATUS_ZOMBIE
    }


def until(holds: Callable[[], Any]) -> Any:
    """Waits until a function returns something true."""
    end = time.monotonic() + WHILE_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if found := holds():
                return found
        assert time.monotonic() < end
        time.sleep(0.1)


class Load:
    """A server under streams, each of which has to have the same text.

    Args:
        server: The server.
    """

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self._pool = ThreadPoolExecutor(8)
        self.begun = 0
        self.whole = self._read()
        assert len(self.whole) > 100

    def _read(self) -> str:
        text, is_done = "", False
        with httpx.Client(base_url=self.server.url, timeout=WHILE_S) as own:
            with own.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
                assert answer.status_code == 200, answer.read()
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        self.begun += len(text) > 20
                    is_done |= line == "data: [DONE]"
        assert is_done
        return text

    def start(self, count: int = 6) -> list[Future[str]]:
        """Starts streams, and waits until they run."""
        self.begun = 0
        streams = [self._pool.submit(self._read) for _ in range(count)]
        until(lambda: self.begun > 3 * count)
        return streams

    def get(self, path: str) -> Any:
        """What a route answers, of a new connection; None: it cannot now."""
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            answer = http.get(path)
        return answer.json() if answer.status_code == 200 else None

    def wait_whole(self) -> Any:
        """Waits until all engines and routers are ready; what `/cluster` says then."""

        def found() -> Any:
            cluster = self.get("/cluster")
            if not cluster or not cluster["models"] or len(cluster["routers"]) != 2:
                return None
            replicas = cluster["models"][0]["replicas"]
            states = {each["state"] for each in (*replicas, *cluster["routers"])}
            return cluster if states == {"ready"} and len(replicas) == 2 else None

        return until(found)

    def ends_well(self, streams: list[Future[str]]) -> None:
        """All streams have their text, and nothing is open."""
        assert [each.result(WHILE_S) for each in streams] == [self.whole] * len(streams)
        assert self.get("/health") == {"status": "ok"}
        until(lambda: (self.get("/load") or {}).get("server_load") == 0)


@pytest.fixture
def load(start_server: Callable[..., RunningServer]) -> Iterator[Load]:
    assert not engines()
    yield Load(start_server(*OPTIONS).wait_ready())


def test_processes_are_lost_one_after_another(load: Load) -> None:
    first, own = load.wait_whole(), engines()
    assert len(own) == 2

    # the owner: engines and routers go on where they are, and no stream ends
    streams = load.start()
    os.kill(first["owner"], signal.SIGKILL)
    assert load.get("/health") == {"status": "ok"}
    load.ends_well(streams)
    second = until(lambda: (c := load.wait_whole())["owner"] != first["owner"] and c)
    assert engines().keys() == own.keys()
    assert [(each["replica"], each["restarts"]) for each in second["models"][0]["replicas"]] == [
        (0, 0), (1, 0),
    ]  # fmt: skip
    pids = [[each["pid"] for each in cluster["routers"]] for cluster in (first, second)]
    assert pids[0] == pids[1]

    # an engine, of which the owner is the second one
    streams = load.start()
    lost = next(iter(own))
    own[lost].kill()
    load.ends_well(streams)
    until(lambda: len(engines()) == 2 and lost not in engines())
    third = load.wait_whole()
    assert sum(each["restarts"] for each in third["models"][0]["replicas"]) == 1

    # a router: the streams of its own clients end, no others
    streams = load.start()
    os.kill(third["routers"][0]["pid"], signal.SIGKILL)
    ends = [each.exception(WHILE_S) for each in streams]
    assert {type(each) for each in ends} <= {type(None), httpx.RemoteProtocolError, httpx.ReadError}
    load.ends_well([each for each, end in zip(streams, ends, strict=True) if end is None])
    load.wait_whole()

    # all of Ray, and the owner with it: streams wait for the next engines
    streams = load.start()
    before = engines()
    (keeper,) = [
        each
        for each in psutil.Process(load.server.process.pid).children(recursive=True)
        if any("gcs_server" in child.name() for child in each.children())
    ]
    keeper.kill()
    load.ends_well(streams)
    load.wait_whole()
    assert not before.keys() & engines().keys() and len(engines()) == 2

    # an operator ends it: nothing is left
    left = psutil.Process(load.server.process.pid).children(recursive=True)
    assert load.server.stop() == 0, load.server.output
    gone, alive = psutil.wait_procs(left, 30)
    assert not alive and gone and not engines()


def test_the_end_of_the_first_process_ends_all(load: Load) -> None:
    left = psutil.Process(load.server.process.pid).children(recursive=True)
    load.server.process.kill()
    _, alive = psutil.wait_procs(left, 60)
    assert not alive and not engines()


def test_an_engine_in_a_process_that_was_ready_outlives_the_owner(
    start_server: Callable[..., RunningServer],
) -> None:
    assert not engines()
    server = start_server(
        "--model", str(TINY), "--ray", "--replicas", "1", "--max-replicas", "2", "--ray-cpus", "1",
        "--routers", "2", "--max-length", "512", "--quantization-encoding", "float32",
        "--restart-wait", "240", "--batch-invariant",
    ).wait_ready()  # fmt: skip

    def post(path: str, body: Any = None) -> Any:
        with httpx.Client(base_url=server.url, timeout=WHILE_S) as http:
            answer = http.post(path, json=body or {})
        return answer.json() if answer.status_code == 200 else None

    def owner() -> Any:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            answer = http.get("/cluster")
        cluster = answer.json() if answer.status_code == 200 else {"models": []}
        if not cluster["models"] or len(cluster["routers"]) < 2:
            return None
        (replica,) = cluster["models"][0]["replicas"]
        return cluster["owner"] if replica["state"] == "ready" else None

    # an upgrade replaces the engine by the process that is ready, once that has its modules
    for _ in range(4):
        pair = until(lambda: len(found := engines()) == 2 and found)
        ready = max(pair, key=lambda pid: pair[pid].create_time())
        time.sleep(2)
        assert post("/cluster/upgrade") is not None, server.output
        # the next one starts only some seconds later
        time.sleep(0.5)
        if engines().keys() == {ready}:
            break
    else:
        raise AssertionError(f"no ready process was taken: {server.output}")
    whole = post("/v1/completions", BODY)["choices"]
    before = until(lambda: len(found := engines()) == 2 and found)

    first = until(owner)
    os.kill(first, signal.SIGKILL)
    until(lambda: (now := owner()) and now != first)
    # the next owner has taken the engine over, and has a process of its own that is ready
    assert post("/v1/completions", BODY)["choices"] == whole
    until(lambda: engines().keys() - before.keys())
    assert ready in engines()

    left = psutil.Process(server.process.pid).children(recursive=True)
    assert server.stop() == 0, server.output
    _, alive = psutil.wait_procs(left, 30)
    assert not alive
    until(lambda: not engines())
