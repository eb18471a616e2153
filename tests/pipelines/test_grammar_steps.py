"""Several steps of a batch with grammars in one call give the same tokens as single steps."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import deque
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
from max.pipelines.generation.steps import step_reader
from max.pipelines.generation.steps.decode_loop import (
    DecodeLoop,
    TokenTables,
    constrained_step_graph,
)
from max.pipelines.generation.steps.grammar_steps import GrammarSteps
from max.pipelines.generation.steps.step_reader import StepReader, _Run
from max.pipelines.sampling.graph import token_sampler
from max.pipelines.structured import grammar, step_masks
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.kept_tokens import KeptTokens
from max.pipelines.structured.known_masks import string_rules
from max.pipelines.structured.step_masks import MaskThread, MaskWork, StepMasks
from tests.security.test_panics import panic

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
STRING = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
LISTS = {
    "type": "array", "minItems": 2, "maxItems": 6,
    "items": {"anyOf": [{"type": "string", "maxLength": 9}, {"type": "integer"}]},
}  # fmt: skip
LONG = {"type": "string", "minLength": 60}
OBJECTS = {
    "type": "array", "minItems": 3,
    "items": {
        "type": "object", "required": ["name", "kind"],
        "properties": {"name": {"type": "string", "minLength": 9}, "kind": {"enum": ["a", "bc"]}},
    },
}  # fmt: skip
GRAMMARS = [
    None,
    grammar.of_json_schema(json.dumps(STRING)),
    grammar.of_json_schema(json.dumps(LISTS)),
    grammar.of_regex(r"([a-m ]{2}|[n-z]{1,3})+[.]"),
    grammar.of_regex(r"(.|\n)*"),
    grammar.of_regex(r"[0-9]{3}[a-z]{4,9}"),
    grammar.of_choices(["yes it is", "no", "ja"]),
    grammar.of_json_schema(json.dumps(LONG)),
    grammar.of_json_schema(json.dumps(OBJECTS)),
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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """The number of steps of each call with grammars, and whether the masks of the last one came too late."""
    found: list[tuple[int, bool]] = []
    real = DecodeLoop.run

    def run(self: Any, inputs: Any, batch: Any, steps: int, reader: Any, *given: Any) -> Any:
        result = real(self, inputs, batch, steps, reader, *given)
        if given[0] is not None:
            found.append((len(result.history), bool(result.history[-1].min() < 0)))
        return result

    monkeypatch.setattr(DecodeLoop, "run", run)
    return found


def request(pipeline: Any, number: int, own: str | None, **options: Any) -> TextContext:
    log_probabilities = options.pop("log_probabilities", 0)
    return TextContext(
        request_id=RequestID(f"{number}"), max_length=90, grammar=own,
        tokens=np.array(pipeline.tokenizer.encode_now("Once upon a time: " * (number + 1))),
        eos_token_ids=set(pipeline.tokenizer.eos_token_ids), log_probabilities=log_probabilities,
        sampling_params=SamplingParams(seed=number, **options),
    )  # fmt: skip


def answers(
    pipeline: Any, contexts: list[TextContext], delivered: list[int] | None = None
) -> list[list[int]]:
    """The answers, as clients see them; `delivered` receives the tokens that a reader delivers during calls."""
    streamed: dict[Any, list[int]] = {context.request_id: [] for context in contexts}

    def deliver(outputs: list[TextGenerationOutput]) -> None:
        for output in outputs:
            streamed[output.request_id] += output.tokens
            assert delivered is not None
            delivered.extend(output.tokens)

    reader = None if delivered is None else StepReader(deliver)
    engine = Engine(pipeline, limits_of(pipeline), reader)
    for context in contexts:
        engine.submit(context)
    while not engine.idle:
        for outcome in engine.step():
            assert isinstance(outcome, TextGenerationOutput), outcome
            streamed[outcome.request_id] += outcome.tokens
    if reader is not None:
        pipeline.read_steps(None)
        reader.close()
    assert all(context.failure is None for context in contexts)
    assert [*streamed.values()] == [context.generated_tokens.tolist() for context in contexts]
    pipeline.kv_managers[0].pages.check()
    return [*streamed.values()]


def single_steps(pipeline: Any, contexts: list[TextContext]) -> list[list[int]]:
    """The answers without calls, and with matchers that follow each token at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarSteps, "plan", lambda *given: None)
        patch.setattr(string_rules, "string_rules", lambda own: None)
        return answers(pipeline, contexts)


