"""Objects of arguments in layouts that are not JSON: names by patterns, numbers of arguments, nested lists."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from max.serve.chat.tools.arguments.object_rules import (
    CountedArguments,
    is_open,
    other_arguments,
    schemas_of_name,
)
from max.serve.chat.tools.layouts.layout import CallLayout, Style, fill_mark
from max.serve.chat.tools.schemas import ToolGrammar
from max.serve.errors import ApiError
from tests.serve.test_argument_texts import BYTES, grammar_of, read
from tests.serve.test_template_formats import found_of
from tests.serve.tool_templates import TEMPLATES

TAGGED = ["parameters", "pairs", "typed", "elements"]
STYLES = [*TAGGED, "pythonic", "bare"]


@cache
def layout_of(style: str) -> CallLayout:
    layout = found_of(TEMPLATES[style]).format.layout
    assert layout is not None
    return layout


def bare_text(value: Any, mark: str) -> str:
    match value:
        case str():
            return f"{mark}{value}{mark}"
        case dict():
            return (
                f"{{{','.join(f'{key}:{bare_text(each, mark)}' for key, each in value.items())}}}"
            )
        case list():
            return f"[{','.join(bare_text(each, mark) for each in value)}]"
        case _:
            return json.dumps(value)


def call_text(style: str, arguments: list[tuple[str, Any]]) -> str:
    """A call as a model of a layout writes it."""
    layout = layout_of(style)
    match layout.style:
        case Style.BARE:
            each = [f"{name}:{bare_text(value, layout.value_end)}" for name, value in arguments]
            body = ",".join(each) + "}"
        case Style.PYTHON:
            body = ", ".join(f"{name}={json.dumps(value)}" for name, value in arguments) + ")"
        case _:
            body = ""
            for name, value in arguments:
                is_text = isinstance(value, str)
                end = layout.key_end if is_text else layout.other_key_end
                text = value if is_text else json.dumps(value)
                body += fill_mark(f"{layout.key}{name}{end}{text}{layout.value_end}", "run", name)
                body += layout.value_separator
    head = fill_mark(f"{layout.section or ''}{layout.head}".lstrip(), "run")
    return f"{head}{body}{layout.tail}{layout.section_end}"


@cache
def matcher_of(grammar: str | None) -> llguidance.LLMatcher:
    matcher = llguidance.LLMatcher(BYTES, grammar or "", log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def takes(found: ToolGrammar, text: str) -> bool:
    matcher = matcher_of(found.grammar).deep_copy()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


VALUES = [
    {"type": "integer"},
    {"type": "boolean"},
    {"enum": ["p", "q"]},
    {"type": "string", "pattern": "^[pq]$"},
]


def object_schema(numbers: random.Random) -> dict[str, Any]:
    """An object of few properties, with all that says which others it has, and how many."""
    listed = numbers.sample(["a", "ab", "x1"], numbers.randrange(4))
    schema: dict[str, Any] = {"type": "object"}
    if listed or numbers.random() < 0.5:
        schema["properties"] = {name: numbers.choice(VALUES) for name in listed}
        schema["required"] = [name for name in listed if numbers.random() < 0.4]
    if numbers.random() < 0.6:
        patterns = numbers.choice([["^x"], ["^x", "^y"], ["^[ab]+$"]])
        schema["patternProperties"] = {each: numbers.choice(VALUES) for each in patterns}
    if numbers.random() < 0.5:
        schema["additionalProperties"] = numbers.choice([True, False, {"type": "boolean"}])
    if numbers.random() < 0.4:
        schema["minProperties"] = numbers.randrange(3)
    if numbers.random() < 0.4:
        schema["maxProperties"] = numbers.randrange(1, 4)
    if numbers.random() < 0.2:
        return {"allOf": [schema, {"required": ["b"]}], "type": "object"}
    return schema


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have no properties but those that it names."""
    if "allOf" in schema:
        return {**schema, "allOf": [closed(schema["allOf"][0]), *schema["allOf"][1:]]}
    if schema.keys() & {"properties", "patternProperties"}:
        return {"additionalProperties": False, **schema}
    return schema


