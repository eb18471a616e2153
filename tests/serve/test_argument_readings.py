"""Arguments between tags: each text is read as the value that fits the schema, whichever keywords say its type.

Another package says which values fit.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema_rs
import pytest

from max.serve.chat.tools.definitions import Tool
from max.serve.chat.tools.parser import parser_of
from max.serve.requests.parts import ArgumentsPart
from tests.serve.test_argument_objects import call_text, layout_of
from tests.serve.test_template_formats import found_of
from tests.serve.tool_templates import TEMPLATES

NAMES = "abc"
TEXT, WHOLE, NUMBER = ({"type": each} for each in ("string", "integer", "number"))
VALUES: list[Any] = [
    TEXT, TEXT, WHOLE, NUMBER, {"type": "boolean"}, {"type": ["string", "null"]}, {"type": ["integer", "string"]},
    {}, True, {"enum": ["12", 7]}, {"const": "true"}, {"pattern": "^1"}, {"maxLength": 2}, {"minimum": 10},
    {"not": WHOLE}, {"not": TEXT}, {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 3}]},
    {"$ref": "#/$defs/t"}, {"type": "array"}, {"if": {"minimum": 5}, "then": TEXT},
]  # fmt: skip
TEXTS = ("12", "7", "2.5", "2.0", "true", "null", "abc", '"12"', "[1]", "{}", "")
LITERALS: dict[str, Any] = {
    "12": 12, "7": 7, "2.5": 2.5, "2.0": 2.0, "true": True, "null": None, '"12"': "12", "[1]": [1], "{}": {},
}  # fmt: skip
DEFINITIONS = {
    "t": {"type": "string", "minLength": 1},
    "o": {"type": "object", "properties": {"a": TEXT, "b": {"type": ["boolean", "string"]}}},
}


def object_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of the arguments a, b and c, of up to three keywords."""

    def part() -> dict[str, Any]:
        if depth < 2 and draw.random() < 0.4:
            return object_schema(draw, depth + 1)
        return draw.choice([listed(), {"required": [draw.choice(NAMES)]}, {"$ref": "#/$defs/o"}])

    def parts() -> list[dict[str, Any]]:
        return [part() for _ in range(draw.randint(1, 3))]

    def value() -> Any:
        return draw.choice(VALUES)

    def listed() -> dict[str, Any]:
        return {"properties": {each: value() for each in draw.sample(NAMES, draw.randint(1, 3))}}

    keywords: list[Callable[[], dict[str, Any]]] = [
        listed,
        lambda: {"patternProperties": {draw.choice(["[ab]", "^c$", "."]): value()}},
        lambda: {"additionalProperties": value()},
        lambda: {"unevaluatedProperties": value()} if not depth else {},
        lambda: {"allOf": parts()},
        lambda: {"anyOf": parts()},
        lambda: {"oneOf": parts()},
        lambda: {"not": part()},
        lambda: {"if": part(), "then": part()},
        lambda: {"if": part(), "then": part(), "else": part()},
        lambda: {"dependentSchemas": {draw.choice(NAMES): part()}},
        lambda: {"dependentRequired": {draw.choice(NAMES): [draw.choice(NAMES)]}},
        lambda: {"$ref": "#/$defs/o"},
    ]  # fmt: skip
    made: dict[str, Any] = {}
    for _ in range(draw.randint(1, 3)):
        made |= draw.choice(keywords)()
    # which of its properties are evaluated by the others is not told apart
    if (
        made.keys() & {"unevaluatedProperties"}
        and len(made.keys() - {"properties", "additionalProperties"}) > 1
    ):
        del made["unevaluatedProperties"]
    return made


