"""Stages of a step with drafts, and the drafter, on models whose logits are a function of what their caches hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.interfaces import RequestID, SamplingParams, TextGenerationInputs
from max.pipelines import TextContext
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.generation import speculative_decoding
from max.pipelines.generation.drafts.draft_model import DraftedText, ModelDrafter
from max.pipelines.generation.drafts.prediction import PredictionDrafter
from max.pipelines.generation.drafts.rejection import (
    kept_tokens,
    sampled_logits,
    softmax,
    uniform_numbers,
)
from max.pipelines.generation.speculative_decoding import (
    SpeculativeDecodingMetrics,
    SpeculativeDecodingTextGenerationPipeline,
    _DraftPipeline,
)
from max.pipelines.generation.text_generation import TextGenerationPipeline
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import pages_of
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.state_slots import StateSlots
from max.pipelines.models.inputs import ModelInputs, ModelOutputs
from max.pipelines.sampling.inputs import SamplingInputs, step_seed

SIZE, WORDS, DRAFT_WORDS, LONGEST = 4, 9, 7, 40


def logits_of(model: int, tokens: list[int], words: int) -> np.ndarray:
    """The logits after some tokens; model 2 hardly chooses words that model 1 may lack."""
    row = np.random.default_rng([model, *tokens]).normal(0, 2, words).astype(np.float32)
    row[DRAFT_WORDS:] -= 3 * (model == 2)
    return row


class Cache(RequestPages):
    """Pages of tokens."""

    def get_runtime_inputs(self, batch: Any) -> Any:
        tables = [self.pages.pages(one.request_id)[:] for one in batch]
        return SimpleNamespace(tables=tables, starts=[one.start_idx for one in batch])

    def next_step(self, inputs: Any, batch: Any, step: int) -> Any:
        starts = [one.active_idx + step - 1 for one in batch]
        return SimpleNamespace(tables=inputs.tables, starts=starts)


@dataclass(kw_only=True, eq=False, repr=False)
class Inputs(ModelInputs):
    tokens: list[list[int]]
    last: int = 1


@dataclass
class Model:
    """A model that sees what was written to its pages."""

    number: int
    words: int
    cache: RequestPages
    samples_in_graph: bool = False
    max_seq_len: int = LONGEST
    huggingface_config: Any = None
    devices: tuple[Any, ...] = (CPU(), SimpleNamespace())
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    num_read: int = 0
    most_read: int = 0
    last_inputs: Any = None

    def prepare_initial_token_inputs(self, batch: Any, cache: Any, last: int) -> Inputs:
        tokens = [one.next_tokens.tolist() for one in batch]
        return Inputs(tokens=tokens, last=last, kv_cache_inputs=cache)

    def prepare_next_token_inputs(self, tokens: Tensor, inputs: Inputs) -> Inputs:
        return replace(inputs, tokens=[[token] for token in tokens.to_numpy().tolist()])

    def execute(self, inputs: Inputs) -> ModelOutputs:
        cache: Any = inputs.kv_cache_inputs
        self.last_inputs = inputs
        rows: list[np.ndarray] = []
        for table, start, tokens in zip(cache.tables, cache.starts, inputs.tokens, strict=True):
            places = [(table[at // SIZE], at % SIZE) for at in range(start + len(tokens))]
            self.memory |= zip(places[start:], tokens, strict=True)
            self.num_read += len(tokens)
            self.most_read = max(self.most_read, len(tokens))
            seen = [self.memory[place] for place in places]
            ends = range(max(len(seen) - inputs.last, start) + 1, len(seen) + 1)
            rows += [logits_of(self.number, seen[:end], self.words) for end in ends]
        counts = [0, *(min(inputs.last, len(tokens)) for tokens in inputs.tokens)]
        offsets = Tensor.from_numpy(np.cumsum(counts).astype(np.uint32))
        return ModelOutputs(Tensor.from_numpy(np.stack(rows)), logit_offsets=offsets)


class Draft:
    """The pipeline of the draft model, whose own steps are greedy."""

    longest, states = LONGEST, ()

    def __init__(self, num_pages: int = 40, words: int = DRAFT_WORDS) -> None:
        self.vocabulary = words
        self.kv_manager: Any = Cache.of(num_pages, SIZE, True)
        self.model = Model(1, words, self.kv_manager)

    def execute(self, inputs: TextGenerationInputs[Any]) -> None:
        batch = [*inputs.batches[0].values()]
        assert inputs.num_steps > 0
        steps = min(inputs.num_steps, *(LONGEST - one.current_length for one in batch))
        self.kv_manager.reserve(batch, steps)
        for _ in range(steps):
            cache = self.kv_manager.get_runtime_inputs(batch)
            outputs = self.model.execute(
                self.model.prepare_initial_token_inputs(batch, cache, 1)
            ).logits.to_numpy()
            for one, row in zip(batch, outputs, strict=True):
                one.update(int(row.argmax()))


def choice(logits: np.ndarray, seed: int) -> int:
    """A token that the seed draws, by the method of Gumbel."""
    return int(np.argmax(logits + np.random.default_rng(seed).gumbel(size=logits.shape)))


class Sampler:
    """Draws with the seeds alone: what else the parameters say is in the logits."""

    def sample_with(self, logits: Tensor, inputs: SamplingInputs) -> Tensor:
        rows = logits.to_numpy()
        parameters = (inputs.temperature, inputs.top_k, inputs.top_p, inputs.min_p)
        for parameter, value in zip(parameters, (1, -1, 1, 0), strict=True):
            assert parameter.to_numpy().tolist() == [value] * len(rows)
        seeds = inputs.seed.to_numpy().tolist()
        return Tensor.from_numpy(np.array(list(map(choice, rows, seeds)), np.int64))


class Drafts:
    """Counts as the steps of a copy of the model do."""

    def __init__(self, *counts: int) -> None:
        self.drafted, self.accepted, self.verified = counts or (0, 0, 0)

    def count(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        self.verified += 1


def pipeline_of(samples_in_graph: bool = False, words: int = DRAFT_WORDS) -> Any:
    pipeline: Any = object.__new__(SpeculativeDecodingTextGenerationPipeline)
    pipeline._draft, pipeline._kv_manager = Draft(words=words), Cache.of(40, SIZE, False)
    model = Model(2, WORDS, pipeline._kv_manager, samples_in_graph)
    pipeline._draft.model.samples_in_graph = samples_in_graph
    pipeline._sampler = Sampler()
    pipeline._drafter = ModelDrafter(pipeline._draft, WORDS, 64)
    replica = SimpleNamespace(model=model, drafts=Drafts())
    # stages run on the first copy of the model
    pipeline.replicas = [replica, SimpleNamespace(model=None, drafts=None)]
    return pipeline


PARAMETERS: tuple[dict[str, Any], ...] = (
    dict(top_k=1),
    dict(top_k=-1, temperature=1.3),
    dict(top_k=4, top_p=0.9),
)


def contexts_of(draw: np.random.Generator, *lengths: int) -> list[TextContext]:
    return [
        TextContext(
            tokens=draw.integers(0, DRAFT_WORDS, length), max_length=LONGEST, request_id=RequestID(f"{at}"),
            sampling_params=SamplingParams(seed=int(draw.integers(2**60)), ignore_eos=True, **PARAMETERS[at % 3]),
        )
        for at, length in enumerate(lengths)
    ]  # fmt: skip


def drafted_by_reference(
    context: TextContext, steps: int, words: int
) -> tuple[list[int], list[float], np.ndarray]:
    """The tokens that a draft has, their logits, and all logits of its steps."""
    tokens, own, rows = context.all_tokens.tolist(), list[float](), list[np.ndarray]()
    params = context.sampling_params
    for step in range(steps):
        (row,) = sampled_logits(logits_of(1, tokens, words)[None, :WORDS], [params])
        tokens.append(choice(row, step_seed(params.seed, context.active_idx + step)))
        own.append(float(row[tokens[-1]]))
        rows.append(row)
    return tokens[len(tokens) - steps :], own, np.stack(rows)


def verified_by_reference(
    context: TextContext, drafted: list[int], logits: np.ndarray
) -> tuple[int, list[int]]:
    """How many drafted tokens rejection sampling keeps, and what takes their places."""
    tokens, steps = context.all_tokens.tolist(), len(drafted)
    params = context.sampling_params
    rows = [logits_of(2, tokens + drafted[:n], WORDS) for n in range(steps + 1)]
    target = softmax(sampled_logits(np.stack(rows), [params] * (steps + 1)))
    draft = np.zeros((steps, WORDS))
    draft[:, : logits.shape[1]] = softmax(logits)
    numbers = [uniform_numbers(params.seed, len(tokens) + step) for step in range(steps + 1)]
    return kept_tokens(drafted, draft, target, np.array(numbers))


@pytest.mark.parametrize(
    ("samples_in_graph", "words"), [(False, DRAFT_WORDS), (True, DRAFT_WORDS), (False, WORDS + 3)]
)
def test_each_stage(samples_in_graph: bool, words: int) -> None:
    """From unread prompts on: drafts, what is verified of them, and the texts; caches hold these alone."""
    pipeline, draw = pipeline_of(samples_in_graph, words), np.random.default_rng(3)
    contexts = contexts_of(draw, 5, 1, 8, 3)
    draft, model, drafts = (
        pipeline._draft.model,
        pipeline.replicas[0].model,
        pipeline.replicas[0].drafts,
    )
    kept_counts = list[int]()
    for steps in (3, 1, 2, 4, 3):
        expected = [drafted_by_reference(one, steps, words) for one in contexts]
        read = draft.num_read
        inputs, count = pipeline.prepare_batch(draft, contexts, steps, 1, is_draft=True)
        assert count == steps and inputs.sampling is None
        count, tokens, logits, inputs, every = pipeline.generate_draft_tokens(
            contexts, steps, inputs
        )
        assert count == steps and inputs is draft.last_inputs
        # each step reads what is new: two tokens at most, and those that it drafts itself
        unread = [
            one.current_length if steps == 3 and not drafts.verified else 2 for one in contexts
        ]
        assert draft.num_read - read <= sum(unread) + len(contexts) * (steps - 1)
        assert tokens.to_numpy().tolist() == [own for own, _, _ in expected]
        np.testing.assert_array_equal(logits.to_numpy(), [own for _, own, _ in expected])
        np.testing.assert_array_equal(
            every.to_numpy(), np.stack([rows for _, _, rows in expected], 1)
        )
        merged = [
            [*one.next_tokens.tolist(), *own]
            for one, (own, _, _) in zip(contexts, expected, strict=True)
        ]
        offsets = np.cumsum([0, *map(len, merged)]).astype(np.uint32)
        results = pipeline.verify_draft_tokens_with_target_model(
            inputs, contexts, steps, tokens, logits, Tensor.from_numpy(np.concatenate(merged)),
            Tensor.from_numpy(offsets), every,
        )  # fmt: skip
        assert model.last_inputs.last == steps + 1
        for used in (draft, model):
            sampling = used.last_inputs.sampling
            assert (sampling is not None) is samples_in_graph
            if sampling is not None:
                later = steps - 1 if used is draft else 0
                seeds = [
                    step_seed(one.sampling_params.seed, one.active_idx + later) for one in contexts
                ]
                assert sampling.seed.to_numpy().tolist() == seeds
        for one in contexts:
            held = len(pipeline._kv_manager.pages.pages(one.request_id))
            assert held == pages_of(one.active_idx + steps, SIZE)
        verified = [
            verified_by_reference(one, own, rows)
            for one, (own, _, rows) in zip(contexts, expected, strict=True)
        ]
        kept, recovered, bonus = (result.to_numpy() for result in results)
        assert kept.tolist() == [count for count, _ in verified]
        assert recovered.tolist() == [others[:-1] for _, others in verified]
        assert bonus.tolist() == [others[-1:] for _, others in verified]
        assert {array.dtype for array in (kept, recovered, bonus)} == {np.dtype(np.int64)}
        texts = [one.all_tokens.tolist() for one in contexts]
        pipeline.update_contexts(contexts, kept, recovered, bonus, tokens.to_numpy(), steps)
        answers = pipeline.build_response(contexts)
        for one, text, (own, _, _), (count, others) in zip(
            contexts, texts, expected, verified, strict=True
        ):
            new = [*own[:count], others[count]]
            assert one.all_tokens.tolist() == text + new
            assert answers[one.request_id].tokens == new
            # and nothing is reserved any longer
            held = len(pipeline._kv_manager.pages.pages(one.request_id))
            assert held == pages_of(len(text) + count, SIZE)
        kept_counts += kept.tolist()
    assert {0, 1, 2} <= set(kept_counts), "wrong and right tokens"
    assert (drafts.verified, drafts.accepted) == (20, sum(kept_counts)) and drafts.drafted == 4 * 13
    assert pipeline.metrics == SpeculativeDecodingMetrics(
        drafts.drafted, drafts.accepted, drafts.verified
    )


def test_texts_end_with_their_token() -> None:
    pipeline = pipeline_of()
    (one,) = contexts_of(np.random.default_rng(0), 4)
    ended = TextContext(tokens=np.arange(4), max_length=LONGEST, eos_token_ids={6})
    for context in (one, ended):
        pipeline._kv_manager.reserve([context], 4)
    tokens, recovered = np.array([[1, 2, 3], [5, 6, 3]]), np.array([[7, 7, 7], [8, 8, 8]])
    # shapes with an axis of one are as good as those without it
    pipeline.update_contexts(
        [one, ended], np.array([[2], [3]]), recovered, np.array([4, 4]), tokens, 3
    )
    assert one.generated_tokens.tolist() == [1, 2, 7]
    assert ended.generated_tokens.tolist() == [5, 6] and ended.is_done


def test_a_batch_without_drafts() -> None:
    """One set of drafted tokens without the other is none."""
    pipeline, draw = pipeline_of(), np.random.default_rng(1)
    model = pipeline.replicas[0].model
    tokens = Tensor.from_numpy(np.arange(4))
    offsets = Tensor.from_numpy(np.array([0, 4], np.uint32))
    for arguments in ((), (None, None, offsets), (None, tokens, None)):
        (context,) = contexts_of(draw, 3)
        inputs, steps = pipeline.prepare_batch(model, [context], 5, 1, False, *arguments)
        assert (inputs.tokens, steps, context.draft_tokens) == (
            [context.all_tokens.tolist()],
            5,
            (),
        )
        pipeline._kv_manager.release(context.request_id)


def test_the_room_of_a_text() -> None:
    pipeline = pipeline_of()
    model, draft = pipeline.replicas[0].model, pipeline._draft.model
    for length, most, is_draft, expected in (
        (LONGEST - 3, 5, False, 3), (LONGEST - 3, 5, True, 2), (LONGEST - 3, 1, True, 1), (LONGEST - 1, 4, False, 1),
        (LONGEST - 1, 4, True, None), (LONGEST, 4, False, None),
    ):  # fmt: skip
        context = TextContext(tokens=np.zeros(length, np.int64), max_length=LONGEST + 1)
        if expected is None:
            with pytest.raises(ValueError, match=f"has {length} tokens, and the context holds 40"):
                pipeline.calculate_num_steps(model, None, most, context, is_draft)
        else:
            assert pipeline.calculate_num_steps(model, None, most, context, is_draft) == expected
            if not is_draft:
                assert pipeline.calculate_num_steps(model, None, most, context) == expected
    contexts = contexts_of(np.random.default_rng(2), 3, LONGEST - 2, 5)
    assert pipeline.prepare_batch(draft, contexts, 4, 1, is_draft=True)[1] == 1
    assert pipeline.prepare_batch(model, contexts, 4, 1)[1] == 2


def test_what_metrics_tell() -> None:
    none = SpeculativeDecodingMetrics()
    assert none == SpeculativeDecodingMetrics(0, 0, 0)
    assert (none.acceptance_rate, none.tokens_per_step) == (0, 0)
    one = SpeculativeDecodingMetrics(1, 1, 1)
    assert (one.acceptance_rate, one.tokens_per_step) == (1, 2)
    many = SpeculativeDecodingMetrics(8, 6, 4)
    assert (many.acceptance_rate, many.tokens_per_step) == (0.75, 2.5)
    pipeline = pipeline_of()
    copies = (Drafts(8, 6, 4), None, Drafts(2, 1, 1))
    pipeline.replicas = [SimpleNamespace(drafts=each) for each in copies]
    assert pipeline.metrics == SpeculativeDecodingMetrics(10, 7, 5)
    assert pipeline.kv_managers == [pipeline._draft.kv_manager, pipeline._kv_manager]
    assert pipeline.scheduled_caches == [pipeline._kv_manager]


def greedy_draft(tokens: list[int], steps: int) -> list[int]:
    for _ in range(steps):
        tokens = [*tokens, int(logits_of(1, tokens, DRAFT_WORDS).argmax())]
    return tokens[len(tokens) - steps :]


def test_drafts_after_right_and_wrong_tokens() -> None:
    """A draft is what the model writes after the text alone, and each step reads only what is new."""
    draw = np.random.default_rng(4)
    draft = Draft()
    drafter = ModelDrafter(draft, DRAFT_WORDS, 64)
    contexts = contexts_of(draw, 7, 2, 5)
    wrong = 0
    unread = [one.current_length for one in contexts]
    for _ in range(6):
        most = [int(n) for n in draw.integers(1, 5, len(contexts))]
        steps, before = max(most), draft.model.num_read
        drafts = drafter.propose_all(contexts, most)
        written = [greedy_draft(one.all_tokens.tolist(), steps) for one in contexts]
        for own, whole, n in zip(drafts, written, most, strict=True):
            assert list(own) == whole[:n]
        assert draft.model.num_read - before == sum(unread) + len(contexts) * (steps - 1)
        unread = []
        for one, whole, n in zip(contexts, written, most, strict=True):
            right = int(draw.integers(n + 1))
            wrong += right < n
            held = [*one.all_tokens.tolist(), *whole]
            # more tokens than one where a grammar forces them
            others = draw.integers(0, DRAFT_WORDS, draw.integers(1, 4)).tolist()
            for token in [*whole[:right], *others]:
                one.update(token)
            pairs = enumerate(zip(held, one.all_tokens.tolist(), strict=False))
            common = next((at for at, (a, b) in pairs if a != b), len(held) - 1)
            # a step that drafts reads one token at least
            unread.append(one.current_length - min(common, len(held) - 1, one.current_length - 1))
        draft.kv_manager.pages.check()
    assert wrong > 6
    for one in contexts:
        drafter.forget(one.request_id)
    assert draft.kv_manager.used_pages == 0


def test_drafts_without_room() -> None:
    draft = Draft(num_pages=4)
    drafter = ModelDrafter(draft, DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(5), 6, 7, 6)
    # two pages each: the third request has no room, until another batch leaves the first ones out
    for used, has_room in (([0, 1, 2], [True, True, False]), ([2], [True])):
        batch = [contexts[at] for at in used]
        drafts = drafter.propose_all(batch, [1] * len(batch))
        expected = [
            greedy_draft(one.all_tokens.tolist(), 1) if room else []
            for one, room in zip(batch, has_room, strict=True)
        ]
        assert [list(own) for own in drafts] == expected
    with pytest.raises(OutOfPagesError):
        drafter.texts(contexts, 1)


def test_pages_of_the_longest_draft() -> None:
    """All requests run the steps of the longest draft, which one with a shorter draft may have no room for."""
    draft = Draft(num_pages=3)
    drafter = ModelDrafter(draft, DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(6), 4, 3)
    drafts = drafter.propose_all(contexts, [4, 1])
    assert list(drafts[0]) == greedy_draft(contexts[0].all_tokens.tolist(), 4)
    assert list(drafts[1]) == []


def test_drafts_at_the_end_of_the_longest_text() -> None:
    """The steps of a batch end where one of its texts does."""
    drafter = ModelDrafter(draft := Draft(), DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(7), LONGEST - 2, 3, LONGEST - 1)
    drafts = drafter.propose_all(contexts, [2, 4, 2])
    for own, one, count in zip(drafts, contexts, (2, 2, 0), strict=True):
        assert list(own) == greedy_draft(one.all_tokens.tolist(), count)
    assert draft.kv_manager.used_pages == pages_of(LONGEST, SIZE) + 2


class RecurrentDraft:
    """A draft model without keys: all that it has read is one number a request."""

    longest, vocabulary = LONGEST, DRAFT_WORDS

    def __init__(self, num_slots: int = 4, spares: int = 4, num_pages: int = 40) -> None:
        self.kv_manager: Any = RequestPages(
            PageManager(num_pages, SIZE, False), StateSlots(num_slots, spares)
        )
        self.state = np.zeros((num_slots + spares, 1), np.int64)
        self.states = [Tensor.from_numpy(self.state)]
        self.num_read = 0

    @staticmethod
    def read(state: int, tokens: list[int]) -> int:
        for token in tokens:
            state = (state * 31 + token + 1) % (1 << 40)
        return state

    @staticmethod
    def chosen(state: int) -> int:
        return int(np.random.default_rng(state).normal(size=DRAFT_WORDS).argmax())

    def execute(self, inputs: TextGenerationInputs[Any]) -> None:
        batch = [*inputs.batches[0].values()]
        assert inputs.num_steps > 0
        steps = min(inputs.num_steps, *(LONGEST - one.current_length for one in batch))
        self.kv_manager.reserve(batch, steps)
        for one in batch:
            slot = self.kv_manager.slots.slot(one.request_id)
            for _ in range(steps):
                # a request without processed tokens begins with a state of zeros
                before = 0 if one.start_idx == 0 else int(self.state[slot, 0])
                self.num_read += one.active_length
                self.state[slot] = self.read(before, one.next_tokens.tolist())
                one.update(self.chosen(int(self.state[slot, 0])))

    def written(self, tokens: list[int], steps: int) -> list[int]:
        """What the model writes after a text that it reads as a whole."""
        for _ in range(steps):
            tokens = [*tokens, self.chosen(self.read(0, tokens))]
        return tokens[len(tokens) - steps :]


def go_on(context: TextContext, drafted: list[int], right: int, others: list[int]) -> None:
    """Appends the first of the drafted tokens, and others."""
    for token in [*drafted[:right], *others]:
        context.update(token)


@pytest.mark.parametrize("chunk", [3, 64])
def test_drafts_of_a_recurrent_model(chunk: int) -> None:
    """A state goes back to the last certain token, and is never that of wrong ones; what is right is read once."""
    draw = np.random.default_rng(10)
    drafter = ModelDrafter(draft := RecurrentDraft(), DRAFT_WORDS, chunk)
    contexts = contexts_of(draw, 7, 2, 5)
    slots = draft.kv_manager.slots
    # what a state has read, and what it goes back to
    held = [0] * len(contexts)
    certain = [0] * len(contexts)
    told = [list[int]()] * len(contexts)
    rewound = 0
    while max(one.current_length for one in contexts) < LONGEST - 5:
        most = [int(n) for n in draw.integers(1, 5, len(contexts))]
        steps, before, expected = max(most), draft.num_read, 0
        for row, one in enumerate(contexts):
            pairs = zip(told[row], one.all_tokens.tolist(), strict=False)
            common = next((at for at, (a, b) in enumerate(pairs) if a != b), len(told[row]))
            goes_back = held[row] > min(common, one.current_length - 1)
            rewound += goes_back
            expected += one.current_length - (certain[row] if goes_back else held[row]) + steps - 1
        drafts = drafter.propose_all(contexts, most)
        assert draft.num_read - before == expected
        # only steps after the first one need a state to go back to
        assert len(slots._free_spares) == (4 if steps == 1 else 1) and slots.free_slots == 1
        for row, (one, own, count) in enumerate(zip(contexts, drafts, most, strict=True)):
            written = draft.written(one.all_tokens.tolist(), steps)
            assert list(own) == written[:count] and slots.behind(one.request_id) == 0
            told[row] = [*one.all_tokens.tolist(), *written]
            certain[row], held[row] = one.current_length, len(told[row]) - 1
            # a step gives one token at least
            right = int(draw.integers(count + 1))
            further = int(draw.integers(right == 0, 3))
            go_on(one, written, right, draw.integers(0, DRAFT_WORDS, further).tolist())
        draft.kv_manager.pages.check()
    assert rewound > 4
    for one in contexts:
        drafter.forget(one.request_id)
    assert draft.kv_manager.used_pages == 0 and not drafter._saved
    assert (slots.free_slots, len(slots._free_spares)) == (4, 4)


@pytest.mark.parametrize("steps", [1, 3])
def test_steps_of_a_caller_on_a_recurrent_model(steps: int) -> None:
    """The caller's steps change the states, whose saved ones count until a step has shown what was right."""
    draw = np.random.default_rng(11)
    drafter = ModelDrafter(draft := RecurrentDraft(), DRAFT_WORDS, 64)
    contexts = contexts_of(draw, 6, 3)
    for right in (0, steps, 1, 0, steps, steps):
        # asked for twice, as the stages of a step do
        texts = drafter.texts(contexts, steps)
        again = drafter.texts(contexts, steps)
        assert [text.request_id for text in again] == [one.request_id for one in contexts]
        for text, one in zip(texts, contexts, strict=True):
            assert text.all_tokens.tolist() == one.all_tokens.tolist()
        # a step that fails leaves any state, in the slot that the inputs name
        slots = draft.kv_manager.slots
        used = [slots.slot(one.request_id) for one in contexts]
        draft.state[used] = -1
        again = drafter.texts(contexts, steps)
        assert [slots.slot(one.request_id) for one in contexts] == used
        for slot, text in zip(used, again, strict=True):
            read = text.all_tokens[: text.start_idx].tolist()
            assert not read or draft.state[slot, 0] == draft.read(0, read)
        batch = {text.request_id: text for text in again}
        draft.execute(TextGenerationInputs(batches=[batch], num_steps=steps))
        for one, text in zip(contexts, again, strict=True):
            written = draft.written(one.all_tokens.tolist(), steps)
            assert text.all_tokens.tolist() == [*one.all_tokens.tolist(), *written]
            go_on(one, written, right, [int(draw.integers(DRAFT_WORDS))])
        # a draft of its own in between
        if right == 1:
            (own, _) = drafter.propose_all(contexts, [2, 1])
            assert list(own) == draft.written(contexts[0].all_tokens.tolist(), 2)
    slots = draft.kv_manager.slots
    for one in contexts:
        drafter.forget(one.request_id)
    assert (slots.free_slots, len(slots._free_spares)) == (4, 4)
    assert not drafter._saved and not drafter._stepped


