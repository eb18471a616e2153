"""A server of an encoder against transformers: vectors, scores, errors, a killed worker."""

from __future__ import annotations

import base64
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest
from tokenizers import Tokenizer

from tests.encoders.harness import checkpoint
from tests.encoders.test_text_encoder import TEXTS, states, write_modules, write_tokenizer
from tests.serve.conftest import RunningServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, _ = checkpoint("Bert")
    folder = tmp_path_factory.mktemp("bert")
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((source / name).read_bytes())
    write_tokenizer(folder)
    write_modules(folder, ("Pooling", {"pooling_mode": "mean"}), ("Normalize", None))
    return folder


@pytest.fixture(scope="module")
def encoder(start_server: Callable[..., RunningServer], folder: Path) -> RunningServer:
    return start_server("--model", str(folder), "--served-model-name", "bert").wait_ready()


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    means = np.stack([states(folder, text).mean(0) for text in TEXTS])
    return means / np.linalg.norm(means, axis=1, keepdims=True)


@pytest.fixture
def api(encoder: RunningServer):
    with openai.OpenAI(
        base_url=f"{encoder.url}/v1", api_key="x", max_retries=0, timeout=300
    ) as client:
        yield client


@pytest.fixture
def plain(encoder: RunningServer):
    with httpx.Client(base_url=encoder.url, timeout=300) as client:
        yield client


@pytest.mark.parametrize("kind", ["float", "base64"])
def test_vectors_of_texts_and_of_tokens(api, folder, vectors, kind) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [tokenizer.encode(text).ids for text in TEXTS]
    for given in (TEXTS, tokens):
        answer = api.embeddings.create(model="bert", input=given, encoding_format=kind)
        made = [entry.embedding for entry in answer.data]
        if kind == "base64":
            made = [np.frombuffer(base64.b64decode(each), "<f4") for each in made]
        np.testing.assert_allclose(made, vectors, atol=1e-5)
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    one = api.embeddings.create(model="bert", input=tokens[0], dimensions=8)
    cut = vectors[0, :8] / np.linalg.norm(vectors[0, :8])
    np.testing.assert_allclose(one.data[0].embedding, cut, atol=1e-5)


def test_scores(plain: httpx.Client, vectors) -> None:
    expected = vectors[1:] @ vectors[0]
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"):
        results = plain.post(path, json={**body, "return_documents": True}).json()["results"]
        assert [r["index"] for r in results] == np.argsort(-expected).tolist()
        for result in results:
            assert result["document"]["text"] == TEXTS[1 + result["index"]]
            assert abs(result["relevance_score"] - expected[result["index"]]) < 1e-5
    (best,) = plain.post("/rerank", json={**body, "top_n": 1}).json()["results"]
    assert best["index"] == int(np.argmax(expected)) and "document" not in best
    pairs = plain.post("/score", json={"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()["data"]
    np.testing.assert_allclose([pair["score"] for pair in pairs], expected, atol=1e-5)


def test_vectors_for_ollama(encoder: RunningServer, vectors) -> None:
    client = ollama.Client(encoder.url)
    np.testing.assert_allclose(client.embed("bert", TEXTS).embeddings, vectors, atol=1e-5)
    assert len(client.embed("bert", "w1 " * 100).embeddings) == 1  # cut off, as with Ollama
    with pytest.raises(ollama.ResponseError, match="102 tokens, and the model reads 64"):
        client.embed("bert", "w1 " * 100, truncate=False)
    client._client.close()


def test_invalid_requests(api, plain: httpx.Client, http: httpx.Client) -> None:
    for given, says in (
        (["w1", "w2 " * 100], "input.1 has 102 tokens, and the model reads 64"),
        ([[5], [999]], "token 999"),
        ([], "at least 1"),
    ):
        with pytest.raises(openai.BadRequestError, match=says):
            api.embeddings.create(model="bert", input=given)
    with pytest.raises(openai.BadRequestError, match="vectors have 32"):
        api.embeddings.create(model="bert", input="w1", dimensions=33)
    with pytest.raises(openai.BadRequestError, match="ask for /v1/embeddings"):
        api.completions.create(model="bert", prompt="w1")
    chat = plain.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    assert chat.status_code == 400
    text = http.post("/v1/embeddings", json={"input": "x"})
    assert text.status_code == 400 and "generates text" in text.text


def test_concurrent_requests_and_a_killed_worker(api, encoder: RunningServer, vectors) -> None:
    """All requests are answered: they run again, as no result was sent before."""

    def one(number: int) -> bool:
        text = number % len(TEXTS)
        made = api.embeddings.create(model="bert", input=TEXTS[text]).data[0].embedding
        return bool(np.allclose(made, vectors[text], atol=1e-5))

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(one, number) for number in range(24)]
        answers[2].result(120)
        encoder.worker.kill()
        assert all(answer.result(120) for answer in answers)
