"""However a server ends, it says why, and its exit code tells."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation.process.events import EngineReady
from max.serve.models.loading import load_model
from max.serve.models.pool_entry import PoolLimits
from max.serve.process.listener import open_socket
from max.serve.process.server import RouterSettings, run_server
from max.serve.process.settings import ServerSettings, WorkerSettings
from max.serve.worker import replica as worker_replica
from max.serve.worker.client import EngineClient, EngineState
from max.serve.worker.process import WorkerProcess
from tests.serve.conftest import TINY, RunningServer
from tests.serve.test_engine_client import FakeWorker, Workers, until

SERVE = "from max.entrypoints.cli import main; main()"


def serve(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs `max serve` after other code, to its end."""
    command = [sys.executable, "-c", code + SERVE, "serve", "--port", "0", "--metrics-port", "0"]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize(
    "error", ["BrokenPipeError(32, 'Broken pipe')", "OSError(11, 'Resource temporarily unavailable')"]
)  # fmt: skip
def test_a_worker_that_cannot_be_started(error: str) -> None:
    """On a loaded machine; click and the command line took the first of them for a closed output."""
    code = f"""
import multiprocessing.context as context
def start(self):
    raise {error}
context.SpawnProcess.start = start
"""
    done = serve(code, "--model", str(TINY))
    assert done.returncode == 2 and not done.stdout
    assert "the worker process cannot be started: " in done.stderr and "ulimit" in done.stderr


def test_a_broken_pipe_that_is_not_the_output() -> None:
    code = """
import click
from max.entrypoints.cli.errors import report
@click.command()
def command():
    print("before")
    raise BrokenPipeError(32, "Broken pipe")
raise SystemExit(report(command, []))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1 and done.stdout == "before\n"
    assert done.stderr == (
        "max: error: a process that this command talked to has ended (broken pipe)\n"
    )


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Runs `max serve` in this process, and returns its exit code: an interpreter that starts imports for seconds."""
    loggers = [logging.getLogger(name) for name in ("max", "uvicorn")]
    logs = [(each, each.handlers[:], each.level, each.propagate) for each in loggers]
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [(number, signal.getsignal(number)) for number in numbers]
    monkeypatch.setattr(faulthandler, "enable", lambda: None)
    yield lambda *options: report(cli, ["serve", "--port", "0", "--metrics-port", "0", *options])
    for number, handler in handlers:
        signal.signal(number, handler)
    for each, kept, level, propagate in logs:
        each.handlers[:], each.propagate = kept, propagate
        each.setLevel(level)


def test_a_worker_that_is_killed_while_it_loads(command, monkeypatch, capfd) -> None:
    class Killed(WorkerProcess):
        def __init__(self, settings: WorkerSettings) -> None:
            super().__init__(settings)
            self._process.kill()

    monkeypatch.setattr("max.serve.worker.process.WorkerProcess", Killed)
    assert command("--model", str(TINY)) == 1
    text = "the worker process ended while it loaded the model (signal SIGKILL)"
    assert text in capfd.readouterr().err


def test_a_signal_while_the_model_loads(command, monkeypatch, capfd) -> None:
    """The worker, which does not answer any more, is ended too."""
    workers: list[WorkerProcess] = []

    class Stopped(WorkerProcess):
        def __init__(self, settings: WorkerSettings) -> None:
            super().__init__(settings)
            workers.append(self)
            assert self.pid is not None
            os.kill(self.pid, signal.SIGSTOP)

    async def load(*arguments: Any, **named: Any) -> Any:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return await load_model(*arguments, **named)

    monkeypatch.setattr("max.serve.worker.process.WorkerProcess", Stopped)
    monkeypatch.setattr("max.serve.process.server.load_model", load)
    assert command("--model", str(TINY)) == 128 + signal.SIGTERM
    assert "max: stopped by SIGTERM before the server was ready\n" in capfd.readouterr().err
    assert [worker.exit_reason for worker in workers] == ["signal SIGKILL"]


def test_a_signal_that_stops_a_server_is_named(
    start_server: Callable[..., RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            continue  # as under nohup, where the server goes on, too
        server = start_server("--models-dir", str(tmp_path)).wait_ready()
        server.process.send_signal(number)
        assert server.process.wait(300) == 0
        server.stop()
        assert server.lines[-1] == f"Server stops: {number.name}\n"
        # nobody waits for an answer that no model gives
        assert f"{tmp_path} has no models yet; `max pull" in server.output


OPEN_ENDS = (
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2000}, "engine_unavailable"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "engine_unavailable"),
    ("/v1/responses", {"input": "a"}, "engine_unavailable"),
    ("/v1/messages", {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "a"}]}, "overloaded"),
    ("/api/generate", {"model": "tiny", "prompt": "a"}, "the server shuts down"),
)  # fmt: skip
"""Requests, and what is in the error that ends them."""


