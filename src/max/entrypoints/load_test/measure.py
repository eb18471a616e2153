"""Sends requests at a rate, and measures their answers."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import Any

from max.entrypoints.load_test.http_client import Target, error_text, events
from max.entrypoints.load_test.times import Times

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
            "ignore_eos": True,  # answers of the same length
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
        cached_tokens: Those of the prompt that were cached, where the server says so.
    """

    begin: float
    first: float = 0.0
    end: float = 0.0
    pauses: MutableSequence[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    cached_tokens: int = 0


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
                    details = usage.get("prompt_tokens_details") or {}
                    sample.cached_tokens = details.get("cached_tokens") or 0
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
        # a Poisson process: pauses are exponentially distributed
        if rate != float("inf"):
            await asyncio.sleep(numbers.expovariate(rate))
    return list(await asyncio.gather(*tasks))


class Totals:
    """The numbers of a run, in a bounded memory however many requests it has."""

    def __init__(self) -> None:
        self._begin, self._end = float("inf"), 0.0
        self._completed = self._prompt = self._output = 0
        self._errors: dict[str, int] = {}
        self._first, self._pauses, self._per_token, self._whole = (Times() for _ in range(4))

    def add(self, sample: Sample) -> None:
        """Adds a request that has ended.

        Args:
            sample: The request.
        """
        if sample.error:
            self._errors[sample.error] = self._errors.get(sample.error, 0) + 1
            return
        self._completed += 1
        self._begin, self._end = min(self._begin, sample.begin), max(self._end, sample.end)
        self._prompt += sample.prompt_tokens
        self._output += sample.output_tokens
        self._first.add([sample.first - sample.begin])
        self._pauses.add(sample.pauses)
        if sample.output_tokens > 1:
            self._per_token.add([(sample.end - sample.first) / (sample.output_tokens - 1)])
        self._whole.add([sample.end - sample.begin])

    def numbers(self, rate: float) -> dict[str, Any]:
        """The numbers; times in milliseconds.

        Args:
            rate: The rate of the run.
        """
        seconds = max(self._end - self._begin, 1e-9)
        return {
            "request_rate": "inf" if rate == float("inf") else rate,
            "completed": self._completed,
            "failed": sum(self._errors.values()),
            "errors": self._errors,
            "duration_s": seconds,
            "request_throughput": self._completed / seconds,
            "output_throughput": self._output / seconds,
            "total_token_throughput": (self._output + self._prompt) / seconds,
            "total_input_tokens": self._prompt,
            "total_output_tokens": self._output,
            "ttft_ms": self._first.percentiles(),
            "itl_ms": self._pauses.percentiles(),
            "tpot_ms": self._per_token.percentiles(),
            "latency_ms": self._whole.percentiles(),
        }


def summary(samples: Iterable[Sample], rate: float) -> dict[str, Any]:
    """The numbers of a run; times in milliseconds.

    Args:
        samples: Its requests.
        rate: Its rate.
    """
    totals = Totals()
    for sample in samples:
        totals.add(sample)
    return totals.numbers(rate)
