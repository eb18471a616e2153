"""Grammars of arguments that are written with their names one after the other, and of values in Python's syntax."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from max.serve.chat.tools.values import resolve_schema, types_of

_DEPTH = 3
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
    parameters: Mapping[str, Any], key: str, key_end: str, value_of: Any, comma: str = ", "
) -> str:
    """Arguments with their names, in the order of a schema: those that are required, then the others.

    Args:
        parameters: The schema.
        key: What stands before a name.
        key_end: What stands after it.
        value_of: Makes the rule of a value of its schema and of the one that has the definitions.
        comma: What stands between two arguments.
    """
    properties: dict[str, Any] = parameters.get("properties") or {}
    more = parameters.get("additionalProperties", "properties" not in parameters)
    if not properties and (more or isinstance(more, dict)):
        # an object that lists nothing has any arguments
        value = value_of(more if isinstance(more, dict) else {}, parameters)
        one = f"/[A-Za-z_][A-Za-z0-9_]{{0,63}}/ {json.dumps(key_end)} {value}"
        return f"({one} ({json.dumps(comma)} {one})*)?"
    required = [name for name in properties if name in (parameters.get("required") or ())]

    def argument(name: str, first: bool) -> str:
        schema = properties[name] if isinstance(properties[name], dict) else {}
        begin = json.dumps(("" if first else comma) + key + name + key_end)
        return f"{begin} {value_of(schema, parameters)}"

    others = [name for name in properties if name not in required]
    if required:
        parts = [argument(name, not at) for at, name in enumerate(required)]
        parts += [f"({argument(name, False)})?" for name in others]
        return " ".join(parts)
    # whichever comes first has no comma before it
    tails = [
        " ".join([argument(name, True), *(f"({argument(o, False)})?" for o in others[at + 1 :])])
        for at, name in enumerate(others)
    ]
    return f"({' | '.join(tails)})?" if tails else ""


def python_keywords(parameters: Mapping[str, Any], space: Mapping[str, Any]) -> str:
    """The rule of the keyword arguments of a call.

    Args:
        parameters: The schema of the arguments.
        space: The pattern of white space in JSON, for llguidance.
    """

    def value(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
        return python_value(schema, root, space)

    return keyword_rules(parameters, "", "=", value)


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
    choices = found.get("enum", [found["const"]] if "const" in found else None)
    if isinstance(choices, list):
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
