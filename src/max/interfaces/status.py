"""Where a generation stands."""

from __future__ import annotations

from enum import Enum


class GenerationStatus(str, Enum):
    """Where the generation of one request stands."""

    ACTIVE = "active"
    """The generation is going on."""
    END_OF_SEQUENCE = "end_of_sequence"
    """A stop token, stop sequence or stop string was generated."""
    MAXIMUM_LENGTH = "maximum_length"
    """The limit on new tokens, or the context length, is reached."""
    CANCELLED = "cancelled"
    """The user has cancelled the generation."""

    @property
    def is_done(self) -> bool:
        """Whether no more tokens will come: every status but :attr:`ACTIVE`."""
        return self is not GenerationStatus.ACTIVE
