"""Opposites of JSON schemas one by one: where there is one, it fits what its schema does not, by another package."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.schemas.opposites import Opposites
from max.pipelines.structured.schemas.references import References
from tests.pipelines.test_schema_opposites import OBJECT, part_of

TYPE = {"type": "string"}
AROUND: dict[str, Any] = {
    "items": lambda part: {"items": part},
    "contains": lambda part: {"contains": part},
    "properties": lambda part: {"properties": {"a": part}},
    "anyOf": lambda part: {"anyOf": [part]},
    "oneOf": lambda part: {"oneOf": [part, {"const": "a"}]},
    "allOf": lambda part: {"allOf": [part]},
    "then": lambda part: {"if": TYPE, "then": part},
    "else": lambda part: {"if": TYPE, "else": part},
    "if": lambda part: {"if": part, "else": TYPE},
}


@pytest.mark.parametrize("keyword", AROUND)
def test_opposites_of_schemas_within_schemas_go_12_deep(keyword: str) -> None:
    for depth, known in ((12, True), (13, False)):
        schema: Any = TYPE
        for _ in range(depth):
            schema = AROUND[keyword](schema)
        other = Opposites(References({})).of(schema, {})
        assert (other is not None) is known
        if other is not None and keyword in ("anyOf", "allOf"):
            both = [jsonschema_rs.is_valid(each, "a") for each in (schema, other)]
            assert both == [True, False]


def test_what_excludes_goes_12_deep() -> None:
    for depth, known in ((12, True), (13, False)):
        pair: list[Any] = [{"const": 1}, {"const": 2}]
        for _ in range(depth):
            pair = [{"type": "object", "properties": {"k": each}, "required": ["k"]} for each in pair]  # fmt: skip
        assert Opposites(References({})).excludes(*pair) is known


def test_opposites_of_what_is_no_list_of_demands() -> None:
    opposites = Opposites(References({"$defs": {"a": TYPE, "b": {"const": 3}}}))
    assert opposites.of(True, {}) == {"enum": []}
    assert opposites.of(False, {}) == {}
    for wrong in (
        3,
        "a",
        None,
        [TYPE],
        {"enum": 3},
        {"anyOf": {}},
        {"$ref": "#/nowhere", "const": 1},
    ):
        assert opposites.of(wrong, {}) is None
    for same in ({"$ref": "#/$defs/a"}, TYPE):
        assert opposites.of(same, {}) == opposites.of(TYPE, {})
        assert opposites.excludes(same, {"$ref": "#/$defs/b"})
        assert opposites.excludes({"$ref": "#/$defs/b"}, same)
    # equal schemas have equal opposites in any order of their keywords, and so one grammar
    names = [
        "minimum",
        "maxLength",
        "minItems",
        "maxProperties",
        "minLength",
        "minProperties",
        "maxItems",
    ]
    other = opposites.of(dict.fromkeys(names, 3), {})
    kinds = ["array", "string", "object", "array", "string", "object", "number"]
    assert other is not None and [each["type"] for each in other["anyOf"]] == kinds


THINGS = [
    "", "a", "ab", "b", "abc", "x", 0, 1, 2, 3, 2.5, -1, True, False, None, [], ["a"], ["b"], [1], ["a", "b"],
    [1, 2, 3], [["a"]], {}, {"a": "a"}, {"a": 1}, {"b": "a"}, {"a": "a", "b": "b"}, {"a": "b", "b": 1}, {"b": 2},
    {"c": 1}, {"a": "a", "b": "b", "c": "c"},
]  # fmt: skip
A: dict[str, Any] = {"const": "a"}
KNOWN: list[dict[str, Any]] = [
    *({name: count} for name in ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
      for count in (0, 1, 2)),
    *({name: bound} for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum") for bound in (0, 2)),
    {"pattern": "a"}, {"type": "string"}, {"type": ["number", "object"]}, {"type": "number"},
    {"type": ["integer", "number"]}, {"required": ["a", "b"]}, {"required": []}, {"properties": {"a": A}},
    {"properties": {"a": A, "b": False}},
    {"properties": {"a": True}}, {"items": A}, {"items": {"type": "number"}, "maxItems": 2}, {"contains": A},
    {"contains": A, "minContains": 1}, {"not": A}, {"anyOf": [A, {"type": "number"}]}, {"oneOf": [A, {"minLength": 1}]},
    {"oneOf": [A, {"const": "b"}, {"const": "c"}]}, {"allOf": [{"minLength": 1}, {"maxLength": 1}]},
    {"if": {"type": "string"}, "then": {"minLength": 1}}, {"if": {"type": "string"}, "else": {"minItems": 1}},
    {"if": {"type": "string"}, "then": A, "else": {"type": "number"}}, {"if": A}, {"then": A}, {"title": "t"},
    {"const": "a", "type": ["string"]}, {"enum": ["a", "ab", ""], "type": ["string", "null"]},
    {"enum": [1, 2.5], "type": ["number"]}, {"enum": [True, None], "type": ["boolean", "null"]},
    {"enum": [True, False], "type": ["boolean"]}, {"enum": ["a", 1], "type": ["string", "object", "number"]},
    {"enum": [1], "type": ["number", "array"]}, {"enum": [2, -1], "type": ["number"]},
]  # fmt: skip


@pytest.mark.parametrize("schema", KNOWN, ids=str)
def test_all_other_values_fit_the_opposite(schema: dict[str, Any]) -> None:
    other = Opposites(References({})).of(schema, {})
    assert other is not None
    one, two = jsonschema_rs.validator_for(schema), jsonschema_rs.validator_for(other)
    for value in THINGS:
        assert one.is_valid(value) is not two.is_valid(value), (value, other)


BASES: list[dict[str, Any]] = [
    {}, {"type": "string"}, {"type": ["string", "null"]}, {"type": "number"}, {"type": ["number", "boolean"]},
    {"type": "object"}, {"type": "array", "items": {"type": "string"}}, {"enum": ["a", "ab", 1, True, None, ["a"]]},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"enum": ["a", "b", 2]}}},
    {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": ["string", "number"]}},
     "additionalProperties": False},
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_opposites_among_known_values(seed: int) -> None:
    """What is known of the values makes opposites shorter, which fit the same ones of them."""
    numbers, found = random.Random(seed), 0
    for _ in range(250):
        schema, base = part_of(numbers, 1), numbers.choice(BASES)
        if numbers.random() < 0.3:
            schema = {"properties": {"a": {}, "b": {}}, "additionalProperties": False}
            schema |= {"required": ["a"]} if numbers.random() < 0.5 else {}
            del schema["properties"][numbers.choice("ab")]
        other = Opposites(References({})).of(schema, base)
        if other is None:
            continue
        found += 1
        text = json.dumps(schema)
        closed = base.get("additionalProperties") is False or "additionalProperties" not in text
        exact = closed and "integer" not in text
        known, one, two = (jsonschema_rs.validator_for(each) for each in (base, schema, other))
        for value in THINGS:
            if known.is_valid(value):
                fits = (one.is_valid(value), two.is_valid(value))
                assert fits != (True, True), (schema, base, other, value)
                assert any(fits) or not exact, (schema, base, other, value)
    assert found > 150


@pytest.mark.parametrize(
    ("schema", "base"),
    [
        ({"items": True}, {}), ({"items": [A]}, {}), ({"items": {"multipleOf": 3}}, {}),
        ({"prefixItems": [A], "items": A}, {}), ({"contains": A, "minContains": 2}, {}),
        ({"contains": A, "maxContains": 2}, {}), ({"contains": A, "minContains": 0}, {}), ({"not": True}, {}),
        ({"contains": {"multipleOf": 3}}, {}), ({"anyOf": [A, {"multipleOf": 3}]}, {}),
        ({"pattern": "^(?!a)"}, {}), ({"pattern": r"\b"}, {}),
        ({"oneOf": [A, {"multipleOf": 3}]}, {}), ({"allOf": [A, {"multipleOf": 3}]}, {}),
        ({"if": A, "then": {"multipleOf": 3}}, {}), ({"if": A, "else": {"multipleOf": 3}}, {}),
        ({"if": {"multipleOf": 3}, "else": A}, {}), ({"exclusiveMinimum": True}, {}),
        ({"type": ["integer"]}, {"type": "number"}),
        ({"type": "integer"}, {"type": ["string", "number"]}), ({"properties": {"a": {"multipleOf": 3}}}, {}),
        ({"properties": {"a": {"multipleOf": 3}}, "required": ["b"]}, {}), ({"const": [1], "type": ["array"]}, {}),
        ({"properties": {"a": A}, "additionalProperties": A}, {}),
        ({"properties": {"a": A}, "additionalProperties": False, "patternProperties": {"b": A}},
         {"properties": {"b": A}}),
        ({"enum": [["a"], "a"]}, {"type": "array"}), ({"type": 3}, {}), ({"type": ["string", 3]}, {}),
    ],
    ids=str,
)  # fmt: skip
def test_what_has_no_opposite(schema: dict[str, Any], base: dict[str, Any]) -> None:
    assert Opposites(References({})).of(schema, base) is None


NOT_1 = [{"type": "number", "exclusiveMaximum": 1}, {"type": "number", "exclusiveMinimum": 1}]


@pytest.mark.parametrize(
    ("schema", "base", "other"),
    [
        # of the types that the schema has, those of its values
        ({"const": 1, "type": ["integer"]}, {},
         [{"anyOf": NOT_1}, {"type": ["string", "boolean", "object", "array", "null"]}]),
        ({"const": 1, "type": ["number", "string"]}, {"type": ["number", "string", "null"]},
         [{"anyOf": [{"type": "string"}, *NOT_1]}, {"type": ["null"]}]),
        ({"const": True, "type": ["boolean"]}, {"type": ["boolean", "number"]},
         [{"const": False}, {"type": ["number"]}]),
        ({"const": 1}, {"type": "integer"}, NOT_1),
        ({"const": 1}, {"type": ["integer", "number"]}, NOT_1),
        ({"type": "string", "allOf": [True]}, {"type": ["integer", "string"]}, {"type": ["integer"]}),
        ({"type": ["integer", "number"]}, {"type": ["number", "string"]}, {"type": ["string"]}),
        ({"properties": {"a": {"multipleOf": 3}}, "required": ["a"]}, {},
         {"type": "object", "properties": {"a": False}}),
    ],
    ids=str,
)  # fmt: skip
def test_opposites_say_what_is_needed(schema: Any, base: Any, other: Any) -> None:
    found = Opposites(References({})).of(schema, base)
    assert found == ({"anyOf": other} if isinstance(other, list) else other)


@pytest.mark.parametrize(
    ("one", "other", "closes", "excludes"),
    [
        ({**OBJECT, "required": ["k"]}, {"type": "object", "properties": {"l": {}}}, True, True),
        ({"type": "object", "properties": {"l": {}}}, {**OBJECT, "required": ["k"]}, True, False),
        ({**OBJECT, "required": ["k"]}, {"type": "object"}, True, False),
        ({"type": "object", "properties": {"o": OBJECT}, "required": ["o"]},
         {"type": "object", "properties": {"o": {"type": "object", "properties": {"l": {}}}}}, True, True),
        ({"type": "object", "properties": {"o": OBJECT}, "required": ["o"]},
         {"type": "object", "properties": {"o": {"type": "object", "properties": {"l": {}}}}}, False, False),
        ({"type": "object", "additionalProperties": False}, OBJECT, False, True),
        ({"type": "object", "additionalProperties": {}, "properties": {}}, OBJECT, True, False),
    ],
)  # fmt: skip
def test_what_excludes_where_objects_have_what_they_list(
    one: Any, other: Any, closes: bool, excludes: bool
) -> None:
    assert Opposites(References({})).excludes(one, other, closes=closes) is excludes


def test_opposites_are_few() -> None:
    """24 alternatives at most, and 100 automata for a schema."""
    for count, known in ((24, True), (25, False)):
        schema = {"required": [f"n{each}" for each in range(count)]}
        assert (Opposites(References({})).of(schema, {}) is not None) is known
    for make in (
        lambda n: {"pattern": f"^a{n % 3}"},
        lambda n: {"enum": [f"a{n % 3}"], "type": ["string"]},
    ):
        opposites = Opposites(References({}))
        found = [opposites.of(make(number), {}) is not None for number in range(102)]
        assert found == [True] * 100 + [False] * 2
