"""The programs of a model with the memory that they use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from max._compiler.code import Compiled
from max._dataclass import dataclass
from max.engine._program import LinkedProgram

__all__ = ["Linked", "Linker"]


@dataclass(slots=True, weakref_slot=True)
class Linked:
    """A model's programs with all addresses, and the owners of that memory; a reload replaces it as a whole."""

    main: LinkedProgram
    later: list[LinkedProgram]
    kept: list[object]


class Linker(Protocol):
    """The session's interface to link a model; a model calls it again for a reload."""

    def link(self, compiled: Compiled, registry: Mapping[str, Any] | None) -> Linked:
        """Programs with the weights of a registry."""
        ...