def in_draft_7(schema: Any) -> Any:
    """The same with `dependencies`, and without references, beside which that draft has nothing."""
    if isinstance(schema, list):
        return [in_draft_7(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return in_draft_7(DEFINITIONS[schema["$ref"][-1]])
    made = {key: in_draft_7(each) for key, each in schema.items() if key != "unevaluatedProperties"}
    needed = {**made.pop("dependentSchemas", {}), **made.pop("dependentRequired", {})}
    return made | ({"dependencies": needed} if needed else {})


def read(style: str, parameters: dict[str, Any], texts: dict[str, str], cut: bool = False) -> str:
    """The JSON of the arguments of a call, which comes letter by letter."""
    answer = call_text(style, list(texts.items()))
    if cut:
        answer = answer.removesuffix(layout_of(style).section_end).removesuffix(
            layout_of(style).tail
        )
    parser = parser_of(found_of(TEMPLATES[style]).format, [Tool("run", "", parameters)])
    parts = [part for letter in answer for part in parser.push(letter)]
    parts += parser.finish(cut)
    return "".join(part.text for part in parts if isinstance(part, ArgumentsPart))


def readings_of(text: str) -> list[Any]:
    return [text, LITERALS[text]] if text in LITERALS else [text]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("style", ["parameters", "elements", "tight pairs"])
def test_arguments_fit_wherever_one_reading_does(style: str, seed: int) -> None:
    draw = random.Random(f"{style} {seed}")
    fitted = told = 0
    for _ in range(120):
        schema = {"type": "object", **object_schema(draw)}
        if draw.random() < 0.3:
            schema = {"$schema": "http://json-schema.org/draft-07/schema#", **in_draft_7(schema)}
        parameters = {**schema, "$defs": DEFINITIONS}
        names = draw.sample(NAMES, draw.randint(1, 3))
        texts = {name: draw.choice(TEXTS) for name in names}
        found = json.loads(read(style, parameters, texts))
        assert list(found) == names
        for name, text in texts.items():
            assert json.dumps(found[name]) in map(json.dumps, [*readings_of(text), 2]), (
                schema,
                texts,
            )
        validator = jsonschema_rs.validator_for(parameters)
        options = [
            dict(zip(names, values, strict=True))
            for values in itertools.product(*(readings_of(text) for text in texts.values()))
        ]
        fits = [validator.is_valid(each) for each in options]
        assert validator.is_valid(found) or not any(fits), (schema, texts, found)
        fitted, told = fitted + any(fits), told + (any(fits) and not all(fits))
    assert fitted > 45 and told > 15


@pytest.mark.parametrize(
    ("rules", "texts", "values"),
    [
        ({"dependentSchemas": {"a": {"properties": {"b": TEXT}}}}, {"a": "x", "b": "12"}, ["x", "12"]),
        ({"dependencies": {"a": {"properties": {"b": TEXT}}}}, {"b": "12", "a": "x"}, ["12", "x"]),
        # what is said on conditions that do not hold is a hint
        ({"dependentSchemas": {"a": {"properties": {"b": TEXT}}}}, {"b": "12"}, ["12"]),
        ({"if": {"required": ["a"]}, "then": {"properties": {"b": TEXT}}, "else": {"properties": {"b": WHOLE}}},
         {"b": "12"}, [12]),
        ({"if": {"properties": {"a": {"const": "t"}}}, "then": {"properties": {"b": TEXT}}},
         {"b": "true", "a": "t"}, ["true", "t"]),
        ({"if": {"properties": {"a": {"const": "t"}}}, "else": {"properties": {"b": TEXT}}},
         {"b": "true", "a": "u"}, ["true", "u"]),
        ({"properties": {"b": {"type": ["string", "integer"], "minimum": 50}}}, {"b": "12"}, ["12"]),
        ({"properties": {"b": {"type": "integer", "minimum": 50}}}, {"b": "12"}, [12]),
        ({"properties": {"b": {"not": WHOLE}}}, {"b": "12"}, ["12"]),
        ({"properties": {"b": {"enum": ["x y"]}}}, {"b": '"x y"'}, ["x y"]),
        ({"properties": {"b": TEXT}}, {"b": '"x y"'}, ['"x y"']),
        ({"unevaluatedProperties": TEXT}, {"b": "12"}, ["12"]),
        ({"unevaluatedProperties": TEXT, "properties": {"b": {}}}, {"b": "12", "a": "7"}, [12, "7"]),
        ({}, {"a": "12", "b": "x"}, [12, "x"]),
        # another rule is broken: each still has the type that is said of it
        ({"required": ["c"], "dependentSchemas": {"a": {"properties": {"b": TEXT}}}}, {"a": "7", "b": "12"},
         [7, "12"]),
    ],
)  # fmt: skip
def test_texts_and_their_values(
    rules: dict[str, Any], texts: dict[str, str], values: list[Any]
) -> None:
    for style in ("parameters", "elements"):
        found = json.loads(read(style, {"type": "object", **rules}, texts))
        assert json.dumps(found) == json.dumps(dict(zip(texts, values, strict=True)))


def test_many_arguments_that_may_be_several_values() -> None:
    """Of more than a few only one has another value than it would have alone."""
    names = [f"n{number}" for number in range(40)]
    condition = {"properties": {"n7": {"const": "7"}, "n0": {"const": 0}}, "required": names}
    rules = {"properties": {name: {} for name in names}, "allOf": [condition]}
    texts = {name: name[1:] for name in names}
    wanted = {name: "7" if name == "n7" else int(name[1:]) for name in names}
    assert json.loads(read("parameters", rules, texts)) == wanted
    # a rule that no reading of an argument alone decides
    either = {"not": {"required": names, "properties": {"n9": WHOLE, "n0": WHOLE}}}
    found = json.loads(read("parameters", {"allOf": [either]}, texts))
    assert found in ({**dict(zip(names, range(40), strict=True)), "n0": "0"},
                     {**dict(zip(names, range(40), strict=True)), "n9": "9"})  # fmt: skip


def test_arguments_are_written_when_nothing_can_change_them() -> None:
    """Those after one that waits for the rest wait too; a call that is cut off has all of its whole arguments."""
    rules = {"dependentSchemas": {"c": {"properties": {"b": TEXT}}}}
    answer = call_text("parameters", [("a", "x"), ("b", "7"), ("c", "y")])
    parser = parser_of(found_of(TEMPLATES["parameters"]).format, [Tool("run", "", rules)])
    written: list[tuple[int, str]] = []
    for at, letter in enumerate(answer):
        found = [part for part in parser.push(letter) if isinstance(part, ArgumentsPart)]
        written += [(at, part.text) for part in found]
    assert [text for _, text in written] == ['{"a": "x"', ', "b": "7"', ', "c": "y"', "}"]
    assert written[0][0] <= answer.index("=b") and written[1][0] > answer.index("</function")
    for style in ("parameters", "elements", "tight pairs"):
        texts = {"a": "x", "b": "7", "c": "y"}
        whole = read(style, rules, texts)
        assert json.loads(whole) == texts
        assert read(style, rules, texts, cut=True) in (whole, whole[:-1])
        plain = read(style, {}, {"a": "x", "b": "7"}, cut=True)
        assert plain.removesuffix("}") == '{"a": "x", "b": 7'


def test_arguments_that_take_too_long_to_check_are_read_by_their_types() -> None:
    """Each has one of its readings, and the time is bounded."""
    parameters = {"properties": {"a": {"additionalProperties": {"type": ["integer", "string"]}}}}
    count = 12_000
    inner = "".join(f"#!<k{number}>{number}#!</k{number}>" for number in range(count))
    found = json.loads(read_whole("elements", parameters, {"a": inner}))["a"]
    assert found == {f"k{number}": number for number in range(count)}


def read_whole(style: str, parameters: dict[str, Any], texts: dict[str, str]) -> str:
    parser = parser_of(found_of(TEMPLATES[style]).format, [Tool("run", "", parameters)])
    parts = [*parser.push(call_text(style, list(texts.items()))), *parser.finish()]
    return "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
