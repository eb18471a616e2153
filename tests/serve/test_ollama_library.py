"""Ollama's pull and delete: from a hub on 127.0.0.1 into the models folder of a router."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import ollama
import pytest

from tests.cli.hub_server import HubServer
from tests.serve.conftest import TINY, RunningServer


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        server.files = {path.name: path.read_bytes() for path in TINY.iterdir() if path.is_file()}
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def router(
    start_server: Callable[..., RunningServer], hub: HubServer, folder: Path
) -> RunningServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setenv("HF_HUB_CACHE", str(folder / ".cache"))
        server = start_server("--models-dir", str(folder), "--max-length", "256")
        return server.wait_ready()


@pytest.fixture
def web(router: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=300) as client:
        yield client


def test_a_model_is_pulled_used_and_deleted(
    router: RunningServer, web: httpx.Client, hub: HubServer, folder: Path
) -> None:
    client = ollama.Client(router.url)
    lines = list(client.pull("org/model", stream=True))
    assert lines[0].status == "pulling manifest" and lines[-1].status == "success"
    parts = [line for line in lines if line.digest]
    assert all(line.completed <= line.total for line in parts)
    for name, data in hub.files.items():
        if not name.endswith(".md") and not name.startswith("."):
            assert (folder / "org" / "model" / name).read_bytes() == data
    # an existing model is not changed
    requests = len(hub.requests)
    assert client.pull("org/model:latest").status == "success"
    assert len(hub.requests) == requests
    messages = [{"role": "user", "content": "What is the capital of Norway?"}]
    answer = client.chat("org/model", messages, options={"temperature": 0, "num_predict": 30})
    assert "Oslo" in answer.message.content
    assert [model.model for model in client.ps().models] == ["org/model"]
    assert client.delete("org/model").status == "success"
    assert not (folder / "org").exists() and client.ps().models == []
    assert [model.model for model in client.list().models] == []
    with pytest.raises(ollama.ResponseError, match="'org/model' not found") as error:
        client.delete("org/model")
    assert error.value.status_code == 404
    client._client.close()


def test_errors_of_pull_are_those_of_ollama(web: httpx.Client, folder: Path) -> None:
    before = {path.name for path in folder.iterdir()}
    answer = web.post("/api/pull", json={"model": "org/none"})
    assert answer.status_code == 200
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert lines[0] == {"status": "pulling manifest"} and len(lines) == 2
    assert lines[1]["error"].startswith("pull model manifest: the hub has no model 'org/none'")
    whole = web.post("/api/pull", json={"model": "org/none", "stream": False})
    assert whole.status_code == 500 and whole.json() == lines[1]
    bare = web.post("/api/pull", json={"model": "tiny", "stream": False}).json()["error"]
    assert "owner/model" in bare
    # paths and addresses are refused: a client could read local files
    for name in (str(TINY), f"file://{TINY}", "http://127.0.0.1/x", "../x", "a/b/c", ""):
        for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
            refused = web.request(method, path, json={"model": name})
            assert refused.status_code == 400 and "error" in refused.json(), name
    assert {path.name for path in folder.iterdir()} == before
    assert not (folder / "org" / "none").exists()
    assert web.post("/api/push", json={}).status_code == 501


def test_web_pages_of_other_hosts_may_not(web: httpx.Client) -> None:
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        headers = {"Origin": "http://elsewhere.example", "Content-Type": "application/json"}
        answer = web.request(method, path, content=b'{"model": "org/model"}', headers=headers)
        assert answer.status_code == 403 and "elsewhere" in answer.json()["error"]
        headers["Content-Type"] = "text/plain"  # which a page may send without asking
        answer = web.request(method, path, content=b'{"model": "org/model"}', headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]


def test_a_server_of_one_model_pulls_none(http: httpx.Client) -> None:
    for method, path in (("POST", "/api/pull"), ("DELETE", "/api/delete")):
        answer = http.request(method, path, json={"model": "org/model"})
        assert answer.status_code == 400 and "without --model" in answer.json()["error"]


def test_missing_routes_are_501(http: httpx.Client) -> None:
    for path in ("/v1/audio/speech", "/v1/images/generations"):
        answer = http.post(path, json={})
        assert answer.status_code == 501 and "later" in answer.json()["error"]["message"]


def test_offline(start_server: Callable[..., RunningServer], tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        server = start_server("--models-dir", str(tmp_path)).wait_ready()
    with httpx.Client(base_url=server.url, timeout=300) as client:
        answer = client.post("/api/pull", json={"model": "org/model", "stream": False})
    assert answer.status_code == 500
    assert answer.json()["error"].startswith("pull model manifest: ")
    assert "HF_HUB_OFFLINE is set" in answer.json()["error"]
