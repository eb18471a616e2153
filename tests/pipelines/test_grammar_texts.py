"""The grammars of schemas, choices and texts of other syntaxes, with a vocabulary of bytes."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest

from max.pipelines.core.exceptions import InputError
from max.pipelines.structured import grammar
from max.pipelines.structured.grammar import (
    loose_schema,
    matcher_of,
    of_any_object,
    of_choices,
    of_gbnf,
    of_grammar,
    of_json_schema,
    of_lark,
    of_loose_schema,
    shortened_list,
    simple_schema,
)

BYTES = llguidance.LLTokenizer("byte")
TEXT, NUMBER = {"type": "string"}, {"type": "integer"}


def takes(own: str, text: str) -> bool:
    """Whether a grammar has a text as a whole."""
    matcher, data = matcher_of(BYTES, own), list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_choices_are_the_only_texts() -> None:
    choices = ["yes", "ye", "😀", 'a "b"', "ö\n", "\\", "x|y", "/z/", "(", " "]
    own = of_choices(choices)
    draw = random.Random(5)
    others = ["", "y", "yess", 'a "b', "ö", "\\\\", "x", "y", "yes|ye", "  "]
    others += ["".join(draw.choices("yes|x()", k=3)) for _ in range(30)]
    assert all(takes(own, each) for each in choices)
    assert not any(takes(own, each) for each in others if each not in choices)
    for wrong in ([], ["a", ""]):
        with pytest.raises(InputError, match="texts that are not empty"):
            of_choices(wrong)


def test_both_syntaxes_of_grammars() -> None:
    lark, gbnf = 'start: "a" digit+\ndigit: /[0-9]/', 'root ::= "a" digit+\ndigit ::= [0-9]'
    for own in (of_lark(lark), of_grammar(lark), of_gbnf(gbnf), of_grammar(gbnf)):
        assert (
            takes(own, "a1") and takes(own, "a12") and not takes(own, "a") and not takes(own, "1")
        )
    for make, text in ((of_lark, gbnf), (of_gbnf, lark), (of_gbnf, "root ::= other"), (of_gbnf, "")):  # fmt: skip
        with pytest.raises(InputError, match="grammar is invalid"):
            make(text)


def test_any_object() -> None:
    own = of_any_object()
    for value in ({}, {"a": [1, {"b": None}]}, {"ö": "\n"}):
        assert takes(own, json.dumps(value, ensure_ascii=False))
    assert not takes(own, "[]") and not takes(own, '"a"') and not takes(own, '{"a":1}')


def test_what_a_schema_may_be() -> None:
    for schema in (TEXT, json.dumps(TEXT)):
        assert takes(of_json_schema(schema), '"a"') and not takes(of_json_schema(schema), "1")
    for schema in (True, "true", {}, "{}"):
        assert all(takes(of_json_schema(schema), text) for text in ('"a"', "[1]", "null"))
        assert of_loose_schema(schema)[1] == () and loose_schema(schema).schema == {}
    for schema, problem in (
        (False, "it is False"),
        ("3", "it is 3"),
        ("[{}]", "expected an object"),
        ("{", "JSON schema is invalid"),
    ):
        for make in (of_json_schema, of_loose_schema, loose_schema):
            with pytest.raises(InputError, match=problem) as raised:
                make(schema)
            assert "the JSON schema is invalid: " in str(raised.value)
            assert "Give a JSON schema." in str(raised.value)


def test_messages_name_four_places() -> None:
    names = ["a", "b", "c", "d", "e", "f"]
    assert [shortened_list(names[:count]) for count in (0, 1, 4, 5, 6)] == [
        "", "a", "a, b, c, d", "a, b, c, d, and 1 more", "a, b, c, d, and 2 more",
    ]  # fmt: skip
    with pytest.raises(
        InputError, match=r'does not hold properties.a: type "x", properties.b: type "x"\n'
    ):
        of_json_schema({"properties": {"a": {"type": "x"}, "b": {"type": "x"}}})


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        ("string", "string"),
        ("array", "array"),
        ("file", "object"),
        (["string"], "object"),
        (None, "object"),
    ],
)
def test_of_what_is_too_large_the_type_is_left(kind: Any, held: str) -> None:
    deep: Any = NUMBER
    for _ in range(130):
        deep = {"items": deep}
    form = loose_schema({"type": kind, "items": deep})
    assert form.schema == {"type": held}
    assert form.relaxed_keywords == ("all but the type, as it is too large",)
    with pytest.raises(InputError, match="the JSON schema is invalid: "):
        of_json_schema({"type": kind, "items": deep})
    # a grammar that would be too long
    long = {"type": kind, "enum": ["x" * 300_000]}
    form = loose_schema(long)
    assert form.schema == {"type": held} and "too large" in form.relaxed_keywords[-1]


def test_each_try_leaves_more_out() -> None:
    """First conditions, then that objects have no other properties, then all but the type."""
    one = {"type": "object", "properties": {"a": TEXT}, "required": ["a"]}
    form = loose_schema({**one, "not": {"required": ["a"]}})
    assert form.relaxed_keywords == ("not",) and form.schema == {**one, "additionalProperties": False}  # fmt: skip
    depends = {**one, "properties": {"a": TEXT, "b": TEXT}, "dependentRequired": {"a": ["b"]}}
    form = loose_schema(depends)
    assert form.relaxed_keywords == () and form.schema["additionalProperties"] is False
    assert takes(of_loose_schema(depends)[0], '{"a": "", "b": ""}')
    assert not takes(of_loose_schema(depends)[0], '{"a": ""}')
    patterns = {"type": "object", "patternProperties": {"^a": TEXT}, "required": ["z"]}
    form = loose_schema(patterns)
    assert form.schema == patterns and form.relaxed_keywords == ()
    form = loose_schema({**patterns, "not": {"required": ["z"]}})
    assert form.schema == patterns and form.relaxed_keywords == ("not",)
    form = loose_schema({"type": "string", "minLength": 3, "maxLength": 2})
    (named,) = form.relaxed_keywords
    assert form.schema == {"type": "string"} and named.startswith("all but the type (")
    assert len(named) <= len("all but the type ()") + 120
    both = {"allOf": [TEXT, NUMBER], "minLength": 2, "unknown": 1, "if": {"multipleOf": 2}, "then": {}}  # fmt: skip
    form = loose_schema(both)
    assert form.schema == {"type": "object"} and form.relaxed_keywords[0] == "if"
    assert form.relaxed_keywords[-1].startswith("all but the type (")


SIDES = [
    {"type": "object", "properties": {"a": TEXT}},
    {"type": "object", "properties": {"b": TEXT}, "required": ["b"]},
]
UNLIKE = {"properties": {"b": {"multipleOf": 2}}, "additionalProperties": {"maxLength": 3}}


def test_overlapping_alternatives() -> None:
    apart = {"oneOf": SIDES}
    for own in (of_json_schema(apart), of_loose_schema(apart)[0]):
        assert takes(own, '{"a": "x"}') and takes(own, "{}") and not takes(own, '{"b": "x", "a": "y"}')  # fmt: skip
        assert not takes(own, '{"b": "x"}')
    assert loose_schema(apart).relaxed_keywords == ()
    (read,) = json.loads(of_json_schema(apart))["grammars"]
    assert read["json_schema"]["x-guidance"]["lenient"] is False
    more = of_json_schema({**apart, "not": {"required": ["a"]}})
    assert takes(more, "{}") and not takes(more, '{"a": "x"}')
    # one has no opposite
    over = {"oneOf": [{**SIDES[0], **UNLIKE, "required": ["c"]}, SIDES[1]]}
    (named,) = loose_schema(over).relaxed_keywords
    assert "oneOf" in named
    with pytest.raises(InputError, match="oneOf"):
        of_json_schema(over)
    # alternatives that are no objects are told apart by their opposites, or refused
    lengths = of_json_schema({"oneOf": [{**TEXT, "maxLength": 3}, {**TEXT, "minLength": 2}]})
    assert takes(lengths, '"a"') and takes(lengths, '"abcd"') and not takes(lengths, '"abc"')
    multiples = {"oneOf": [{**NUMBER, "multipleOf": 2}, {**NUMBER, "multipleOf": 3}]}
    with pytest.raises(InputError, match="oneOf"):
        of_json_schema(multiples)
    form = loose_schema(multiples)
    assert len(form.relaxed_keywords) == 1 and form.schema == multiples
    # alternatives that llguidance itself tells apart are as they are
    simple = {"oneOf": [TEXT, NUMBER]}
    assert loose_schema(simple).schema == simple and takes(of_json_schema(simple), "3")


def test_simple_schemas_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(grammar, "grammar_problem", refuse)
    part = {"type": "object", "properties": {"simple": TEXT, "more": {"type": "x"}}}
    form = simple_schema(part)
    assert form is not None and form.relaxed_keywords == ('properties.more: type "x"',)
    assert form.schema["additionalProperties"] is False
    assert simple_schema({"oneOf": [TEXT, NUMBER]}) is None
    deep: Any = NUMBER
    for _ in range(130):
        deep = {"items": deep}
    assert simple_schema(deep) is None


def test_matchers_of_wrong_grammars() -> None:
    with pytest.raises(InputError, match="the grammar is invalid: "):
        matcher_of(BYTES, "start: other")
    for make in (lambda text: matcher_of(BYTES, text), of_lark):
        with pytest.raises(InputError, match="the grammar is too long"):
            make("start: " + '"a" ' * 90_000)
    # long ones are read with a deep stack
    rules = [f"r{number}: r{number + 1}" for number in range(1000)]
    assert takes(of_lark("\n".join(["start: r0", *rules, 'r1000: "a"'])), "a")


def test_the_options_of_schemas() -> None:
    with pytest.raises(InputError, match="add up to more than 100000"):
        of_json_schema({"items": {"multipleOf": 100_001}})
    for own, lenient in ((of_json_schema(TEXT), False), (of_loose_schema(TEXT)[0], True)):
        (read,) = json.loads(own)["grammars"]
        assert read["json_schema"]["x-guidance"] == {
            "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": lenient,
            "coerce_one_of": lenient,
        }  # fmt: skip
    for make in (of_lark, of_grammar):
        with pytest.raises(InputError, match="multipleOf"):
            make('start: %json {"multipleOf": 999983}')
