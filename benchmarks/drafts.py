"""What drafts cost and save, on models of any weights: the text that is answered is given, and the model runs in full.

``python -m benchmarks.drafts MODEL`` prints the time of steps that verify several rows, the speed of look-up on an edit
and on an extraction whose answers are known, and on words in random order, of a draft model whose tokens are right with
a given probability, and the steps of a schema with long keys; with ``--draft-model`` the speed of that model's drafts,
which are right with 0.7 and with 0.1. Where the system allows it, it has real-time priority. The answers replace what
the model chooses, after it has run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from max.driver import Tensor
from max.entrypoints.load_test.drafts import prompts_of
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.drafted_rows import DraftedRows
from max.pipelines.generation.drafts.drafter import Drafter, DraftersInTurn
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.recent_answers import RecentAnswersDrafter
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.replica import Replica

Answers = dict[RequestID, list[int]]


@contextmanager
def answered(answers: Answers) -> Iterator[None]:
    """Replaces the tokens that models choose by those of known answers, at the place of each."""
    choose, choose_rows = Replica._next_tokens, DraftedRows.choose

    def known(context: Any, place: int) -> int:
        answer = answers[context.request_id]
        return answer[place % len(answer)]

    def tokens(self: Any, outputs: Any, batch: Any, step: int, masks: Any) -> Tensor:
        choose(self, outputs, batch, step, masks)
        chosen = [known(context, len(context.generated_tokens) + step) for context in batch]
        return Tensor.from_numpy(np.array(chosen, np.int64))

    def rows(self: Any, outputs: Any, sampler: Any, device: Any) -> list[list[int]]:
        chosen = choose_rows(self, outputs, sampler, device)
        for own, context, depths in zip(chosen, self._batch, self.depths, strict=True):
            begin = len(context.generated_tokens)
            own[:] = [known(context, begin + depth) for depth in depths]
        return chosen

    Replica._next_tokens, DraftedRows.choose = tokens, rows
    try:
        yield
    finally:
        Replica._next_tokens, DraftedRows.choose = choose, choose_rows


class KnownDrafter(Drafter):
    """Drafts known answers, wrong with a probability at each token.

    Args:
        answers: The answers.
        share: The probability of a token to be right.
        cost: Called for each drafted token, as a draft model would be.
    """

    takes_steps = True

    def __init__(self, answers: Answers, share: float, cost: Callable[[int], None]) -> None:
        self.answers, self.share, self.cost = answers, share, cost
        self.draw = np.random.default_rng(0)

    def propose(self, context: TextContext, most: int) -> list[int]:
        begin, answer = len(context.generated_tokens), self.answers[context.request_id]
        self.cost(most)
        right = self.draw.random(most) < self.share
        tokens = [answer[(begin + n) % len(answer)] for n in range(most)]
        return [t if r else (t + 1) % 256 for t, r in zip(tokens, right, strict=True)]

    def observe(self, context: TextContext, drafted: int, accepted: int) -> None:
        pass

    def rewind(self, context: TextContext) -> None:
        pass

    def forget(self, request_id: RequestID) -> None:
        pass


def request(tokens: Any, new: int, **values: Any) -> TextContext:
    """A greedy request of a number of new tokens."""
    return TextContext(
        tokens=np.array(tokens), max_length=len(tokens) + new, ignore_eos=True,
        sampling_params=SamplingParams(top_k=1, ignore_eos=True), **values,
    )  # fmt: skip


def decode(pipeline: Any, context: TextContext) -> tuple[float, int]:
    """The seconds of decoding after the first token, and the number of executed steps."""
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(context)
    while not len(context.generated_tokens):
        engine.step()
    begin = time.perf_counter()
    while not engine.idle:
        engine.step()
    return time.perf_counter() - begin, sum(engine.decode_steps.times.counts)


def step_times(pipeline: Any, rows: list[int], rounds: int) -> dict[int, float]:
    """Milliseconds of steps that verify a draft, by their rows; one row is a plain step."""
    drafts, times = pipeline.replicas[0].drafts, {count: list[float]() for count in rows}
    prompt = np.arange(100, 164)
    for number in range(rounds + 1):
        for count in rows:
            one = request(prompt, 40)
            answers = {one.request_id: [*range(300, 340)]}
            drafts._drafter = KnownDrafter(answers, 1.0, lambda n: None)
            drafts.enabled = count > 1
            drafts.lengths.length = lambda *own, n=count: min(n - 1, own[3])
            drafts.lengths.may_draft = lambda requests: True
            with answered(answers):
                engine = Engine(pipeline, limits_of(pipeline))
                engine.scheduler._limits = type(engine.scheduler._limits)(max_num_steps=1)
                engine.submit(one)
                while not engine.idle:
                    width = one.active_length
                    begin = time.perf_counter()
                    engine.step()
                    if number and width == count and not one.is_done:
                        times[count].append(time.perf_counter() - begin)
    del drafts.lengths.length, drafts.lengths.may_draft
    return {count: 1e3 * statistics.median(own) for count, own in times.items()}


def texts(pipeline: Any, kind: str) -> tuple[Any, list[int]]:
    """A prompt and its known answer: the edited text, the extracted records, or words whose order says nothing."""
    if kind == "free":
        # pairs repeat as in text, and what follows them does not
        words = 100 + np.minimum(np.random.default_rng(0).zipf(1.3, 384), 20_000)
        return words[:128], words[128:].tolist()
    ((text, _),) = prompts_of(kind, 1, 3)
    encode = pipeline.tokenizer.encode_now
    if kind == "edit":
        answer = text.split("\n", 1)[1].replace("count", "amount")
    else:
        lines = [line.split() for line in text.splitlines()[1:]]
        records = [
            {"customer_name": w[0], "shipping_city": w[2], "number_of_articles": int(w[4])}
            for w in lines
        ]
        answer = json.dumps(records)
    return encode(text), list(encode(answer, add_special_tokens=False))


def look_up(pipeline: Any, kind: str, rounds: int) -> dict[str, tuple[float, float]]:
    """Tokens a second and tokens a step without look-up, with single continuations, and with trees."""
    drafts = pipeline.replicas[0].drafts
    prompt, answer = texts(pipeline, kind)
    speeds: dict[str, list[float]] = {"plain": [], "one continuation": [], "trees": []}
    steps = dict.fromkeys(speeds, 0)
    trees = drafts.trees
    for number in range(rounds + 1):
        for form, own in speeds.items():
            drafts.enabled, drafts.trees = form != "plain", form == "trees" and trees
            # new drafters: what was answered before is not known
            drafts._drafter = DraftersInTurn([RecentAnswersDrafter(), LookupDrafter()])
            one = request(prompt, len(answer))
            with answered({one.request_id: answer}):
                seconds, steps[form] = decode(pipeline, one)
            if number:
                own.append(len(answer) / seconds)
    drafts.trees = trees
    return {
        form: (statistics.median(own), len(answer) / steps[form]) for form, own in speeds.items()
    }


def draft_model(pipeline: Any, share: float, cost: float, rounds: int) -> tuple[float, float]:
    """Tokens a second without drafts, and with those of a model whose step takes a share of the model's."""
    drafts, new = pipeline.replicas[0].drafts, 96
    step = step_times(pipeline, [1], 1)[1] / 1e3
    plain, fast = [], []

    def wait(tokens: int) -> None:
        end = time.perf_counter() + tokens * cost * step
        while time.perf_counter() < end:
            pass

    for number in range(rounds + 1):
        for enabled in (False, True):
            drafts.enabled = enabled
            one = request(np.arange(100, 164), new)
            answers = {one.request_id: [*range(300, 396)]}
            drafts._drafter = KnownDrafter(answers, share, wait)
            with answered(answers):
                seconds, _ = decode(pipeline, one)
            if number:
                (fast if enabled else plain).append(new / seconds)
    return statistics.median(plain), statistics.median(fast)


