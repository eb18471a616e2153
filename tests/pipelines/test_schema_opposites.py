"""JSON schemas that deny: texts of their grammars fit them, or what does not is named, and found in the texts."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import of_json_schema, of_loose_schema
from max.pipelines.structured.schema_check import misfit
from tests.pipelines.test_schema_forms import TEXT, check, thing, walk

SMALL = {"type": "string", "maxLength": 5}
HELD = {
    "look-ahead": {**SMALL, "pattern": "^(?!a).*$"},
    "several look-aheads": {"type": "string", "pattern": "^(?!ab)(?=.*c)[a-c]{1,4}$"},
    "look-ahead in names": {"type": "object", "patternProperties": {"^(?!a)": TEXT}},
    "not a part": {**SMALL, "not": {"pattern": "a"}},
    "not an end": {**SMALL, "not": {"pattern": r"[a-c]+\d?$"}},
    "not a few texts": {**SMALL, "not": {"enum": ["a", "ab", "abc", 1]}},
    "not a few numbers": {"type": "integer", "not": {"enum": [1, 5, 6]}, "minimum": 0, "maximum": 9},
    "not a few of any type": {"type": ["boolean", "null", "integer"], "not": {"enum": [True, None, 0]}},
    "not a length of a list": {
        "type": "array", "items": TEXT, "maxItems": 4, "not": {"minItems": 2, "maxItems": 3},
    },
    "not some properties": thing(**{"not": {"properties": {"a": {"const": "x"}}, "required": ["a"]}}),
    "not all of two": thing(**{"not": {"properties": {"a": {"const": "x"}, "b": {"maxLength": 2}}}}),
    "not an object or a list": {
        "not": {"anyOf": [{"type": ["object", "array", "number"]}, {"type": "string", "pattern": "a"}]},
        "maxLength": 5,
    },
    "no such item": {"type": "array", "items": TEXT, "maxItems": 3, "not": {"contains": {"const": "a"}}},
    "an item that does not fit": {
        "type": "array", "items": TEXT, "maxItems": 3, "not": {"items": {"pattern": "^[a-m]"}},
    },
    "if a pattern": thing(**{"if": {"properties": {"a": {"pattern": "b"}}}, "then": {"required": ["c"]}}),
    "overlapping patterns": {
        "oneOf": [{**TEXT, "pattern": "a"}, {"type": "string", "pattern": "b", "maxLength": 9}]
    },
    "closed objects": {
        "oneOf": [
            {"type": "object", "properties": {n: TEXT}, "required": [n], "additionalProperties": False} for n in "ab"
        ]
    },
    "objects with more or less": {
        "oneOf": [thing(required=["a"], additionalProperties=False), {
            "type": "object", "properties": {"a": TEXT}, "additionalProperties": False,
        }]
    },
    "objects with kinds that may be missing": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": kind}, kind: TEXT}, "required": [kind]}
            for kind in ("x", "y")
        ]
    },
    "an object or a list": {
        "oneOf": [{"$ref": "#/$defs/l"}, {"$ref": "#/$defs/o"}],
        "$defs": {"l": {"type": "array", "items": {"$ref": "#/$defs/t"}}, "o": thing(required=["a"]), "t": TEXT},
    },
    "names of a length": {
        "type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "additionalProperties": TEXT,
    },
    "names of kinds": {
        "type": "object", "additionalProperties": TEXT,
        "propertyNames": {"anyOf": [{"const": "*"}, {"type": "string", "not": {"pattern": "[b-z]"}}]},
    },
    "names that are listed": {"type": "object", "properties": {"ab": TEXT}, "propertyNames": {"minLength": 2}},
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
def test_texts_of_the_grammar_fit_the_schema(kind: str) -> None:
    schema = HELD[kind]
    grammar, relaxed = of_loose_schema(schema)
    assert not relaxed
    assert of_json_schema(schema)
    check(schema, grammar, kind, 12)


def test_many_patterns_are_named() -> None:
    """Each automaton takes some milliseconds, so a schema has a hundred at most."""
    properties = {f"p{n}": {"type": "string", "pattern": f"^(?!a{n})"} for n in range(300)}
    _, relaxed = of_loose_schema({"type": "object", "properties": properties})
    assert any("p299: pattern" in each for each in relaxed) or len(relaxed) == 64
    assert not any("p99: pattern" in each for each in relaxed)


def some_schema(numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of opposites, conditions and alternatives."""
    plain = [
        {"type": "string", "maxLength": 4},
        {"type": "string", "maxLength": 5, "pattern": numbers.choice(["a", "^b", "c$"])},
        {"type": "integer", "minimum": numbers.randint(0, 4), "maximum": numbers.randint(3, 9)},
        {"enum": numbers.sample(["a", "ab", 1, 2, True, None], 3)}, {"const": numbers.choice(["a", 1, False])},
        {"type": ["boolean", "null"]},
    ]  # fmt: skip
    kind = numbers.randrange(9 if depth < 2 else 1)
    if kind < 2:
        return numbers.choice(plain)
    inner = [some_schema(numbers, depth + 1) for _ in range(2)]
    if kind < 5:
        names = numbers.sample(["a", "b", "c"], 2)
        more = {"additionalProperties": False} if numbers.random() < 0.5 else {}
        required = {"required": numbers.sample(names, numbers.randint(0, 2))}
        pairs = dict(zip(names, inner, strict=True))
        return {"type": "object", "properties": pairs, **required, **more}
    if kind == 5:
        return {"type": "array", "items": inner[0], "maxItems": 3}
    if kind == 6:
        return {"oneOf": inner}
    if kind == 7:
        return {**numbers.choice(plain[:3]), "not": inner[0]}
    return {**inner[0], "if": inner[1], "then": numbers.choice(inner)}


@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(n, marks=pytest.mark.long) for n in range(8, 300))]
)
def test_what_a_grammar_does_not_hold_is_found_in_its_texts(seed: int) -> None:
    """Texts of random schemas fit them, or the schema's misfit is named beforehand, and found in the text."""
    numbers = random.Random(seed)
    for _ in range(3):
        schema = some_schema(numbers)
        if numbers.random() < 0.5:
            schema = {
                "not": some_schema(numbers),
                "type": ["object", "string", "integer"],
                "maxLength": 4,
            }
        try:
            grammar, relaxed = of_loose_schema(schema)
        except InputError:
            continue  # nothing fits
        validator = jsonschema_rs.validator_for(schema)
        for _ in range(6):
            text = walk(grammar, numbers, 60)
            if text is None or re.search(r"\de[+-]?\d", text.lower()):
                continue
            value = json.loads(text)
            assert relaxed or validator.is_valid(value), (schema, text)
            assert (misfit(value, schema) is None) is validator.is_valid(value), (schema, text)
