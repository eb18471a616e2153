"""Recorded sessions of agents, and their replay: how many tokens of each prompt a server takes from its prefix cache.

``python -m tests.serve.agent_sessions URL`` replays them at a running server with all four APIs, and prints the shares.
A session is drawn by a seed: a long system prompt, tools, turns with reasoning that the template strips later, calls
and results, sub-agents with prompts of their own in between, and edits of the last message.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

TEMPLATE = """\
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}<|im_start|>system
# Tools
{% for t in tools %}{{ t | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>
{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template of our own in the manner of Qwen 3: it keeps reasoning since the last message of the user only."""

WORDS = (
    "file test read the error line function open fix a value build list of name path in run".split()
)


@dataclass(frozen=True)
class Request:
    """One request of a session.

    Args:
        messages: The conversation, with OpenAI's fields.
        tools: The tools, with OpenAI's fields.
    """

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]


def text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words)) + "."


def tools_of(rng: random.Random, count: int) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": text(rng, 12),
                "parameters": {
                    "type": "object",
                    "properties": {"path": {"type": "string", "description": text(rng, 5)}},
                    "required": ["path"],
                },
            },
        }
        for i in range(count)
    )


def session(seed: int, turns: int = 4) -> Iterator[Request]:
    """The requests of an agent and of its sub-agents, in order.

    Args:
        seed: Draws the session.
        turns: The messages of the user.
    """
    rng = random.Random(seed)
    tools, calls = tools_of(rng, 3), 0
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(rng, 80)}]
    helper = [{"role": "system", "content": text(rng, 80)}]
    for _ in range(turns):
        messages.append({"role": "user", "content": text(rng, rng.randrange(5, 40))})
        if rng.random() < 0.4:  # the client edits its last message after the first answer
            yield Request(tuple(messages), tools)
            kept = messages[-1]["content"].split()
            edited = " ".join([*kept[: rng.randrange(len(kept))], text(rng, 8)])
            messages[-1] = {"role": "user", "content": edited}
        for _ in range(rng.randrange(3)):
            yield Request(tuple(messages), tools)
            calls += 1
            arguments = json.dumps({"path": text(rng, 3)})
            messages += [
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": text(rng, 20),
                    "tool_calls": [
                        {"id": f"call_{calls}", "type": "function",
                         "function": {"name": f"tool_{calls % 3}", "arguments": arguments}}
                    ],
                },
                {"role": "tool", "tool_call_id": f"call_{calls}", "content": text(rng, rng.randrange(5, 60))},
            ]  # fmt: skip
            if rng.random() < 0.4:
                yield Request((*helper, {"role": "user", "content": text(rng, 15)}), ())
        yield Request(tuple(messages), tools)
        messages.append(
            {"role": "assistant", "content": text(rng, 25), "reasoning_content": text(rng, 20)}
        )


def openai_body(request: Request) -> dict[str, Any]:
    return {
        "messages": list(request.messages),
        "tools": list(request.tools) or None,
        "max_tokens": 2,
    }


def responses_body(request: Request) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    system, *messages = request.messages
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {
                    "type": "function_call_output",
                    "call_id": message["tool_call_id"],
                    "output": message["content"],
                }
            )
            continue
        if thought := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thought}]
            items.append({"type": "reasoning", "id": "rs_1", "summary": [], "content": content})
        if message["content"]:
            items.append(
                {"type": "message", "role": message["role"], "content": message["content"]}
            )
        items += [
            {"type": "function_call", "call_id": call["id"], **call["function"]}
            for call in message.get("tool_calls", ())
        ]
    tools = [{"type": "function", **tool["function"]} for tool in request.tools]
    return {
        "input": items, "instructions": system["content"], "tools": tools, "max_output_tokens": 2, "store": False,
    }  # fmt: skip


def anthropic_body(request: Request) -> dict[str, Any]:
    system, *messages = request.messages
    turns: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            block = {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
            turns.append({"role": "user", "content": [block]})
            continue
        blocks: list[dict[str, Any]] = []
        if thought := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
        if message["content"]:
            blocks.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls", ()):
            function = call["function"]
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": json.loads(function["arguments"]),
                }
            )
        turns.append({"role": message["role"], "content": blocks})
    tools = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]}
        for f in (tool["function"] for tool in request.tools)
    ]
    return {"system": system["content"], "messages": turns, "tools": tools, "max_tokens": 2}


def ollama_body(request: Request) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for message in request.messages:
        other = {key: value for key, value in message.items() if key != "reasoning_content"}
        if thought := message.get("reasoning_content"):
            other["thinking"] = thought
        messages.append(other)
    return {
        "messages": messages,
        "tools": list(request.tools),
        "stream": False,
        "options": {"num_predict": 2},
    }


def openai_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def responses_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def anthropic_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached


def ollama_usage(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["prompt_eval_count"], answer["prompt_cached_count"]


APIS = {
    "/v1/chat/completions": (openai_body, openai_usage),
    "/v1/responses": (responses_body, responses_usage),
    "/v1/messages": (anthropic_body, anthropic_usage),
    "/api/chat": (ollama_body, ollama_usage),
}


@dataclass
class Replay:
    """What a replay has read.

    Args:
        prompts: The tokens of all prompts.
        cached: Those that the cache had.
        reusable: Those at the start of a prompt that an earlier prompt has too.
        requests: The number of requests.
    """

    prompts: int = 0
    cached: int = 0
    reusable: int = 0
    requests: int = 0

    @property
    def share(self) -> float:
        """The share of the reusable tokens that came from the cache."""
        return self.cached / self.reusable

    @property
    def read(self) -> float:
        """The tokens that were read, as a multiple of the new ones."""
        return (self.prompts - self.cached) / (self.prompts - self.reusable)


def common(one: list[int], other: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def replay(http: httpx.Client, path: str, model: str, seeds: range) -> Replay:
    """Replays sessions whose requests are interleaved, from an empty cache.

    Args:
        http: A client of the server.
        path: The route.
        model: The model.
        seeds: The sessions.
    """
    body_of, usage_of = APIS[path]
    http.post("/reset_prefix_cache").raise_for_status()
    found, known = Replay(), list[list[int]]()
    sessions = [session(seed) for seed in seeds]
    while sessions:
        for each in list(sessions):
            request = next(each, None)
            if request is None:
                sessions.remove(each)
                continue
            answer = http.post(path, json={"model": model, **body_of(request)})
            assert answer.status_code == 200, answer.text
            prompt, cached = usage_of(answer.json())
            tokenized = {"messages": list(request.messages), "tools": list(request.tools) or None}
            tokens = http.post("/tokenize", json={"model": model, **tokenized}).json()["tokens"]
            assert len(tokens) == prompt, "another text than that of chat completions"
            # the last token is read in any case
            reusable = max((common(tokens, other) for other in known), default=0)
            found.reusable += min(reusable, prompt - 1)
            found.prompts += prompt
            found.cached += cached
            found.requests += 1
            known.append(tokens)
    return found


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=600) as http:
        model = http.get("/v1/models").json()["data"][0]["id"]
        for path in APIS:
            found = replay(http, path, model, range(4))
            print(
                f"{path}: {found.requests} requests, {found.share:.2%} of {found.reusable} reusable tokens cached, "
                f"{found.read:.3f} x the new tokens read"
            )


if __name__ == "__main__":
    main(sys.argv[1])
