"""Models that Ollama's clients create: with adapters, system prompts, parameters and messages, on a router."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import ollama
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from max.pipelines.adapters.reader import read_adapter
from max.pipelines.store.local import ModelStore
from tests.adapters.harness import merged, random_whole_weights
from tests.adapters.tiny_chat import make_adapter, reference
from tests.serve.conftest import TINY, RunningServer

PROMPT = "What is the capital of Norway?"
GREEDY = {"temperature": 0, "num_predict": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny").symlink_to(TINY)
    return folder


@pytest.fixture(scope="module")
def router(start_server: Callable[..., RunningServer], folder: Path) -> RunningServer:
    return start_server(
        "--models-dir", str(folder), "--max-length", "256", "--quantization-encoding", "float32",
        "--max-request-bytes", "100000",
    ).wait_ready()  # fmt: skip


@pytest.fixture(scope="module")
def client(router: RunningServer) -> Iterator[ollama.Client]:
    client = ollama.Client(router.url, timeout=300)
    yield client
    client._client.close()


@pytest.fixture(scope="module")
def web(router: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=300) as web:
        yield web


def text_of(client: ollama.Client, model: str, prompt: str = PROMPT, **options: Any) -> str:
    messages = [{"role": "user", "content": prompt}]
    return client.chat(model, messages, options={**GREEDY, **options}).message.content or ""


def prompt_of(client: ollama.Client, web: httpx.Client, model: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}]}
    return web.post("/apply-template", json=body).json()["prompt"]


def merged_text(adapter: Path, prompt: str) -> str:
    """What transformers answers with the adapter in its weights."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    model = merged(reference(), read_adapter(adapter, 64))
    with torch.no_grad():
        made = model.generate(  # type: ignore[operator]
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=GREEDY["num_predict"],
            do_sample=False,
        )
    return tokenizer.decode(made[0, tokens.shape[1] :], skip_special_tokens=True)


