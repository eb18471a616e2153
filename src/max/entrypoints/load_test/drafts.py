"""Measures what drafts save: prompts of a kind, answered by one model with and without them in turn."""

from __future__ import annotations

import json
import random
import time
from dataclasses import asdict, dataclass
from typing import Any

from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.registry.registry import PIPELINE_REGISTRY
from max.pipelines.structured.grammar import of_json_schema

__all__ = ["WORKLOADS", "DraftRun", "draft_table", "measure_drafts", "prompts_of"]

WORKLOADS = ("edit", "summary", "chat", "json")
"""The kinds of prompts: texts to repeat with a change, texts to summarize, questions, records to extract."""

_NAMES = "anna boris clara david elena felix greta henry irene jonas karla louis".split()
_CITIES = "oslo lima cairo paris quito tokyo delhi accra sofia lyon".split()
_TOPICS = (
    "why the sky is blue", "how bread is baked", "what a prime number is", "how rivers form",
    "why leaves fall in autumn", "how a bicycle stays upright", "what makes a good friend",
)  # fmt: skip
_SCHEMA = {
    "type": "array",
    "minItems": 3,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": {
            "customer_name": {"type": "string", "maxLength": 12},
            "shipping_city": {"type": "string", "maxLength": 12},
            "number_of_articles": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["customer_name", "shipping_city", "number_of_articles"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class DraftRun:
    """What was measured.

    Args:
        tokens: The number of generated tokens, the same with and without drafts if `equal`.
        plain_s: The seconds of decoding without drafts.
        drafted_s: The seconds with them.
        steps: The number of decoding steps with drafts.
        drafted: The number of drafted tokens.
        accepted: The number of right ones.
        equal: Whether all answers are equal.
    """

    tokens: int
    plain_s: float
    drafted_s: float
    steps: int
    drafted: int
    accepted: int
    equal: bool

    def numbers(self) -> dict[str, Any]:
        """What was measured, by names."""
        return asdict(self)

    @property
    def speedup(self) -> float:
        """The time without drafts over that with them."""
        return self.plain_s / self.drafted_s


def prompts_of(workload: str, count: int, seed: int) -> list[tuple[str, str | None]]:
    """The prompts of a kind, each with the grammar of its answer.

    Args:
        workload: The kind, one of `WORKLOADS`.
        count: The number of prompts.
        seed: The seed of their words.
    """
    draw, prompts = random.Random(seed), list[tuple[str, str | None]]()
    for _ in range(count):
        records = [
            (draw.choice(_NAMES), draw.choice(_CITIES), draw.randrange(1, 99)) for _ in range(8)
        ]
        lines = [f"{name} from {city} ordered {n} articles." for name, city, n in records]
        code = "".join(
            f"def {name}_{city}(count):\n    total = count + {n}\n    return total\n\n"
            for name, city, n in records
        )
        match workload:
            case "edit":
                prompts.append((f"Rename count to amount, and write the whole code:\n{code}", None))
            case "summary":
                text = " ".join(lines * 3)
                prompts.append((f"Summarize this text in two sentences: {text}", None))
            case "json":
                text = "\n".join(lines)
                grammar = of_json_schema(json.dumps(_SCHEMA))
                prompts.append((f"Write these orders as JSON:\n{text}", grammar))
            case _:
                prompts.append((f"Explain {draw.choice(_TOPICS)}.", None))
    return prompts


def measure_drafts(
    values: dict[str, Any], workload: str, count: int, output_len: int, seed: int
) -> DraftRun:
    """Answers prompts without and with drafts in turn, one at a time, greedily.

    Args:
        values: Options of `PipelineConfig`.
        workload: The kind of prompts.
        count: Their number.
        output_len: The most tokens of an answer.
        seed: The seed of the prompts.

    Raises:
        UserError: The model does not fit.
        RuntimeError: A request failed.
    """
    config = PipelineConfig(
        **{
            "speculative_method": "auto",
            "max_batch_size": 1,
            "enable_prefix_caching": False,
            **values,
        }
    )
    tokenizer, loaded = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)
    pipeline: Any = loaded
    pipeline.warm_up()
    drafts = [replica.drafts for replica in pipeline.replicas if replica.drafts is not None]
    engine = Engine(pipeline, limits_of(pipeline))
    times, texts, steps = [0.0, 0.0], list[list[list[int]]](), 0
    prompts, before = prompts_of(workload, count, seed), (0, 0)
    for number in range(-2, 2 * count):  # the first two warm up
        text, grammar = prompts[max(number, 0) // 2]
        with_drafts = bool(number % 2)
        for each in drafts:
            each.enabled = with_drafts
        context = _context(tokenizer, text, grammar, output_len)
        if number == 0:  # after the warm-up
            before = pipeline.draft_counts
        seconds, ran = _answer(engine, context)
        if number >= 0:
            times[with_drafts] += seconds
            steps += ran if with_drafts else 0
            texts.append([context.generated_tokens.tolist()])
    drafted, accepted = (n - m for n, m in zip(pipeline.draft_counts, before, strict=True))
    answers = [tokens for (tokens,) in texts[1::2]]
    return DraftRun(
        sum(map(len, answers)),
        times[0],
        times[1],
        steps,
        drafted,
        accepted,
        texts[::2] == texts[1::2],
    )


def _context(tokenizer: Any, text: str, grammar: str | None, output_len: int) -> TextContext:
    """A greedy request."""
    if tokenizer.has_chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": text}], None)
    tokens = tokenizer.encode_now(text)
    return TextContext(
        tokens=tokens,
        max_length=len(tokens) + output_len,
        request_id=RequestID(),
        grammar=grammar,
        eos_token_ids=set(tokenizer.eos_token_ids),
        # answers of equal lengths; a grammar ends by itself
        ignore_eos=grammar is None,
        sampling_params=SamplingParams(top_k=1, ignore_eos=grammar is None),
    )


def _answer(engine: Engine, context: TextContext) -> tuple[float, int]:
    """The seconds of decoding an answer, after its first token, and the number of steps."""
    engine.submit(context)
    while not context.is_done and not len(context.generated_tokens):
        _step(engine)
    begin, before = time.perf_counter(), sum(engine.decode_steps.times.counts)
    while not engine.idle:
        _step(engine)
    return time.perf_counter() - begin, sum(engine.decode_steps.times.counts) - before


def _step(engine: Engine) -> None:
    for outcome in engine.step():
        if isinstance(outcome, Failure):
            raise RuntimeError(f"the request failed: {outcome.error}") from outcome.error


def draft_table(workload: str, run: DraftRun) -> str:
    """The lines of a result.

    Args:
        workload: The kind of prompts.
        run: The result.
    """
    rows = {
        "tokens": f"{run.tokens}",
        "drafted tokens": f"{run.drafted}",
        "accepted, %": f"{100 * run.accepted / max(run.drafted, 1):.1f}",
        "tokens a step": f"{run.tokens / max(run.steps, 1):.2f}",
        "tokens/s without drafts": f"{run.tokens / run.plain_s:.1f}",
        "tokens/s with drafts": f"{run.tokens / run.drafted_s:.1f}",
        "times as fast": f"{run.speedup:.2f}",
        "equal answers": "yes" if run.equal else "no",
    }
    return "\n".join([workload, *(f"{name:<36}{value:>12}" for name, value in rows.items())])
