"""A server of one model answers while the model loads: what it does, and that requests are too early."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.serve.conftest import TINY

_STOPPED = """
import os, signal
from max.serve.worker import process
class Stopped(process.WorkerProcess):
    def __init__(self, settings):
        super().__init__(settings)
        self.signs.note_load("compiling kernels", 3, 17)
        os.kill(self.pid, signal.SIGSTOP)
process.WorkerProcess = Stopped
from max.entrypoints.cli import main
main()
"""
"""A server whose worker stands still until it gets SIGCONT."""
EARLY = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"model": "other", "prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "a"}]},
    "/api/chat": {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
}


class LoadingServer:
    """A server whose model does not go on loading before :meth:`proceed`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _STOPPED, "serve", str(TINY), "--served-model-name", "tiny", "--port", "0",
             "--metrics-port", "0", "--max-length", "128", "--quantization-encoding", "float32"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url = self.line(r"Listening on (http://\S+) while the model loads")

    def line(self, pattern: str) -> str:
        """What a line of the output has in place of a group; waits for the line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if match := re.match(pattern, line):
                return match[1]
        raise AssertionError(self.process.stderr and self.process.stderr.read())

    def proceed(self) -> None:
        """Lets the worker go on, and waits until the model is loaded."""
        for child in psutil.Process(self.process.pid).children():
            if child.status() == psutil.STATUS_STOPPED:
                child.resume()
        assert self.line(r"Server ready on (http://\S+) ") == self.url

    def ends(self, number: int) -> tuple[int, str]:
        """The exit code after a signal, and the errors that were printed."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[[], LoadingServer]]:
    """Starts servers, which are ended with the test."""
    servers: list[LoadingServer] = []

    def begin() -> LoadingServer:
        servers.append(LoadingServer())
        return servers[-1]

    yield begin
    for server in servers:
        if server.process.poll() is None:
            for child in psutil.Process(server.process.pid).children(recursive=True):
                child.kill()
            server.process.kill()
        server.process.wait(60)
        for stream in (server.process.stdout, server.process.stderr):
            if stream is not None:
                stream.close()


def test_a_server_tells_what_it_loads(start: Callable[[], LoadingServer]) -> None:
    server = start()
    step = {"model": "tiny", "step": "compiling kernels 3/17"}
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for path in ("/health", "/v1/health", "/ping"):
            answer = client.get(path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json() == {"status": "loading", "loading": [step]}
        for path, body in EARLY.items():
            answer = client.post(path, json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), path
            error: Any = answer.json()["error"]
            message = error if isinstance(error, str) else error["message"]
            assert message.startswith("Loading model tiny: compiling kernels 3/17"), path
        # a body that is wrong will not fit later, either
        assert client.post("/v1/chat/completions", json={"messages": 3}).status_code == 400
        (listed,) = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["status"]) == ("tiny", {"value": "loading"})
        for path in ("/api/tags", "/api/ps", "/metrics", "/version", "/", "/docs"):
            assert client.get(path).status_code == 200, path
    with ThreadPoolExecutor() as threads:
        clients = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=200)
        # the client tries again by itself
        made = threads.submit(clients.completions.create, model="tiny", prompt="One", max_tokens=3)
        server.proceed()
        assert made.result(120).usage.completion_tokens == 3
        clients.close()
    answer = httpx.get(f"{server.url}/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert "retry-after" not in answer.headers
    (listed,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (listed["id"], listed["status"]) == ("tiny", {"value": "loaded"})
    assert server.ends(signal.SIGINT)[0] == 0


def test_ctrl_c_ends_a_server_that_loads(start: Callable[[], LoadingServer]) -> None:
    server = start()
    children = psutil.Process(server.process.pid).children(recursive=True)
    with httpx.Client(base_url=server.url, timeout=120) as client:
        assert client.get("/health").status_code == 503
        code, errors = server.ends(signal.SIGINT)  # with an open connection
    assert code == 128 + signal.SIGINT
    assert "stopped by SIGINT before the server was ready" in errors
    assert "Traceback" not in errors
    assert not psutil.wait_procs(children, timeout=60)[1]


def test_a_model_that_cannot_be_loaded_ends_the_server(start: Callable[[], LoadingServer]) -> None:
    server = start()
    for child in psutil.Process(server.process.pid).children():
        if child.status() == psutil.STATUS_STOPPED:
            child.kill()
    _, errors = server.process.communicate(timeout=120)
    assert server.process.returncode == 1
    assert "the worker process ended while it loaded the model (signal SIGKILL)" in errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
