"""The limit on the bytes of all bodies that are held at the same time."""

from __future__ import annotations

from max.serve.errors import ApiError
from max.serve.limits import LARGE_BODY
from max.serve.models.tallies import LocalTally, Tally

__all__ = ["OpenBodies"]

RETRY_SECONDS = 1


class OpenBodies:
    """Counts the bytes of the bodies of open requests, and refuses more than a limit.

    Bodies of up to `LARGE_BODY` bytes are not counted, so that large ones do not keep ordinary requests waiting.

    Args:
        limit: The limit, at least that of one body.
        tally: Counts the bytes; None: those of this process only.
    """

    def __init__(self, limit: int, tally: Tally | None = None) -> None:
        self.limit, self._tally = limit, tally or LocalTally()

    @property
    def bytes(self) -> int:
        """The bytes of the bodies of open requests."""
        return self._tally.total

    def grow(self, before: int, after: int) -> None:
        """Counts a body that grows.

        Args:
            before: Its bytes before.
            after: Its bytes now.

        Raises:
            ApiError: Status 503: the limit is exceeded; with a ``Retry-After``. The body is counted as before.
        """
        more = _count_bytes(after) - _count_bytes(before)
        if more and not self._tally.add(more, self.limit):
            raise ApiError(
                f"the bodies of open requests have {self.bytes} bytes, and at most {self.limit} may be held at the "
                "same time; send the request again later",
                status=503,
                code="bodies_full",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )

    def release(self, size: int) -> None:
        """Forgets a body.

        Args:
            size: Its bytes.
        """
        if counted := _count_bytes(size):
            self._tally.add(-counted)


def _count_bytes(size: int) -> int:
    return size if size > LARGE_BODY else 0