def test_a_caller_changes_the_states_of_its_requests_only() -> None:
    drafter = ModelDrafter(draft := RecurrentDraft(), DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(11), 6, 3)

    def read_by_drafts() -> int:
        """Tokens that a draft of three reads, all of which are right, before those that it writes."""
        before = draft.num_read
        drafts = drafter.propose_all(contexts, [3, 3])
        for one, own in zip(contexts, drafts, strict=True):
            assert list(own) == draft.written(one.all_tokens.tolist(), 3)
            go_on(one, list(own), 3, [0])
        return draft.num_read - before - 2 * 2

    assert read_by_drafts() == 6 + 3
    # the last drafted token and the one after it
    assert read_by_drafts() == 2 + 2
    drafter.texts(contexts[:1], 1)
    go_on(contexts[0], [], 0, [2])
    # the first request goes back to before these two
    assert read_by_drafts() == 3 + 2
    assert read_by_drafts() == 2 + 2
    # without new tokens, and without a state to go back to, all is read again
    for _ in range(2):
        before = draft.num_read
        (own, _) = drafter.propose_all(contexts, [1, 1])
        assert list(own) == draft.written(contexts[0].all_tokens.tolist(), 1)
    assert draft.num_read - before == sum(one.current_length for one in contexts)


def test_a_state_that_cannot_be_saved() -> None:
    """Without a spare slot a draft is the token after those that are certain."""
    drafter = ModelDrafter(draft := RecurrentDraft(spares=1), DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(12), 4, 6)
    for _ in range(3):
        drafts = drafter.propose_all(contexts, [3, 3])
        lengths = sorted(map(len, drafts))
        assert lengths == [1, 3]
        for one, own in zip(contexts, drafts, strict=True):
            assert list(own) == draft.written(one.all_tokens.tolist(), len(own))
            go_on(one, list(own), 1, [0])
    with pytest.raises(OutOfPagesError):
        drafter.texts(contexts, 1)
    # the first request of three has none
    drafter = ModelDrafter(RecurrentDraft(num_slots=2), DRAFT_WORDS, 64)
    contexts = contexts_of(np.random.default_rng(13), 4, 6, 5)
    with pytest.raises(OutOfPagesError):
        drafter.texts(contexts, 1)


