"""Masks that are taken to be known within strings of JSON equal those that llguidance computes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from max.pipelines.structured import grammar
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.known_masks.string_rules import StringRules, string_rules
from max.pipelines.structured.known_masks.string_run import (
    MOST_CHARACTERS,
    StringRun,
    TokenTexts,
)
from max.pipelines.structured.step_masks import fill, unpack_mask

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
WORDS = ["a", "be", "stone", "naïve", "a/b", 'say "x"', "\t", "🙂", "longer than the others"]
PIECES = ["x", "é", "\n", '"', "\\", "🙂", "/", " and ", "日本", "end of it. "]
Tokens = tuple[TokenTexts, Any, int]


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    constraints = Constraints(_Delegate(tokenizer))
    texts = constraints._token_texts({2})
    return texts, constraints._vocabulary({2}), tokenizer.get_vocab_size()


class _Delegate:
    """What `Constraints` reads of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.backend_tokenizer = tokenizer

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()


def string_schema(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(5)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        return {"type": "string", "minLength": draw.randrange(90)}
    if kind == 2:
        return {"type": "string", "maxLength": draw.randrange(20, 200)}
    if kind == 3:
        least = draw.randrange(90)
        return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(1, 90)}
    return {"enum": draw.sample(WORDS, 3)}


def schema_of(draw: random.Random) -> dict[str, Any]:
    """A schema of a list of strings or of objects, also of properties with any name but some."""
    kind = draw.randrange(4)
    if kind == 0:
        items: dict[str, Any] = {
            "anyOf": [string_schema(draw) for _ in range(draw.randrange(1, 4))]
        }
    elif kind == 1:
        items = {
            "type": "object", "required": ["a", "stone"],
            "properties": {"a": string_schema(draw), "stone": string_schema(draw)},
        }  # fmt: skip
    elif kind == 2:
        items = {
            "type": "object", "properties": {name: {"type": "null"} for name in WORDS[:4]},
            "additionalProperties": string_schema(draw),
        }  # fmt: skip
    else:
        items = {}
    return {"type": "array", "minItems": 3, "items": items}


