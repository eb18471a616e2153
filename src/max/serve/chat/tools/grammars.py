"""Grammars of answers that may call tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from max.pipelines.core.exceptions import UserError
from max.pipelines.structured.grammar import of_json_schema
from max.serve.chat.tools import deepseek, harmony
from max.serve.chat.tools.definitions import ChoiceKind, Tool, ToolChoice
from max.serve.chat.tools.formats import ToolFormat
from max.serve.errors import of_user_error

_SPACE = {"whitespace_pattern": r"[ \t\r\n]{0,24}"}


def answer_grammar(
    tools: Sequence[Tool],
    choice: ToolChoice,
    tool_format: ToolFormat,
    special_tokens: dict[str, int],
    content_grammar: str | None = None,
) -> str | None:
    """The grammar of an answer to a request with tools.

    Args:
        tools: The tools.
        choice: Whether they are called.
        tool_format: How they are called.
        special_tokens: The special tokens by their texts.
        content_grammar: The grammar of an answer that calls none; None: any text.

    Returns:
        The grammar; None where it would allow any text, or calls cannot be told from text.

    Raises:
        ApiError: The parameters of a tool are no JSON schema.
    """
    called = [
        tool for tool in tools if choice.kind is not ChoiceKind.NAMED or tool.name == choice.name
    ]
    must = choice.kind in (ChoiceKind.REQUIRED, ChoiceKind.NAMED)
    several = choice.parallel and choice.kind is not ChoiceKind.NAMED
    if tool_format.syntax == "harmony":
        several = False  # a call ends the answer
    if not must and not tool_format.trigger and content_grammar is None:
        return None
    rules: list[str] = []
    for number, tool in enumerate(called):
        try:
            of_json_schema(tool.parameters)
        except UserError as error:
            raise of_user_error(error, f"tools.{number}.function.parameters") from error
        rules.append(f"object_{number}: {_call_rule(tool, tool_format, special_tokens)}")
    objects = " | ".join(f"object_{number}" for number in range(len(called)))
    rules.append(f"object: {objects}")
    between = tool_format.separator
    body = "object"
    if between is not None and several:
        body = f"object ({json.dumps(between)} object)*"
    before, after = _quoted(tool_format.before), _mark(tool_format.after, special_tokens)
    special = special_tokens.get(tool_format.trigger)
    trigger = f"<[{special}]>" if special is not None else _quoted(tool_format.trigger)
    if must or content_grammar is not None:
        rules.append(f"calls: {trigger} {before} {body} {after}")
        more = ' ("\\n"? calls)*' if between is None and several else ""
        start = f"calls{more}"
    else:
        # text, in which the trigger begins a call
        rules.append("TEXT: /(.|\\n)*/")
        if special is None:
            rules.append(f"trigger[lazy]: TEXT {trigger}")
        else:
            rules.append(f"trigger: TEXT {trigger}")
        rules.append(f"calls: trigger {before} {body} {after}")
        rules.append("text: TEXT")
        start = "calls* text" if several and between is None else "calls? text"
    if content_grammar is not None and not must:
        start = f"{start} | @content"
    lark = "\n".join(["%llguidance {}", f"start: {start}", *rules])
    if content_grammar is None or must:
        return lark
    content = {"lark_grammar": content_grammar}
    if content_grammar.lstrip().startswith("{"):
        (content,) = json.loads(content_grammar)["grammars"]
    return json.dumps(
        {"grammars": [{"name": "answer", "lark_grammar": lark}, {**content, "name": "content"}]}
    )


def _call_rule(tool: Tool, tool_format: ToolFormat, special_tokens: dict[str, int]) -> str:
    """What a call of one tool looks like."""

    def mark(text: str) -> str:
        return _mark(text, special_tokens)

    schema = json.dumps({**tool.parameters, "x-guidance": _SPACE})
    match tool_format.syntax:
        case "pythonic":
            return f"{_quoted(tool.name + '(')} {_keywords(tool.parameters)} {_quoted(')')}"
        case "deepseek":
            head = f"{mark(deepseek.CALL_BEGIN)} {_quoted(tool.name)} {mark(deepseek.SEPARATOR)}"
            return f"{head} %json {schema} {mark(deepseek.CALL_END)}"
        case "harmony":
            to = _quoted(f"commentary to=functions.{tool.name} ")
            head = f'{mark(harmony.CHANNEL)} {to} {mark(harmony.CONSTRAIN)} "json"'
            return f"{head} {mark(harmony.MESSAGE)} %json {schema}"
        case _:
            head = f'{{"name": {json.dumps(tool.name)}, "{tool_format.arguments_key}": '
            return f'{json.dumps(head)} %json {schema} "}}"'


def _keywords(parameters: dict[str, Any]) -> str:
    """The keyword arguments of a schema, in its order: those that are required, then the others."""
    properties: dict[str, Any] = parameters.get("properties") or {}
    required = [name for name in properties if name in (parameters.get("required") or ())]
    definitions = {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}

    def value(name: str) -> str:
        schema = properties[name] if isinstance(properties[name], dict) else {}
        return f"%json {json.dumps({**definitions, **schema, 'x-guidance': _SPACE})}"

    parts = [
        f"{_quoted(name + '=' if not at else ', ' + name + '=')} {value(name)}"
        for at, name in enumerate(required)
    ]
    others = [name for name in properties if name not in required]
    if required:
        parts += [f"({_quoted(', ' + name + '=')} {value(name)})?" for name in others]
        return " ".join(parts)
    # any first one has no comma before it
    tails = [
        " ".join(
            [
                f"{_quoted(name + '=')} {value(name)}",
                *(f"({_quoted(', ' + o + '=')} {value(o)})?" for o in others[at + 1 :]),
            ]
        )
        for at, name in enumerate(others)
    ]
    return f"({' | '.join(tails)})?" if tails else ""


def _mark(text: str, special_tokens: dict[str, int]) -> str:
    """A mark as its special token, where it is one."""
    special = special_tokens.get(text)
    return f"<[{special}]>" if special is not None else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
