"""Models that are quantized when Ollama's clients create them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import httpx
import numpy as np
import ollama
import pytest
from safetensors.numpy import load_file

from tests.serve.conftest import TINY, RunningServer

QUESTION = {"role": "user", "content": "What is the capital of Norway?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny").symlink_to(TINY)
    return folder


@pytest.fixture(scope="module")
def client(start_server: Callable[..., RunningServer], folder: Path) -> Iterator[ollama.Client]:
    server = start_server("--models-dir", str(folder), "--max-length", "256").wait_ready()
    assert "no models yet" not in server.output
    client = ollama.Client(server.url, timeout=300)
    yield client
    client._client.close()


@pytest.fixture
def web(client: ollama.Client) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=client._client.base_url, timeout=300) as web:
        yield web


def answer_of(client: ollama.Client, model: str, *before: dict[str, str], count: int = 16) -> str:
    options = {"temperature": 0, "num_predict": count}
    return client.chat(model, [*before, QUESTION], options=options).message.content or ""


def check_q8_0(path: Path) -> None:
    """Compares matrices of a file with those of the checkpoint: a code is off by half a step, a scale is a float16."""
    stored = load_file(TINY / "model.safetensors")
    stored = {name: value.astype(np.float32) for name, value in stored.items()}
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, own in (
        ("token_embd", "model.embed_tokens"), ("blk.0.ffn_up", "model.layers.0.mlp.up_proj"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
    ):  # fmt: skip
        tensor, expected = tensors[f"{name}.weight"], stored[f"{own}.weight"]
        assert tensor.tensor_type.name == "Q8_0"
        got = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        steps = np.abs(expected).reshape(-1, 32).max(1) / 127
        assert np.all(
            np.abs(got - expected).reshape(-1, 32).max(1) <= (0.5 + 127 / 2048) * steps + 1e-7
        )


def test_quantized(client: ollama.Client, web: httpx.Client, folder: Path) -> None:
    """`quantize`: weights of a model, of a created one, and of uploaded files."""
    client.create("first", from_="tiny", system="Say it.", parameters={"num_predict": 4})
    lines = list(client.create("small:q8", from_="first", quantize="Q8_0", stream=True))
    texts = [line.status or "" for line in lines]
    assert texts[0] == "quantizing model to Q8_0" and texts[-1] == "success"
    counted = [text for text in texts if text.endswith("tensors")]
    assert len(counted) > 10 and counted == sorted(counted, key=lambda text: int(text.split()[-4]))
    client.delete("first")
    shown = client.show("small:q8")
    assert shown.details.parent_model == "first" and "Say it." in (shown.modelfile or "")
    (path,) = folder.rglob("*.gguf")
    check_q8_0(path)
    expected = answer_of(client, "tiny", {"role": "system", "content": "Say it."}, count=4)
    own = client.chat("small:q8", [QUESTION], options={"temperature": 0}).message.content
    assert own == expected != ""
    # a file of blocks is no source
    answer = web.post("/api/create", json={"model": "x", "from": "small:q8", "quantize": "q4_0"})
    assert answer.status_code == 400 and "safetensors" in answer.json()["error"]
    files = {
        path.name: client.create_blob(path)
        for path in TINY.iterdir()
        if path.suffix in (".json", ".safetensors", ".jinja")
    }
    client.create("own", files=files, quantize="q4_K_M")
    assert "Oslo" in answer_of(client, "own")
    kinds = {t.tensor_type.name for t in gguf.GGUFReader(next(folder.glob("own*/*.gguf"))).tensors}
    assert kinds <= {"F32", "Q4_K", "Q6_K", "Q4_0", "Q8_0"} and len(kinds) > 1
    for name in ("small:q8", "own"):
        client.delete(name)
    assert not (folder / ".creating").exists()


def test_a_client_that_leaves_ends_the_quantization(web: httpx.Client, folder: Path) -> None:
    body = {"model": "x", "from": "tiny", "quantize": "q8_0"}
    with web.stream("POST", "/api/create", json=body) as lines:
        assert next(lines.iter_lines())
        # one at a time
        busy = web.post("/api/create", json={**body, "model": "y", "stream": False})
        assert busy.status_code == 503 and busy.headers["Retry-After"]
    for _ in range(600):
        if not (folder / ".creating").exists():
            break
        time.sleep(0.1)
    assert not (folder / ".creating").exists() and not (folder / "x").exists()
