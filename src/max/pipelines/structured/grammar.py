"""Grammars of structured output, in llguidance's text form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from max.pipelines.core.exceptions import InputError
from max.pipelines.core.text import utf8
from max.pipelines.structured.deep_stack import on_deep_stack
from max.pipelines.structured.schemas.forms import (
    TYPES,
    GrammarSchema,
    TooLargeSchemaError,
    grammar_schema,
)
from max.pipelines.structured.schemas.limits import check_embedded_schemas, check_schema
from max.pipelines.structured.validation import (
    INLINE_CHARACTERS,
    MAX_CHARACTERS,
    check_length,
    first_line,
    grammar_problem,
    guarded,
    kept_results,
    llguidance,
    of_regex,
    valid_grammar,
)

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space between JSON tokens, for llguidance: one style, as small models may generate spaces endlessly."""


def of_json_schema(schema: str | Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON texts that match a schema.

    Objects that list properties have no others, unless the schema says so.

    Args:
        schema: The schema, or its text.

    Raises:
        InputError: The schema is invalid, uses features that cannot be enforced, or exceeds a limit.
    """
    try:
        value = _mapping(schema)
        check_schema(value)
        form = grammar_schema(value)
        if form.relaxed_keywords:
            raise ValueError(f"a grammar does not hold {shortened_list(form.relaxed_keywords)}")
        grammar = _of_form(form.schema, False)
        # a grammar refuses alternatives that overlap: ones that exclude each other may say the same
        refused = '"oneOf"' in json.dumps(form.schema) and grammar_problem(grammar) is not None
        if refused or form.overlap:
            apart = _apart(value, True, form)
            if apart is None and not refused:
                raise ValueError(f"a grammar does not hold {form.overlap}: alternatives overlap")
            grammar = grammar if apart is None else _of_form(apart.schema, False)
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"the JSON schema is invalid: {error}", "Give a JSON schema.") from error
    return valid_grammar(grammar, "JSON schema")


def of_loose_schema(schema: str | Mapping[str, Any] | bool) -> tuple[str, tuple[str, ...]]:
    """As :func:`of_json_schema`, but leaves out what a grammar cannot hold.

    Args:
        schema: The schema, or its text.

    Returns:
        The grammar, and the places and keywords that it lacks.

    Raises:
        InputError: The schema is no object, or nothing fits it.
    """
    form = loose_schema(schema)
    return valid_grammar(_of_form(form.schema, True), "JSON schema"), form.relaxed_keywords


def loose_schema(schema: str | Mapping[str, Any] | bool) -> GrammarSchema:
    """The part of a schema that a grammar holds, checked.

    Args:
        schema: The schema, or its text.

    Raises:
        InputError: The schema is no object, or nothing fits it.
    """
    try:
        return _loose_form(json.dumps(_mapping(schema)))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the JSON schema is invalid: {error}", "Give a JSON schema.") from error


def simple_schema(schema: Mapping[str, Any]) -> GrammarSchema | None:
    """As :func:`loose_schema`, but not checked, which takes most of the time; None if it must be."""
    try:
        return _simple_form(json.dumps(schema))
    except (ValueError, RecursionError):
        return None


@kept_results(512)
def _simple_form(text: str) -> GrammarSchema | None:
    form = grammar_schema(json.loads(text))
    # whether alternatives overlap is known after a check
    return None if '"oneOf"' in json.dumps(form.schema) else form


@kept_results(128)  # clients send the same tools repeatedly
def _loose_form(text: str) -> GrammarSchema:
    value = json.loads(text)
    relaxed: tuple[str, ...] = ()
    problem: str | None = None
    # each try leaves more out, until a grammar holds the rest
    for conditions, closed in ((True, True), (False, True), (False, False)):
        try:
            form = grammar_schema(value, conditions, closed)
        except (TooLargeSchemaError, RecursionError):
            return GrammarSchema(_kind_of(value), ("all but the type, as it is too large",))
        grammar = _of_form(form.schema, True)
        problem = "too large" if len(grammar) > MAX_CHARACTERS else grammar_problem(grammar)
        if problem is None:
            # of what is left, alternatives that overlap are all that may be relaxed
            text = json.dumps(form.schema)
            left = grammar_problem(_of_form(form.schema, False)) if '"oneOf"' in text else None
            if left is None and form.overlap:
                left = f"{form.overlap}: alternatives overlap"
            if left is not None and (apart := _apart(value, closed, form)) is not None:
                return apart
            return GrammarSchema(form.schema, (*form.relaxed_keywords, *([left] if left else [])))
        relaxed = form.relaxed_keywords
    return GrammarSchema(_kind_of(value), (*relaxed, f"all but the type ({(problem or '')[:120]})"))


def _apart(value: Mapping[str, Any], closed: bool, form: GrammarSchema) -> GrammarSchema | None:
    """A schema whose alternatives overlap, with alternatives that exclude each other; None if a grammar lacks that."""
    try:
        apart = grammar_schema(value, True, closed, apart=True)
    except (TooLargeSchemaError, RecursionError):
        return None
    if apart.overlap:  # an alternative has no opposite
        return None
    grammar = _of_form(apart.schema, False)
    if len(grammar) > MAX_CHARACTERS or grammar_problem(grammar) is not None:
        return None
    return apart if len(apart.relaxed_keywords) <= len(form.relaxed_keywords) else None


def _kind_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the same type, an object where that is not clear."""
    kind = schema.get("type", "object")
    return {"type": kind if isinstance(kind, str) and kind in TYPES else "object"}


def _mapping(schema: str | Mapping[str, Any] | bool) -> Mapping[str, Any]:
    value = json.loads(schema) if isinstance(schema, str) else schema
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"it is {value!r}; expected an object")
    return value


