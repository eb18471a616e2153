"""Structured output matches its grammar, in batches where each request has its own grammar or none."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.driver import Tensor
from max.entrypoints.cli import cli
from max.entrypoints.cli.errors import report
from max.entrypoints.llm import LLM
from max.interfaces import (
    PipelineTask,
    RequestID,
    SamplingParams,
    TextGenerationRequest,
)
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core import InputError
from max.pipelines.core.exceptions import GrammarsWaitError
from max.pipelines.generation import replica
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.coroutines import run_async
from max.pipelines.generation.engine import Engine, Failure
from max.pipelines.generation.generation import Generation
from max.pipelines.generation.steps.grammar_steps import GrammarSteps
from max.pipelines.sampling.sampler import grammar_tokens
from max.pipelines.structured import grammar, step_masks
from max.pipelines.structured.compile_threads import MOST_OVERDUE
from max.pipelines.structured.step_masks import unpack_mask

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 3, "maximum": 250},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["city", "people", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny():
    config = PipelineConfig(
        model_path=str(TINY), max_length=256, max_batch_size=6, prefill_chunk_size=16,
        enable_in_flight_batching=True, quantization_encoding="float32",
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)


def new_context(tokenizer, text: str, params: SamplingParams, own_grammar: str | None, schema=None):
    context = run_async(
        tokenizer.new_context(
            TextGenerationRequest(
                request_id=RequestID(),
                model_name="",
                prompt=text,
                sampling_params=params,
                response_format=None
                if schema is None
                else {"type": "json_schema", "json_schema": schema},
            )
        )
    )
    context.grammar = own_grammar
    return context


def texts_of(tiny, contexts) -> list[str]:
    tokenizer, pipeline = tiny
    outputs = Generation.of(pipeline).run(contexts)
    return [tokenizer.decode_now(output.tokens, skip_special_tokens=True) for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 2.5])
def test_a_batch_of_different_grammars(tiny, temperature) -> None:
    """The request without a grammar gets the same text as alone; sampling at a high temperature stays within the
    grammars.
    """
    tokenizer, pipeline = tiny

    def contexts(only: int | None = None):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_new_tokens=220) for i in range(5)
        ]
        prompt = "Tell me of a city, at some length, with all that there is to know:"
        made = [
            new_context(tokenizer, prompt, params[0], None, SCHEMA),
            new_context(tokenizer, "x", params[1], grammar.of_regex(r"[0-9]{3}-(ab|\u00e9){2,4}")),
            new_context(tokenizer, prompt, params[2], None),
            new_context(tokenizer, "is it?", params[3], grammar.of_choices(["yes it is", "no", "ja"])),
            new_context(tokenizer, "y", params[4], grammar.of_grammar('root ::= "a" ("b" | "c")+ "!"')),
        ]  # fmt: skip
        return made if only is None else [made[only]]

    schema, regex, free, choice, gbnf = texts_of(tiny, contexts())
    value = json.loads(schema)
    assert set(value) == {"city", "people", "tags"} and 3 <= value["people"] <= 250
    assert len(value["city"]) <= 12 and set(value["tags"]) <= {"a", "b"}
    assert re.fullmatch(r"[0-9]{3}-(ab|\u00e9){2,4}", regex)
    assert choice in ("yes it is", "no", "ja")
    assert re.fullmatch("a[bc]+!?", gbnf)
    if temperature == 0:
        assert [free] == texts_of(tiny, contexts(only=2))
    assert pipeline.kv_managers[0].free_pages == pipeline.kv_managers[0].total_num_pages


GREEDY = [
    (None, {}),
    (r"(.|\n)*", {}),
    ("[a-m .]*", {}),
    ("[^e]*", {"top_k": 1, "temperature": 0.7}),
    ("[a-z ]*", {"min_new_tokens": 3}),
    ("[a-z ]*", {"logit_bias": {300: 4.0}}),
    ("[a-z ]*", {"repetition_penalty": 1.3}),
    ("[a-z ]*", {"temperature": 1.5, "top_k": 40}),
    (None, {"temperature": 1.5, "top_k": 40}),
]


BATCHES = [[kind] for kind in GREEDY] + [random.Random(seed).sample(GREEDY, 3) for seed in range(3)]


@pytest.mark.parametrize("number", range(len(BATCHES)))
def test_choices_that_a_grammar_allows_are_those_of_the_sampler(tiny, monkeypatch, number) -> None:
    kinds, numbers = BATCHES[number], random.Random(number)
    sampler = tiny[1].replicas[0]._sampler
    # steps of chunks and of requests with penalties among them go this way
    monkeypatch.setattr(GrammarSteps, "plan", lambda *given: None)
    steps: list[int] = []
    sample = sampler.sample
    monkeypatch.setattr(sampler, "sample", lambda *given: steps.append(1) or sample(*given))
    prompts = [f"Tell me {numbers.choice(['a story', 'of the sea', 'why 1 + 1'])}" for _ in kinds]

    def texts() -> list[str]:
        steps.clear()
        contexts = []
        for number, (pattern, options) in enumerate(kinds):
            params = SamplingParams(
                **{"max_new_tokens": 24, "temperature": 0.0, "seed": number, **options}
            )
            own = None if pattern is None else grammar.of_regex(pattern)
            contexts.append(new_context(tiny[0], prompts[number], params, own))
        return texts_of(tiny, contexts)

    found = texts()
    used = len(steps)
    monkeypatch.setattr(replica, "grammar_tokens", lambda *given: None)
    assert texts() == found
    assert used <= len(steps)
    if kinds in ([each] for each in GREEDY[1:4]):
        assert used == 0 and len(steps) == 24


def test_logits_that_are_no_numbers_are_left_to_the_sampler(tiny) -> None:
    context = new_context(tiny[0], "x", SamplingParams(temperature=0), grammar.of_choices(["no"]))
    tokens = Tensor.from_numpy(np.array([3], np.int64))
    for logits, bits, expected in (
        ([1.0, 5.0, 2.0, 9.0], 0b0111, 1),
        ([1.0, -np.inf, 1.0, 9.0], 0b0111, 0),
        ([1.0, 5.0, 2.0, 9.0], 0b1000, 3),
        ([1.0, np.nan, 2.0, 9.0], 0b0111, None),
        ([-np.inf, 5.0, 2.0, 9.0], 0b0001, None),
        ([1.0, 5.0, 2.0, 9.0], 0b0000, None),
        ([1.0, 5.0, 2.0, 9.0], 0b10000, None),
    ):
        given = Tensor.from_numpy(np.array([logits], np.float32))
        found = grammar_tokens(tokens, given, [context], 0, np.array([[bits]], np.int32))
        assert (None if found is None else found.to_numpy().tolist()) == (
            None if expected is None else [expected]
        )


def test_it_goes_on_after_a_preemption(tiny) -> None:
    tokenizer, pipeline = tiny
    one = new_context(
        tokenizer, "x", SamplingParams(temperature=0, max_new_tokens=60), None, SCHEMA
    )
    (expected,) = texts_of(tiny, [one])
    two = new_context(
        tokenizer, "x", SamplingParams(temperature=0, max_new_tokens=60), None, SCHEMA
    )
    generation = Generation.of(pipeline)
    tokens: list[int] = []
    for outputs, output in enumerate(generation.stream([two])):
        tokens += output.tokens
        if outputs in (0, 2):
            generation.scheduler.requeue(two)
    assert tokenizer.decode_now(tokens, skip_special_tokens=True) == expected
    assert generation.scheduler.preemptions >= 2


def test_the_documented_methods(tiny) -> None:
    tokenizer, pipeline = tiny
    free = new_context(tokenizer, "x", SamplingParams(), None)
    assert pipeline.initialize_bitmask([free]) is None
    bound = new_context(tokenizer, "x", SamplingParams(), grammar.of_choices(["no"]))
    bitmask = pipeline.initialize_bitmask([free, bound])
    assert bitmask.dtype == np.int32 and (bitmask == -1).all()
    pipeline.update_for_structured_output(free, bitmask, 0)
    pipeline.update_for_structured_output(bound, bitmask, 1)
    allowed = unpack_mask(bitmask, 4100)
    assert allowed[0].all() and not allowed[1, 4096:].any()
    texts = {tokenizer.decode_now([int(token)]) for token in np.flatnonzero(allowed[1])}
    assert texts == {"n", "no"} or texts == {"n"} or texts == {"no"}


def properties(count: int, required: int = 0) -> dict:
    names = [f"p{number}" for number in range(count)]
    return {
        "type": "object",
        "properties": dict.fromkeys(names, {"type": "string"}),
        "required": names[:required],
    }


@pytest.mark.parametrize(
    ("make", "given", "says"),
    [
        (grammar.of_json_schema, {"type": "thing"}, "JSON schema is invalid: .*thing"),
        (grammar.of_json_schema, "[]", "expected an object"),
        (grammar.of_json_schema, "{", "JSON schema is invalid"),
        (grammar.of_regex, "a(", "regular expression is invalid: .*unclosed group"),
        (grammar.of_choices, [], "not empty"),
        (grammar.of_regex, "a" * 300_000, "too long: its grammar has 300"),
        (grammar.of_regex, "\udc00", "not UTF-8"),
        (
            grammar.of_json_schema,
            properties(499),
            "an object of 499 optional properties",
        ),
        (
            grammar.of_json_schema,
            {"type": "object", "properties": {"a": {"allOf": [properties(499)]}}},
            "499 optional",
        ),
        (
            grammar.of_json_schema,
            {"items": [{"multipleOf": 100001}]},
            "multipleOf .* more than 100000",
        ),
        (
            grammar.of_json_schema,
            {"anyOf": [{"multipleOf": 60000}, {"multipleOf": 0.40001}]},
            "multipleOf",
        ),
        (grammar.of_json_schema, {"multipleOf": 1e30}, "multipleOf"),
        (grammar.of_grammar, 'start: %json {"multiple\\u004ff": 999983}', "multipleOf"),
        (grammar.of_grammar, "start: nothing", "grammar is invalid"),
        (grammar.of_grammar, "root ::= (", "grammar is invalid"),
    ],
)
def test_what_is_no_grammar(make, given, says) -> None:
    with pytest.raises(InputError, match=says):
        make(given)


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (grammar.of_json_schema, properties(498)),
        (grammar.of_json_schema, properties(700, required=202)),
        (grammar.of_json_schema, {"type": "number", "multipleOf": 0.01}),
        (grammar.of_json_schema, {"type": "object", "properties": {"multipleOf": {"type": "string"}}}),
        (grammar.of_grammar, 'start: "%json is a word" // %json {'),
    ],
)  # fmt: skip
def test_what_is_just_within_the_limits_can_be_followed(tiny, make, given) -> None:
    tokenizer, pipeline = tiny
    one = new_context(tokenizer, "x", SamplingParams(), make(given))
    pipeline.prepare(one)
    assert one.matcher is not None and not one.matcher.is_error()
    assert one.matcher.get_error() == ""


def test_a_grammar_that_cannot_be_followed_is_refused_before_its_first_batch(tiny) -> None:
    tokenizer, pipeline = tiny
    rules = [f'r{number}: "a" r{(number * 7 + 1) % 800} | "b"' for number in range(800)]
    starts = " | ".join(f"r{number}" for number in range(800))
    text = grammar.of_lark("\n".join([f"start: {starts}", *rules]))
    with pytest.raises(InputError, match=r"cannot be followed: .*2400 items; max is 2000"):
        pipeline.prepare(new_context(tokenizer, "x", SamplingParams(), text))


def test_masks_that_nothing_ends_take_four_threads_at_most(tiny, monkeypatch) -> None:
    """Then requests with a grammar are refused until one of them ends; those without one are not."""
    monkeypatch.setattr(step_masks, "MASK_S", 0.1)
    tokenizer, pipeline = tiny
    go = threading.Event()

    class Endless:
        def __init__(self, matcher) -> None:
            self.matcher = matcher

        def __getattr__(self, name: str):
            return getattr(self.matcher, name)

        def deep_copy(self) -> Endless:
            return Endless(self.matcher.deep_copy())

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            while not go.is_set():
                pass  # the time of its thread counts

    def prepared(text: str | None):
        context = new_context(tokenizer, "x", SamplingParams(temperature=0, max_new_tokens=4), text)
        pipeline.prepare(context)
        return context

    regex = grammar.of_regex("[a-z]{3}")
    try:
        for _ in range(MOST_OVERDUE):
            context = prepared(regex)
            context.set_matcher(Endless(context.matcher))
            engine = Engine(pipeline, limits_of(pipeline))
            engine.submit(context)
            ends = []
            while not engine.idle:
                ends += engine.step()
            assert isinstance(ends[-1], Failure)
        with pytest.raises(GrammarsWaitError, match="nothing ends them"):
            prepared(regex)
        assert len(texts_of(tiny, [prepared(None)])) == 1
    finally:
        go.set()
    end = time.monotonic() + 60
    while True:
        try:
            assert prepared(regex).matcher is not None
            break
        except GrammarsWaitError:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_mask_that_takes_too_long_fails_its_request_alone(tiny, monkeypatch) -> None:
    """The others of the batch get the texts that they get without it, those behind it included."""
    monkeypatch.setattr(step_masks, "MASK_S", 0.3)
    tokenizer, pipeline = tiny
    go, slow = threading.Event(), set()

    class Slow:
        """A matcher that works for long at its third mask."""

        def __init__(self, matcher, masks: list[int]) -> None:
            self.matcher, self.masks = matcher, masks

        def __getattr__(self, name: str):
            return getattr(self.matcher, name)

        def deep_copy(self) -> Slow:
            return Slow(self.matcher.deep_copy(), self.masks)

        def unsafe_compute_mask_ptr(self, pointer: int, size: int) -> None:
            self.masks.append(1)
            while len(self.masks) == 3 and not go.is_set():
                slow.add(threading.current_thread())
            self.matcher.unsafe_compute_mask_ptr(pointer, size)

    def contexts():
        params = SamplingParams(temperature=0, max_new_tokens=12)
        texts = [grammar.of_regex(f"[a-z]{{{count}}}") for count in (7, 8, 9)]
        made = [new_context(tokenizer, "x", params, text) for text in (texts[0], None, *texts[1:])]
        for context in made:
            pipeline.prepare(context)
        return made

    expected = texts_of(tiny, contexts())
    batch = contexts()
    batch[2].set_matcher(Slow(batch[2].matcher, []))
    engine = Engine(pipeline, limits_of(pipeline))
    for context in batch:
        engine.submit(context)
    tokens, failures = {context.request_id: [] for context in batch}, []
    try:
        while not engine.idle:
            for outcome in engine.step():
                if isinstance(outcome, Failure):
                    failures.append((outcome.request_id, str(outcome.error)))
                else:
                    tokens[outcome.request_id] += outcome.tokens
    finally:
        go.set()
    assert [request for request, _ in failures] == [batch[2].request_id]
    assert "cannot be followed: the tokens that may follow take more than 0.3 s" in failures[0][1]
    for row in (0, 1, 3):
        text = tokenizer.decode_now(tokens[batch[row].request_id], skip_special_tokens=True)
        assert text == expected[row]
    assert len(slow) == 1
    assert pipeline.kv_managers[0].free_pages == pipeline.kv_managers[0].total_num_pages


def test_a_grammar_that_fails_is_never_a_whole_answer(tiny) -> None:
    """Where the mask of a matcher fails it forbids nothing, so that the end of the sequence may be the next token."""
    tokenizer, pipeline = tiny
    one = new_context(tokenizer, "x", SamplingParams(), grammar.of_regex("[a-z]{9}"))
    pipeline.prepare(one)

    class Failed:
        def is_error(self) -> bool:
            return True

        def consume_token(self, token: int) -> bool:
            return False

        def get_error(self) -> str:
            return "too many expressions"

    one.set_matcher(Failed())
    end = min(one.eos_token_ids)
    one.update(end)
    assert one.is_done
    pipeline._constraints.advance(one, end)
    assert "too many expressions" in str(one.failure)


def test_a_bad_schema_is_an_error_of_the_request(tiny) -> None:
    with pytest.raises(InputError, match="JSON schema is invalid"):
        new_context(tiny[0], "x", SamplingParams(), None, {"type": "thing"})


@given(
    masks=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=2),
    vocabulary=st.integers(1, 80),
)
def test_masks_have_a_bit_a_token(masks: list[int], vocabulary: int) -> None:
    allowed = unpack_mask(np.array([masks, [-1, -1]], np.int32), vocabulary)
    for token in range(vocabulary):
        word = masks[token // 32] if token < 64 else (-1 if masks == [-1, -1] else 0)
        assert allowed[0, token] == bool(word >> (token % 32) & 1)
    assert allowed[1].all() and allowed.shape == (2, vocabulary)


def test_llm_and_max_generate(capsys) -> None:
    llm = LLM(PipelineConfig(model_path=str(TINY), max_length=128))
    (text,) = llm.generate("x", 30, use_tqdm=False, grammar=grammar.of_choices(["yes", "no"]))
    assert text in ("yes", "no")
    options = [
        "generate",
        "--model",
        str(TINY),
        "--prompt",
        "x",
        "--no-stats",
        "--max-length",
        "128",
    ]
    assert report(cli, [*options, "--regex", "[0-9]{3}"]) == 0
    assert re.fullmatch(r"[0-9]{3}\n", capsys.readouterr().out)
    assert report(cli, [*options, "--regex", "("]) == 2
    assert "regular expression is invalid" in capsys.readouterr().err
    assert report(cli, [*options, "--regex", "a", "--json-schema", "{}"]) == 2
    assert "give one" in capsys.readouterr().err
