"""Two schemas as one, and numbers of properties as alternatives: jsonschema's reading is the judge."""

from __future__ import annotations

import random
from itertools import combinations, product
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.grammar import loose_schema
from max.pipelines.structured.schemas.merging import NoJoinError, join_schemas, merge, value_key
from max.pipelines.structured.schemas.objects import chosen_properties

KEYWORDS: dict[str, list[Any]] = {
    "type": ["string", "integer", "number", "object", ["string", "number"], ["integer", "null"], ["object", "null"]],
    "enum": [[1, "a", None], [True, 1.0, {"a": 1}], ["a", "b"], [{"a": True}, 2.5, False]],
    "minimum": [0, 2], "maximum": [1, 2], "exclusiveMinimum": [0, 1.5], "exclusiveMaximum": [2, 3],
    "minLength": [0, 2], "maxLength": [1, 3],
    "properties": [{"a": {"type": "integer"}}, {"a": {"minimum": 2}, "b": {}}, {"b": {"type": "string"}, "x": True}],
    "required": [["a"], ["b", "a"], []], "minProperties": [1, 2], "maxProperties": [1, 2],
    "additionalProperties": [True, False, {"type": "integer"}, {}, {"type": "string"}],
    "patternProperties": [{"^x": {"type": "integer"}}, {"^x": {"minimum": 2}, "^y": True}],
}  # fmt: skip
VALUES = [
    None,
    True,
    False,
    0,
    1,
    1.0,
    1.5,
    2,
    2.5,
    3,
    "",
    "a",
    "b",
    "abcd",
    {"a": 1},
    {"a": True},
    {},
    [],
    [1],
]


def any_schema(numbers: random.Random) -> dict[str, Any]:
    chosen = numbers.sample(sorted(KEYWORDS), numbers.randrange(1, 5))
    return {key: numbers.choice(KEYWORDS[key]) for key in chosen}


def any_value(numbers: random.Random) -> Any:
    if numbers.random() < 0.4:
        return numbers.choice(VALUES)
    names = numbers.sample(["a", "b", "x", "xy", "y"], numbers.randrange(4))
    return {name: numbers.choice([1, 2, 3.5, "a", None]) for name in names}


def test_two_schemas_are_joined_to_what_fits_both() -> None:
    numbers, counts = random.Random(5), [0, 0, 0]
    for _ in range(700):
        one, other = any_schema(numbers), any_schema(numbers)
        try:
            both = join_schemas(one, other)
        except NoJoinError:
            assert merge(one, other) is None
            counts[0] += 1
            continue
        assert merge(one, other) == both
        counts[1] += both is None
        for _ in range(8):
            value = any_value(numbers)
            fits = jsonschema_rs.is_valid({"allOf": [one, other]}, value)
            assert (both is not None and jsonschema_rs.is_valid(both, value)) is fits, (
                one,
                other,
                both,
                value,
            )
            counts[2] += fits
    assert counts[0] < 150 and counts[1] > 12 and counts[2] > 500, counts


def test_objects_are_joined_with_all_that_they_say_of_names() -> None:
    """All pairs of what two objects say of the properties that they list, of names by patterns, and of others."""
    names = ("properties", "patternProperties", "additionalProperties")
    parts = [
        {key: value for key, value in zip(names, values, strict=True) if value is not None}
        for values in product(
            (None, {"a": {"type": "integer"}, "b": {}}, {"x": {"minimum": 2}, "b": False}),
            (None, {"^x": {"minimum": 3}}, {"^x": {"type": "integer"}, "^y": True}),
            (None, True, {}, False, {"type": "integer"}),
        )
    ]
    checks = [jsonschema_rs.validator_for(each) for each in parts]
    objects = [dict.fromkeys(some, value) for value in (2, 3, "a", 3.5)
               for size in range(3) for some in combinations(["a", "b", "x", "xy", "y", "z"], size)]  # fmt: skip
    numbers, count = random.Random(6), 0
    for _ in range(400):
        one, other = numbers.randrange(len(parts)), numbers.randrange(len(parts))
        both = merge(parts[one], parts[other])
        if both is None:
            continue
        count += 1
        check = jsonschema_rs.validator_for(both)
        for value in objects:
            fits = checks[one].is_valid(value) and checks[other].is_valid(value)
            assert check.is_valid(value) is fits, (parts[one], parts[other], both, value)
    assert count > 200


def test_limits_of_one_type_that_exclude_each_other_fit_nothing() -> None:
    for kind, one, other in (
        ("string", {"minLength": 3}, {"maxLength": 2}), ("array", {"minItems": 1}, {"maxItems": 0}),
        ("object", {"minProperties": 2}, {"maxProperties": 1}), ("integer", {"minimum": 3}, {"maximum": 2}),
        ("number", {"minimum": 3}, {"exclusiveMaximum": 3}), ("number", {"exclusiveMinimum": 3}, {"maximum": 3}),
        ("integer", {"exclusiveMinimum": 3}, {"exclusiveMaximum": 3}),
    ):  # fmt: skip
        assert (
            join_schemas({"type": kind, **one}, other)
            is join_schemas(other, {"type": kind, **one})
            is None
        )
        assert join_schemas(one, other) == {**one, **other}  # values of other types fit
    assert join_schemas({"type": "number", "minimum": 3}, {"maximum": 3}) is not None
    assert join_schemas({"type": "string", "minLength": 3}, {"maxLength": 3}) is not None