@contextmanager
def accepted(share: float, vocabulary: int) -> Iterator[None]:
    """Lets the model, after it has run, choose each drafted token with a probability."""
    choose, draw = DraftedRows.choose, np.random.default_rng(0)

    def rows(self: Any, outputs: Any, sampler: Any, device: Any) -> list[list[int]]:
        chosen = choose(self, outputs, sampler, device)
        for own, context in zip(chosen, self._batch, strict=True):
            for place, token in enumerate(context.draft_tokens):
                own[place] = token if draw.random() < share else (token + 1) % vocabulary
        return chosen

    DraftedRows.choose = rows
    try:
        yield
    finally:
        DraftedRows.choose = choose


def small_model(pipeline: Any, share: float, rounds: int) -> tuple[float, float, float]:
    """Tokens a second without and with the drafts of a model that runs, and the tokens of a draft."""
    drafts, new, length = pipeline.replicas[0].drafts, 320, 0.0
    plain, fast = [], []
    vocabulary = pipeline.pipeline_config.model_config.huggingface_config.vocab_size
    for number in range(rounds + 1):
        for enabled in (False, True):
            drafts.enabled, before = enabled, (drafts.drafted, drafts.verified)
            with accepted(share, vocabulary):
                seconds, _ = decode(pipeline, request(np.arange(100, 164), new))
            if number:
                (fast if enabled else plain).append(new / seconds)
            if enabled:
                length = (drafts.drafted - before[0]) / max(drafts.verified - before[1], 1)
    return statistics.median(plain), statistics.median(fast), length


