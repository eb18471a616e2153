"""Grammars, regular expressions and schemas of requests that are invalid, deep or huge are errors of the request.

CVE-2025-48942, CVE-2025-48943, CVE-2025-48944 (vLLM: invalid schemas, expressions and types ended the server),
CVE-2025-29770 (vLLM: a cache of grammars grew without bound), CVE-2026-25048 (xgrammar: nested rules).
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured import grammar, validation
from max.pipelines.structured.schemas import forms

pytest.importorskip("llguidance")

DEPTHS = (30, 2000, 60_000)
TYPES = [
    "string",
    "number",
    "object",
    "array",
    "null",
    "int",
    "str",
    "",
    None,
    5,
    True,
    {},
    [],
    ["string", 7],
    [["string"]],
]
PATTERNS = [
    "(",
    "[",
    "*",
    "a{2,1}",
    "(?<=a)b",
    "(a)\\1",
    "\\p{None}",
    "[z-a]",
    "(?P<a",
    "\\",
    "a{99999999999}",
    "(a{1000}){1000}",
    "(((((a*)*)*)*)*)*$",
    "\ud800",
    "\x00",
    "(?i)ß+",
    "a|" * 5000,
    "(" * 5000 + ")" * 5000,
]


def nested(kind: str, depth: int) -> tuple[str, Any]:
    """The name of a function of the module and an argument that is nested."""
    match kind:
        case "regex":
            return "of_regex", "(" * depth + "a" + ")" * depth
        case "lark":
            return "of_lark", "start: " + "(" * depth + '"a"' + ")" * depth
        case "gbnf":
            return "of_gbnf", "root ::= " + "(" * depth + '"a"' + ")" * depth
        case "rules":
            rules = "\n".join(f'r{i}: "a" r{i + 1} "b"' for i in range(depth))
            return "of_lark", f'start: r0\n{rules}\nr{depth}: "c"'
        case "brackets":
            return "of_grammar", "root ::= " + "[" * depth
        case "array":
            return "of_json_schema", '{"items": ' * depth + "{}" + "}" * depth
        case "any":
            return "of_json_schema", '{"anyOf": [' * depth + "{}" + "]}" * depth
        case _:
            references = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(depth)}
            return "of_json_schema", {
                "$ref": "#/$defs/d0",
                "$defs": {**references, f"d{depth}": {}},
            }


@pytest.mark.parametrize(
    "kind", ["regex", "lark", "gbnf", "rules", "brackets", "array", "any", "references"]
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_nested_grammars(kind: str, depth: int) -> None:
    """CVE-2026-25048."""
    name, argument = nested(kind, depth)
    try:
        assert getattr(grammar, name)(argument)
    except InputError as error:
        assert len(str(error)) < 2000
    else:
        assert depth < DEPTHS[-1]


def draw_schema(draw: random.Random, depth: int = 3) -> Any:
    inner = lambda: draw_schema(draw, depth - 1)  # noqa: E731
    keys: dict[str, Any] = {
        "type": draw.choice(TYPES),
        "pattern": draw.choice(PATTERNS),
        "minLength": draw.choice([-1, 0, 5, 2**31, 2**64, 1e300, "a"]),
        "maxItems": draw.choice([-1, 0, 3, 2**63, None]),
        "multipleOf": draw.choice([0, -1, 1e-320, 1e300, 7, "7"]),
        "enum": draw.choice([[], [1], 3, [[]]]),
        "$ref": draw.choice(
            ["#", "#/$defs/a", "#/none", "http://localhost:1/a", "file:///etc/passwd", "", 5]
        ),
        "required": draw.choice([["a"], "a", [5]]),
        "format": draw.choice(["date", "none", 5]),
        "const": draw.choice([None, 1e300, "x" * 3000]),
        "minimum": draw.choice([1e308, -(2**70), "1"]),
    }
    if depth:
        keys |= {
            "items": inner(),
            "properties": {"a": inner(), "": inner()},
            "anyOf": [inner(), inner()],
            "allOf": [inner()],
            "not": inner(),
            "additionalProperties": inner(),
            "$defs": {"a": inner()},
            "patternProperties": {draw.choice(PATTERNS): inner()},
        }
    chosen = draw.sample(list(keys), draw.randint(0, 4))
    return (
        {name: keys[name] for name in chosen}
        if draw.random() < 0.95
        else draw.choice([True, False, None, 5, [], "a"])
    )


@pytest.mark.parametrize("count", [80, pytest.param(5000, marks=pytest.mark.long)])
def test_random_schemas(count: int) -> None:
    """CVE-2025-48942, CVE-2025-48944."""
    accepted = 0
    for seed in range(count):
        schema = draw_schema(random.Random(seed))
        try:
            assert grammar.of_json_schema(json.dumps(schema) if seed % 2 else schema)
            accepted += 1
        except InputError:
            pass
    assert 0 < accepted < count


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (3, "does not hold not"),
        ("abc", "does not hold not"),
        ({"a": 1}, "does not hold not"),
        (None, "Unsatisfiable"),  # null counts as absent: no value is outside of all values
    ],
)
def test_values_that_are_no_list(values: object, message: str) -> None:
    """Of an ``enum`` below ``not``, whose opposite a grammar would hold."""
    with pytest.raises(InputError, match=message):
        grammar.of_json_schema({"not": {"enum": values}})
    with pytest.raises(InputError, match="does not hold not"):
        grammar.of_json_schema({"not": {"enum": [1], "type": 3}})


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expressions(pattern: str) -> None:
    """CVE-2025-48943."""
    try:
        assert grammar.of_regex(pattern)
    except InputError as error:
        assert len(str(error)) < 2000


@pytest.mark.parametrize("count", [200])
def test_random_texts_as_grammars(count: int) -> None:
    """CVE-2025-48943, CVE-2026-25048."""
    draw = random.Random(1)
    words = [
        "start",
        "root",
        ":",
        "::=",
        '"a"',
        "|",
        "(",
        ")",
        "*",
        "+",
        "?",
        "[a-z]",
        "/a/",
        "\n",
        "%json",
        "{",
        "}",
        "<|x|>",
        "~",
        "%ignore",
        "%regex",
        "9",
        "{1,99999999}",
        "\\",
        "'",
        "\ud800",
        "é",
    ]
    for _ in range(count):
        text = " ".join(draw.choices(words, k=draw.randint(0, 30)))
        for parse in (grammar.of_lark, grammar.of_gbnf, grammar.of_grammar, grammar.of_regex):
            try:
                assert parse(text)
            except InputError:
                pass


def test_caches_are_bounded() -> None:
    """CVE-2025-29770."""
    for i in range(300):
        grammar.of_choices([f"text {i}"])
        grammar.loose_schema({"type": "string", "maxLength": i + 1})
    for cache in (grammar._simple_form, grammar._loose_form, validation._problem):
        assert 0 < (cache.__wrapped__.cache_info().maxsize or 0) <= 1024
    kept = grammar._loose_form.__wrapped__.cache_info().currsize
    grammar.loose_schema({"type": "string", "description": "x" * 100_000})
    assert grammar._loose_form.__wrapped__.cache_info().currsize == kept
    kept = forms.pattern_for_grammar.__wrapped__.cache_info().currsize
    forms.pattern_for_grammar("x" * 2000)
    assert forms.pattern_for_grammar.__wrapped__.cache_info().currsize == kept


def test_a_schema_refers_to_no_file_and_no_host() -> None:
    for reference in (
        "file:///etc/passwd",
        "http://localhost:1/a.json",
        "/etc/passwd",
        "../a.json",
    ):
        with pytest.raises(InputError):
            grammar.of_json_schema({"$ref": reference})
