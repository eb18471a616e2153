"""Values of arguments that are not written as JSON: texts between tags, objects whose keys have no quotes."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from max.pipelines.core.text import finite_json_value
from max.pipelines.structured.schemas.merging import listed_values
from max.pipelines.structured.schemas.references import References, value_at

_TYPES = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "object": dict, "array": list,
    "null": type(None),
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_DEPTH = 64
_PLAIN_END = ",:{}[]"


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a schema allows; empty: any.

    Args:
        schema: The schema.
        root: The schema that has its definitions.
        depth: The number of references that were followed.
    """
    # references may go in a circle
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return types_of(_at(reference, root), root, depth + 1)
    own = schema.get("type")
    if isinstance(own, str):
        return frozenset((own,))
    if isinstance(own, list):
        return frozenset(each for each in own if isinstance(each, str))
    values = listed_values(schema)
    if isinstance(values, list):
        return frozenset(_type_of(value) for value in values)
    for keyword in ("anyOf", "oneOf"):
        members = schema.get(keyword)
        if isinstance(members, list) and members:
            each = [types_of(member, root, depth + 1) for member in members]
            # a member that allows any type makes the schema allow it
            return frozenset().union(*each) if all(each) else frozenset()
    members = schema.get("allOf")
    if isinstance(members, list):
        known = [types for member in members if (types := types_of(member, root, depth + 1))]
        return reduce(_common, known) if known else frozenset()
    return frozenset(("object",)) if "properties" in schema else frozenset()


