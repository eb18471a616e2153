"""JSON schemas as grammars hold them: random texts of the grammars, checked by another package."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anthropic.types
import jsonschema_rs
import llguidance
import llguidance.hf
import numpy as np
import openai.types.chat
import openai.types.responses
import pydantic
import pytest
from transformers import AutoTokenizer

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured.grammar import loose_schema, of_json_schema, of_loose_schema
from max.pipelines.structured.schemas.check import misfit
from max.pipelines.structured.schemas.forms import grammar_schema

TEXT = {"type": "string", "maxLength": 6}


@cache
def vocabulary() -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """The tokenizer, llguidance's form of it, and which tokens close something or are letters."""
    from tests.serve.conftest import TINY as folder

    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    closing = np.array([bool(text) and set(text) <= set('"}], ') for text in texts])
    letters = np.array([text.isalnum() for text in texts])
    return tokenizer, llguidance.hf.from_tokenizer(tokenizer), closing, letters


def walk(grammar: str, numbers: random.Random, most: int = 160) -> str | None:
    """A random text of a grammar; None if it does not end soon."""
    tokenizer, words, closing, letters = vocabulary()
    matcher = llguidance.LLMatcher(words, grammar)
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for step in range(4 * most):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(tokenizer)])
        if matcher.is_accepting() and (step > most or numbers.random() < 0.5 or len(allowed) < 2):
            return tokenizer.decode(tokens)
        wanted = closing if step > most or numbers.random() < 0.4 else letters
        pool = allowed[wanted[allowed]] if numbers.random() < 0.8 or step > most else allowed
        token = int(numbers.choice(pool if len(pool) else allowed))
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens)
        assert matcher.consume_token(token)
        tokens.append(token)
    return tokenizer.decode(tokens) if matcher.is_accepting() else None


def thing(**more: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"a": TEXT, "b": TEXT, "c": {"type": "integer"}},
        **more,
    }


