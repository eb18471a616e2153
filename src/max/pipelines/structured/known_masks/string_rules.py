"""What the strings of a JSON schema depend on: the lengths of their bounds and of the texts that it names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from max.pipelines.structured.validation import MAX_CHARACTERS, kept_results

_SCHEMA = frozenset({"items", "additionalProperties"})
_SCHEMA_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems"})
_SCHEMAS_BY_NAME = frozenset({"properties", "$defs", "definitions"})
_BOUNDS = ("minLength", "maxLength")
_TEXT = ""
_OTHERS = frozenset(
    {
        "type", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
        "multipleOf", "title", "description", "default", "examples", "$schema", "$comment", "$ref",
        "deprecated", "readOnly", "writeOnly",
    }
)  # fmt: skip
"""Those that say nothing of the characters of a string."""
_OPTIONS = "x-guidance"
_ESCAPED = 12
"""The maximum number of characters of JSON that stand for one of a text: two escaped halves of a pair."""


class StringRules(NamedTuple):
    """What the strings of a schema depend on.

    Args:
        longest_name: No text that the schema names is longer as JSON, in characters.
        bounds: The lengths at which what may follow changes, in characters, ascending.
        greatest: Those of them that are greatest lengths only.
    """

    longest_name: int
    bounds: tuple[int, ...]
    greatest: frozenset[int] = frozenset()


class _UnknownKeywordError(Exception):
    """A keyword that may say more of strings."""


@kept_results(128, longest=MAX_CHARACTERS)
def string_rules(grammar: str) -> StringRules | None:
    """The rules of the strings of a grammar; None if it is no schema, or says more of strings than lengths and texts.

    Args:
        grammar: The grammar in llguidance's form.
    """
    try:
        value = json.loads(grammar)
        (part,) = value["grammars"]
        # a grammar of calls may have texts around the JSON
        if part.get("lark_grammar") is not None:
            return None
        schema = part["json_schema"]
        found = list(_parts({key: schema[key] for key in schema if key != _OPTIONS}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, _UnknownKeywordError):
        return None
    longest = max((part for key, part in found if key == _TEXT), default=0)
    least, most = ({part for key, part in found if key == bound} for bound in _BOUNDS)
    return StringRules(longest, tuple(sorted(least | most)), frozenset(most - least))


def _parts(schema: object) -> Iterator[tuple[str, int]]:
    """The bounds of a schema's strings, and the lengths of its texts (`_TEXT`)."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _UnknownKeywordError
    for key, value in schema.items():
        if key in _SCHEMA:
            yield from _parts(value)
        elif key in _SCHEMA_LISTS:
            for one in value:
                yield from _parts(one)
        elif key in _SCHEMAS_BY_NAME:
            for name, one in value.items():
                yield _TEXT, _length(name)
                yield from _parts(one)
        elif key in ("enum", "const", "required"):
            yield from ((_TEXT, _length(text)) for text in _texts(value))
        elif key in _BOUNDS:
            if int(value) != value:
                raise _UnknownKeywordError
            yield key, int(value)
        # such as pattern or format
        elif key not in _OTHERS:
            raise _UnknownKeywordError


def _texts(value: Any) -> Iterable[str]:
    """The strings within a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield key
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _length(text: str) -> int:
    """The length of a string of JSON at most, as some characters may be escaped."""
    return sum(1 if " " <= c <= "~" and c not in '"\\/' else _ESCAPED for c in text)
