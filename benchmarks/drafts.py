"""What drafts cost and save, on models of any weights: the text that is answered is given, and the model runs in full.

``python -m benchmarks.drafts MODEL`` prints the time of steps that verify several rows, the speed of look-up on an edit
and on an extraction whose answers are known, and on words in random order, that of an edit whose prompt names its text
or does not, without and with the text as a prediction, that of a draft model whose tokens are right with
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.entrypoints.load_test.drafts import prompts_of
from max.graph import DeviceRef, TensorValue, ops
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts import draft_rounds, round_calls
from max.pipelines.generation.drafts.drafted_rows import DraftedRows
from max.pipelines.generation.drafts.drafter import Drafter, DraftersInTurn
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.drafts.recent_answers import RecentAnswersDrafter
from max.pipelines.generation.drafts.text_rounds import TextRounds
from max.pipelines.generation.drafts.vocabularies import vocabulary_size
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.replica import Replica
from max.pipelines.generation.steps.step_reader import StepReader

Answers = dict[RequestID, list[int]]


@contextmanager
def answered(answers: Answers) -> Iterator[None]:
    """Replaces the tokens that models choose by those of known answers, at the place of each; of calls of several steps
    they cannot be replaced, so drafts are verified by single ones (`benchmarks.text_drafts` has the others)."""
    choose, choose_rows, plan = Replica._next_tokens, DraftedRows.choose, TextRounds.plan

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
    TextRounds.plan = lambda self, batch, most, drafts, is_watched: None
    try:
        yield
    finally:
        Replica._next_tokens, DraftedRows.choose, TextRounds.plan = choose, choose_rows, plan


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

    def observe(self, context: TextContext, right_tokens: Sequence[int], more: int = 0) -> None:
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


def step(engine: Engine) -> None:
    """Runs a step.

    Raises:
        Exception: A request has failed; this is its error.
    """
    for outcome in engine.step():
        if isinstance(outcome, Failure):
            raise outcome.error


def decode(pipeline: Any, context: TextContext, is_served: bool = False) -> tuple[float, int]:
    """The seconds of decoding after the first token, and the number of executed steps; with calls as long as those of a
    server, which reads their tokens meanwhile, or as those of a program."""
    reader = StepReader(lambda outputs: None) if is_served else None
    engine = Engine(pipeline, limits_of(pipeline, is_served), reader)
    engine.submit(context)
    while not len(context.generated_tokens):
        step(engine)
    begin = time.perf_counter()
    while not engine.idle:
        step(engine)
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
                engine = Engine(pipeline, replace(limits_of(pipeline), max_num_steps=1))
                engine.submit(one)
                while not engine.idle:
                    width = one.active_length
                    begin = time.perf_counter()
                    step(engine)
                    if number and width == count and not one.is_done:
                        times[count].append(time.perf_counter() - begin)
    del drafts.lengths.length, drafts.lengths.may_draft
    return {count: 1e3 * statistics.median(own) for count, own in times.items()}


def texts(pipeline: Any, kind: str) -> tuple[Any, list[int]]:
    """A prompt and its known answer: the edited text, the extracted records, or words whose order says nothing."""
    if kind == "free":
        # pairs repeat as in text, and what follows them does not
        last = min(vocabulary_size(pipeline.pipeline_config) - 1, 20_000)
        words = 100 + np.minimum(np.random.default_rng(0).zipf(1.3, 384), last - 100)
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


def predict(pipeline: Any, rounds: int, is_shown: bool) -> dict[str, tuple[float, float]]:
    """Tokens a second and tokens a step of an edit, without drafts, by look-up, and with its text as a prediction too.

    Args:
        pipeline: The pipeline.
        rounds: The number of measured answers of each form.
        is_shown: Whether the prompt has the text, too.
    """
    drafts = pipeline.replicas[0].drafts
    ((text, _),) = prompts_of("edit", 1, 3)
    order, code = text.split("\n", 1)
    encode = pipeline.tokenizer.encode_now
    prompt = encode(text if is_shown else order)
    predicted = encode(code, add_special_tokens=False)
    answer = list(encode(code.replace("count", "amount"), add_special_tokens=False))
    speeds: dict[str, list[float]] = {"plain": [], "look-up": [], "prediction": []}
    steps = dict.fromkeys(speeds, 0)
    for number in range(rounds + 1):
        for form, own in speeds.items():
            drafts.enabled = form != "plain"
            drafts._drafter = DraftersInTurn(
                [PredictionDrafter(), RecentAnswersDrafter(), LookupDrafter()]
            )
            prediction = PredictedText(predicted) if form == "prediction" else None
            one = request(prompt, len(answer), prediction=prediction)
            with answered({one.request_id: answer}):
                seconds, steps[form] = decode(pipeline, one)
            if number:
                own.append(len(answer) / seconds)
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
def accepted(pipeline: Any, share: float, vocabulary: int) -> Iterator[None]:
    """Lets the model, after it has run, choose each drafted token with a probability."""
    choose, draw = DraftedRows.choose, np.random.default_rng(0)
    choose_tokens, load_graphs = round_calls.chosen_tokens, draft_rounds._load_graphs

    def tokens(logits: TensorValue, parameters: Any, seeds: TensorValue, rows: Any) -> TensorValue:
        own = choose_tokens(logits, parameters, seeds, rows)
        given = ops.buffer_load(rows)
        drafted = ops.concat([given[1:], given[:1]])
        # seeds are mixed bits of the place in the text
        right = ops.cast(ops.cast(seeds, DType.float32) * 2.0**-64 < share, DType.int64)
        # never below 0: the choice of the model counts for nothing, and is made
        return ops.max((drafted + 1 - right) % vocabulary, own - vocabulary)

    def graphs(session: InferenceSession, device: DeviceRef) -> Any:
        first, _ = load_graphs(session, device)
        return first, session.load(draft_rounds.round_graph(device))

    def known_rows(self: Any, outputs: Any, sampler: Any, device: Any) -> list[list[int]]:
        chosen = choose(self, outputs, sampler, device)
        for own, context in zip(chosen, self._batch, strict=True):
            for place, token in enumerate(context.draft_tokens):
                own[place] = token if draw.random() < share else (token + 1) % vocabulary
        return chosen

    replica = pipeline.replicas[0]
    own_rounds = replica.rounds
    DraftedRows.choose, round_calls.chosen_tokens, draft_rounds._load_graphs = (
        known_rows,
        tokens,
        graphs,
    )
    try:
        if own_rounds is not None:
            replica.rounds = draft_rounds.DraftRounds.of(
                pipeline.session, replica, pipeline._draft.replicas[0], pipeline._drafter
            )
        yield
    finally:
        replica.rounds = own_rounds
        DraftedRows.choose = choose
        round_calls.chosen_tokens, draft_rounds._load_graphs = choose_tokens, load_graphs


def small_model(pipeline: Any, share: float, runs: int) -> dict[str, tuple[float, float, float]]:
    """Tokens a second without drafts, and with those of a model that runs: with one step a call, and with several; the
    tokens of a draft, and those of a call.
    """
    drafts, replica, new = pipeline.replicas[0].drafts, pipeline.replicas[0], 320
    vocabulary = pipeline.pipeline_config.model_config.huggingface_config.vocab_size
    speeds: dict[str, list[float]] = {"plain": [], "steps": [], "rounds": []}
    # each way has measured times of its own
    lengths = {form: DraftLengths(drafts.most) for form in speeds}
    drafted, calls = dict.fromkeys(speeds, 0.0), dict.fromkeys(speeds, 0)
    execute = replica.execute

    def counted(*arguments: Any) -> Any:
        calls[form] += 1
        return execute(*arguments)

    replica.execute = counted
    with accepted(pipeline, share, vocabulary):
        in_rounds = replica.rounds
        for number in range(runs + 1):
            for form, own in speeds.items():
                drafts.enabled, drafts.lengths = form != "plain", lengths[form]
                replica.rounds = in_rounds if form == "rounds" else None
                before = drafts.drafted, drafts.verified
                calls[form] = 0
                seconds, _ = decode(pipeline, request(np.arange(100, 164), new), is_served=True)
                if number:
                    own.append(new / seconds)
                drafted[form] = (drafts.drafted - before[0]) / max(drafts.verified - before[1], 1)
    del replica.execute
    return {
        form: (statistics.median(own), drafted[form], new / calls[form])
        for form, own in speeds.items()
    }


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


def print_gains(title: str, found: dict[str, tuple[float, float]]) -> None:
    """Prints tokens a second, the ratio to those of plain steps, and tokens a step, of each form of drafts."""
    plain, _ = found.pop("plain")
    for form, (fast, each) in found.items():
        print(
            f"{title}, {form}: {plain:.1f} -> {fast:.1f} tokens/s, {fast / plain:.2f} times, {each:.2f} tokens a step",
            flush=True,
        )


def main() -> None:
    """Measures a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--weights", help="a weight file in place of that of the folder")
    parser.add_argument("--encoding")
    parser.add_argument("--draft-model", help="measures the drafts of this model only")
    parser.add_argument("--rounds", type=int, default=3, help="measured runs of each case")
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
            found = small_model(pipeline, share, options.rounds)
            plain, _, _ = found["plain"]
            for form, (fast, length, each) in found.items():
                print(
                    f"draft model, {share}, {form}: {fast:.1f} tokens/s, {fast / plain:.2f} of plain, "
                    f"drafts of {length:.1f} tokens, {each:.1f} tokens a call",
                    flush=True,
                )
        return
    rows = step_times(pipeline, [1, 2, 4, 8, 16], options.rounds)
    print("ms of a step by rows:", {count: round(ms, 2) for count, ms in rows.items()}, flush=True)
    print(f"4 rows against 1: {rows[4] / rows[1]:.2f}", flush=True)
    for kind in ("edit", "json", "free"):
        print_gains(f"look-up, {kind}", look_up(pipeline, kind, options.rounds))
    for is_shown in (True, False):
        title = f"edit whose prompt {'has' if is_shown else 'lacks'} the text"
        print_gains(title, predict(pipeline, options.rounds, is_shown))
    plain, fast = draft_model(pipeline, 0.7, 0.1, options.rounds)
    print(
        f"draft model of a tenth, 0.7: {plain:.1f} -> {fast:.1f}, {fast / plain:.2f} times",
        flush=True,
    )
    tokens, steps = forced(pipeline)
    print(f"schema with long keys: {tokens} tokens in {steps} steps, {tokens / steps:.2f}")


if __name__ == "__main__":
    main()
