"""Schemas in layouts of calls that are not JSON: what grammars let models write is read as arguments that fit."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import jsonschema_rs
import llguidance
import pytest

from max.serve.chat.run import ToolCall
from max.serve.chat.tools.arguments.alternatives import (
    alternatives,
    argument_schema,
)
from max.serve.chat.tools.arguments.object_forms import object_alternatives
from max.serve.chat.tools.arguments.raw_texts import (
    FORMATS,
    has_texts,
    value_forms,
    whole_pattern,
)
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import FORMATS as NAMED
from max.serve.chat.tools.parser import parser_of
from max.serve.chat.tools.schemas import ToolGrammar, tool_grammar
from max.serve.errors import ApiError
from max.serve.openai.lark_patterns import pattern_of_lark
from max.serve.requests.parts import ArgumentsPart
from tests.pipelines.test_schema_forms import schemas_of_packages
from tests.serve.test_template_formats import found_of
from tests.serve.test_tool_formats import accepts, tokenizer_with
from tests.serve.tool_templates import TEMPLATES


def of_value(schema: Any, **more: Any) -> dict[str, Any]:
    """Arguments with one value."""
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], **more}


STYLES = ["parameters", "pairs", "invoke", "typed", "python values", "bare", "elements", "pythonic"]
REQUIRED = ToolChoice(ChoiceKind.REQUIRED, parallel=False)
BYTES = llguidance.LLTokenizer("byte")


def grammar_of(style: str, parameters: dict[str, Any], **fields: Any) -> ToolGrammar:
    tool = Tool("run", "", parameters, **fields)
    return tool_grammar([tool], REQUIRED, found_of(TEMPLATES[style]).format, {})


def written(grammar: str, numbers: random.Random, most: int = 900) -> str | None:
    """A random answer, byte by byte; None if it does not end soon."""
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    text = b""
    while not matcher.is_stopped() and len(text) < most:
        mask = matcher.compute_bitmask()
        allowed = [at for at in range(256) if mask[at // 8] >> (at % 8) & 1]
        assert not matcher.is_error(), (matcher.get_error()[:300], text)
        if not allowed or (matcher.is_accepting() and numbers.random() < 0.5):
            break
        # marks are rarely written otherwise, so that texts end
        few = [at for at in allowed if chr(at) in "<]}'>)\n" or at == 34]
        text += bytes([numbers.choice(few if few and numbers.random() < 0.4 else allowed)])
        assert matcher.consume_token(text[-1]), text
    return text.decode() if matcher.is_accepting() else None


def read(style: str, parameters: dict[str, Any], answer: str) -> Any:
    parser = parser_of(found_of(TEMPLATES[style]).format, [Tool("run", "", parameters)])
    parts = [*parser.push(answer), *parser.finish()]
    return json.loads("".join(part.text for part in parts if isinstance(part, ArgumentsPart)))


def values_of(style: str, parameters: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """What is read of random answers of the grammar."""
    found = grammar_of(style, parameters)
    assert found.grammar is not None and not found.hints, found.hints
    numbers = random.Random(f"{style} {parameters}")
    answers = [answer for _ in range(count) if (answer := written(found.grammar, numbers))]
    assert len(answers) >= count // 4, (style, len(answers))
    return [read(style, parameters, answer) for answer in answers]


PATTERNS = [
    r"[a-c]{1,3}(,[a-c]{1,3}){0,2};",
    r"(x|<y>|</parameter>|</arg_value>|'|\"|\[|\{){1,4}",
    r"-?[0-9]{1,3}|null|true|\n{1,2}",
    r"/[a-z]{1,4}(/\.\.)?\n?",
]


@pytest.mark.parametrize("style", STYLES)
def test_the_text_of_a_custom_tool_matches_its_expression(style: str) -> None:
    for pattern in PATTERNS:
        tool = Tool.of_text("run", "", pattern)
        for values in values_of(style, tool.parameters, 4):
            assert values.keys() == {"input"} and re.fullmatch(pattern, values["input"]), values


LARK = """
start: item ("," item)~0..2 ";"
item: WORD | "<" WORD ">"
WORD: /[a-c]{2,3}/
"""


@pytest.mark.parametrize("style", STYLES)
def test_the_text_of_a_custom_tool_fits_its_grammar(style: str) -> None:
    tool = Tool.of_text("run", "", pattern_of_lark(LARK).pattern)
    tokenizer = llguidance.LLTokenizer("byte")
    for values in values_of(style, tool.parameters, 4):
        matcher = llguidance.LLMatcher(tokenizer, LARK.replace("~0..2", "{0,2}"))
        text = values["input"].encode()
        assert matcher.try_consume_tokens(list(text)) == len(text) and matcher.is_accepting(), text


@pytest.mark.parametrize("style", ["parameters", "typed", "bare"])
def test_texts_before_special_tokens_match_their_expressions(style: str) -> None:
    layout = found_of(TEMPLATES[style]).format.layout
    assert layout is not None
    marks = (layout.value_end.strip(),)
    tool = Tool.of_text("run", "", "[a-z<]{2,3}\n?")
    special = tokenizer_with(marks)[1]
    found = tool_grammar([tool], REQUIRED, found_of(TEMPLATES[style]).format, special)
    assert found.grammar is not None and found.hints == ()
    for text, fits in (("ab", True), ("ab\n", True), ("a<", True), ("a", False), ("aB", False)):
        whole = written(
            grammar_of(style, Tool.of_text("run", "", "Q").parameters).grammar or "",
            random.Random(1),
        )
        assert whole is not None
        assert accepts(found.grammar, whole.replace("Q", text), marks) is fits, text


def is_format(name: str, text: str) -> bool:
    checks: dict[str, Callable[[str], Any]] = {
        "date": lambda t: datetime.strptime(t, "%Y-%m-%d"),
        "time": lambda t: datetime.fromisoformat(f"2000-01-01T{t}"),
        "date-time": datetime.fromisoformat,
        "uuid": uuid.UUID,
        "ipv4": ipaddress.IPv4Address,
        "ipv6": ipaddress.IPv6Address,
        "uri": lambda t: urlsplit(t).hostname or 1 / 0,
        "email": lambda t: re.fullmatch(r"[^@\s]+@[^@\s.]+(\.[^@\s.]+)*", t) or 1 / 0,
        "hostname": lambda t: re.fullmatch(r"(?!-)[a-zA-Z0-9.-]{1,253}(?<!-)", t) or 1 / 0,
        "duration": lambda t: (
            re.fullmatch(r"P(?!$)(\d+[YMWD])?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?", t) or 1 / 0
        ),
    }
    # years from 1 on
    checks[name](re.sub("^0000", "2000", text))
    return True


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_texts_of_a_format_have_it(form: str) -> None:
    parameters = of_value({"type": "string", "format": form})
    for values in values_of("parameters", parameters, 6):
        assert is_format(form, values["v"])


def test_known_texts_have_their_formats() -> None:
    known = {"date": "2024-12-31", "uuid": str(uuid.uuid5(uuid.NAMESPACE_URL, "a")), "ipv6": "::1", "ipv4": "8.8.8.8",
             "date-time": "2026-04-30T23:59:59.5+02:00", "email": "a.b+c@mail.example.org", "duration": "P3D",
             "uri": "https://example.org:8080/a/b.html?q=1&r=%20#top".replace("%20", "2"), "time": "00:00:00Z",
             "hostname": "a-b.example.org"}  # fmt: skip
    assert known.keys() == FORMATS.keys()
    for form, text in known.items():
        assert re.fullmatch(FORMATS[form], text) and is_format(form, text), text
        assert not re.fullmatch(FORMATS[form], f"{text} ")


VALUES: dict[str, dict[str, Any]] = {
    "pattern or null": {"anyOf": [{"type": "string", "pattern": "^[a-z]{2}$"}, {"type": "null"}]},
    "found within": {"type": "string", "pattern": "ab|^c", "maxLength": 6},
    "length": {"type": "string", "minLength": 2, "maxLength": 3},
    "mixed choices": {"enum": ["a", "", 3, True, None]},
    "text or list": {
        "anyOf": [
            {"type": "string", "maxLength": 4},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
        ]
    },
    "both": {
        "type": "string",
        "allOf": [{"pattern": "^[a-d]+$"}, {"pattern": "b"}],
        "maxLength": 4,
    },
    "number": {"type": "integer", "minimum": 3, "maximum": 12},
    "list": {"type": "array", "items": {"type": "string", "pattern": "^[xy]{1,2}$"}, "maxItems": 2},
    "any list": {"type": ["string", "array"], "maxLength": 3, "items": {"const": 1}, "maxItems": 2},
}


@pytest.mark.parametrize("style", STYLES)
def test_values_fit_their_schemas(style: str) -> None:
    for name, schema in VALUES.items():
        parameters = of_value(schema)
        for values in values_of(style, parameters, 3):
            assert values.keys() == {"v"}
            assert jsonschema_rs.is_valid(schema, values["v"]), (name, values)


A = {"a": {"type": "string", "maxLength": 1}}
B = {"b": {"type": "integer", "minimum": 0, "maximum": 9}}
OBJECTS: dict[str, dict[str, Any]] = {
    "a reference": {
        "$ref": "#/$defs/x",
        "$defs": {"x": {"type": "object", "properties": {**A, **B}, "required": ["a"]}},
    },
    "alternatives": {
        "type": "object",
        "anyOf": [{"properties": A, "required": ["a"]}, {"properties": B, "required": ["b"]}],
    },
    "one of two": {
        "type": "object",
        "properties": {**A, **B},
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "dependent": {
        "type": "object",
        "properties": {**A, **B},
        "dependentRequired": {"a": ["b"]},
    },
    "condition": {
        "type": "object",
        "properties": {"k": {"enum": ["p", "q"]}, **B},
        "required": ["k"],
        "if": {"properties": {"k": {"const": "p"}}},
        "then": {"required": ["b"]},
    },
    "a type by another argument": {
        "type": "object",
        "properties": {"k": {"enum": ["p", "q"]}, "b": {}},
        "required": ["k", "b"],
        "if": {"properties": {"k": {"const": "p"}}},
        "then": {"properties": {"b": {"type": "string", "pattern": "^[0-9]{1,2}$"}}},
        "else": {"properties": B},
    },
    "a type by an argument that is there": {
        "type": "object",
        "properties": {"k": {"enum": ["p"]}, "b": {}},
        "required": ["b"],
        "dependentSchemas": {
            "k": {"properties": {"b": {"type": "string", "pattern": "^([0-9]|true)$"}}}
        },
    },
    "parts": {
        "allOf": [
            {"type": "object", "properties": A, "required": ["a"]},
            {"properties": B, "required": ["b"]},
        ]
    },
}


@pytest.mark.parametrize("style", STYLES)
def test_arguments_fit_combinations_of_schemas(style: str) -> None:
    for name, parameters in OBJECTS.items():
        for values in values_of(style, parameters, 4):
            assert jsonschema_rs.is_valid(parameters, values), (name, values)
            assert values.keys() <= {"a", "b", "k"}


@pytest.mark.long
def test_schemas_of_packages_as_arguments() -> None:
    """Objects among the schemas of packages: arguments fit, or what is not held is named."""
    schemas = [each for each in schemas_of_packages() if each[1].get("type") == "object"]
    for style in STYLES:
        numbers, wrong, held, named = random.Random(style), list[str](), 0, 0
        for name, schema in numbers.sample(schemas, 25):
            found = grammar_of(style, schema)
            assert found.grammar is not None
            named += bool(found.hints)
            for _ in range(0 if found.hints else 3):
                answer = written(found.grammar, numbers, 1500)
                if answer is None or re.search(r"\de[+-]?\d{3}", answer.lower()):
                    continue  # a number that is infinite in Python
                values, held = read(style, schema, answer), held + 1
                if not jsonschema_rs.is_valid(schema, values):
                    wrong.append(f"{name}: {json.dumps(values)[:300]}")
        print(f"{style}: {held} held, {named} named")
        assert held and named < 10 and not wrong, wrong


@pytest.mark.parametrize("style", [*STYLES, "hermes"])
def test_numbers_beyond_floating_point_stay_as_texts(style: str) -> None:
    """JSON has no infinite number: neither the arguments nor the object that is made of them have one."""

    def parameters(**values: Any) -> dict[str, Any]:
        lists = {"o": {"type": "array", "items": values, "minItems": 2, "maxItems": 2}}
        return of_value(values) | {"properties": {"v": values, **lists}, "required": ["v", "o"]}

    answer = written(
        grammar_of(style, parameters(const=77)).grammar or "", random.Random(2), most=2000
    )
    assert answer is not None and answer.count("77") == 3
    for number, value in (("1e999", "1e999"), ("-2E400", "-2E400"), ("1e30", 1e30)):
        tools = [Tool("run", "", parameters(type="number"))]
        parser = parser_of(found_of(TEMPLATES[style]).format, tools)
        parts = [*parser.push(answer.replace("77", number)), *parser.finish()]
        text = "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
        assert "Infinity" not in text and "NaN" not in text
        call = ToolCall("c", "run", text)
        assert call.parsed_arguments() == {"v": value, "o": [value] * 2}
        if style != "hermes":  # which has the arguments as they were written
            assert json.loads(text) == {"v": value, "o": [value] * 2}


@pytest.mark.parametrize("style", STYLES)
def test_what_is_not_held_is_named(style: str) -> None:
    def hints(schema: dict[str, Any], **more: Any) -> tuple[str, ...]:
        return grammar_of(style, of_value(schema, **more)).hints

    assert hints({"type": "string", "pattern": "^a+$"}) == ()
    tagged = style not in ("bare", "pythonic")
    # what must have the mark of its end is no text, and patterns that look around have no grammar
    layout = found_of(TEMPLATES[style]).format.layout
    assert layout is not None
    end = layout.value_end.replace("\ue003", "v").strip()
    if end:
        (hint,) = hints({"type": "string", "pattern": f"^a{re.escape(end)}b$"})
        assert hint.startswith("run: ") and "texts" in hint
    assert "run" in hints({"type": "string", "pattern": r"(?<=a)b"})[0]
    mixed = {"type": ["string", "integer"], "multipleOf": 7, "maxLength": 2}
    assert bool(hints(mixed)) is (tagged and style != "typed")
    assert hints({}, patternProperties={"^x": {"type": "integer"}}) == ()


def test_a_strict_tool_that_a_layout_does_not_hold_is_refused() -> None:
    value = {"type": ["string", "integer"], "multipleOf": 7, "maxLength": 2}
    parameters = {
        "type": "object",
        "properties": {"v": value},
        "required": ["v"],
        "additionalProperties": False,
    }
    assert grammar_of("hermes", parameters, strict=True).hints == ()
    with pytest.raises(ApiError, match="run is strict.*properties.v: multipleOf") as error:
        grammar_of("parameters", parameters, strict=True)
    assert error.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize("style", STYLES)
def test_objects_that_list_nothing_have_any_arguments(style: str) -> None:
    known = grammar_of(style, of_value({"enum": ["Q"]})).grammar
    answer = (written(known or "", random.Random(style)) or "").replace("'Q'", '"Q"')
    for parameters, fits_it in (
        ({"type": "object"}, style != "elements"),
        ({"type": "object", "additionalProperties": {"type": "string", "pattern": "^Q$"}}, style != "elements"),
        ({"type": "object", "additionalProperties": {"type": "string", "pattern": "^q$"}}, False),
        ({"type": "object", "properties": {}}, False),
    ):  # fmt: skip
        found = grammar_of(style, parameters)
        assert found.grammar is not None and found.hints == ()
        matcher = llguidance.LLMatcher(BYTES, found.grammar, log_level=0)
        text = list(answer.encode())
        consumed = matcher.try_consume_tokens(text)
        assert (consumed == len(text) and matcher.is_accepting()) is fits_it, (
            parameters,
            answer[:consumed],
        )
        assert not fits_it or read(style, parameters, answer) == {"v": "Q"}


def test_the_types_of_arguments_are_those_of_the_part_that_lists_them() -> None:
    text = {"type": "object", "properties": {"v": {"type": "string"}}}
    answer = (
        "<tool_call>\n<function=run>\n<parameter=v>\n12\n</parameter>\n</function>\n</tool_call>"
    )
    for parameters in (
        text,
        {"$ref": "#/$defs/x", "$defs": {"x": text}},
        {"anyOf": [text, {"type": "object"}]},
        {"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": text}},
    ):
        assert read("parameters", parameters, answer) == {"v": "12"}
    assert read("parameters", {"type": "object"}, answer) == {"v": 12}
    # those of names: a pattern, other properties, and all parts together
    by_name, number = (
        {"patternProperties": {"^v": {"type": "string"}, "^w": {}}},
        {"type": "integer"},
    )
    for parameters in (
        by_name,
        {"$ref": "#/$defs/x", "$defs": {"x": by_name}},
        {"properties": {"w": number}, "additionalProperties": {"type": "string"}},
        {"allOf": [{"additionalProperties": {"type": "string"}}]},
        {"properties": {"v": {}}, "patternProperties": {"v$": {"type": "string"}}},
        {"properties": {"v": {"type": ["string", "integer"]}}, "anyOf": [text, {"properties": {"w": number}}]},
    ):  # fmt: skip
        assert read("parameters", {"type": "object", **parameters}, answer) == {"v": "12"}
    for parameters in (
        {"patternProperties": {"^w": {"type": "string"}}},
        {"properties": {"v": number}, "additionalProperties": {"type": "string"}},
        {"anyOf": [text, {"properties": {"v": number}}]},
        {"properties": {"v": {"type": ["string", "integer"]}}, "allOf": [{"properties": {"v": number}}]},
        {"properties": {"v": False}, "additionalProperties": {"type": "string"}},
    ):  # fmt: skip
        assert read("parameters", {"type": "object", **parameters}, answer) == {"v": 12}
    assert argument_schema({"anyOf": "x", "allOf": [1], "properties": [], "$ref": "#"}, "v") is None


def test_schemas_of_many_alternatives_are_left_soon() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/x"}] * 24}
    root = {"$defs": {"x": many}}
    assert alternatives(many, root) is None
    each = {"anyOf": [{"minLength": n} for n in range(6)]}
    assert alternatives({"allOf": [each] * 2}, {}) == [{"minLength": n} for n in range(6)]
    wide = {"allOf": [{"anyOf": [{"required": [f"{a}{n}"]} for n in range(9)]} for a in "abc"]}
    assert alternatives(wide, {}) is None
    names = {"type": "object", **wide, "properties": {"p": {"type": "string"}}}
    assert grammar_of("parameters", names).hints
    assert alternatives({"type": "string", "allOf": [{"type": "null"}]}, {}) == []
    number = {"type": "number", "allOf": [{"type": ["integer", "null"]}]}
    assert alternatives(number, {}) == [{"type": "integer"}]


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("a|^b$", ["xa", "b"], ["xb", "bx"]),
        (r"^a\$", ["a$", "a$x"], ["xa$", "a"]),
        (r"^[|$^]+\\$", ["|\\", "$^\\"], ["|", "|\\x"]),
        ("^(?:a|b)c$", ["ac", "bc"], ["a", "xbc"]),
        ("^a/b\\/c$", ["a/b/c"], ["a/b"]),
    ],
)
def test_patterns_of_whole_texts(pattern: str, texts: list[str], others: list[str]) -> None:
    whole = whole_pattern(pattern)
    assert whole is not None
    for text in [*texts, *others]:
        found = re.fullmatch(whole, text) is not None
        assert found is (re.search(pattern, text) is not None) is (text in texts)


def test_patterns_that_have_places_within_are_left_out() -> None:
    assert whole_pattern("(^a|b)c") is None and whole_pattern("a$b") is None
    assert whole_pattern(r"^\p{L}+$") is not None
    assert has_texts("/a?/") and not has_texts("/a/ & /b/")


def test_named_formats_hold_expressions_too() -> None:
    """LFM 2 and Llama write calls as in Python, and their texts in quotes."""
    tool = Tool.of_text("run", "", "[a-c]{2}'?\"?")
    for name in ("lfm2", "pythonic", "kimi_k2", "phi4"):
        found = tool_grammar([tool], REQUIRED, NAMED[name], {})
        assert found.grammar is not None and found.hints == ()
        answer = written(found.grammar, random.Random(name))
        assert answer is not None
        parser = parser_of(NAMED[name], [tool])
        parts = [*parser.push(answer), *parser.finish()]
        text = "".join(part.text for part in parts if isinstance(part, ArgumentsPart))
        assert re.fullmatch("[a-c]{2}'?\"?", json.loads(text)["input"])


def test_what_a_terminal_of_texts_leaves_out() -> None:
    def takes(schema: dict[str, Any], text: str, tells_texts: bool = False) -> bool:
        terminal = value_forms(schema, {}, "</p>", tells_texts).terminal
        assert terminal
        matcher = llguidance.LLMatcher(
            BYTES, f"%llguidance {{}}\nstart: T\nT: {terminal}", log_level=0
        )
        return (
            matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()
        )

    short = {"type": "string", "maxLength": 9}
    assert takes(short, "a<b>") and not takes(short, "a</p>b")
    # a text in quotes would be read without them, and one in brackets as a list
    either = {"type": ["string", "null"], "maxLength": 9}
    assert takes(short, '"a"') and takes(either, "[1]") and not takes(either, ' "a"')
    assert takes(either, '"a"', tells_texts=True)
    lists = {"anyOf": [short, {"type": "array", "items": {"type": "null"}}]}
    assert not takes(lists, "[1]") and takes(lists, "a[1]")
    assert not takes({"enum": ["a", "</p>"]}, "</p>")


def test_texts_between_marks_in_bare_objects_have_none() -> None:
    parameters = of_value({"type": "string", "pattern": "^[a<]{2}$"})
    found = grammar_of("bare", parameters).grammar
    assert found is not None
    for text, fits_it in (("aa", True), ("a<", False), ("<a", False)):
        answer = f"<|tool_call>call:run{{v:<|'|>{text}<|'|>}}<tool_call|>"
        matcher = llguidance.LLMatcher(BYTES, found, log_level=0)
        consumed = matcher.try_consume_tokens(list(answer.encode()))
        assert (consumed == len(answer) and matcher.is_accepting()) is fits_it, text


def test_a_property_that_one_part_closes_is_left_out() -> None:
    closed = {"properties": {"a": {}}, "additionalProperties": False}
    other = {"properties": {"a": {"type": "null"}, "b": {}}}
    for parts in ([closed, other], [other, closed]):
        (option,), lacks = object_alternatives({"type": "object", "allOf": parts})
        assert option["properties"] == {"a": {"type": "null"}} and lacks == []
    nothing, _ = object_alternatives(
        {"allOf": [{**closed, "required": ["a"]}, {"properties": {"a": False}}]}
    )
    assert nothing == [{}]
