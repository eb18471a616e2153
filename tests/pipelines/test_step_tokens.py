"""What becomes of the tokens of a step, and the inputs that the next step keeps, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from max.driver import CPU, Tensor
from max.interfaces import GenerationStatus, LogProbabilities, SamplingParams
from max.pipelines import TextContext
from max.pipelines.core.exceptions import NotFiniteError, UserError
from max.pipelines.generation.steps.grammar_steps import GrammarSteps
from max.pipelines.generation.steps.prompt_logits import PromptLogits, wants_prompt_logits
from max.pipelines.generation.steps.reusable_inputs import (
    BatchInputs,
    ReusableInputs,
    has_same_requests,
)
from max.pipelines.generation.steps.step_tokens import (
    append_tokens,
    bounded_steps,
    fail_without_logits,
    jumps_ahead,
    last_logits,
    log_probabilities_of_step,
    steps_with_room,
    with_closing_tokens,
)
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.sampling.inputs import SamplingInputs

PROMPT, END = [1, 2, 3], 9


class Pattern:
    """The matcher of a grammar that forces some tokens of an answer; None: any may follow."""

    def __init__(self, *tokens: int | None, plain: bool = False) -> None:
        self.tokens, self.at, self.plain = tokens, 0, plain


class Grammars:
    """Follows patterns; an answer that leaves its pattern is an error."""

    def forced_tokens(self, context: Any) -> list[int]:
        forced: list[int] = []
        for token in context.matcher.tokens[context.matcher.at :] if context.matcher else ():
            if token is None:
                break
            forced.append(token)
        return forced

    def advance(self, context: Any, token: int) -> None:
        matcher = context.matcher
        if matcher is None:
            return
        if matcher.at < len(matcher.tokens):
            assert matcher.tokens[matcher.at] in (None, token)
        matcher.at += 1

    def take_plain(self, context: Any, tokens: Sequence[int]) -> bool:
        if context.matcher is not None and context.matcher.plain:
            context.matcher.at += len(tokens)
        return context.matcher is not None and context.matcher.plain


def request(matcher: Pattern | None = None, room: int = 30, **values: Any) -> TextContext:
    context = TextContext(
        max_length=len(PROMPT) + room, tokens=np.array(PROMPT), eos_token_ids={END}, **values
    )
    context.set_matcher(matcher)
    return context


def append(context: Any, tokens: Sequence[int], logs: Any = (), rewound: Any = ()) -> Any:
    grammars: Any = Grammars()
    outputs = append_tokens([context], [tokens], logs, grammars, rewound)
    return outputs[context.request_id]


@pytest.mark.parametrize(
    ("forced", "tokens", "answer", "kept"),
    [
        (None, [5, 0, 7], [5, 0, 7], 3),
        (None, [5, END, 6], [5, END], 2),
        ((None, 8, 4, None), [5], [5, 8, 4], 1),
        # a call of several steps has followed the grammar
        ((None, 8, 4, None), [5, 8, 4, 6], [5, 8, 4, 6], 4),
        ((None, None, 8, None), [5, 6, 8, 7], [5, 6, 8, 7], 4),
        # or has not, from the second token on
        ((None, 8, 4, None), [5, 3, 4], [5, 8, 4], 1),
        # what is forced replaces the first token; those after it are of another text
        ((8, 4, None), [5], [8, 4], 1),
        ((8, 4, None), [5, 4, 6], [8, 4], 1),
        ((8, None), [5, 6], [8], 1),
        ((8, 4, None), [8], [8, 4], 1),
        ((8, 4, None), [8, 4, 6], [8, 4, 6], 3),
        # the end within what is forced
        ((None, END, 4), [5], [5, END], 1),
        ((END, 4), [END, 4], [END], 1),
    ],
)
def test_tokens_that_a_grammar_forces(
    forced: tuple[int | None, ...] | None, tokens: list[int], answer: list[int], kept: int
) -> None:
    context = request(None if forced is None else Pattern(*forced))
    output = append(context, tokens)
    assert output.tokens == context.generated_tokens.tolist() == answer
    assert context.is_done is (END in answer)
    # the last token of the call is processed with those that were forced after it
    assert (context.start_idx, context.active_idx) == (2 + kept, 3 + len(answer))
    assert forced is None or context.matcher is not None
    assert context.matcher is None or context.matcher.at == len(answer)


def test_forced_tokens_end_where_the_context_does() -> None:
    context = request(Pattern(None, 8, 4, 5, 6), room=3)
    assert append(context, [5]).tokens == [5, 8, 4]
    assert context.status is GenerationStatus.MAXIMUM_LENGTH and context.matcher.at == 3


def test_what_a_grammar_is_known_to_allow_is_taken_at_once() -> None:
    matcher = Pattern(None, None, 4, plain=True)
    context = request(matcher)
    assert append(context, [5, 6]).tokens == [5, 6] and matcher.at == 2


def test_callers_that_see_each_token_get_no_forced_ones() -> None:
    def unchanged(*_: object) -> None:
        pass

    for values in (
        {"log_probabilities": 1},
        {"sampling_params": SamplingParams(logits_processors=[unchanged])},
    ):
        context = request(Pattern(None, 8, None), **values)
        assert not jumps_ahead(context)
        assert append(context, [5]).tokens == [5] and context.matcher.at == 1
    assert jumps_ahead(request(Pattern())) and not jumps_ahead(request())
    assert not jumps_ahead(cast(Any, SimpleNamespace(matcher=Pattern())))
    chunk = request(Pattern())
    chunk.set_token_indices(active_idx=2)
    assert not jumps_ahead(chunk)


@pytest.mark.parametrize("plain", [False, True])
def test_a_chunk_of_a_prompt_drops_its_token(plain: bool) -> None:
    context = request(Pattern(None, 8, plain=plain))
    context.set_token_indices(active_idx=2)
    assert append(context, [5]).tokens == [] and context.matcher.at == 0
    assert (context.start_idx, context.active_idx) == (2, 3)


@pytest.mark.parametrize("before", [0, 1])
def test_logits_without_a_number_end_a_request(before: int) -> None:
    contexts = [request(), request()]
    rows = [[5] * before + [-1, 6], [7]]
    grammars: Any = Grammars()
    outputs = append_tokens(contexts, rows, (), grammars)
    first, second = (outputs[context.request_id] for context in contexts)
    assert first.tokens == [5] * before and second.tokens == [7]
    assert contexts[0].status is GenerationStatus.CANCELLED and not contexts[1].is_done
    assert isinstance(contexts[0].failure, NotFiniteError)
    assert f"after token {len(PROMPT) + before} of" in str(contexts[0].failure)
    with pytest.raises(NotFiniteError):
        fail_without_logits(cast(Any, SimpleNamespace(request_id="a", current_length=3)))


def test_the_logs_of_each_step() -> None:
    contexts = [request(log_probabilities=1), request()]
    logs = [[LogProbabilities([-float(step)], [{step: -1.0}]), None] for step in (1, 2)]
    grammars: Any = Grammars()
    outputs = append_tokens(contexts, [[5, 6, 7], [5, 6, 7]], logs, grammars)
    first, second = (outputs[context.request_id] for context in contexts)
    assert [one.token_log_probabilities for one in first.log_probabilities] == [[-1.0], [-2.0]]
    assert first.tokens == second.tokens == [5, 6, 7] and second.log_probabilities is None


def test_states_that_went_back_read_their_tokens_again() -> None:
    """Such a request begins its next step where this one began, without a draft."""
    contexts = [request(), request()]
    for context in contexts:
        append(context, [4])
        context.set_draft([5, 6])
    for context in contexts:
        append(context, [5, 7], rewound={contexts[0].request_id})
    assert [context.draft_length for context in contexts] == [0, 0]
    begin = len(PROMPT)
    assert (contexts[0].start_idx, contexts[0].active_idx) == (begin, begin + 3)
    assert (contexts[1].start_idx, contexts[1].active_idx) == (begin + 2, begin + 3)
    assert contexts[0].all_tokens.tolist() == contexts[1].all_tokens.tolist() == [*PROMPT, 4, 5, 7]


# -- the number of steps


def test_steps_with_room() -> None:
    context = request()
    assert steps_with_room(9, context, 8) == 5
    for most, longest, later, found in ((9, 20, 0, 9), (9, 8, 0, 5), (9, 8, 2, 3), (9, 4, 0, 1)):
        assert steps_with_room(most, context, longest, later) == found
    for longest, later in ((3, 0), (8, 5), (2, 0)):
        with pytest.raises(ValueError, match=rf"has 3 tokens, and the context holds {longest}"):
            steps_with_room(9, context, longest, later)


def limit(**values: Any) -> Any:
    """A limit on reasoning that notes what it is asked."""
    calls: list[Any] = []

    def bounded(steps: int, generated: int) -> int:
        calls.append((steps, generated))
        return values.get("bound", steps)

    def forced(tokens: Any, decode: Any) -> int | None:
        calls.append((tokens.tolist(), decode(tokens)))
        return values.get("forced")

    def observe(tokens: Any, decode: Any) -> None:
        calls.append((tokens.tolist(), decode(tokens[:1])))

    return SimpleNamespace(
        calls=calls, bounded_steps=bounded, forced_token=forced, observe=observe,
        sets_temperature=values.get("temperature", False), temperature=None,
    )  # fmt: skip


TOKENIZER = SimpleNamespace(decode_now=lambda tokens: "".join(map(str, tokens)))


def reasoning(**values: Any) -> TextContext:
    context = request()
    append(context, [5, 6])
    context._reasoning_limit = limit(**values)
    return context


def test_what_needs_single_steps() -> None:
    plain, chunk, drafted, echo = request(), request(), request(), request(log_probabilities=1)
    chunk.set_token_indices(active_idx=2)
    drafted.set_draft([5])
    echo.log_probabilities_echo = True
    penalized = request(sampling_params=SamplingParams(frequency_penalty=0.5))
    for context, found in ((plain, 7), (chunk, 1), (drafted, 1), (echo, 1), (penalized, 1)):
        assert bounded_steps(7, context, None) == found
        assert bounded_steps(2, context, None) == min(found, 2)
        assert bounded_steps(1, context, None) == 1
    assert wants_prompt_logits(echo)
    append(echo, [5])
    assert not wants_prompt_logits(echo) and bounded_steps(7, echo, None) == 7
    assert not wants_prompt_logits(request(log_probabilities=1))
    alone = request()
    alone.log_probabilities_echo = True
    assert not wants_prompt_logits(alone)
    assert not wants_prompt_logits(
        cast(Any, SimpleNamespace(log_probabilities=1, is_initial_prompt=True))
    )


def test_steps_within_a_reasoning_budget() -> None:
    bounded = reasoning(bound=3)
    assert bounded_steps(7, bounded, TOKENIZER) == 3
    assert bounded.reasoning_limit is not None
    assert cast(Any, bounded.reasoning_limit).calls == [(7, 2)]
    warm = reasoning(temperature=True)
    assert bounded_steps(7, warm, TOKENIZER) == 7
    assert cast(Any, warm.reasoning_limit).calls == [([5, 6], "5"), (7, 2)]


def test_closing_tokens_replace_chosen_ones() -> None:
    chosen = np.array([4, 5, 6, 7], np.int64)
    chunk = reasoning(forced=8)
    chunk.reset()
    chunk.set_token_indices(active_idx=2)
    batch = [request(), reasoning(), reasoning(forced=8), chunk]
    tokens = with_closing_tokens(chosen, batch, TOKENIZER)
    assert tokens.tolist() == [4, 5, 8, 7] and chosen.tolist() == [4, 5, 6, 7]
    assert cast(Any, batch[2].reasoning_limit).calls == [([5, 6], "56")]
    assert cast(Any, chunk.reasoning_limit).calls == []
    # without a token that differs the array is the model's
    assert with_closing_tokens(chosen, [reasoning(forced=4), *batch[:2]], TOKENIZER) is chosen


# -- log-probabilities


def test_log_probabilities_of_a_step() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(4, 6)).astype(np.float32)  # [rows, vocab], two of the first prompt
    logs = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    last = rows[[1, 2, 3]]
    outputs = ModelOutputs(
        Tensor.from_numpy(rows),
        Tensor.from_numpy(last),
        Tensor.from_numpy(np.array([0, 2, 3, 4], np.uint32)),
    )
    assert last_logits(outputs).to_numpy().tolist() == last.tolist()
    plain = ModelOutputs(Tensor.from_numpy(last))
    assert last_logits(plain).to_numpy().tolist() == last.tolist()
    echo, one, silent = (
        request(log_probabilities=2, log_probabilities_echo=True),
        request(log_probabilities=1, logged_tokens=(0,)),
        request(),
    )
    tokens = np.array([5, 4, 3], np.int64)

    def of(outputs: ModelOutputs, batch: list[TextContext]) -> list[list[float] | None]:
        found = log_probabilities_of_step(outputs, batch, tokens)
        return [None if entry is None else entry.token_log_probabilities for entry in found]

    # a chunk of two tokens, whose rows predict the second and the third
    echo.set_token_indices(active_idx=2)
    first, second, third = of(outputs, [echo, one, silent])
    np.testing.assert_allclose(first, [logs[0, 2], logs[1, 3]], rtol=1e-5)
    np.testing.assert_allclose(second, [logs[2, 4]], rtol=1e-5)
    assert third is None
    # the end of the prompt, whose last row predicts the chosen token
    echo.set_token_indices(start_idx=1, active_idx=3)
    first, _, _ = of(outputs, [echo, one, silent])
    np.testing.assert_allclose(first, [logs[0, 3], logs[1, 5]], rtol=1e-5)
    # the tokens that a request names are returned besides the likeliest one
    (entry,) = log_probabilities_of_step(plain, [one], np.array([4]))
    assert entry is not None and set(entry.top_log_probabilities[0]) == {int(last[0].argmax()), 4, 0}  # fmt: skip
    with pytest.raises(ValueError, match="does not return"):
        of(plain, [echo, one, silent])


class Second:
    """A model that shares the adapters of another one."""

    def __init__(self) -> None:
        self.shared: list[object] = []

    def share_adapters(self, first: object) -> None:
        self.shared.append(first)


@pytest.mark.parametrize(("free", "fits"), [(None, True), (100, True), (99, False)])
def test_the_model_of_prompts(free: int | None, fits: bool) -> None:
    config: Any = SimpleNamespace(
        enable_echo=False, free_memory=lambda: free, model_config=SimpleNamespace(weights_size=lambda: 100)
    )  # fmt: skip
    first: Any = Second()
    loaded: list[Second] = []

    def load() -> Any:
        loaded.append(Second())
        return loaded[-1]

    echo = request(log_probabilities=1, log_probabilities_echo=True)
    second = PromptLogits(config, first, load)
    assert second.model_of([request()], first) is first and not loaded
    if not fits:
        with pytest.raises(UserError, match=r"weights of 100[\s\S]*and 99"):
            second.model_of([request(), echo], first)
        assert not loaded
        return
    found = second.model_of([request(), echo], first)
    assert found is second.load() is loaded[0] and len(loaded) == 1
    assert loaded[0].shared == [first]
    config.enable_echo = True
    assert PromptLogits(config, first, load).load() is first and len(loaded) == 1


# -- inputs that a later step updates


def test_the_same_requests() -> None:
    a, b = object(), object()
    assert has_same_requests([a, b], [a, b]) and has_same_requests([], [])
    for batch in ([a], [b, a], [a, b, a], [a, [a]]):
        assert not has_same_requests(batch, [a, b])


def test_inputs_of_a_batch_are_advanced() -> None:
    calls: list[Any] = []
    cache: Any = SimpleNamespace(
        get_runtime_inputs=lambda batch, *steps: calls.append(("new", *steps)) or len(calls),
        advance=lambda last, batch: calls.append(("advance", last)) or len(calls),
    )
    inputs = BatchInputs(cache, CPU())
    batch = [request(), request(sampling_params=SamplingParams(temperature=0.5, seed=4))]
    found = [inputs.of_cache(batch, steps) for steps in (1, 1, 2, 1)]
    assert calls == [("new",), ("advance", 1), ("new", 2), ("advance", 2)] and found == [1, 2, 3, 4]
    kept = inputs.of_sampling(batch)
    for step in (0, 1, 2):
        made = kept if step == 0 else inputs.of_sampling(batch, step)
        expected = SamplingInputs.of(batch, CPU(), step)
        assert made is kept
        for own, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(own.to_numpy(), other.to_numpy())
    inputs.of_cache(batch, 1)
    assert calls[-1] == ("advance", 4)
    # another batch has its own
    inputs.of_cache(batch[:1], 1)
    assert calls[-1] == ("new",)
    turned = inputs.of_sampling(batch[::-1])
    assert inputs.of_sampling(batch) is not turned
    inputs.of_cache(batch[::-1], 1)
    assert calls[-1] == ("new",)


def test_which_batches_may_keep_their_inputs() -> None:
    batch = [request(), request()]
    inputs: Any = object()
    tokens = Tensor.from_numpy(np.zeros(2, np.int64))
    reusable = ReusableInputs.of(batch, inputs, tokens)
    assert reusable.ends == [4, 4] and reusable.inputs is inputs and reusable.tokens is tokens
    assert not reusable.precedes(batch) and not reusable.fits(batch)
    for context in batch:
        append(context, [5])
    assert reusable.precedes(batch) and reusable.fits(batch)
    for other in (batch[:1], batch[::-1], [*batch, request()]):
        assert not reusable.precedes(other) and not reusable.fits(other)
    append(batch[0], [6])
    # tokens without a step come with the next one
    ahead = request()
    of_one = ReusableInputs.of([ahead], inputs, tokens)
    append(ahead, [5])
    ahead.jump_ahead(6)
    assert not of_one.precedes([ahead]) and not of_one.fits([ahead])
    # one token further than the inputs, which still have its size
    assert not reusable.precedes(batch) and reusable.fits(batch)
    append(batch[1], [6])
    assert ReusableInputs.of(batch, inputs, tokens, 3).ends == [8, 8]
    batch[0].jump_ahead(7)
    assert not reusable.fits(batch)
    chunk = request()
    chunk.set_token_indices(active_idx=2)
    reusable = ReusableInputs.of([chunk], inputs, tokens)
    append(chunk, [0])
    assert reusable.ends == [-1] and not reusable.precedes([chunk]) and not reusable.fits([chunk])
    again = request()
    append(again, [5])
    reusable = ReusableInputs.of([again], inputs, tokens)
    # the same place, as the request's pages are computed anew
    append(again, [6])
    again.reset()
    assert not reusable.precedes([again]) and not reusable.fits([again])
    again.set_token_indices(start_idx=3, active_idx=4)
    assert not reusable.fits([again])


# -- calls of steps with grammars


@pytest.mark.parametrize(("words", "kept_words"), [(0, 1), (1, 1), (3, 3)])
def test_which_batches_have_calls_of_steps(words: int, kept_words: int) -> None:
    tables: list[Any] = []
    calls: list[Any] = []

    def token_tables(rows: int, vocabulary: int) -> Any:
        tables.append((rows, vocabulary))
        return f"tables {rows}", np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)

    def call_masks(batch: Any, jumps: Any, memory: Any, kept: Any, steps: int) -> str:
        calls.append((jumps, memory, steps))
        return "masks"

    constraints: Any = SimpleNamespace(
        ordinary_tokens=None, words=lambda: words, call_masks=call_masks
    )
    loop: Any = SimpleNamespace(token_tables=token_tables)
    steps = GrammarSteps(constraints, loop, 40)

    def decoding(matcher: Pattern | None = None, **values: Any) -> TextContext:
        context = request(matcher, **values)
        append(context, [5])
        return context

    plain = decoding(Pattern())
    assert steps.plan([plain, decoding()], 4) == ("tables 2", "masks")
    assert steps.plan([plain, decoding()], 4) == ("tables 2", "masks")
    assert steps.plan([plain], 4) == ("tables 1", "masks")
    assert tables == [(2, 40), (1, 40)]
    assert [(jumps, most) for jumps, _, most in calls] == [([True, False], 4)] * 2 + [([True], 4)]
    assert calls[0][1] is calls[1][1] is not calls[2][1]
    assert calls[0][1].words == kept_words
    prompt, drafted, logged = (
        request(),
        decoding(),
        decoding(log_probabilities=1),
    )
    drafted.set_draft([5])
    ahead = decoding()
    ahead.jump_ahead(6)
    chunk = request()
    chunk.set_token_indices(active_idx=1)
    penalized = decoding(sampling_params=SamplingParams(frequency_penalty=0.5))
    for other in (prompt, drafted, logged, ahead, chunk, penalized, reasoning()):
        assert steps.plan([plain, other], 4) is None
    assert steps.plan([decoding(), decoding()], 4) is None
    assert len(calls) == 3
