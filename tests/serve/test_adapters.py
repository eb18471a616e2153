"""Adapters of a server: named by requests, loaded and unloaded while others are served, kept over a lost worker."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from max.pipelines.core.exceptions import UnknownAdapterError
from max.pipelines.generation.process.events import ErrorInfo
from max.serve.errors import of_user_error
from tests.adapters.tiny_chat import make_adapter
from tests.serve.conftest import TINY, RunningServer

PROMPTS = ["What is the capital of Norway?", "Count from 3 to 9.", "Sort: d a c b", "Hello!"]


class AdapterServer:
    """A server with adapters, and the answers of single requests."""

    def __init__(self, server: RunningServer, folders: dict[str, Path]) -> None:
        self.server, self.folders = server, folders
        self.http = httpx.Client(base_url=server.url, timeout=300)
        self.single: dict[tuple[str, str], str] = {}

    def answer(self, model: str, prompt: str, **fields: Any) -> httpx.Response:
        body = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
            "max_tokens": 12, **fields,
        }  # fmt: skip
        return self.http.post("/v1/chat/completions", json=body)

    def text(self, model: str, prompt: str, **fields: Any) -> str:
        response = self.answer(model, prompt, **fields)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    def load(self, name: str, folder: str = "") -> httpx.Response:
        path = self.folders[folder or name]
        return self.http.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)}
        )

    def unload(self, name: str) -> httpx.Response:
        return self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def listed(self) -> dict[str, Any]:
        return {each["id"]: each for each in self.http.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def adapters(
    start_server: Callable[..., RunningServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterServer]:
    folder = tmp_path_factory.mktemp("adapters")
    folders = {
        f"a{i}": make_adapter(folder / f"a{i}", i, rank=[16, 3, 8, 1, 5, 2, 12, 7][i], size=0.25)
        for i in range(8)
    }
    server = start_server(
        "--model", str(TINY), "--served-model-name", "tiny", "--max-length", "256", "--max-batch-size", "16",
        "--quantization-encoding", "float32", "--enable-lora", "--max-loras", "4",
        "--lora-paths", f"a0={folders['a0']}", f"a1={folders['a1']}",
    ).wait_ready()  # fmt: skip
    adapters = AdapterServer(server, folders)
    yield adapters
    adapters.http.close()


def test_requests_name_adapters(adapters: AdapterServer) -> None:
    listed = adapters.listed()
    assert listed["a0"]["parent"] == "tiny" and listed["tiny"]["parent"] is None
    assert adapters.http.get("/v1/models/a1").json()["parent"] == "tiny"
    prompt = PROMPTS[0]
    plain, first = adapters.text("tiny", prompt), adapters.text("a0", prompt)
    assert plain == "The capital of Norway is Oslo." and first != plain
    # again, with the prefix in the cache: that of an adapter serves no other
    assert (adapters.text("tiny", prompt), adapters.text("a0", prompt)) == (plain, first)
    assert adapters.text("tiny", prompt, lora="a0") == first
    assert adapters.text("tiny", prompt, lora={"name": "a0", "scale": 0}) == plain
    assert adapters.answer("a0", prompt).json()["model"] == "a0"
    assert adapters.answer("tiny", prompt, lora="a0").json()["model"] == "tiny"
    missing = adapters.answer("tiny", prompt, lora="a7")
    assert missing.status_code == 404 and "a0, a1" in missing.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("completions", {"prompt": "x", "max_tokens": 2}),
        ("responses", {"input": "x", "max_output_tokens": 2}),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_answers_have_the_name_that_requests_give(
    adapters: AdapterServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    """Clients that count or route by the name of a model know the adapter by it."""
    for name in ("a0", "tiny"):
        response = adapters.http.post(f"/v1/{path}", json={**body, "model": name, "stream": stream})
        assert response.status_code == 200, response.text
        assert set(re.findall(r'"model": ?"(\w+)"', response.text)) == {name}


def test_loads_and_unloads(adapters: AdapterServer) -> None:
    assert adapters.answer("sql", "x").status_code == 404
    assert adapters.load("sql", "a2").status_code == 200
    assert adapters.listed()["sql"]["root"] == str(adapters.folders["a2"])
    assert adapters.load("sql", "a2").status_code == 200, "the same again"
    taken = adapters.load("sql", "a3")
    assert taken.status_code == 400 and "is loaded" in taken.json()["error"]["message"]
    text = adapters.text("sql", PROMPTS[1])
    assert text != adapters.text("tiny", PROMPTS[1])
    inplace = {"lora_name": "sql", "load_inplace": True}
    bad = {**inplace, "lora_path": "/no/such"}
    assert adapters.http.post("/v1/load_lora_adapter", json=bad).status_code == 400
    assert adapters.text("sql", PROMPTS[1]) == text, "what cannot be read takes no place"
    other = {**inplace, "lora_path": str(adapters.folders["a3"])}
    assert adapters.http.post("/v1/load_lora_adapter", json=other).status_code == 200
    assert adapters.text("sql", PROMPTS[1]) != text
    assert adapters.unload("sql").status_code == 200
    assert adapters.answer("sql", "x").status_code == 404
    assert adapters.unload("sql").status_code == 404
    for body, status in (
        ({"lora_name": "x", "lora_path": "/no/such"}, 400),
        ({"lora_name": "x y", "lora_path": str(adapters.folders["a2"])}, 400),
        ({"lora_name": "tiny", "lora_path": str(adapters.folders["a2"])}, 400),
        ({"lora_name": "x", "lora_path": "/dev/zero"}, 400),
        ({"lora_name": "x"}, 400),
    ):
        assert adapters.http.post("/v1/load_lora_adapter", json=body).status_code == status, body
    foreign = adapters.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "/"}, headers={"Origin": "http://other"}
    )  # fmt: skip
    assert foreign.status_code == 403


def test_an_adapter_that_is_unloaded_meanwhile_is_not_found() -> None:
    """The worker may find first that an adapter is gone: its error is that of a name that nobody has."""
    error = ErrorInfo.of(UnknownAdapterError("there is no adapter 'a6'"))
    answer = of_user_error(cast(ValueError, error.to_exception()))
    assert (answer.status, answer.code, answer.param) == (404, "model_not_found", "model")


def test_an_unload_waits_for_its_requests(adapters: AdapterServer) -> None:
    assert adapters.load("late", "a4").status_code == 200
    body = {
        "model": "late", "prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True, "temperature": 0,
    }  # fmt: skip
    ends: list[float] = []

    def unload() -> None:
        assert adapters.unload("late").status_code == 200
        ends.append(time.monotonic())

    with adapters.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        thread = threading.Thread(target=unload)
        thread.start()
        pieces = [line for line in lines if line.startswith("data: {")]
        last = time.monotonic()
    thread.join(60)
    assert len(pieces) > 10 and ends and ends[0] > last - 0.5


def test_a_new_worker_has_the_adapters(adapters: AdapterServer) -> None:
    assert adapters.load("kept", "a5").status_code == 200
    before = adapters.text("kept", PROMPTS[2]), adapters.text("a1", PROMPTS[2])
    pid = adapters.server.worker.pid
    os.kill(pid, signal.SIGKILL)
    assert (adapters.text("kept", PROMPTS[2]), adapters.text("a1", PROMPTS[2])) == before
    assert adapters.server.worker.pid != pid
    assert adapters.unload("kept").status_code == 200


@pytest.mark.long
def test_clients_over_adapters_with_loads_and_unloads(adapters: AdapterServer) -> None:
    """64 clients over 8 adapters in 4 slots; each answer equals the single one."""
    names = [f"a{i}" for i in range(8)]
    for name in names:
        assert adapters.load(name).status_code == 200
    single = {(name, p): adapters.text(name, p) for name in (*names, "tiny") for p in PROMPTS}
    failures: list[str] = []
    stop = threading.Event()

    def client(number: int) -> None:
        rng = random.Random(number)
        for _ in range(8):
            name, prompt = rng.choice([*names, "tiny"]), rng.choice(PROMPTS)
            response = adapters.answer(name, prompt)
            if response.status_code == 404 and name in ("a6", "a7"):
                continue  # unloaded at the moment
            text = (
                response.json()["choices"][0]["message"]["content"] if response.is_success else ""
            )
            if text != single[name, prompt]:
                failures.append(f"{name}: {response.text[:300]}")

    def change() -> None:
        while not stop.wait(0.2):
            for name in ("a6", "a7"):
                if not (adapters.unload(name).is_success and adapters.load(name).is_success):
                    failures.append(f"{name} could not be changed")

    changing = threading.Thread(target=change)
    changing.start()
    clients = [threading.Thread(target=client, args=(n,)) for n in range(64)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(600)
    stop.set()
    changing.join(120)
    assert not any(each.is_alive() for each in (*clients, changing)), "requests without an end"
    assert not failures, failures[:5]
