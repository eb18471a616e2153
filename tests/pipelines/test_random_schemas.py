"""Random schemas: what is written for a grammar fits no value that the schema does not fit, or the difference is named.

Another package says which values fit.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import loose_schema, of_json_schema
from max.pipelines.structured.schemas.forms import grammar_schema

NAMES, TEXT = "abc", {"type": "string"}
OBJECTS = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in itertools.product((None, 1, "x", 2), repeat=3)
]
VALUES: list[Any] = [
    *OBJECTS, *range(4), 5, 2.5, 1.0, True, False, None, "", "a", "ab", "abc", "b1", "xyz", [], [1], [1, 1], [1, 2],
    ["a"], ["a", 1], [1, "a", 2], [True, 1], [[1]], [{}], {"a": {"a": 1}}, {"a": {"b": "x"}}, {"a": [1]}, {"d": 1},
    {"a": 1, "d": "x"}, {"ab": 1}, {"b1": "x"},
]  # fmt: skip
LEAVES: list[Any] = [
    True, {}, TEXT, {"type": "integer"}, {"const": 1}, {"enum": [1, "x"]}, {"minimum": 2}, {"minLength": 1},
    {"type": "number"}, False,
]  # fmt: skip
REFERRED = {
    "q": {"type": "object", "properties": {"a": {"$ref": "#/$defs/q"}, "b": TEXT}},
    "r": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]},
}


def schema_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of up to three keywords, and schemas within them."""

    def inner() -> Any:
        return (
            schema_of(draw, depth + 1)
            if depth < 3 and draw.random() < 0.6
            else draw.choice(LEAVES[: draw.choice([9, 10])])
        )

    def some(*names: str) -> list[str]:
        return draw.sample(names, draw.randint(0, 2))

    kinds = ["array", "string", "integer", "number", ["object", "null"], ["string", "integer"], "boolean"]  # fmt: skip
    number, name, own = draw.randint(0, 3), draw.choice(NAMES), some(*NAMES, "d")
    made: dict[str, Any] = {}
    for _ in range(draw.randint(bool(not depth), 3)):
        made |= draw.choice([
            lambda: {"type": draw.choice(["object", "object", *kinds])},
            lambda: {"enum": draw.sample([0, 1, "a", "x", None, True, [1], {"a": 1}, {}], number + 1)},
            lambda: {"const": draw.choice([1, "x", None, True, {"a": 1}])},
            lambda: {draw.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]): number},
            lambda: {draw.choice(["minLength", "maxLength", "minItems", "maxItems"]): number},
            lambda: {draw.choice(["minProperties", "maxProperties"]): number},
            lambda: {"properties": {each: inner() for each in draw.sample(NAMES, number)}},
            lambda: {"properties": {each: inner() for each in draw.sample(NAMES, 2)}, "required": own},
            lambda: {"required": own},
            lambda: {"additionalProperties": draw.choice([True, False, False, inner()])},
            lambda: {"patternProperties": {each: inner() for each in draw.sample(["^a", "^b", "c", "^ab$"], 2)}},
            lambda: {"propertyNames": draw.choice([
                {"pattern": "^[ab]+$"}, {"enum": ["a", "b"]}, {"maxLength": 1}, {"const": "a"}, True, False, TEXT,
            ])},
            lambda: {"items": inner()},
            lambda: {"prefixItems": [inner(), inner()]},
            lambda: {"contains": inner(), **draw.choice([{}, {"minContains": number}, {"maxContains": 1}])},
            lambda: {"uniqueItems": draw.random() < 0.7},
            lambda: {"not": inner()},
            lambda: {"if": inner(), "then": inner(), **draw.choice([{}, {"else": inner()}])},
            lambda: {"dependentRequired": {name: own}},
            lambda: {draw.choice(["dependentSchemas", "dependencies"]): {name: inner()}},
            lambda: {draw.choice(["allOf", "anyOf"]): [inner() for _ in range(draw.randint(1, 3))]},
            lambda: {"$ref": draw.choice(["#/$defs/q", "#/$defs/r"])},
            lambda: {"multipleOf": draw.choice([1, 2, 0.5])},
            lambda: {"pattern": draw.choice(["^a", "b$", "^[a-c]*$"])},
            lambda: {"unevaluatedProperties": draw.choice([False, True, {"type": "integer"}])},
            lambda: {"unevaluatedItems": draw.choice([False, True, {"type": "integer"}])},
        ])()  # fmt: skip
    return made