def test_a_pipeline_drafts_for_each_of_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()
    draft = SimpleNamespace(
        pipeline_config=SimpleNamespace(prefill_chunk_size=5), replicas=["small"]
    )
    config: Any = SimpleNamespace(sampling_config="sampling")
    replicas = [
        SimpleNamespace(model=SimpleNamespace(devices=[f"device {n}", "other"]), cache=f"cache {n}", drafts=None)
        for n in range(2)
    ]  # fmt: skip

    def load(pipeline: Any, *arguments: Any) -> None:
        assert pipeline._draft is draft, (
            "the draft model's memory is part of the plan of the model's"
        )
        made.append(arguments)
        pipeline.replicas, pipeline._constraints = replicas, "constraints"

    monkeypatch.setattr(TextGenerationPipeline, "__init__", load)
    monkeypatch.setattr(TextGenerationPipeline, "session", "session")
    names = {
        "_draft_pipeline": lambda *arguments: made.append(arguments) or draft,
        "Sampler": lambda *arguments: arguments,
        "vocabulary_size": lambda own: 9 if own is config else 0,
        "DraftSteps": SimpleNamespace(of=lambda *arguments: arguments),
        "DraftRounds": SimpleNamespace(of=lambda *arguments: arguments),
    }
    for name, value in names.items():
        monkeypatch.setattr(speculative_decoding, name, value)
    model: Any = object()
    tokenizer: Any = object()
    pipeline = SpeculativeDecodingTextGenerationPipeline(config, model, 7, {}, tokenizer)
    assert made == [(config, 7, tokenizer), (config, model, 7, {}, tokenizer)]
    drafter = pipeline._drafter
    assert (drafter._model, drafter.vocabulary, drafter._chunk) == (draft, 9, 5)
    sampler: Any = ("session", "device 0", "sampling")
    given = [cast(Any, replica.drafts) for replica in replicas]
    assert [own[:-1] for own in given] == [
        (config, replica.model, sampler, replica.cache, "constraints") for replica in replicas
    ]
    # predictions are of a copy, the draft model is of all of them
    parts = [[each for _, each in own[-1].parts] for own in given]
    assert all(isinstance(first, PredictionDrafter) and last is drafter for first, last in parts)
    assert parts[0][0] is not parts[1][0]
    assert [cast(Any, replica).rounds for replica in replicas] == [
        ("session", replica, "small", drafter) for replica in replicas
    ]
    assert pipeline.repeats_drafts