@pytest.mark.parametrize("twice", [False, True], ids=["late", "twice"])
def test_open_requests_end_with_an_error(
    start_server: Callable[..., RunningServer], twice: bool
) -> None:
    """Where their time is over or a second signal comes; no answer that was cut looks whole."""
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-batch-size", "1",
        "--graceful-shutdown-timeout", "600" if twice else "0.5",
    ).wait_ready()  # fmt: skip

    def send(case: int, stream: bool) -> tuple[int, str]:
        path, body, _ = OPEN_ENDS[case]
        answer = httpx.post(server.url + path, json={**body, "stream": stream}, timeout=300)
        return answer.status_code, answer.text

    first = {**OPEN_ENDS[0][1], "stream": True, "ignore_eos": True}
    waiting = {(case, stream) for case in range(len(OPEN_ENDS)) for stream in (False, True)}
    with (
        ThreadPoolExecutor(len(waiting)) as pool,
        httpx.Client(base_url=server.url, timeout=300) as client,
        client.stream("POST", OPEN_ENDS[0][0], json=first) as began,
    ):
        lines = began.iter_lines()
        assert '"text"' in next(lines)
        server.worker.suspend()  # no request ends by itself
        futures = {key: pool.submit(send, *key) for key in waiting}
        while client.get("/load").json()["server_load"] != 1 + len(waiting):
            time.sleep(0.05)
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        if twice:
            while "open requests to end" not in server.output:
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
        events = [line for line in lines if line]
        answers = {key: future.result() for key, future in futures.items()}
    # far less than the time that they had, or than a worker that does not answer
    assert server.process.wait(300) == 0 and time.monotonic() - begin < 300
    server.stop()
    assert "engine_unavailable" in events[-1] and not any("cancelled" in each for each in events)
    for (case, _), (status, text) in answers.items():
        assert status == 503 and OPEN_ENDS[case][2] in text, (OPEN_ENDS[case][0], status, text)
    assert "Traceback" not in server.output, server.output
    assert f"{1 + len(waiting)} open requests end with an error" in server.output


def test_readers_that_do_not_read_delay_no_stop(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(
        "--model", str(TINY), "--max-batch-size", "4", "--graceful-shutdown-timeout", "0.2"
    ).wait_ready()
    host, port = server.url.removeprefix("http://").split(":")
    body = (
        b'{"prompt": "a", "max_tokens": 1500, "logprobs": 20, "stream": true, "ignore_eos": true}'
    )
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: %d\r\n\r\n"
    readers: list[socket.socket] = []
    with contextlib.ExitStack() as sockets:
        for _ in range(4):
            connection = sockets.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            connection.sendall(head % len(body) + body)
            readers.append(connection)
        part = sockets.enter_context(socket.create_connection((host, int(port))))
        part.sendall(head % 100 + body[:20])  # a body that does not come
        for connection in readers:
            assert connection.recv(1) == b"H"
        time.sleep(0.5)
        assert server.stop() == 0
    assert "Traceback" not in server.output, server.output


def test_a_thread_that_nothing_ends_delays_no_stop(tmp_path: Path) -> None:
    """As one that compiles a hostile grammar."""
    code = (
        "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()\n" + SERVE
    )
    options = ["serve", "--port", "0", "--metrics-port", "0", "--models-dir", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-c", code, *options], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("Server ready" in line for line in process.stdout)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0
        finally:
            process.kill()


def test_a_worker_says_that_its_server_has_gone(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--model", str(TINY), "--max-length", "64").wait_ready()
    worker = server.worker
    os.kill(server.process.pid, signal.SIGKILL)
    worker.wait(300)
    server.stop()
    assert "the other end of the engine's channel was closed" in server.output


def test_a_port_that_another_process_takes_meanwhile(tmp_path: Path) -> None:
    """Two servers may bind a port; the second one to listen cannot."""
    listener = open_socket(ServerSettings(port=0))
    port = listener.getsockname()[1]
    settings = ServerSettings(port=port, metrics_port=None)
    router = RouterSettings(tmp_path, PoolLimits(), WorkerSettings({}))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((settings.host, port))
        other.listen()
        with pytest.raises(
            ConfigError, match=f"cannot listen on .*:{port}: Address already in use"
        ):
            run_server(settings, router, listener)


def test_a_worker_that_cannot_be_started_again(monkeypatch, caplog) -> None:
    """The next attempt comes, and after some of them every request gets the reason."""
    monkeypatch.setattr(worker_replica, "_FIRST_DELAY_S", 1e-3)
    workers = Workers()
    attempts: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def start() -> FakeWorker:
        if workers.started and not attempts.get(timeout=300):
            raise OSError(11, "Resource temporarily unavailable")
        return workers.start()

    async def whole() -> None:
        client = EngineClient(start)
        client.start()
        await client.wait_ready()
        for succeeds in (False, False, True):
            attempts.put(succeeds)
        workers.started[0].die()
        await until(lambda: len(workers.started) == 2 and client.state is EngineState.READY)
        for _ in range(worker_replica.MOST_FAILED_STARTS):
            attempts.put(False)
        workers.started[1].die()
        await until(lambda: client.state is EngineState.STOPPED)
        await client.close()

    asyncio.run(whole())
    assert "a worker process cannot be started: [Errno 11]" in caplog.text
    assert "no worker process can be started: [Errno 11]" in caplog.text


def test_messages_that_cannot_be_read_are_a_lost_worker(caplog) -> None:
    class Garbled(FakeWorker):
        def receive_all(self) -> list:
            event = self.events.get()
            if event is None:
                raise ValueError("no msgpack")
            return [event]

    first = Garbled()
    workers = Workers()

    async def whole() -> None:
        client = EngineClient(workers.start, first)
        client.start()
        first.events.put(EngineReady(4, 128, 10))
        await client.wait_ready()
        first.events.put(None)
        await until(lambda: client.restarts == 1 and client.state is EngineState.READY)
        await client.close(finish=False)

    asyncio.run(whole())
    assert "cannot be read" in caplog.text and "no msgpack" in caplog.text
