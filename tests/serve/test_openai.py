"""OpenAI's client against `max serve`; texts are compared with the pipeline in this process."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.conftest import TINY

NORWAY = [{"role": "user", "content": "What is the capital of Norway?"}]
LIMITED = {"max_tokens": 24, "temperature": 0}


@pytest.fixture(scope="module")
def reference():
    """The model by transformers, in float32."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return AutoTokenizer.from_pretrained(TINY), model


def greedy(reference, tokens: list[int], count: int) -> list[int]:
    _, model = reference
    with torch.no_grad():
        out = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return out[0, len(tokens) :].tolist()


def test_a_conversation_is_answered_as_by_transformers(client, reference) -> None:
    tokenizer, _ = reference
    answer = client.chat.completions.create(model="tiny", messages=NORWAY, **LIMITED)
    tokens = tokenizer.apply_chat_template(
        NORWAY, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    expected = greedy(reference, tokens, 24)
    assert answer.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len(tokens)
    assert answer.usage.completion_tokens == len(expected)
    assert answer.usage.total_tokens == len(tokens) + len(expected)


def test_a_stream_equals_the_whole_answer(client) -> None:
    options = {"model": "tiny", "messages": NORWAY, "temperature": 1.3, "seed": 5, "max_tokens": 40}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == whole.choices[0].message.content
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons == [None] * (len(reasons) - 1) + [whole.choices[0].finish_reason]
    assert chunks[-1].choices == []
    # the cached tokens are those of the replica that has answered
    numbers = [
        (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        for usage in (chunks[-1].usage, whole.usage)
    ]
    assert numbers[0] == numbers[1]


def test_choices_differ_by_their_seeds_and_are_repeatable(client) -> None:
    options = {"model": "tiny", "messages": NORWAY, "temperature": 2.0, "max_tokens": 12}
    three = client.chat.completions.create(**options, n=3, seed=7)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2] and len(set(texts)) == 3
    again = client.chat.completions.create(**options, n=3, seed=7)
    assert [choice.message.content for choice in again.choices] == texts
    streamed = dict.fromkeys(range(3), "")
    for chunk in client.chat.completions.create(**options, n=3, seed=7, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert list(streamed.values()) == texts


def test_completions_of_texts_and_of_tokens(client, reference) -> None:
    tokenizer, _ = reference
    prompts = ["import os\n\ndef walk(", "The"]
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    expected = [
        tokenizer.decode(greedy(reference, each, 10), skip_special_tokens=True) for each in tokens
    ]
    for given in (prompts, tokens):
        answer = client.completions.create(model="tiny", prompt=given, max_tokens=10, temperature=0)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, tokens))
    echoed = client.completions.create(
        model="tiny", prompt=prompts[0], max_tokens=10, temperature=0, echo=True
    )
    assert echoed.choices[0].text == prompts[0] + expected[0]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_across_tokens(client, stream: bool) -> None:
    options = {
        "model": "tiny",
        "prompt": "import os\n\ndef walk(",
        "max_tokens": 60,
        "temperature": 0,
    }
    whole = client.completions.create(**options).choices[0].text
    # from the middle of the text to the middle of a token
    stop = whole[21:29]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(**options, stop=["nothing", stop], stream=stream)
    if not stream:
        assert answer.choices[0].text == expected
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].model_extra["stop_reason"] == stop
        return
    choices = [chunk.choices[0] for chunk in answer]
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"


def test_log_probabilities_are_those_of_transformers(client, reference) -> None:
    tokenizer, model = reference
    prompt = "import os\n\ndef walk("
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, temperature=0, logprobs=3, echo=True
    )
    logs = answer.choices[0].logprobs
    tokens = tokenizer.encode(prompt)
    everything = tokens + greedy(reference, tokens, 6)
    with torch.no_grad():
        logits = model(torch.tensor([everything])).logits[0].log_softmax(-1).numpy()
    expected = [float(logits[i, token]) for i, token in enumerate(everything[1:])]
    assert logs.token_logprobs[0] is None and logs.top_logprobs[0] is None
    np.testing.assert_allclose(logs.token_logprobs[1:], expected, atol=2e-3)
    assert "".join(logs.tokens) == answer.choices[0].text
    ends = np.cumsum([0, *map(len, logs.tokens)])
    assert logs.text_offset == ends[:-1].tolist()
    for row, top in zip(logits, logs.top_logprobs[1:], strict=False):
        best = {tokenizer.decode([int(t)]): float(row[t]) for t in np.argsort(-row)[:3]}
        for text, value in best.items():
            assert math.isclose(top[text], value, abs_tol=2e-3)


