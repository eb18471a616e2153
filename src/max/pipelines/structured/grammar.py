"""Grammars of structured output, in llguidance's text form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from max.pipelines.core.exceptions import ConfigError, InputError
from max.pipelines.core.native_calls import native_calls
from max.pipelines.core.text import utf8
from max.pipelines.structured.deep_stack import on_deep_stack
from max.pipelines.structured.schema_limits import check_embedded_schemas, check_schema

_SPACE = r"[ \t\r\n]{0,24}"
"""The white space between JSON tokens; bounded, as small models may generate spaces endlessly."""
MAX_CHARACTERS = 256 << 10
"""The maximum length of a grammar. llguidance recurses over nested rules: up to 750 bytes of stack per character."""
_guarded = native_calls("the grammar cannot be compiled", "Give a simpler one.", InputError)
_INLINE_CHARACTERS = 4 << 10
"""Grammars up to this length fit the default stack of a thread."""


def llguidance() -> ModuleType:
    """Imports the package llguidance.

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
        InputError: The schema is invalid, uses features that cannot be enforced, or exceeds a limit.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError(f"it is {value!r}; expected an object")
        check_schema(value)
        with _guarded:
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


@_guarded
def of_regex(pattern: str) -> str:
    """The grammar of the texts that a regular expression matches as a whole.

    Args:
        pattern: The expression, in the syntax of Rust's regex crate: no backreferences, no look-around.

    Raises:
        InputError: The expression is invalid.
    """
    return _checked(llguidance().LLMatcher.grammar_from_regex(utf8(pattern)), "regular expression")


@_guarded
def of_choices(choices: Sequence[str]) -> str:
    """The grammar of a fixed set of texts.

    Args:
        choices: The texts.

    Raises:
        InputError: There are no texts, or one is empty.
    """
    if not choices or not all(choices):
        raise InputError("the choices must be texts that are not empty", "Give at least one.")
    # one regular expression, as each alternative of a rule would take one of llguidance's limited items
    texts = " | ".join(json.dumps(utf8(choice), ensure_ascii=False) for choice in choices)
    return _checked(
        llguidance().LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"),
        "list of choices",
    )


@_guarded
def of_lark(text: str) -> str:
    """A grammar in llguidance's variant of Lark's syntax; its first rule is ``start``.

    Args:
        text: The grammar.

    Raises:
        InputError: The grammar is invalid.
    """
    check_embedded_schemas(text)
    return _checked(llguidance().LLMatcher.grammar_from_lark(utf8(text)), "grammar")


def of_gbnf(text: str) -> str:
    """A grammar in llama.cpp's syntax (GBNF); its first rule is ``root``.

    Args:
        text: The grammar.

    Raises:
        InputError: The grammar is invalid.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return of_lark(gbnf_to_lark(text))
    except InputError:
        raise
    except Exception as error:  # the converter raises exceptions of any class
        raise InputError(f"the grammar is invalid: {error}", "Give a grammar in GBNF.") from error


def of_grammar(text: str) -> str:
    """A grammar in Lark's or in llama.cpp's syntax, recognised by the sign between a rule's name and its body.

    Args:
        text: The grammar.

    Raises:
        InputError: The grammar is invalid.
    """
    return of_gbnf(text) if "::=" in text else of_lark(text)


def matcher_of(vocabulary: object, grammar: str) -> Any:
    """llguidance's matcher of a grammar.

    Args:
        vocabulary: The ``LLTokenizer`` of a model.
        grammar: The grammar.

    Raises:
        InputError: The grammar is invalid or too long.
    """
    check_length(grammar, "grammar")

    @_guarded
    def make() -> Any:
        return llguidance().LLMatcher(vocabulary, grammar, log_level=0)

    matcher = make() if len(grammar) <= _INLINE_CHARACTERS else on_deep_stack(make)
    if matcher.is_error():
        raise InputError(f"the grammar is invalid: {first_line(matcher.get_error())}")
    return matcher


def check_length(grammar: str, kind: str) -> None:
    """Refuses a grammar that is too long to compile.

    Args:
        grammar: The grammar in llguidance's form.
        kind: The kind of input that it was made from, for the error.

    Raises:
        InputError: The grammar is longer than ``MAX_CHARACTERS``.
    """
    if len(grammar) > MAX_CHARACTERS:
        raise InputError(
            f"the {kind} is too long: its grammar has {len(grammar)} characters",
            f"Give one with at most {MAX_CHARACTERS}.",
        )


def first_line(problem: str) -> str:
    """The first line of a llguidance error, without the parser state and grammar that follow.

    Args:
        problem: The message of the error.
    """
    text = " ".join(re.split(r"<state>|<grammar>|<backtrace>", problem)[0].split())
    return text if len(text) <= 500 else f"{text[:500]} …"


def _checked(grammar: str, kind: str) -> str:
    """A grammar that llguidance accepts; raises InputError for others."""
    check_length(grammar, kind)
    problem = _problem(grammar)
    if problem and not problem.startswith("WARNING"):
        raise InputError(
            f"the {kind} is invalid: {first_line(problem)}", f"Give a {kind} that fits."
        )
    return grammar


@lru_cache(128)  # clients send the same schema repeatedly
def _problem(grammar: str) -> str:
    validate = _guarded(llguidance().LLMatcher.validate_grammar)
    if len(grammar) <= _INLINE_CHARACTERS:
        return validate(grammar)
    return on_deep_stack(lambda: validate(grammar))