@pytest.mark.parametrize("seed", range(12))
def test_they_equal_single_steps(pipeline: Any, calls: list[tuple[int, bool]], seed: int) -> None:
    draw = random.Random(seed)
    kinds = [(draw.choice(GRAMMARS[1:]), draw.choice(OPTIONS))]
    kinds += [(draw.choice(GRAMMARS), draw.choice(OPTIONS)) for _ in range(seed % 4)]
    if seed >= 8:  # strings, in which masks are known
        kinds = [(draw.choice(GRAMMARS[-2:]), more) for _, more in kinds]
    if seed == 5:
        kinds.append((GRAMMARS[1], {"temperature": 0.0, "repetition_penalty": 1.2}))

    def contexts() -> list[TextContext]:
        return [request(pipeline, n, own, **more) for n, (own, more) in enumerate(kinds)]

    found = answers(pipeline, contexts())
    assert calls or seed == 5  # with penalties there are single steps only
    assert single_steps(pipeline, contexts()) == found
    assert answers(pipeline, contexts(), []) == found


def test_tokens_under_a_grammar_are_delivered_while_the_call_runs(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_reader, "SHORTEST_INTERVAL_S", 1e-5)
    contexts = [request(pipeline, n, GRAMMARS[4], temperature=0.0) for n in range(2)]
    delivered: list[int] = []
    answers(pipeline, contexts, delivered)
    # how many depends on when the reader's thread runs
    assert delivered


def test_nothing_is_delivered_of_what_other_requests_lost(pipeline: Any) -> None:
    """No row of a step whose masks failed for one of the requests, nor of a later step."""
    lost = [3]
    run = _Run(
        [request(pipeline, n, GRAMMARS[4]) for n in range(2)], [frozenset(), frozenset()],
        np.arange(10).reshape(5, 2), 0.0, lambda: lost[0],
    )  # fmt: skip
    found: dict[Any, list[int]] = {}
    reader = StepReader(lambda outputs: found.update({o.request_id: o.tokens for o in outputs}))
    assert reader._read(run) and run.last
    assert [*found.values()] == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize("pattern", [r"[a-zA-Z0-9 .,\n]{200,}", r"([a-z]{4}[0-9]{3}[A-Z]){9,}"])
def test_a_call_takes_several_steps_though_masks_change(
    pipeline: Any, calls: list[tuple[int, bool]], pattern: str
) -> None:
    for options in OPTIONS[:2]:
        contexts = lambda: [  # noqa: E731
            request(pipeline, n, grammar.of_regex(pattern), **options)  # noqa: B023
            for n in range(2)
        ]
        # after tokens that may force text the first call ends
        answers(pipeline, contexts())
        calls.clear()
        found = answers(pipeline, contexts())
        # the others end where a mask came too late, as on a busy machine, or at the last room
        whole = sum(steps == 5 or late for steps, late in calls)
        assert whole > 0.7 * len(calls)
        assert sum(steps for steps, _ in calls) >= len(found[0]) - 1
        assert single_steps(pipeline, contexts()) == found


