"""A server without a model: models of a folder are loaded at their first request and unloaded when idle."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.conftest import TINY, RunningServer

ASK = {
    "messages": [{"role": "user", "content": "What is the capital of Norway?"}],
    "temperature": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def router(start_server: Callable[..., RunningServer], folder: Path) -> RunningServer:
    shutil.copytree(TINY, folder / "tiny")
    shutil.copytree(TINY, folder / "lab" / "other")
    broken = Path(shutil.copytree(TINY, folder / "broken"))
    weights = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(weights[:5000])
    return start_server(
        "--models-dir", str(folder), "--idle-timeout", "300", "--max-loaded-models", "1",
        "--max-length", "256", "--max-batch-size", "4",
    ).wait_ready()  # fmt: skip


@pytest.fixture
def web(router: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=300) as client:
        yield client


def states(web: httpx.Client) -> dict[str, str]:
    names = ("tiny", "lab/other", "broken")
    data = web.get("/v1/models").json()["data"]
    return {each["id"]: each["status"]["value"] for each in data if each["id"] in names}


def answer(web: httpx.Client, model: str) -> str:
    done = web.post("/v1/chat/completions", json={**ASK, "model": model})
    assert done.status_code == 200, done.text
    return done.json()["choices"][0]["message"]["content"]


def test_models_come_and_go(router: RunningServer, web: httpx.Client) -> None:
    assert web.get("/health").status_code == 200 and not router.workers
    assert states(web) == dict.fromkeys(("tiny", "lab/other", "broken"), "unloaded")
    assert "Oslo" in answer(web, "tiny")
    assert states(web)["tiny"] == "loaded" and len(router.workers) == 1
    # at most one model: the other one replaces it
    assert "Oslo" in answer(web, "lab/other")
    assert states(web) == {"tiny": "unloaded", "lab/other": "loaded", "broken": "unloaded"}
    assert len(router.workers) == 1
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda name: answer(web, name), ["tiny", "lab/other"] * 2))
    assert all("Oslo" in text for text in texts)


def test_errors(router: RunningServer, web: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0, timeout=300)
    with client:
        with pytest.raises(openai.NotFoundError, match="Did you mean 'lab/other'"):
            client.chat.completions.create(model="othr", messages=ASK["messages"])
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="cannot be loaded") as error:
                client.chat.completions.create(model="broken", messages=ASK["messages"])
            assert error.value.status_code == 503 and error.value.code == "model_load_failed"
    assert states(web)["broken"] == "failed" and web.get("/health").status_code == 200
    assert "Oslo" in answer(web, "tiny")
    missing = web.post("/models/load", json={"model": "none"})
    assert missing.status_code == 404 and missing.json()["error"]["param"] == "model"


def test_load_unload_and_keep_alive(router: RunningServer, web: httpx.Client) -> None:
    loaded = web.post("/models/load", json={"model": "tiny"}).json()
    assert loaded["success"] and loaded["status"]["value"] == "loaded"
    assert loaded["max_model_len"] == 256
    assert web.get("/v1/models/tiny").json()["status"]["value"] == "loaded"
    unloaded = web.post("/models/unload", json={"model": "tiny"}).json()
    assert unloaded["success"]
    assert all(loaded[name] == unloaded[name] for name in ("id", "created", "root"))
    assert states(web)["tiny"] == "unloaded" and not router.workers
    assert web.post("/models/unload", json={"model": "tiny"}).status_code == 400
    # by Ollama's API
    body = {"model": "tiny:latest", "messages": [], "stream": False}
    assert web.post("/api/chat", json={**body, "keep_alive": "1h"}).json()["done_reason"] == "load"
    (running,) = web.get("/api/ps").json()["models"]
    assert running["name"] == "tiny" and running["expires_at"] < "9999"
    # a time beyond all dates
    for keep_alive in (10**30, f"{'9' * 500}h"):
        assert web.post("/api/chat", json={**body, "keep_alive": keep_alive}).status_code == 200
        (running,) = web.get("/api/ps").json()["models"]
        assert "2100" < running["expires_at"] < "2200"
    assert {each["name"] for each in web.get("/api/tags").json()["models"]} >= {"tiny", "lab/other"}
    bad = web.post("/api/chat", json={**body, "keep_alive": "soon"})
    assert bad.status_code == 400 and "keep_alive" in bad.json()["error"]
    assert web.post("/api/chat", json={**body, "keep_alive": 0}).json()["done_reason"] == "unload"
    end = time.monotonic() + 300
    while router.workers:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert web.get("/api/ps").json()["models"] == []


def test_a_loaded_model_whose_files_are_deleted(
    router: RunningServer, web: httpx.Client, folder: Path
) -> None:
    """It serves until it is unloaded; then there is none."""
    shutil.copytree(TINY, folder / "short-lived")
    assert web.post("/models/load", json={"model": "short-lived"}).status_code == 200
    shutil.rmtree(folder / "short-lived")
    assert "Oslo" in answer(web, "short-lived")
    (running,) = web.get("/api/ps").json()["models"]
    assert running["name"] == "short-lived" and running["size"] > 0
    shown = web.post("/api/show", json={"model": "short-lived"})
    assert shown.status_code == 200 and shown.json()["template"]
    assert web.get("/v1/models/short-lived").json()["status"]["value"] == "loaded"
    assert web.post("/models/unload", json={"model": "short-lived"}).status_code == 200
    gone = web.post("/v1/chat/completions", json={**ASK, "model": "short-lived"})
    assert gone.status_code == 404 and gone.json()["error"]["code"] == "model_not_found"
