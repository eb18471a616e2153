"""The identity that every request carries through the stack."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass(frozen=True)
class RequestID:
    """A unique identifier of a request.

    A type of its own, so that an identifier and any other string cannot be mixed up.

    Args:
        value: The identifier; a fresh random one when it is not given.
    """

    value: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __str__(self) -> str:
        return self.value

    def __repr__(self) -> str:
        return f"RequestID(value={self.value!r})"


@dataclass(frozen=True)
class Request:
    """Base of all requests.

    Args:
        request_id: Identifies the request from its arrival to its last token.
    """

    request_id: RequestID


RequestType = TypeVar("RequestType", bound=Request, contravariant=True)
