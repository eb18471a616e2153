"""The settings of a session, and their values."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from max._errors import ArgumentError

__all__ = [
    "LEVELS", "AssertLevel", "CustomExtensionsType", "GPUProfilingMode", "LogLevel", "SplitKReductionPrecision",
    "choice",
]  # fmt: skip

CustomExtensionsType = list[str | Path | Any] | str | Path | Any
"""Where kernels of custom ops come from: the path of a Python file or of a folder of them, or a list of paths."""
_Choice = TypeVar("_Choice", bound=Enum)


class GPUProfilingMode(str, Enum):
    """The supported modes for GPU profiling."""

    __module__ = "max.engine"

    OFF = "off"
    ON = "on"
    DETAILED = "detailed"


class LogLevel(str, Enum):
    """The LogLevel specifies the log level of the ops."""

    __module__ = "max.engine"

    NOTSET = "notset"
    TRACE = "trace"
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class AssertLevel(str, Enum):
    """Which assertions of kernels are kept in the compiled model."""

    __module__ = "max.engine"

    NONE = "none"
    WARN = "warn"
    SAFE = "safe"
    ALL = "all"


class SplitKReductionPrecision(str, Enum):
    """The precision of the sums of large matrix products that are split along their inner dimension."""

    __module__ = "max.engine"

    ACCUM = "ACCUM"
    OUTPUT = "OUTPUT"


LEVELS = {
    "notset": 0,
    "trace": 5,
    "debug": 10,
    "info": 20,
    "warning": 30,
    "error": 40,
    "critical": 50,
}
"""The levels of Python's `logging`, by the values of `LogLevel`."""


def choice(cls: type[_Choice], option: str, value: object) -> _Choice:
    """The member of an enumeration that a value is or names.

    Args:
        cls: The enumeration.
        option: The setting, for error messages.
        value: A member or its value, in either case.

    Raises:
        ValueError: It is neither.
    """
    for member in cls:
        if value is member or (
            isinstance(value, str) and value.lower() == str(member.value).lower()
        ):
            return member
    choices = ", ".join(repr(member.value) for member in cls)
    raise ArgumentError(f"{option}: {value!r} is not one of {choices}")