@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
def test_few_masks_of_strings_are_computed(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Within a string the mask is known, also beside other texts, and the text is that of single steps."""
    own = grammar.of_json_schema({"type": "string", "minLength": 300})
    computed: list[object] = []
    real = step_masks.fill

    def count(matcher: Any, line: Any) -> None:
        computed.append(matcher)
        real(matcher, line)

    for others in ([], [None], [GRAMMARS[5]], [own, GRAMMARS[2]]):
        contexts = lambda: [  # noqa: E731
            request(pipeline, n, each, **options)
            for n, each in enumerate([own, *others])  # noqa: B023
        ]
        found = answers(pipeline, contexts())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step_masks, "fill", count)
            computed.clear()
            assert answers(pipeline, contexts()) == found
        known = sum(map(len, found[:1])) - len(computed)
        assert others[1:] or known > 0.6 * len(found[0])
        assert single_steps(pipeline, contexts()) == found


def test_known_masks_are_those_of_the_request(pipeline: Any) -> None:
    """A request with the number of an earlier one, or whose tokens were removed, does not get its masks."""
    one = grammar.of_json_schema({"type": "string", "minLength": 300})
    other = grammar.of_json_schema({"type": "array", "items": {"type": "string", "minLength": 300}})
    expected = [
        single_steps(pipeline, [request(pipeline, 0, own, temperature=1.0)]) for own in (one, other)
    ]
    for _ in range(2):
        for own, answer in zip((one, other), expected, strict=True):
            context = request(pipeline, 0, own, temperature=1.0)
            engine = Engine(pipeline, limits_of(pipeline))
            engine.submit(context)
            while not engine.idle:
                engine.step()
            assert [context.generated_tokens.tolist()] == answer


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_masks_that_come_too_late_are_waited_for(
    pipeline: Any,
    calls: list[tuple[int, bool]],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    contexts = lambda: [  # noqa: E731
        *(request(pipeline, n, GRAMMARS[4], **options) for n in range(2)),
        request(pipeline, 2, None, temperature=1.0),
    ]
    expected = single_steps(pipeline, contexts())
    real = step_masks.fill

    def slowly(matcher: Any, line: Any) -> None:
        time.sleep(0.02)
        real(matcher, line)

    monkeypatch.setattr(step_masks, "fill", slowly)
    assert answers(pipeline, contexts()) == expected
    assert any(late for _, late in calls)


def test_forced_text_costs_no_step(pipeline: Any, calls: list[tuple[int, bool]]) -> None:
    """A call ends after a token after which text was forced before, so that the text is appended."""
    properties = {name: {"type": "boolean"} for name in ("first_name", "second_name", "a_third")}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    context = lambda: request(  # noqa: E731
        pipeline, 0, grammar.of_json_schema(json.dumps(schema)), temperature=0.0
    )
    steps: list[int] = []
    for plans in (False, True, True):
        engine = Engine(pipeline, limits_of(pipeline))
        engine.submit(one := context())
        with pytest.MonkeyPatch.context() as patch:
            if not plans:
                patch.setattr(GrammarSteps, "plan", lambda *given: None)
            while not engine.idle:
                engine.step()
        text = pipeline.tokenizer.decode_now(
            one.generated_tokens.tolist(), skip_special_tokens=True
        )
        assert list(json.loads(text)) == [*properties]
        steps.append(sum(engine.decode_steps.times.counts))
    assert calls and steps[2] == steps[0] <= steps[1]


class Failing:
    """A matcher whose mask fails after a number of tokens.

    Args:
        matcher: Another one.
        fail: What happens then.
        left: The number of tokens.
    """

    def __init__(self, matcher: Any, fail: Any, left: int) -> None:
        self.matcher, self.fail, self.left = matcher, fail, left

    def __getattr__(self, name: str) -> Any:
        return getattr(self.matcher, name)

    def deep_copy(self) -> Failing:
        return Failing(self.matcher.deep_copy(), self.fail, self.left)

    def consume_token(self, token: int) -> bool:
        self.left -= 1
        return self.matcher.consume_token(token)

    def unsafe_compute_mask_ptr(self, *given: Any) -> None:
        if self.left < 1:
            self.fail()
        self.matcher.unsafe_compute_mask_ptr(*given)


@pytest.mark.parametrize(
    ("fails", "left"),
    [("at once", 0), ("at once", 1), ("at once", 2), ("at once", 7), ("slowly", 0), ("slowly", 3)],
)
def test_a_mask_that_fails_ends_its_request_alone(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, fails: str, left: int
) -> None:
    """With the tokens and the message of single steps; the others get the tokens that they have without it."""
    if fails == "slowly":
        monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    problem = panic()  # takes CPU time that is not the mask's

    def run(failing: bool) -> tuple[list[list[int]], list[str]]:
        go = threading.Event()

        def fail() -> None:
            if fails == "at once":
                raise problem
            while not go.is_set():
                hashlib.pbkdf2_hmac("sha256", b"", b"", 9999)  # without Python's lock

        contexts = [request(pipeline, n, GRAMMARS[4], temperature=0.0) for n in range(3)]
        seen: dict[Any, list[int]] = {context.request_id: [] for context in contexts}
        reader = StepReader(
            lambda outputs: [seen[o.request_id].extend(o.tokens) for o in outputs] and None
        )
        engine = Engine(pipeline, limits_of(pipeline), reader)
        for context in contexts:
            engine.submit(context)
        engine.step()
        if failing:
            contexts[1].set_matcher(Failing(contexts[1].matcher, fail, left))
        try:
            while not engine.idle:
                for outcome in engine.step():
                    if isinstance(outcome, TextGenerationOutput):
                        seen[outcome.request_id] += outcome.tokens
        finally:
            go.set()
            pipeline.read_steps(None)
            reader.close()
        while pipeline._constraints._thread.overdue:
            time.sleep(0.001)
        pipeline.kv_managers[0].pages.check()
        found = [context.generated_tokens.tolist() for context in contexts]
        for own, tokens in zip(seen.values(), found, strict=True):
            assert own == tokens[1 : 1 + len(own)] and len(own) >= len(tokens) - 2
        return found, [str(context.failure or "") for context in contexts]

    expected, _ = run(False)
    found, problems = run(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GrammarSteps, "plan", lambda *given: None)
        alone, same = run(True)
    assert found[::2] == expected[::2] and not problems[0] and not problems[2]
    assert found[1][:left] == expected[1][:left] and len(found[1]) == left + 1 + 1
    assert problems == same and found[1][:-1] == alone[1][:-1]
    assert ("take more than" if fails == "slowly" else "package fails") in problems[1]


def test_an_error_of_the_thread_fails_the_batch(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, row: int) -> None:
        raise RuntimeError("broken thread")

    context = request(pipeline, 0, GRAMMARS[4], temperature=0.0)
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(context)
    monkeypatch.setattr("max.pipelines.structured.call_masks._CallWork._find_forced", broken)
    outcomes = [outcome for _ in range(2) for outcome in engine.step()]
    assert ["broken thread"] == [str(e) for one in outcomes if (e := getattr(one, "error", None))]


def test_what_nobody_waits_for_does_not_hold_up_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_masks, "MASK_S", 0.05)
    go, thread = threading.Event(), MaskThread()

    class Slow:
        def unsafe_compute_mask_ptr(self, *given: Any) -> None:
            while not go.is_set():
                pass

    class Quick:
        def unsafe_compute_mask_ptr(self, *given: Any) -> None:
            pass

    masks, failed = np.zeros((1, 1), np.int32), list[int]()
    slow = MaskWork(masks, deque([(Slow(), 0)]))
    thread.submit(slow)
    thread.leave(slow)
    quick = MaskWork(masks, deque([(Quick(), 0)]))
    StepMasks(thread, quick, lambda row, matcher: failed.append(row)).result()
    assert quick.finished.is_set() and not failed and thread.overdue == 1
    go.set()
    assert slow.finished.wait(60) and thread.overdue == 0


@pytest.mark.parametrize(
    "options",
    [{"log_probabilities": 1}, {"frequency_penalty": 0.5}, {"min_new_tokens": 200}],
    ids=str,
)
def test_what_needs_more_than_masks_gets_single_steps(
    pipeline: Any, calls: list[tuple[int, bool]], options: dict[str, Any]
) -> None:
    (tokens,) = answers(pipeline, [request(pipeline, 0, GRAMMARS[4], temperature=0.0, **options)])
    assert tokens and not calls


def test_masks_of_another_batch_are_not_taken(pipeline: Any) -> None:
    """A second request joins, and the first one leaves."""
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
        # the tables of the last step are not complete
        logits = rng.standard_normal((batch, vocabulary)).astype(np.float32)
        if step == 3:
            logits[0] = np.nan
        params = [
            rng.choice([0.0, 1.0], batch).astype(np.float32), rng.choice([1, 0, 5], batch),
            np.full(batch, 0.9, np.float32), np.full(batch, 0.01, np.float32),
        ]  # fmt: skip
        prepared = np.array([step + (step != 4)])
        allowed = rng.random((batch, vocabulary)) < 0.3
        allowed[:, 5] = True
        if step == 3:
            allowed[:] = True
        kept = rng.random((batch, vocabulary)) < 0.7
        tensors = list(map(Tensor.from_numpy, [logits, *params, seeds.copy(), allowed]))
        words = np.zeros((batch, 8), np.uint8)
        words[:, : (vocabulary + 7) // 8] = np.packbits(allowed, axis=1, bitorder="little")
        (expected,) = (out.to_numpy() for out in sampler.execute(*tensors))
        if step == 4:
            expected = np.full(batch, -1)
        interrupted[0] = step == 2
        model.execute(
            *map(
                Tensor.from_numpy,
                [
                    logits, *params, words.view(np.int32), kept, np.zeros(batch, np.uint64),
                    np.zeros((batch, 0), np.int64), interrupted, tokens, lengths, most, seeds,
                    history, done, again, prepared,
                ],
            )
        )  # fmt: skip
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(history[step], expected)
        assert done[0] == step + 1 and (lengths == 10 + step).all()
        stays = all(kept[row, token] for row, token in enumerate(expected))
        assert again[0] == (stays and not interrupted[0] and (expected >= 0).all() and step < 4)


def test_the_table_is_read_after_the_wait_for_it(tmp_path: Path) -> None:
    """The launch that reads the table of a step has a barrier between it and the wait, which one worker does."""
    code = (
        "from max.engine import InferenceSession; from max.graph import DeviceRef\n"
        "from max.pipelines.generation.steps.decode_loop import constrained_step_graph\n"
        "InferenceSession().load(constrained_step_graph(DeviceRef.CPU()))"
    )
    env = {**os.environ, "MAX_DUMP": "program", "MAX_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    # "   2 |  select(v9, v10, v4, …)": a bar marks a launch that begins after all before it have ended
    launches = re.findall(r"^ +\d+ (\|?) +([\w.+]+)\((.*)\)$", done.stderr, re.M)
    names = [name for _, name, _ in launches]
    wait, read = names.index("step.ready"), names.index("sample.allowed")
    assert wait < read and any(bar for bar, _, _ in launches[wait + 1 : read + 1])
    # the table is the first operand after the numbers of steps
    table = launches[wait][2].split(", ")[6]
    assert table in launches[read][2].split(", ")


@pytest.mark.parametrize(("batch", "vocabulary"), [(1, 4095), (2, 4096)])
def test_tables_of_another_shape_are_refused(
    pipeline: Any, monkeypatch: pytest.MonkeyPatch, batch: int, vocabulary: int
) -> None:
    real = DecodeLoop.run

    def run(
        self: Any, inputs: Any, contexts: Any, steps: int, reader: Any, own: Any, *more: Any
    ) -> Any:
        if own is not None:
            table = Tensor.from_numpy(np.ones((batch, vocabulary), np.bool_))
            own = TokenTables(own[0].allowed_tokens, table), own[1]
        return real(self, inputs, contexts, steps, reader, own, *more)

    context = request(pipeline, 0, GRAMMARS[4], temperature=0.0)
    engine = Engine(pipeline, limits_of(pipeline))
    engine.submit(context)
    with monkeypatch.context() as patch:
        patch.setattr(DecodeLoop, "run", run)
        outcomes = [outcome for _ in range(3) for outcome in engine.step()]
    problems = [str(error) for one in outcomes if (error := getattr(one, "error", None))]
    assert len(problems) == 1 and f"got shape [{batch}, {vocabulary}]" in problems[0]


def test_ordinary_tokens_are_whole_characters(pipeline: Any) -> None:
    tokenizer = pipeline.tokenizer
    found = Constraints(tokenizer.delegate).ordinary_tokens(tokenizer.eos_token_ids)
    assert len(found) == len(tokenizer.delegate)
    special = {*tokenizer.delegate.all_special_ids}
    for token in random.Random(0).sample(range(len(found)), 400):
        text = tokenizer.decode_now([token], skip_special_tokens=False)
        whole = "\ufffd" not in text and token not in special
        assert found[token] == (whole and text != "" and not {*'"\\<'} & {*text})


def test_what_is_kept_of_end_tokens_is_bounded(pipeline: Any) -> None:
    """Requests bring end tokens of their own, and each set has a vocabulary; the one in use is not made again."""
    tokenizer = pipeline.tokenizer
    constraints = Constraints(tokenizer.delegate)
    first = constraints.ordinary_tokens([0])
    for token in range(1, 40):
        constraints.ordinary_tokens([0, token])
        assert constraints.ordinary_tokens([0]) is first
    assert len(constraints._ordinary) == len(constraints._vocabularies) == 16


def test_what_is_known_of_masks_is_bounded(pipeline: Any) -> None:
    kept = KeptTokens(lambda ends: np.arange(70) < 50 + len(ends), 60)
    first = kept.after(np.array([1, 2], np.int32), frozenset())
    np.testing.assert_array_equal(first.flags, np.arange(60) < 50)
    first.learn(7, True)
    first.learn(55, False)
    assert not first.flags[7] and first.flags[8] and first.flags[55]
    assert kept.after(np.array([1, 2], np.int32), frozenset()) is first
    other = kept.after(np.array([1, 2], np.int32), frozenset([4]))
    np.testing.assert_array_equal(other.flags, np.arange(60) < 51)
    for token in range(3):
        assert other.flags[token]
        other.learn(token, True)
        assert other.flags[9] == (token < 2)
    other.learn(9, False)
    assert other.flags.nonzero()[0].tolist() == [9]
    for number in range(62):
        kept.after(np.array([1, 3 + number], np.int32), frozenset())
    assert kept.after(np.array([1, 2], np.int32), frozenset()) is first
    for number in range(64):
        kept.after(np.array([2, number], np.int32), frozenset())
    assert kept.after(np.array([1, 2], np.int32), frozenset()).flags[7]
