"""The layout of calls in a text: the marks around names and arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

NAME, IDENTIFIER, NUMBER, KEY = "\ue000", "\ue001", "\ue002", "\ue003"
"""Characters of private use that stand in a mark for the name of the tool, the identifier of the call, its number, and
the name of an argument."""
_FIELD = re.compile(f"([{NAME}{IDENTIFIER}{NUMBER}{KEY}])")
_NAME_CHARACTERS = r"[a-zA-Z0-9_.:/-]"
# a mark in brackets is one word, so that no common start or end cuts it
_WORD = re.compile(r"<[^<>\s\"=]*>|\[/?[A-Z_]+\]|[\ue000-\ue003]|\w+|\s+|.", re.DOTALL)
_PATTERNS = {NAME: "(?P<name>.+?)", IDENTIFIER: ".+?", NUMBER: "[0-9]+"}


class Style(Enum):
    """How the arguments of a call are written."""

    JSON = "json"
    """As a JSON object."""
    TAGGED = "tagged"
    """Each key and each value between marks; texts stand as they are."""
    PYTHON = "python"
    """As keyword arguments of Python."""
    BARE = "bare"
    """As an object whose keys have no quotes and whose texts stand between marks of their own."""


@dataclass(frozen=True)
class CallLayout:
    """Where the parts of calls stand. The texts are as the template writes them, with their white space.

    Args:
        section: What stands before the first call of a list; empty: each call stands alone.
        head: What stands before the arguments of a call, with the name in it.
        style: How the arguments are written.
        tail: What stands after the arguments.
        separator: What stands between two calls.
        section_end: What ends the list.
        several: Whether an answer may have several calls.
        key: What stands before the name of an argument (``TAGGED``).
        key_end: What stands between the name of an argument and its value that is a text (``TAGGED``).
        other_key_end: The same of a value of another type.
        value_end: What ends a value; the mark of a text (``BARE``).
        value_separator: What stands between two arguments (``TAGGED``).
        opening: What begins a message with a call, before all else.
        turn: What stands between two such messages.
    """

    head: str
    style: Style = Style.JSON
    tail: str = ""
    section: str = ""
    section_end: str = ""
    separator: str = ""
    several: bool = True
    key: str = ""
    key_end: str = ""
    other_key_end: str = ""
    value_end: str = ""
    value_separator: str = ""
    opening: str = ""
    turn: str = ""

    @property
    def marks(self) -> str:
        """All marks in one text."""
        texts = (
            self.section, self.head, self.tail, self.separator, self.section_end, self.key, self.key_end,
            self.other_key_end, self.value_end,
        )  # fmt: skip
        return "\n".join(texts)

    @property
    def trigger(self) -> str:
        """The first mark of a list of calls, without white space and fields."""
        return pieces(self.section or self.head)[0]

    @property
    def head_marks(self) -> list[str]:
        """The marks before the name or another field of a call."""
        head = pieces(self.head)
        first = next((at for at, piece in enumerate(head) if has_field(piece)), len(head))
        return head[:first]

    @property
    def triggers(self) -> tuple[str, ...]:
        """The marks that begin a list of calls or one call, which models may write without the list's mark."""
        marks = [self.trigger]
        marks += [each for each in self.head_marks if len(each) > 3 and each[0] in "<["]
        return tuple(dict.fromkeys(marks))


def words(text: str) -> list[str]:
    """A text as marks, words, white space and single characters."""
    return _WORD.findall(text)


def common_start(first: str, second: str) -> str:
    """The words with which both texts begin.

    Args:
        first: A text.
        second: Another.
    """
    same: list[str] = []
    for one, other in zip(words(first), words(second), strict=False):
        if one != other:
            break
        same.append(one)
    return "".join(same)


def common_end(first: str, second: str) -> str:
    """The words with which both texts end.

    Args:
        first: A text.
        second: Another.
    """
    same: list[str] = []
    for one, other in zip(reversed(words(first)), reversed(words(second)), strict=False):
        if one != other:
            break
        same.append(one)
    return "".join(reversed(same))


def pieces(mark: str) -> list[str]:
    """The parts of a mark between white space, as models write more or less of that.

    A part with a field is one with the characters around it that names may have.

    Args:
        mark: The mark.
    """
    found: list[str] = []
    for part in mark.split():
        at = 0
        # characters of names around a field are one piece with it: `functions.NAME:NUMBER`
        run = f"(?:{_NAME_CHARACTERS}|{_FIELD.pattern})*{_FIELD.pattern}(?:{_NAME_CHARACTERS}|{_FIELD.pattern})*"
        for match in re.finditer(run, part):
            found += [part[at : match.start()], match[0]]
            at = match.end()
        found.append(part[at:])
    return [part for part in found if part]


def has_field(piece: str) -> bool:
    """Whether a part of a mark has a field.

    Args:
        piece: The part.
    """
    return _FIELD.search(piece) is not None


def name_in(piece: str, text: str) -> str | None:
    """The name of a tool in the text that stands where a part of a mark is expected; None where it has none.

    Args:
        piece: The part, with fields.
        text: The text.
    """
    if NAME not in piece:
        return None
    pattern = "".join(_PATTERNS.get(part) or re.escape(part) for part in _FIELD.split(piece))
    match = re.fullmatch(pattern, text)
    return match["name"] if match else text


def fill_mark(mark: str, name: str, key: str = "") -> str:
    """A mark with its fields filled in.

    Args:
        mark: The mark.
        name: The name of the tool.
        key: The name of the argument.
    """
    # nine digits fit the templates that want short identifiers
    for field, value in ((NAME, name), (IDENTIFIER, "000000000"), (NUMBER, "0"), (KEY, key)):
        mark = mark.replace(field, value)
    return mark


def run_end(text: str) -> int:
    """The number of characters at the start of a text that names may have."""
    match = re.match(f"{_NAME_CHARACTERS}*", text)
    return match.end() if match else 0


def special_in(text: str, special: Iterable[str]) -> list[str]:
    """The special tokens that are part of a text.

    Args:
        text: The text.
        special: The texts of all special tokens.
    """
    return [token for token in special if token in text]