def alternative_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """An alternative of objects."""
    if draw.random() < 0.1:
        return {"$ref": "#/$defs/r"}
    made: dict[str, Any] = {}
    for share, more in (
        (0.8, {"properties": {name: draw.choice(LEAVES[2:5]) for name in draw.sample(NAMES, draw.randint(0, 2))}}),
        (0.5, {"required": draw.sample(NAMES, draw.randint(1, 2))}),
        (0.25, {"type": "object"}),
        (0.2, {"additionalProperties": draw.choice([False, True, TEXT])}),
        (0.15, {"patternProperties": {f"^{draw.choice('abd')}": {"type": "integer"}}}),
        (0.1, {"propertyNames": draw.choice([{"pattern": "^[ab]"}, {"enum": ["a", "b"]}])}),
        (0.1, {"maxProperties": draw.randint(0, 2)}),
        (0.1, {"not": {"required": [draw.choice(NAMES)]}}),
        (0.05, {"unevaluatedProperties": False}),
    ):  # fmt: skip
        if draw.random() < share:
            made |= more
    if draw.random() < 0.15 and depth < 2:
        members = [alternative_of(draw, depth + 1) for _ in range(draw.randint(1, 2))]
        made = {**draw.choice([{}, made]), draw.choice(["allOf", "anyOf", "oneOf"]): members}
    return made


def check(schema: dict[str, Any], written: dict[str, Any]) -> list[bool]:
    """Which of the values fit what is written; all of them fit the schema."""
    old, new = (jsonschema_rs.Draft202012Validator(each) for each in (schema, written))
    fitting = [new.is_valid(value) for value in VALUES]
    for value, fits in zip(VALUES, fitting, strict=True):
        assert not fits or old.is_valid(value), (value, schema, written)
    return fitting


def test_random_schemas() -> None:
    held = empty = 0
    for seed in range(1500):
        schema = {**schema_of(random.Random(seed)), "$defs": REFERRED}
        form = grammar_schema(schema)
        if form.relaxed_keywords or form.overlap:
            continue
        held += 1
        if not any(check(schema, form.schema)):
            validator = jsonschema_rs.Draft202012Validator(schema)
            empty += any(map(validator.is_valid, VALUES))
    assert held > 1000 and empty < 3, (held, empty)


def test_random_alternatives() -> None:
    held = 0
    for seed in range(250):
        draw = random.Random(seed)
        one = {"oneOf": [alternative_of(draw) for _ in range(draw.randint(2, 3))]}
        schema = {"type": "object", **one, "$defs": REFERRED}
        if draw.random() < 0.15:
            schema["properties"] = {"a": True}
        form = loose_schema(schema)
        if not form.relaxed_keywords:
            held += 1
            check(schema, form.schema)
    assert held > 60, held


