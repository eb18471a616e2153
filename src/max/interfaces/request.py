"""The identifier of a request."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True)
class RequestID:
    """A unique identifier of a request.

    A separate type, so that type checkers distinguish identifiers from other strings.

    Args:
        value: The identifier; random by default.
    """

    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __hash__(self) -> int:
        # a step looks up each of its requests several times
        return hash(self.value)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"RequestID(value={self.value!r})"


@dataclass(frozen=True)
class Request:
    """The base of all requests.

    Args:
        request_id: Identifies the request from its arrival to its last token.
    """

    request_id: RequestID


RequestType = TypeVar("RequestType", bound=Request, contravariant=True)