def _of_form(schema: Mapping[str, Any], lenient: bool) -> str:
    options = {**JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}
    with guarded:
        return llguidance().LLMatcher.grammar_from_json_schema(json.dumps(schema), options)


def shortened_list(texts: Sequence[str]) -> str:
    """A few of some texts, for a message."""
    more = f", and {len(texts) - 4} more" if len(texts) > 4 else ""
    return ", ".join(texts[:4]) + more


def of_any_object() -> str:
    """The grammar of all JSON objects."""
    return of_json_schema({"type": "object"})


@guarded
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
    return valid_grammar(
        llguidance().LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}"),
        "list of choices",
    )


@guarded
def of_lark(text: str) -> str:
    """A grammar in llguidance's variant of Lark's syntax; its first rule is ``start``.

    Args:
        text: The grammar.

    Raises:
        InputError: The grammar is invalid.
    """
    check_embedded_schemas(text)
    return valid_grammar(llguidance().LLMatcher.grammar_from_lark(utf8(text)), "grammar")


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
    """A grammar in Lark's or in llama.cpp's syntax, recognized by the sign between a rule's name and its body.

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

    @guarded
    def make() -> Any:
        return llguidance().LLMatcher(vocabulary, grammar, log_level=0)

    # a long grammar is read by deep recursion
    matcher = make() if len(grammar) <= INLINE_CHARACTERS else on_deep_stack(make)
    if matcher.is_error():
        raise InputError(f"the grammar is invalid: {first_line(matcher.get_error())}")
    return matcher


__all__ = [
    "JSON_STYLE",
    "MAX_CHARACTERS",
    "check_length",
    "first_line",
    "grammar_problem",
    "llguidance",
    "loose_schema",
    "matcher_of",
    "of_any_object",
    "of_choices",
    "of_gbnf",
    "of_grammar",
    "of_json_schema",
    "of_lark",
    "of_loose_schema",
    "of_regex",
    "shortened_list",
    "simple_schema",
]
