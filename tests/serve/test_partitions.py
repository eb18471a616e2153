"""Networks that stop to deliver: every request is answered, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from max.serve.process.settings import WatchLimits, WorkerSettings
from max.serve.remote import host
from max.serve.remote.host import EngineHost
from max.serve.remote.worker import RemoteWorker
from max.serve.worker.client import EngineClient, EngineState
from tests.pipelines.counting_pipeline import expected
from tests.serve.engine_at_address import KEY, run_counting
from tests.serve.test_engine_client import until
from tests.serve.test_remote_workers import answer

ROOT = Path(__file__).parents[2]
LIMITS = WatchLimits(unhealthy_s=0.5, restart_s=1.0, step_s=0, wait_s=60)


class Network:
    """A proxy before an engine, which can stop to deliver, without a word to either side."""

    def __init__(self, port: int) -> None:
        self._port, self.delivers = port, threading.Event()
        self.delivers.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                engine = socket.create_connection(("127.0.0.1", self._port), 10)
            except OSError:
                return
            engine.settimeout(None)
            self._sockets += [client, engine]
            for ends in ((client, engine), (engine, client)):
                self._threads.append(threading.Thread(target=self._copy, args=ends, daemon=True))
                self._threads[-1].start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.delivers.wait()
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.delivers.set()
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


class Partitioned(RemoteWorker):
    """An engine in threads of this process, behind such a network."""

    def __init__(self) -> None:
        self.engine = EngineHost(KEY, "127.0.0.1")
        self.network = Network(self.engine.port)
        settings = WorkerSettings({}, unhealthy_s=0.5)
        self.thread = threading.Thread(target=self.engine.run, args=(settings,), daemon=True)
        self.thread.start()
        super().__init__(
            "127.0.0.1", self.network.port, KEY, 0.5, self.engine.close, self.thread.join
        )


def thread_count(name: str) -> int:
    """The threads of a name."""
    return sum(thread.name == name for thread in threading.enumerate())


def sockets() -> list[str]:
    """The sockets of this process."""
    gc.collect()
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in found if name.startswith("socket:")]


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_a_network_that_stops_to_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice: one engine, then both at the same time, which heal before they are given up."""
    monkeypatch.setattr(host, "run_engine", run_counting)
    workers: list[Partitioned] = []

    def start() -> Partitioned:
        workers.append(Partitioned())
        return workers[-1]

    async def whole() -> None:
        client = EngineClient(start, None, LIMITS)
        client.add_replica(start)
        client.start()
        async with asyncio.timeout(90):
            await client.wait_ready()
            reading = [asyncio.ensure_future(answer(client, f"a{i}", i, new=90)) for i in range(6)]
            await until(lambda: min(len(client.of(each)) for each in client.replicas) > 0)
            workers[0].network.delivers.clear()
            assert await asyncio.gather(*reading) == [expected((i,), 90) for i in range(6)]
            await until(lambda: [r.state for r in client.replicas] == [EngineState.READY] * 2)
            assert client.restarts == 1 and len(workers) == 3 and client.responds
            # the reader of the lost one has ended, although its network is still silent
            await until(lambda: thread_count("engine events") <= readers + 2)
            reading = [asyncio.ensure_future(answer(client, f"b{i}", i, new=90)) for i in range(6)]
            await until(lambda: min(len(client.of(each)) for each in client.replicas) > 0)
            for worker in workers[1:]:
                worker.network.delivers.clear()
            await asyncio.sleep(0.6)
            for worker in workers[1:]:
                worker.network.delivers.set()
            assert await asyncio.gather(*reading) == [expected((i,), 90) for i in range(6)]
            await until(lambda: client.responds)
        await client.close(finish=False, timeout=1)
        assert client.open_requests == 0

    before, threads, readers = sockets(), engine_threads(), thread_count("engine events")
    asyncio.run(whole())
    for worker in workers:
        worker.network.close()
        worker.thread.join(20)
        assert not worker.thread.is_alive()
    wait_ended(before, threads)


def engine_threads() -> set[threading.Thread]:
    """The threads of workers."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("engine")}


def wait_ended(before: list[str], threads_before: Collection[threading.Thread]) -> None:
    """Waits until no thread of a worker and no socket is left; the threads of pools stay, and are reused."""
    end = time.monotonic() + 20
    while True:
        threads = engine_threads() - set(threads_before)
        left = set(sockets()) - set(before)
        if not threads and not left:
            return
        assert time.monotonic() < end, f"threads {threads}, sockets {left}"
        time.sleep(0.05)


@pytest.fixture
def namespaces() -> Iterator[Callable[[], tuple[str, str, str]]]:
    """Makes network namespaces: their names, their addresses, the devices that lead there."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command `ip`")
    made: list[str] = []

    def make() -> tuple[str, str, str]:
        number = len(made)
        name, device, net = (
            f"part{os.getpid()}-{number}",
            f"pt{os.getpid() % 9999}-{number}",
            f"10.213.{number}",
        )
        made.append(name)
        for words in (
            f"ip netns add {name}",
            f"ip link add {device} type veth peer name eth0 netns {name}",
            f"ip addr add {net}.1/24 dev {device}",
            f"ip link set {device} up",
            f"ip -n {name} addr add {net}.2/24 dev eth0",
            f"ip -n {name} link set eth0 up",
        ):
            done = subprocess.run(words.split(), capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"{words}: {done.stderr}")
        return name, f"{net}.2", device

    yield make
    for name in made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.long
def test_machines_that_are_cut_off(namespaces: Callable[[], tuple[str, str, str]]) -> None:
    """Engines in network namespaces; the device of one goes down: it ends by itself, and its streams go on."""
    processes: list[subprocess.Popen[str]] = []
    devices: list[str] = []

    def start() -> RemoteWorker:
        name, address, device = namespaces()
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "tests.serve.engine_at_address", address],
            stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        )  # fmt: skip
        processes.append(process)
        devices.append(device)
        assert process.stdout is not None
        port = int(process.stdout.readline())

        def wait(timeout: float | None) -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout)

        # a server cannot kill what it cannot reach
        return RemoteWorker(address, port, KEY, 0.5, lambda: None, wait)

    async def whole() -> None:
        client = EngineClient(start, None, LIMITS)
        client.add_replica(start)
        client.start()
        async with asyncio.timeout(150):
            await client.wait_ready()
            reading = [asyncio.ensure_future(answer(client, f"a{i}", i, new=200)) for i in range(6)]
            await until(lambda: min(len(client.of(each)) for each in client.replicas) > 0)
            subprocess.run(["ip", "link", "set", devices[0], "down"], check=True)
            assert await asyncio.gather(*reading) == [expected((i,), 200) for i in range(6)]
            await until(lambda: [r.state for r in client.replicas] == [EngineState.READY] * 2)
            assert client.restarts == 1 and client.responds and len(processes) == 3
            assert await answer(client, "b", 3) == expected((3,), 20)
        await client.close(finish=False, timeout=1)

    before, threads = sockets(), engine_threads()
    asyncio.run(whole())
    # also the one that is cut off, which nobody has told
    assert [process.wait(90) for process in processes] == [0, 0, 0]
    for process in processes:
        assert process.stdout is not None
        process.stdout.close()
    wait_ended(before, threads)
