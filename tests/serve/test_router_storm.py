"""A long run of a router: clients that chat, leave, load, unload and delete models side by side.

``STORM_SECONDS`` shortens it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.conftest import TINY, RunningServer
from tests.serve.test_soak import END_S, check_handles, handles, memory

CLIENTS = 32
STORM_S = float(os.environ.get("STORM_SECONDS", "240"))
MODELS = ("one", "two", "lab/three")
PROMPTS = ("What is the capital of Norway?", "import os", "1 2 3")
GONE = {(404, "model_not_found")}
"""Its files are deleted."""
BROKEN = {(503, "model_load_failed")}
"""Its files went while it was loaded."""


class Files:
    """The files of the models, which clients delete and put back."""

    def __init__(self, root: Path) -> None:
        self.root, self._locks = root, {name: threading.Lock() for name in MODELS}
        for name in MODELS:
            self.put(name)

    def put(self, name: str) -> None:
        """Puts the files of a model back, as a whole."""
        aside = self.root.parent / f"aside-{threading.get_ident()}"
        shutil.copytree(TINY, aside)
        target = self.root / name
        while True:  # the folder around it goes with the last model in it
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                aside.rename(target)
                return
            except FileNotFoundError:
                continue

    def change(self, name: str, delete: Callable[[], None]) -> None:
        """Deletes a model in some way, and puts it back; one client at a time."""
        with self._locks[name]:
            delete()
            if not (self.root / name).exists():
                self.put(name)


class Client:
    """A client that sends random requests, and compares what comes with what may.

    Args:
        server: The server.
        files: The files of its models.
        expected: The answers to the prompts.
        seed: Begins its random numbers.
    """

    def __init__(
        self, server: RunningServer, files: Files, expected: dict[str, str], seed: int
    ) -> None:
        self.files, self.expected = files, expected
        self.numbers, self.counts = random.Random(seed), Counter[str]()
        self.web = httpx.Client(base_url=server.url, timeout=END_S)

    def run(self, end: float) -> Counter[str]:
        """Sends requests until a time, and returns how many of each kind."""
        kinds = [
            self.chat, self.chat, self.stream, self.stream, self.ollama, self.leave, self.load, self.unload,
            self.embed, self.look, self.delete, self.remove,
        ]  # fmt: skip
        with self.web:
            while time.monotonic() < end:
                kind = self.numbers.choice(kinds)
                kind(self.numbers.choice(MODELS))
                self.counts[kind.__name__] += 1
        return self.counts

    def _sort(self, response: httpx.Response, *allowed: set[tuple[int, str]]) -> bool:
        """Whether a response is no error; one that may not come fails the test."""
        if response.status_code == 200:
            return True
        error = response.json()["error"]
        code = error["code"] if isinstance(error, dict) else error
        kinds = set[tuple[int, str]]().union(*allowed)
        fits = any(
            response.status_code == status and (text or "") in (code or "")
            for status, text in kinds
        )
        assert fits, (response.request.url, response.status_code, response.text)
        self.counts[f"{response.status_code} {code if isinstance(error, dict) else ''}"] += 1
        return False

    def _question(self, model: str) -> tuple[str, dict]:
        prompt = self.numbers.choice(PROMPTS)
        messages = [{"role": "user", "content": prompt}]
        return prompt, {"model": model, "messages": messages, "temperature": 0, "max_tokens": 40}

    def chat(self, model: str) -> None:
        """A whole answer."""
        prompt, body = self._question(model)
        response = self.web.post("/v1/chat/completions", json=body)
        if self._sort(response, GONE, BROKEN):
            assert response.json()["choices"][0]["message"]["content"] == self.expected[prompt]
            assert response.json()["model"] == model

    def stream(self, model: str) -> None:
        """A stream, which some do not read to its end."""
        prompt, body = self._question(model)
        leave_after = self.numbers.choice([None, None, 0, 2])
        text, pieces = "", 0
        with self.web.stream(
            "POST", "/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            if response.status_code != 200:
                response.read()
                self._sort(response, GONE, BROKEN)
                return
            for line in response.iter_lines():
                if pieces == leave_after:
                    return
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["delta"].get("content") or ""
                pieces += 1
        assert text == self.expected[prompt]

    def ollama(self, model: str) -> None:
        """Ollama's chat, which sets how long the model stays."""
        prompt, body = self._question(model)
        keep_alive = self.numbers.choice([0, 0, "10ms", -1, "1s", None])
        del body["temperature"], body["max_tokens"]
        options = {"temperature": 0, "num_predict": 40}
        body |= {"stream": False, "keep_alive": keep_alive, "options": options}
        if empty := self.numbers.random() < 0.3:
            body["messages"] = []
        response = self.web.post("/api/chat", json=body)
        if self._sort(response, {(404, "does not exist")}, {(503, "cannot be loaded")}):
            content = response.json()["message"]["content"]
            assert content == ("" if empty else self.expected[prompt])

    def leave(self, model: str) -> None:
        """A client that does not wait: its model may be loading then."""
        _, body = self._question(model)
        try:
            timeout = self.numbers.choice([0.01, 0.1, 1.0])
            response = self.web.post("/v1/chat/completions", json=body, timeout=timeout)
        except httpx.TimeoutException:
            return
        self._sort(response, GONE, BROKEN)

    def load(self, model: str) -> None:
        response = self.web.post("/models/load", json={"model": model})
        if self._sort(response, GONE, BROKEN):
            assert response.json()["success"] and response.json()["id"] == model

    def unload(self, model: str) -> None:
        response = self.web.post("/models/unload", json={"model": model})
        self._sort(response, GONE, {(400, "model_not_loaded")})

    def embed(self, model: str) -> None:
        """Vectors of a model that makes none."""
        response = self.web.post("/v1/embeddings", json={"model": model, "input": "a"})
        assert response.status_code != 200
        if response.status_code == 400:
            assert "generates text" in response.text
        else:
            self._sort(response, GONE, BROKEN)

    def look(self, model: str) -> None:
        """What changes nothing."""
        for path in ("/v1/models", "/api/tags", "/api/ps", "/metrics", "/health", "/load"):
            response = self.web.get(path)
            assert response.status_code == 200, (path, response.text)
        listed = {each["id"] for each in self.web.get("/v1/models").json()["data"]}
        assert listed <= set(MODELS)
        response = self.web.get(f"/v1/models/{model}")
        self._sort(response, GONE)
        response = self.web.post("/api/show", json={"model": model})
        self._sort(response, {(404, "does not exist")}, {(503, "cannot be loaded")})

    def delete(self, model: str) -> None:
        """A deletion by the server; rare, as the model must come back."""
        if self.numbers.random() < 0.5:
            return

        def delete() -> None:
            response = self.web.request("DELETE", "/api/delete", json={"model": model})
            if self._sort(response, {(404, "not found"), (409, "has open requests")}):
                assert not (self.files.root / model).exists()

        self.files.change(model, delete)

    def remove(self, model: str) -> None:
        """A deletion behind the server's back."""
        if self.numbers.random() < 0.5:
            return
        self.files.change(model, lambda: shutil.rmtree(self.files.root / model))


