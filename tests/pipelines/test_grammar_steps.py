"""Several steps of a batch with grammars in one call give the same tokens as single steps."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.driver import Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef
from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationOutput
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.config.model_config import SamplingConfig
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps import grammar_steps
from max.pipelines.generation.steps.decode_loop import (
    DecodeLoop,
    TokenTables,
    constrained_step_graph,
)
from max.pipelines.generation.steps.grammar_steps import GrammarSteps, _KnownMask
from max.pipelines.generation.steps.step_reader import _ends
from max.pipelines.sampling.graph import token_sampler
from max.pipelines.structured import grammar, step_masks
from max.pipelines.structured.constraint import Constraints
from tests.security.test_panics import panic

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
STRING = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
LISTS = {
    "type": "array", "minItems": 2, "maxItems": 6,
    "items": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]},
}  # fmt: skip
GRAMMARS = [
    None,
    grammar.of_json_schema(json.dumps(STRING)),
    grammar.of_json_schema(json.dumps(LISTS)),
    grammar.of_regex(r"([a-m ]{2}|[n-z]{1,3})+[.]"),
    grammar.of_regex(r"(.|\n)*"),
    grammar.of_regex(r"[0-9]{3}[a-z]{4,9}"),
    grammar.of_choices(["yes it is", "no", "ja"]),
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 1.4, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "ignore_eos": True},
]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=256, max_batch_size=6,
        max_num_steps=5,
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine changes no plan."""
    monkeypatch.setattr(grammar_steps, "_PATIENCE_S", 5.0)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The number of sampled tokens and of valid ones of each request of each call."""
    counts: list[tuple[int, int]] = []
    real = GrammarSteps.follow

    def follow(self: Any, run: Any, batch: Any, tokens: Any) -> Any:
        valid = real(self, run, batch, tokens)
        counts.extend(
            (len(a), len(b))
            for a, b, context in zip(tokens, valid, batch, strict=True)
            if context.matcher is not None
        )
        return valid

    monkeypatch.setattr(GrammarSteps, "follow", follow)
    return counts


def request(pipeline: Any, number: int, own: str | None, **options: Any) -> TextContext:
    log_probabilities = options.pop("log_probabilities", 0)
    return TextContext(
        request_id=RequestID(f"{number}"), max_length=90, grammar=own,
        tokens=np.array(pipeline.tokenizer.encode_now("Once upon a time: " * (number + 1))),
        eos_token_ids=set(pipeline.tokenizer.eos_token_ids), log_probabilities=log_probabilities,
        sampling_params=SamplingParams(seed=number, **options),
    )  # fmt: skip


def answers(pipeline: Any, contexts: list[TextContext]) -> list[list[int]]:
    engine = Engine(pipeline, limits_of(pipeline))
    for context in contexts:
        engine.submit(context)
    streamed: dict[Any, list[int]] = {context.request_id: [] for context in contexts}
    while not engine.idle:
        for outcome in engine.step():
            assert isinstance(outcome, TextGenerationOutput), outcome
            streamed[outcome.request_id] += outcome.tokens
    assert all(context.failure is None for context in contexts)
    assert [*streamed.values()] == [context.generated_tokens.tolist() for context in contexts]
    pipeline.kv_managers[0].pages.check()
    return [*streamed.values()]


@pytest.mark.parametrize("seed", range(6))
def test_they_equal_single_steps(
    pipeline: Any,
    followed: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    draw = random.Random(seed)
    kinds = [(draw.choice(GRAMMARS[1:]), draw.choice(OPTIONS))]
    kinds += [(draw.choice(GRAMMARS), draw.choice(OPTIONS)) for _ in range(seed % 4)]
    if seed == 5:
        kinds.append((GRAMMARS[1], {"temperature": 0.0, "repetition_penalty": 1.2}))

    def contexts() -> list[TextContext]:
        return [request(pipeline, n, own, **more) for n, (own, more) in enumerate(kinds)]

    found = answers(pipeline, contexts())
    assert followed or seed == 5  # with penalties there are single steps only
    monkeypatch.setattr(GrammarSteps, "plan", lambda *given: None)
    assert answers(pipeline, contexts()) == found


def test_a_string_takes_several_steps_in_a_call(
    pipeline: Any, followed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = grammar.of_regex(r"[a-zA-Z0-9 .,\n]{200,}")
    started: list[int] = []
    real = Constraints.start_next_masks

    def start(self: Any, batch: Any) -> Any:
        started.append(1)
        return real(self, batch)

    monkeypatch.setattr(Constraints, "start_next_masks", start)
    for options in OPTIONS[:2]:
        followed.clear()
        started.clear()
        (tokens,) = answers(pipeline, [request(pipeline, 1, own, **options)])
        assert len(followed) < len(tokens) / 2
        # the masks after a call of several steps are known
        assert len(started) <= 1 + sum(sampled == 1 for sampled, _ in followed)
        # the first tokens and the last ones may change the mask
        assert sum(valid for _, valid in followed) > 0.9 * sum(count for count, _ in followed)


def test_tokens_after_a_changed_mask_are_dropped(
    pipeline: Any, followed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks before each capital letter differ, and what changes a mask is never learned."""
    monkeypatch.setattr(_KnownMask, "record", lambda *given: None)
    own = grammar.of_regex(r"([a-z]{24}[A-Z])+")
    contexts = lambda: [request(pipeline, n, own, temperature=1.0) for n in range(2)]  # noqa: E731
    found = answers(pipeline, contexts())
    dropped = sum(sampled > valid for sampled, valid in followed)
    assert dropped > 0 and all(valid > 0 for _, valid in followed)
    monkeypatch.setattr(GrammarSteps, "plan", lambda *given: None)
    assert answers(pipeline, contexts()) == found


