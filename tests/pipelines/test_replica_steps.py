"""How many steps a copy of a model takes in one execution, and what it records of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import RequestID, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.text_context import TextContext

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.fixture(scope="module")
def pipeline() -> Any:
    config = PipelineConfig(
        model_path=str(TINY), quantization_encoding="float32", max_length=200, max_num_steps=8
    )
    return PIPELINE_REGISTRY.retrieve(config)[1]


@pytest.fixture
def replica(pipeline: Any) -> Iterator[Any]:
    (replica,) = pipeline.replicas
    yield replica
    assert replica.cache.used_pages == 0


def text(length: int, **more: Any) -> TextContext:
    tokens = (np.arange(length) * 7 + 20) % 4000
    return TextContext(tokens=tokens, max_length=300, **more)


def test_the_room_of_a_sequence_bounds_the_steps(replica: Any) -> None:
    longest = replica.model.max_seq_len
    for room, steps in ((9, 4), (4, 4), (3, 3), (1, 1)):
        assert replica.calculate_num_steps(4, text(longest - room)) == steps
    for length in (longest, longest + 1):
        message = f"has {length} tokens, and the context holds {longest}"
        with pytest.raises(ValueError, match=message):
            replica.calculate_num_steps(4, text(length))


def test_the_steps_of_a_batch_are_those_that_each_request_can_take(
    replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = replica.model.max_seq_len
    penalty = SamplingParams(frequency_penalty=0.5)
    for others, steps in (
        ([], 5),
        ([text(longest - 3)], 3),
        ([text(8, sampling_params=penalty)], 1),
        ([text(8, log_probabilities=1, log_probabilities_echo=True)], 1),
    ):
        batch = [text(6), *others]
        assert replica.reserve(batch, 5) == steps
        for context in batch:
            replica.release(context.request_id)
    monkeypatch.setattr(type(replica.model), "continues_steps", False)
    alone = text(6)
    assert replica.reserve([alone], 5) == 1
    replica.release(alone.request_id)
    # nothing happens for a request without pages
    replica.release(RequestID("unknown"))


def run(pipeline: Any, contexts: list[TextContext], steps: list[int]) -> list[Any]:
    """The tokens and log-probabilities of requests, in executions of some steps."""
    found: list[list[Any]] = [[] for _ in contexts]
    for count in steps:
        batch = {context.request_id: context for context in contexts}
        outputs = pipeline.execute(TextGenerationInputs([batch], count))
        for own, context in zip(found, contexts, strict=True):
            output = outputs[context.request_id]
            logs = output.log_probabilities or [None] * len(output.tokens)
            own += zip(output.tokens, logs, strict=True)
    for context in contexts:
        pipeline.release(context.request_id)
    return found


def test_several_steps_give_the_log_probabilities_of_single_ones(
    pipeline: Any, replica: Any
) -> None:
    def contexts() -> list[TextContext]:
        return [
            text(
                length,
                log_probabilities=3,
                ignore_eos=True,
                sampling_params=SamplingParams(top_k=1),
            )
            for length in (5, 9)
        ]

    many, single = run(pipeline, contexts(), [1, 4, 3]), run(pipeline, contexts(), [1] * 8)
    for own, other in zip(many, single, strict=True):
        assert [token for token, _ in own] == [token for token, _ in other]
        for (_, log), (_, expected) in zip(own, other, strict=True):
            assert log.token_log_probabilities == pytest.approx(
                expected.token_log_probabilities, abs=1e-4
            )
            assert log.top_log_probabilities[0].keys() == expected.top_log_probabilities[0].keys()


def test_pages_of_processed_tokens_are_recorded(pipeline: Any, replica: Any) -> None:
    assert replica.records_tokens
    replica.cache.forget_prefixes()
    size = replica.cache.page_size
    assert size < replica.model.max_seq_len
    run(pipeline, [text(size + 1)], [1])
    assert replica.cache.pages.enable_prefix_caching
    assert replica.cache.cached_length(text(size + 1)) == size


class NoDrafts:
    """Drafts nothing, and notes what it is told."""

    def __init__(self) -> None:
        self.dropped, self.forgotten = 0, list[RequestID]()
        self.measured: list[tuple[int, int, int]] = []

    def drop(self, batch: Any) -> None:
        self.dropped += 1

    def rows(self, batch: Any) -> None:
        return None

    def rows_again(self, batch: Any) -> list[int]:
        return [0] * len(batch)

    def measure(self, batch: Any, drafted: int, accepted: int, begin: float, steps: int) -> None:
        self.measured.append((drafted, accepted, steps))

    def propose(self, batch: Any) -> None: ...

    def forget(self, request_id: RequestID) -> None:
        self.forgotten.append(request_id)


def test_steps_without_prompts_are_measured(
    pipeline: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for drafts in (None, NoDrafts()):
        monkeypatch.setattr(replica, "drafts", drafts)
        replica.cache.forget_prefixes()
        context = text(6, ignore_eos=True)
        # the prompt, a step, a call of several steps
        run(pipeline, [context], [1, 1, 4])
        if drafts is not None:
            assert drafts.measured == [(0, 0, 1), (0, 0, 4)]
            assert drafts.dropped == 3 and drafts.forgotten == [context.request_id]


def greedy(length: int) -> TextContext:
    return text(length, ignore_eos=True, sampling_params=SamplingParams(top_k=1))


def test_inputs_of_a_step_are_those_of_the_last_one(
    pipeline: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are updated in place while the batch stays the same, and made anew where it does not."""
    monkeypatch.setattr(replica, "drafts", None)
    made: list[int] = []
    prepare = replica.model.prepare_initial_token_inputs

    def counting(batch: Any, *arguments: Any, **more: Any) -> Any:
        made.append(len(batch))
        return prepare(batch, *arguments, **more)

    monkeypatch.setattr(replica.model, "prepare_initial_token_inputs", counting, raising=False)
    one, two = greedy(6), greedy(8)

    def execute(steps: int, *contexts: TextContext) -> None:
        batch = {context.request_id: context for context in contexts}
        pipeline.execute(TextGenerationInputs([batch], steps))

    for steps, contexts, count in (
        (1, [one], 1),  # the prompt
        (1, [one], 1),
        (4, [one], 1),  # the loop goes on with the same inputs
        (1, [one], 1),
        (1, [one, two], 2),  # another batch
        (1, [one, two], 2),
        (1, [two], 3),
        (3, [two], 3),
        (2, [one, two], 4),
    ):
        execute(steps, *contexts)
        assert len(made) == count, (steps, len(contexts))
    for context in (one, two):
        pipeline.release(context.request_id)
