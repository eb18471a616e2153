"""Options of graphs: colors of profile scopes, device placement, debugging."""

from __future__ import annotations

from enum import Enum

__all__ = ["DevicePlacementPolicy", "GraphDebugConfig", "ProfileScopeColor"]


class ProfileScopeColor(str, Enum):
    """The color of a `Graph.profile_scope` in profile viewers."""

    MODULAR_PURPLE = "modular_purple"
    BLUE = "blue"
    GREEN = "green"
    ORANGE = "orange"
    PURPLE = "purple"
    RED = "red"
    WHITE = "white"
    YELLOW = "yellow"


class DevicePlacementPolicy(Enum):
    """The reaction if an op would move a tensor to the CPU because its device has no kernel for the op.

    All three are equivalent here: each device has kernels for all ops, so no op moves a tensor implicitly.
    """

    Ignore = "ignore"
    """No message."""
    Warn = "warn"
    """A warning."""
    Error = "error"
    """A ValueError."""


class GraphDebugConfig:
    """Options of all graphs: `Graph.debug`."""

    def __init__(self) -> None:
        self._source_tracebacks = False

    @property
    def source_tracebacks(self) -> bool:
        """Whether ops keep the Python call stack that staged them.

        File and line of the user's program are always kept, and errors at compile time and run time name them.

        Raises:
            TypeError: It is set to a value that is not a bool.
        """
        return self._source_tracebacks

    @source_tracebacks.setter
    def source_tracebacks(self, value: bool) -> None:
        if not isinstance(value, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"source_tracebacks is {value!r}, expected True or False")
        self._source_tracebacks = value
