"""Grammars of arguments that are written with their names one after the other, and of values in Python's syntax."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from max.pipelines.structured.schemas.merging import listed_values
from max.serve.chat.tools.arguments.object_rules import CountedArguments, other_arguments
from max.serve.chat.tools.arguments.raw_texts import expression
from max.serve.chat.tools.arguments.rule_list import RuleList
from max.serve.chat.tools.values import resolve_schema, types_of

_DEPTH = 3
_NAMES = "[A-Za-z_][A-Za-z0-9_]{0,63}"
# escapes are those that mean the same in Python and in JSON; line breaks may stand in it
_TEXT = r"""/'([^'\\\x00]|\\['"\\bfnrt])*'/"""
_QUOTED = frozenset("'\\\r\n\0")
# schemas with any other keyword are left to the JSON form
_PLAIN = frozenset(
    ("type", "title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly",
     "$comment")
)  # fmt: skip
_PLAIN_LIST = _PLAIN | {"items"}


def definitions(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The definitions of a schema, to which its parts refer.

    Args:
        parameters: The schema.
    """
    return {key: parameters[key] for key in ("$defs", "definitions") if key in parameters}


def keyword_rules(
    parameters: Mapping[str, Any],
    key_end: str,
    value_of: Callable[[Any, Mapping[str, Any]], str],
    rules: RuleList,
    comma: str = ", ",
) -> str:
    """Arguments with their names, in the order of a schema: those that are required, then the others.

    Args:
        parameters: The schema, without combinations.
        key_end: What stands after a name.
        value_of: Makes the rule of a value of its schema and of the one that has the definitions.
        rules: Receives the rules of its parts, and what they do not hold.
        comma: What stands between two arguments.
    """
    properties: dict[str, Any] = parameters.get("properties") or {}
    found, lacks = other_arguments(parameters, _NAMES)
    rules.note(lacks)
    listed = {name: each for name, each in properties.items() if each is not False}
    others = [
        f"{each.names if each.names == expression(_NAMES) else rules.add_terminal(each.names)} {json.dumps(key_end)} "
        f"{value_of(each.schema, parameters)}"
        for each in found
    ]
    required = [name for name in listed if name in (parameters.get("required") or ())]

    def argument(name: str, first: bool) -> str:
        # the lexer takes the longest text: a comma with a name would hide other names that begin like it
        parts = (
            ["" if first else comma, name, key_end]
            if others
            else [("" if first else comma) + name + key_end]
        )
        return (
            f"{' '.join(map(json.dumps, filter(None, parts)))} {value_of(listed[name], parameters)}"
        )

    def other(first: bool) -> str:
        either = others[0] if len(others) == 1 else f"({' | '.join(others)})"
        return either if first else f"{json.dumps(comma)} {either}"

    optional = [name for name in listed if name not in required]
    counted = CountedArguments(
        [(partial(argument, name), name in required) for name in (*required, *optional)],
        other if others else None,
        parameters.get("minProperties", 0),
        parameters.get("maxProperties"),
        rules.add,
    )
    rules.note(counted.lacks())
    # the plain rules below know either listed names or others
    if counted.is_needed() or (listed and others):
        rule = counted.rule()
        if rule is not None:
            return rule
        rules.note([key for key in ("minProperties", "maxProperties") if key in parameters])
    if others and not listed:
        return f"({other(True)} ({other(False)})*)?"
    if required:
        parts = [argument(name, not at) for at, name in enumerate(required)]
        parts += [f"({argument(name, False)})?" for name in optional]
        return " ".join(parts)
    # whichever comes first has no comma before it
    tails = [
        " ".join([argument(name, True), *(f"({argument(o, False)})?" for o in optional[at + 1 :])])
        for at, name in enumerate(optional)
    ]
    return f"({' | '.join(tails)})?" if tails else ""


def python_keywords(
    parameters: Mapping[str, Any], space: Mapping[str, Any], rules: RuleList
) -> str:
    """The rule of the keyword arguments of a call.

    Args:
        parameters: The schema of the arguments, without combinations.
        space: The pattern of white space in JSON, for llguidance.
        rules: Receives the rules of its parts, and what they do not hold.
    """

    def value(schema: Any, root: Mapping[str, Any]) -> str:
        return python_value(schema if isinstance(schema, dict) else {}, root, space)

    return keyword_rules(parameters, "=", value, rules)


def python_value(
    schema: Mapping[str, Any], root: Mapping[str, Any], space: Mapping[str, Any], depth: int = 0
) -> str:
    """The rule of a value, as JSON or, where the schema is plain, as a literal of Python.

    Args:
        schema: The schema of the value.
        root: The schema that has its definitions.
        space: The pattern of white space in JSON, for llguidance.
        depth: The number of lists around it.
    """
    own = {**definitions(root), **schema, "x-guidance": space}
    options = [f"%json {json.dumps(own)}", *_literals(schema, root, space, depth)]
    return f"({' | '.join(options)})" if len(options) > 1 else options[0]


def _literals(
    schema: Mapping[str, Any], root: Mapping[str, Any], space: Mapping[str, Any], depth: int
) -> list[str]:
    """The rules of a value that JSON writes in another way."""
    found = resolve_schema(schema, root)
    choices = listed_values(found)
    if isinstance(choices, list):
        # numbers are written alike, so their JSON rule is enough
        return [json.dumps(text) for each in choices if (text := _literal(each)) is not None]
    for keyword in ("anyOf", "oneOf"):
        members = found.get(keyword)
        if isinstance(members, list) and found.keys() <= _PLAIN | {keyword}:
            each = [
                option for member in members for option in _literals(member, root, space, depth)
            ]
            return list(dict.fromkeys(each))
    types = types_of(found, root)
    options: list[str] = []
    # other keywords limit the value, which literals of Python would get around
    if found.keys() <= _PLAIN:
        options += [_TEXT] if not types or "string" in types else []
        options += ['"True"', '"False"'] if not types or "boolean" in types else []
        options += ['"None"'] if not types or "null" in types else []
    # objects are JSON: each level would repeat those below it
    items = found.get("items")
    if depth < _DEPTH and types == {"array"} and isinstance(items, dict) and found.keys() <= _PLAIN_LIST:  # fmt: skip
        # lists of what JSON writes in the same way are JSON
        if _literals(items, root, space, depth + 1):
            item = python_value(items, root, space, depth + 1)
            options.append(f'"[" ({item} (", " {item})*)? "]"')
    return options


def _literal(value: Any) -> str | None:
    """A value as Python writes it; None where JSON writes it in the same way, or it has marks of texts."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, str) and not _QUOTED & set(value):
        return f"'{value}'"
    return None
