"""A server with several processes on its port: what is killed, replaced, counted, and forwarded."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import websockets.sync.client

from tests.serve.conftest import TINY, RunningServer

pytestmark = pytest.mark.long
KEYS = ("first-key", "second-key")
QUESTION = [{"role": "user", "content": "What is the capital of Norway?"}]
BODY = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 40}
ANSWER = "The capital of Norway is Oslo."


@pytest.fixture(scope="module")
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "512", "--max-batch-size", "8",
        "--quantization-encoding", "float32", "--replicas", "2", "--routers", "3", "--api-key", KEYS[0],
        "--api-key", KEYS[1], "--key-requests-per-minute", "3000", "--max-key-requests", "24",
        "--graceful-shutdown-timeout", "2",
    ).wait_ready()  # fmt: skip


def web(server: RunningServer, key: str = KEYS[0]) -> httpx.Client:
    """A client with a new connection."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with web(server) as client:
        yield client


def routers(server: RunningServer) -> list[dict[str, Any]]:
    with web(server) as client:
        return client.get("/cluster").json()["routers"]


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_whichever_router_takes_it(server: RunningServer) -> None:
    """Stored responses, kept streams and metrics are those of the whole server."""
    with web(server) as first:
        body = {"model": "tiny", "input": QUESTION, "temperature": 0}
        stored = first.post("/v1/responses", json=body).json()
        name = {"X-Stream-Id": "s" * 20}
        kept = first.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=name).text

    def look(number: int) -> None:
        with web(server) as other:
            found = other.get(f"/v1/responses/{stored['id']}").json()
            assert found["output"] == stored["output"]
            assert other.get(f"/v1/streams/{'s' * 20}").text == kept
            assert content(other.post("/v1/chat/completions", json=BODY)) == ANSWER
        with web(server, KEYS[1]) as stranger:
            assert stranger.get(f"/v1/responses/{stored['id']}").status_code == 404
            assert stranger.get("/cluster", headers={"Authorization": ""}).status_code == 401

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(look, range(24)))
        with web(server) as first:
            lines = first.get("/metrics").text.splitlines()
    counted = [
        line for line in lines if 'request_count_total{code="200",path="/v1/chat/comp' in line
    ]
    assert [line.split()[-1] for line in counted] == ["25.0"]
    assert "maxserve_request_time_milliseconds_count 26.0" in lines


def test_a_websocket_is_the_owners(server: RunningServer) -> None:
    url = server.url.replace("http", "ws") + "/v1/responses"
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with websockets.sync.client.connect(url, additional_headers=headers) as connection:
        body = {"type": "response.create", "model": "tiny", "input": QUESTION, "temperature": 0}
        previous = None
        for _ in range(2):
            connection.send(json.dumps({**body, "previous_response_id": previous, "store": False}))
            for message in connection:
                event = json.loads(message)
                assert event["type"] != "error", event
                if event["type"] == "response.completed":
                    previous = event["response"]["id"]
                    break
    with pytest.raises(websockets.exceptions.InvalidStatus) as refused:
        websockets.sync.client.connect(url)
    assert refused.value.response.status_code == 401