def gguf_adapter(path: Path, source: Path, alpha: float) -> Path:
    """An adapter of PEFT as a GGUF file; queries and keys are left out, whose rows GGUF files of Llama permute."""
    names = {
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, values in load_file(source / "adapter_model.safetensors").items():
        parts = name.removeprefix("base_model.model.model.layers.").split(".")
        module = ".".join(parts[1:3])
        if module in names:
            end = "lora_a" if "lora_A" in name else "lora_b"
            writer.add_tensor(f"blk.{parts[0]}.{names[module]}.weight.{end}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_an_adapter_of_peft_is_part_of_a_model(
    client: ollama.Client, web: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", 3, rank=5, size=0.25)
    files = {path.name: client.create_blob(path) for path in sorted(adapter.iterdir())}
    lines = list(client.create("norse:v1", from_="tiny", adapters=files, stream=True))
    assert [line.status for line in lines][-2:] == ["writing manifest", "success"]
    assert [model.model for model in client.list().models] == ["norse:v1", "tiny"]
    plain, own = text_of(client, "tiny"), text_of(client, "norse:v1")
    prompt = prompt_of(client, web, "norse:v1")
    assert prompt == prompt_of(client, web, "tiny")
    assert own == merged_text(adapter, prompt) != plain
    # in the API of OpenAI too, and the base has no adapter
    body = {"model": "norse:v1", "messages": [{"role": "user", "content": PROMPT}]}
    answer = web.post("/v1/chat/completions", json={**body, "temperature": 0, "max_tokens": 16})
    assert answer.json()["choices"][0]["message"]["content"] == own
    assert text_of(client, "tiny") == plain
    listed = web.get("/v1/models").json()["data"]
    assert sorted(each["id"] for each in listed) == ["norse:v1", "tiny"]
    shown = client.show("norse:v1")
    assert (shown.modelfile or "").splitlines()[:2] == ["FROM tiny", "ADAPTER adapter"]
    assert shown.details.parent_model == "tiny"
    # blobs are gone, and a model of a created one has its adapter
    assert not list((folder / ".blobs").iterdir())
    client.create("heir", from_="norse:v1", parameters={"num_predict": 4})
    assert text_of(client, "heir") == own
    assert own.startswith(
        client.chat("heir", body["messages"], options={"temperature": 0}).message.content
    )
    assert client.delete("norse:v1").status == "success"
    assert [model.model for model in client.list().models] == ["heir", "tiny"]
    assert text_of(client, "heir") == own, "the heir has files of its own"
    client.delete("heir")
    assert (TINY / "config.json").exists() and {p.name for p in folder.iterdir()} >= {"tiny"}


def test_an_adapter_in_gguf(client: ollama.Client, web: httpx.Client, tmp_path: Path) -> None:
    source = make_adapter(tmp_path / "adapter", 4, rank=8, size=0.4)
    tensors = load_file(source / "adapter_model.safetensors")
    kept = {k: v for k, v in tensors.items() if "q_proj" not in k and "k_proj" not in k}
    save_file(kept, source / "adapter_model.safetensors")
    path = gguf_adapter(tmp_path / "a.gguf", source, 8.0)
    digest = client.create_blob(path)
    assert digest == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert web.head(f"/api/blobs/{digest}").status_code == 200
    client.create("of-gguf", from_="tiny", adapters={"dir\\some.gguf": digest})
    own = text_of(client, "of-gguf")
    assert own == merged_text(source, prompt_of(client, web, "of-gguf"))
    assert own != text_of(client, "tiny")
    client.delete("of-gguf")


def test_whole_weights_of_an_adapter(
    client: ollama.Client, web: httpx.Client, tmp_path: Path
) -> None:
    """Embedding, output layer and norms that PEFT has saved whole."""
    adapter = make_adapter(tmp_path / "adapter", 6, rank=3, size=0.1)
    path = adapter / "adapter_model.safetensors"
    whole = random_whole_weights(reference(), np.random.default_rng(6), change=0.4)
    save_file({**load_file(path), **whole}, path)
    files = {each.name: client.create_blob(each) for each in sorted(adapter.iterdir())}
    client.create("whole", from_="tiny", adapters=files)
    prompt = prompt_of(client, web, "whole")
    assert text_of(client, "whole") == merged_text(adapter, prompt)
    low_rank = make_adapter(tmp_path / "low-rank", 6, rank=3, size=0.1)
    assert text_of(client, "whole") != merged_text(low_rank, prompt)
    client.delete("whole")


def test_system_messages_template_and_parameters(client: ollama.Client, web: httpx.Client) -> None:
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    client.create(
        "odd", from_="tiny", system="You are short.", template=template, messages=messages,
        license=["A", "B"], parameters={"temperature": 0, "num_predict": 9, "stop": ["s"], "seed": 5, "num_ctx": 64},
    )  # fmt: skip
    prompt = prompt_of(client, web, "odd")
    whole = [("system", "You are short."), ("user", "Hi"), ("assistant", "Ho"), ("user", PROMPT)]
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in whole)
    assert prompt == said + "<|im_start|>assistant\n"
    own = [{"role": "system", "content": "Mine."}, {"role": "user", "content": PROMPT}]
    body = {"model": "odd", "messages": own}
    other = web.post("/apply-template", json=body).json()["prompt"]
    assert other.startswith("<|im_start|>system\nMine.<|im_end|>\n<|im_start|>user\nHi<")
    assert other.count("system") == 1
    # greedy, without asking; stopped before the first s
    first = client.generate("odd", PROMPT)
    assert first.response == client.generate("odd", PROMPT).response
    assert first.done_reason in ("stop", "length") and "s" not in first.response
    assert (first.eval_count or 0) <= 9
    long = client.generate("odd", PROMPT, options={"stop": ["\0"], "num_predict": 24})
    assert long.response.startswith(first.response)
    assert (long.eval_count or 0) > (first.eval_count or 0)
    shown = client.show("odd")
    assert shown.template == template and shown.license == "A\nB"
    assert 'stop                           "s"' in (shown.parameters or "")
    assert 'SYSTEM """You are short."""' in (shown.modelfile or "")
    client.create("odd", from_="odd", system="Else.")
    assert prompt_of(client, web, "odd") == prompt.replace("You are short.", "Else.")
    client.delete("odd")


def test_a_model_of_uploaded_files(client: ollama.Client, folder: Path) -> None:
    names = [p.name for p in TINY.iterdir() if p.is_file() and not p.name.startswith(".")]
    files = {n: client.create_blob(TINY / n) for n in names if not n.endswith(".md")}
    assert client.create("org/copy", files=files).status == "success"
    assert text_of(client, "org/copy") == text_of(client, "tiny")
    for name in files:
        assert (folder / "org" / "copy" / name).read_bytes() == (TINY / name).read_bytes()
    client.delete("org/copy")
    assert not (folder / "org").exists()


def test_a_copy_stays_when_its_model_is_deleted(
    client: ollama.Client, web: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    plain = text_of(client, "tiny")
    assert client.copy("tiny", "twin:v2").status == "success"
    twin = ModelStore(folder, hub=False).find("twin:v2")
    weights = twin.path / "model.safetensors"
    assert weights.read_bytes() == (TINY / "model.safetensors").read_bytes()
    (folder / "tiny").unlink()
    try:
        assert text_of(client, "twin:v2") == plain
    finally:
        (folder / "tiny").symlink_to(TINY)
    # of a created model its recipe too, which changes for itself
    adapter = make_adapter(tmp_path / "adapter", 5, rank=4, size=0.25)
    files = {path.name: client.create_blob(path) for path in sorted(adapter.iterdir())}
    client.create("first", from_="twin:v2", adapters=files, system="Be short.")
    own = text_of(client, "first")
    assert client.copy("first:latest", "org/second").status == "success"
    client.create("first", from_="tiny")
    assert text_of(client, "org/second") == own != plain
    assert client.show("org/second").modelfile.splitlines()[1] == "ADAPTER adapter"
    before = sorted(path.name for path in folder.iterdir())
    for source, name, status, text in (
        ("none", "x", 404, "no model"), ("tiny", "tiny", 400, "itself"), ("first", "tiny", 400, "no created model"),
        ("tiny", "../x", 400, "name"), ("/etc", "x", 400, "name"), ("tiny", "", 400, "missing"),
    ):  # fmt: skip
        body = {"source": source, "destination": name}
        answer = web.post("/api/copy", json=body)
        assert answer.status_code == status and text in answer.json()["error"], (body, answer.text)
    headers = {"Origin": "http://elsewhere.example"}
    refused = web.post("/api/copy", json={"source": "tiny", "destination": "x"}, headers=headers)
    assert refused.status_code == 403
    assert sorted(path.name for path in folder.iterdir()) == before
    for name in ("first", "org/second", "twin:v2"):
        client.delete(name)


def test_bad_creations_change_nothing(
    client: ollama.Client, web: httpx.Client, folder: Path, tmp_path: Path
) -> None:
    def entries() -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*")} - {".blobs"}

    before = entries()
    nothing = "sha256:" + "0" * 64
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"model": "x"}, 400, "from"),
        ({"model": "x", "from": "none"}, 404, "none"),
        ({"model": "../x", "from": "tiny"}, 400, "name"),
        ({"model": "x", "from": "/etc"}, 400, "name"),
        ({"model": "tiny", "from": "tiny"}, 400, "no created model"),
        ({"model": "tiny/x", "from": "tiny"}, 400, "folder of a model"),
        ({"model": "x", "from": "tiny", "adapters": {"a": nothing}}, 400, "not uploaded"),
        ({"model": "x", "from": "tiny", "adapters": {"a": "/etc/passwd"}}, 400, "no digest"),
        ({"model": "x", "from": "tiny", "parameters": {"temperature": 1000}}, 400, "temperature"),
        ({"model": "x", "from": "tiny", "parameters": {"top_k": 1.5}}, 400, "integer"),
        ({"model": "x", "from": "tiny", "parameters": {"mirostat": 1}}, 400, "mirostat"),
        ({"model": "x", "from": "tiny", "parameters": {"stop": [1]}}, 400, "stop"),
        ({"model": "x", "from": "tiny", "template": "{{ .System }}"}, 400, "Go"),
        ({"model": "x", "from": "tiny", "messages": [{"role": "x"}]}, 400, "role"),
        ({"model": "x", "from": "tiny", "quantize": "q4_2"}, 400, "q4_k_m"),
        ({"model": "x", "from": "none", "quantize": "q8_0"}, 404, "none"),
        ({"model": "x", "files": {"a.txt": nothing}, "quantize": "q8_0"}, 400, "not uploaded"),
    ]  # fmt: skip
    for body, status, text in cases:
        answer = web.post("/api/create", json=body)
        assert answer.status_code == status and text in answer.json()["error"], (body, answer.text)
        assert entries() == before, body
    # an adapter that is none, and files that are no model
    (tmp_path / "noise").write_bytes(np.random.default_rng(0).bytes(1000))
    digest = client.create_blob(tmp_path / "noise")
    for fields in ({"from": "tiny", "adapters": {"a.gguf": digest}}, {"files": {"a.txt": digest}}):
        answer = web.post("/api/create", json={"model": "x", **fields})
        assert answer.status_code == 400, answer.text
    assert [each.model for each in client.list().models] == ["tiny"]
    assert not (folder / "x").exists()


