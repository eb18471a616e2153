"""Estimates of step times, from which the scheduler chooses the length of the next steps."""

from __future__ import annotations

ROWS = 8
"""Lengths of chunks are multiples of this number, the rows that matrix products compute together."""
_LEAST_MEASURED = 64  # a step of prompts only with fewer tokens does not show the time of a token


class StepEstimate:
    """Running means of step times."""

    def __init__(self) -> None:
        self.plain: float | None = None
        """Seconds of a decoding step; None before the first one."""
        self._token: float | None = None  # seconds that a token of a prompt adds to a step

    def record_plain(self, seconds: float, steps: int) -> None:
        """Adds decoding steps.

        Args:
            seconds: The time of all of them.
            steps: Their number; nothing is added if it is 0.
        """
        if steps > 0:
            step = seconds / steps
            self.plain = step if self.plain is None else (self.plain + step) / 2

    def record_prompts(self, seconds: float, tokens: int, mixed: bool) -> None:
        """Adds a step that reads prompts.

        Args:
            seconds: Its time.
            tokens: The tokens of the prompts.
            mixed: Whether it also decodes.
        """
        if mixed and self.plain is not None:
            token = max(seconds - self.plain, 0.0) / tokens
            # a single fast step must not make the next chunk much longer
            last = token if self._token is None else self._token
            self._token = (last + max(token, last / 2)) / 2
        elif self._token is None and tokens >= _LEAST_MEASURED:
            self._token = seconds / tokens

    def chunk(self, share: float) -> int | None:
        """The number of prompt tokens that add a given fraction to the time of a decoding step.

        Args:
            share: The fraction; it may exceed 1.

        Returns:
            A multiple of ``ROWS``, at least ``ROWS``; None before both times were measured.
        """
        if self.plain is None or not self._token:
            return None
        return max(int(share * self.plain / self._token) // ROWS, 1) * ROWS