HELD = {
    "closed": thing(),
    "closed and required": {"type": "object", "properties": {"a": TEXT}, "required": ["a", "z"]},
    "propertyNames pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-z]{1,3}$"},
        "additionalProperties": TEXT,
    },
    "propertyNames enum": {
        "type": "object",
        "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": TEXT,
    },
    "not const": {"enum": ["a", "b", 1], "not": {"const": "a"}},
    "not required": thing(**{"not": {"required": ["a"]}}),
    "not type": {"not": {"type": ["object", "array", "number", "integer"]}, "maxLength": 5},
    "if then": thing(
        **{"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": {"required": ["c"]}}
    ),
    "if const": {
        "type": "object",
        "properties": {"kind": {"enum": ["x", "y"]}, "a": TEXT},
        "required": ["kind"],
        "allOf": [{"if": {"properties": {"kind": {"const": "x"}}}, "then": {"required": ["a"]}}],
    },
    "dependentRequired": thing(dependentRequired={"a": ["b", "c"]}),
    "dependencies": thing(dependencies={"a": ["b"], "b": {"required": ["c"]}}),
    "dependentSchemas": thing(dependentSchemas={"a": {"required": ["c"]}}),
    "unevaluatedProperties": thing(unevaluatedProperties=False),
    "dynamicAnchor": {
        "$dynamicAnchor": "n",
        "type": "object",
        "properties": {"next": {"$dynamicRef": "#n"}},
    },
    "oneOf of required": thing(oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    "oneOf of objects": {
        "oneOf": [
            {"type": "object", "properties": {"t": {"const": n}, n: TEXT}, "required": ["t"]}
            for n in ("x", "y")
        ]
    },
    "anyOf beside properties": thing(
        anyOf=[{"required": ["a"]}, {"properties": {"d": TEXT}, "required": ["d"]}]
    ),
    "allOf of objects": {"allOf": [thing(), {"properties": {"d": TEXT}, "required": ["d"]}]},
    "reference": {
        "properties": {"a": {"$ref": "#/definitions/x~1y"}},
        "definitions": {"x/y": thing()},
        "type": "object",
    },
    "reference and more": {
        "type": "object",
        "$defs": {"x": thing()},
        "properties": {"o": {"$ref": "#/$defs/x", "required": ["a"]}},
    },
    "anchor": {
        "type": "object",
        "$defs": {"x": {"$anchor": "t", **TEXT}},
        "properties": {"o": {"$ref": "#t"}},
    },
    "recursive": {
        "type": "object",
        "properties": {"n": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
    },
    "formats": {
        "type": "object",
        "required": ["a", "b", "c"],
        "properties": {
            name: {"type": "string", "format": form, "maxLength": 8}
            for name, form in zip(
                "abcdefgh",
                ["binary", "password", "path", "uuid4", "base64", "ipvanyaddress", "color", "x"],
                strict=True,
            )
            if form != "uuid4"
        },
    },
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 3,
        "exclusiveMinimum": True,
        "maximum": 9,
    },
    "items list": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [TEXT, {"type": "integer"}],
        "additionalItems": False,
    },
    "minProperties": thing(minProperties=1),
    "maxProperties": thing(maxProperties=3),
    "python pattern": {"type": "string", "pattern": r"^\d{3}\Z"},
    "annotations": {
        "type": "string",
        "maxLength": 3,
        "title": "t",
        "examples": [1],
        "deprecated": True,
        "$comment": "",
        "readOnly": True,
        "contentEncoding": "base64",
        "x-order": 3,
        "discriminator": {"propertyName": "a"},
    },
    "patterns": {"type": "object", "patternProperties": {"^a": TEXT, "^b": {"type": "integer"}}},
}
HELD |= {
    "different items": {"type": "array", "items": {"enum": ["a", "b", 1, 1.0]}, "uniqueItems": True},
    "different items of a length": {
        "type": "array", "items": {"$ref": "#/$defs/n"}, "uniqueItems": True, "minItems": 2, "maxItems": 3,
        "$defs": {"n": {"enum": ["a", "b", "c", "d"]}},
    },
    "different items of a type": {
        "type": "array", "items": {"type": ["string", "integer"], "enum": ["a", True, 1, None]}, "uniqueItems": True,
    },
    "different items of no type": {
        "type": "array", "items": {"type": "string", "const": 1}, "uniqueItems": True,
    },
    "different booleans": {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
    "contains a text": {"type": "array", "items": TEXT, "contains": {"const": "a"}},
    "contains a number": {
        "type": "array", "items": {"type": ["integer", "boolean"]}, "contains": {"type": "integer"}, "maxItems": 4,
    },
    "contains an object": {"type": "array", "contains": thing(required=["a"]), "items": thing()},
    "overlapping lengths": {"oneOf": [TEXT, {"type": "string", "minLength": 2, "maxLength": 9}]},
    "overlapping numbers": {
        "oneOf": [
            {"type": "number", "minimum": 0, "maximum": 20}, {"type": "number", "exclusiveMinimum": 5, "maximum": 40},
        ],
    },
    "overlapping texts": {
        "oneOf": [{"type": "string", "pattern": "^a[bc]$"}, {"type": "string", "maxLength": 3}, {"type": "null"}],
    },
    "not a begin": {"type": "string", "maxLength": 6, "not": {"pattern": "^_"}},
    "not a text": {"type": "string", "maxLength": 6, "not": {"pattern": r"^[a-z]\dx$"}},
    "a dependency that excludes": thing(dependentSchemas={"a": False}, required=["b"]),
    "other properties of a member": {
        "type": "object",
        "allOf": [
            {"properties": {"b": {"type": ["string", "integer"], "maxLength": 2}}, "required": ["b"]},
            {"properties": {"a": TEXT}, "additionalProperties": TEXT},
        ],
    },
    "overlapping objects": {
        "type": "object", "oneOf": [{"properties": {"a": TEXT}}, {"properties": {"b": TEXT}, "required": ["b"]}],
    },
    "not a text, or none": {"type": ["string", "boolean"], "not": {"type": "string", "pattern": "^ab"}},
}  # fmt: skip
RELAXED = {
    "uniqueItems": {"type": "array", "items": TEXT, "uniqueItems": True},
    "contains": {"type": "array", "items": TEXT, "contains": {"minLength": 2}, "minContains": 2},
    "pattern": {"type": "string", "maxLength": 5, "pattern": r"(a)\1"},
    "not": {"type": "string", "maxLength": 5, "not": {"pattern": r"\ba"}},
    "if": {"type": "integer", "if": {"multipleOf": 2}, "then": {"minimum": 5}},
    "type": {"type": "file"},
    "$ref": {"$ref": "https://example.com/x.json"},
    "patternProperties": {"type": "object", "patternProperties": {r"(a)\1": TEXT}},
    "multipleOf": {"type": "integer", "multipleOf": 10**7},
    "optional": {
        "type": "object",
        "properties": dict.fromkeys((f"p{n}" for n in range(600)), TEXT),
    },
    "oneOf": {
        "oneOf": [
            thing(required=["a"]),
            {
                "type": "object",
                "properties": {"c": {"multipleOf": 2}},
                "additionalProperties": {"maxLength": 3},
            },
        ]
    },
    "propertyNames": {
        "type": "object",
        "properties": {"a": TEXT},
        "propertyNames": {"minLength": 2},
    },
}


@pytest.mark.parametrize("kind", HELD)
def test_texts_of_the_grammar_fit_the_schema(kind: str) -> None:
    schema = HELD[kind]
    grammar, relaxed = of_loose_schema(schema)
    assert not relaxed
    assert of_json_schema(schema)
    check(schema, grammar, kind, 12)


def check(schema: dict[str, Any], grammar: str, seed: str, count: int) -> None:
    validator = jsonschema_rs.validator_for(json.loads(json.dumps(schema).replace("\\\\Z", "$")))
    numbers, texts = random.Random(seed), 0
    for _ in range(count):
        text = walk(grammar, numbers)
        if text is None:
            continue
        texts += 1
        value = json.loads(text)
        validator.validate(value)
        assert json.dumps(value, ensure_ascii=False) == text or '"' in text or "." in text, text
    assert texts


@pytest.mark.parametrize("kind", RELAXED)
def test_what_a_grammar_does_not_hold_is_named(kind: str) -> None:
    grammar, relaxed = of_loose_schema({"type": "object", "properties": {"x": RELAXED[kind]}})
    assert relaxed and kind in " ".join(relaxed), relaxed
    assert walk(grammar, random.Random(kind)) is not None
    with pytest.raises(InputError, match=kind.replace("$", r"\$")):
        of_json_schema({"type": "object", "properties": {"x": RELAXED[kind]}})


def test_objects_have_the_listed_properties_unless_the_schema_says_more() -> None:
    def form(schema: dict[str, Any]) -> Any:
        return grammar_schema(schema).schema

    assert form(thing())["additionalProperties"] is False
    assert form({"type": "object", "properties": {}})["additionalProperties"] is False
    assert "additionalProperties" not in form({"type": "object"})
    assert form(thing(additionalProperties=True))["additionalProperties"] is True
    assert form(thing(additionalProperties=TEXT))["additionalProperties"] == TEXT
    inner = form({"type": "array", "items": thing()})["items"]
    assert inner["additionalProperties"] is False


def test_the_white_space_has_one_style() -> None:
    grammar, _ = of_loose_schema(
        {
            "type": "object",
            "properties": {"a": {"enum": [[1, 2]]}, "b": {"const": {"c": 1}}},
            "required": ["a", "b"],
        }
    )
    assert walk(grammar, random.Random(0)) == '{"a": [1, 2], "b": {"c": 1}}'


def test_no_schema_is_refused() -> None:
    """Schemas that are odd, wrong, contradictory or large become what is left of them."""
    deep: Any = TEXT
    for _ in range(300):
        deep = {"type": "object", "properties": {"n": deep}}
    odd: list[Any] = [
        {"type": "object", "properties": 3},
        {"type": ["x", "string"]},
        {"enum": []},
        {"properties": {"a": False}, "required": ["a"]},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"items": 4},
        {"minLength": -1},
        {"pattern": "("},
        {"required": "a"},
        {"anyOf": []},
        {"minimum": "1"},
        deep,
        {
            "type": "object",
            "properties": {f"p{n}": thing() for n in range(3000)},
            "required": [f"p{n}" for n in range(3000)],
        },
    ]
    for schema in odd:
        form = loose_schema(schema)
        assert isinstance(form.schema, dict), schema
        grammar, relaxed = of_loose_schema(schema)
        assert grammar and relaxed == form.relaxed_keywords


