"""The fields that constrain the structure of an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from max.pipelines.core.exceptions import UserError
from max.pipelines.structured import grammar
from max.serve.errors import ApiError, of_user_error
from max.serve.grammar_threads import in_grammar_thread
from max.serve.openai.fields import FIRST_ERROR, StrictBody

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

    model_config = ConfigDict(**{**StrictBody.model_config, "populate_by_name": True})


class GrammarFields(StrictBody):
    """The fields of a request; at most one is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None


async def compiled_grammar(body: GrammarFields) -> str | None:
    """The grammar of a request's answers, compiled in a thread, so that streams do not wait for a large one.

    Args:
        body: The request.

    Raises:
        ApiError: It is invalid, or there are several.
    """
    constraints = (
        body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice,
        body.guided_grammar,
    )  # fmt: skip
    if all(each is None for each in constraints):
        return None
    return await in_grammar_thread(grammar_of, body)


def grammar_of(body: GrammarFields) -> str | None:
    """The grammar of a request's answers; None: any text.

    Args:
        body: The request.

    Raises:
        ApiError: It is invalid, or there are several.
    """
    constraints: list[tuple[str, Callable[[Any], str], Any]] = []
    if body.response_format is not None:
        constraints += _of_format(body.response_format)
    outputs = body.structured_outputs
    if outputs is not None:
        constraints += [
            ("structured_outputs.json", grammar.of_json_schema, outputs.json_),
            ("structured_outputs.regex", grammar.of_regex, outputs.regex),
            ("structured_outputs.choice", grammar.of_choices, outputs.choice),
            ("structured_outputs.grammar", grammar.of_grammar, outputs.grammar),
            ("structured_outputs.json_object", _object, outputs.json_object or None),
        ]
    constraints += [
        ("guided_json", grammar.of_json_schema, body.guided_json),
        ("guided_regex", grammar.of_regex, body.guided_regex),
        ("guided_choice", grammar.of_choices, body.guided_choice),
        ("guided_grammar", grammar.of_grammar, body.guided_grammar),
    ]
    present = [each for each in constraints if each[2] is not None]
    if not present:
        return None
    if len(present) > 1:
        raise ApiError(
            f"{present[0][0]} and {present[1][0]} are given; give one", param=present[1][0]
        )
    ((param, make, value),) = present
    try:
        return make(value)
    except UserError as error:
        raise of_user_error(error, param) from error


def _object(_: object) -> str:
    return grammar.of_any_object()


def _of_format(field: ResponseFormat) -> list[tuple[str, Callable[[Any], str], Any]]:
    match field.type:
        case "text":
            return []
        case "json_object" if field.schema_ is None:
            return [("response_format", _object, True)]
        case "json_object":
            return [("response_format.schema", grammar.of_json_schema, field.schema_)]
        case "json_schema":
            value = None if field.json_schema is None else field.json_schema.schema_
            where, make = "response_format.json_schema.schema", grammar.of_json_schema
        case "regex":
            where, make, value = "response_format.regex", grammar.of_regex, field.regex
        case "choice":
            where, make, value = "response_format.choice", grammar.of_choices, field.choice
        case "grammar":
            where, make, value = "response_format.grammar", grammar.of_grammar, field.grammar
    if value is None:
        raise ApiError(f"{where} is missing", param=where)
    return [(where, make, value)]
