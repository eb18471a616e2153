"""Options of graphs that later versions have: colors of profile scopes, placement on devices, debugging."""

from __future__ import annotations

from enum import Enum

__all__ = ["DevicePlacementPolicy", "GraphDebugConfig", "ProfileScopeColor"]


class ProfileScopeColor(str, Enum):
    """The color of `Graph.profile_scope` for tools that draw."""

    MODULAR_PURPLE = "modular_purple"
    BLUE = "blue"
    GREEN = "green"
    ORANGE = "orange"
    PURPLE = "purple"
    RED = "red"
    WHITE = "white"
    YELLOW = "yellow"


class DevicePlacementPolicy(Enum):
    """What happens where an op would move a tensor to the CPU, because its device has no kernel for the op.

    All three are equal here: each device has the kernels of all ops, so that none moves a tensor by itself.
    """

    Ignore = "ignore"
    """Nothing is said."""
    Warn = "warn"
    """A warning."""
    Error = "error"
    """A ValueError."""


class GraphDebugConfig:
    """Options that hold for all graphs: `Graph.debug`."""

    def __init__(self) -> None:
        self._source_tracebacks = False

    @property
    def source_tracebacks(self) -> bool:
        """Whether ops keep the stack of calls that staged them.

        File and line of the user's program are kept in both cases, and errors of compiling and running name them.

        Raises:
            TypeError: It is set to what is no bool.
        """
        return self._source_tracebacks

    @source_tracebacks.setter
    def source_tracebacks(self, value: bool) -> None:
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source_tracebacks is {value!r}, expected True or False")
        self._source_tracebacks = value
