"""The common part of all request states."""

from __future__ import annotations

from typing import Protocol, TypeVar, runtime_checkable

from max.interfaces.request import RequestID
from max.interfaces.status import GenerationStatus


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