def prompt_logs_of(reference, tokens: list[int]) -> np.ndarray:
    _, model = reference
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1).numpy()


def check_prompt_logs(found: list, tokens: list[int], reference, top: int) -> None:
    logs = prompt_logs_of(reference, tokens)
    assert found[0] is None and len(found) == len(tokens)
    for row, token, entry in zip(logs, tokens[1:], found[1:], strict=False):
        best = [int(t) for t in np.argsort(-row, kind="stable")[:top]]
        assert list(map(int, entry)) == list(dict.fromkeys([*best, token]))
        for key, value in entry.items():
            assert math.isclose(value["logprob"], row[int(key)], abs_tol=2e-3)
            rank = best.index(int(key)) + 1 if int(key) in best else None
            assert value["rank"] == rank
            assert value["decoded_token"] == reference[0].decode([int(key)])


@pytest.mark.parametrize("top", [0, 3])
def test_prompt_logprobs(client, http, reference, top: int) -> None:
    tokenizer, _ = reference
    text = "The capital of Norway is"
    with_others = {"logprobs": 1, "echo": True} if top else {}
    answer = client.completions.create(
        model="tiny", prompt=[text, "One two"], max_tokens=2, temperature=0, **with_others,
        extra_body={"prompt_logprobs": top},
    )  # fmt: skip
    for choice, prompt in zip(answer.choices, (text, "One two"), strict=True):
        tokens = tokenizer.encode(prompt)
        check_prompt_logs(choice.prompt_logprobs, tokens, reference, top)
        assert choice.text.startswith(prompt) is bool(top)
        if top:
            assert all(len(each) <= 2 for each in choice.logprobs.top_logprobs[1:])
        else:
            assert choice.logprobs is None
    chat = client.chat.completions.create(
        model="tiny", messages=NORWAY, **LIMITED, extra_body={"prompt_logprobs": top}
    )
    tokens = tokenizer.apply_chat_template(
        NORWAY, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    check_prompt_logs(chat.prompt_logprobs, tokens, reference, top)
    assert chat.choices[0].logprobs is None
    plain = client.chat.completions.create(model="tiny", messages=NORWAY, **LIMITED)
    assert "Oslo" in plain.choices[0].message.content


def test_requests_of_lm_evaluation_harness(http, reference) -> None:
    """The documented form: the context and the continuation as tokens, echo, one more token."""
    tokenizer, _ = reference
    pairs = [("The capital of Norway is", " Oslo"), ("One two three", " banana split")]
    encoded = [
        (tokenizer.encode(a), tokenizer.encode(b, add_special_tokens=False)) for a, b in pairs
    ]
    body = {
        "model": "tiny", "prompt": [[*a, *b] for a, b in encoded], "temperature": 0, "max_tokens": 1,
        "logprobs": 1, "seed": 1234, "echo": True,
    }  # fmt: skip
    answer = http.post("/v1/completions", json=body).json()
    for choice, (context, more) in zip(answer["choices"], encoded, strict=True):
        whole = [*context, *more]
        logs = prompt_logs_of(reference, whole)
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        rows = logs[len(context) - 1 : -1]
        expected = [float(row[token]) for row, token in zip(rows, more, strict=True)]
        np.testing.assert_allclose(values, expected, atol=2e-3)
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        tokens = choice["logprobs"]["tokens"][len(context) : -1]
        greedy_found = all(t == max(top, key=top.get) for t, top in zip(tokens, tops, strict=True))
        assert greedy_found == all(int(r.argmax()) == t for r, t in zip(rows, more, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_a_conversation(client, stream: bool) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=NORWAY, **LIMITED, logprobs=True, top_logprobs=2, stream=stream
    )
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.delta.content or "" for choice in choices)
        entries = [e for c in choices if c.logprobs for e in c.logprobs.content]
    else:
        text = answer.choices[0].message.content
        entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == text
    for entry in entries:
        assert len(entry.top_logprobs) == 2
        # greedy: the token is the most likely one
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob


def test_a_bias_forbids_and_forces_tokens(client, reference) -> None:
    tokenizer, _ = reference
    first = client.completions.create(model="tiny", prompt="import", max_tokens=1, temperature=0)
    token = tokenizer.encode(first.choices[0].text)[0]
    other = client.completions.create(
        model="tiny", prompt="import", max_tokens=1, temperature=0, logit_bias={str(token): -100}
    )
    assert other.choices[0].text != first.choices[0].text
    forced = client.completions.create(
        model="tiny", prompt="import", max_tokens=3, temperature=0, logit_bias={"300": 100}
    )
    assert forced.choices[0].text == tokenizer.decode([300] * 3)


def test_models(client) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_extra["max_model_len"] == 512
    assert client.models.retrieve("tiny") == model
    with pytest.raises(
        openai.NotFoundError, match="'giant' does not exist; this server has 'tiny'"
    ):
        client.models.retrieve("giant")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="giant", messages=NORWAY)


