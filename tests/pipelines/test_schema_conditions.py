"""Conditions, alternatives and members of JSON schemas in other words: the same values fit, by another package."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import loose_schema, of_json_schema, of_loose_schema
from max.pipelines.structured.schemas.conditions import Conditions
from max.pipelines.structured.schemas.merging import (
    CONDITIONS,
    combines,
    condition_base,
    disjoint,
    exclusive,
    is_condition,
    merge,
)
from max.pipelines.structured.schemas.references import References

NAMES, PARTS = "abc", (1, 2, "a", "ab")
VALUES = [
    *PARTS, 3.5, None, True, [], [1],
    *(
        {name: value for name, value in zip(NAMES, values, strict=True) if value != ""}
        for values in itertools.product(("", *PARTS), repeat=len(NAMES))
    ),
]  # fmt: skip
BASES: list[dict[str, Any]] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {name: {"type": ["string", "integer"]} for name in NAMES}},
    {"type": "object", "properties": {"a": {"enum": [1, 2, "a"]}, "b": {"type": "string"}, "c": True}},
    {"type": ["object", "string"]},
    {"enum": [*PARTS]},
]  # fmt: skip


def fits(schema: Any) -> list[bool]:
    """Which values another package takes."""
    validator = jsonschema_rs.validator_for(schema)
    return [validator.is_valid(value) for value in VALUES]


def names_of(draw: random.Random, least: int = 1) -> list[str]:
    return draw.sample(NAMES, draw.randint(least, 2))


def part_of(draw: random.Random) -> Any:
    """A schema of a few keywords."""
    text, name = {"type": "string"}, draw.choice(NAMES)
    return draw.choice([
        True,
        False,
        {"required": names_of(draw)},
        {"properties": {name: draw.choice([False, {"const": draw.choice(PARTS)}])}},
        {"properties": {name: {"enum": draw.sample(PARTS, 2)}}, "required": [name]},
        {"type": draw.choice(["object", "string", "integer"])},
        {"type": "string", "minLength": draw.randint(1, 2)},
        {"const": draw.choice(PARTS)},
        {"properties": {name: text}, "additionalProperties": draw.choice([False, False, text, True])},
        {"minimum": 2},
        {"properties": {name: text}, "required": names_of(draw), "type": "object"},
        {"properties": {each: draw.choice([True, {}, text]) for each in names_of(draw)}},
    ])  # fmt: skip


def compare(given: dict[str, Any], written: dict[str, Any]) -> None:
    """No value fits the second schema only, and none the first one only but for opposites that are narrower."""
    first, second = fits(given), fits(written)
    # a grammar has no name for the numbers without the integers, or for all properties but a few
    narrow = re.search('"additionalProperties"|"integer"', json.dumps(given))
    for value, one, other in zip(VALUES, first, second, strict=True):
        assert one == other or (narrow and one), (value, given, written)


@pytest.mark.parametrize(
    "keyword", ["not", "if", "dependentRequired", "dependentSchemas", "dependencies"]
)
def test_conditions_as_alternatives(keyword: str) -> None:
    held = 0
    for seed in range(150):
        draw = random.Random(seed)
        schema, more = dict(draw.choice(BASES)), dict[str, Any]()
        if keyword == "not":
            schema["not"] = part_of(draw)
        elif keyword == "if":
            wanted = draw.choice([("then",), ("else",), ("then", "else")])
            schema |= {each: part_of(draw) for each in ("if", *wanted)}
        else:
            own: dict[str, Any] = {}
            for name in names_of(draw):
                needed = [each for each in names_of(draw, 0) if each != name]
                lists = keyword == "dependentRequired" or (
                    keyword == "dependencies" and draw.random() < 0.5
                )
                own[name] = needed if lists else part_of(draw)
            schema[keyword] = own
            if keyword == "dependencies":
                more["$schema"] = "http://json-schema.org/draft-07/schema#"
        found, left = Conditions(References(schema)).alternatives(schema)
        assert left in ([], [keyword])
        if not left:
            held += 1
            compare({**schema, **more}, {**condition_base(schema), "allOf": found or [True]})
    assert held > 100


def test_conditions_that_are_none() -> None:
    """Without a branch, or without a condition, nothing is demanded."""
    for schema in (
        {"if": {"required": ["a"]}},
        {"then": False},
        {"else": False},
        {"if": True, "then": None},
    ):
        assert Conditions(References(schema)).alternatives(schema) == ([], []), schema
    many = {name: ["z"] for name in "abcde"}
    for count, left in ((4, []), (5, ["dependentRequired"])):
        schema = {"dependentRequired": dict(list(many.items())[:count])}
        found, missing = Conditions(References(schema)).alternatives(schema)
        assert missing == left and len(found) == (0 if left else 4)
    schema = {"dependencies": 3, "dependentRequired": {"a": ["b"]}}
    assert len(Conditions(References(schema)).alternatives(schema)[0]) == 1


def test_alternatives_that_exclude_each_other() -> None:
    held = 0
    for seed in range(400):
        draw = random.Random(seed)
        schema, choices = draw.choice(BASES), [part_of(draw) for _ in range(draw.randint(2, 3))]
        made = Conditions(References(schema)).apart(choices, schema, {})
        if made is not None:
            held += 1
            compare({**schema, "oneOf": choices}, {**schema, "anyOf": made})
    assert held > 150
    conditions = Conditions(References({}))
    # a closed object has no other property whose opposite could be meant
    closed = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    made = conditions.apart(
        [closed, {"properties": {"b": {"const": 1}, "a": {"const": 1}}}], {}, {}
    )
    assert made is not None and '"b"' not in json.dumps(made[0]) and '"a"' in json.dumps(made[0])
    for count, made in ((1, False), (2, True), (6, True), (7, False)):
        choices = [{"const": f"{number}"} for number in range(count)]
        assert (conditions.apart(choices, {}, {}) is not None) == made


def test_objects_in_one() -> None:
    held = 0
    for seed in range(600):
        draw = random.Random(seed)
        first, second = (part if isinstance(part := part_of(draw), dict) else {} for _ in range(2))
        if draw.random() < 0.2:
            second = {**second, "patternProperties": {"^b": {"const": 1}}}
        if (made := merge(first, second)) is not None:
            held += 1
            assert fits(made) == fits({"allOf": [first, second]}), (first, second)
    assert held > 300


def test_keywords_of_two_objects() -> None:
    text, number = {"type": "string"}, {"type": "integer"}
    first = {"type": "object", "properties": {"a": text}, "required": ["a"]}
    before = json.dumps(first)
    both = {"properties": {"a": {"allOf": [text, number]}, "b": number}, "required": ["a", "b"]}
    second = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    assert merge(first, second) == {"type": "object", **both}
    assert json.dumps(first) == before
    for more in (text, {}, True):
        assert merge(first, {"properties": {"a": more}}) == first
    # what says nothing of other properties leaves them to the other object
    for more in (True, {}, None):
        one, other = (
            {"properties": {"a": text}, "additionalProperties": more},
            {"properties": {"b": text}},
        )
        both = {"properties": {"a": text, "b": text}, "additionalProperties": more}
        assert merge(one, other) == merge(other, one) == both
    assert merge(first, {"properties": {"a": False}}) == {**first, "properties": {"a": False}}
    # what has no form of its own is left to the grammar's package
    for keyword, one, other in (
        ("type", "object", "string"), ("required", ["a"], "a"), ("required", "a", ["a"]),
        ("properties", 3, {"a": {}}), ("properties", {"a": {}}, 3), ("patternProperties", [], {"a": {}}),
    ):  # fmt: skip
        assert merge({keyword: one}, {keyword: other}) is None, keyword


WRONG: list[dict[str, Any]] = [
    {"allOf": [{"properties": 3}, {"properties": {"a": {}}}]},
    {"properties": {"a": {}}, "additionalProperties": False, "allOf": [{"properties": 3, "required": ["a"]}]},
    {"properties": {"a": {}}, "allOf": [{"properties": 3, "additionalProperties": {"type": "string"}}]},
    {"allOf": [{"required": [[1]]}, {"required": [[2], "a"]}]},
    {"oneOf": [{"required": [[1]]}, {"required": ["a"]}]},
    {"oneOf": [{"type": "object", "required": [[]], "properties": {"a": {}}}, {**BASES[2], "required": 3}]},
    {"type": "object", "not": {"required": [[1]]}},
    {"type": "object", "not": {"properties": {"a": {"type": "string"}}, "required": 3}},
    {"properties": {"a": [1]}, "not": {"properties": {"a": {"type": "string"}}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", WRONG, ids=str)
def test_lists_that_are_none(schema: dict[str, Any]) -> None:
    """What is no schema is left out, or an error with a message."""
    grammar, _ = of_loose_schema({"type": "object", **schema})
    assert grammar
    try:
        of_json_schema({"type": "object", **schema})
    except InputError as error:
        assert "JSON schema" in str(error)


def test_alternatives_that_require_properties() -> None:
    held = 0
    for seed in range(400):
        draw = random.Random(seed)
        options: list[Any] = [
            {"required": draw.sample(NAMES, draw.randint(1, 3))} for _ in range(draw.randint(1, 3))
        ]
        options += [part_of(draw)] if draw.random() < 0.2 else []
        made = exclusive(options)
        if made is options:
            continue
        held += 1
        first, second = (
            fits({"type": "object", keyword: each})
            for keyword, each in (("oneOf", options), ("anyOf", made))
        )
        assert all(one or not other for one, other in zip(first, second, strict=True)), options
        # each alternative has an object
        assert all(any(fits({"type": "object", **each})) for each in made)
    assert held > 15
    # the order is that of the names, so that equal schemas have equal grammars
    first = exclusive([{"required": ["z"]}, {"required": [*"hgfedcba"]}])[0]
    assert [*first["properties"]] == [*"abcdefgh"]


def test_kinds_of_members() -> None:
    for schema, condition in (
        (True, False), ({}, False), ({"title": "t"}, False), ({"not": {}}, True), ({"then": {}}, True),
        (dict.fromkeys((*CONDITIONS, "then", "else"), {}), True),
        ({"if": {}, "then": {}, "title": "t"}, True), ({"not": {}, "type": "object"}, False),
    ):  # fmt: skip
        assert is_condition(schema) == condition, schema
    for members, found in (
        ([True], True), ([{"not": {}}], False), ([{"required": ["a"], "type": "object"}], False),
        ([{"properties": {}}], True), ([{"not": {}}, {"pattern": "a"}], True), ([], False), (None, False),
    ):  # fmt: skip
        for keyword in ("allOf", "anyOf", "oneOf"):
            assert combines({keyword: members, "type": "object"}) == found, members
    for pattern, others, apart in (
        ("^ab", ["^b", "^c"], True), ("^ab", ["^a"], False), ("^a", ["^ab"], False), ("^ab", ["^ac"], True),
        ("ab", ["^b"], False), ("^a", ["b"], False), ("^a", ["^b", "^ab"], False), ("^.", ["^b"], False),
    ):  # fmt: skip
        assert disjoint(pattern, dict.fromkeys(others)) == apart, (pattern, others)


def schema_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with conditions, alternatives and members."""
    schema = dict(draw.choice(BASES))

    def part() -> Any:
        return schema_of(draw, depth + 1) if depth < 1 and draw.random() < 0.3 else part_of(draw)

    for keyword in draw.sample(
        ["not", "if", "dependentSchemas", "allOf", "anyOf", "oneOf", "required", "properties"],
        draw.randint(1, 3),
    ):
        match keyword:
            case "not":
                schema["not"] = part()
            case "if":
                schema |= {
                    each: part() for each in draw.choice([("if", "then"), ("if", "then", "else")])
                }
            case "dependentSchemas":
                schema[keyword] = {draw.choice(NAMES): part()}
            case "required":
                schema[keyword] = names_of(draw)
            case "properties":
                schema[keyword] = {name: part() for name in names_of(draw)}
            case _:
                schema[keyword] = [part() for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.2:
        schema["additionalProperties"] = draw.choice([True, {"type": "string"}])
    return schema


@pytest.mark.parametrize("seed", range(4))
def test_what_a_grammar_holds_fits_the_schema(seed: int) -> None:
    held = 0
    for number in range(100):
        schema = schema_of(random.Random(1000 * seed + number))
        form = loose_schema(schema)
        # what a closed object requires is listed, though it excludes that
        if form.relaxed_keywords or '"additionalProperties": false' in json.dumps(schema):
            continue
        held += 1
        first, second = fits(schema), fits(form.schema)
        wrong = [
            value
            for value, one, other in zip(VALUES, first, second, strict=True)
            if other and not one
        ]
        assert not wrong, (wrong[0], schema, form.schema)
    assert held > 30


A, B = ({"type": "object", "properties": {name: {"type": "string"}}} for name in "ab")


@pytest.mark.parametrize(
    ("choices", "overlap"),
    [
        # open objects with what the other one lists fit both
        ([A, {**B, "required": ["b"]}], True),
        ([{**A, "required": ["a"]}, {**B, "required": ["b"]}], False),
        ([{**A, "required": ["a"]}, {**A, "required": ["b"]}], True),
        ([{**A, "additionalProperties": False}, {**B, "required": ["b"]}], False),
        ([{**A, "patternProperties": {"b": {}}}, {**B, "required": ["b"]}], True),
        ([{**A, "additionalProperties": True}, {**B, "required": ["b"]}], True),
        # one that lists nothing is open everywhere
        ([A, {"type": "object", "required": ["b"]}], True),
        ([A, {"type": "string"}, {"const": 3}], False),
        ([{"required": ["a"]}, {"required": ["b"]}], False),  # no objects that become closed
        # the objects within
        ([{"type": "object", "properties": {"c": {**each, "required": [name]}}, "required": ["c"]}
          for name, each in (("a", A), ("b", B))], False),
        ([{"type": "object", "properties": {"c": each}, "required": ["c"]} for each in (A, B)], True),
        ([{"const": number} for number in range(64)], False),
        ([{"const": number} for number in range(65)], True),
    ],
)  # fmt: skip
def test_alternatives_that_overlap_without_other_properties(
    choices: list[Any], overlap: bool
) -> None:
    for order in (choices, choices[::-1]):
        schema = {"oneOf": order}
        assert Conditions(References(schema)).may_overlap(order, schema) == overlap
    # the type may stand around the alternatives
    if {"type": "object"}.items() <= choices[0].items() and len(choices) == 2:
        own = [{key: value for key, value in each.items() if key != "type"} for each in choices]
        schema = {"type": "object", "oneOf": own}
        assert Conditions(References(schema)).may_overlap(own, schema) == overlap


def test_alternatives_that_overlap_are_named() -> None:
    """Where they have no opposites; else they exclude each other."""
    for choices, named in (
        ([A, {**B, "required": ["b"]}], False),
        ([{**A, "minProperties": 1}, {**B, "required": ["b"]}], True),
    ):
        schema = {"type": "object", "properties": {"x": {"oneOf": choices}}, "required": ["x"]}
        grammar, relaxed = of_loose_schema(schema)
        assert relaxed == (("properties.x.oneOf: alternatives overlap",) if named else ())
        if named:
            with pytest.raises(InputError, match="properties.x.oneOf: alternatives overlap"):
                of_json_schema(schema)
        else:
            assert of_json_schema(schema) and grammar
