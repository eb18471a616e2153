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
from max.pipelines.structured.schemas.check import misfit
from max.pipelines.structured.schemas.opposites import Opposites
from max.pipelines.structured.schemas.references import References
from tests.pipelines.test_schema_forms import TEXT, check, thing, walk

SMALL = {"type": "string", "maxLength": 5}
BETWEEN = [
    {"type": "number", "exclusiveMinimum": number, "exclusiveMaximum": number + 1}
    for number in range(-8, 8)
]
HELD = {
    "look-ahead": {**SMALL, "pattern": "^(?!a).*$"},
    "several look-aheads": {"type": "string", "pattern": "^(?!ab)(?=.*c)[a-c]{1,4}$"},
    "look-ahead in names": {"type": "object", "patternProperties": {"^(?!a)": TEXT}},
    "no integer": {"type": "number", "not": {"type": "integer"}, "minimum": -1.5, "maximum": 4},
    "anything but an integer": {"not": {"type": "integer"}},
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
    "names of a list": {
        "type": "object", "additionalProperties": TEXT, "propertyNames": {"enum": ["a", "ab", "b"], "minLength": 2},
    },
    "names of a list and one": {
        "type": "object", "additionalProperties": TEXT,
        "propertyNames": {"anyOf": [{"enum": ["a", "b"], "const": "a"}]},
    },
    "names of whole lengths": {
        "type": "object", "additionalProperties": TEXT, "propertyNames": {"minLength": 1.0, "maxLength": 2.0},
    },
    "items that are left": {
        "type": "array", "prefixItems": [TEXT], "unevaluatedItems": {**SMALL, "pattern": "^(?!a)"}, "maxItems": 3,
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


def part_of(numbers: random.Random, depth: int = 0) -> dict[str, Any]:
    """A random schema of the keywords that have opposites."""
    makers: list[Any] = [
        lambda: {"type": numbers.choice(["string", "integer", "number", ["string", "null"], "array", "object"])},
        lambda: {"enum": numbers.sample(["a", "ab", 1, 2, True, None], numbers.randint(1, 3))},
        lambda: {"const": numbers.choice(["a", 1, False, None]), "type": numbers.choice(["string", "integer", "null"])},
        lambda: {numbers.choice(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"]): numbers.randint(0, 3)},
        lambda: {numbers.choice(["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"]):
                 numbers.randint(0, 2)},
        lambda: {"pattern": numbers.choice(["a", "^b", "b$"])},
        lambda: {"required": numbers.sample(["a", "b"], numbers.randint(1, 2)), "type": "object"},
    ]  # fmt: skip
    if depth < 2:
        inner = lambda: part_of(numbers, depth + 1)  # noqa: E731
        makers += [
            lambda: {"properties": {"a": inner(), "b": inner()}, "required": numbers.choice([["a"], ["a", "b"], []])},
            lambda: {"properties": {"a": inner()}, "additionalProperties": False, "required": ["a"], "type": "object"},
            lambda: {"items": inner()},
            lambda: {"contains": inner()},
            lambda: {"not": inner()},
            lambda: {numbers.choice(["anyOf", "allOf", "oneOf"]): [inner(), inner()]},
            lambda: {"if": inner(), "then": inner(), "else": inner()},
            lambda: {"if": inner(), numbers.choice(["then", "else"]): inner()},
            lambda: {**inner(), **inner()},
        ]  # fmt: skip
    return numbers.choice(makers)()


def some_value(numbers: random.Random, depth: int = 0) -> Any:
    if depth < 2 and numbers.random() < 0.5:
        if numbers.random() < 0.5:
            return [some_value(numbers, depth + 1) for _ in range(numbers.randint(0, 3))]
        names = numbers.sample(["a", "b", "c"], numbers.randint(0, 3))
        return {name: some_value(numbers, depth + 1) for name in names}
    return numbers.choice(["", "a", "ab", "b", "bc", "abc", 0, 1, 2, 3, 1.0, True, False, None])


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(n, marks=pytest.mark.long) for n in range(6, 200))]
)
def test_an_opposite_fits_what_its_schema_does_not(seed: int) -> None:
    numbers, found = random.Random(seed), 0
    for _ in range(60):
        schema = part_of(numbers)
        opposites = Opposites(References({}))
        other = opposites.of(schema, {})
        if other is None:
            continue
        found += 1
        one, two = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(other)
        # properties that are not listed are unknown here
        is_exact = "additionalProperties" not in json.dumps(schema)
        for _ in range(40):
            value = some_value(numbers)
            assert not (one.is_valid(value) and two.is_valid(value)), (schema, other, value)
            assert one.is_valid(value) or two.is_valid(value) or not is_exact, (
                schema,
                other,
                value,
            )
    assert found > 20


@pytest.mark.parametrize("seed", range(4))
def test_alternatives_that_exclude_each_other_share_no_value(seed: int) -> None:
    numbers, found = random.Random(seed), 0
    for _ in range(300):
        one, other = part_of(numbers), part_of(numbers)
        if not Opposites(References({})).excludes(one, other):
            continue
        found += 1
        both = jsonschema_rs.validator_for({"allOf": [one, other]})
        assert not any(both.is_valid(some_value(numbers)) for _ in range(30)), (one, other)
    assert found > 5


OBJECT = {"type": "object", "properties": {"k": {"const": "x"}}, "required": ["k"]}


@pytest.mark.parametrize(
    ("one", "other", "excludes"),
    [
        (False, {}, True),
        ({}, {}, False),
        ({"type": "string"}, {"type": ["integer", "null"]}, True),
        ({"type": "number"}, {"type": "integer"}, False),
        ({"enum": ["a", 1]}, {"const": 1.0}, False),
        ({"enum": ["a", 1]}, {"enum": [True, "b"]}, True),
        ({"const": "a"}, {"type": "integer"}, True),
        (OBJECT, {**OBJECT, "properties": {"k": {"const": "y"}}}, True),
        (OBJECT, {"type": "object", "properties": {"k": {"const": "y"}}}, True),
        (OBJECT, {"type": "object", "properties": {"l": {}}, "additionalProperties": False}, True),
        (OBJECT, {"type": "object", "properties": {"l": {}}}, False),
        (OBJECT, {"type": "object", "patternProperties": {"k": {}}, "additionalProperties": False}, False),
        (OBJECT, {"type": ["object", "null"], "properties": {"k": {"const": "y"}}}, False),
        ({"type": "object", "properties": {"k": {"const": "x"}}},
         {"type": "object", "properties": {"k": {"const": "y"}}}, False),
    ],
)  # fmt: skip
def test_what_excludes(one: Any, other: Any, excludes: bool) -> None:
    opposites = Opposites(References({}))
    assert opposites.excludes(one, other) is opposites.excludes(other, one) is excludes


@pytest.mark.parametrize(
    ("schema", "base", "other"),
    [
        ({"const": "a"}, {"enum": ["a", "b", 1]}, {"enum": ["b", 1]}),
        ({"const": 1}, {"enum": [True, 1]}, {"enum": [True]}),
        ({"type": "integer"}, {"type": "number"}, None),
        ({"type": "integer"}, {"type": ["integer", "null"]}, {"type": ["null"]}),
        ({"type": "number"}, {"type": "integer"}, {"enum": []}),
        ({"type": "integer"}, {"type": "number", "minimum": 0.5, "exclusiveMaximum": 2},
         {"anyOf": [BETWEEN[8], BETWEEN[9]]}),
        ({"type": "integer"}, {"type": "number", "minimum": 2, "maximum": 2}, {"enum": []}),
        ({"type": "integer"}, {"type": "number", "minimum": -8, "maximum": 9}, None),
        ({"type": "integer"}, {"minimum": -8.0, "maximum": 8},
         {"anyOf": [*BETWEEN, {"type": ["string", "boolean", "object", "array", "null"]}]}),
        # where any value may be, those near zero
        ({"type": "integer"}, {}, {"anyOf": [*BETWEEN, {"type": ["string", "boolean", "object", "array", "null"]}]}),
        ({"type": "integer"}, {"minimum": True, "maximum": 2},
         {"anyOf": [*BETWEEN, {"type": ["string", "boolean", "object", "array", "null"]}]}),
        ({"const": True}, {"type": "boolean"}, {"const": False}),
        ({"const": {}}, {"type": "object"}, None),
        ({"contains": {"const": 1}, "minContains": 2}, {}, None),
        ({"multipleOf": 3}, {}, None),
        ({"format": "date"}, {}, None),
        ({"minLength": "a"}, {}, None),
        ({"$ref": "https://example.com/x"}, {}, None),
        ({"title": "all"}, {}, {"enum": []}),
        ({"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"a": {}, "b": {"type": "null"}}},
         {"type": "object", "required": ["b"], "properties": {"b": {"type": "null"}}}),
        ({"properties": {"c": {"type": "null"}}}, {"properties": {"a": {}}, "additionalProperties": False},
         {"enum": []}),
        ({"properties": {}, "additionalProperties": {"type": "null"}}, {}, None),
    ],
)  # fmt: skip
def test_what_is_known_of_the_values(
    schema: dict[str, Any], base: dict[str, Any], other: dict[str, Any] | None
) -> None:
    assert Opposites(References({})).of(schema, base) == other