@pytest.mark.parametrize(
    "options",
    [{"log_probabilities": 1}, {"frequency_penalty": 0.5}, {"min_new_tokens": 200}],
    ids=str,
)
def test_what_needs_more_than_masks_gets_single_steps(
    pipeline: Any, followed: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    (tokens,) = answers(pipeline, [request(pipeline, 0, GRAMMARS[4], temperature=0.0, **options)])
    assert tokens and not followed


def test_a_slow_mask_is_not_waited_for(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(
        "max.pipelines.structured.next_masks.NextMasks.wait",
        lambda self, seconds: waits.append(seconds) or False,  # pyright: ignore
    )
    (tokens,) = answers(
        pipeline, [request(pipeline, 0, GRAMMARS[4], temperature=0.0, ignore_eos=True)]
    )
    # each wait is followed by 16 steps that do not
    assert len(waits) == -(-(len(tokens) - 1) // 17)


def test_masks_of_another_batch_are_not_taken(pipeline: Any) -> None:
    """A second request joins, and the first one leaves, between look-ahead and step."""
    own = GRAMMARS[4]
    first, second = (request(pipeline, n, own, temperature=0.0) for n in range(2))
    (alone,) = answers(pipeline, [request(pipeline, 1, own, temperature=0.0)])
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(first)
    for _ in range(3):
        engine.step()
    engine.submit(second)
    engine.step()
    engine.cancel(first.request_id)
    while not engine.idle:
        engine.step()
    assert second.generated_tokens.tolist() == alone


@pytest.mark.parametrize("seed", range(3))
def test_the_graph_samples_under_masks_and_ends_the_run(seed: int) -> None:
    rng, batch, vocabulary = np.random.default_rng(seed), seed + 1, 37
    session, device = InferenceSession(), DeviceRef.CPU()
    model = session.load(constrained_step_graph(device))
    config = SamplingConfig(enable_structured_output=True, in_dtype=DType.float32)
    sampler = session.load(token_sampler(config, device))
    lengths, seeds = np.full(batch, 9, np.uint32), rng.integers(0, 2**63, batch).astype(np.uint64)
    tokens, history = np.zeros(batch, np.int64), np.full((5, batch), -9)
    most, done, again = np.array([[1, 9]], np.uint32), np.zeros(1, np.int64), np.ones(1, np.uint8)
    interrupted = np.zeros(1, np.uint8)
    for step in range(5):
        logits = rng.standard_normal((batch, vocabulary)).astype(np.float32)
        if step == 3:
            logits[0] = np.nan
        params = [
            rng.choice([0.0, 1.0], batch).astype(np.float32), rng.choice([1, 0, 5], batch),
            np.full(batch, 0.9, np.float32), np.full(batch, 0.01, np.float32),
        ]  # fmt: skip
        allowed = rng.random((batch, vocabulary)) < 0.3
        allowed[:, 5] = True
        if step == 3:
            allowed[:] = True
        kept = rng.random((batch, vocabulary)) < 0.7
        tensors = list(map(Tensor.from_numpy, [logits, *params, seeds.copy(), allowed]))
        (expected,) = (out.to_numpy() for out in sampler.execute(*tensors))
        interrupted[0] = step == 2
        model.execute(
            *map(
                Tensor.from_numpy,
                [
                    logits, *params, allowed, kept, np.zeros(batch, np.uint64),
                    np.zeros((batch, 0), np.int64), interrupted, tokens, lengths, most, seeds,
                    history, done, again,
                ],
            )
        )  # fmt: skip
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(history[step], expected)
        assert done[0] == step + 1 and (lengths == 10 + step).all()
        stays = all(kept[row, token] for row, token in enumerate(expected))
        assert again[0] == (stays and not interrupted[0] and (expected >= 0).all() and step < 4)


@pytest.mark.parametrize(("batch", "vocabulary"), [(1, 4095), (2, 4096)])
def test_tables_of_another_shape_are_refused(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, batch: int, vocabulary: int
) -> None:
    real = DecodeLoop.run

    def run(self: Any, inputs: Any, contexts: Any, steps: int, reader: Any, tables: Any) -> Any:
        table = Tensor.from_numpy(np.ones((batch, vocabulary), np.bool_))
        return real(self, inputs, contexts, steps, reader, TokenTables(tables.allowed, table))

    context = request(pipeline, 0, GRAMMARS[4], temperature=0.0)
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(context)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeLoop, "run", run)
        outcomes = [outcome for _ in range(3) for outcome in engine.step()]
    problems = [str(error) for one in outcomes if (error := getattr(one, "error", None))]
    assert len(problems) == 1 and f"got shape [{batch}, {vocabulary}]" in problems[0]


def test_the_reader_delivers_no_token_that_may_be_dropped(pipeline: Any) -> None:
    free, own = request(pipeline, 0, None), request(pipeline, 1, GRAMMARS[4])
    pipeline.prepare(own)
    assert _ends(free) == frozenset(free.eos_token_ids) and _ends(own) is None


def test_recurrent_models_take_single_steps(
    pipeline: Any, followed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token that is dropped would stay in their states."""
    monkeypatch.setattr(pipeline.replicas[0]._grammar_steps, "_repeats", False)
    answers(pipeline, [request(pipeline, 0, GRAMMARS[4], temperature=0.0)])
    assert {*followed} == {(1, 1)}


def test_ordinary_tokens_are_whole_characters(pipeline: Any) -> None:
    tokenizer = pipeline.tokenizer
    found = Constraints(tokenizer.delegate).ordinary_tokens(tokenizer.eos_token_ids)
    assert len(found) == len(tokenizer.delegate)
    special = {*tokenizer.delegate.all_special_ids}
    for token in random.Random(0).sample(range(len(found)), 400):
        text = tokenizer.decode_now([token], skip_special_tokens=False)
        whole = "\ufffd" not in text and token not in special
        assert found[token] == (whole and text != "" and not {*'"\\<'} & {*text})


@pytest.mark.parametrize("seed", range(3))
def test_masks_after_tokens_are_those_of_advanced_matchers(pipeline: Any, seed: int) -> None:
    """Up to the first token that may not follow, and not after the end of the answer."""
    draw, constraints = random.Random(seed), Constraints(pipeline.tokenizer.delegate)
    words, vocabulary = constraints.words(), len(pipeline.tokenizer.delegate)

    def mask(matcher: Any) -> np.ndarray:
        line = np.zeros(words, np.int32)
        matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)
        return line

    contexts = [request(pipeline, n, draw.choice(GRAMMARS)) for n in range(12)]
    tokens: list[list[int]] = []
    expected: list[list[np.ndarray]] = []
    for context in contexts:
        constraints.begin(context)
        own, masks = [], []
        matcher = None if context.matcher is None else context.matcher.deep_copy()
        for _ in range(draw.randint(1, 6)):
            allowed = np.arange(vocabulary)
            if matcher is not None and draw.random() < 0.9:
                allowed = np.unpackbits(mask(matcher).view(np.uint8), bitorder="little").nonzero()[
                    0
                ]
            own.append(int(draw.choice(allowed.tolist() or [0])))
            if matcher is not None and (
                matcher.consume_token(own[-1]) and own[-1] not in context.eos_token_ids
            ):
                masks.append(mask(matcher))
            else:
                matcher = None
        tokens.append(own)
        expected.append(masks)
    found = constraints.masks_after(contexts, tokens)
    assert found.shape == (12, max(map(len, tokens)), words)
    for row, masks in enumerate(expected):
        for step, line in enumerate(masks):
            np.testing.assert_array_equal(found[row, step], line)
        assert not found[row, len(masks) :].any()
    # the requests themselves have not moved
    assert found.tobytes() == constraints.masks_after(contexts, tokens).tobytes()


@pytest.mark.parametrize("fails", ["slowly", "at once"])
def test_masks_after_tokens_that_fail_end_their_request_alone(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(step_masks, "MASK_S", 0.1)
    go = threading.Event()

    class Failing:
        def __init__(self, matcher: Any) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str) -> Any:
            return getattr(self.matcher, name)

        def deep_copy(self) -> Failing:
            return Failing(self.matcher.deep_copy())

        def unsafe_compute_mask_ptr_with_draft_token(self, *given: Any) -> None:
            if fails == "at once":
                raise panic()
            while not go.is_set():
                pass

    constraints = Constraints(pipeline.tokenizer.delegate)
    contexts = [request(pipeline, n, GRAMMARS[4]) for n in range(3)]
    for context in contexts:
        constraints.begin(context)
    tokens = [[pipeline.tokenizer.encode_now("a")[-1]] * 3 for _ in contexts]
    expected = constraints.masks_after(contexts, tokens)
    contexts[1].set_matcher(Failing(contexts[1].matcher))
    try:
        found = constraints.masks_after(contexts, tokens)
    finally:
        go.set()
    matchers: list[Any] = [context.matcher for context in contexts]
    assert [matcher.is_error() for matcher in matchers] == [False, True, False]
    np.testing.assert_array_equal(found[::2], expected[::2])
    # afterwards its place has no masks
    assert not constraints.masks_after(contexts, tokens)[1].any()


def test_what_changes_a_mask_is_learned_and_forgotten() -> None:
    ordinary = np.arange(200) < 100
    known = _KnownMask(ordinary)
    known.record(150, True)
    known.record(7, False)
    known.record(7, True)
    assert known.kept[150] and not known.kept[7] and known.kept[8]
    for token in range(10, 10 + grammar_steps._MOST_KNOWN - 1):
        known.record(token, False)
    assert not known.kept[7]
    known.record(99, False)
    np.testing.assert_array_equal(known.kept, ordinary)
    np.testing.assert_array_equal(ordinary, np.arange(200) < 100)
