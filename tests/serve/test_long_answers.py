"""Answers with log-probabilities of long prompts: made in threads, in steps."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from max.serve.openai import wire
from tests.serve.conftest import TINY, RunningServer


def test_json_in_steps_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_STEP", 5)
    draw = random.Random(3)

    def value(depth: int) -> Any:
        kind = draw.randrange(7 if depth else 5)
        if kind == 5:
            return [value(depth - 1) for _ in range(draw.randrange(14))]
        if kind == 6:
            return {
                draw.choice('ab"\\é') + str(n): value(depth - 1) for n in range(draw.randrange(9))
            }
        return [
            None,
            True,
            draw.uniform(-9, 9),
            draw.randrange(99),
            draw.choice(["", 'é"\n', "x"]),
        ][kind]

    for _ in range(500):
        data = value(4)
        assert wire.encode_in_steps(data) == wire.encode_json(data)
        assert json.loads(wire.encode_in_steps(data)) == data


def test_long_lists_are_encoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, encode = [], wire.encode_json

    def counted(data: Any) -> bytes:
        text = encode(data)
        lengths.append(len(text))
        return text

    monkeypatch.setattr(wire, "encode_json", counted)
    tops = [{str(n): -1.5, "b": -2.0} for n in range(40_000)]
    answer = {"choices": [{"logprobs": {"tokens": ["a"] * 40_000, "top_logprobs": tops}}]}
    text = wire.encode_in_steps(answer)
    assert json.loads(text) == answer
    assert max(lengths) < len(text) / 5


def test_echo_of_a_long_prompt_is_that_of_a_short_one(
    start_server: Callable[..., RunningServer],
) -> None:
    """Of two prompts, of which only one is prepared in threads, the common begin has equal log-probabilities."""
    server = start_server(
        "--model", str(TINY), "--max-length", "2048", "--quantization-encoding", "float32", "--enable-echo",
        "--max-batch-size", "2", "--prefill-chunk-size", "512",
    ).wait_ready()  # fmt: skip
    rng = random.Random(1)
    prompt = [rng.randrange(5, 300) for _ in range(1500)]
    answers: dict[tuple[int, bool], Any] = {}

    def ask(count: int, stream: bool) -> None:
        body = {
            "prompt": prompt[:count],
            "max_tokens": 1,
            "echo": True,
            "logprobs": 3,
            "stream": stream,
            "temperature": 0,
        }
        text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).text
        events = (
            [text] if not stream else [e[6:] for e in text.split("\n\n") if e.startswith("data: {")]
        )
        logs = [json.loads(event)["choices"][0]["logprobs"] for event in events]
        answers[count, stream] = {
            name: [item for log in logs if log for item in log[name]] for name in logs[0]
        }

    threads = [
        threading.Thread(target=ask, args=(n, s)) for n in (100, 1500) for s in (False, True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for stream in (False, True):
        short, long = answers[100, stream], answers[1500, stream]
        assert len(long["tokens"]) == 1501 and len(short["tokens"]) == 101
        for name in ("tokens", "text_offset"):
            assert long[name][:100] == short[name][:100]
        assert long["token_logprobs"][0] is None
        assert long["token_logprobs"][1:100] == pytest.approx(
            short["token_logprobs"][1:100], abs=1e-3
        )
    assert answers[1500, False]["tokens"] == answers[1500, True]["tokens"]
    assert server.stop() == 0
