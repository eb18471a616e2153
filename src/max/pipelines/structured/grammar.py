"""Grammars of structured output, as texts of llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from max.pipelines.core.exceptions import ConfigError, InputError
from max.pipelines.core.text import utf8
from max.pipelines.structured.deep_stack import on_deep_stack
from max.pipelines.structured.schema_limits import check_embedded_schemas, check_schema

_SPACE = r"[ \t\r\n]{0,24}"
"""The white space between the tokens of JSON: bounded, as small models may generate spaces for ever."""
MAX_CHARACTERS = 256 << 10
"""The longest grammar. llguidance recurses over rules that name rules: up to 750 bytes of stack a character."""
_INLINE_CHARACTERS = 4 << 10
"""Grammars up to this length need less than a thread's usual stack."""


def llguidance() -> ModuleType:
    """The package llguidance.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            "structured output needs the package llguidance",
            'Install it with: pip install "supremum[serve]"',
        ) from error
    return llguidance


def of_json_schema(schema: str | Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts that match a schema.

    Args:
        schema: The schema, or its text.

    Raises:
        InputError: The schema is invalid, uses what cannot be enforced, or asks for too much.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError(f"it is {value!r}; expected an object")
        check_schema(value)
        grammar = llguidance().LLMatcher.grammar_from_json_schema(
            json.dumps(value), {"whitespace_pattern": _SPACE}
        )
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is invalid: {error}", "Give a JSON schema.") from error
    return _checked(grammar, "JSON schema")


def of_any_object() -> str:
    """The grammar of all JSON objects."""
    return of_json_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches whole.

    Args:
        pattern: The expression, in the syntax of Rust's crate regex: no references, no look-around.

    Raises:
        InputError: It is invalid.
    """
    return _checked(llguidance().LLMatcher.grammar_from_regex(utf8(pattern)), "regular expression")


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of some texts.

    Args:
        choices: The texts.

    Raises:
        InputError: There are none, or one is empty.
    """
    if not choices or not all(choices):
        raise InputError("the choices must be texts that are not empty", "Give at least one.")
    # a terminal is one regular expression; alternatives of a rule take an item each, of which there are few
    texts = " | ".join(json.dumps(utf8(choice), ensure_ascii=False) for choice in choices)
    return _checked(
        llguidance().LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"),
        "list of choices",
    )


def of_lark(text: str) -> str:
    """A grammar in llguidance's variant of Lark's syntax; its first rule is ``start``.

    Args:
        text: The grammar.

    Raises:
        InputError: It is invalid.
    """
    check_embedded_schemas(text)
    return _checked(llguidance().LLMatcher.grammar_from_lark(utf8(text)), "grammar")


def of_gbnf(text: str) -> str:
    """A grammar in llama.cpp's syntax; its first rule is ``root``.

    Args:
        text: The grammar.

    Raises:
        InputError: It is invalid.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return of_lark(gbnf_to_lark(text))
    except InputError:
        raise
    except Exception as error:  # the converter raises whatever its parts raise
        raise InputError(f"the grammar is invalid: {error}", "Give a grammar in GBNF.") from error


def of_grammar(text: str) -> str:
    """A grammar in Lark's or in llama.cpp's syntax, by the sign that separates a rule from its name.

    Args:
        text: The grammar.

    Raises:
        InputError: It is invalid.
    """
    return of_gbnf(text) if "::=" in text else of_lark(text)


def matcher_of(vocabulary: object, grammar: str) -> Any:
    """llguidance's matcher of a grammar.

    Args:
        vocabulary: The ``LLTokenizer`` of a model.
        grammar: The grammar.

    Raises:
        InputError: It is invalid or too long.
    """
    check_length(grammar, "grammar")

    def make() -> Any:
        return llguidance().LLMatcher(vocabulary, grammar, log_level=0)

    matcher = make() if len(grammar) <= _INLINE_CHARACTERS else on_deep_stack(make)
    if matcher.is_error():
        raise InputError(f"the grammar is invalid: {first_line(matcher.get_error())}")
    return matcher


def check_length(grammar: str, what: str) -> None:
    """Refuses a grammar that is too long to be compiled.

    Args:
        grammar: The grammar, as llguidance reads it.
        what: What it was made of.

    Raises:
        InputError: It is longer than ``MAX_CHARACTERS``.
    """
    if len(grammar) > MAX_CHARACTERS:
        raise InputError(
            f"the {what} is too long: its grammar has {len(grammar)} characters",
            f"Give one with at most {MAX_CHARACTERS}.",
        )


def first_line(problem: str) -> str:
    """The first line of an error of llguidance, without the state and the grammar that follow.

    Args:
        problem: Its message.
    """
    text = " ".join(re.split(r"<state>|<grammar>|<backtrace>", problem)[0].split())
    return text if len(text) <= 500 else f"{text[:500]} …"


def _checked(grammar: str, what: str) -> str:
    check_length(grammar, what)
    problem = _problem(grammar)
    if problem and not problem.startswith("WARNING"):
        raise InputError(
            f"the {what} is invalid: {first_line(problem)}", f"Give a {what} that fits."
        )
    return grammar


@lru_cache(128)  # clients send the same schema again and again
def _problem(grammar: str) -> str:
    validate = llguidance().LLMatcher.validate_grammar
    if len(grammar) <= _INLINE_CHARACTERS:
        return validate(grammar)
    return on_deep_stack(lambda: validate(grammar))