def test_what_a_drafter_asks_of_its_model() -> None:
    pipeline: Any = object.__new__(_DraftPipeline)
    first = SimpleNamespace(
        model=SimpleNamespace(max_seq_len=70), cache=SimpleNamespace(states=[1, 2])
    )
    pipeline.replicas = [first, SimpleNamespace()]
    assert (pipeline.model, pipeline.longest, pipeline.states) == (first.model, 70, [1, 2])


def test_what_is_that_of_any_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, ends of requests, tokenizer and configuration; the draft model's vocabulary is in its configuration."""
    pipeline, calls = pipeline_of(), list[Any]()
    base = TextGenerationPipeline
    monkeypatch.setattr(base, "execute", lambda self, inputs: ("result", inputs))
    monkeypatch.setattr(base, "release", lambda self, request_id: calls.append(request_id))
    monkeypatch.setattr(base, "tokenizer", "tokenizer")
    monkeypatch.setattr(base, "pipeline_config", "config")
    monkeypatch.setattr(
        speculative_decoding, "vocabulary_size", lambda config: {"config": 7}[config]
    )
    assert pipeline.execute("batch") == ("result", "batch")
    pipeline.release("one")
    assert calls == ["one"]
    assert (pipeline.tokenizer, pipeline.pipeline_config) == ("tokenizer", "config")
    assert object.__new__(_DraftPipeline).vocabulary == 7