def forced(pipeline: Any) -> tuple[int, int]:
    """The tokens and the steps of an answer to a schema with long fixed keys."""
    (_, grammar), *_ = prompts_of("json", 1, 3)
    pipeline.replicas[0].drafts.enabled = False
    one = TextContext(
        tokens=np.arange(100, 164), max_length=64 + 200, grammar=grammar,
        eos_token_ids=set(pipeline.tokenizer.eos_token_ids), sampling_params=SamplingParams(top_k=1),
    )  # fmt: skip
    _, steps = decode(pipeline, one)
    return len(one.generated_tokens), steps + 1


def main() -> None:
    """Measures a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--weights", help="a weight file in place of that of the folder")
    parser.add_argument("--encoding")
    parser.add_argument("--draft-model", help="measures the drafts of this model only")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    values: dict[str, Any] = {"num_speculative_tokens": 16}
    if options.draft_model:
        values["draft_model_path"] = options.draft_model
    else:
        values["speculative_method"] = "ngram"
    if options.weights:
        values["weight_path"] = [options.weights]
    if options.encoding:
        values["quantization_encoding"] = options.encoding
    config = PipelineConfig(
        model_path=options.model, max_length=2048, max_batch_size=1, enable_prefix_caching=False,
        **values,
    )  # fmt: skip
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    pipeline.warm_up()
    if options.draft_model:
        for share in (0.7, 0.1):
            plain, fast, length = small_model(pipeline, share, options.rounds)
            print(
                f"draft model, {share}: {plain:.1f} -> {fast:.1f} tokens/s, {fast / plain:.2f} times, "
                f"drafts of {length:.1f} tokens",
                flush=True,
            )
        return
    rows = step_times(pipeline, [1, 2, 4, 8, 16], options.rounds)
    print("ms of a step by rows:", {count: round(ms, 2) for count, ms in rows.items()}, flush=True)
    print(f"4 rows against 1: {rows[4] / rows[1]:.2f}", flush=True)
    for kind in ("edit", "json", "free"):
        found = look_up(pipeline, kind, options.rounds)
        plain, _ = found.pop("plain")
        for form, (fast, each) in found.items():
            print(
                f"look-up, {kind}, {form}: {plain:.1f} -> {fast:.1f} tokens/s, {fast / plain:.2f} times, "
                f"{each:.2f} tokens a step",
                flush=True,
            )
    plain, fast = draft_model(pipeline, 0.7, 0.1, options.rounds)
    print(
        f"draft model of a tenth, 0.7: {plain:.1f} -> {fast:.1f}, {fast / plain:.2f} times",
        flush=True,
    )
    tokens, steps = forced(pipeline)
    print(f"schema with long keys: {tokens} tokens in {steps} steps, {tokens / steps:.2f}")


if __name__ == "__main__":
    main()