def some_value(numbers: random.Random, depth: int = 0) -> Any:
    kinds = ["a", "ab", "xyz", 1, 2, 3.5, 4.0, True, None]
    if depth < 3 and numbers.random() < 0.7:
        if numbers.random() < 0.4:
            return [some_value(numbers, depth + 1) for _ in range(numbers.randint(0, 3))]
        names = numbers.sample(
            ["a", "b", "c", "kind", "ab", "n", "t", "x", "o", "d"], numbers.randint(0, 4)
        )
        return {name: some_value(numbers, depth + 1) for name in names}
    return numbers.choice(kinds)


@pytest.mark.parametrize("kind", [["string", 7], {}, [[]], 3], ids=str)
@pytest.mark.parametrize("bound", [{"minimum": 1}, {"pattern": "^a"}], ids=["number", "text"])
def test_an_opposite_of_bounds_takes_any_type(bound: dict[str, Any], kind: Any) -> None:
    """The type of a schema under ``not`` may be a list, or no type at all: what cannot be held is named."""
    form = grammar_schema({"not": {**bound, "type": kind}})
    assert form.relaxed_keywords == ("not",)


@pytest.mark.parametrize("kind", [*HELD, *RELAXED])
def test_misfits_are_those_of_another_package(kind: str) -> None:
    schema = {**HELD, **RELAXED}[kind]
    if kind in (
        "formats",
        "draft 4",
        "items list",
        "python pattern",
        "type",
        "$ref",
        "optional",
        "dynamicAnchor",
        "different items of a length",
    ):
        return  # formats, other drafts, and what is no schema there
    validator = jsonschema_rs.validator_for(schema, validate_formats=False)
    numbers = random.Random(kind)
    for _ in range(300):
        value = some_value(numbers)
        assert (misfit(value, schema) is None) == validator.is_valid(value), (schema, value)


