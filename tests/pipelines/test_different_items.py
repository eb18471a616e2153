"""Lists of different items: what grammars hold of them, against jsonschema."""

from __future__ import annotations

import json
import random
from itertools import permutations
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from tokenizers import Tokenizer

from max.pipelines.structured import grammar
from max.pipelines.structured.constraint import Constraints
from max.pipelines.structured.grammar import loose_schema
from max.pipelines.structured.schemas import arrays, check, merging
from max.pipelines.structured.schemas.arrays import different_items
from max.pipelines.structured.schemas.forms import grammar_schema
from max.pipelines.structured.step_masks import fill, unpack_mask
from tests.pipelines.test_known_masks import _Delegate

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
CHOICES: list[dict[str, Any]] = [
    {"enum": ["a", "b", "a"]}, {"enum": [1, 1.0, True, None]}, {"const": {"a": [1]}}, {"type": "boolean"},
    {"type": ["null", "boolean"]}, {"type": "null"}, {"type": "integer", "minimum": -1, "maximum": 1.5},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4, "minimum": 0.5}, {"$ref": "#/$defs/n"},
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> tuple[Any, int]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    return Constraints(_Delegate(tokenizer))._vocabulary({2}), tokenizer.get_vocab_size()


def some_list(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"uniqueItems": True, "$defs": {"n": {"enum": ["n", "a"]}}}
    schema |= draw.choice([{"type": "array"}, {"type": "array"}, {"type": ["null", "array"]}, {}])
    if draw.random() < 0.4:
        schema["prefixItems"] = [draw.choice(CHOICES) for _ in range(draw.randrange(1, 4))]
        schema |= draw.choice([{"items": False}, {"items": draw.choice(CHOICES)}, {"maxItems": 1}])
    else:
        schema["items"] = draw.choice(CHOICES)
    if draw.random() < 0.4:
        schema["minItems"] = draw.randrange(3)
    if draw.random() < 0.4:
        schema["maxItems"] = draw.randrange(1, 4)
    return schema


def walked(matcher: Any, size: int, draw: random.Random, most: int = 120) -> str | None:
    """A text that random masks lead to; None if it is not complete after a number of tokens."""
    mask, tokens = np.zeros((1, (size + 31) // 32), np.int32), bytearray()
    for _ in range(most):
        fill(matcher, mask[0])
        allowed = np.flatnonzero(unpack_mask(mask, size)[0]).tolist()
        assert allowed
        if matcher.is_accepting() and (len(allowed) == 1 or draw.random() < 0.5):
            return tokens.decode(errors="replace")
        ends = [token for token in allowed if token in ENDING]
        token = draw.choice(ends if ends and draw.random() < 0.5 else allowed)
        if token == 2:
            return tokens.decode(errors="replace")
        assert matcher.consume_token(token)
        tokens += VOCABULARY[0].decode_bytes([token])
    return None


VOCABULARY: list[Any] = []
ENDING: set[int] = set()


@pytest.mark.parametrize("seed", range(24))
def test_what_is_held_is_what_fits(vocabulary: tuple[Any, int], seed: int) -> None:
    """Each text that the grammar leads to fits the schema, and each value of a few that fits is a text of it."""
    table, size = vocabulary
    if not VOCABULARY:
        VOCABULARY.append(table)
        ENDING.update(
            t for t in range(3, size) if table.decode_bytes([t]).strip()[:1] in (b'"', b"}", b"]")
        )
    draw = random.Random(seed)
    for _ in range(6):
        schema = some_list(draw)
        valid = jsonschema_rs.Draft202012Validator(schema).is_valid
        form = loose_schema(schema)
        values = some_values()
        fitting = [value for value in values if valid(value)]
        if form.relaxed_keywords:
            used = {json.dumps(item) for value in fitting if value for item in value}
            assert not fitting or len(used) > 5, (schema, fitting[:3])  # none, or too many
            continue
        own = grammar.of_json_schema(json.dumps(schema))
        try:
            matcher = grammar.matcher_of(table, own)
        except ValueError:
            assert not fitting, schema
            continue
        for _ in range(3):
            text = walked(matcher.deep_copy(), size, draw)
            assert text is None or valid(json.loads(text)), (schema, text)
        for value in (*draw.sample(values, 8), *draw.sample(fitting, min(len(fitting), 8))):
            text = json.dumps(value)
            copy = matcher.deep_copy()
            fits = all(map(copy.consume_token, table.tokenize_bytes(text.encode())))
            assert (fits and copy.is_accepting()) == valid(value), (schema, text)


def some_values() -> list[Any]:
    """Values near those that fit."""
    values = ["a", "b", "n", -1, 0, 1, 2, 3, True, None, {"a": [1]}]
    return [list(each) for length in range(4) for each in permutations(values, length)] + [
        None,
        [1, 1],
    ]


def test_lists_that_are_too_many_are_not_written() -> None:
    items = {"type": "array", "uniqueItems": True}
    five, six = ({"type": "integer", "minimum": 1, "maximum": n} for n in (5, 6))
    found = different_items({**items, "items": five})
    assert found is not None and len(found["enum"]) == 326
    assert different_items({**items, "items": six}) is None
    assert different_items({**items, "items": six, "maxItems": 2}) is not None
    for loose in (
        {"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 1}, {"type": ["integer", "null"]},
        {"type": "number", "minimum": 1, "maximum": 2}, {"type": "integer", "minimum": 0, "maximum": 16},
        {"type": "integer", "minimum": 0, "maximum": 2, "multipleOf": 2},
        {"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 2},
    ):  # fmt: skip
        assert different_items({**items, "items": loose, "maxItems": 1}) is None, loose
    one = {"type": "integer", "minimum": 0, "maximum": 15}
    assert different_items({**items, "items": one, "maxItems": 1}) is not None
    assert different_items({**items, "prefixItems": [five]}) is None  # any item may follow
    assert different_items({**items, "prefixItems": [{"type": "string"}], "items": False}) is None
    assert different_items({"type": "string", "uniqueItems": True, "items": five}) is None


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize(
    "value", ["a", None, True, [], float("inf"), float("-inf"), float("nan"), 10**400]
)
def test_bounds_that_are_no_place_among_integers(keyword: str, value: Any) -> None:
    items = {"type": "integer", "minimum": 1, "maximum": 3, keyword: value}
    schema = {"type": "array", "uniqueItems": True, "items": items}
    # such as 1e999 of a client: what is left of it is held, or named
    found = grammar_schema(schema)
    assert found.relaxed_keywords or "enum" in found.schema


@pytest.mark.parametrize("kind", [{}, {"type": "string"}])
def test_long_enumerations_take_linear_time(
    kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of values, keys are made and compared: not each value with each other one."""
    calls = [0]
    made = merging.value_key

    def counted(value: Any) -> str:
        calls[0] += 1
        return made(value)

    for module in (arrays, check, merging):
        monkeypatch.setattr(module, "value_key", counted)
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {**kind, "enum": [f"value {number}" for number in range(3000)]},
    }
    assert "uniqueItems" in grammar_schema(schema).relaxed_keywords
    assert 3000 <= calls[0] <= 8 * 3000


def test_values_that_are_equal_within_others() -> None:
    items = {"enum": [[1], [1.0], {"a": 2.0}, {"a": 2}, [True]]}
    found = different_items({"type": "array", "uniqueItems": True, "items": items})
    assert found is not None and len(found["enum"]) == 1 + 3 + 6 + 6
