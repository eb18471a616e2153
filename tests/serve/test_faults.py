"""Faults: wrong keys, full queues, disconnecting clients, killed workers, signals."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from tests.serve.conftest import TINY, RunningServer

LONG = {
    "model": "tiny",
    "prompt": "import os",
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
WHILE_S = 300


@pytest.fixture(scope="module")
def faulty(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-batch-size", "2", "--max-queue", "1",
        "--api-key", "secret", "--max-length", "2048", "--graceful-shutdown-timeout", "600",
    ).wait_ready()  # fmt: skip


@pytest.fixture
def api(faulty: RunningServer):
    with openai.OpenAI(
        base_url=f"{faulty.url}/v1", api_key="secret", max_retries=0, timeout=WHILE_S
    ) as client:
        yield client


@pytest.fixture
def plain(faulty: RunningServer):
    with httpx.Client(
        base_url=faulty.url, headers={"Authorization": "Bearer secret"}, timeout=WHILE_S
    ) as client:
        yield client


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WHILE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def metric(plain: httpx.Client, name: str) -> float:
    lines = plain.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))


def test_every_route_but_health_needs_a_key(faulty: RunningServer) -> None:
    with httpx.Client(base_url=faulty.url) as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            for key in (None, "Bearer wrong", "secret", "Basic secret"):
                headers = {"Authorization": key} if key else {}
                answer = client.get(path, headers=headers)
                assert answer.status_code == 401 and "secret" not in answer.text
                assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/v1/models", headers={"x-api-key": "secret"}).status_code == 200
    with openai.OpenAI(base_url=f"{faulty.url}/v1", api_key="wrong") as wrong:
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_a_disconnect_frees_slot_and_pages(api, plain) -> None:
    stream = api.completions.create(**LONG, max_tokens=2000, stream=True)
    next(stream)
    until(lambda: metric(plain, "maxserve_cache_num_used_blocks") > 0)
    stream.close()
    until(lambda: plain.get("/load").json() == {"server_load": 0})
    until(lambda: metric(plain, "maxserve_cache_num_used_blocks") == 0)
    assert metric(plain, "maxserve_num_output_tokens_total") < 2000


def test_a_disconnect_has_its_own_status(plain) -> None:
    count = 'maxserve_request_count_total{code="499",path="/v1/completions"}'
    with pytest.raises(httpx.ReadTimeout):
        plain.post("/v1/completions", json={**LONG, "max_tokens": 2000}, timeout=0.3)
    until(lambda: f"\n{count} 1.0\n" in plain.get("/metrics").text)
    until(lambda: plain.get("/load").json() == {"server_load": 0})


def test_a_full_queue_is_429_with_retry_after(api, plain) -> None:
    streams = [api.completions.create(**LONG, max_tokens=2000, stream=True) for _ in range(2)]
    for stream in streams:
        next(stream)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(api.completions.create, **LONG, max_tokens=1)
        until(lambda: metric(plain, "maxserve_num_requests_queued") == 1)
        with pytest.raises(openai.RateLimitError, match="1 requests wait, and at most 1 may") as e:
            api.completions.create(**LONG, max_tokens=1)
        assert int(e.value.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        assert waiting.result(WHILE_S).choices[0].text


def test_a_killed_worker_is_replaced(api, plain, faulty: RunningServer) -> None:
    short = {**LONG, "max_tokens": 150}
    expected = api.completions.create(**short).choices[0].text
    stream = api.completions.create(**LONG, max_tokens=900, stream=True)
    next(stream)
    with ThreadPoolExecutor(2) as pool:
        # one running request and one waiting
        answers = [pool.submit(api.completions.create, **short) for _ in range(2)]
        until(lambda: metric(plain, "maxserve_num_requests_queued") == 1)
        faulty.worker.kill()
        until(lambda: plain.get("/health").status_code == 503)
        until(lambda: plain.get("/health").status_code == 200)
        # the stream goes on as well
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        for answer in answers:
            assert answer.result(WHILE_S).choices[0].text == expected
    assert metric(plain, "maxserve_worker_restarts") == 1
    assert plain.get("/load").json() == {"server_load": 0}
    assert "signal SIGKILL" in faulty.output


def test_a_signal_waits_for_open_requests(api, faulty: RunningServer) -> None:
    """Must be the last test of the file: it ends the server."""
    stream = api.completions.create(**LONG, max_tokens=200, stream=True)
    text = next(stream).choices[0].text
    worker = faulty.worker
    faulty.process.send_signal(signal.SIGTERM)
    chunks = list(stream)
    text += "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length" and len(text) > 200
    assert faulty.process.wait(300) == 0
    assert not worker.is_running()


def test_a_task_that_is_not_the_models(start_server) -> None:
    server = start_server("--model", str(TINY), "--task", "embeddings_generation")
    assert server.process.wait(WHILE_S) == 2
    server._reader.join(60)
    assert "is for text_generation, not for embeddings_generation" in server.output


def test_a_load_error_is_two_lines(start_server) -> None:
    server = start_server("--model", str(TINY / "nothing"))
    assert server.process.wait(WHILE_S) == 2
    server._reader.join(60)
    lines = server.output.splitlines()
    assert lines[0].startswith("max: error: ") and "nothing" in lines[0] and len(lines) == 2, lines
