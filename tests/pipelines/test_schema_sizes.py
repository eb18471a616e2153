"""How deep and how large a schema may be that a grammar holds, what is named of the rest, and its definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.pattern_automata import MOST_AUTOMATA
from max.pipelines.structured.schemas.forms import TooLargeSchemaError, grammar_schema

TEXT, OTHER = {"type": "string"}, {"type": "integer", "minimum": 3}
PART = {"type": "object", "properties": {"a": TEXT}}
WRAPPERS: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "items": (120, lambda inner: {"items": inner}),
    "prefixItems": (120, lambda inner: {"prefixItems": [inner]}),
    "unevaluatedItems": (120, lambda inner: {"unevaluatedItems": inner}),
    "properties": (120, lambda inner: {"properties": {"a": inner}}),
    "patternProperties": (120, lambda inner: {"patternProperties": {"^a": inner}}),
    "additionalProperties": (120, lambda inner: {"additionalProperties": inner}),
    "unevaluatedProperties": (120, lambda inner: {"unevaluatedProperties": inner}),
    "propertyNames": (120, lambda inner: {"propertyNames": {"const": "a"}, "additionalProperties": inner}),
    "allOf": (120, lambda inner: {"allOf": [inner, OTHER], "minLength": 1}),
    "anyOf": (120, lambda inner: {"anyOf": [OTHER, inner]}),
    "oneOf": (120, lambda inner: {"oneOf": [OTHER, inner]}),
    # each of these is written as schemas within schemas
    "unresolved": (60, lambda inner: {"$ref": "#/nowhere", "items": inner}),
    "reference": (60, lambda inner: {"$ref": "#/$defs/o", "items": inner}),
    "items of a reference": (60, lambda inner: {"$ref": "#/$defs/l", "unevaluatedItems": inner}),
    "contains": (60, lambda inner: {"contains": inner, "maxItems": 1}),
    "then": (59, lambda inner: {"if": {"type": "integer"}, "then": inner}),
}  # fmt: skip


@pytest.mark.parametrize("keyword", WRAPPERS)
def test_schemas_are_120_deep_at_most(keyword: str) -> None:
    most, wrap = WRAPPERS[keyword]
    schema: Any = TEXT
    for _ in range(most):
        schema = wrap(schema)
    own = {"o": OTHER, "l": {"type": "array"}}
    root = {"$defs": {**own, "deep": schema}}
    for each in ({**schema, **root}, {"$ref": "#/$defs/deep", **root}):
        assert json.dumps(grammar_schema(each).schema).count('{"type": "string"}') == 1
    deeper = {"$defs": {**own, "deep": wrap(schema)}}
    for each in ({**wrap(schema), **root}, {"$ref": "#/$defs/deep", **deeper}):
        with pytest.raises(TooLargeSchemaError, match="too many parts"):
            grammar_schema(each)


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


def written(schema: dict[str, Any], **options: bool) -> dict[str, Any]:
    """What is written of a schema, all of which is held."""
    form = grammar_schema(schema, **options)
    assert form.relaxed_keywords == ()
    return form.schema


def test_references_beside_others() -> None:
    root = {"$defs": {"r": PART, "again": {"$ref": "#/$defs/r"}}}
    # an annotation is none
    form = written({"$ref": "#/$defs/r", "title": "t", **root})
    assert form["$ref"] == "#/$defs/r" and form["$defs"]["r"]["additionalProperties"] is False
    more = {"$ref": "#/$defs/again", "properties": {"b": TEXT}}
    both = jsonschema_rs.validator_for(written({**more, **root}))
    assert both.is_valid({"a": "x", "b": "y"}) and not both.is_valid({"a": 1})
    assert not both.is_valid({"b": 1})
    lists = {"$defs": {"r": {"$ref": "#/$defs/s"}, "s": {"prefixItems": [OTHER]}, "t": True}}
    ends = {"$ref": "#/$defs/r", "unevaluatedItems": False}
    closed = jsonschema_rs.validator_for(written({**ends, **lists}))
    assert closed.is_valid([3]) and not closed.is_valid([3, 3]) and not closed.is_valid([1])
    free = {"$ref": "#/$defs/t", "unevaluatedItems": False, **lists}
    assert written(free) == {"items": False}
    assert grammar_schema({"items": 4}).schema == {"items": {}}


def test_types_counts_and_formats() -> None:
    form = grammar_schema({"type": ["x", "string"], "minLength": 2.0})
    assert form.schema == {"type": ["string"], "minLength": 2}
    assert form.relaxed_keywords == ('type ["x", "string"]',)
    assert isinstance(form.schema["minLength"], int)
    for kind, known in (("uuid4", "uuid"), ("url", "uri"), ("date", "date"), ("color", None)):
        assert written({"type": "string", "format": kind}).get("format") == known
    flags = {"minimum": 3, "exclusiveMinimum": True, "maximum": 9, "exclusiveMaximum": False}
    assert written(flags) == {"exclusiveMinimum": 3, "maximum": 9}
    assert written({"exclusiveMinimum": True}) == {}


def test_multiples_add_up_to_100_000() -> None:
    for last, held in ((40_000, True), (40_001, False)):
        parts = {"a": {"multipleOf": 60_000}, "b": {"multipleOf": last}}
        form = grammar_schema({"properties": parts})
        assert ("multipleOf" in form.schema["properties"]["b"]) is held
        assert form.relaxed_keywords == (() if held else ("properties.b: multipleOf 40001",))


def test_objects_have_498_optional_properties_at_most() -> None:
    for count in (498, 500):
        names = [f"p{at}" for at in range(count)]
        schema = {"properties": dict.fromkeys([*names, "z"], TEXT), "required": ["z"]}
        form = grammar_schema(schema)
        assert [*form.schema["properties"]] == [*names[:498], "z"]
        assert len(form.relaxed_keywords) == (count > 498)


def test_other_properties() -> None:
    lost, some = {r"(a)\1": TEXT}, {"^a": TEXT, "^b": OTHER}
    for more, kept in (({}, False), ({"additionalProperties": False}, False),
                       ({"additionalProperties": True}, True), ({"additionalProperties": TEXT}, TEXT)):  # fmt: skip
        form = grammar_schema({"patternProperties": lost, **more})
        assert form.schema == {"additionalProperties": kept}
        assert written({"patternProperties": some, **more}) == {
            "patternProperties": some,
            "additionalProperties": kept,
        }
    assert written({"additionalProperties": PART}) == {
        "additionalProperties": {**PART, "additionalProperties": False}
    }
    # names that are required keep the schema of their pattern
    by_name = jsonschema_rs.validator_for(written({"patternProperties": some, "required": ["ab"]}))
    assert by_name.is_valid({"ab": "x"}) and not by_name.is_valid({"ab": 3})
    for more in ({}, {"additionalProperties": True}):
        form = written({"propertyNames": {"pattern": "^a"}, **more})
        assert form == {"patternProperties": {"^a": {}}, "additionalProperties": False}
        assert "patternProperties" not in written({"propertyNames": TEXT, **more})
    names = {"properties": {"a": TEXT}, "propertyNames": {"maxLength": 1}}
    assert written(names)["additionalProperties"] is False
    assert grammar_schema(names, closed=False).relaxed_keywords == ("propertyNames",)


def test_numbers_of_properties() -> None:
    none = {**PART, "required": ["a"], "minProperties": 2}
    validator = jsonschema_rs.validator_for(written(none))
    assert not validator.is_valid({"a": "x"})
    form = grammar_schema({**none, "additionalProperties": True})
    assert form.relaxed_keywords == ("minProperties",) and "minProperties" not in form.schema
    two = {"properties": {"a": TEXT, "b": TEXT}, "minProperties": 1, "maxProperties": 1}
    assert not written(two).keys() & {"minProperties", "maxProperties"}


def test_conditions_and_alternatives() -> None:
    whole = {"allOf": [{"not": {"type": "integer"}}], "not": {"const": 1}, "if": TEXT, "then": {}}
    form = grammar_schema(whole, conditions=False)
    assert form.schema == {} and form.relaxed_keywords == ("not", "if", "allOf: not")
    either = written({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]})["oneOf"]
    assert [each["properties"] for each in either] == [{"b": False, "a": {}}, {"a": False, "b": {}}]
    both = written({"anyOf": [TEXT, OTHER], "oneOf": [{"minLength": 1}, OTHER]})
    assert both == {"anyOf": [TEXT, OTHER], "allOf": [{"oneOf": [{"minLength": 1}, OTHER]}]}
    # alternatives beside other keywords are open, so nothing changes where they overlap
    options = [PART, {"type": "object", "properties": {"b": TEXT}}]
    assert grammar_schema({"oneOf": options}).overlap == "oneOf"
    assert grammar_schema({"required": ["a"], "oneOf": options}).overlap == ""
    empty = {"items": {"enum": []}, "uniqueItems": True}
    none = jsonschema_rs.validator_for(grammar_schema(empty).schema)
    assert none.is_valid([]) and not none.is_valid([1])


def test_what_else_is_named() -> None:
    assert grammar_schema({"$ref": "#/nowhere"}).relaxed_keywords == ("$ref to #/nowhere",)
    twice = {"allOf": [{"not": TEXT}, {"not": OTHER}]}
    assert grammar_schema(twice, conditions=False).relaxed_keywords == ("allOf: not",)
    # each look-ahead is an automaton
    ahead = {f"p{n}": {"pattern": f"^(?!x{n})[a-z]$"} for n in range(MOST_AUTOMATA + 1)}
    (named,) = grammar_schema(
        {"properties": {"plain": {"pattern": "^x"}, **ahead}}
    ).relaxed_keywords
    assert named.startswith(f"properties.p{MOST_AUTOMATA}: pattern")


def test_lists_of_few_different_items_are_written_out() -> None:
    lists = {"type": "array", "items": {"$ref": "#/$defs/e"}, "uniqueItems": True}
    root = {"$defs": {"e": {"enum": [1, 2, 1.0]}}}
    assert written({**lists, **root}) == {"enum": [[], [1], [2], [1, 2], [2, 1]]}
    # a list that is longer than its values fits nothing
    form = grammar_schema({**lists, "minItems": 3, **root})
    assert form.relaxed_keywords == ("uniqueItems",) and form.schema["minItems"] == 3


def test_what_is_evaluated_and_what_is_not_different() -> None:
    assert grammar_schema({"items": 4}).relaxed_keywords == ("items: it is no schema",)
    lists = {"type": "array", "items": {"enum": [1, 2]}}
    assert written(lists) == written({**lists, "uniqueItems": False}) == lists
    for more in (True, {}):
        form = written({**PART, "unevaluatedProperties": more})
        assert form == {**PART, "additionalProperties": True}
    assert written({**PART, "unevaluatedProperties": False})["additionalProperties"] is False
    both = {**PART, "additionalProperties": TEXT, "unevaluatedProperties": {"type": "x"}}
    form = grammar_schema(both)
    assert form.relaxed_keywords == ('unevaluatedProperties: type "x"',)
    assert form.schema == {**PART, "additionalProperties": TEXT}
    # conditions say nothing of other properties
    kind = {"if": {"required": ["a"]}, "then": {"properties": {"b": TEXT}}, "type": "object"}
    validator = jsonschema_rs.validator_for(written(kind))
    assert validator.is_valid({"a": 1, "b": "x", "c": 3}) and not validator.is_valid(
        {"a": 1, "b": 2}
    )


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "object", "minProperties": 1}, False),
        ({"type": "object", "minProperties": 2}, True),
        ({"type": "object", "minProperties": 2, "required": ["a", "b"]}, False),
        ({"type": "object", "minProperties": 3, "required": ["a", "b"]}, True),
        ({"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2}, True),
        ({"type": "object", "patternProperties": {"^x": {}}, "minProperties": 2}, True),
    ],
)
def test_a_repeated_name_counts_once(schema: dict[str, Any], named: bool) -> None:
    """A grammar counts names of which one may come again; what is named is not held."""
    found = grammar_schema(schema).relaxed_keywords
    assert any("minProperties" in each for each in found) is named, found