@pytest.mark.parametrize("chunk", [3, 4, 64])
def test_prompts_are_read_by_chunks(chunk: int) -> None:
    """As far as the model has read them, and each token once."""
    drafter = ModelDrafter(draft := Draft(), DRAFT_WORDS, chunk)
    contexts = contexts_of(np.random.default_rng(8), 11, 15)
    for one in contexts:
        one.set_token_indices(active_idx=5)
        one.update(0)
    drafter.read(contexts)
    assert draft.model.num_read == 2 * 5 and draft.model.most_read == min(chunk, 5)
    drafts = drafter.propose_all(contexts, [1, 2])
    for own, one, count in zip(drafts, contexts, (1, 2), strict=True):
        assert list(own) == greedy_draft(one.all_tokens.tolist(), count)
    # both run two steps
    assert draft.model.num_read == 11 + 15 + 2 and draft.model.most_read == min(chunk, 10)


def test_tokens_that_one_of_the_models_lacks() -> None:
    drafter = ModelDrafter(Draft(), DRAFT_WORDS, 64)
    known, unknown = contexts_of(np.random.default_rng(9), 5, 5)
    # a token that the draft model has no embedding for
    unknown.update(DRAFT_WORDS)
    known.update(DRAFT_WORDS - 1)
    drafts = drafter.propose_all([unknown, known], [3, 3])
    assert [list(own) for own in drafts] == [[], greedy_draft(known.all_tokens.tolist(), 3)]
    # a draft ends before the first token that the model lacks
    cut = False
    for words in range(1, DRAFT_WORDS):
        (own,) = ModelDrafter(Draft(), words, 64).propose_all([known], [6])
        whole = greedy_draft(known.all_tokens.tolist(), 6)
        end = next((at for at, token in enumerate(whole) if token >= words), 6)
        assert list(own) == whole[:end]
        cut |= 0 < end < 6
    assert cut