def test_a_misfit_names_its_place() -> None:
    schema = {
        "type": "object",
        "properties": {"x": {"type": "array", "items": {"type": "array", "uniqueItems": True}}},
    }
    assert misfit({"x": [[1, 2], [3, 3]]}, schema) == "x.1: uniqueItems"
    assert misfit({"x": [[1, 1.0]]}, schema) == "x.0: uniqueItems"
    assert misfit({"x": [[1, True]]}, schema) is None
    assert misfit({}, {"$ref": "#"}) is None


@pytest.mark.long
@pytest.mark.skipif("JSON_SCHEMAS" not in os.environ, reason="JSON_SCHEMAS names no file")
def test_published_schemas() -> None:
    """Schemas of a file, a list of pairs of names and schemas: its texts fit where a grammar holds all of it."""
    wrong, held = list[str](), 0
    for name, schema in json.loads(Path(os.environ["JSON_SCHEMAS"]).read_text()):
        grammar, relaxed = of_loose_schema(schema)
        try:
            jsonschema_rs.validator_for(schema)
        except ValueError:
            continue  # no schema for the other package
        if relaxed:
            continue
        held += 1
        try:
            check(schema, grammar, name, 6)
        except jsonschema_rs.ValidationError as error:
            wrong.append(f"{name}: {error}")
    print(f"{held} held, wrong: {wrong}")
    assert held and not wrong


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas within a schema that have a few keywords."""
    if not isinstance(schema, dict):
        return
    named = [schema.get(key) for key in ("$defs", "definitions", "properties", "patternProperties")]
    listed = [schema.get(key) for key in ("anyOf", "oneOf", "allOf")]
    inner = [part for each in named if isinstance(each, dict) for part in each.values()]
    inner += [part for each in listed if isinstance(each, list) for part in each]
    inner += [schema.get("items"), schema.get("additionalProperties")]
    for part in inner:
        if isinstance(part, dict):
            if len(part.keys() - {"description", "title", "default", "$ref", "$comment"}) > 1:
                yield part
            yield from parts_of(part)


def schemas_of_packages() -> list[tuple[str, dict[str, Any]]]:
    """Schemas in the files of installed packages, with the definitions in them as schemas of their own."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted(Path(np.__file__).parents[1].rglob("*.json")):
        if path.stat().st_size > 300_000:
            continue
        try:
            schema = json.loads(path.read_text())
        except (ValueError, OSError):
            continue
        if not isinstance(schema, dict) or "json-schema.org" not in str(schema.get("$schema")):
            continue
        name = "/".join(path.parts[-2:])
        found.setdefault(json.dumps(schema), (name, schema))
        shared = {key: schema[key] for key in ("$schema", "$defs", "definitions") if key in schema}
        for part in parts_of(schema):
            if "#/prop" not in (text := json.dumps(part)):
                found.setdefault(text, (name, {**shared, **part}))
    # of the clients' types, as libraries make the schemas of tools
    for module in (openai.types, openai.types.chat, openai.types.responses, anthropic.types):
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                schema = kind.model_json_schema()
                found.setdefault(json.dumps(schema), (name, schema))
    return [found[key] for key in sorted(found)]


@pytest.mark.long
@pytest.mark.parametrize("seed", [0])
def test_a_sample_of_schemas_of_packages(seed: int) -> None:
    """Each is taken; the texts of its grammar fit it, or what the grammar does not hold is named."""
    schemas = schemas_of_packages()
    sample = random.Random(seed).sample(schemas, min(200, len(schemas)))
    wrong, held, named, without = list[str](), 0, 0, 0
    for name, schema in sample:
        try:
            grammar, relaxed = of_loose_schema(schema)
        except InputError as error:
            wrong.append(f"{name}: refused: {error}")
            continue
        if relaxed:
            named += 1
            continue
        try:
            validator = jsonschema_rs.validator_for(schema)
        except ValueError:
            without += 1  # refers to a file that the other package does not have
            continue
        numbers = random.Random(name)
        for _ in range(4):
            text = walk(grammar, numbers)
            if text is None or re.search(r"\de[+-]?\d{3}", text.lower()):
                continue  # a number that is infinite in Python
            if not validator.is_valid(json.loads(text)):
                wrong.append(f"{name}: {text[:200]}")
                break
        held += 1
    print(
        f"{len(schemas)} schemas, {len(sample)} drawn: {held} held, {named} named, {without} not checked"
    )
    assert held and not wrong, wrong
