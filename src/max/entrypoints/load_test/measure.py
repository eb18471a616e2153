"""Sends requests at a rate, and measures their answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from max.entrypoints.load_test.http_client import Target, error_text, events

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Args:
        model: The model's name.
        chat: Whether conversations are sent; else texts to continue.
        count: The number of requests.
        prompt_words: The words of a prompt.
        prefix_words: The first words, which all prompts share.
        output_tokens: The tokens of an answer.
        seed: Of the words, and of the times.
    """

    model: str
    chat: bool
    count: int
    prompt_words: int
    prefix_words: int
    output_tokens: int
    seed: int = 0

    def bodies(self) -> list[dict[str, Any]]:
        """The bodies of all requests."""
        numbers = random.Random(self.seed)
        prefix = _words(numbers, min(self.prefix_words, self.prompt_words))
        own = self.prompt_words - len(prefix)
        texts = [" ".join([*prefix, *_words(numbers, own)]) for _ in range(self.count)]
        shared = {
            "model": self.model,
            "max_tokens": self.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            return [{**shared, "messages": [{"role": "user", "content": t}]} for t in texts]
        return [{**shared, "prompt": text} for text in texts]


def _words(numbers: random.Random, count: int) -> list[str]:
    return ["".join(numbers.choices(_LETTERS, k=numbers.randint(2, 7))) for _ in range(count)]


@dataclass
class Sample:
    """What one request took.

    Args:
        begin: When it was sent.
        first: When its first text came.
        end: When it ended.
        pauses: The seconds between pieces of text after the first.
        prompt_tokens: The tokens of the prompt, as the server counts.
        output_tokens: Those of the answer.
        error: Why it failed; empty where it did not.
    """

    begin: float
    first: float = 0.0
    end: float = 0.0
    pauses: MutableSequence[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""


async def measure_one(target: Target, body: dict[str, Any], sample: Sample | None = None) -> Sample:
    """Sends one request.

    Args:
        target: The server.
        body: The body.
        sample: Filled in as the answer arrives, so that a cancelled caller has what came so far; None: a
            new one.
    """
    sample = sample or Sample(0.0)
    sample.begin = time.perf_counter()
    last, pieces = sample.begin, 0
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    try:
        async with target.request(path, body) as (status, parts):
            if status != 200:
                sample.error = error_text(status, b"".join([part async for part in parts]))
                return sample
            async for data in events(parts):
                if data == b"[DONE]":
                    break
                value = json.loads(data)
                if "error" in value:
                    sample.error = str(value["error"].get("message", value["error"]))
                    return sample
                if usage := value.get("usage"):
                    sample.prompt_tokens = usage["prompt_tokens"]
                    sample.output_tokens = usage["completion_tokens"]
                # such as the first event of a chat, and the one with the usage
                if not any(_text(choice) for choice in value["choices"]):
                    continue
                now = time.perf_counter()
                if pieces:
                    sample.pauses.append(now - last)
                else:
                    sample.first = now
                last, pieces = now, pieces + 1
    except (OSError, ValueError, KeyError) as error:
        sample.error = f"{type(error).__name__}: {error}"
        return sample
    sample.end = time.perf_counter()
    sample.first = sample.first or sample.end
    # events stand for tokens where the server states no usage
    sample.output_tokens = sample.output_tokens or pieces
    return sample


def _text(choice: dict[str, Any]) -> Any:
    delta = choice.get("delta") or {}
    return choice.get("text") or delta.get("content") or delta.get("reasoning_content")


async def measure(
    target: Target, workload: Workload, rate: float, max_concurrency: int | None
) -> list[Sample]:
    """Sends all requests of a workload.

    Args:
        target: The server.
        workload: What is sent.
        rate: Requests a second on average, at random times; infinite: all at once.
        max_concurrency: The most that are open at once; None: no limit.
    """
    numbers = random.Random(workload.seed)
    gate = asyncio.Semaphore(max_concurrency or workload.count)

    async def one(body: dict[str, Any]) -> Sample:
        async with gate:
            return await measure_one(target, body)

    tasks: list[asyncio.Task[Sample]] = []
    for body in workload.bodies():
        tasks.append(asyncio.ensure_future(one(body)))
        if rate != float("inf"):
            await asyncio.sleep(numbers.expovariate(rate))
    return list(await asyncio.gather(*tasks))


def summary(samples: Sequence[Sample], rate: float) -> dict[str, Any]:
    """The numbers of a run; times in milliseconds.

    Args:
        samples: Its requests.
        rate: Its rate.
    """
    good = [sample for sample in samples if not sample.error]
    seconds = max((s.end for s in good), default=0.0) - min((s.begin for s in good), default=0.0)
    seconds = max(seconds, 1e-9)
    output = sum(sample.output_tokens for sample in good)
    prompt = sum(sample.prompt_tokens for sample in good)
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error:
            errors[sample.error] = errors.get(sample.error, 0) + 1
    return {
        "request_rate": "inf" if rate == float("inf") else rate,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "errors": errors,
        "duration_s": seconds,
        "request_throughput": len(good) / seconds,
        "output_throughput": output / seconds,
        "total_token_throughput": (output + prompt) / seconds,
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "ttft_ms": _percentiles([sample.first - sample.begin for sample in good]),
        "itl_ms": _percentiles(chain.from_iterable(sample.pauses for sample in good)),
        "tpot_ms": _percentiles(
            [(s.end - s.first) / (s.output_tokens - 1) for s in good if s.output_tokens > 1]
        ),
        "latency_ms": _percentiles([sample.end - sample.begin for sample in good]),
    }


def _percentiles(seconds: Iterable[float]) -> dict[str, float]:
    # an array: a simulation has tens of millions of times
    ordered = np.sort(1e3 * np.fromiter(seconds, np.float64))
    if not len(ordered):
        return {}

    def percentile(share: float) -> float:
        return float(ordered[min(int(share * len(ordered)), len(ordered) - 1)])

    return {
        "mean": float(ordered.mean()),
        "median": float(np.median(ordered)),
        "p90": percentile(0.9),
        "p99": percentile(0.99),
        "max": percentile(1.0),
    }