@pytest.mark.parametrize("right", [0, 2, 3])
@pytest.mark.parametrize("place", [0, 2, -1])
def test_a_draft_model_reads_no_token_that_it_lacks(place: int, right: int) -> None:
    """Neither in a prompt, nor after drafts or in their place."""
    drafter = ModelDrafter(draft := Draft(), WORDS, 64)
    (context,) = contexts_of(np.random.default_rng(14), 5)
    tokens = context.all_tokens.copy()
    tokens[place] = DRAFT_WORDS
    unknown = TextContext(tokens=tokens, max_length=LONGEST)
    assert [list(own) for own in drafter.propose_all([unknown], [3])] == [[]]
    assert draft.kv_manager.used_pages == 0
    (own,) = drafter.propose_all([context], [3])
    go_on(context, list(own), right, [DRAFT_WORDS])
    assert [list(own) for own in drafter.propose_all([context], [3])] == [[]]
    assert draft.kv_manager.used_pages == 0


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_a_cache_that_keeps_fewer_tokens(is_recurrent: bool) -> None:
    """As one with windows may: keys are read from there on, a state of more tokens is of no use."""
    draft: Any = RecurrentDraft() if is_recurrent else Draft()
    drafter = ModelDrafter(draft, DRAFT_WORDS, 64)
    (context,) = contexts_of(np.random.default_rng(20), 11)
    written = draft.written if is_recurrent else greedy_draft
    (own,) = drafter.propose_all([context], [2])
    go_on(context, list(own), 2, [1])
    keep = draft.kv_manager.keep
    draft.kv_manager.keep = lambda text, length: keep(text, min(length, 5))
    read = draft.num_read if is_recurrent else draft.model.num_read
    (own,) = drafter.propose_all([context], [2])
    assert list(own) == written(context.all_tokens.tolist(), 2)
    read = (draft.num_read if is_recurrent else draft.model.num_read) - read
    assert read == (14 if is_recurrent else 14 - 5) + 1


