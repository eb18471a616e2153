"""`prediction` of chat completions: OpenAI's client, usage, what is refused; no answer depends on it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from max.serve import limits
from max.serve.chat.prediction import predicted_tokens
from max.serve.errors import ApiError

COUNT = [{"role": "user", "content": "Count from one to twenty in words."}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": COUNT, "max_tokens": 60, "temperature": 0}


def predicted(client: openai.OpenAI, content: Any, **options: Any) -> Any:
    """The answer to a request with a prediction."""
    return client.chat.completions.create(
        **{**GREEDY, **options}, prediction={"type": "content", "content": content}
    )


def details(usage: Any) -> tuple[int, int]:
    found = usage.completion_tokens_details
    return found.accepted_prediction_tokens, found.rejected_prediction_tokens


@pytest.fixture
def answer(client: openai.OpenAI) -> str:
    whole = client.chat.completions.create(**GREEDY)
    assert whole.usage is not None and whole.usage.completion_tokens_details is None
    return whole.choices[0].message.content or ""


def test_predictions_of_the_client(client: openai.OpenAI, answer: str) -> None:
    words = answer.split(" ")
    edited = " ".join([*words[:3], "other", *words[4:]])
    parts = [{"type": "text", "text": answer[:20]}, {"type": "text", "text": answer[20:]}]
    for content in (
        answer,
        parts,
        edited,
        "",
        "quite another text\n" * 200,
        "\u00e9\u4e2d\U0001f600" * 30,
    ):
        whole = predicted(client, content)
        assert whole.choices[0].message.content == answer
        accepted, rejected = details(whole.usage)
        assert 0 <= accepted < whole.usage.completion_tokens and rejected >= 0
        if not content:
            assert (accepted, rejected) == (0, 0)
    # drafts are tried after plain steps were measured, and now and then where they did not pay
    tries = (details(predicted(client, answer).usage)[0] for _ in range(60))
    assert any(accepted > 0 for accepted in tries)


def test_a_stream_has_the_counts_in_its_last_chunk(client: openai.OpenAI, answer: str) -> None:
    for _ in range(60):
        stream = predicted(client, answer, stream=True, stream_options={"include_usage": True})
        *chunks, last = stream
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer
        assert all(c.usage is None for c in chunks)
        if details(last.usage)[0] > 0:
            return
    pytest.fail("no draft of 60 right predictions was right")


def test_predictions_beside_all_that_openai_refuses(client: openai.OpenAI, answer: str) -> None:
    """Several answers, log-probabilities, penalties, tools, an older limit, stop texts."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    options = [
        dict(n=3, temperature=0.9, seed=4), dict(logprobs=True, top_logprobs=2),
        dict(presence_penalty=0.5, frequency_penalty=0.3), dict(tools=[tool]),
        dict(response_format={"type": "json_object"}), dict(stop=[answer[20:25]]),
    ]  # fmt: skip
    for own in options:
        expected: Any = client.chat.completions.create(**{**GREEDY, **own})
        got = predicted(client, answer, **own)
        assert got.usage.completion_tokens == expected.usage.completion_tokens
        assert min(details(got.usage)) >= 0
        for one, other in zip(got.choices, expected.choices, strict=True):
            assert one.message.content == other.message.content
            assert one.finish_reason == other.finish_reason
            if one.logprobs is not None:
                pairs = zip(one.logprobs.content, other.logprobs.content, strict=True)
                assert all(
                    a.token == b.token and a.logprob == pytest.approx(b.logprob, abs=2e-4)
                    for a, b in pairs
                )


TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("a text", "prediction"),
        ([], "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "a"}, "prediction.type"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": []}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "text": "a"}]}, "prediction.content.0.type"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content.0.text"),
        ({"type": "content", "content": [{"type": "text", "text": 5}]}, "prediction.content.0.text"),
        ({"type": "content", "content": ["a"]}, "prediction.content.0"),
        ({"type": "content", "content": [TEXT] * (limits.MAX_PREDICTED_PARTS + 1)}, "prediction.content"),
        ({"type": "content", "content": "a\ud800"}, "prediction"),
    ],
)  # fmt: skip
def test_what_is_refused(http: httpx.Client, prediction: Any, param: str) -> None:
    body = json.dumps({**GREEDY, "prediction": prediction})
    response = http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error", error
    assert error["param"] == param, error


def test_unknown_fields_and_other_routes(http: httpx.Client) -> None:
    prediction = {"type": "content", "content": [{**TEXT, "extra": 1}], "more": 2}
    short = {**GREEDY, "max_tokens": 2}
    answer = http.post("/v1/chat/completions", json={**short, "prediction": prediction})
    assert answer.status_code == 200 and "prediction.more" in answer.headers["warning"]
    null = http.post("/v1/chat/completions", json={**short, "prediction": None})
    assert "completion_tokens_details" not in null.json()["usage"]
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "prediction": prediction}
    other = http.post("/v1/completions", json=body)
    assert other.status_code == 200 and "prediction" in other.headers["warning"]


class Encoder:
    """A model whose tokenizer writes a space before a text, and makes one token of two equal letters."""

    vocabulary_size = ord("z")

    def check_text(self, size: int, param: str) -> None:
        if size > 64:
            raise ApiError("it is too long", param=param)

    def all_tokens(self, text: str, special: bool) -> list[int]:
        assert not special
        tokens = [ord(" ")]
        for letter in map(ord, text):
            if tokens[-1] == letter:
                tokens[-1] = -letter
            else:
                tokens.append(letter)
        return tokens


def test_a_prediction_is_encoded_as_an_answer() -> None:
    def encoded(prompt: str, prediction: str, most: int = 99) -> str:
        model: Any = Encoder()
        tokens = asyncio.run(predicted_tokens(model, prompt, prediction, most))
        return "".join(chr(token) if token > 0 else 2 * chr(-token) for token in tokens)

    assert encoded("say it:", "abc") == "abc", "it is no text of its own"
    assert encoded("x" * 500 + ":", "abc") == "abc"
    assert encoded("say it:", "abczd") == "abcd", "the model does not have z"
    assert encoded("say it:", "abcde", 2) == "ab"
    assert encoded("a banana", "abc") == " abc", "one token would have letters of both"
    assert encoded("say it:", "") == ""
    with pytest.raises(ApiError, match="it is too long") as caught:
        encoded("say it:", "a" * 65)
    assert caught.value.param == "prediction"