def fits_name(schema: dict[str, Any], name: str, value: Any) -> bool:
    """Whether a value of a name is likely to fit: the judge reads whole objects."""
    return all(jsonschema_rs.is_valid(each, value) for each in schemas_of_name(schema, name))


@pytest.mark.parametrize("style", STYLES)
def test_objects_have_the_arguments_that_their_schemas_allow(style: str) -> None:
    numbers, taken, left, named = random.Random(style), 0, 0, 0
    for _ in range(24):
        schema = object_schema(numbers)
        found = grammar_of(style, schema)
        named += bool(found.hints)
        if found.hints:
            continue
        own = schema["allOf"][0] if "allOf" in schema else schema
        order = {name: at for at, name in enumerate(own.get("properties", ()))}
        required: list[str] = own.get("required", [])
        for _ in range(10):
            names = numbers.sample(
                ["a", "ab", "x1", "x2", "y", "b", "abc"], numbers.choice([0, 1, 1, 2, 2, 3, 4])
            )
            names = list({*names, *(required if numbers.random() < 0.8 else required[:0])})
            first = style in ("pythonic", "bare")
            names.sort(key=lambda n: (n not in required and first, order.get(n, 9), n))
            choices = {
                name: [v for v in (1, True, "p", "q") if fits_name(own, name, v)] for name in names
            }
            arguments = [
                (name, numbers.choice(choices[name] * (numbers.random() < 0.9) or [1, True, "p"]))
                for name in names
            ]
            text = call_text(style, arguments)
            found_it, fits = takes(found, text), jsonschema_rs.is_valid(schema, dict(arguments))
            taken, left = taken + found_it, left + (not found_it)
            if found_it:
                assert read(style, schema, text) == dict(arguments) and fits, (schema, text)
            elif jsonschema_rs.is_valid(closed(schema), dict(arguments)):
                # what a mark with the name ends has no other names, and values of any type are texts in bare objects
                others = [name for name in names if name not in order]
                assert others and (style in ("elements", "bare") or "allOf" in schema), (
                    schema,
                    text,
                )
    assert taken > 10 and left > 10 and named < 20, (taken, left, named)


def test_names_that_are_listed_have_no_other_values() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "additionalProperties": {"const": "p"},
    }
    for style in STYLES:
        found = grammar_of(style, schema)
        assert found.hints == () and takes(found, call_text(style, [("a", 1)])), style
        assert not takes(found, call_text(style, [("a", 1), ("a", "p")])), style
        assert not takes(found, call_text(style, [("a", "p")])), style
        assert takes(found, call_text(style, [("ab", "p")])) is (style != "elements")


def test_numbers_of_properties_beyond_repeated_names_are_named() -> None:
    for least, hints in ((1, ()), (2, ("run: minProperties",))):
        schema = {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": least,
        }
        for style in ("parameters", "pythonic", "bare"):
            found = grammar_of(style, schema)
            assert found.hints == hints
            assert not takes(found, call_text(style, [("a", 1)] * (least - 1)))
            assert takes(found, call_text(style, [(f"a{at}", 1) for at in range(least)]))
    with pytest.raises(ApiError, match="run is strict.*hold minProperties"):
        grammar_of("pairs", {**schema, "properties": {}}, strict=True)


