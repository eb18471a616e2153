"""Conditions, alternatives and members of JSON schemas in other words: the same values fit, by another package."""

from __future__ import annotations

import itertools
import json
import random
import re
from typing import Any

import jsonschema_rs
import pytest

from max.pipelines.structured.grammar import of_loose_schema
from max.pipelines.structured.schema_conditions import Conditions
from max.pipelines.structured.schema_merging import (
    combines,
    condition_base,
    disjoint,
    exclusive,
    is_condition,
    merge,
)
from max.pipelines.structured.schema_references import References

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
        {"properties": {name: {"const": draw.choice(PARTS)}}},
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
        made = Conditions(References(schema)).apart(choices, schema)
        if made is not None:
            held += 1
            compare({**schema, "oneOf": choices}, {**schema, "anyOf": made})
    assert held > 150
    conditions = Conditions(References({}))
    for count, made in ((1, False), (2, True), (6, True), (7, False)):
        choices = [{"const": f"{number}"} for number in range(count)]
        assert (conditions.apart(choices, {}) is not None) == made


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
    text = {"type": "string"}
    assert merge({"properties": {"a": text}}, {"properties": {"a": {}}}) == {
        "properties": {"a": text}
    }
    assert merge({"type": "object"}, {"type": "string"}) is None
    assert merge({"required": "a"}, {"required": ["a"]}) is None


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


def test_kinds_of_members() -> None:
    for schema, condition in (
        (True, False), ({}, False), ({"title": "t"}, False), ({"not": {}}, True), ({"then": {}}, True),
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


TEXT = {"type": "string", "maxLength": 3}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": TEXT, "b": TEXT}, "dependentSchemas": {"a": False}},
        {"type": "object", "properties": {"a": True}, "not": {"properties": {"a": {"type": "string"}}}},
        {
            "type": "object",
            "allOf": [
                {"properties": {"b": {"type": ["string", "integer"], "maxLength": 2}}, "required": ["b"]},
                {"properties": {"a": TEXT}, "additionalProperties": TEXT},
            ],
        },
    ],
    ids=["a property that excludes all", "the opposite of a property of any value", "other properties"],
)  # fmt: skip
def test_texts_of_the_grammar(schema: dict[str, Any]) -> None:
    from tests.pipelines.test_schema_forms import check

    grammar, relaxed = of_loose_schema(schema)
    assert not relaxed
    check(schema, grammar, "seed", 12)
