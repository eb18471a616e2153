"""Responses, Anthropic's and Ollama's APIs by their own clients, and the routes of tokens."""

from __future__ import annotations

import json
import re

import anthropic
import httpx
import ollama
import openai
import pytest
from transformers import AutoTokenizer

from tests.serve.conftest import TINY, RunningServer
from tests.serve.test_tools import ASK, WEATHER

QUESTION = "What is the capital of Norway?"
ANSWER = "The capital of Norway is Oslo."
SCHEMA = WEATHER["function"]["parameters"]


@pytest.fixture
def claude(server: RunningServer):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_a_message_of_anthropic(claude: anthropic.Anthropic) -> None:
    options = {
        "model": "tiny",
        "max_tokens": 30,
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        "extra_body": {"temperature": 0},
    }
    message = claude.messages.create(**options)
    assert [block.text for block in message.content] == [ANSWER]
    assert message.stop_reason == "end_turn" and message.usage.output_tokens == 8
    counted = claude.messages.count_tokens(model="tiny", messages=options["messages"])
    cached = message.usage.cache_read_input_tokens
    assert counted.input_tokens == message.usage.input_tokens + cached
    with claude.messages.stream(**options) as stream:
        assert "".join(stream.text_stream) == ANSWER
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [ANSWER]
    assert final.usage.output_tokens == 8
    assert final.usage.cache_read_input_tokens == counted.input_tokens - 1
    stopped = claude.messages.create(**options, stop_sequences=["Norway"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Norway")
    cut = claude.messages.create(**{**options, "max_tokens": 2})
    assert cut.stop_reason == "max_tokens"


def test_a_tool_of_anthropic(claude: anthropic.Anthropic) -> None:
    options = {
        "model": "tiny",
        "max_tokens": 120,
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "get_weather"},
        "extra_body": {"temperature": 0},
        "system": "Be brief.",
    }
    message = claude.messages.create(**options)
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert set(block.input) == {"city", "days"}
    with claude.messages.stream(**options) as stream:
        streamed = stream.get_final_message()
    assert [each.input for each in streamed.content] == [block.input]
    assert streamed.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
    more = [
        *options["messages"],
        {
            "role": "assistant",
            "content": [block.model_dump(include={"type", "id", "name", "input"})],
        },
        {"role": "user", "content": [result]},
    ]
    after = claude.messages.create(**{**options, "messages": more, "tool_choice": {"type": "none"}})
    assert after.usage.input_tokens > message.usage.input_tokens - 100


def test_errors_of_anthropic(claude: anthropic.Anthropic) -> None:
    ask = {"max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.NotFoundError, match="'giant' does not exist"):
        claude.messages.create(model="giant", **ask)
    image = [{"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}]
    with pytest.raises(anthropic.BadRequestError, match="takes text") as error:
        claude.messages.create(
            model="tiny", max_tokens=3, messages=[{"role": "user", "content": image}]
        )
    assert error.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: .* 604 tokens"):
        claude.messages.create(
            model="tiny", max_tokens=3, messages=[{"role": "user", "content": "word " * 595}]
        )


def test_a_response(client: openai.OpenAI) -> None:
    options = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 30}
    response = client.responses.create(**options)
    assert response.output_text == ANSWER and response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + 8
    with client.responses.stream(**options) as stream:
        events = list(stream)
        assert stream.get_final_response().output_text == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER
    cut = client.responses.create(**{**options, "max_output_tokens": 2})
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError, match="is not kept"):
        client.responses.create(**options, previous_response_id="resp-1")
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve("resp-1")
    counted = client.responses.input_tokens.count(model="tiny", input=QUESTION)
    assert counted.input_tokens == response.usage.input_tokens


def test_a_response_with_a_tool_and_with_a_schema(client: openai.OpenAI) -> None:
    tool = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}
    options = {
        "model": "tiny", "input": "The weather?", "tools": [tool], "max_output_tokens": 120, "temperature": 0,
        "tool_choice": {"type": "function", "name": "get_weather"},
    }  # fmt: skip
    response = client.responses.create(**options)
    counted = {name: options[name] for name in ("model", "input", "tools")}
    assert (
        client.responses.input_tokens.count(**counted).input_tokens == response.usage.input_tokens
    )
    none = client.responses.input_tokens.count(
        **counted, tool_choice="none", instructions="Be brief."
    )
    assert 0 < none.input_tokens < response.usage.input_tokens
    (call,) = response.output
    assert call.type == "function_call" and set(json.loads(call.arguments)) == {"city", "days"}
    with client.responses.stream(**options) as stream:
        final = stream.get_final_response()
    assert [item.arguments for item in final.output] == [call.arguments]
    items = [
        {"role": "user", "content": "The weather?"},
        call.model_dump(exclude={"status"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"enum": ["sunny", "rain"]}}}
    after = client.responses.create(model="tiny", input=items, text=text, max_output_tokens=20)
    assert json.loads(after.output_text) in ("sunny", "rain")


def test_ollama(server: RunningServer) -> None:
    client = ollama.Client(server.url)
    greedy = {"temperature": 0, "num_predict": 30}
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat("tiny", messages, options=greedy)
    assert answer.message.content == ANSWER and answer.done and answer.eval_count == 8
    pieces = list(client.chat("tiny:latest", messages, options=greedy, stream=True))
    assert "".join(piece.message.content for piece in pieces) == ANSWER
    assert pieces[-1].done and pieces[-1].done_reason == "stop" and not pieces[0].done
    assert client.generate("tiny", QUESTION, options=greedy).response == ANSWER
    raw = client.generate("tiny", "import os", raw=True, options={**greedy, "num_predict": 3})
    assert raw.done_reason == "length" and raw.eval_count == 3
    tool = client.chat(
        "tiny", messages, tools=[WEATHER], format=SCHEMA, options={"num_predict": 90}
    )
    assert tool.message.tool_calls or set(json.loads(tool.message.content)) == {"city", "days"}
    assert [model.model for model in client.list().models] == ["tiny"]
    assert client.show("tiny").modelinfo["general.context_length"] == 512
    assert [model.model for model in client.ps().models] == ["tiny"]
    with pytest.raises(ollama.ResponseError, match="'giant' does not exist") as error:
        client.chat("giant", messages)
    assert error.value.status_code == 404
    client._client.close()


def test_tokens(http: httpx.Client) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = "import os\n\ndef héllo(世"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text) and answer["count"] == len(answer["tokens"])
    back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back["prompt"] == back["content"] == text
    expected = tokenizer.apply_chat_template(
        ASK, tools=[WEATHER], tokenize=False, add_generation_prompt=True
    )
    body = {"messages": ASK, "tools": [WEATHER]}
    assert http.post("/apply-template", json=body).json() == {"prompt": expected}
    counted = http.post("/tokenize", json=body).json()["count"]
    assert counted == len(tokenizer.encode(expected, add_special_tokens=False))
    for bad in ({}, {"prompt": "a", "content": "b"}):
        assert http.post("/tokenize", json=bad).status_code == 400
    assert http.post("/detokenize", json={"tokens": [4096]}).status_code == 400


def test_the_chat_page_loads_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert (
        page.headers["content-type"].startswith("text/html") and "<title>Chat</title>" in page.text
    )
    assert "default-src 'none'" in page.headers["content-security-policy"]
    # files of this server only, or places of the page
    linked = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert linked and not [link for link in linked if ":" in link or link.startswith("//")]
    assert not re.findall(r"@import|url\(|innerHTML|eval\(", page.text)
