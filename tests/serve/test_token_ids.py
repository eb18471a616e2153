"""Tokens in answers, by vLLM's fields: those of the prompt and all that were generated, also where they are no text."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.conftest import TINY

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
ASK = [{"role": "user", "content": "What is the capital of Norway?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json={"model": "tiny", "return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def chunks_of(http: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "return_token_ids": True, "stream": True, **body}
    with http.stream("POST", path, json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_the_tokens_of_a_greedy_chat_are_those_of_transformers(http) -> None:
    answer = ask(http, CHAT, messages=ASK, temperature=0, max_tokens=32)
    prompt = TOKENIZER.apply_chat_template(ASK, add_generation_prompt=True)["input_ids"]
    assert answer["prompt_token_ids"] == prompt
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=END
        )
    (choice,) = answer["choices"]
    assert choice["token_ids"] == found[0, len(prompt) :].tolist()
    # the end of the answer is one of them
    assert choice["token_ids"][-1] == END and choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])


OPTIONS: dict[str, dict[str, Any]] = {
    "text": {"max_tokens": 24},
    "choices": {"max_tokens": 12, "n": 3},
    "log-probabilities": {"max_tokens": 12, "logprobs": True, "top_logprobs": 2},
    "a call": {"max_tokens": 90, "tools": [TOOL], "tool_choice": "required"},
    "a call with log-probabilities": {"max_tokens": 90, "tools": [TOOL], "tool_choice": "required", "logprobs": True},
    "a call that is cut off": {"max_tokens": 9, "tools": [TOOL], "tool_choice": "required"},
    "a stop text": {"max_tokens": 60, "stop": ["s ", "or"]},
    "a schema": {"max_tokens": 60, "response_format": {"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 9}}}},
    "usage": {"max_tokens": 12, "usage": True, "ignore_eos": True},
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("seed", [3, 4])
def test_streamed_tokens_of_a_chat_are_those_of_the_whole_answer(http, kind, seed) -> None:
    options = {"messages": ASK, "temperature": 1.0, "seed": seed, **OPTIONS[kind]}
    counts = {"include_usage": True, "continuous_usage_stats": True}
    more = {"stream_options": counts} if options.pop("usage", False) else {}
    whole = ask(http, CHAT, **options)
    chunks = chunks_of(http, CHAT, **options, **more)
    if more:
        chunks.pop()
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 12
    tokens: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        first = choice["index"] not in tokens
        # only the first chunk of an answer has the prompt
        assert chunk.get("prompt_token_ids") == (whole["prompt_token_ids"] if first else None)
        tokens.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert tokens == {each["index"]: each["token_ids"] for each in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == sum(map(len, tokens.values()))
    for choice in whole["choices"]:
        text = TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True)
        if kind.startswith("a call"):
            assert text.startswith("<tool_call>") and not choice["message"]["content"]
            if "cut" not in kind:
                arguments = json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])
                assert json.dumps(arguments["city"], ensure_ascii=False) in text
        else:
            # the last token goes on after the stop text
            stop = choice["stop_reason"]
            content = choice["message"]["content"] + (stop or "")
            assert text.startswith(content) and (stop or text == content)
            before = TOKENIZER.decode(choice["token_ids"][:-1], skip_special_tokens=True)
            assert stop is None or stop not in before


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"echo": True},
        {"echo": True, "max_tokens": 0},
        {"n": 2, "prompt": ["Oslo is", "The"]},
        {"prompt": [65, 66, 300]},
        {"stop": [" the", "e"], "max_tokens": 60},
        {"truncate_prompt_tokens": 3, "logprobs": 1},
    ],
    ids=str,
)
def test_tokens_of_completions(http, more: dict[str, Any]) -> None:
    options = {"prompt": "The capital of Norway", "max_tokens": 14, "seed": 5, **more}
    whole = ask(http, COMPLETIONS, **options)
    prompts = options["prompt"] if isinstance(options["prompt"], list) else [options["prompt"]]
    texts = prompts if isinstance(prompts[0], str) else [TOKENIZER.decode(prompts)]
    count = options.get("n", 1)
    for choice in whole["choices"]:
        text = texts[choice["index"] // count]
        prompt = TOKENIZER.encode(text)[-options.get("truncate_prompt_tokens", 512) :]
        assert choice["prompt_token_ids"] == prompt
        own = TOKENIZER.decode(choice["token_ids"], skip_special_tokens=True)
        own = own[: own.find(choice["stop_reason"])] if choice["stop_reason"] else own
        assert choice["text"] == (text if "echo" in more else "") + own
    found: dict[int, list[int]] = {}
    for chunk in chunks_of(http, COMPLETIONS, **options):
        (choice,) = chunk["choices"]
        wanted = whole["choices"][choice["index"]]["prompt_token_ids"]
        begun = choice["index"] in found
        assert choice.get("prompt_token_ids") == (None if begun else wanted)
        found.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert found == {each["index"]: each["token_ids"] for each in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == sum(map(len, found.values()))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("value", [False, None])
def test_answers_have_no_tokens_unless_asked(http, path: str, value: bool | None) -> None:
    body = {"messages": ASK} if path == CHAT else {"prompt": "The"}
    body |= {"max_tokens": 3, "return_token_ids": value}
    whole = ask(http, path, **body)
    assert "token_ids" not in json.dumps([whole, *chunks_of(http, path, **body)])


def test_log_probabilities_name_tokens_by_their_numbers(http) -> None:
    """The bytes stay those of the token."""
    body = {"temperature": 1.5, "seed": 2, "max_tokens": 8, "return_tokens_as_token_ids": True}
    chat = {"messages": ASK, **body, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    (choice,) = ask(http, CHAT, **chat)["choices"]
    logs = choice["logprobs"]["content"]
    assert [log["token"] for log in logs] == [f"token_id:{each}" for each in choice["token_ids"]]
    for log in logs:
        for each in (log, *log["top_logprobs"]):
            token = int(each["token"].removeprefix("token_id:"))
            if token not in TOKENIZER.all_special_ids:
                assert bytes(each["bytes"]).decode("utf-8", "replace") == TOKENIZER.decode([token])
    streamed = [log for chunk in chunks_of(http, CHAT, **chat)
                for log in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]  # fmt: skip
    assert [log["token"] for log in streamed] == [log["token"] for log in logs]
    text = {"prompt": "The capital", **body, "logprobs": 2, "echo": True, "ignore_eos": True}
    (choice,) = ask(http, COMPLETIONS, **text)["choices"]
    own = [f"token_id:{each}" for each in choice["prompt_token_ids"] + choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == own
    assert all(
        key.startswith("token_id:") for top in choice["logprobs"]["top_logprobs"][1:] for key in top
    )
    plain = ask(http, COMPLETIONS, **{**text, "return_tokens_as_token_ids": False})["choices"][0]
    assert plain["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_routes_that_have_no_such_field_say_which_have_it(http, path: str) -> None:
    body = {"model": "tiny", "max_tokens": 3, "return_token_ids": True}
    body |= {"input": "Hi"} if path == "/v1/responses" else {"messages": ASK}
    if path != "/v1/messages":
        del body["max_tokens"]
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and CHAT in answer.text