def test_requests_share_what_a_draft_model_has_read() -> None:
    """Of certain tokens."""
    drafter = ModelDrafter(draft := Draft(), DRAFT_WORDS, 64)
    for number in range(3):
        (context,) = contexts_of(np.random.default_rng(21), 11)
        context.request_id = RequestID(f"{number}")
        before = draft.model.num_read
        (own,) = drafter.propose_all([context], [1])
        assert draft.model.num_read - before == (11 - 2 * SIZE if number else 11)
        go_on(context, list(own), 1, [])
        drafter.propose_all([context], [1])
    # it runs in steps of its own, whose tokens cannot be looked up while the model runs
    assert drafter.takes_steps


def test_another_prompt_of_a_request_is_read_anew() -> None:
    """In pages of its own: others may reuse those of the prompt before."""
    drafter = ModelDrafter(draft := Draft(), DRAFT_WORDS, 64)
    for seed, name in ((15, "0"), (16, "0"), (15, "one"), (17, "0"), (16, "other")):
        (context,) = contexts_of(np.random.default_rng(seed), 9)
        context.request_id = RequestID(name)
        for _ in range(2):
            (own,) = drafter.propose_all([context], [3])
            assert list(own) == greedy_draft(context.all_tokens.tolist(), 3)
            go_on(context, list(own), 2, [1])
        draft.kv_manager.pages.check()
    assert len(drafter._texts) == 3