@pytest.mark.parametrize("seed", range(24))
def test_they_equal_those_of_random_texts(tokens: Tokens, seed: int) -> None:
    texts, vocabulary, size = tokens
    draw = random.Random(seed)
    own = grammar.of_json_schema(json.dumps(schema_of(draw)))
    rules = string_rules(own)
    assert rules is not None
    matcher, run, mask = grammar.matcher_of(vocabulary, own), StringRun(rules, texts), None
    mask = np.zeros((1, (size + 31) // 32), np.int32)
    promised = 0
    for _ in range(150):
        fill(matcher, mask[0])
        # a copy knows as much
        for known in (run.mask(), run.copy().mask()):
            if known is not None:
                np.testing.assert_array_equal(known, mask[0])
        if promised:
            assert run.mask() is not None
        run.learn(mask[0])
        allowed = unpack_mask(mask, size)[0]
        if not allowed.any() or matcher.is_stopped():
            break
        steps = draw.randrange(1, 4)
        if run.mask(steps) is not None:
            promised = max(promised, steps)
        token = choice(draw, texts, allowed)
        promised = promised - 1 if promised and run.plain[token] else 0
        assert matcher.consume_token(token)
        run.advance(token)


def choice(draw: random.Random, texts: TokenTexts, allowed: Any) -> int:
    """A token that goes on as a rule, or one of a few kinds."""
    found = np.flatnonzero(allowed & texts.plain if draw.random() < 0.8 else allowed & ~texts.plain)
    if not len(found):
        found = np.flatnonzero(allowed)
    return int(draw.choice(found.tolist()))


def tokens_of(draw: random.Random, texts: TokenTexts, text: bytes) -> list[int]:
    """Tokens of a text, drawn at each place."""
    by_text = {own: token for token, own in enumerate(texts.texts) if own}
    found, place = list[int](), 0
    while place < len(text):
        ways = [
            text[place:end] for end in range(place + 1, place + 9) if text[place:end] in by_text
        ]
        own = draw.choice(ways)
        found.append(by_text[own])
        place += len(own)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_they_equal_those_of_written_texts(tokens: Tokens, seed: int) -> None:
    """Texts of JSON, with escapes of all kinds, in the tokens of the tokenizer."""
    texts, vocabulary, size = tokens
    draw = random.Random(seed)
    least = draw.choice([0, 30, 60, 90])
    schema = {"type": "array", "items": {"type": "string", "minLength": least}}
    own = grammar.of_json_schema(json.dumps(schema))
    rules = string_rules(own)
    assert rules is not None
    matcher, run = grammar.matcher_of(vocabulary, own), StringRun(rules, texts)
    values = ["".join(draw.choices(PIECES, k=100)) for _ in range(3)]
    values[draw.randrange(3)] += "\x01 and so on"
    text = json.dumps(values, ensure_ascii=False)
    mask, known = np.zeros(((size + 31) // 32), np.int32), 0
    for token in tokens_of(draw, texts, text.encode()):
        fill(matcher, mask)
        if run.mask() is not None:
            known += 1
            np.testing.assert_array_equal(run.mask(), mask)
        run.learn(mask)
        assert matcher.consume_token(token), text
        run.advance(token)
    assert matcher.is_accepting() and known > 5


def test_most_masks_of_a_long_string_are_known(tokens: Tokens) -> None:
    texts, vocabulary, size = tokens
    own = grammar.of_json_schema({"type": "string"})
    rules = string_rules(own)
    assert rules is not None and rules == (0, ())
    run, mask = StringRun(rules, texts), np.zeros((size + 31) // 32, np.int32)
    matcher, known = grammar.matcher_of(vocabulary, own), 0
    tokens_of_text = tokens_of(random.Random(1), texts, b'"' + b"the quick brown fox. " * 20)
    for token in tokens_of_text:
        fill(matcher, mask)
        known += run.mask() is not None
        run.learn(mask)
        matcher.consume_token(token)
        run.advance(token)
    assert known >= len(tokens_of_text) - 3


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, (0, ())),
        ({"type": "string", "minLength": 7, "maxLength": 9}, (0, (7, 9))),
        ({"type": "array", "items": {"enum": ["abc", "d"]}, "minItems": 2}, (3, ())),
        ({"const": {"name": ["longest"]}}, (7, ())),
        ({"enum": ["a/", 5, None]}, (13, ())),
        (
            {
                "type": "object", "properties": {"né": {"$ref": "#/$defs/e"}},
                "$defs": {"e": {"type": "string", "maxLength": 4}}, "required": ["né"],
                "additionalProperties": {"anyOf": [{"type": "string", "minLength": 3}, True]},
            },
            (13, (3, 4)),
        ),
        ({"type": "string", "pattern": "a+"}, None),
        ({"type": "string", "format": "date"}, None),
        ({"type": "object", "patternProperties": {"a": {"type": "string"}}}, None),
        ({"allOf": [{"type": "string"}, {"pattern": "^a"}]}, None),
        ({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"format": "uuid"}]}]}, None),
    ],
)  # fmt: skip
def test_rules_of_schemas(schema: dict[str, Any], expected: Any) -> None:
    own = {"grammars": [{"json_schema": schema, "lark_grammar": None}]}
    assert string_rules(json.dumps(own)) == (None if expected is None else StringRules(*expected))
    # llguidance's own form of it says the same
    assert string_rules(grammar.of_json_schema(schema)) == string_rules(json.dumps(own))