def test_counted_arguments_are_those_of_all_choices() -> None:
    """All subsets of four listed arguments and up to two others."""
    for least, most in ((0, 1), (2, None), (2, 3), (3, 3), (5, 5), (1, None), (0, 0)):
        for open_object in (False, True):
            rules: list[str] = []

            def add(body: str, rules: list[str] = rules) -> str:
                rules.append(f"r{len(rules)}: {body}")
                return f"r{len(rules) - 1}"

            def part(name: str) -> Any:
                return lambda first: json.dumps(name if first else f",{name}")

            listed = [(part(name), name == "b") for name in "abcd"]
            counted = CountedArguments(listed, part("z") if open_object else None, least, most, add)
            rule = counted.rule()
            everything = [
                "".join(name for at, name in enumerate("abcd") if number >> at & 1) + "z" * others
                for number in range(16)
                for others in range(3)
            ]
            fits = {
                names
                for names in everything
                if "b" in names and ("z" not in names or open_object)
                and least <= len(names) and (most is None or len(names) <= most)
            }  # fmt: skip
            if rule is None:
                assert not fits
                continue
            grammar = "\n".join(["%llguidance {}", f"start: {rule}", *rules])
            for names in everything:
                assert takes(ToolGrammar(grammar), ",".join(names)) is (names in fits), (
                    names,
                    least,
                    most,
                )


def test_many_arguments_are_not_counted() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(40)}}
    parts = [schema, {"minProperties": 20}]
    for style in ("parameters", "pythonic"):
        assert "minProperties" in "".join(
            grammar_of(style, {"type": "object", "allOf": parts}).hints
        )


def test_lists_within_bare_objects_have_the_items_of_their_places() -> None:
    numbers, taken = random.Random(3), 0
    for _ in range(40):
        items: dict[str, Any] = {"type": "array"}
        if numbers.random() < 0.7:
            items["prefixItems"] = [numbers.choice(VALUES) for _ in range(numbers.randrange(1, 4))]
        items["items"] = numbers.choice([*VALUES, False])
        if numbers.random() < 0.4:
            items["minItems"] = numbers.randrange(4)
        if numbers.random() < 0.4:
            items["maxItems"] = numbers.randrange(5)
        schema = {"type": "object", "properties": {"v": items, "w": {"type": "null"}}}
        found = grammar_of("bare", schema)
        assert found.hints == (), schema
        for _ in range(10):
            value = [numbers.choice([1, True, "p"]) for _ in range(numbers.randrange(5))]
            found_it = takes(found, call_text("bare", [("v", value)]))
            assert found_it is jsonschema_rs.is_valid(schema, {"v": value}), (schema, value)
            taken += found_it
    assert taken > 30


def test_nested_objects_between_marks_have_names_and_numbers_too() -> None:
    inner = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2,
             "additionalProperties": False}  # fmt: skip
    schema = {"type": "object", "properties": {"v": inner}, "required": ["v"]}
    found = grammar_of("bare", schema)
    assert found.hints == ()
    for value, fits in (({"x": 1}, True), ({"x": 1, "xy": 2}, True), ({}, False), ({"y": 1}, False),
                        ({"x": "p"}, False), ({"x": 1, "xy": 2, "xz": 3}, False)):  # fmt: skip
        assert takes(found, call_text("bare", [("v", value)])) is fits, value


def test_which_objects_have_other_arguments() -> None:
    names, integer = {"^a": {"type": "integer"}}, {"type": "integer"}
    patterns = {f"^{letter}": integer for letter in "abcd"}
    for schema, is_open_object, count in (
        ({}, True, 1), ({"properties": {}}, False, 0), ({"patternProperties": names}, True, 1),
        ({"properties": {}, "patternProperties": names}, True, 1), ({"additionalProperties": False}, False, 0),
        ({"patternProperties": names, "additionalProperties": integer}, True, 2),
        # names of two patterns have both schemas, where there are few patterns
        ({"patternProperties": {"^a": integer, "b$": {"minimum": 2}}}, True, 3),
        ({"patternProperties": {**names, "^b": integer}}, True, 2), ({"patternProperties": patterns}, True, 4),
        ({"patternProperties": {"": integer}, "additionalProperties": {"type": "null"}}, True, 1),
        ({"patternProperties": {"^a": False}}, True, 0),
    ):  # fmt: skip
        assert is_open(schema) is is_open_object, schema
        found, lacks = other_arguments(schema, "[a-z]{1,9}")
        assert len(found) == count and lacks == [], schema
    assert other_arguments({"patternProperties": {r"(?<=a)b": {}}}, "[a-z]") == (
        [],
        ["patternProperties"],
    )
    (_, _, both), _ = other_arguments(
        {"patternProperties": {"^a": integer, "b$": {"minimum": 2}}}, "[a-z]{1,9}"
    )
    assert both.schema == {"allOf": [integer, {"minimum": 2}]}
    grammar = ToolGrammar(f"%llguidance {{}}\nstart: NAME\nNAME: {both.names}")
    assert [name for name in ("ab", "a", "b", "acb", "ba") if takes(grammar, name)] == ["ab", "acb"]


