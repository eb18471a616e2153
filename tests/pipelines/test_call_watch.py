"""Calls of several steps end when a draft would pay, and only then."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import PipelineTask, RequestID, SamplingParams, TextGenerationOutput
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.drafts import call_watch
from max.pipelines.generation.drafts.call_watch import CallWatch
from max.pipelines.generation.drafts.draft_steps import DraftSteps
from max.pipelines.generation.drafts.drafter import KINDS, Drafter, DraftersInTurn
from max.pipelines.generation.drafts.lengths import DraftLengths
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.recent_answers import RecentAnswersDrafter
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps import step_reader
from max.pipelines.generation.steps.decode_loop import DecodeLoop
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.structured import grammar

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


def context(tokens: Any, key: str = "", **values: Any) -> TextContext:
    named = {"request_id": RequestID(key)} if key else {}
    return TextContext(tokens=np.array(tokens), max_length=512, **named, **values)


class Lengths:
    """Notes what it is asked, and answers by the kind of a draft."""

    def __init__(self, pays: set[int]) -> None:
        self.pays, self.asked = pays, list[tuple[Any, ...]]()

    def length(self, *given: Any) -> int:
        self.asked.append(given)
        return int(given[-1] in self.pays)


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    new=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    answer=st.lists(st.integers(0, 5), min_size=5, max_size=30),
)
def test_a_match_is_the_kind_of_the_draft_that_is_proposed_then(
    tokens: list[int], new: list[int], answer: list[int]
) -> None:
    own, recent = LookupDrafter(), RecentAnswersDrafter()
    ended = context(answer[:1], "ended")
    for token in answer[1:]:
        ended.update(token)
    recent.learn(ended)
    for drafter in (own, recent):
        before, after = context(tokens, "one"), context(tokens + new, "one")
        found = drafter.match(before, np.array(tokens + new))
        assert bool(drafter.propose(after, 3)) == (found is not None)
        assert found is None or found == drafter.kind(after)
    assert Drafter.match(own, context(tokens), np.array(tokens)) is None


def test_a_watch_asks_the_drafters_in_turn() -> None:
    recent, own = RecentAnswersDrafter(), LookupDrafter()
    ended = context([9, 1, 2, 3, 4, 5], "ended")
    for token in (21, 22, 23, 24, 25, 26):
        ended.update(token)
    recent.learn(ended)
    parts = DraftersInTurn([recent, own]).parts
    one, two = context([1, 2, 7, 8, 1], "one"), context([50, 51, 52], "two")
    lengths: Any = Lengths({KINDS + 2})
    watch = CallWatch([one, None, two], parts, lengths)
    # 8, 1 and then 2 were there before: two tokens in a row, by the second drafter
    assert watch.pays([[2], [3], [53]])
    assert lengths.asked == [(one.request_id, 3, 0, 512 - 6 - 2, KINDS + 2)]
    # a guess of the first drafter that does not pay; the second one has none
    lengths.asked.clear()
    assert not watch.pays([[21, 22, 23, 24], [3, 3, 3, 3], [53, 54, 55, 56]])
    assert [given[-1] for given in lengths.asked] == [(4).bit_length()]
    # the second one has a guess that pays
    lengths.asked.clear()
    assert watch.pays([[21, 22, 23, 24, 7, 21, 22, 23, 24, 1, 2], [3] * 11, [53] * 11])
    assert [given[-1] for given in lengths.asked] == [KINDS + 2]
    lengths.pays = {KINDS + 4}
    assert watch.pays([[21, 22, 23, 24, 7, 21, 22, 23, 24], [3] * 9, [*range(53, 62)]])
    assert [given[-1] for given in lengths.asked[1:]] == [(4).bit_length(), KINDS + 4]
    assert not watch.pays([[99], [99], [99]]) and watch.seconds > 0


class OfKind(LookupDrafter):
    """Finds a draft of a kind."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self._kind = kind

    def match(self, context: Any, text: Any) -> int | None:
        return self._kind


@pytest.mark.parametrize("kind", [0, 1, KINDS - 2, KINDS - 1, KINDS, KINDS + 3])
def test_the_greatest_kind_has_all_that_are_greater(kind: int) -> None:
    lengths: Any = Lengths(set())
    assert not CallWatch([context([1, 2])], ((KINDS, OfKind(kind)),), lengths).pays([[3]])
    assert [asked[-1] for asked in lengths.asked] == [KINDS + min(kind, KINDS - 1)]


