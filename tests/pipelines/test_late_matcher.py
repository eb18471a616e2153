"""A matcher that follows tokens within strings later says what llguidance's matcher says."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from max.pipelines.structured import grammar
from max.pipelines.structured.known_masks.late_matcher import MOST_UNREAD, LateMatcher
from max.pipelines.structured.known_masks.string_rules import string_rules
from max.pipelines.structured.known_masks.string_run import StringRun
from max.pipelines.structured.step_masks import fill, unpack_mask
from max.pipelines.structured.validation import first_line
from tests.pipelines.test_known_masks import Tokens, choice, schema_of, tokens  # noqa: F401


class Counted:
    """A matcher that counts how often its native code runs, and the most tokens that it follows at once.

    Args:
        matcher: The matcher.
    """

    def __init__(self, matcher: Any) -> None:
        self.matcher, self.runs, self.most = matcher, 0, 0

    def __getattr__(self, name: str) -> Any:
        self.runs += 1
        return getattr(self.matcher, name)

    def consume_tokens(self, given: list[int]) -> bool:
        self.runs, self.most = self.runs + 1, max(self.most, len(given))
        return self.matcher.consume_tokens(given)


def late(own: str, given: Tokens) -> tuple[LateMatcher, Counted, Any]:
    texts, vocabulary, _ = given
    rules = string_rules(own)
    assert rules is not None
    counted = Counted(grammar.matcher_of(vocabulary, own))
    return LateMatcher(counted, StringRun(rules, texts)), counted, counted.matcher.deep_copy()


@pytest.mark.parametrize("seed", range(24))
def test_random_texts(tokens: Tokens, seed: int) -> None:  # noqa: F811
    """Followed one by one or several at once, asked now and then, also by copies, up to a token that is not allowed."""
    texts, _, size = tokens
    draw = random.Random(seed)
    own = grammar.of_json_schema(json.dumps(schema_of(draw)))
    found, counted, expected = late(own, tokens)
    mask = np.zeros((1, (size + 31) // 32), np.int32)
    steps = taken = 0
    while steps < 200:
        fill(expected, mask[0])
        found.run.learn(mask[0])
        chosen = list[int]()
        ahead = expected.deep_copy()
        for _ in range(draw.choice([1, 2, 5])):
            fill(ahead, mask[0])
            allowed = unpack_mask(mask, size)[0]
            if not allowed.any() or ahead.is_stopped():
                break
            token = choice(draw, texts, allowed)
            if draw.random() < 0.01:
                token = int(draw.choice(np.flatnonzero(~allowed)))
            chosen.append(token)
            if not ahead.consume_token(token):
                break
        if not chosen:
            break
        if found.take_plain(chosen):
            taken += 1
            assert not ahead.is_error() and not ahead.compute_ff_tokens()
            assert all(map(expected.consume_token, chosen))
        else:
            for token in chosen:
                assert found.consume_token(token) == expected.consume_token(token)
        asked = found.deep_copy() if draw.random() < 0.2 else found
        if expected.is_error():
            assert asked.is_error()
            assert first_line(asked.get_error()) == first_line(expected.get_error())
            return
        assert not asked.is_error() and asked.compute_ff_tokens() == expected.compute_ff_tokens()
        if draw.random() < 0.1:
            other = np.zeros_like(mask)
            fill(asked, other[0])
            fill(expected, mask[0])
            np.testing.assert_array_equal(other, mask)
            assert asked.is_accepting() == expected.is_accepting()
        steps += len(chosen)
    assert counted.most <= MOST_UNREAD


def test_the_matcher_seldom_runs_within_a_string(tokens: Tokens) -> None:  # noqa: F811
    texts, _, size = tokens
    found, counted, expected = late(grammar.of_json_schema('{"type": "string"}'), tokens)
    mask, draw = np.zeros((1, (size + 31) // 32), np.int32), random.Random(0)
    quote = texts.texts.index(b'"')
    for matcher in (found, expected):
        assert matcher.consume_token(quote)
    for turn in range(300):
        fill(expected, mask[0])
        allowed = unpack_mask(mask, size)[0] & texts.plain
        token = int(draw.choice(np.flatnonzero(allowed).tolist()))
        assert found.consume_token(token) and expected.consume_token(token)
        assert not found.is_error() and found.compute_ff_tokens() == []
        if turn == 0:
            fill(expected, mask[0])
            found.run.learn(mask[0])
            counted.runs = 0
    # once for each of the most tokens, and for what is asked after those
    assert counted.runs <= 4 * (300 // MOST_UNREAD)
    assert counted.most == MOST_UNREAD
    assert found.consume_token(quote) and expected.consume_token(quote)
    assert found.is_stopped() and expected.is_stopped()


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_token_that_is_none_is_left_to_the_matcher(tokens: Tokens, token: int) -> None:  # noqa: F811
    texts, _, size = tokens
    found, _, expected = late(grammar.of_json_schema('{"type": "string"}'), tokens)
    for text in (b'"', b"a"):
        assert found.consume_token(texts.texts.index(text))
        assert expected.consume_token(texts.texts.index(text))
    mask = np.zeros((1, (size + 31) // 32), np.int32)
    fill(expected, mask[0])
    found.run.learn(mask[0])
    assert found.run.mask() is not None and not found.take_plain([token])
    outcomes = [outcome(matcher, token) for matcher in (found, expected)]
    assert outcomes[0] == outcomes[1] and outcomes[0] is not True


def outcome(matcher: Any, token: int) -> object:
    try:
        return matcher.consume_token(token)
    except Exception as error:
        return type(error)
