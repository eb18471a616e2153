"""How many steps a copy of a model takes in one execution, and what it records of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.interfaces import RequestID, SamplingParams, TextGenerationInputs
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation import replica as replica_module
from max.pipelines.generation.steps.reusable_inputs import BatchInputs
from max.pipelines.sampling.inputs import SamplingInputs

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

    def plain_steps(self, batch: Any, most: int, is_watched: bool = False) -> int:
        assert not is_watched
        return most

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


def execute(pipeline: Any, steps: int, *contexts: TextContext) -> Any:
    batch = {context.request_id: context for context in contexts}
    return pipeline.execute(TextGenerationInputs([batch], steps))


class SameModel:
    """Another model that computes the same, as the one with the logits of prompts."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@pytest.mark.parametrize(
    "case", ["plain", "two steps", "closing", "other model", "no next step", "drafted"]
)
def test_when_the_next_step_goes_on_with_these_inputs(
    case: str, pipeline: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after several steps, nor where the tokens are not those that were chosen, or the model another one."""
    monkeypatch.setattr(replica, "drafts", None)
    context = text(6, ignore_eos=True, log_probabilities=1, sampling_params=SamplingParams(top_k=1))
    if case == "closing":
        monkeypatch.setattr(replica_module, "with_closing_tokens", lambda chosen, *_: chosen.copy())
    if case == "other model":
        other = SameModel(replica.model)
        monkeypatch.setattr(replica.prompt_logits, "model_of", lambda *_: other)
    if case == "no next step":
        monkeypatch.setattr(type(replica.model), "continues_steps", False)
    if case == "drafted":
        monkeypatch.setattr(replica, "drafts", drafts := SomeDrafts([21, 22]))
    execute(pipeline, 2 if case == "two steps" else 1, context)
    last = replica._reusable
    assert (last is not None) == (case == "plain")
    if last is not None:
        assert last.batch == [context] and last.ends == [context.active_idx]
        assert last.tokens.to_numpy().tolist() == context.generated_tokens.tolist()
    if case == "drafted":
        assert context.generated_tokens.tolist() == [21, 22] and drafts.kept == [replica.cache]
    pipeline.release(context.request_id)


class Rows:
    """The rows of a draft of one request, which is verified beside its next token."""

    all_drafted, counts = False, [2]

    def __init__(self, kept: list[Any]) -> None:
        self._kept, self.logged = kept, list[Any]()

    def keep_branches(self, cache: Any) -> None:
        self._kept.append(cache)

    def log_probabilities(self, row: int, count: int) -> list[Any]:
        self.logged.append((row, count))
        return [None] * count


class SomeDrafts(NoDrafts):
    """Says which tokens of a draft are right."""

    def __init__(self, verified: list[int]) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.draft, self.verified = Rows(self.kept), verified

    def rows(self, batch: Any) -> Any:
        return self.draft

    def verified_tokens(self, rows: Any, outputs: Any, batch: Any, device: Any) -> list[list[int]]:
        assert outputs.logits is not None and len(batch) == 1
        return [self.verified]


def test_what_a_verified_draft_gives(
    pipeline: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of the draft, else the one that was chosen, which is not chosen where all rows are drafted."""
    chosen, told, logged = list[Any](), list[Any](), list[Any]()
    following = type(replica)._next_tokens

    def noted(self: Any, *arguments: Any) -> Any:
        chosen.append(following(self, *arguments))
        return chosen[-1]

    def logs(outputs: Any, batch: Any, tokens: Any) -> list[Any]:
        told.append(tokens.tolist())
        return [None] * len(batch)

    monkeypatch.setattr(type(replica), "_next_tokens", noted)
    monkeypatch.setattr(replica_module, "log_probabilities_of_step", logs)
    for verified, all_drafted in (([21, 22], True), ([21, 22], False), ([], False)):
        drafts = SomeDrafts(verified)
        monkeypatch.setattr(drafts.draft, "all_drafted", all_drafted)
        monkeypatch.setattr(drafts.draft, "logged", logged)
        monkeypatch.setattr(replica, "drafts", drafts)
        context = text(6, ignore_eos=True, log_probabilities=1, sampling_params=SamplingParams(top_k=1))  # fmt: skip
        execute(pipeline, 1, context)
        assert bool(chosen) == (not all_drafted)
        own = [] if all_drafted else chosen.pop().to_numpy().tolist()
        assert told.pop() == (own or [22])
        assert context.generated_tokens.tolist() == (verified or own)
        assert logged.pop() == (0, len(verified or own))
        pipeline.release(context.request_id)


@pytest.mark.parametrize(("tokens", "steps"), [([0, 5, 6], 3), ([5, -1, 6], 2), ([-1, 5, 6], 1)])
def test_no_step_follows_a_row_of_nan(
    tokens: list[int],
    steps: int,
    pipeline: Any,
    replica: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = list(tokens)

    def given(*_: Any) -> Any:
        return Tensor.from_numpy(np.array([left.pop(0)], np.int64))

    monkeypatch.setattr(replica, "_next_tokens", given)
    monkeypatch.setattr(replica_module, "log_probabilities_of_step", lambda *_: [None])
    context = text(6, ignore_eos=True, log_probabilities=1, sampling_params=SamplingParams(top_k=1))
    assert replica.execute([context], 3, True).steps == steps and len(left) == 3 - steps
    pipeline.release(context.request_id)


class SamplesItself(SameModel):
    """A model whose inputs have no sampling before it runs."""

    samples_in_graph, runs, sampling = False, 0, None

    def execute(self, inputs: Any) -> Any:
        self.runs += 1
        inputs.update(sampling=self.sampling)
        return self.model.execute(inputs)


def test_each_step_has_its_sampling_and_saves_states_first(
    pipeline: Any, replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step samples with depends on its number; one that goes on takes the last one's, moved on."""
    monkeypatch.setattr(replica, "drafts", None)
    steps, saved = list[int](), list[Any]()
    of = BatchInputs.of_sampling

    def noted(inputs: Any, batch: Any, step: int = 0) -> Any:
        steps.append(step)
        made = of(inputs, batch, step)
        expected = SamplingInputs.of(batch, CPU(), step)
        assert [each.to_numpy().tolist() for each in made] == [
            each.to_numpy().tolist() for each in expected
        ]
        return made

    monkeypatch.setattr(BatchInputs, "of_sampling", noted)
    monkeypatch.setattr(replica_module, "save_states", lambda *parts: saved.append(parts))
    context = text(6, ignore_eos=True, log_probabilities=1, sampling_params=SamplingParams(top_k=1))
    assert replica.model.samples_in_graph
    for count, expected in ((1, [0]), (1, []), (3, [0, 1, 2]), (1, [0])):
        execute(pipeline, count, context)
        assert steps == (expected if expected else [])
        steps.clear()
        assert saved.pop()[2] == [context] and not saved
    # also where a model leaves those of the last step in the inputs
    following = type(replica.model).prepare_next_token_inputs

    def keeping(model: Any, tokens: Any, inputs: Any) -> Any:
        sampling = inputs.sampling
        inputs = following(model, tokens, inputs)
        inputs.update(sampling=sampling)
        return inputs

    monkeypatch.setattr(type(replica.model), "prepare_next_token_inputs", keeping)
    execute(pipeline, 3, context)
    assert steps == [0, 1, 2]
    steps.clear()
    # a model that samples itself
    other = SamplesItself(replica.model)
    other.sampling = SamplingInputs.of([context], CPU())
    monkeypatch.setattr(replica.prompt_logits, "model_of", lambda *_: other)
    execute(pipeline, 2, context)
    assert not steps and other.runs == 2
    monkeypatch.undo()
    monkeypatch.setattr(replica_module, "save_states", lambda *parts: saved.append(parts))
    monkeypatch.setattr(replica, "records_tokens", False)
    saved.clear()
    execute(pipeline, 1, context)
    assert not saved
    pipeline.release(context.request_id)
