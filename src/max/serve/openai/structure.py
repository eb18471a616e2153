"""The fields that constrain the structure of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field

from max.pipelines.core.exceptions import UserError
from max.pipelines.structured import grammar
from max.serve.errors import ApiError, of_user_error
from max.serve.openai.fields import FIRST_ERROR, StrictBody
from max.serve.requests.request_context import current_request
from max.serve.requests.threads import in_grammar_thread

_Constraint: TypeAlias = "tuple[str, Callable[[Any], str | AnswerGrammar], Any]"
Texts = Annotated[list[str], FIRST_ERROR]


class SchemaField(StrictBody):
    """A JSON schema with its name."""

    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class ResponseFormat(StrictBody):
    """The format of an answer; ``regex``, ``choice`` and ``grammar`` go beyond OpenAI's."""

    type: Literal["text", "json_object", "json_schema", "regex", "choice", "grammar"]
    json_schema: SchemaField | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class StructuredOutputs(StrictBody):
    """One constraint, with vLLM's names."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class GrammarFields(StrictBody):
    """The fields of a request; at most one is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    # SGLang's and llama.cpp's
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


async def compiled_grammar(body: GrammarFields) -> str | None:
    """The grammar of a request's answers, compiled in a thread, so that streams do not wait for a large one.

    Args:
        body: The request.

    Raises:
        ApiError: It is invalid, or there are several.
    """
    constraints = (
        body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice,
        body.guided_grammar, body.json_schema, body.regex or None, body.ebnf or None, body.grammar or None,
    )  # fmt: skip
    # most requests have none, and need no thread
    if all(each is None for each in constraints):
        return None
    made = await in_grammar_thread(grammar_of, body)
    note_relaxed(made)
    return made.grammar


def note_relaxed(grammar: AnswerGrammar) -> None:
    """Notes for the running request what a grammar does not hold, so that the answer is checked.

    Args:
        grammar: The grammar.
    """
    if grammar.relaxed_keywords:
        current_request().hints += grammar.relaxed_keywords
        # the empty name is the answer's; others are those of tools
        current_request().schemas[""] = grammar.schema


@dataclass(frozen=True)
class AnswerGrammar:
    """The grammar of a request's answers.

    Args:
        grammar: The grammar; None: any text.
        relaxed_keywords: What it does not hold of the schema.
        schema: The schema, if it does not hold all of it.
    """

    grammar: str | None = None
    relaxed_keywords: tuple[str, ...] = ()
    schema: Mapping[str, Any] = field(default_factory=dict)


def schema_grammar(schema: Any, strict: bool = False) -> AnswerGrammar:
    """The grammar of a schema.

    Args:
        schema: The schema, or its text.
        strict: Whether a schema that a grammar cannot hold is an error.

    Raises:
        UserError: It is.
    """
    # strict as in OpenAI's API: what the grammar cannot hold is an error
    if strict:
        return AnswerGrammar(grammar.of_json_schema(schema))
    made, relaxed = grammar.of_loose_schema(schema)
    if not relaxed:
        return AnswerGrammar(made)
    # the whole schema, which the answer is checked against afterwards
    value = json.loads(schema) if isinstance(schema, str) else schema
    return AnswerGrammar(made, (grammar.shortened_list(relaxed),), value)


def grammar_of(body: GrammarFields) -> AnswerGrammar:
    """The grammar of a request's answers.

    Args:
        body: The request.

    Raises:
        ApiError: It is invalid, or there are several.
    """
    constraints: list[_Constraint] = []
    if body.response_format is not None:
        constraints += _of_format(body.response_format)
    outputs = body.structured_outputs
    if outputs is not None:
        if outputs.structural_tag is not None:
            raise ApiError(
                "structured_outputs.structural_tag is not supported: give tools, or a grammar",
                param="structured_outputs.structural_tag",
                code="unsupported_parameter",
            )
        constraints += [
            ("structured_outputs.json", schema_grammar, outputs.json_),
            ("structured_outputs.regex", grammar.of_regex, outputs.regex),
            ("structured_outputs.choice", grammar.of_choices, outputs.choice),
            ("structured_outputs.grammar", grammar.of_grammar, outputs.grammar),
            ("structured_outputs.json_object", _object, outputs.json_object or None),
        ]
    constraints += [
        ("guided_json", schema_grammar, body.guided_json),
        ("guided_regex", grammar.of_regex, body.guided_regex),
        ("guided_choice", grammar.of_choices, body.guided_choice),
        ("guided_grammar", grammar.of_grammar, body.guided_grammar),
        ("json_schema", schema_grammar, None if body.json_schema == "" else body.json_schema),
        # an empty text is no constraint there
        ("regex", grammar.of_regex, body.regex or None),
        ("ebnf", grammar.of_grammar, body.ebnf or None),
        ("grammar", grammar.of_grammar, body.grammar or None),
    ]
    present = [each for each in constraints if each[2] is not None]
    if not present:
        return AnswerGrammar()
    if len(present) > 1:
        raise ApiError(
            f"{present[0][0]} and {present[1][0]} are given; give one", param=present[1][0]
        )
    ((param, make, value),) = present
    try:
        made = make(value)
        return AnswerGrammar(made) if isinstance(made, str) else made
    except UserError as error:
        raise of_user_error(error, param) from error


def _object(_: object) -> str:
    return grammar.of_any_object()


def _of_format(form: ResponseFormat) -> list[_Constraint]:
    make: Callable[[Any], str | AnswerGrammar]
    match form.type:
        case "text":
            return []
        case "json_object" if form.schema_ is None:
            return [("response_format", _object, True)]
        case "json_object":
            return [("response_format.schema", schema_grammar, form.schema_)]
        case "json_schema":
            value = None if form.json_schema is None else form.json_schema.schema_
            strict = form.json_schema is not None and bool(form.json_schema.strict)
            where, make = (
                "response_format.json_schema.schema",
                partial(schema_grammar, strict=strict),
            )
        case "regex":
            where, make, value = "response_format.regex", grammar.of_regex, form.regex
        case "choice":
            where, make, value = "response_format.choice", grammar.of_choices, form.choice
        case "grammar":
            where, make, value = "response_format.grammar", grammar.of_grammar, form.grammar
    if value is None:
        raise ApiError(f"{where} is missing", param=where)
    return [(where, make, value)]