def _common(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The types that two schemas allow; those of the first one where they have none in common."""
    # an integer is a number
    pairs = ((one, other), (other, one))
    whole = {"integer"} if any("integer" in a and "number" in b for a, b in pairs) else set[str]()
    return (one & other) | whole or one


def _type_of(value: Any) -> str:
    # first, as Python's booleans are integers
    if isinstance(value, bool):
        return "boolean"
    return next((name for name, kind in _TYPES.items() if isinstance(value, kind)), "null")


def _allowed(value: Any, types: frozenset[str]) -> bool:
    kind = _type_of(value)
    return kind in types or (kind == "integer" and "number" in types)


def typed_value(text: str, types: frozenset[str]) -> Any:
    """The value that a text between tags stands for.

    Args:
        text: The text.
        types: The types that the tool's schema allows; empty: any.
    """
    if types == {"string"}:
        return text
    value = literal(text)
    if value is _NO_VALUE:
        return text
    # a literal of a type that is not allowed is a text
    if "string" in types and not _allowed(value, types):
        return text
    # models write 3.0 where a schema wants 3
    if types == {"integer"} and isinstance(value, float) and value.is_integer():
        return int(value)
    # quotes are part of a text whose type is not known
    if not types and isinstance(value, str):
        return text
    return value


class _NoValue:
    """The result where a text is no literal."""


_NO_VALUE = _NoValue()


def literal(text: str) -> Any:
    """The value of a literal of JSON or Python; a marker object for other texts."""
    bare = text.strip()
    if bare in _WORDS:
        return _WORDS[bare]
    try:
        return finite_json_value(bare)
    except ValueError:
        pass
    # only what may be a list, an object or a quoted text is worth the parser
    if bare[:1] not in ("{", "[", "(", "'"):
        return _NO_VALUE
    try:
        value = ast.literal_eval(bare)
        # only what JSON has
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return _NO_VALUE


def literal_or(text: str, default: Any) -> Any:
    """The value of a literal of JSON or Python; a default for other texts.

    Args:
        text: The text.
        default: The value of texts that are no literals.
    """
    value = literal(text)
    return default if value is _NO_VALUE else value


class BareObjectEnd:
    """Finds the end of an object whose keys have no quotes while its text arrives; each character is read once.

    Args:
        mark: What stands on both sides of a text within the object.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._depth, self._in_text = 0, False
        self.done = False
        """Whether the object has ended."""

    def take(self, text: str) -> int:
        """The length of the text that is read: up to the end of the object, or to what may be the part of a mark.

        Args:
            text: The next text, after what was read; the first begins with a brace.
        """
        mark, at = self._mark, 0
        while at < len(text):
            if self._in_text:
                end = text.find(mark, at)
                if end < 0:
                    # the mark may begin in the last characters
                    return max(at, len(text) - len(mark) + 1)
                at, self._in_text = end + len(mark), False
            elif mark and text.startswith(mark, at):
                at, self._in_text = at + len(mark), True
            elif mark and len(text) - at < len(mark) and mark.startswith(text[at:]):
                return at
            else:
                self._depth += (text[at] in "{[") - (text[at] in "}]")
                at += 1
                if self._depth == 0 and text[at - 1] in "}]":
                    self.done = True
                    return at
        return at


def bare_object_end(text: str, mark: str) -> int | None:
    """The length of the object that a text starts with; None if it goes on.

    Args:
        text: The text, from the opening brace on.
        mark: What stands on both sides of a text within the object.
    """
    end = BareObjectEnd(mark)
    size = end.take(text)
    return size if end.done else None


def bare_object(text: str, mark: str) -> dict[str, Any] | None:
    """Reads an object whose keys have no quotes; None if it is none.

    Args:
        text: The object.
        mark: What stands on both sides of a text within the object.
    """
    reader = _BareReader(text, mark)
    try:
        value = reader.value(0)
    except (ValueError, IndexError):
        return None
    return value if isinstance(value, dict) and reader.rest() == "" else None


class _BareReader:
    """Reads values from a text."""

    def __init__(self, text: str, mark: str) -> None:
        self._text, self._mark, self._at = text, mark, 0

    def rest(self) -> str:
        """The text that was not read, without space around it."""
        return self._text[self._at :].strip()

    def value(self, depth: int) -> Any:
        """The next value.

        Args:
            depth: The number of objects and lists around it.

        Raises:
            ValueError: There is none.
        """
        if depth > _DEPTH:
            raise ValueError("nested too deeply")
        self._space()
        if self._text.startswith(self._mark, self._at):
            return self._marked_text()
        match self._text[self._at]:
            case "{":
                return dict(self._items(depth, "}", keyed=True))
            case "[":
                return [value for _, value in self._items(depth, "]", keyed=False)]
            case '"':
                value, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
                return value
            case _:
                value = literal(text := self._plain())
                return text.strip() if value is _NO_VALUE else value

    def _items(self, depth: int, end: str, keyed: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        self._at += 1
        self._space()
        while self._text[self._at] != end:
            key = self._key() if keyed else ""
            items.append((key, self.value(depth + 1)))
            self._space()
            if self._text[self._at] == ",":
                self._at += 1
                self._space()
            elif self._text[self._at] != end:
                raise ValueError("no comma")
        self._at += 1
        return items

    def _key(self) -> str:
        if self._text.startswith(self._mark, self._at):
            key = self._marked_text()
        elif self._text[self._at] == '"':
            key, self._at = json.JSONDecoder().raw_decode(self._text, self._at)
        else:
            end = self._text.index(":", self._at)
            key, self._at = self._text[self._at : end].strip(), end
        self._space()
        if self._text[self._at] != ":":
            raise ValueError("no colon")
        self._at += 1
        return key

    def _marked_text(self) -> str:
        begin = self._at + len(self._mark)
        end = self._text.index(self._mark, begin)
        self._at = end + len(self._mark)
        return self._text[begin:end]

    def _plain(self) -> str:
        begin = self._at
        while self._text[self._at] not in _PLAIN_END:
            self._at += 1
        if begin == self._at:
            raise ValueError("no value")
        return self._text[begin : self._at]

    def _space(self) -> None:
        while self._text[self._at].isspace():
            self._at += 1


def resolve_schema(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one to which it refers; empty where there is none.

    Args:
        schema: The schema.
        root: The schema that has its definitions.
    """
    # references may go in a circle
    for _ in range(8):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _at(reference, root)
    return {}


def _at(reference: str, root: Mapping[str, Any]) -> Any:
    if reference.startswith("#/"):
        return value_at(root, reference[1:])
    return References(root).target(reference, root)