def settle(server: RunningServer, web: httpx.Client) -> None:
    """Unloads all models, and waits until no worker is left."""
    end = time.monotonic() + END_S
    while server.workers or web.get("/load").json() != {"server_load": 0}:
        assert time.monotonic() < end, web.get("/v1/models").text
        for name in MODELS:
            web.post("/models/unload", json={"model": name})
        time.sleep(0.1)


@pytest.mark.long
def test_a_router_in_a_storm(
    start_server: Callable[..., RunningServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is right or an error of its kind; then all is as before."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    files = Files(tmp_path / "models")
    server = start_server(
        "--models-dir", str(files.root), "--idle-timeout", "0.5", "--max-loaded-models", "2",
        "--max-length", "256", "--max-batch-size", "8", "--quantization-encoding", "float32", "--batch-invariant",
    ).wait_ready()  # fmt: skip
    expected: dict[str, str] = {}
    with httpx.Client(base_url=server.url, timeout=END_S) as web:
        for prompt in PROMPTS:
            body = {
                "model": "one",
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
            }
            answer = web.post("/v1/chat/completions", json={**body, "max_tokens": 40})
            expected[prompt] = answer.json()["choices"][0]["message"]["content"]
        for name in MODELS[1:]:
            assert web.post("/models/load", json={"model": name}).status_code == 200
        settle(server, web)
        before: tuple[int, int, int] | None = None
        held: list[int] = []
        total = Counter[str]()
        # memory must not grow after the first part
        for part, seconds in enumerate((STORM_S / 4, STORM_S * 3 / 4)):
            end = time.monotonic() + seconds
            clients = [Client(server, files, expected, 100 * part + n) for n in range(CLIENTS)]
            with ThreadPoolExecutor(CLIENTS) as pool:
                for counts in pool.map(Client.run, clients, [end] * CLIENTS):
                    total += counts
            settle(server, web)
            if before is None:
                before = handles(server)
            check_handles(server, before)
            held.append(memory(server))
        loads = [
            line
            for line in web.get("/metrics").text.splitlines()
            if line.startswith("maxserve_model_loads ")
        ]
    print(f"{dict(total)}; {loads}; {held[0]} and {held[1]} bytes")
    assert "Traceback" not in server.output, server.output
    assert "exception was never retrieved" not in server.output, server.output
    assert held[1] <= 1.15 * held[0] + (16 << 20), held
    assert server.stop() == 0
