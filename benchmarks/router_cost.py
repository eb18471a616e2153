"""What a router costs: CPU time of a request and what it adds to the latency, before engines that answer at once.

``python -m benchmarks.router_cost --model DIR`` needs two cores: one for the router, one for clients and engines. A
request is a chat of a system prompt and one question, or the text of a completion; each question is another one. The
answer has 16 tokens and comes as one event. `busy`: clients send their next request at once; the CPU time of the
router's process counts, not the wall's. `burst`: all clients send at once, and again after all answers. `paced`: they send some requests a second in all, and the time of an answer is
compared with that of a bare server that sends the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.runner import commit, exit_on_sigterm, machine
from benchmarks.servers import free_port
from benchmarks.workers.stub_router import KEY
from max.serve.process.running import loop_factory

QUESTION = "What is the capital of Norway (NUMBER), and how many people live there?"
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": QUESTION},
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "The capital of Norway (NUMBER) is"}),
    "completion, streamed": (
        "/v1/completions",
        {"prompt": "The capital of Norway (NUMBER) is", "stream": True},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat, streamed": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
}


def request_of(path: str, fields: dict[str, Any]) -> bytes:
    """The bytes of a request, with the headers of a usual client; six characters of it are the question's number."""
    body = json.dumps({"model": "m", "temperature": 0, "max_tokens": 16, **fields}).encode()
    lines = (
        f"POST {path} HTTP/1.1", "Host: 127.0.0.1", "Accept: application/json", "Accept-Encoding: gzip, deflate",
        "Connection: keep-alive", "User-Agent: OpenAI/Python 1.99", f"Authorization: Bearer {KEY}",
        "Content-Type: application/json", f"Content-Length: {len(body)}",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class Load:
    """Requests of several clients, each on a connection of its own.

    Args:
        port: The server's port.
        request: The request.
        count: The number of requests.
        clients: The number of clients.
        rate: The requests a second of all clients; 0: each sends the next one at once.
        together: Whether all send their next one together, after the last answer.
    """

    def __init__(
        self,
        port: int,
        request: bytes,
        count: int,
        clients: int,
        rate: float = 0.0,
        together: bool = False,
    ) -> None:
        self._port, self._request, self._clients = port, request, clients
        self._together, self._ready = together, list[Callable[[], None]]()
        self.left, self.pause = count, clients / rate if rate else 0.0
        self.seconds: list[float] = []
        """The times from the requests to the ends of their answers."""
        self.draw = random.Random()
        self.error: str | None = None

    def next_request(self) -> bytes | None:
        """The next request; None: there are no more."""
        if self.left <= 0 or self.error:
            return None
        self.left -= 1
        return self._request.replace(b"NUMBER", b"%06d" % self.draw.randrange(10**6))

    def send_next(self, send: Callable[[], None]) -> None:
        """Calls a function that sends a client's next request, when it is time for it."""
        if self._together:
            self._ready.append(send)
            if len(self._ready) < self._clients:
                return
            ready, self._ready = self._ready, []
            for each in ready:
                # the router has ended what follows the last answers
                asyncio.get_running_loop().call_later(0.01, each)
        elif self.pause:
            asyncio.get_running_loop().call_later(self.draw.expovariate(1 / self.pause), send)
        else:
            send()

    async def run(self) -> list[float]:
        """Sends the requests, and returns the times of the answers, the shortest first."""
        loop = asyncio.get_running_loop()
        ends: list[asyncio.Future[None]] = []
        for _ in range(self._clients):
            ends.append(loop.create_future())
            await loop.create_connection(lambda: _Client(self, ends[-1]), "127.0.0.1", self._port)
        await asyncio.gather(*ends)
        if self.error:
            raise RuntimeError(self.error)
        return sorted(self.seconds)


class _Client(asyncio.Protocol):
    """A client that keeps its connection."""

    def __init__(self, load: Load, end: asyncio.Future[None]) -> None:
        self._load, self._end = load, end
        self._answer, self._sent = b"", 0.0

    def connection_made(self, transport: Any) -> None:
        """Sends the first request; of paced clients, after some time.

        Args:
            transport: The connection.
        """
        self._transport = transport
        self._load.send_next(self._send)

    def _send(self) -> None:
        request = self._load.next_request()
        if request is None:
            self._transport.close()
            return
        self._answer, self._sent = b"", time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Notes the time of a whole answer."""
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) < int(length) if length else not body.endswith(b"\r\n0\r\n\r\n"):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._load.error = self._answer.decode()
        self._load.seconds.append(time.perf_counter() - self._sent)
        self._load.send_next(self._send)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends."""
        if self._load.left > 0 and not self._load.error:
            self._load.error = f"the connection was lost: {exc}"
        if not self._end.done():
            self._end.set_result(None)


@contextmanager
def routing(model: str, port: int, core: int, real_time: bool) -> Iterator[int]:
    """The number of a router's process.

    Args:
        model: The model.
        port: Its port.
        core: Its core.
        real_time: Whether it has real-time priority.
    """
    command = [sys.executable, "-m", "benchmarks.workers.stub_router", model, str(port), str(core)]
    process = subprocess.Popen(
        [*(["chrt", "-f", "10"] if real_time else []), *command], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if not process.stdout.readline().startswith("ready"):
            raise RuntimeError("the router has not started")
        yield process.pid
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """The CPU time of all threads of a process, in seconds."""
    tasks = Path(f"/proc/{pid}/task")
    return sum(int((each / "schedstat").read_text().split()[0]) for each in tasks.iterdir()) / 1e9


async def busy(pid: int, port: int, case: str, count: int, clients: int) -> float:
    """CPU seconds of the router for a request."""
    begin = cpu_s(pid)
    await Load(port, request_of(*CASES[case]), count, clients).run()
    return (cpu_s(pid) - begin) / count


async def bare_server(port: int) -> asyncio.Server:
    """A server that answers each read with the same answer."""
    body = b"x" * 460
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    class Bare(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport = transport

        def data_received(self, data: bytes) -> None:
            self._transport.write(answer)

    return await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", port)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """The median and the 99th percentile in milliseconds of sorted times."""
    return {
        f"p{percent}": 1e3 * seconds[min(len(seconds) * percent // 100, len(seconds) - 1)]
        for percent in (50, 99)
    }


async def measure(options: argparse.Namespace, pid: int, port: int) -> dict[str, Any]:
    """Measures all cases in turn."""
    found: dict[str, Any] = {case: {"cpu us": []} for case in options.cases}
    for round_ in range(options.rounds + 1):
        for case in options.cases:
            taken = await busy(pid, port, case, options.requests, options.clients)
            if round_:  # the first one warms up
                found[case]["cpu us"].append(taken * 1e6)
    direct_port = free_port()
    server = await bare_server(direct_port)
    for case in options.cases:
        best, request = min(found[case]["cpu us"]), request_of(*CASES[case])
        found[case]["requests/CPU s"] = 1e6 / best
        found[case]["median cpu us"] = statistics.median(found[case]["cpu us"])
        bursts = Load(
            port, request, options.requests // options.clients * options.clients, options.clients, together=True
        )  # fmt: skip
        found[case]["burst ms"] = quantiles(await bursts.run())
        paced = (options.requests, options.clients, options.rate)
        found[case]["paced ms"] = quantiles(await Load(port, request, *paced).run())
        found[case]["direct ms"] = quantiles(await Load(direct_port, request, *paced).run())
    server.close()
    return found


def main() -> None:
    """Measures, and prints the numbers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="the model's folder")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=4, help="the rounds of each case")
    parser.add_argument("--requests", type=int, default=2000, help="the requests of a round")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1000.0, help="requests a second, paced")
    parser.add_argument(
        "--real-time", action="store_true", help="priority over other work (needs the right)"
    )
    options = parser.parse_args()
    exit_on_sigterm()
    core, port = min(os.sched_getaffinity(0)), free_port()
    with routing(options.model, port, core, options.real_time) as pid:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core} or {core})
        if options.real_time:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            found = runner.run(measure(options, pid, port))
    print(json.dumps({"machine": machine(), "commit": commit(), **found}, indent=1))


if __name__ == "__main__":
    main()
