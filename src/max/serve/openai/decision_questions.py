"""The questions of ``/v1/decisions``: how they are asked, what labels their options have, and their answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

from max.serve.errors import ApiError, short_text
from max.serve.models.model import ServedModel
from max.serve.openai.wire import encode_json

_END = 48
"""Characters at the end of a prompt on which the first token after it may depend."""


@dataclass(frozen=True)
class Form(ABC):
    """A question as the model reads it.

    Args:
        name: Its name in the answer.
        text: Its text, without the input.
        count: The number of its options.
        words: The labels of its options, if they are words; empty: letters.
    """

    name: str | None
    text: str
    count: int
    words: tuple[str, ...] = ()

    @abstractmethod
    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """The answer.

        Args:
            probabilities: The probability of each option.
        """


class Predicate(Form):
    """Whether a statement is true."""

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """The answer: the probability that it is.

        Args:
            probabilities: Of true and of false.
        """
        return {"type": "predicate", "name": self.name, "probability": probabilities[0]}


@dataclass(frozen=True)
class Choice(Form):
    """Which option fits.

    Args:
        values: The options.
    """

    values: tuple[str | bool, ...] = ()

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """The answer: the likeliest option, and the probabilities of all.

        Args:
            probabilities: The probability of each option.
        """
        best = max(range(self.count), key=probabilities.__getitem__)
        return {
            "type": "choice",
            "name": self.name,
            "choice": self.values[best],
            "confidence": probabilities[best],
            "probabilities": [
                {"value": value, "probability": probability}
                for value, probability in zip(self.values, probabilities, strict=True)
            ],
        }


@dataclass(frozen=True)
class Score(Form):
    """Which of ordered levels fits.

    Args:
        labels: The levels, the lowest first.
    """

    labels: tuple[str, ...] = ()

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """The answer: the mean of the levels' numbers, and the probabilities of all.

        Args:
            probabilities: The probability of each level.
        """
        return {
            "type": "score",
            "name": self.name,
            "score": sum(number * p for number, p in enumerate(probabilities)),
            "confidence": max(probabilities),
            "probabilities": [
                {"value": number, "label": label, "probability": probability}
                for number, (label, probability) in enumerate(
                    zip(self.labels, probabilities, strict=True)
                )
            ],
        }


def form_of(question: Any, where: str) -> Form:
    """A question as the model reads it.

    Args:
        question: A question of the body.
        where: Its place in the body.

    Raises:
        ApiError: Two options are equal, or a part of the instructions is no text.
    """
    asked = _text(question.instructions, f"{where}.instructions")
    if question.type == "predicate":
        text = f"Statement: {asked}\nIs this statement true? Answer with one word: Yes or No."
        return Predicate(question.name, text, 2, ("Yes", "No"))
    is_choice = question.type == "choice"
    fields = question.choices if is_choice else question.levels
    values = [field.value if is_choice else field.label for field in fields]
    # True and "true" are two options
    if len({(type(value), value) for value in values}) < len(values):
        raise ApiError(f"two options of {where} are equal", param=where)
    # a boolean as JSON writes it
    names = [value if isinstance(value, str) else str(value).lower() for value in values]
    lines = [
        f"{letter}. {name}" + (f": {field.description}" if field.description else "")
        for letter, name, field in zip(_letters(), names, fields, strict=False)
    ]
    head = "Options" if is_choice else "Levels, the lowest first"
    text = f"Question: {asked}\n{head}:\n" + "\n".join(lines)
    text += f"\nAnswer with the letter of one {'option' if is_choice else 'level'} only."
    if is_choice:
        return Choice(question.name, text, len(values), values=tuple(values))
    return Score(question.name, text, len(values), labels=tuple(names))


def _letters() -> Iterable[str]:
    """The labels of options, in order: as short as they can be."""
    yield from ascii_uppercase
    yield from digits
    yield from ascii_lowercase
    yield from map("".join, product(ascii_uppercase, repeat=2))


class LabelTokens:
    """The tokens of labels at the ends of prompts; prompts of a template end alike, so each is encoded once.

    Args:
        model: The model.
    """

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._known: dict[tuple[str, str], int | None] = {}

    def at(self, text: str, form: Form, where: str) -> list[int]:
        """The first token of each option's label at the end of a prompt.

        Args:
            text: The prompt.
            form: The question.
            where: Its place in the body.

        Raises:
            ApiError: Two labels begin with the same token, so that the options cannot be told apart.
        """
        # prompts of a template end alike, so the table stays small
        end = text[-_END:]
        labels = form.words or [
            label for label, _ in zip(_letters(), range(form.count), strict=False)
        ]
        tokens: list[int] = []
        for label in labels:
            if (end, label) not in self._known:
                self._known[end, label] = self._first_token(end, label)
            token = self._known[end, label]
            if token is None:
                raise ApiError(
                    f"the label {short_text(label)} of {where} joins the end of the prompt in this model's tokens",
                    param=where,
                )
            tokens.append(token)
        # options are told apart by one token, as only the first one is predicted
        if len(set(tokens)) < len(tokens):
            raise ApiError(
                f"{where} has {form.count} options, more than this model has single tokens for their labels; "
                "give fewer",
                param=where,
            )
        return tokens

    def _first_token(self, end: str, label: str) -> int | None:
        """The first token of a label after the end of a prompt; None if a token spans both."""
        before = self._model.all_tokens(end, special=False)
        # encoded together: the token of a label depends on what is before it
        found = self._model.all_tokens(end + label, special=False)
        count = len(before)
        return found[count] if len(found) > count and found[:count] == before else None


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        match part.get("type"):
            case "input_text" if isinstance(part.get("text"), str):
                texts.append(part["text"])
            case "input_json":
                texts.append(encode_json(part.get("data")).decode())
            case other:
                raise ApiError(
                    f"{where}.{number} is a part of type {short_text(other)}; the model takes input_text and "
                    "input_json",
                    param=where,
                )
    return "\n".join(texts)
