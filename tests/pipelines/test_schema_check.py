"""Values against schemas: judged by another package, and the places that are named."""

from __future__ import annotations

import random
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.schemas.check import checker_within, fitting, misfit

NAMES = ["a", "b", "ab"]
KINDS = ["null", "boolean", "integer", "number", "string", "array", "object"]


def random_value(draw: random.Random, depth: int) -> Any:
    match draw.randrange(9 if depth else 6):
        case 0:
            return draw.choice([None, True, False])
        case 1 | 2:
            return draw.randrange(-2, 7)
        case 3:
            return draw.choice([0.5, 2.0, -1.5, 4.0])
        case 4 | 5:
            return draw.choice(["", "a", "b", "ab", "abc", "ü"])
        case 6 | 7:
            return [random_value(draw, depth - 1) for _ in range(draw.randrange(4))]
        case _:
            names = draw.sample(NAMES, draw.randrange(4))
            return {name: random_value(draw, depth - 1) for name in names}


def random_schema(draw: random.Random, depth: int) -> Any:
    """A schema of a few keywords; bounds are small, so that values are often at them."""
    if draw.random() < 0.08 or depth < 0:
        return draw.random() < 0.7

    def inner() -> Any:
        return random_schema(draw, depth - 1)

    def few(least: int = 1) -> list[Any]:
        return [inner() for _ in range(draw.randrange(least, 3))]

    def number() -> Any:
        return draw.choice([0, 1, 2, 3, 0.5])

    def size() -> int:
        return draw.randrange(4)

    def by_name(make: Any) -> dict[str, Any]:
        return {name: make() for name in draw.sample(NAMES, draw.randrange(1, 3))}

    makers: dict[str, Any] = {
        "type": lambda: draw.choice([draw.choice(KINDS), draw.sample(KINDS, 2)]),
        "enum": lambda: [random_value(draw, 1) for _ in range(3)],
        "const": lambda: random_value(draw, 1),
        "pattern": lambda: draw.choice(["a", "^b?$", "^.b", "c$", "[^a]"]),
        "multipleOf": lambda: draw.choice([1, 2, 3]),
        "uniqueItems": lambda: draw.random() < 0.8,
        "contains": inner,
        "prefixItems": few,
        "items": inner,
        "required": lambda: draw.sample(NAMES, draw.randrange(3)),
        "properties": lambda: by_name(inner),
        "patternProperties": lambda: {draw.choice(["a", "^b", "b$"]): inner()},
        "additionalProperties": inner,
        "propertyNames": inner,
        "dependentRequired": lambda: by_name(lambda: draw.sample(NAMES, 1)),
        "dependentSchemas": lambda: by_name(inner),
        "allOf": few,
        "anyOf": few,
        "oneOf": lambda: few() + few(0),
        "not": inner,
        "if": inner,
    }
    makers |= dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems"), size)
    makers |= dict.fromkeys(("minProperties", "maxProperties"), size)
    makers |= dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), number)
    chosen = draw.sample(sorted(makers), draw.randrange(1, 4))
    schema = {name: makers[name]() for name in chosen}
    if "if" in schema:
        schema |= {name: inner() for name in ("then", "else") if draw.random() < 0.7}
    if "contains" in schema:
        schema |= {name: size() for name in ("minContains", "maxContains") if draw.random() < 0.4}
    if draw.random() < 0.1:
        schema["$ref"] = "#/$defs/x"
    return schema


def test_what_fits_is_what_another_package_finds_valid() -> None:
    draw, valid = random.Random(1), 0
    for _ in range(800):
        schema = random_schema(draw, 2)
        if not isinstance(schema, dict):
            continue
        # a schema that is its own part has no meaning
        part = next(x for _ in range(99) if "$ref" not in str(x := random_schema(draw, 1)))
        schema["$defs"] = {"x": part}
        judge = jsonschema_rs.Draft202012Validator(schema)
        values = [random_value(draw, 2) for _ in range(5)]
        expected = [judge.is_valid(value) for value in values]
        found = [misfit(value, schema) is None for value in values]
        assert found == expected, (schema, values)
        fits = [value for value, is_valid in zip(values, expected, strict=True) if is_valid]
        assert list(map(repr, fitting(values, schema))) == list(map(repr, fits))
        within, judge = checker_within(schema), jsonschema_rs.Draft202012Validator(part)
        for value in values:
            assert within(value, part) == judge.is_valid(value), (part, value)
        valid += sum(expected)
    assert 800 < valid < 3200


