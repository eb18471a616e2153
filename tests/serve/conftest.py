"""A server in another process on a free port, and its clients."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.serve.browser import BROWSERS, Browser, open_browser

ROOT = Path(__file__).parents[2]
TINY = ROOT / "models" / "tiny-chat"
READY_S = 240.0
SERVER_OPTIONS = "MAX_TEST_SERVER_OPTIONS"
"""The variable with more options of the shared server, so that its tests run on replicas or a cluster too."""


def _command(process: psutil.Process) -> str:
    """The command line of a process; empty where it ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except (psutil.AccessDenied, psutil.NoSuchProcess):  # a zombie is the second
        return ""


class RunningServer:
    """A running server.

    Args:
        options: The options of ``max serve``.
        module: A module that is the command line; `max` if not given.
    """

    def __init__(self, *options: str, module: str = "") -> None:
        start = ["-m", module] if module else ["-c", "from max.entrypoints.cli import main; main()"]
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", "--port", "0", "--metrics-port", "0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # as users start it: a second start reads the compiled model, which higher levels of checks do not store
            env={**os.environ, "MAX_CHECK": "1", "PYTHONUNBUFFERED": "1"},
        )
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if match := re.search(r"Server ready on (http://\S+) \(Press CTRL\+C to quit\)", line):
                self.url = match[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self) -> RunningServer:
        """Waits for the line that announces readiness."""
        ready = self._ready.wait(READY_S) and self.url
        assert ready, f"exit code {self.process.poll()}: {self.output}"
        return self

    @property
    def output(self) -> str:
        """The output of the server so far."""
        return "".join(self.lines)

    @property
    def workers(self) -> list[psutil.Process]:
        """The running processes of its workers, and of its routers."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        spawned = [child for child in children if "multiprocessing-fork" in _command(child)]
        # with routers, the first process starts the owner of the engines, which starts all others
        owners = {each.ppid() for each in spawned}
        return [child for child in spawned if child.pid not in owners]

    @property
    def worker(self) -> psutil.Process:
        """The first process of its workers."""
        return self.workers[0]

    def stop(self) -> int:
        """Sends the signal of an operator, and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(300)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            self._reader.join(60)
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.fixture(scope="session")
def start_server() -> Iterator[Callable[..., RunningServer]]:
    """Starts servers, which are stopped at the end of the session."""
    servers: list[RunningServer] = []

    def start(*options: str) -> RunningServer:
        servers.append(RunningServer(*options))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    """A server of tiny-chat, shared by all tests that do not change it."""
    return start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "512",
        "--max-batch-size", "8", "--quantization-encoding", "float32",
        "--max-request-bytes", "200000",
        *os.environ.get(SERVER_OPTIONS, "").split(),
    ).wait_ready()  # fmt: skip


@pytest.fixture(
    scope="session", params=["chromium", pytest.param("firefox", marks=pytest.mark.long)]
)
def browser(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    """A browser, shared by the tests of pages: each begins with pages that the browser has never seen."""
    if not BROWSERS[request.param]:
        pytest.skip(f"{request.param} is not installed, or its driver is not")
    browser = open_browser(request.param, str(tmp_path_factory.mktemp("profile")))
    yield browser
    browser.close()


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx.Client]:
    """A plain client of that server."""
    with httpx.Client(base_url=server.url, timeout=300) as client:
        yield client


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's client of that server."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:
        yield client
