"""JSON schemas whose keywords have values of the wrong kind: refused with their place, never an error of Python."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import loose_schema, of_json_schema, of_loose_schema
from max.pipelines.structured.schemas.check import misfit
from max.pipelines.structured.schemas.merging import ASSERTIONS, well_formed

VALUES = [
    3, 0, "a", True, [], {}, [3], ["a"], [[1]], {"a": 3}, {"a": "b"}, {"a": ["b"]}, {"a": [3]}, {"a": {}}, 2.0, 1.5, -1,
    [None], {"type": 3}, {"type": "string"}, [{}], [{"minLength": "a"}],
]  # fmt: skip
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
# what older drafts allow, and conditions without a branch, which say nothing
OTHER = {"additionalItems", "$recursiveRef", "if", "then", "else"}


def schema_of(draw: random.Random, names: Sequence[str], depth: int = 0) -> dict[str, Any]:
    def value() -> Any:
        if depth > 1 or draw.random() < 0.6:
            return draw.choice(VALUES)
        return schema_of(draw, names, depth + 1)

    return {name: value() for name in draw.sample(names, draw.randint(1, 2 + (depth == 0)))}


def is_of_a_draft(schema: Any) -> bool:
    """Whether a keyword has a value that an older draft, or an empty list that a client, gives it."""
    if isinstance(schema, list):
        return any(map(is_of_a_draft, schema))
    if not isinstance(schema, dict):
        return False
    flags = (isinstance(schema.get(f"exclusive{each}"), bool) for each in ("Minimum", "Maximum"))
    lists = (schema[each] == [] for each in schema if each not in ("enum", "const"))
    inner = map(is_of_a_draft, schema.values())
    return isinstance(schema.get("items"), list) or any((*flags, *lists, *inner))


@pytest.mark.parametrize("seed", range(3))
def test_what_the_schema_of_schemas_refuses_is_refused(seed: int) -> None:
    names, found = sorted(ASSERTIONS - OTHER), 0
    for number in range(150):
        schema = schema_of(random.Random(1000 * seed + number), names)
        if is_of_a_draft(schema) or jsonschema_rs.meta.is_valid({**DRAFT, **schema}):
            continue
        found += 1
        with pytest.raises(InputError):
            of_json_schema(schema)
    assert found > 80


@pytest.mark.parametrize("seed", range(3))
def test_a_wrong_schema_is_no_error_of_python(seed: int) -> None:
    for number in range(120):
        draw = random.Random(1000 * seed + number)
        schema = schema_of(draw, sorted(ASSERTIONS))
        if draw.random() < 0.5:
            schema["type"] = "object"
        for read in (of_json_schema, of_loose_schema):
            try:
                assert read(schema)
            except InputError as error:
                assert "JSON schema" in str(error)
        for value in ({"a": ["b", 1], "b": {}}, "ab", 1.5):
            misfit(value, schema)  # any answer but an exception


@pytest.mark.parametrize("keyword", sorted(ASSERTIONS - {"type", "const"}))
def test_each_keyword_has_values_of_its_kind(keyword: str) -> None:
    """As the schema of schemas has it, but what `is_of_a_draft` says and what is looked at elsewhere."""
    elsewhere = {"items", "additionalProperties", "additionalItems", "$recursiveRef"}
    for value in [*VALUES, "#", 7.0, 0.5, -0.5, -1.0, float(2**60)]:
        schema = {keyword: value}
        kept, wrong = well_formed(schema)
        assert kept == ({} if wrong else schema) and (wrong or kept is schema)
        if keyword in elsewhere or is_of_a_draft(schema):
            assert keyword == "$recursiveRef" or not wrong or value == []
            continue
        try:
            jsonschema_rs.meta.validate({**DRAFT, **schema})
            fits = True
        except jsonschema_rs.ValidationError as error:
            fits = len(error.instance_path) > 1  # a schema within, which has a place of its own
        if keyword.startswith("depend") and isinstance(value, dict) and value.get("a") != {"b"}:
            fits = jsonschema_rs.meta.is_valid({**DRAFT, **schema})
        if keyword == "required" or keyword in ("$ref", "$dynamicRef"):
            fits = jsonschema_rs.meta.is_valid({**DRAFT, **schema})
        assert (not wrong) == fits, (keyword, value)
    for null in ({keyword: None}, {keyword: None, "title": None}):
        assert well_formed(null) == ({name: None for name in null if name != keyword}, [])
    assert well_formed({"const": None}) == ({"const": None}, [])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": 3}, "properties"),
        ({"allOf": [{"properties": 3}]}, "allOf.0: properties"),
        ({"allOf": [{"properties": 3}, {"properties": {"a": {}}}]}, "allOf.0: properties"),
        ({"properties": {"a": {}}, "allOf": [{}, {"properties": 3}]}, "allOf.1: properties"),
        ({"properties": {"a": {}}, "additionalProperties": False, "allOf": [{"properties": 3, "required": ["a"]}]},
         "allOf.0: properties"),
        ({"properties": {"a": {}}, "allOf": [{"required": 3}]}, "allOf.0: required"),
        ({"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}, {"properties": 3}]}, "anyOf.1: properties"),
        ({"properties": {"a": {}}, "oneOf": [{"patternProperties": "b"}]}, "oneOf.0: patternProperties"),
        ({"properties": {"b": {"type": "object", "allOf": [{"properties": 3}, {"properties": {"a": {}}}]}}},
         "properties.b.allOf.0: properties"),
        ({"properties": {"a": {}}, "allOf": [{}, {"dependentRequired": 3}]}, "allOf: dependentRequired"),
        ({"allOf": [{"not": {"minLength": "a"}}]}, "allOf: not"),
        ({"dependentRequired": {"a": "b"}}, "dependentRequired"),
        ({"dependencies": {"a": "b"}}, "dependencies"),
        ({"dependentSchemas": {"a": ["b"]}}, "dependentSchemas"),
        ({"if": {"required": ["a"]}, "then": 3}, "then"),
        ({"propertyNames": {"anyOf": 3}}, "propertyNames"),
        ({"propertyNames": {"maxLength": "a"}}, "propertyNames"),
        ({"propertyNames": {"maxLength": "a", "const": 3}}, "propertyNames"),
        ({"$ref": 3}, "$ref"),
        ({"properties": {"a": {"unevaluatedItems": {"pattern": 3}}}}, "properties.a.unevaluatedItems: pattern"),
    ],
)  # fmt: skip
def test_the_place_of_a_wrong_keyword(schema: dict[str, Any], place: str) -> None:
    schema = {"type": "object", **schema}
    assert loose_schema(schema).relaxed_keywords == (place,)
    with pytest.raises(InputError) as raised:
        of_json_schema(schema)
    assert f"does not hold {place}\n" in f"{raised.value}\n"


def test_null_and_empty_lists_say_nothing() -> None:
    """Clients write lists and objects that they have not as null, or an empty object as a list."""
    part = {"type": "object", "properties": {"a": {"type": "string"}}}
    absent = {
        "required": None, "minProperties": None, "allOf": None, "patternProperties": [], "$ref": None, "not": None,
        "dependentRequired": [], "enum": None, "if": None, "oneOf": None, "propertyNames": None, "format": None,
    }  # fmt: skip
    for plain in (part, {"properties": {"p": part}, "required": ["p"]}, {"items": part}):
        more = f'"type": "object", {json.dumps(absent)[1:-1]}'
        text = json.dumps(plain).replace('"type": "object"', more)
        assert of_json_schema(json.loads(text)) == of_json_schema(plain)
        assert of_loose_schema(json.loads(text)) == of_loose_schema(plain)
    members = {
        "type": "object",
        "allOf": [part, {**absent, "dependentRequired": None, "properties": {"b": {}}}],
    }
    assert loose_schema(members).schema["properties"].keys() == {"a", "b"}
    for value in ({}, {"a": "b"}, {"a": 3}):
        assert misfit(value, {**part, **absent}) == misfit(value, part)


def test_alternatives_are_24_at_most() -> None:
    for count, held in ((24, True), (25, False)):
        names = dict.fromkeys((f"p{n}" for n in range(count)), {"type": "string"})
        one = {"type": "object", "properties": names, "minProperties": 1}
        assert loose_schema(one).relaxed_keywords == (() if held else ("minProperties",))
        options = [{"properties": {name: {}}} for name in names]
        spread = loose_schema({"type": "object", "properties": {"a": {}}, "anyOf": options}).schema
        assert ("properties" not in spread) is held


def some_check(draw: random.Random) -> dict[str, Any]:
    """A schema of a few keywords, whose meaning all drafts share but for bounds that are flags."""
    number = draw.randint(0, 3)
    return draw.choice([
        {"minimum": number}, {"maximum": number}, {"exclusiveMinimum": number}, {"exclusiveMaximum": number},
        {"multipleOf": draw.randint(1, 3)}, {"minLength": number}, {"maxLength": number}, {"minItems": number},
        {"maxItems": number}, {"minProperties": number}, {"maxProperties": number}, {"uniqueItems": True},
        {"enum": draw.sample([0, 1, True, "a", [1], None], 3)}, {"const": draw.choice([0, 1, False])},
        {"contains": {"const": 1}}, {"contains": {"const": 1}, "minContains": number, "maxContains": 2},
        {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["b"]}}}, {"pattern": "^a"},
        {"type": draw.sample(["integer", "number", "string", "boolean", "null", "array", "object"], 2)},
        {"prefixItems": [{"const": 1}], "items": {"type": "string"}}, {"propertyNames": {"const": "a"}},
        {"properties": {"a": {"minimum": number}}, "additionalProperties": draw.choice([True, False, {"const": 1}])},
    ])  # fmt: skip


def test_what_does_not_fit_is_found() -> None:
    """As another package finds it, also in the bounds of draft 4."""
    values = [
        *range(5), 1.0, 2.5, 2**70, 3 * 2**70, 9.0, True, False, None, "", "a", "ab", "baa", [], [1], [1, 1], [1, True],
        [1, "a"], [1, 1, 1],
        [2, "a", "a"], {}, {"a": 1}, {"a": 3, "b": 1}, {"b": 2}, {"a": 1, "b": 1, "c": 1},
    ]  # fmt: skip
    for seed in range(400):
        draw = random.Random(seed)
        schema = {**some_check(draw), **some_check(draw)}
        if draw.random() < 0.3:
            schema = {draw.choice(["allOf", "anyOf", "oneOf"]): [schema, some_check(draw)]}
        elif draw.random() < 0.2:
            schema = {"if": some_check(draw), "then": schema, "else": some_check(draw)}
        checks = [(schema, jsonschema_rs.validator_for({**DRAFT, **schema}))]
        limits = {"minimum": 1, "maximum": 3, "exclusiveMinimum": draw.random() < 0.5}
        limits["exclusiveMaximum"] = not limits["exclusiveMinimum"]
        checks.append((limits, jsonschema_rs.Draft4Validator(limits)))
        for own, validator in checks:
            for value in values:
                assert (misfit(value, own) is None) == validator.is_valid(value), (own, value)
    assert misfit(7, {"multipleOf": 10**400}) and not misfit(1.5, {"multipleOf": 10**400})
