"""The schemas of tools as grammars hold them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from max.pipelines.core.exceptions import UserError
from max.pipelines.structured.grammar import (
    MAX_CHARACTERS,
    grammar_problem,
    loose_schema,
    of_json_schema,
    shortened_list,
    simple_schema,
)
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import ToolFormat
from max.serve.chat.tools.grammars import AnswerGrammar, answer_grammar
from max.serve.errors import ApiError, of_user_error

_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class ToolGrammar:
    """The grammar of an answer that may call tools.

    Args:
        grammar: The grammar; None: any text.
        hints: What it does not hold, for the client.
    """

    grammar: str | None
    hints: tuple[str, ...] = ()


def tool_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    special_tokens: dict[str, int],
    content_grammar: str | None = None,
    text_marks: Sequence[str] = (),
) -> ToolGrammar:
    """The grammar of an answer to a request with tools, relaxed to what grammars hold.

    Args:
        tools: The tools.
        choice: Whether they are called, and which.
        tool_format: How they are called.
        special_tokens: The special tokens by their texts.
        content_grammar: The grammar of an answer without calls; None: any text.
        text_marks: Special tokens that free text may have, such as those around reasoning.

    Raises:
        ApiError: The schema of a tool that is strict cannot be held.
    """

    def grammar_of(held_tools: Sequence[Tool]) -> AnswerGrammar:
        return answer_grammar(
            held_tools, choice, tool_format, special_tokens, content_grammar, text_marks
        )

    # nearly always the grammar of all tools can be compiled, and none needs a check of its own
    held, hints = _all_held(tools, choice, check=False)
    answer = grammar_of(held)
    if answer.text is None:
        return ToolGrammar(None)
    if len(answer.text) <= MAX_CHARACTERS and grammar_problem(answer.text) is None:
        return _with_hints(answer, tools, hints)
    held, hints = _all_held(tools, choice, check=True)
    while True:
        answer = grammar_of(held)
        if answer.text is None:
            return ToolGrammar(None)
        too_long = len(answer.text) > MAX_CHARACTERS
        problem = "it is too long" if too_long else grammar_problem(answer.text)
        if problem is None:
            return _with_hints(answer, tools, hints)
        # one schema after another loses all but its type, the largest first
        largest = max(range(len(held)), key=lambda at: len(json.dumps(held[at].parameters)))
        if held[largest].parameters == _ANY_OBJECT:
            return ToolGrammar(content_grammar, (*hints, f"tools: all schemas ({problem})"))
        hints.append(f"{held[largest].name}: all but the type ({problem})")
        held[largest] = replace(held[largest], parameters=_ANY_OBJECT)


def _with_hints(answer: AnswerGrammar, tools: Sequence[Tool], hints: Sequence[str]) -> ToolGrammar:
    """A grammar with what it does not hold, which is an error where the tool is strict."""
    for number, tool in enumerate(tools):
        own = [each.place for each in answer.unheld if tool.strict and each.tool == tool.name]
        if own:
            raise ApiError(
                f"the tool {tool.name} is strict, and calls in the format of this model cannot hold "
                f"{shortened_list(own)}; leave out strict or these keywords",
                param=f"tools.{number}.function.parameters",
            )
    unheld = (f"{each.tool}: {each.place}" for each in answer.unheld)
    # schema and layout may lack the same keyword
    return ToolGrammar(answer.text, tuple(dict.fromkeys((*hints, *unheld))))


def _all_held(
    tools: Sequence[Tool], choice: ToolChoice, check: bool
) -> tuple[list[Tool], list[str]]:
    """Tools with the parts of their schemas that grammars hold, and what these lack."""
    held: list[Tool] = []
    hints: list[str] = []
    for number, tool in enumerate(tools):
        if choice.may_call(tool.name) and choice.kind is not ChoiceKind.NONE:
            tool, lacks = _held_tool(tool, number, check)
            hints += lacks
        held.append(tool)
    return held, hints


def _held_tool(tool: Tool, index: int, check: bool) -> tuple[Tool, list[str]]:
    """A tool with the part of its schema that a grammar holds, and what it lacks."""
    where = f"tools.{index}.function.parameters"
    try:
        if tool.strict:
            of_json_schema(tool.parameters)
        # not compiled on its own: the caller compiles the grammar of all tools
        form = None if check else simple_schema(tool.parameters)
        form = form or loose_schema(tool.parameters)
    except UserError as error:
        if tool.strict:
            raise of_user_error(
                type(error)(f"the tool {tool.name} is strict, and {error.problem}", error.remedy),
                where,
            ) from error
        return replace(tool, parameters=_ANY_OBJECT), [f"{tool.name}: its schema ({error.problem})"]
    schema = form.schema
    # arguments are an object in any case
    if schema.get("type", "object") != "object":
        schema = _ANY_OBJECT
    lacks = (
        [f"{tool.name}: {shortened_list(form.relaxed_keywords)}"] if form.relaxed_keywords else []
    )
    return replace(tool, parameters=schema), lacks