def test_blobs_are_checked(web: httpx.Client, folder: Path) -> None:
    data = b"some bytes" * 20_000  # longer than other bodies may be
    digest = hashlib.sha256(data).hexdigest()
    path = f"/api/blobs/sha256:{digest}"
    assert web.head(path).status_code == 404
    assert web.post(path, content=data[:-1]).status_code == 400
    # a page may not send files of all types; those that it asks for first are not of an allowed origin
    for kind, status in ((None, 415), ("text/plain", 415), ("application/octet-stream", 403)):
        headers = {"Origin": "http://elsewhere.example", **({"Content-Type": kind} if kind else {})}
        assert web.post(path, content=data, headers=headers).status_code == status
    assert web.head(path).status_code == 404
    assert web.post(path, content=data).status_code == 201
    assert web.head(path).status_code == 200
    assert (folder / ".blobs" / f"sha256-{digest}").read_bytes() == data
    for name in (
        "../tiny",
        "sha256:",
        f"sha256:{digest[:-1]}",
        f"md5:{digest}",
        "sha256:" + "g" * 64,
    ):
        assert web.post(f"/api/blobs/{name}", content=b"x").status_code in (400, 404, 405)
    assert [p.name for p in (folder / ".blobs").iterdir() if p.suffix == ".part"] == []


