"""The parts of an answer, and the parsers that find them in its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True)
class ContentPart:
    """Text for the user.

    Args:
        text: The text.
    """

    text: str


@dataclass(frozen=True)
class ReasoningPart:
    """The model's reasoning before its answer.

    Args:
        text: The text.
    """

    text: str


@dataclass(frozen=True)
class ToolCallPart:
    """The start of a call of a tool.

    Args:
        index: The number of the call in the answer.
        call_id: Identifies the call.
        name: The tool.
    """

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class ArgumentsPart:
    """More of the arguments of a call.

    Args:
        index: The number of the call.
        text: JSON text; all parts joined are an object.
    """

    index: int
    text: str


class GrowingText:
    """A text that grows by pieces, which are joined when it is read: to add to a text would copy it for each token.

    Args:
        text: Its first piece.
    """

    def __init__(self, text: str = "") -> None:
        self._pieces = [text]

    def add(self, piece: str) -> None:
        """Adds to the end.

        Args:
            piece: The text.
        """
        self._pieces.append(piece)

    @property
    def text(self) -> str:
        """The whole text."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


AnswerPart: TypeAlias = ContentPart | ReasoningPart | ToolCallPart | ArgumentsPart


class AnswerParser(Protocol):
    """Finds the parts of an answer while its text arrives."""

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Adds text, and returns the parts that are certain.

        Args:
            text: The new text.
        """
        ...

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        """The parts that were held back.

        Args:
            cut: Whether the answer was cut off.
        """
        ...