def test_what_has_no_common_form() -> None:
    for one, other in (
        ({"format": "date"}, {"format": "time"}), ({"items": {}}, {"items": {"minimum": 1}}),
        ({"additionalProperties": False}, {"patternProperties": {"a": {}}}),
        ({"patternProperties": {"a": {}}, "additionalProperties": False}, {"properties": {"ab": {}}}),
    ):  # fmt: skip
        with pytest.raises(NoJoinError):
            join_schemas(one, other)
        assert merge(other, one) is None
    assert join_schemas({"pattern": "a"}, {"pattern": "b"}) == {"pattern": ["a", "b"]}
    assert join_schemas({"pattern": ["a", "b"]}, {"pattern": "b"}) == {"pattern": ["a", "b"]}


def test_types_and_values_that_both_have() -> None:
    assert join_schemas({"type": "number"}, {"type": ["integer", "null"]}) == {"type": "integer"}
    two = {"type": ["integer", "null"]}
    assert join_schemas({"type": ["number", "null"]}, two) == two
    assert join_schemas({"enum": [1, 2]}, {"enum": [True, 2.0]}) == {"enum": [2]}
    assert join_schemas({"enum": [1]}, {"enum": [True]}) is None


def test_equal_values_have_one_key() -> None:
    for one, other, same in (
        (1, 1.0, True), (1, True, False), ("1", 1, False), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        (0, False, False), (2.5, 2.5, True), (None, False, False),
    ):  # fmt: skip
        assert (value_key(one) == value_key(other)) is same, (one, other)


def test_numbers_of_properties_are_alternatives() -> None:
    """All subsets of up to six properties."""
    names = "abcdef"
    for count in (2, 5):
        for required in (0, 1, 2):
            properties = {name: {"type": "null"} for name in names[:count]}
            for least in range(count + 2):
                for most in (None, *range(count + 1)):
                    either, unheld = chosen_properties(
                        names[:required], names[required:count], least, most
                    )
                    schema = {"properties": properties, "required": list(names[:required])}
                    limits = {
                        "minProperties": least,
                        **({} if most is None else {"maxProperties": most}),
                    }
                    held = {**schema, **({"anyOf": either} if either else {})}
                    both = [
                        jsonschema_rs.validator_for(each) for each in ({**schema, **limits}, held)
                    ]
                    assert len(either) <= 24
                    for size in range(count + 1):
                        for some in combinations(names[:count], size):
                            value = dict.fromkeys(some)
                            fits, found = (each.is_valid(value) for each in both)
                            assert found or not fits, (limits, held, value)
                            assert fits or not found or unheld, (limits, held, value)


def test_which_numbers_of_properties_are_named() -> None:
    def unheld(least: int, most: int | None, count: int) -> list[str]:
        return chosen_properties([], [str(n) for n in range(count)], least, most)[1]

    assert unheld(2, None, 7) == unheld(0, 1, 24) == unheld(2, 4, 4) == unheld(1, 2, 6) == []
    assert unheld(2, None, 8) == ["minProperties"] and unheld(0, 2, 8) == ["maxProperties"]
    assert unheld(1, 2, 7) == ["maxProperties"] and unheld(3, 4, 7) == [
        "minProperties",
        "maxProperties",
    ]
    assert chosen_properties([], "abcdefgh", 2, None)[0] == [{"required": [n]} for n in "abcdefgh"]
    assert len(chosen_properties([], "abcdefgh", 0, 2)[0]) == 8
    assert unheld(3, 2, 4) == ["minProperties"] and chosen_properties("ab", "c", 0, 1)[1] == [
        "maxProperties"
    ]


def test_a_grammar_holds_numbers_of_few_properties() -> None:
    schema = {
        "type": "object",
        "properties": {n: {"type": "null"} for n in "abcd"},
        "minProperties": 2,
        "maxProperties": 3,
    }
    assert loose_schema(schema).relaxed_keywords == ()
    assert loose_schema({**schema, "additionalProperties": True}).relaxed_keywords == (
        "minProperties",
        "maxProperties",
    )


def test_lists_of_different_items_are_no_longer_than_their_values() -> None:
    items = {"enum": [*range(9), 1.0, True]}
    for limits, most in (
        ({}, 10),
        ({"maxItems": 12}, 10),
        ({"maxItems": 9}, 9),
        ({"minItems": 11}, None),
    ):
        form = loose_schema({"type": "array", "items": items, "uniqueItems": True, **limits})
        assert form.schema.get("maxItems") == most and form.relaxed_keywords == ("uniqueItems",)
    part = {"$ref": "#/$defs/x"}
    form = loose_schema(
        {"type": "array", "items": part, "uniqueItems": True, "$defs": {"x": items}}
    )
    assert form.schema["maxItems"] == 10
    first = {"type": "array", "prefixItems": [{}], "items": items, "uniqueItems": True}
    assert "maxItems" not in loose_schema(first).schema
