"""Grammars of structured output, as texts of llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from max.pipelines.core.exceptions import ConfigError, InputError

_SPACE = r"[ \t\r\n]{0,24}"
"""The space between the tokens of JSON: bounded, as small models go on with spaces for ever."""


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
        InputError: The schema is invalid, or uses what cannot be enforced.
    """
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(value, Mapping):
            raise ValueError(f"it is {value!r}; expected an object")
        grammar = llguidance().LLMatcher.grammar_from_json_schema(
            json.dumps(value), {"whitespace_pattern": _SPACE}
        )
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
    return _checked(llguidance().LLMatcher.grammar_from_regex(pattern), "regular expression")


def of_choices(choices: Sequence[str]) -> str:
    """The grammar of some texts.

    Args:
        choices: The texts.

    Raises:
        InputError: There are none, or one is empty.
    """
    if not choices or not all(choices):
        raise InputError("the choices must be texts that are not empty", "Give at least one.")
    rules = " | ".join(json.dumps(choice) for choice in choices)
    return _checked(llguidance().LLMatcher.grammar_from_lark(f"start: {rules}"), "list of choices")


def of_lark(text: str) -> str:
    """A grammar in llguidance's variant of Lark's syntax; its first rule is ``start``.

    Args:
        text: The grammar.

    Raises:
        InputError: It is invalid.
    """
    return _checked(llguidance().LLMatcher.grammar_from_lark(text), "grammar")


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


def _checked(grammar: str, what: str) -> str:
    problem = llguidance().LLMatcher.validate_grammar(grammar)
    if problem and not problem.startswith("WARNING"):
        text = " ".join(problem.split())
        raise InputError(f"the {what} is invalid: {text[:500]}", f"Give a {what} that fits.")
    return grammar