def test_a_watch_counts_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((1.0, 3.5, 10.0, 10.25))
    monkeypatch.setattr(call_watch, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    lengths: Any = Lengths(set())
    watch = CallWatch([context([1, 2])], (), lengths)
    assert watch.seconds == 0
    for seconds in (2.5, 2.75):
        assert not watch.pays([[3]]) and watch.seconds == seconds


def test_a_draft_without_room_does_not_pay() -> None:
    lengths: Any = Lengths({1})
    for length, room in ((6, 0), (7, 0), (8, 1)):
        one = TextContext(tokens=np.array([3, 4, 5]), max_length=length)
        lengths.asked.clear()
        pays = CallWatch([one], ((0, LookupDrafter()),), lengths).pays([[6, 3]])
        assert pays == bool(room) and [given[3] for given in lengths.asked] == [room] * bool(room)


def steps_of(drafters: list[Drafter], **values: Any) -> DraftSteps:
    drafts = DraftSteps(DraftersInTurn(drafters), 8, None, **values)  # type: ignore[arg-type]
    for _ in range(3):
        drafts.lengths.step([RequestID("one")], 0, 0, 0.01)
        drafts.lengths.step([RequestID("one"), RequestID("two")], 0, 0, 0.01)
    return drafts


class Stepping(LookupDrafter):
    takes_steps = True


def test_what_is_watched() -> None:
    plain = context([1, 2, 3], "one")
    drafts = steps_of([LookupDrafter()])
    assert drafts.watch([plain]) is not None
    assert steps_of([LookupDrafter(), Stepping()]).watch([plain]) is None, "it drafts each step"
    ruled = context([1, 2, 3], "two")
    ruled.set_matcher(object())
    watch = drafts.watch([ruled, plain])
    assert watch is not None and watch._requests == [None, plain]
    assert drafts.watch([ruled]) is None
    drafts.enabled = False
    assert drafts.watch([plain]) is None
    fresh = DraftSteps(LookupDrafter(), 8, None)  # type: ignore[arg-type]
    assert fresh.watch([plain]) is None, "first it is measured what a draft could save"


def test_the_time_of_a_watch_is_one_of_drafts() -> None:
    drafts = steps_of([LookupDrafter()])
    watch = drafts.watch([context([1, 2, 3], "one")])
    assert watch is not None
    credit = drafts.lengths._credit
    assert credit is not None
    watch.seconds = 0.004
    drafts.end_watch(watch)
    assert drafts.lengths._credit == pytest.approx(credit - 0.004)


def test_the_first_calls_after_a_draft_are_short() -> None:
    lengths, one = DraftLengths(8), [RequestID("one")]
    for _ in range(3):
        lengths.step(one, 0, 0, 0.01)
    assert lengths.may_draft(1) and lengths.plain_steps(1, is_watched=True) is None
    assert lengths.plain_steps(1) == 1
    lengths.step(one, 3, 2, 0.01)
    steps = list[int | None]()
    for _ in range(3):
        steps.append(lengths.plain_steps(1, is_watched=True))
        lengths.step(one, 0, 0, 0.01)
    assert steps == [1, 1, None]


@pytest.fixture(scope="module")
def pipeline() -> Any:
    config = PipelineConfig(
        model_path=TINY, quantization_encoding="float32", max_length=256, max_batch_size=3,
        speculative_method="ngram", num_speculative_tokens=8,
    )  # fmt: skip
    return PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]


def test_texts_are_those_without_drafts(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of free and of repeated text, of several requests, with a grammar among them; calls are watched and end early."""
    monkeypatch.setattr(step_reader, "SHORTEST_INTERVAL_S", 1e-5)
    watched, ended = list[bool](), [0]
    run, interrupt = DecodeLoop.run, DecodeLoop.interrupt

    def watched_run(self: Any, *given: Any) -> Any:
        watched.append(given[-1] is not None)
        return run(self, *given)

    def counted_interrupt(self: Any) -> None:
        ended[0] += 1
        interrupt(self)

    monkeypatch.setattr(DecodeLoop, "run", watched_run)
    monkeypatch.setattr(DecodeLoop, "interrupt", counted_interrupt)
    drafts = pipeline.replicas[0].drafts
    draw = random.Random(0)
    again = grammar.of_regex("(ab|cd){60,}")
    for number in range(6):
        prompts = [
            pipeline.tokenizer.encode_now("Once upon a time " * draw.randrange(1, 9))
            for _ in range(1 + number % 3)
        ]
        texts = list[list[list[int]]]()
        for enabled in (False, True):
            drafts.enabled = enabled
            seen: dict[RequestID, list[int]] = {}

            def note(outputs: Any, seen: dict[RequestID, list[int]] = seen) -> None:
                for output in outputs:
                    seen.setdefault(output.request_id, []).extend(output.tokens)

            reader = StepReader(note)
            engine = Engine(pipeline, limits_of(pipeline, are_steps_read=True), reader)
            requests = [
                context(
                    tokens, f"{number} {place}", grammar=again if place == 1 else None,
                    sampling_params=SamplingParams(
                        seed=number, temperature=0.0 if number % 2 else 1.0
                    ),
                    eos_token_ids=set(pipeline.tokenizer.eos_token_ids),
                )
                for place, tokens in enumerate(prompts)
            ]  # fmt: skip
            for one in requests:
                one.max_length = len(one.all_tokens) + 120
                engine.submit(one)
            while not engine.idle:
                for outcome in engine.step():
                    assert isinstance(outcome, TextGenerationOutput), outcome
                    note([outcome])
            pipeline.read_steps(None)
            reader.close()
            texts.append([one.generated_tokens.tolist() for one in requests])
            assert [seen[one.request_id] for one in requests] == texts[-1]
        assert texts[0] == texts[1]
    drafts.enabled = True
    assert any(watched) and not all(watched) and ended[0]