def test_no_router_stores_chat_completions(client: httpx.Client) -> None:
    """Each would have others, and the owner has none of them."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    for more, status in (({"store": False}, 200), ({"store": True}, 400)):
        answer = client.post("/v1/chat/completions", json={**body, **more})
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "store"


def test_the_limits_of_a_key_hold_over_all_routers(server: RunningServer) -> None:
    """24 open requests of a key, however they are spread; other keys have their own."""
    port = int(server.url.rpartition(":")[2])
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEYS[1]}\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )

    def status(key: str) -> int:
        with web(server, key) as client:
            response = client.post("/v1/chat/completions", json=BODY)
            if response.status_code == 429:
                assert response.json()["error"]["code"] == "key_concurrency_limit"
            return response.status_code

    with contextlib.ExitStack() as held:
        for _ in range(24):
            assert status(KEYS[1]) == 200
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(head.encode())  # whose body does not come
            time.sleep(0.01)
        until(lambda: status(KEYS[1]) == 429)
        for _ in range(9):
            assert status(KEYS[1]) == 429 and status(KEYS[0]) == 200
    until(lambda: status(KEYS[1]) == 200)


def test_a_router_that_is_killed(server: RunningServer) -> None:
    """Its streams end, those of the others go on; what it held is free again, and it is back in seconds."""
    before = {router["router"]: router["pid"] for router in routers(server)}
    engines = {each["pid"] for each in _engines(server)}
    results: list[tuple[bool, str]] = []
    begun = threading.Barrier(13)

    def read() -> None:
        text, whole = "", False
        with web(server) as client:
            body = {**BODY, "max_tokens": 300, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                begun.wait(60)
                try:
                    for line in lines:
                        whole = whole or line == "data: [DONE]"
                        text += line
                except httpx.RemoteProtocolError:
                    pass
        results.append((whole, text))

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    busiest = max(before, key=lambda n: len(psutil.Process(before[n]).net_connections()))
    os.kill(before[busiest], signal.SIGKILL)
    killed = time.monotonic()
    for thread in threads:
        thread.join(60)
    assert any(not whole for whole, _ in results)
    assert any(whole for whole, _ in results)

    def is_back() -> bool:
        found = routers(server)
        return len(found) == 3 and all(each["state"] == "ready" for each in found)

    until(is_back)
    assert time.monotonic() - killed < 60
    after = {router["router"]: router["pid"] for router in routers(server)}
    assert set(before) - set(after) == {busiest}
    assert {each["pid"] for each in _engines(server)} == engines
    with web(server) as client:
        assert client.get("/health").json() == {"status": "ok"}
        until(lambda: client.get("/load").json()["server_load"] == 0)
        status = client.get("/cluster").json()["models"][0]["replicas"]
        assert [each["restarts"] for each in status] == [0, 0]
    assert "signal SIGKILL" in server.output


def _engines(server: RunningServer) -> list[dict[str, Any]]:
    """The processes that are no routers."""
    with web(server) as client:
        found = client.get("/cluster").json()
    known = {found["owner"], *(router["pid"] for router in found["routers"])}
    return [{"pid": each.pid} for each in server.workers if each.pid not in known]


def test_routers_and_engines_are_replaced_under_load(server: RunningServer) -> None:
    """No request is lost, on connections that stay open too."""
    ended, counts, failures = threading.Event(), [0] * 6, []

    def ask(number: int) -> None:
        while not ended.is_set():
            with web(server) as client:
                for _ in range(3):
                    try:
                        answer = client.post("/v1/chat/completions", json=BODY)
                        assert content(answer) == ANSWER
                        counts[number] += 1
                    except Exception as error:
                        failures.append(repr(error))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        before = {router["pid"] for router in routers(server)}
        with web(server) as client:
            answer = client.post("/cluster/upgrade", json={"routers": True}, timeout=200).json()
            assert len(answer["replaced"]) == 3
        until(lambda: len(routers(server)) == 3, 100)
        assert not before & {router["pid"] for router in routers(server)}
        with web(server) as client:
            answer = client.post("/cluster/upgrade", json={}, timeout=200).json()
            assert len(answer["replaced"]) == 2
        number = sum(counts)
        until(lambda: sum(counts) > number + 12)
    finally:
        ended.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures
    assert min(counts) > 0


def test_an_engine_that_is_killed(server: RunningServer) -> None:
    (engine, _) = [each["pid"] for each in _engines(server)]

    def ask(number: int) -> str:
        with web(server) as client:
            body = {**BODY, "max_tokens": 200, "ignore_eos": True}
            return content(client.post("/v1/chat/completions", json=body))

    with ThreadPoolExecutor(9) as pool:
        whole = ask(0)
        asking = [pool.submit(ask, number) for number in range(8)]
        time.sleep(0.2)
        os.kill(engine, signal.SIGKILL)
        assert {each.result() for each in asking} == {whole}
    with web(server) as client:

        def states() -> set[str]:
            found = client.get("/cluster").json()["models"][0]["replicas"]
            return {each["state"] for each in found}

        until(lambda: states() == {"ready"})


def test_a_router_that_is_stopped_is_replaced(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "512", "--routers", "2",
        "--quantization-encoding", "float32", "--unhealthy-after", "2", "--restart-after", "5",
    ).wait_ready()  # fmt: skip
    with httpx.Client(base_url=server.url, timeout=60) as client:
        stopped = client.get("/cluster").json()["routers"][0]["pid"]
    os.kill(stopped, signal.SIGSTOP)

    def found() -> list[int]:
        try:
            with httpx.Client(base_url=server.url, timeout=1) as client:
                each = client.get("/cluster").json()["routers"]
                return [r["pid"] for r in each if r["state"] == "ready"]
        except httpx.TimeoutException:
            return []  # the stopped one has taken the connection

    until(lambda: len(pids := found()) == 2 and stopped not in pids)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert content(client.post("/v1/chat/completions", json=BODY)) == ANSWER
    workers = psutil.Process(server.process.pid).children(recursive=True)
    # the first process is killed: all others end
    server.process.kill()
    server.process.wait(20)
    gone, alive = psutil.wait_procs(workers, 20)
    assert (
        not alive and len(gone) == 5
    )  # an owner, an engine, two routers, what cleans up for `multiprocessing`


def test_tls(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    """Of routers; what they forward stays within the machine, and knows the scheme."""
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([*command, *files, *names], check=True, capture_output=True)
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "512", "--routers", "2",
        "--quantization-encoding", "float32", "--ssl-certfile", files[3], "--ssl-keyfile", files[1],
    )  # fmt: skip
    line = until(lambda: [each for each in server.lines if each.startswith("Server ready")], 240)[0]
    url = line.split()[3]
    assert url.startswith("https://")
    trusted = ssl.create_default_context(cafile=files[3])
    for _ in range(4):  # new connections, of both routers
        with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
            assert content(client.post("/v1/chat/completions", json=BODY)) == ANSWER
            assert len(client.get("/cluster").json()["routers"]) == 2
            body = {"model": "tiny", "input": QUESTION, "temperature": 0}
            assert client.post("/v1/responses", json=body).json()["status"] == "completed"
    with websockets.sync.client.connect(
        url.replace("https", "wss") + "/v1/responses", ssl=trusted
    ) as connection:
        connection.send(json.dumps({"type": "response.create", **body}))
        events = [
            json.loads(message)["type"] for message, _ in zip(connection, range(3), strict=False)
        ]
        assert "response.created" in events
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=60)  # whose certificate nobody trusts
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/health", timeout=60)
    assert server.stop() == 0


def test_an_owner_that_is_killed(server: RunningServer) -> None:
    """Streams go on token by token, routers stay healthy; what only it had in memory is not found, and says so."""
    engines = {each["pid"] for each in _engines(server)}
    before = {router["router"]: router["pid"] for router in routers(server)}
    body = {**BODY, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with web(server) as client:
        owner = client.get("/cluster").json()["owner"]
        assert owner not in engines | set(before.values()) | {server.process.pid}
        whole = client.post("/v1/chat/completions", json=body).text.split("\n\n")
        stored = client.post("/v1/responses", json={"model": "tiny", "input": QUESTION}).json()
        name = {"X-Stream-Id": "k" * 20}
        client.post("/v1/chat/completions", json={**BODY, "stream": True}, headers=name)

    def seen(events: list[str]) -> tuple[str, str]:
        """The text of a stream, and why it ended."""
        data = [json.loads(each[6:]) for each in events if each.startswith("data: {")]
        choices = [choice for each in data for choice in each["choices"]]
        assert "data: [DONE]" in events
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        return text, choices[-1]["finish_reason"]

    begun, results = threading.Barrier(9), []

    def read() -> None:
        with web(server) as client:
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                chunks = stream.iter_text()
                text = next(chunks)
                begun.wait(60)
                results.append((text + "".join(chunks)).split("\n\n"))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    os.kill(owner, signal.SIGKILL)
    killed, refused = time.monotonic(), 0
    with web(server) as client:

        def is_back() -> bool:
            nonlocal refused
            assert client.get("/health").json() == {"status": "ok"}
            assert content(client.post("/v1/chat/completions", json=BODY)) == ANSWER
            found = client.get(f"/v1/responses/{stored['id']}")
            refused += found.status_code == 503
            assert found.status_code in (404, 503), found.text
            return found.status_code == 404

        until(is_back)
        assert refused
        assert time.monotonic() - killed < 60
        for thread in threads:
            thread.join(60)
        assert [seen(each) for each in results] == [seen(whole)] * 8
        assert client.get(f"/v1/streams/{'k' * 20}").status_code == 404
        lost = {"model": "tiny", "input": QUESTION, "previous_response_id": stored["id"]}
        refusal = client.post("/v1/responses", json=lost)
        assert refusal.status_code == 400, refusal.text
        assert stored["id"] in refusal.json()["error"]["message"]

    def found() -> Any:
        with web(server) as client:
            cluster = client.get("/cluster").json()
        return cluster if cluster["models"] and cluster["routers"] else None

    after = until(found)
    assert after["owner"] not in (owner, server.process.pid)
    assert {each["router"]: each["pid"] for each in after["routers"]} == before
    assert {each["pid"] for each in _engines(server)} == engines
    replicas = after["models"][0]["replicas"]
    assert [(each["replica"], each["restarts"]) for each in replicas] == [
        (number, 0) for number in sorted(each["replica"] for each in replicas)
    ]
    # the next owner watches and replaces engines and routers
    (engine, *_), router = engines, next(iter(before.values()))
    os.kill(router, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)

    def is_whole() -> bool:
        with contextlib.suppress(httpx.TransportError), web(server) as client:
            answer = client.get("/cluster")
            if answer.status_code == 200 and len(answer.json()["routers"]) == 3:
                states = {each["state"] for each in answer.json()["routers"]}
                states |= {each["state"] for each in answer.json()["models"][0]["replicas"]}
                pids = {each["pid"] for each in answer.json()["routers"]}
                return states == {"ready"} and router not in pids
        return False

    # the states are those of before until the owner has seen the losses
    until(lambda: is_whole() and engine not in {each["pid"] for each in _engines(server)})
    with web(server) as client:
        assert content(client.post("/v1/chat/completions", json=BODY)) == ANSWER
        until(lambda: client.get("/load").json()["server_load"] == 0)


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended: the first process takes the ends of others every two seconds."""
    found: list[psutil.Process] = []
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def test_the_end_of_a_server(server: RunningServer) -> None:
    """The last test of the server: open requests get their time, and nothing is left."""
    workers = running(psutil.Process(server.process.pid).children(recursive=True))
    lines: list[str] = []
    begun = threading.Event()

    def read() -> None:
        with web(server) as client:
            body = {**BODY, "stream": True}
            with client.stream("POST", "/v1/chat/completions", json=body) as stream:
                for line in stream.iter_lines():
                    lines.append(line)
                    begun.set()

    reading = threading.Thread(target=read)
    reading.start()
    begun.wait(30)
    assert server.stop() == 0
    reading.join(30)
    assert "data: [DONE]" in lines
    gone, alive = psutil.wait_procs(workers, 10)
    assert not alive and len(gone) == 7
    assert "Traceback" not in server.output, server.output
    assert "never retrieved" not in server.output, server.output


def test_options_that_do_not_go_together(start_server: Callable[..., RunningServer]) -> None:
    server = RunningServer("--routers", "2")
    assert server.process.wait(60) == 2
    assert server.stop() == 2  # closes its output
    assert "--routers needs a model" in server.output