def test_a_step_of_a_draft_model_that_fails() -> None:
    """Whatever it has read, the next draft is that of the text."""
    (one,) = contexts_of(np.random.default_rng(19), 11)
    for steps_before in range(4):
        draft = Draft()
        drafter = ModelDrafter(draft, DRAFT_WORDS, 4)
        run, left = draft.execute, steps_before

        def execute(inputs: Any) -> None:
            nonlocal left
            left -= 1
            if left == -1:
                raise RuntimeError("no")
            run(inputs)  # noqa: B023

        draft.execute = execute
        with pytest.raises(RuntimeError, match="no"):
            drafter.propose_all([one], [2])
        one.update(1)
        (own,) = drafter.propose_all([one], [2])
        assert list(own) == greedy_draft(one.all_tokens.tolist(), 2)


def test_a_prompt_that_grows_while_it_is_read() -> None:
    """The draft model may be at a chunk when the model has its first token."""
    drafter = ModelDrafter(Draft(), DRAFT_WORDS, 4)
    (one,) = contexts_of(np.random.default_rng(18), 11)
    one.set_token_indices(active_idx=5)
    one.update(0)
    drafter.read([one])
    for token in (3, 1):
        one.update(token)
    (own,) = drafter.propose_all([one], [2])
    assert list(own) == greedy_draft(one.all_tokens.tolist(), 2)


def test_the_last_prompt_that_is_read_beside_the_model() -> None:
    """One that leaves room for a draft of one token."""
    for length, is_read in ((LONGEST - 2, True), (LONGEST - 1, True), (LONGEST, False)):
        drafter = ModelDrafter(draft := Draft(), DRAFT_WORDS, 64)
        context = TextContext(tokens=np.zeros(length, np.int64), max_length=LONGEST + 1)
        context.set_token_indices(active_idx=5)
        context.update(0)
        drafter.read([context])
        assert (draft.model.num_read == 5) is is_read
        assert (draft.kv_manager.used_pages > 0) is is_read


def test_loading_a_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its weights and architecture from its own files, and saves states if it has any."""
    checked = list[Any]()
    slots: Any = None

    def load(pipeline: Any, *arguments: Any) -> None:
        pipeline.arguments, pipeline._kv_manager = arguments, SimpleNamespace(slots=slots)
        pipeline.replicas = [SimpleNamespace(records_tokens=True) for _ in range(2)]

    monkeypatch.setattr(TextGenerationPipeline, "__init__", load)
    monkeypatch.setattr(
        speculative_decoding, "check_vocabularies", lambda *repos: checked.append(repos)
    )
    monkeypatch.setattr(speculative_decoding, "draft_pipeline_config", lambda config: config.own)
    architecture = SimpleNamespace(pipeline_model="model", weight_adapters="adapters")
    resolver = SimpleNamespace(architecture_of=lambda own: architecture if own == "own" else None)
    monkeypatch.setattr(speculative_decoding, "resolver", lambda: resolver)
    model = SimpleNamespace(huggingface_model_repo="a")
    draft = SimpleNamespace(huggingface_model_repo="b", model_path="folder")
    config: Any = SimpleNamespace(model_config=model, draft_model_config=draft, own="own")
    for room in (None, SimpleNamespace(spares=1)):
        slots = room
        pipeline: Any = speculative_decoding._draft_pipeline(config, 7, "tokenizer")
        assert pipeline.arguments == ("own", "model", 7, "adapters", "tokenizer")
        assert not any(replica.records_tokens for replica in pipeline.replicas)
    assert checked == [("a", "b")] * 2
    slots = SimpleNamespace(spares=0)
    with pytest.raises(ConfigError, match="folder has recurrent states, and no memory is left"):
        speculative_decoding._draft_pipeline(config, 7, "tokenizer")
    config.draft_model_config = None
    with pytest.raises(ConfigError, match="there is no draft model"):
        speculative_decoding._draft_pipeline(config, 7, "tokenizer")


def test_a_text_of_a_draft_is_no_answer() -> None:
    (context,) = contexts_of(np.random.default_rng(0), 3)
    text = DraftedText.of(context, LONGEST)
    text.update(1)
    output = text.to_generation_output()
    assert (output.request_id, output.tokens, output.is_done) == (context.request_id, [], False)