@pytest.mark.parametrize(
    "text",
    [
        grammar.of_regex("a+"),
        grammar.of_choices(["a", "b"]),
        "", "[]", "{}", '{"grammars": []}', '{"grammars": [1]}', '{"grammars": [{"json_schema": 5}]}',
        json.dumps({"grammars": [{"json_schema": {}}] * 2}),
        '{"grammars": [{"json_schema": {"type": "string", "maxLength": 1.5}}]}',
        '{"grammars": [{"json_schema": {"minLength": "7"}}]}',
        '{"grammars": [{"json_schema": {"properties": []}}]}',
        '{"grammars": [{"json_schema": {"anyOf": 5}}]}',
        '{"grammars": [{"json_schema": ' + '{"items": ' * 5000 + "{}" + "}" * 5003,
    ],
)  # fmt: skip
def test_other_grammars_have_no_rules(text: str) -> None:
    assert string_rules(text) is None


def run_of(named: int = 0, bounds: tuple[int, ...] = ()) -> tuple[StringRun, list[bytes]]:
    texts = [b'"', b"ab", b"\\", b"u", b"0", b"\xc3", b"\xa9", b"x" * (MOST_CHARACTERS + 1)]
    return StringRun(
        StringRules(named, bounds), TokenTexts.of(len(texts), texts.__getitem__)
    ), texts


def test_a_copy_s_strings_are_its_own() -> None:
    """What follows a string depends on the tokens before it, and those of a copy may be left out of the text."""
    run, _ = run_of()
    copy = run.copy()
    for token in (0, 1):
        copy.advance(token)
    copy.learn(np.array([5], np.int32))
    assert copy.mask() is not None
    for token in (0, 1):
        run.advance(token)
    assert run.mask() is None
    inside = run.copy()
    inside.learn(np.array([6], np.int32))
    mask = run.mask()
    assert mask is not None and mask[0] == 6


def test_a_token_without_a_text_ends_what_is_known() -> None:
    for token in (8, -1):
        run, _ = run_of()
        for one in (0, 1):
            run.advance(one)
        run.learn(np.array([5], np.int32))
        assert run.mask() is not None
        run.advance(token)
        for one in (1, 0, 0, 1):
            run.advance(one)
            run.learn(np.array([5], np.int32))
            assert run.mask() is None


def test_tokens_after_which_a_mask_stays() -> None:
    run, texts = run_of()
    assert run.plain.tolist() == [text in (b"ab", b"u", b"0") for text in texts]


def learned_places(run: StringRun, tokens: list[int]) -> list[bool]:
    """After each token whether the mask was known before it was learned."""
    found = list[bool]()
    for number, token in enumerate(tokens):
        run.advance(token)
        found.append(run.mask() is not None)
        run.learn(np.array([number], np.int32))
    return found


def test_only_the_last_mask_is_kept() -> None:
    run, _ = run_of(bounds=(40,))
    assert learned_places(run, [0, 1, 1]) == [False, False, True]
    assert learned_places(run, [7, 1, 1]) == [False, False, False]  # near the bound
    assert learned_places(run, [7, 1, 1]) == [False, True, True]  # behind it
    assert learned_places(run, [0, 0, 1, 1]) == [False, False, False, True]
    assert len(run._known) == 1


def test_what_is_at_a_bound_is_not_behind_it() -> None:
    """At the greatest length only the end may follow, and other strings are left behind it."""
    run, _ = run_of(bounds=(2,))
    assert learned_places(run, [0, 1, 1, 1]) == [False, False, False, True]


def test_escapes() -> None:
    """Halves of pairs may count as a character or not, up to the end of the string."""
    run, _ = run_of()
    tokens = [0, 1, 1, 2, 2, 1, 2, 0, 1]  # a quote behind a backslash ends nothing
    expected = [False, False, True, False, True, True, False, True, True]
    assert learned_places(run, tokens) == expected
    tokens = [2, 3, 4, 4, 4, 4, 1, 0, 0, 1, 1]
    assert learned_places(run, tokens) == [False] * 10 + [True]


def test_parts_of_characters() -> None:
    run, _ = run_of()
    assert learned_places(run, [0, 1, 5, 6, 1]) == [False, False, False, True, True]
