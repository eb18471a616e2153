"""Look-up in recent answers: what it finds, what it keeps, and for whom."""

from __future__ import annotations

import numpy as np
import pytest

from max.interfaces import GenerationStatus
from max.pipelines import TextContext
from max.pipelines.generation.drafts.drafter import DraftersInTurn
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.drafts.recent_answers import MATCH, PLACES, RecentAnswersDrafter
from tests.pipelines.test_drafts import pipeline_of


def context(prompt, answer=(), salt="", adapter="") -> TextContext:
    made = TextContext(tokens=np.array(prompt), max_length=9999, cache_salt=salt, adapter=adapter)
    for token in answer:
        made.update(int(token))
    return made


def found(answers, tokens, most) -> list[list[int]]:
    """What follows the longest run of at least `MATCH` tokens, in one of the last answers that has it."""
    ends = []
    for number, answer in enumerate(answers):
        for end in range(MATCH, len(answer)):
            length = 0
            while (
                length < min(end, len(tokens), 32)
                and answer[end - 1 - length] == tokens[-1 - length]
            ):
                length += 1
            if length >= MATCH:
                ends.append((number, end, length))
    ends = ends[-PLACES:]
    best = max((length for *_, length in ends), default=0)
    return [answers[number][end : end + most] for number, end, length in ends if length == best]


def test_what_is_found() -> None:
    draw, hits = np.random.default_rng(0), 0
    for _ in range(300):
        drafter = RecentAnswersDrafter()
        answers = [draw.integers(0, 2, draw.integers(1, 30)).tolist() for _ in range(4)]
        for answer in answers:
            drafter.learn(context([7], answer))
        tokens = draw.integers(0, 2, draw.integers(1, 40)).tolist()
        expected = found(answers, tokens, 5)
        got = list(drafter.propose(context(tokens), 5))
        hits += bool(got)
        assert got == (expected[-1] if expected else [])
    assert hits > 100


def test_other_keys_and_weights_find_nothing() -> None:
    drafter = RecentAnswersDrafter()
    drafter.learn(context([1], range(20, 40), salt="a", adapter="x"))
    for salt, adapter, expected in (
        ("a", "x", [24, 25]), ("b", "x", []), ("", "x", []), ("a", "", []), ("a", "y", []),
    ):  # fmt: skip
        one = context([20, 21, 22, 23], salt=salt, adapter=adapter)
        assert list(drafter.propose(one, 2)) == expected


def test_memory_is_bounded() -> None:
    drafter, draw = RecentAnswersDrafter(most_tokens=100), np.random.default_rng(1)
    answers = [draw.integers(0, 50, draw.integers(5, 40)).tolist() for _ in range(60)]
    for answer in answers:
        drafter.learn(context([1], answer))
        assert drafter.tokens <= 100
        kept = sum(map(len, (a for *_, a in drafter._answers)))
        assert kept == drafter.tokens
        assert sum(map(len, drafter._places.values())) <= drafter.tokens
    drafter.learn(context([1], range(101)))
    assert drafter.tokens == kept, "a longer answer is not kept"
    while drafter._answers:
        drafter._drop(*drafter._answers.popleft())
    assert not drafter._places and not drafter.tokens
    drafter.learn(context([1], range(MATCH)))
    assert not drafter._answers, "nothing follows its only run"


def test_the_first_drafter_with_a_guess_drafts() -> None:
    told = []

    class Told(LookupDrafter):
        def __init__(self, name: str, tokens) -> None:
            super().__init__()
            self.name, self.tokens = name, tokens

        def propose(self, context, most):
            return self.tokens[:most]

        def observe(self, context, right_tokens, more=0):
            told.append((self.name, right_tokens, more))

        def forget(self, request_id):
            told.append((self.name, "forget"))

        def learn(self, context):
            told.append((self.name, "learn"))

        def read(self, contexts):
            told.append((self.name, "read"))

        def rewind(self, context):
            told.append((self.name, "rewind"))

    one, drafters = context([1, 2]), [Told("a", ()), Told("b", (5, 6)), Told("c", (7,))]
    drafter = DraftersInTurn(drafters)
    drafter.observe(one, [0])
    assert drafter.propose(one, 9) == (5, 6)
    drafter.observe(one, [0], 3)
    assert drafter.propose_all([one, context([3])], [1, 2]) == [(5,), (5, 6)]
    assert told == [("b", [0], 3)]
    told.clear()
    drafter.rewind(one), drafter.read([one]), drafter.learn(one), drafter.forget(one.request_id)
    drafter.observe(one, [0])
    assert told == [(n, k) for k in ("rewind", "read", "learn", "forget") for n in "abc"]
    assert DraftersInTurn(drafters[:1]).propose(one, 3) == ()


@pytest.mark.parametrize("status", [GenerationStatus.END_OF_SEQUENCE, GenerationStatus.CANCELLED])
def test_ended_requests_are_learned(status) -> None:
    from max.pipelines.generation.drafts.draft_steps import DraftSteps

    drafter = RecentAnswersDrafter()
    steps, one = DraftSteps(drafter, 4, None), context([1, 2], range(9))
    one.status = status
    steps.propose([one])
    assert drafter.tokens == 9


def test_a_server_forgets_answers_with_its_prefixes() -> None:
    pipeline = pipeline_of(4)
    drafter = RecentAnswersDrafter()
    pipeline.replicas[0].drafts._drafter = DraftersInTurn([drafter, LookupDrafter()])
    drafter.learn(context([1], range(20, 40)))
    pipeline.forget_prefixes()
    assert not drafter.tokens and not drafter._places
    assert drafter.propose(context([20, 21, 22, 23]), 2) == ()


@pytest.mark.parametrize("drafter_class", [LookupDrafter, RecentAnswersDrafter])
def test_a_look_up_keeps_its_last_draft_of_each_request(drafter_class) -> None:
    drafter, tokens = drafter_class(), [1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4]
    drafter.learn(context([7], tokens))
    first, second = context(tokens), context(tokens)
    for each in (first, second):
        assert drafter.propose(each, 1) == [6]
        assert drafter.alternatives(each, 1)[0] == [5]
    # both read texts as they are: neither tokens that were right nor those that were removed matter
    drafter.observe(first, [])
    drafter.rewind(first)
    kept = drafter.kind(first), drafter.alternatives(first, 1)
    assert kept == (drafter.kind(second), drafter.alternatives(second, 1))
    drafter.forget(first.request_id)
    assert (drafter.kind(first), drafter.alternatives(first, 1)) == (0, [])
    assert (drafter.kind(second), drafter.alternatives(second, 1)) == kept
    drafter.forget(first.request_id)