def test_a_damaged_recipe_is_an_error(client: ollama.Client, folder: Path) -> None:
    client.create("broken", from_="tiny")
    recipe = folder / "broken" / ".max-created.json"
    for text in ("{", "[]", json.dumps({"parameters": {"top_k": "x"}}), '{"base": "gone"}'):
        recipe.write_text(text)
        with pytest.raises(ollama.ResponseError) as error:
            text_of(client, "broken")
        assert error.value.status_code == 503 and "broken" in str(error.value)
    client.delete("broken")


def test_counts_of_tokens_are_those_of_the_prompt(client: ollama.Client, web: httpx.Client) -> None:
    """With the model's own system prompt, and what the request's effort adds to the template."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if reasoning_effort %}With {{ reasoning_effort }} effort.\n{% endif %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    client.create("counted", from_="tiny", system="You are short and kind.", template=template)
    asked, found = [{"role": "user", "content": PROMPT}], list[int]()
    for effort in (None, "high"):
        claude = {"model": "counted", "messages": asked, "output_config": {"effort": effort}}
        usage = web.post("/v1/messages", json={**claude, "max_tokens": 1}).json()["usage"]
        read = usage["input_tokens"] + usage["cache_read_input_tokens"]
        assert web.post("/v1/messages/count_tokens", json=claude).json() == {"input_tokens": read}
        body = {"model": "counted", "input": PROMPT, "reasoning": {"effort": effort}}
        made = web.post("/v1/responses", json={**body, "max_output_tokens": 16}).json()
        assert made["usage"]["input_tokens"] == read
        counted = web.post("/v1/responses/input_tokens", json=body).json()
        assert counted["input_tokens"] == read
        found.append(read)
    assert found[0] < found[1]
    client.delete("counted")
