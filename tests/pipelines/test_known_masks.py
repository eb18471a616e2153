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
    assert rules is not None and rules[:2] == (0, ())
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
    found = string_rules(json.dumps(own))
    assert (None if found is None else found[:2]) == expected
    # llguidance's own form of it says the same
    assert string_rules(grammar.of_json_schema(schema)) == found


def test_bounds_that_are_greatest_lengths_only() -> None:
    items = [
        {"type": "string", "minLength": 3, "maxLength": 8}, {"type": "string", "maxLength": 3},
        {"type": "string", "minLength": 9, "maxLength": 9},
    ]  # fmt: skip
    rules = string_rules(grammar.of_json_schema({"type": "array", "prefixItems": items}))
    assert rules == (0, (3, 8, 9), {8})


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


def run_of(
    named: int = 0, bounds: tuple[int, ...] = (), greatest: tuple[int, ...] = ()
) -> tuple[StringRun, list[bytes]]:
    texts = [b'"', b"ab", b"\\", b"u", b"0", b"\xc3", b"\xa9", b"x" * (MOST_CHARACTERS + 1)]
    rules = StringRules(named, bounds, frozenset(greatest))
    return StringRun(rules, TokenTexts.of(len(texts), texts.__getitem__)), texts


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
    """Long ones only where no bound follows, as several of them could come near it."""
    long = b"x" * (MOST_CHARACTERS + 1)
    for bounds in ((), (200,)):
        run, texts = run_of(bounds=bounds)
        for token in (0, 1):
            run.advance(token)
        plain = [b"ab", b"u", b"0", *([] if bounds else [long])]
        assert run.plain.tolist() == [text in plain for text in texts]
        run.learn(np.array([-1], np.int32))
        assert run.advance_plain([1, 3, 1])
        assert run.advance_plain([7]) == (not bounds) and not run.advance_plain([1, 0])
    for _ in range(8):
        run.advance(7)  # behind the bound
    assert run.plain[7]


@pytest.mark.parametrize(
    ("text", "length", "needed"),
    [
        (b"ab", 2, 2), ("né🙂".encode(), 3, 3), (b"", 0, 0), (None, 0, 0), (b'"', 0, 0), (b'ab", "c', 0, 2),
        (b"\\n", 1, 1), (b"a\\\\\\/b", 4, 4), (b'\\"', 1, 1), (b'\\\\"', 0, 1), (b"a\\", 0, 2),
        (b"\\u", 0, 1), (b"a\\u00", 0, 2), (b"\\u001fx", 0, 2), (b"ab\xc3", 0, 3), (b'\xa9"', 0, 0),
    ],
)  # fmt: skip
def test_lengths_of_tokens(text: bytes | None, length: int, needed: int) -> None:
    """Escapes are characters; a character that is begun must be admitted too."""
    texts = TokenTexts.of(1, lambda _: text)
    assert texts.lengths == [length] and texts.needs.tolist() == [needed]
    assert texts.plain.tolist() == [length > 0]
    for characters in range(4):
        assert (texts.fitting(characters, 2)[0] & 1) == (needed <= characters)


def bounded_string(draw: random.Random) -> dict[str, Any]:
    """A string with bounds that are near for most of its text, some of them near to each other."""
    most = draw.choice([30, 31, 40, 44, draw.randrange(1, 70)])
    kind = draw.randrange(6)
    if kind < 3:
        return {"type": "string", "maxLength": most}
    if kind == 3:
        return {"type": "string", "minLength": draw.randrange(most + 1), "maxLength": most}
    return [{"type": "string"}, {"type": "string", "minLength": draw.choice([5, 30])}][kind - 4]


@pytest.mark.parametrize("first", range(0, 48, 8))
def test_they_equal_those_near_a_greatest_length(
    tokens: Tokens, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.string_schema", bounded_string)
    texts, vocabulary, size = tokens
    mask, near = np.zeros((1, (size + 31) // 32), np.int32), 0
    for seed in range(first, first + 8):
        draw = random.Random(seed)
        own = grammar.of_json_schema(json.dumps(schema_of(draw)))
        rules = string_rules(own)
        assert rules is not None
        matcher, run = grammar.matcher_of(vocabulary, own), StringRun(rules, texts)
        for _ in range(100):
            fill(matcher, mask[0])
            if (known := run.mask()) is not None:
                near += run.mask(1) is None
                np.testing.assert_array_equal(known, mask[0], str(seed))
                assert not matcher.compute_ff_tokens()
            run.learn(mask[0])
            allowed = unpack_mask(mask, size)[0]
            if not allowed.any() or matcher.is_stopped():
                break
            short = [token for token in np.flatnonzero(allowed).tolist() if texts.needs[token] < 3]
            token = (
                draw.choice(short)
                if short and draw.random() < 0.6
                else choice(draw, texts, allowed)
            )
            assert matcher.consume_token(token)
            run.advance(token)
    assert near >= 5


LETTERS = [b'"', *(b"x" * n for n in (1, 2, 3, 4, 9))]


def near_run(*bounds: int, greatest: tuple[int, ...] | None = None) -> StringRun:
    rules = StringRules(0, bounds, frozenset(bounds if greatest is None else greatest))
    run = StringRun(rules, TokenTexts.of(len(LETTERS), LETTERS.__getitem__))
    for token in (0, 1):
        run.advance(token)
    return run


def bits(*tokens: int) -> Any:
    return np.array([sum(1 << token for token in tokens)], np.int32)


def test_near_a_greatest_length_longer_tokens_are_left_out() -> None:
    run = near_run(5)
    run.learn(bits(0, 1, 2, 3, 4))
    copy = run.copy()
    run.advance(2)
    assert run.mask() == bits(0, 1, 2)
    copy.advance(1)
    assert copy.mask() == bits(0, 1, 2, 3) and run.mask() == bits(0, 1, 2)
    assert run.mask(1) is None  # the next step has another one
    run.advance(1)
    run.advance(1)
    assert run.mask() is None  # only the end may follow, which is forced
    for token in (0, 0, 1):
        run.advance(token)
    assert run.mask() is None  # another string


def test_what_a_mask_near_a_bound_does_not_show_is_not_taken_as_known() -> None:
    for run, mask in (
        (near_run(5), bits(0, 1, 2, 3, 4, 5)),  # an alternative admits more characters
        (near_run(10), bits(0, 1, 2, 3, 4, 5)),  # no token is longer than what is left
        (near_run(5, 9), bits(0, 1, 2, 3, 4)),  # nor one that tells both bounds apart
        (near_run(5, greatest=()), bits(1, 2, 3, 4)),  # the end may follow later
    ):
        run.learn(mask)
        run.advance(1)
        assert run.mask() is None
    run = near_run(5, 10)
    run.learn(bits(0, 1, 2, 3, 4))
    run.advance(1)
    assert run.mask() == bits(0, 1, 2, 3)


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
