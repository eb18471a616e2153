"""What Python takes of steps with drafts of known texts, one a call and several, and how fast they are.

``python -m benchmarks.text_drafts MODEL --encoding float32``: answers of one and of eight requests are predicted, as
they are (a copy) and with each fortieth token changed (an edit), and decoded without drafts, with one step a call, and
with several. The answers are sampled, as greedy ones of random weights repeat themselves, and must be the same each
time, so the weights are in float32. Python's time is the CPU time of the engine's thread outside of native code. With
``--length`` all drafts have this length where they fit; otherwise it is chosen.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from max._backends.cpu.runtime.executor import Executor
from max.interfaces import PipelineTask, RequestID, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.core.predicted_text import PredictedText
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.step_reader import StepReader

PROMPT, NEW, CHANGED = 40, 192, 40
MOST = 8


class FixedLengths(DraftLengths):
    """Drafts of one length, in each step.

    Args:
        length: The number of tokens.
    """

    def __init__(self, length: int) -> None:
        super().__init__(length)

    @property
    def steps_with_drafts(self) -> int:
        return MOST

    def may_draft(self, requests: int) -> bool:
        return True

    def length(
        self, request_id: RequestID, requests: int, num_drafted: int, room: int, kind: int = 0
    ) -> int:
        return min(self.most, room)

    def kept_of_tree(
        self,
        request_id: RequestID,
        requests: int,
        num_drafted: int,
        room: int,
        parents: Sequence[int],
        kind: int = 0,
    ) -> list[int]:
        # the likeliest continuation comes first
        kept = list[int]()
        for index, parent in enumerate(parents[: min(self.most, room)]):
            if parent != index - 1:
                break
            kept.append(index)
        return kept


class Decoding(NamedTuple):
    """What decoding took.

    Args:
        texts: The answers.
        seconds: The time.
        python: The CPU time of Python, in seconds.
        steps: The number of steps.
        calls: The number of calls.
    """

    texts: list[list[int]]
    seconds: float
    python: float
    steps: int
    calls: int


class Measured:
    """Decodes requests, and measures what runs in native code.

    Args:
        pipeline: A pipeline with drafts.
    """

    def __init__(self, pipeline: Any) -> None:
        self.pipeline, self.native = pipeline, 0.0
        run_at = Executor.run_at

        def timed(executor: Executor, *arguments: Any, **named: Any) -> None:
            begin = time.thread_time()
            try:
                run_at(executor, *arguments, **named)
            finally:
                self.native += time.thread_time() - begin

        setattr(Executor, "run_at", timed)  # noqa: B010  of another signature

    def requests(self, count: int, predictions: list[list[int]] | None) -> list[TextContext]:
        """Requests of random prompts, the same ones each time."""
        made = []
        for number in range(count):
            tokens = np.random.default_rng(number).integers(100, 4000, PROMPT)
            params = SamplingParams(top_k=20, temperature=1.0, seed=number, ignore_eos=True)
            own = None if predictions is None else PredictedText(predictions[number])
            made.append(
                TextContext(
                    tokens=tokens, max_length=PROMPT + NEW, ignore_eos=True, sampling_params=params,
                    prediction=own,
                )
            )  # fmt: skip
        return made

    def decode(self, count: int, predictions: list[list[int]] | None = None) -> Decoding:
        """Decodes answers as a server does, after their first tokens."""
        reader = StepReader(lambda outputs: None)
        engine = Engine(self.pipeline, limits_of(self.pipeline, True), reader)
        contexts = self.requests(count, predictions)
        for context in contexts:
            engine.submit(context)
        while not all(len(context.generated_tokens) for context in contexts):
            engine.step()
        before, calls, self.native = sum(engine.decode_steps.times.counts), 0, 0.0
        begin, cpu = time.perf_counter(), time.thread_time()
        while not engine.idle:
            engine.step()
            calls += 1
        seconds, cpu = time.perf_counter() - begin, time.thread_time() - cpu
        reader.close()
        self.pipeline.read_steps(None)
        texts = [context.generated_tokens.tolist() for context in contexts]
        steps = sum(engine.decode_steps.times.counts) - before
        return Decoding(texts, seconds, cpu - self.native, steps, calls)


def measure(measured: Measured, count: int, is_edit: bool, runs: int, length: int | None) -> None:
    """Prints what the ways of decoding take, in turn."""
    replica = measured.pipeline.replicas[0]
    drafts, rounds = replica.drafts, replica.text_rounds
    drafts.enabled = False
    answers = measured.decode(count).texts
    predictions = [
        [
            token + int(is_edit and place % CHANGED == CHANGED // 2)
            for place, token in enumerate(own)
        ]
        for own in answers
    ]
    forms = ("plain", "one step a call", "several")
    lengths = {form: FixedLengths(length) if length else DraftLengths(MOST) for form in forms}
    found: dict[str, list[Decoding]] = {form: [] for form in forms}
    for number in range(runs + 2):
        for form, own in found.items():
            drafts.enabled, drafts.lengths = form != "plain", lengths[form]
            replica.text_rounds = rounds if form == "several" else None
            drafts.forget_answers()
            got = measured.decode(count, predictions)
            if got.texts != answers:
                raise AssertionError(f"{form}: other texts than without drafts")
            # times of first runs are those of programs that are not loaded yet
            if number > 1:
                own.append(got)
    replica.text_rounds = rounds
    for form, own in found.items():
        python = statistics.median(1e6 * each.python / each.steps for each in own)
        token = statistics.median(1e6 * each.python / (count * NEW) for each in own)
        speed = statistics.median(count * NEW / each.seconds for each in own)
        steps = statistics.median(each.steps for each in own)
        calls = statistics.median(each.calls for each in own)
        print(
            f"{count}, {'edit' if is_edit else 'copy'}, {form}: Python {python:.0f} µs a step, {token:.1f} µs a token; "
            f"{steps:.0f} steps in {calls:.0f} calls; {speed:.0f} tokens/s",
            flush=True,
        )


def main() -> None:
    """Measures a model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--encoding")
    parser.add_argument("--length", type=int, help="the length of all drafts")
    parser.add_argument("--runs", type=int, default=5, help="measured runs of each case")
    options = parser.parse_args()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    config = PipelineConfig(
        model_path=options.model, quantization_encoding=options.encoding, max_batch_size=8,
        max_length=512, speculative_method="ngram", num_speculative_tokens=MOST,
    )  # fmt: skip
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    measured = Measured(pipeline)
    for count in (1, 8):
        for is_edit in (False, True):
            measure(measured, count, is_edit, options.runs, options.length)


if __name__ == "__main__":
    main()
