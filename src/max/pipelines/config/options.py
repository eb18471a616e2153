"""Configurations that refuse unknown fields and values of wrong types.

A configuration is a dataclass whose fields are made with :func:`option`; the command line and
``help()`` are derived from them.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from max._host.process_caches import cached_results
from max._spelling import did_you_mean
from max.pipelines import forms
from max.pipelines.core.exceptions import ConfigError


def option(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    parse: Callable[[Any], Any] | None = None,
    no_effect: str = "",
    reason: str = "",
) -> Any:
    """A field of a configuration.

    Args:
        help: What the field does, in one or two sentences.
        default: The default.
        default_factory: A function that returns the default.
        parse: Converts and checks a value; without it, the annotation determines what fits.
        no_effect: Why the field has no effect in this engine; a value other than the default logs a warning.
        reason: Why this release does not support it; a value other than the default is an error.
    """
    metadata = {"help": help, "parse": parse, "no_effect": no_effect, "unsupported": reason}
    if default_factory is not dataclasses.MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@cached_results(256)
def type_hints(cls: type[Any]) -> dict[str, Any]:
    """The types of a configuration's fields.

    Args:
        cls: The configuration's class.
    """
    return typing.get_type_hints(cls)


def options_of(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a configuration that a user can set.

    Args:
        cls: The configuration's class.
    """
    return {f.name: f for f in dataclasses.fields(cls) if not f.name.startswith("_")}


def default_of(f: dataclasses.Field[Any]) -> Any:
    """The default of a field.

    Args:
        f: The field.
    """
    return f.default_factory() if callable(f.default_factory) else f.default


def _spell(hint: object) -> str:
    """A type in words, for messages."""
    names = {
        int: "an integer", float: "a number", bool: "True or False", str: "a text",
        Path: "a path", types.NoneType: "None", dict: "a dictionary",
    }  # fmt: skip
    if hint in names:
        return names[hint]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_spell(arg) for arg in args)
    if origin is list:
        return f"a list, each item {_spell(args[0])}"
    if origin is dict:
        return "a dictionary"
    return str(hint)


class _Unfit(Exception):
    """A value does not fit a type; the text is a clause that suggests the nearest fitting value."""


def _convert(value: object, hint: object) -> Any:
    """A value converted to a type hint; raises `_Unfit`, with a similar name if there is one."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (types.UnionType, typing.Union):
        suggestion = ""
        for arg in args:
            try:
                return _convert(value, arg)
            except _Unfit as error:
                suggestion = suggestion or str(error)
        raise _Unfit(suggestion)
    if origin is list and isinstance(value, (list, tuple)):
        return [_convert(item, args[0]) for item in value]
    if origin is list and not isinstance(value, (list, tuple, dict)):
        return [_convert(value, args[0])]  # one value is a list of one
    if origin is dict and isinstance(value, dict):
        return value
    # an integer is a number too; so would be True
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint in (int, bool, types.NoneType) and type(value) is hint:
        return value
    if hint is str and isinstance(value, (str, Path)):
        return str(value)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if isinstance(value, hint):
            return value
        if isinstance(value, str):
            for member in hint:
                if value.lower() in (str(member.value).lower(), member.name.lower()):
                    return member
            raise _Unfit(did_you_mean(value, [str(member.value) for member in hint]))
    raise _Unfit("")


def converted_value(cls: type[Any], name: str, value: object) -> Any:
    """A value, converted to the type of a field.

    Args:
        cls: The configuration's class.
        name: The field.
        value: The value from the user.

    Raises:
        ConfigError: The value does not fit; the message states what fits, and the nearest value.
    """
    metadata = options_of(cls)[name].metadata if name in options_of(cls) else {}
    if (parse := metadata.get("parse")) is not None:
        return parse(value)
    hint = type_hints(cls)[name]
    try:
        return _convert(value, hint)
    except _Unfit as error:
        raise ConfigError(
            f"{name} is {value!r}, which does not fit{error}", f"It must be {_spell(hint)}."
        ) from None


def unknown_fields(
    names: Iterable[str], field_names: Iterable[str], config_name: str
) -> ConfigError:
    """The error for unknown fields.

    Args:
        names: The unknown fields.
        field_names: All fields.
        config_name: The configuration's name.
    """
    field_names = list(field_names)
    texts = [f"{name!r}{did_you_mean(name, field_names)}" for name in names]
    return ConfigError(
        f"{config_name} has no field {'; nor '.join(texts)}",
        "PipelineConfig.help() lists the fields.",
    )


class StrictConfig:
    """The base of configurations: values are converted and checked."""

    def __post_init__(self) -> None:
        for name in options_of(type(self)):
            object.__setattr__(self, name, converted_value(type(self), name, getattr(self, name)))

    if not TYPE_CHECKING:  # it would hide misspelt names from type checkers

        def __getattr__(self, name: str) -> Any:
            return forms.attribute_of(self, name)

    @classmethod
    def help(cls) -> dict[str, str]:
        """The fields, and what they do."""
        return {name: f.metadata.get("help", "") for name, f in options_of(cls).items()}

    @classmethod
    def of(cls, **values: object) -> Any:
        """Makes a configuration.

        Args:
            values: Fields and their values.

        Raises:
            ConfigError: A field is unknown, or a value does not fit.
        """
        options = options_of(cls)
        if unknown := [name for name in values if name not in options]:
            raise unknown_fields(unknown, options, cls.__name__)
        return cls(**values)

    def check_supported(self) -> None:
        """Checks that this release supports all values.

        Raises:
            ConfigError: A field has an unsupported value.
        """
        for name, f in options_of(type(self)).items():
            why, value = f.metadata.get("unsupported"), getattr(self, name)
            if why and value != f.default:
                shown = value.value if isinstance(value, Enum) else value
                raise ConfigError(
                    f"{name} is {shown}, which is not in this release: {why}",
                    f"Leave out --{name.replace('_', '-')}.",
                )

    def without_effect(self) -> dict[str, str]:
        """The fields that are set and have no effect in this engine, with the reason."""
        reasons: dict[str, str] = {}
        for name, f in options_of(type(self)).items():
            why = f.metadata.get("no_effect")
            if why and getattr(self, name) != f.default:
                reasons[name] = why
        return reasons