def test_the_schemas_of_a_name() -> None:
    schema = {
        "properties": {"x": 1},
        "patternProperties": {"^x": 2, "y": 3},
        "additionalProperties": 4,
    }
    for name, found in (("x", [1, 2]), ("xy", [2, 3]), ("y", [3]), ("a", [4])):
        assert schemas_of_name(schema, name) == found
    assert schemas_of_name({}, "a") == [{}]


def test_names_of_several_patterns() -> None:
    """Each set of up to three patterns that one name fits has its schemas; of four, none fits two."""
    letters = {letter: {"minimum": at} for at, letter in enumerate("abcd")}
    for used, sets in (("abc", {"a", "b", "c", "ab", "ac", "bc", "abc"}), ("abcd", set("abcd"))):
        schema = {"patternProperties": {letter: letters[letter] for letter in used}}
        found, lacks = other_arguments(schema, "[a-d]{1,4}")
        assert lacks == [] and len(found) == len(sets)
        for each in found:
            matcher = ToolGrammar(f"%llguidance {{}}\nstart: NAME\nNAME: {each.names}")
            of_name = each.schema.get("allOf", [each.schema])
            own = "".join(letter for letter in used if letters[letter] in of_name)
            assert own in sets and [name for name in sets if takes(matcher, name)] == [own]
    # a pattern that cannot be read says nothing of any name
    assert schemas_of_name({"patternProperties": {"(?<=a)b": 2}}, "None") == [{}]


def counted(listed: int, other: bool, least: int, most: int | None, required: int = 0) -> Any:
    """Limits of the number of arguments, and the rules that it adds."""
    rules: list[str] = []

    def add(body: str) -> str:
        rules.append(body)
        return f"r{len(rules)}"

    parts = [(lambda _: '"p"', at < required) for at in range(listed)]
    return CountedArguments(parts, (lambda _: '"z"') if other else None, least, most, add), rules


def test_limits_that_say_no_more_are_not_written() -> None:
    for listed, other, least, most, required, needed, lacks in (
        (4, False, 2, None, 2, False, []),
        (4, False, 3, None, 2, True, []),
        (4, False, 9, None, 0, True, []),
        (4, False, 0, 4, 0, False, []),
        (4, False, 0, 3, 0, True, []),
        (4, True, 0, 9, 0, True, []),
        (4, True, 2, None, 1, True, []),
        (4, True, 2, None, 0, True, ["minProperties"]),
        (4, True, 3, None, 1, True, ["minProperties"]),
    ):
        limits, _ = counted(listed, other, least, most, required)
        assert (limits.is_needed(), limits.lacks()) == (needed, lacks), (listed, other, least, most)


def test_the_number_of_counting_rules_has_a_limit() -> None:
    for listed, least, most, most_rules in (
        (30, 20, None, 600), (30, 21, None, None), (30, 0, 20, 600), (30, 0, 21, None), (12, 0, 500, 144),
        # beyond the minimum, and beyond the first that has no comma before it, numbers are the same
        (30, 1, None, 60), (30, 2, None, 90), (600, 0, None, 1200), (601, 0, None, None),
    ):  # fmt: skip
        limits, rules = counted(listed, False, least, most)
        assert (limits.rule() is None) is (most_rules is None), (listed, least, most)
        assert len(rules) <= (most_rules or 0), (listed, least, most)
    assert counted(2, True, 0, 0)[0].rule() == ""
