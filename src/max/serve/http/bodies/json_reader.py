"""Reads JSON objects: limits come before values, and no step of a long text holds the GIL for more than milliseconds.

Python's reader holds the GIL while it reads a text. A long text is read in fragments instead, each made whole by the
brackets that are open at its begin and at its end, and the values of the fragments are put together.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from max.serve import limits
from max.serve.errors import ApiError, short_text
from max.serve.http.bodies.json_structure import (
    ARRAY,
    COLON,
    COMMA,
    NO_STRUCTURE,
    OBJECT,
    Structure,
    StructureScanner,
)

FRAGMENT = 64 << 10
"""The bytes of a fragment, and the bytes of a string that is read by itself."""
BIAS_FIELD = "logit_bias"
"""A field whose names are tokens: it has a limit of its own."""
INVALID_JSON = "invalid_json"
"""The code of a body that is no JSON."""
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"
_SPINE = f"\x00{secrets.token_hex(16)}"
"""A name that no body has: of the element of an object that an earlier fragment began."""
_SPINE_JSON = json.dumps(_SPINE)
# possessive: a piece that ends within an escape costs no backtracking
_WHOLE_CHARACTERS = re.compile(rb"(?:[^\\]++|\\u[0-9a-fA-F]{4}|\\[^u])*+")
_ESCAPE = re.compile(rb"\\u[0-9a-fA-F]{4}")


def read_object(text: bytes | bytearray, known_names: Collection[str] | None = None) -> Any:
    """The value of a body.

    Args:
        text: The body.
        known_names: The fields that its route knows; the others together have a limit. None: there is none.

    Returns:
        The value: of a long body an object, of a short one any value.

    Raises:
        ApiError: It is no JSON, or beyond a limit.
    """
    begin = len(_BOM) if text.startswith(_BOM) else 0
    if len(text) > FRAGMENT:
        return _FragmentReader(text, begin, known_names).read()
    # counts those in texts too: only a text beyond the limit is scanned
    if text.count(b"[") + text.count(b"{") > limits.MAX_DEPTH:
        depths = StructureScanner(text).scan(len(text)).depths
        if len(depths) and depths.max() > limits.MAX_DEPTH:
            raise _too_deep(None)
    value = _decode_part(text, begin, len(text))
    if isinstance(value, dict) and len(value) > limits.MAX_FIELDS:
        raise _too_many("fields", limits.MAX_FIELDS, None)
    return value


def invalid_json(reason: str) -> ApiError:
    """Status 400 for a body that is no JSON.

    Args:
        reason: Why.
    """
    return ApiError(f"the body is no JSON: {reason}", code=INVALID_JSON)


def _too_deep(field: str | None) -> ApiError:
    where = "the body" if field is None else short_text(field)
    return ApiError(
        f"{where} has arrays and objects that are nested too deeply: at most {limits.MAX_DEPTH} may be within each "
        "other",
        param=field,
        code="nested_too_deeply",
    )


def _too_many(what: str, limit: int, field: str | None) -> ApiError:
    where = "" if field is None else f"{short_text(field)}: "
    return ApiError(
        f"{where}the body has more than {limit} {what}; give fewer",
        param=field,
        code="body_too_large",
    )


def _decode_part(
    text: bytes | bytearray, begin: int, end: int, before: str = "", after: str = ""
) -> Any:
    """The value of a part of a text, made whole by what stands before and after it."""
    try:
        part = text[begin:end].decode()
    except UnicodeDecodeError as error:
        at = begin + error.start
        raise invalid_json(f"it is not UTF-8: byte {text[at]:#x} at byte {at}") from error
    try:
        return json.loads(before + part + after)
    except json.JSONDecodeError as error:
        at = len(text[:begin].decode(errors="replace")) + error.pos - len(before)
        raise invalid_json(f"{error.msg} at character {at}") from error
    except RecursionError as error:  # deep calls of handlers leave less room
        raise _too_deep(None) from error
    except ValueError as error:  # raised for numbers of thousands of digits
        raise invalid_json("it has a number with too many digits") from error


_LIMITS: dict[str, int] = {
    "objects": limits.MAX_OBJECTS,
    "arrays": limits.MAX_ARRAYS,
    "texts": limits.MAX_TEXTS,
    "values": limits.MAX_VALUES,
}


class _Counts:
    """Counts the values of a body by its fields, against the limits."""

    def __init__(self, text: bytes | bytearray, known_names: Collection[str] | None) -> None:
        self._text, self._known = text, known_names
        self.field: str | None = None
        """The field whose value is being read."""
        self._fields, self._field_begin, self._unknown = 0, 0, 0
        self._totals = dict.fromkeys(_LIMITS, 0)
        self._biases = 0

    def add(self, pending: Structure, part: Structure, end: int) -> None:
        """Adds a part of the body.

        Args:
            pending: The structure before it that is not read yet: the name of a field may be in it.
            part: Its structure.
            end: Where it ends.
        """
        if len(part.depths) and part.depths.max() > limits.MAX_DEPTH:
            deep = int(part.marks[np.argmax(part.depths > limits.MAX_DEPTH)])
            # the fields before that place, so that the error names the right one
            self._add_fields(pending, part.head(deep), deep)
            raise _too_deep(self.field)
        self._add_fields(pending, part, end)

    def _add_fields(self, pending: Structure, part: Structure, end: int) -> None:
        is_top = (part.depths == 1) & ((part.kinds == COMMA) | (part.kinds == COLON))
        tops = part.marks[is_top].tolist()
        # a field has a colon, and a comma after it
        self._fields += len(tops) // 2
        if self._fields > limits.MAX_FIELDS:
            raise _too_many("fields", limits.MAX_FIELDS, None)
        around = pending.before(part) if tops else part
        for top in tops:
            self._count(part.head(top))
            part = part.tail(top)
            if self._text[top] == COLON:
                self.field, self._field_begin = name_before(self._text, around, top), top
            else:
                self._end(top)
        self._count(part)
        self._check_unknown(end)

    def _end(self, comma: int) -> None:
        self._check_unknown(comma)
        if self._is_unknown:
            self._unknown += comma - self._field_begin
        self.field = None

    @property
    def _is_unknown(self) -> bool:
        return self._known is not None and self.field is not None and self.field not in self._known

    def _check_unknown(self, at: int) -> None:
        if self._is_unknown and self._unknown + at - self._field_begin > limits.MAX_UNKNOWN_BYTES:
            raise ApiError(
                f"{short_text(self.field)} is unknown, and unknown fields may have {limits.MAX_UNKNOWN_BYTES} bytes "
                "in all; leave it out",
                param=self.field,
                code="unknown_field_too_large",
            )

    def _count(self, part: Structure) -> None:
        objects = int(np.count_nonzero(part.kinds == OBJECT))
        arrays = int(np.count_nonzero(part.kinds == ARRAY))
        # a comma is before one more value, and a bracket before a first one
        values = int(np.count_nonzero(part.kinds == COMMA)) + objects + arrays
        if self.field == BIAS_FIELD:
            self._biases += int(np.count_nonzero(part.kinds == COLON))
            # the colon after the field's own name is counted, too
            if self._biases > limits.MAX_BIASES + 1:
                raise _too_many(f"entries of {BIAS_FIELD}", limits.MAX_BIASES, self.field)
            texts = 0
        else:
            texts = len(part.quotes) // 2
        added = {"objects": objects, "arrays": arrays, "texts": texts, "values": values}
        for what, limit in _LIMITS.items():
            self._totals[what] += added[what]
            if self._totals[what] > limit:
                raise _too_many(what, limit, self.field)


def name_before(text: bytes | bytearray, structure: Structure, colon: int) -> str:
    """The name of a field.

    Args:
        text: The body.
        structure: Its structure around the name.
        colon: The position of the colon after the name.
    """
    quotes = structure.quotes[: np.searchsorted(structure.quotes, colon)]
    if len(quotes) < 2:
        raise invalid_json(f"Expecting property name enclosed in double quotes at byte {colon}")
    name = _decode_part(text, int(quotes[-2]), int(quotes[-1]) + 1)
    return str(name)


@dataclass(frozen=True)
class _Brackets:
    """Open brackets.

    Args:
        num_kept: The number of those that earlier fragments have opened.
        positions: The positions of the others.
        objects: Whether each begins an object.
    """

    num_kept: int
    positions: list[int]
    objects: list[bool]


class _FragmentReader:
    """Reads a long text.

    Args:
        text: The text.
        begin: Where it begins.
        known_names: As for :func:`read_object`.
    """

    def __init__(
        self, text: bytes | bytearray, begin: int, known_names: Collection[str] | None
    ) -> None:
        self._text, self._at = text, begin
        self._scanner = StructureScanner(text)
        self._counts = _Counts(text, known_names)
        self._pending = NO_STRUCTURE  # of the fragment that is not read yet
        self._string_begin = 0  # of the string that is open at the end of a part
        self._root: Any = None
        self._open: list[Any] = []  # the arrays and objects that are open before the fragment

    def read(self) -> Any:
        """The object."""
        text, size = self._text, len(self._text)
        head = bytes(text[self._at : self._at + FRAGMENT]).lstrip(_BLANK)
        if head[:1] != b"{":
            raise invalid_json(
                f"it begins with {short_text(head[:1].decode('latin-1'))}, and not with an object"
            )
        begin = 0
        while begin < size:
            end = min(begin + FRAGMENT, size)
            in_string = self._scanner.in_string
            part = self._scanner.scan(end)
            # a fragment of white space alone: no value is that far from the next one
            if not in_string and not len(part.quotes) and not len(part.marks) and end < size:
                raise invalid_json(f"there is no value from byte {begin} to byte {end}")
            self._counts.add(self._pending, part, end)
            if in_string and len(part.quotes):
                part = self._end_string(part)
            if self._scanner.in_string and len(part.quotes):
                self._string_begin = int(part.quotes[-1])
            self._pending = self._pending.before(part)
            self._read_until_comma()
            begin = end
        if self._scanner.in_string:
            raise invalid_json(f"Unterminated string starting at byte {self._string_begin}")
        self._take(size, whole=True)
        return self._root

    def _end_string(self, part: Structure) -> Structure:
        """Reads a string that began in an earlier part by itself if it is long; returns what follows it."""
        begin, end = self._string_begin, int(part.quotes[0]) + 1
        if end - begin <= FRAGMENT:
            return part
        self._pending = before = self._pending.head(begin)
        is_value = before.kinds[-1:].tolist() == [COLON]
        if not is_value and self._brackets(before).objects[-1:] == [True]:
            raise invalid_json(f"the name of a field at byte {begin} has {end - begin} bytes")
        name = name_before(self._text, before, int(before.marks[-1])) if is_value else ""
        self._take(begin, placeholder='""')
        if self._open:
            container = self._open[-1]
            # in place of the placeholder that `_take` has read
            container[name if isinstance(container, dict) else -1] = self._string(begin, end)
        self._at, self._pending = end, NO_STRUCTURE
        return part.tail(end)

    def _read_until_comma(self) -> None:
        """Reads up to the last comma."""
        commas = np.flatnonzero((self._pending.kinds == COMMA) & (self._pending.depths > 0))
        if len(commas):
            self._take(int(self._pending.marks[commas[-1]]))

    def _take(self, end: int, placeholder: str = "", whole: bool = False) -> None:
        """Reads a fragment, which ends after a value.

        Args:
            end: Where it ends.
            placeholder: Stands for a value that follows it.
            whole: Whether the text ends with it.
        """
        if end == self._at and not placeholder:
            return
        part = self._pending.head(end)
        if not (placeholder or whole) and self._is_empty(part, end):
            raise invalid_json(f"Expecting value at byte {end}")
        brackets = self._brackets(part)
        after = placeholder + "".join("]}"[kind] for kind in reversed(brackets.objects))
        # where brackets are closed that were not opened, it raises
        value = _decode_part(self._text, self._at, end, self._prefix(), "" if whole else after)
        self._merge(value)
        names = [self._name_of(part, at) for at in brackets.positions]
        del self._open[brackets.num_kept :]
        for name in names:
            self._enter(name)
        self._at, self._pending = end, self._pending.tail(end)

    def _is_empty(self, part: Structure, end: int) -> bool:
        """Whether a part ends with a bracket that begins an array or an object without an element."""
        if part.kinds[-1:].tolist() not in ([OBJECT], [ARRAY]):
            return False
        return not self._text[int(part.marks[-1]) + 1 : end].strip(_BLANK)

    def _brackets(self, part: Structure) -> _Brackets:
        """The brackets that are open after a part of the fragment."""
        kept = depth = len(self._open)
        if len(part.depths):
            # the least depth tells which of the earlier brackets were never closed
            kept, depth = min(kept, int(part.depths.min())), int(part.depths[-1])
        is_open = (part.kinds == OBJECT) | (part.kinds == ARRAY)
        marks, depths = part.marks[is_open], part.depths[is_open]
        # the last bracket of each level is the open one
        opened = [
            int(marks[np.flatnonzero(depths == level)[-1]]) for level in range(kept + 1, depth + 1)
        ]
        objects = [isinstance(each, dict) for each in self._open[: max(kept, 0)]]
        return _Brackets(kept, opened, objects + [self._text[at] == OBJECT for at in opened])

    def _name_of(self, part: Structure, at: int) -> str:
        """The name before a bracket; empty where it is an element of an array."""
        index = int(np.searchsorted(part.marks, at))
        if index == 0 or part.kinds[index - 1] != COLON:
            return ""
        return name_before(self._text, part, at)

    def _prefix(self) -> str:
        """Opens the brackets that earlier fragments have opened, each with the element that they were reading."""
        if not self._open:
            return ""
        # the fragment begins after an element, for which an empty text stands
        opening = [f"{{{_SPINE_JSON}:" if isinstance(each, dict) else "[" for each in self._open]
        return "".join(opening) + '""'

    def _merge(self, value: Any) -> None:
        """Adds the value of a fragment to the open arrays and objects."""
        if not self._open:
            self._root = value
            return
        for container in self._open:
            if isinstance(container, dict):
                # the rest of the element that the earlier fragment began
                inner = value.pop(_SPINE)
                container.update(value)
            else:
                inner = value[0]
                container.extend(islice(value, 1, None))
            value = inner

    def _enter(self, name: str) -> None:
        """Opens the last array or object that the innermost open one has."""
        if not self._open:
            self._open.append(self._root)
            return
        parent = self._open[-1]
        self._open.append(parent[name] if isinstance(parent, dict) else parent[-1])

    def _string(self, begin: int, end: int) -> str:
        pieces = list(_pieces(self._text, begin + 1, end - 1))
        if end - begin > limits.MAX_WIDE_TEXT and not all(map(str.isascii, pieces)):
            raise ApiError(
                f"a text at byte {begin} has {end - begin} bytes; at most {limits.MAX_WIDE_TEXT} may hold "
                "characters beyond ASCII",
                param=self._counts.field,
                code="body_too_large",
            )
        return "".join(pieces)


def _pieces(text: bytes | bytearray, begin: int, end: int) -> Iterable[str]:
    """The content of a string in pieces of whole characters."""
    while begin < end:
        match = _WHOLE_CHARACTERS.match(text, begin, min(begin + FRAGMENT, end))
        at = match.end() if match is not None else begin
        # the second half of a character beyond U+FFFF
        if pair := _ESCAPE.match(text, at, end):
            at = pair.end()
        while at < end and text[at] & 0xC0 == 0x80:
            at += 1
        at = at if at > begin else end  # an escape that the reader refuses
        yield _decode_part(text, begin, at, '"', '"')
        begin = at
