"""The common part of all request states, and the state of a generation."""

from __future__ import annotations

from enum import Enum
from typing import Protocol, TypeVar, runtime_checkable

from max.interfaces.request import RequestID


class GenerationStatus(str, Enum):
    """The state of the generation of one request."""

    ACTIVE = "active"
    """The generation continues."""
    END_OF_SEQUENCE = "end_of_sequence"
    """A stop token, stop sequence or stop string was generated."""
    MAXIMUM_LENGTH = "maximum_length"
    """The limit on new tokens, or the context length, is reached."""
    CANCELLED = "cancelled"
    """The user cancelled the generation."""

    @property
    def is_done(self) -> bool:
        """Whether the generation has ended: every status but :attr:`ACTIVE`."""
        return self is not GenerationStatus.ACTIVE


@runtime_checkable
class BaseContext(Protocol):
    """The state of one request, for schedulers and pipelines of any kind."""

    @property
    def request_id(self) -> RequestID:
        """The identifier of the request."""
        ...

    @property
    def status(self) -> GenerationStatus:
        """The state of the generation."""
        ...

    @status.setter
    def status(self, status: GenerationStatus) -> None: ...

    @property
    def is_done(self) -> bool:
        """Whether the generation has ended."""
        ...


BaseContextType = TypeVar("BaseContextType", bound=BaseContext)
