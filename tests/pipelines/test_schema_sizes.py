"""How deep and how large a schema may be that a grammar holds, what is named of the rest, and its definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.schema_forms import TooLargeSchemaError, grammar_schema

OTHER = {"type": "integer", "minimum": 3}
WRAPPERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "items": lambda inner: {"items": inner},
    "prefixItems": lambda inner: {"prefixItems": [inner]},
    "unevaluatedItems": lambda inner: {"unevaluatedItems": inner},
    "properties": lambda inner: {"properties": {"a": inner}},
    "patternProperties": lambda inner: {"patternProperties": {"^a": inner}},
    "additionalProperties": lambda inner: {"additionalProperties": inner},
    "unevaluatedProperties": lambda inner: {"unevaluatedProperties": inner},
    "propertyNames": lambda inner: {"propertyNames": {"const": "a"}, "additionalProperties": inner},
    "allOf": lambda inner: {"allOf": [inner, OTHER], "minLength": 1},
    "anyOf": lambda inner: {"anyOf": [OTHER, inner]},
    "oneOf": lambda inner: {"oneOf": [OTHER, inner]},
    "unresolved": lambda inner: {"$ref": "#/nowhere", "items": inner},
}


@pytest.mark.parametrize("keyword", WRAPPERS)
def test_schemas_are_120_deep_at_most(keyword: str) -> None:
    """An unresolved reference is a step of its own."""
    wrap = WRAPPERS[keyword]
    most = 60 if keyword == "unresolved" else 120
    schema: Any = {"type": "string"}
    for _ in range(most):
        schema = wrap(schema)
    written = grammar_schema(schema).schema
    depth = 0
    while written.get("type") != "string":
        inner = [
            part
            for value in written.values()
            for part in (value if isinstance(value, list) else [value])
            if isinstance(part, dict) and part != OTHER
        ]
        if keyword in ("properties", "patternProperties", "propertyNames"):
            inner = [*inner[0].values()]
        written, depth = inner[0], depth + 1
    assert depth == most
    with pytest.raises(TooLargeSchemaError, match="too many parts"):
        grammar_schema(wrap(schema))


def test_schemas_have_20_000_parts_at_most() -> None:
    for count in (19_999, 20_000):
        schema = {"anyOf": [True] * count}
        if count < 20_000:
            assert len(grammar_schema(schema).schema["anyOf"]) == count
        else:
            with pytest.raises(TooLargeSchemaError, match="too many parts"):
                grammar_schema(schema)


def test_64_keywords_are_named_each_once() -> None:
    def named(count: int, **more: Any) -> tuple[str, ...]:
        properties = {f"p{at}": {"type": f"t{at}"} for at in range(count)}
        return grammar_schema({"type": "object", "properties": properties, **more}).relaxed_keywords

    assert named(3) == tuple(f'properties.p{at}: type "t{at}"' for at in range(3))
    assert len(named(63)) == 63
    assert len(named(64)) == 64 and named(64)[63].startswith("properties.p63")
    assert named(70) == named(64)
    twice = {"type": "object", "patternProperties": {"a": True, r"(b)\1": {}, r"(b)\1\1": {}}}
    assert len(grammar_schema(twice).relaxed_keywords) == 2
    same = {"uniqueItems": True, "contains": {}, "minContains": 2, "type": 3}
    assert grammar_schema(same).relaxed_keywords == ("type 3", "uniqueItems", "contains")


def test_what_is_named_is_short() -> None:
    for schema, text in (
        ({"multipleOf": 10**99}, f"multipleOf {10**99}"[:80]),
        ({"pattern": r"(a)\1" + "b" * 99}, "pattern " + rf'"(a)\\1{"b" * 99}'[:80]),
        ({"type": "t" * 99}, "type " + f'"{"t" * 99}'[:80]),
        ({"patternProperties": {r"(a)\1" + "b" * 99: {}}}, (rf"patternProperties (a)\1{'b' * 99}")[:100]),
        ({"properties": {}, "required": ["r" * 99], "additionalProperties": False},
         f'additionalProperties, as "{"r" * 79} is required'),
    ):  # fmt: skip
        assert grammar_schema(schema).relaxed_keywords == (text,)


def test_definitions_have_names_of_their_own() -> None:
    """Names are the last parts of the references; each target with a name of another has a number."""
    schema = {
        "type": "object",
        "properties": {
            "one": {"$ref": "#/$defs/x"},
            "two": {"$ref": "#/definitions/x"},
            "three": {"$ref": "#/more/x"},
            "four": {"$ref": "#/$defs/a%20b"},
            "again": {"$ref": "#/$defs/x"},
            "self": {"$ref": "#"},
        },
        "$defs": {"x": {"const": 1}, "a b": {"const": 4}},
        "definitions": {"x": {"const": 2}},
        "more": {"x": {"const": 3}},
    }
    written = grammar_schema(schema).schema
    assert written["$defs"].keys() == {"x", "x_2", "x_3", "a_20b", "root"}
    assert written["properties"]["self"] == {"$ref": "#/$defs/root"}
    validator = jsonschema_rs.validator_for(written)
    for name, value in (("one", 1), ("two", 2), ("three", 3), ("four", 4), ("again", 1)):
        for other in range(5):
            assert validator.is_valid({name: other}) is (other == value)
            assert validator.is_valid({"self": {name: other}}) is (other == value)
    assert not validator.is_valid({"self": {"six": 1}})


def test_lists_of_different_items_are_no_longer_than_their_values() -> None:
    items = {"enum": [*range(9), 1.0]}
    for more, most in (({}, 9), ({"maxItems": 3}, 3), ({"maxItems": 12}, 9), ({"minItems": 9}, 9)):
        form = grammar_schema({"type": "array", "items": items, "uniqueItems": True, **more})
        assert form.schema["maxItems"] == most and form.relaxed_keywords == ("uniqueItems",)
    # as many as there are not
    form = grammar_schema({"type": "array", "items": items, "uniqueItems": True, "minItems": 10})
    assert "maxItems" not in form.schema
    single = {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}
    assert grammar_schema(single).relaxed_keywords == ()


def test_evaluated_items_that_are_not_held_are_free() -> None:
    target = {"type": "array", "contains": {"const": 1}}
    schema = {"$ref": "#/$defs/r", "$defs": {"r": target}, "unevaluatedItems": False, "maxItems": 3}
    form = grammar_schema(schema)
    assert form.relaxed_keywords == ("unevaluatedItems",)
    validator = jsonschema_rs.validator_for(form.schema)
    assert [validator.is_valid(each) for each in ([1], [2, 1], [2], [1, 1, 1, 1])] == [
        True,
        True,
        False,
        False,
    ]