@pytest.mark.parametrize(
    ("change", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"logit_bias": {"5000": 1}}, "logit_bias", "tokens are 0 to 4095"),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "owner", "content": "x"}]}, "messages.0.role", "must be one of"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": "word " * 600}]}, "messages", "context length is 512 tokens. Give"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages",
            "takes text",
        ),
        ({"lora": 5}, "lora", "the name of an adapter"),
        ({"lora": {"name": "x", "scale": "1"}}, "lora", "a number"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"stop_token_ids": [99999]}, "stop_token_ids", "tokens are 0 to 4095"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_new_tokens", "more than max_new_tokens"),
    ],
)  # fmt: skip
def test_a_parameter_that_does_not_fit_is_named(http: httpx.Client, change, param, says) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": NORWAY, **change})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert says in error["message"]
    assert (error["code"] == "context_length_exceeded") == ("context" in says)


def test_invalid_bodies(http: httpx.Client) -> None:
    post = lambda **body: http.post("/v1/completions", **body)  # noqa: E731
    kind = {"Content-Type": "application/json"}
    assert "no JSON" in post(content=b"{", headers=kind).json()["error"]["message"]
    assert post(json={}).json()["error"]["param"] == "prompt"
    assert post(json=[1]).status_code == 400
    assert post(content=b"", headers=kind).status_code == 400
    assert post(content=b"\xff\xfe", headers=kind).status_code == 400
    assert post(json={"prompt": "a" * 300_000}).status_code == 413
    chunks = (b"x" * 50_000 for _ in range(10))  # no Content-Length
    assert post(content=chunks, headers=kind).status_code == 413
    assert http.get("/v1/completions").status_code == 405
    assert http.get("/nothing").json()["error"]["message"] == "there is no route /nothing"
    surrogate = post(content=b'{"prompt": "\\ud800"}', headers=kind)
    assert surrogate.status_code == 400, surrogate.text


def test_unused_fields_are_named(http: httpx.Client) -> None:
    body = {"prompt": "a", "max_tokens": 1, "temprature": 0, "hört": 1}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["warning"] == '299 - "unknown fields are ignored: h?rt, temprature"'
    assert "warning" not in http.post("/v1/completions", json={"prompt": "a"}).headers


def test_concurrent_requests_equal_single_ones(client) -> None:
    prompts = ["import os\n\ndef walk(", "The", "class Node:\n", "x = [", "def add(a, b):", "#"] * 2

    def run(prompt: str) -> str:
        answer = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=24, temperature=0
        )
        return answer.choices[0].text

    alone = {prompt: run(prompt) for prompt in set(prompts)}
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(run, prompts)) == [alone[prompt] for prompt in prompts]


def test_operation(http: httpx.Client) -> None:
    for path in ("/health", "/v1/health", "/ping"):
        assert http.get(path).json() == {"status": "ok"}
    assert http.get("/version").json()["version"]
    named = http.get("/health", headers={"X-Request-Id": "my-id"})
    assert named.headers["x-request-id"] == "my-id"
    before = _metric(http, "maxserve_num_output_tokens_total")
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5, "ignore_eos": True})
    assert _metric(http, "maxserve_num_output_tokens_total") == before + 5
    assert _metric(http, "maxserve_num_requests_running") == 0


def _metric(http: httpx.Client, name: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))
