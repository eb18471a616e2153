"""Models that are made of another one: with an adapter, a template, a system prompt, and parameters of their own.

Such a model is a folder of the models folder with a recipe in a JSON file; the weights are those of its base, or lie
beside the recipe.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from max.interfaces import SamplingParamsInput
from max.pipelines.core.exceptions import InputError, ModelFilesError

__all__ = [
    "MOST_TEXT",
    "RECIPE",
    "Recipe",
    "checked_messages",
    "checked_parameters",
    "checked_template",
    "recipe_of",
    "sampling_of",
]

RECIPE = ".max-created.json"
"""The file of a created model."""
_MOST_MESSAGES, _MOST_STOPS = 1000, 64
MOST_TEXT = 1 << 20
"""The most bytes of a template, a system prompt, a license, a message or a recipe's other texts."""
_MOST_RECIPE = 16 << 20
_GO = re.compile(r"\{\{-?\s*(?:\.[A-Za-z]|\$|if\b|else\b|end\b|range\b|with\b|define\b|/\*)")
"""What Go's templates have, and Jinja's expressions have not."""

_SAMPLING: dict[str, tuple[str, type, float, float]] = {
    "temperature": ("temperature", float, 0, 100),
    "top_k": ("top_k", int, -1, 2**31 - 1),
    "top_p": ("top_p", float, 1e-9, 1),
    "min_p": ("min_p", float, 0, 1),
    "repeat_penalty": ("repetition_penalty", float, 1e-9, 100),
    "presence_penalty": ("presence_penalty", float, -2, 2),
    "frequency_penalty": ("frequency_penalty", float, -2, 2),
    "seed": ("seed", int, -(2**63), 2**64 - 1),
    "num_predict": ("max_new_tokens", int, -2, 2**31 - 1),
}
"""Parameters of Ollama: the sampling parameter, its type, the least and the greatest value."""
_OF_OLLAMAS_ENGINE = frozenset(
    {
        "num_ctx", "num_keep", "num_gpu", "num_thread", "num_batch", "main_gpu", "use_mmap", "use_mlock", "numa",
        "low_vram", "repeat_last_n",
    }
)  # fmt: skip
"""Parameters that are kept and shown, as requests may have them, and that mean nothing to this engine."""


@dataclass(frozen=True)
class Recipe:
    """What a created model is made of.

    Args:
        base: The name or the path of the model with the weights; empty: they lie beside the recipe.
        parent: The name that it was made from.
        has_adapter: Whether there is an adapter beside it.
        has_template: Whether there is a chat template beside it.
        system: The system prompt of conversations without one.
        parameters: The parameters, by Ollama's names.
        messages: Messages before those of a conversation.
        license: The texts of its licenses.
    """

    base: str = ""
    parent: str = ""
    has_adapter: bool = False
    has_template: bool = False
    system: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    license: list[str] = field(default_factory=list)

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return tuple(self.parameters.get("stop", ()))

    def before(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A conversation with the system prompt and the messages of this model before it.

        Args:
            messages: The messages of the request.
        """
        whole = [*map(dict, self.messages), *messages]
        has_system = bool(messages) and messages[0].get("role") in ("system", "developer")
        if self.system and not has_system:
            return [{"role": "system", "content": self.system}, *whole]
        # the system prompt of a request stays first
        return [messages[0], *map(dict, self.messages), *messages[1:]] if has_system else whole


def sampling_of(recipe: Recipe, request_fields: SamplingParamsInput) -> SamplingParamsInput:
    """The sampling parameters of a request, completed by those of its model.

    Args:
        recipe: The recipe of the model.
        request_fields: Those that the request sets.
    """
    own: dict[str, Any] = {}
    for name, value in recipe.parameters.items():
        if name in _SAMPLING and getattr(request_fields, _SAMPLING[name][0]) is None:
            if name == "num_predict" and value <= 0:  # no limit
                continue
            # Ollama's seeds may be negative, those of the engine have 64 bits
            own[_SAMPLING[name][0]] = value % 2**64 if name == "seed" else value
    return replace(request_fields, **own) if own else request_fields


def checked_parameters(values: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a model, checked.

    Args:
        values: The parameters by Ollama's names.

    Raises:
        InputError: One is unknown, or its value does not fit.
    """
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if name == "stop":
            stops = [value] if isinstance(value, str) else value
            if (
                not isinstance(stops, list)
                or len(stops) > _MOST_STOPS
                or not all(map(_is_text, stops))
            ):
                raise InputError(f"the parameter stop takes at most {_MOST_STOPS} texts")  # fmt: skip
            checked[name] = [stop for stop in stops if stop]
        elif name in _SAMPLING:
            checked[name] = _number(name, value)
        elif name in _OF_OLLAMAS_ENGINE:
            if not isinstance(value, bool | int | float):
                raise InputError(f"the parameter {name} is {str(value)[:40]!r}, expected a number")
            checked[name] = value
        else:
            known = ", ".join(sorted([*_SAMPLING, "stop"]))
            raise InputError(f"there is no parameter {name[:40]!r}; there are {known}")
    return checked


def checked_messages(values: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The messages of a model, checked.

    Args:
        values: Objects with ``role`` and ``content``.

    Raises:
        InputError: There are too many, or one does not fit.
    """
    if len(values) > _MOST_MESSAGES:
        raise InputError(f"there are {len(values)} messages, more than {_MOST_MESSAGES}")
    for number, message in enumerate(values):
        if message.get("role") not in ("system", "user", "assistant") or not _is_text(
            message.get("content")
        ):
            raise InputError(
                f"the message {number} needs content, and a role: system, user or assistant"
            )
    return [{"role": each["role"], "content": each["content"]} for each in values]


def checked_template(text: str) -> str:
    """A chat template, checked.

    Args:
        text: The template, in Jinja.

    Raises:
        InputError: It is one of Go, or too long.
    """
    if len(text) > MOST_TEXT:
        raise InputError(f"the template has {len(text)} characters, more than {MOST_TEXT}")
    if _GO.search(text):
        raise InputError(
            "the template is one of Go, which this engine does not run",
            "Leave it out, as models have a chat template of their own, or give a Jinja template.",
        )
    return text


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MOST_TEXT


def _number(name: str, value: object) -> int | float:
    _, kind, low, high = _SAMPLING[name]
    if isinstance(value, int | float) and not isinstance(value, bool):
        fits = math.isfinite(value) and (kind is float or value == int(value))
        if fits and low <= value <= high:
            return kind(value)
    text = "an integer" if kind is int else "a number"
    least = 0 if low == 1e-9 else low
    raise InputError(
        f"the parameter {name} is {str(value)[:40]!r}, expected {text} from {least} to {high}"
    )


def recipe_of(folder: Path) -> Recipe | None:
    """The recipe of a created model; None for other models.

    Args:
        folder: The model's folder.

    Raises:
        ModelFilesError: The recipe is damaged.
    """
    path = folder / RECIPE
    try:
        if path.stat().st_size > _MOST_RECIPE:
            raise ModelFilesError(f"{path} is larger than {_MOST_RECIPE} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    try:
        # a recipe of a newer version may have more
        known = {each.name for each in fields(Recipe)}
        recipe = Recipe(**{key: value for key, value in values.items() if key in known})
        return replace(
            recipe,
            parameters=checked_parameters(recipe.parameters),
            messages=checked_messages(recipe.messages),
        )
    except (TypeError, AttributeError, InputError) as error:
        raise ModelFilesError(f"{path} is no recipe of a created model: {error}") from error