OPEN = {"properties": {"c": {"const": 1}}, "required": ["b", "a"]}
OTHER = {"properties": {"c": True}, "required": ["b", "c"]}


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        # no name fits a pattern of names that is None, or one that other properties have not
        ({"properties": {"a": TEXT}, "propertyNames": False}, "propertyNames"),
        ({"patternProperties": {"^b": TEXT}, "propertyNames": {"minLength": 2}}, "propertyNames"),
        ({"properties": {"a": TEXT}, "propertyNames": {"maxLength": 1}, "additionalProperties": TEXT}, "propertyNames"),
        ({"properties": {"a": TEXT}, "propertyNames": {"maxLength": 1}, "anyOf": [{"minProperties": 1}]},
         "propertyNames"),
        ({"type": "array", "contains": False, "maxContains": 1}, "contains"),
        ({"properties": {"a": TEXT}, "required": ["a", "z"], "additionalProperties": False},
         'additionalProperties, as "z" is required'),
        ({"oneOf": [{"patternProperties": {"^d": TEXT}}, {"required": ["c"], "properties": {"c": {}}}]},
         "oneOf: alternatives overlap"),
    ],
)  # fmt: skip
def test_what_is_not_held_is_named(schema: dict[str, Any], problem: str) -> None:
    schema = {"type": "object", **schema}
    relaxed = loose_schema(schema).relaxed_keywords
    assert relaxed == (problem,)
    with pytest.raises(InputError, match=f"does not hold {problem}\n"):
        of_json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "propertyNames": False},
        {"properties": {"a": TEXT}, "propertyNames": {"maxLength": 1}, "type": "object"},
        {"properties": {"a": TEXT}, "propertyNames": {"maxLength": 1}, "type": "object", "additionalProperties": False},
        {"type": "object", "properties": {"a": TEXT}, "required": ["a", "c"]},
        {"type": "object", "not": {"additionalProperties": False}},
        {"type": "object", "properties": {"b": {}}, "enum": [{"a": 1}, {"b": 1}]},
        # properties that are required are there, though they are not listed
        {"type": "object", "oneOf": [OPEN, OTHER]},
        # nested alternatives exclude each other too
        {"type": "object", "oneOf": [
            {"anyOf": [{"properties": {"a": {"const": each}}, "required": ["a"]} for each in (1, "x")]},
            {"properties": {"a": {"const": 2}, "b": TEXT}, "required": ["a"]},
        ]},
        {"type": "object", "oneOf": [
            {"allOf": [{"properties": {"b": {}}}, {"properties": {"a": {"const": each}}, "required": ["a"]}]}
            for each in (1, 2)
        ]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_held(schema: dict[str, Any]) -> None:
    assert of_json_schema(schema)
    form = loose_schema(schema)
    assert form.relaxed_keywords == ()
    assert any(check(schema, form.schema))


@pytest.mark.parametrize("keyword", ["oneOf", "anyOf"])
def test_alternatives_have_no_properties_that_none_lists(keyword: str) -> None:
    """Also those that overlap, and are written with the opposites of the others."""

    def listing(draw: random.Random, least: int) -> dict[str, Any]:
        names = draw.sample(NAMES, draw.randint(least, 2))
        made: dict[str, Any] = {"properties": {name: draw.choice(LEAVES[2:5]) for name in names}}
        if draw.random() < 0.5:
            made["required"] = draw.sample(NAMES, draw.randint(1, 2))
        return made

    held = overlap = 0
    for seed in range(400):
        draw = random.Random(seed)
        around = draw.choice([{}, {}, listing(draw, 0), {"required": ["a"]}])
        alternatives = [listing(draw, 1) for _ in range(draw.randint(2, 3))]
        schema = {"type": "object", **around, keyword: alternatives}
        form = loose_schema(schema)
        if form.relaxed_keywords:
            continue
        held += 1
        overlap += keyword not in form.schema
        parts = [around, *alternatives]
        listed = {
            name
            for part in parts
            for name in (*part.get("properties", {}), *part.get("required", []))
        }
        fits = check(schema, form.schema)
        for value in itertools.compress(VALUES, fits):
            assert value.keys() <= listed, (value, schema, form.schema)
        assert any(fits) or not any(map(jsonschema_rs.validator_for(schema).is_valid, VALUES)), (
            schema
        )
    assert held > 250 and (keyword == "anyOf" or overlap > 100), (held, overlap)