@pytest.mark.parametrize(
    ("schema", "value", "is_valid"),
    [
        ({"items": [{"type": "string"}], "additionalItems": {"type": "null"}}, ["a", None], True),
        ({"items": [{"type": "string"}], "additionalItems": {"type": "null"}}, ["a", 1], False),
        ({"items": [{"type": "string"}], "additionalItems": {"type": "null"}}, [1], False),
        ({"minimum": 2, "exclusiveMinimum": True}, 2, False),
        ({"minimum": 2, "exclusiveMinimum": True}, 3, True),
        ({"minimum": 2, "exclusiveMinimum": False}, 2, True),
        ({"maximum": 2, "exclusiveMaximum": True}, 2, False),
        ({"maximum": 2, "exclusiveMaximum": True}, 1, True),
        ({"maximum": 2, "exclusiveMaximum": False}, 2, True),
        ({"dependencies": {"a": ["b"]}}, {"a": 1}, False),
        ({"dependencies": {"a": ["b"]}}, {"a": 1, "b": 2}, True),
        ({"dependencies": {"a": {"minProperties": 2}}}, {"a": 1}, False),
        ({"dependencies": {"a": {"minProperties": 2}}}, {"b": 1}, True),
    ],
)
def test_keywords_of_earlier_drafts(schema: Any, value: Any, is_valid: bool) -> None:
    assert jsonschema_rs.Draft4Validator(schema).is_valid(value) is is_valid
    assert (misfit(value, schema) is None) is is_valid


@pytest.mark.parametrize(
    ("schema", "value", "place"),
    [
        ({"properties": {"a": False}}, {"a": 1}, "a: false"),
        ({"type": "string"}, 1, "type"),
        ({"enum": [1, "a"]}, "b", "enum"),
        ({"const": 1}, True, "const"),
        ({"minLength": 2}, "a", "length"),
        ({"maxLength": 2}, "abc", "length"),
        ({"pattern": "b"}, "a", "pattern"),
        ({"multipleOf": 3}, 4, "multipleOf"),
        ({"minimum": 3}, 2, "bounds"),
        ({"minItems": 2}, [1], "number of items"),
        ({"uniqueItems": True}, [1, 1.0], "uniqueItems"),
        ({"contains": {"type": "string"}}, [1], "contains"),
        ({"items": {"items": {"type": "null"}}}, [[], [None, 1]], "1.1: type"),
        ({"prefixItems": [True, {"const": 2}]}, [1, 3], "1: const"),
        ({"properties": {"a": {"required": ["b"]}}}, {"a": {}}, "a.b: required"),
        ({"minProperties": 1}, {}, "number of properties"),
        ({"propertyNames": {"maxLength": 1}}, {"a": 1, "ab": 1}, "ab: propertyNames"),
        ({"additionalProperties": {"type": "null"}}, {"a": 1}, "a: type"),
        ({"unevaluatedProperties": False}, {"a": 1}, "a: false"),
        ({"patternProperties": {"b$": {"type": "null"}}}, {"ab": 1}, "ab: type"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "dependentRequired"),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, {"a": 1}, "dependentSchemas"),
        ({"items": {"anyOf": [{"type": "null"}]}}, [1], "0: anyOf"),
        ({"oneOf": [True, True]}, 1, "oneOf"),
        ({"not": {"type": "integer"}}, 2.0, "not"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, 1, "bounds"),
        ({"if": {"type": "integer"}, "else": {"minLength": 3}}, "a", "length"),
        ({"allOf": [True, {"properties": {"a": {"type": "null"}}}]}, {"a": 1}, "a: type"),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "null"}}}, 1, "type"),
    ],
)
def test_the_place_and_the_keyword(schema: Any, value: Any, place: str) -> None:
    assert not jsonschema_rs.Draft202012Validator(schema).is_valid(value)
    assert misfit(value, schema) == place


def test_numbers_that_are_not_exact_are_multiples() -> None:
    for value, divisor, place in (
        (2.0**60 + 2.0**10, 3, None), (3, 2.0, None), (2**60 + 1, 2, "multipleOf"), (7.0, 2, "multipleOf"),
        (7.5, 1, "multipleOf"), (True, 2, None), (-4, 3, "multipleOf"), (-6, 3, None),
    ):  # fmt: skip
        assert misfit(value, {"multipleOf": divisor}) == place
