"""Values in layouts that mark no types: a text that the grammar takes is read as a value that fits the schema."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema_rs
import llguidance
import pytest

from max.serve.chat.tools.arguments.number_texts import number_patterns
from max.serve.chat.tools.arguments.raw_texts import value_forms
from max.serve.chat.tools.arguments.readings import element_readings
from max.serve.chat.tools.values import (
    BareObjectEnd,
    bare_object,
    bare_object_end,
    resolve_schema,
    typed_value,
    types_of,
)

BYTES = llguidance.LLTokenizer("byte")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
NUMBERS = (0, 0.0, -0.5, 1, 9, 10, 99, 100, 1e3, -7, 12.25, 909, -0.07, 1.05, 2999.9)


def limits_of(numbers: random.Random, divisors: tuple[float, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for keyword in BOUNDS:
        if numbers.random() < 0.35:
            found[keyword] = numbers.choice([
                *NUMBERS, numbers.randrange(-40, 40), numbers.randrange(-4000, 4000), numbers.randrange(400) / 100,
            ])  # fmt: skip
    if divisors and numbers.random() < 0.3:
        found["multipleOf"] = numbers.choice(divisors)
    return found


def number_text(numbers: random.Random) -> str:
    whole = numbers.choice(
        [numbers.randrange(20), numbers.randrange(4000), 0, numbers.randrange(10**12)]
    )
    digits = numbers.choice(["", "", ".0", ".00", ".5", ".25", f".{numbers.randrange(100):02}"])
    return f"{numbers.choice(['', '-'])}{whole}{digits}"


@pytest.mark.parametrize("whole", [True, False])
def test_patterns_of_numbers_match_those_within_the_limits(whole: bool) -> None:
    numbers, count = random.Random(whole), 0
    for _ in range(400):
        limits = limits_of(numbers, (1, 2, 3, 5, 7, 8, 10, 25, 100, 0.1, 0.01, 0.5, 2.5))
        patterns, lacks = number_patterns(limits, whole)
        assert set(lacks) <= {"multipleOf"}
        held = {key: value for key, value in limits.items() if key not in lacks}
        schema = {"type": "integer" if whole else "number", **held}
        for _ in range(30):
            text = number_text(numbers)
            found = all(re.fullmatch(pattern, text) for pattern in patterns)
            fits = jsonschema_rs.is_valid(schema, json.loads(text)) and not (whole and "." in text)
            count += found
            assert fits or not found, (schema, text)
            # multiples are written in one way
            if "multipleOf" not in held or ("." not in text and text != "-0"):
                assert found or not fits, (schema, text)
    assert count > 1000


def test_which_multiples_have_a_pattern() -> None:
    def lacks(limits: dict[str, Any], whole: bool = True) -> list[str]:
        return number_patterns(limits, whole)[1]

    assert lacks({"multipleOf": 7}) == lacks({"multipleOf": 7, "minimum": 0}) == ["multipleOf"]
    assert lacks({"multipleOf": 7, "minimum": 0, "maximum": 7 * 199}) == []
    assert lacks({"multipleOf": 7, "minimum": 0, "maximum": 7 * 200}) == ["multipleOf"]
    assert lacks({"multipleOf": 125}) == [] and lacks({"multipleOf": 16}) == ["multipleOf"]
    assert (
        lacks({"multipleOf": 0.5}, False) == ["multipleOf"]
        and lacks({"multipleOf": 0.001}, False) == []
    )
    assert lacks({"minimum": 0.1234567890123456}, False) == ["minimum"]
    assert lacks({"minimum": 123456789012345}) == [] and lacks({"minimum": 1234567890123456}) == [
        "minimum"
    ]


def test_numbers_with_limits_differ_as_floats() -> None:
    """1.0000000000000001 is read as 1."""
    patterns, _ = number_patterns({"exclusiveMinimum": 1}, False)
    for text, fits in (
        ("1.00000000000001", True), ("1.0000000000000001", False), ("1.000000000000001", False), ("2.0", True),
        ("9007199254740993", True), ("900719925474099.5", False), ("90071992547409.5", True),
    ):  # fmt: skip
        assert all(re.fullmatch(pattern, text) for pattern in patterns) is fits, text


def value_schema(numbers: random.Random) -> dict[str, Any]:
    """A schema of a text or something else."""
    kinds = ["string", "integer", "number", "boolean", "null", "array", "object"]
    text = numbers.choice([
        {}, {}, {"maxLength": 2}, {"pattern": "^[0-9a-e.]+$"}, {"minLength": 3}, {"pattern": "[1tN]"},
        {"pattern": "^\\s"},
    ])  # fmt: skip
    limits = limits_of(numbers, (2, 5, 10))
    choices = [
        {"enum": numbers.sample([1, 2.5, "x", "12", True, None, "true", ""], 3)},
        {"const": False},
    ]
    match numbers.randrange(4):
        case 0:
            chosen = numbers.sample(kinds[1:], numbers.randrange(1, 3))
            return {"type": ["string", *chosen], **text, **limits}
        case 1:
            kind = numbers.choice(("integer", "number"))
            return {"anyOf": [{"type": "string", **text}, {"type": kind, **limits}]}
        case 2:
            other = numbers.choice(
                [*choices, {"type": "boolean"}, {"type": "array", "items": {"type": "null"}}]
            )
            return {"anyOf": [{"type": "string", **text}, other, {"type": "integer", **limits}]}
        case _:
            return {**text, **limits}


TEXTS = (
    "", "a", "ab", "true", " true", "True", "null\n", "None", "x", "12", " 12", "12 ", "\u00a012", "'1'", '"1"', "(1)",
    "[null]", "[1]", "{}", "['a']", "{'a': 1}", "1e2", "-1E+3", "1e999", " 1e999", "NaN", " NaN", "- 1", "+1", "01",
    "1.", ".5", "1_0", "tab\t", '"a" b', "1,2", "(1, 2)",
)  # fmt: skip


def test_texts_are_read_as_values_that_fit() -> None:
    numbers, taken, left = random.Random(7), 0, 0
    for _ in range(60):
        schema = value_schema(numbers)
        forms = value_forms(schema, {}, "</p>", tells_texts=False)
        if forms.lacks:
            continue
        types = types_of(schema, {})
        terminal = r"/[\s\S]*/" if forms.terminal is None else forms.terminal
        whole = llguidance.LLMatcher(
            BYTES, f"%llguidance {{}}\nstart: T\nT: {terminal or '/x/ & /y/'}", log_level=0
        )
        for text in [*numbers.sample(TEXTS, 12), *(number_text(numbers) for _ in range(6))]:
            matcher = whole.deep_copy()
            data = list(text.encode())
            found = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
            value = typed_value(text, types)
            fits = jsonschema_rs.is_valid(schema, value)
            assert fits or not found, (schema, text, value)
            # numbers and plain texts have one form; multiples too
            if (
                fits
                and re.fullmatch(r"-?[1-9][0-9]*(\.[0-9]*[1-9])?|[abx]+", text)
                and value is not None
            ):
                assert found or (isinstance(value, float) and "multipleOf" in schema), (
                    schema,
                    text,
                    value,
                )
            taken, left = taken + found, left + (not found)
    assert taken > 200 and left > 200


def test_the_types_of_several_schemas_are_those_in_common() -> None:
    for members, types in (
        ([["string", "integer"], ["string"]], {"string"}),
        ([["string", "integer"], ["number", "null"]], {"integer"}),
        ([["number", "null"], ["string", "integer"]], {"integer"}),
        ([["integer", "number"], ["string", "number"]], {"integer", "number"}),
        ([["integer", "number"], ["string"]], {"integer", "number"}),
        ([[], ["string"], ["string", "null"]], {"string"}),
    ):
        schemas = [{"type": each} if each else {} for each in members]
        assert types_of({"allOf": schemas}, {}) == types


def element_tree(numbers: random.Random, depth: int) -> Any:
    """A value of texts, objects and lists; lists and objects have members, as empty ones are written as texts."""
    kind = numbers.randrange(3) if depth else 0
    if kind == 0:
        return numbers.choice(["a", "b c", "x<y", "</", "> "])
    members = [element_tree(numbers, depth - 1) for _ in range(numbers.randrange(1, 4))]
    return members if kind == 1 else dict(zip(("k", "key", "k"), members, strict=False))


def element_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    pairs = value.items() if isinstance(value, dict) else (("item", each) for each in value)
    return " ".join(f"<p={name}>{element_text(each)}</p={name}>\n" for name, each in pairs)


def test_elements_within_elements_are_objects_and_lists() -> None:
    numbers = random.Random(3)
    for _ in range(300):
        value = {"k": element_tree(numbers, 4)}
        assert element_readings(("<p=", "</p=", ">"), element_text(value), {}, {}) == (value,)


@pytest.mark.parametrize(
    "text", ["<a>1</a><a>2", "<a>1</a>x", "<a>1</b>", "<a><a>1</a>", "<a", "<a>1</a><b"]
)
def test_elements_that_do_not_end_are_a_text(text: str) -> None:
    assert element_readings(("<", "</", ">"), text, {}, {}) == (text,)


def test_many_elements_and_deep_ones_take_linear_time() -> None:
    """The text is searched once for each element around a place, of which 64 count."""
    marks, count = ("<", "</", ">"), 30_000
    many = "".join(f"<k{number}>{number}</k{number}>" for number in range(count))
    (value,) = element_readings(marks, many, {}, {})
    assert value == {f"k{number}": number for number in range(count)}
    (value,) = element_readings(marks, "<a>" * count + "</a>" * count, {}, {})
    for _ in range(65):
        (value,) = value.values()
    assert value == "<a>" * (count - 65) + "</a>" * (count - 65)


def test_references_of_any_form() -> None:
    """As other readers of schemas take them: pointers with escapes and indices, anchors, identifiers, the whole."""
    text = {"type": "string"}
    root = {
        "type": "object",
        "$defs": {"a/b": text, "Of<x y>": text, "~": text, "own": {**text, "$anchor": "named"},
                  "other": {**text, "$id": "other.json"}, "twice": {"$ref": "#/$defs/a~1b"}},
        "allOf": [{"properties": {"p": text}}],
    }  # fmt: skip
    for reference in ("#/$defs/a~1b", "#/$defs/Of%3Cx%20y%3E", "#/$defs/~0", "#named", "other.json", "#/$defs/twice",
                      "#/allOf/0/properties/p"):  # fmt: skip
        schema = {"$ref": reference}
        assert jsonschema_rs.is_valid({**root, "type": "string", **schema}, "12"), reference
        assert not jsonschema_rs.is_valid({**root, "type": ["string", "number"], **schema}, 12)
        assert types_of(schema, root) == {"string"}, reference
        assert resolve_schema(schema, root)["type"] == "string", reference
    assert (
        types_of({"$ref": "#"}, root) == {"object"} and resolve_schema({"$ref": "#"}, root) is root
    )
    for reference in ("#/$defs/none", "#none", "none.json", "#/allOf/1", "#/allOf/x", "#/type/x"):
        assert types_of({"$ref": reference}, root) == frozenset()
        assert resolve_schema({"$ref": reference}, root) == {}
    circle = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    assert types_of({"$ref": "#/$defs/a"}, circle) == frozenset()
    assert resolve_schema({"$ref": "#/$defs/a"}, circle) == {}


def bare_value(numbers: random.Random, depth: int = 0) -> Any:
    texts = ["", "a", "b c", "{", "}]", ",:", '"', "'", "\\", "<", "1", "true", "é ☃"]
    if depth > 2 or numbers.random() < 0.5:
        return numbers.choice([1, -2.5, None, True, False, *texts])
    if numbers.random() < 0.5:
        return [bare_value(numbers, depth + 1) for _ in range(numbers.randrange(4))]
    keys = ["a", "b c", "k1", "x-y"]
    return {
        key: bare_value(numbers, depth + 1) for key in numbers.sample(keys, numbers.randrange(4))
    }


def bare_text(numbers: random.Random, value: Any, mark: str) -> str:
    def space() -> str:
        return numbers.choice(["", "", " ", "\n"])

    def parts(items: list[str], begin: str, end: str) -> str:
        return begin + space() + f"{space()},{space()}".join(items) + space() + end

    match value:
        case str() if numbers.random() < 0.3:
            return (
                json.dumps(value, ensure_ascii=False)
                if mark not in value
                else f"{mark}{value}{mark}"
            )
        case str():
            return f"{mark}{value}{mark}"
        case dict():
            quotes = (lambda key: key, json.dumps, lambda key: f"{mark}{key}{mark}")
            items = [
                f"{numbers.choice(quotes)(key)}{space()}:{space()}{bare_text(numbers, each, mark)}"
                for key, each in value.items()
            ]
            return parts(items, "{", "}")
        case list():
            return parts([bare_text(numbers, each, mark) for each in value], "[", "]")
        case _:
            return json.dumps(value)


@pytest.mark.parametrize("mark", ["<|>", "<", "''"])
def test_objects_whose_keys_have_no_quotes(mark: str) -> None:
    """What was written is read, wherever its text is cut; parts of it are no object."""
    numbers = random.Random(mark)
    for _ in range(300):
        value = {"k": bare_value(numbers)}
        held = json.dumps(value, ensure_ascii=False)
        # a text with the mark would end there, and the reader of ends knows no other quotes
        if mark in held or mark[0] in held or '"' in "".join(re.findall(r'\\"', held)):
            continue
        text = bare_text(numbers, value, mark)
        if re.search(r'"[^"]*[{}\[\]][^"]*"', text):
            continue
        assert bare_object(text, mark) == value, text
        after = numbers.choice(["", "}", " x", mark])
        assert bare_object_end(text + after, mark) == len(text)
        end, read, at = BareObjectEnd(mark), 0, 0
        while not end.done:
            at += numbers.randrange(1, 4)
            read += end.take((text + after)[read:at])
        assert read == len(text), (text, after)
        for cut in range(1, len(text)):
            assert (
                bare_object(text[:cut], mark) is None and bare_object_end(text[:cut], mark) is None
            )


def test_texts_that_are_no_bare_object() -> None:
    for text in ("", "x", "{", "{a}", "{a:}", "{a 1}", "{a:1 b:2}", "{a:1]", "[1]", "{a:1} x", "{:}", "{a:[1}",
                 "{a:<x}", '{"a:1}', "{" * 80 + "}" * 80, "{a:" * 70 + "1" + "}" * 70):  # fmt: skip
        assert bare_object(text, "<") is None, text
    assert bare_object("{a:1,}", "<") == {"a": 1} and bare_object(" {} ", "<") == {}
    deep = "{a:" * 64 + "1" + "}" * 64
    assert bare_object(deep, "<") == json.loads(deep.replace("a", '"a"'))
