"""Estimates of step durations, from which the scheduler chooses the length of the next steps."""

from __future__ import annotations

ROWS = 8
"""Chunk lengths are multiples of this number of rows, which matrix products process together."""
_LEAST_MEASURED = 64  # shorter steps of prompts only do not show the time per token


class StepEstimate:
    """Running means of step durations."""

    def __init__(self) -> None:
        self.plain: float | None = None
        """The duration of a decoding step in seconds; None before the first one."""
        self._token: float | None = None  # seconds that one prompt token adds to a step

    def record_plain(self, seconds: float, steps: int) -> None:
        """Adds decoding steps.

        Args:
            seconds: The total duration of the steps.
            steps: The number of steps; nothing is recorded if it is 0.
        """
        if steps > 0:
            step = seconds / steps
            self.plain = step if self.plain is None else (self.plain + step) / 2

    def record_prompts(self, seconds: float, tokens: int, mixed: bool) -> None:
        """Adds a step that reads prompts.

        Args:
            seconds: The duration of the step.
            tokens: The number of prompt tokens of the step.
            mixed: Whether the step also decodes.
        """
        if mixed and self.plain is not None:
            token = max(seconds - self.plain, 0.0) / tokens
            # count at least half of the previous estimate: one fast step must not make the next chunk much longer
            last = token if self._token is None else self._token
            self._token = (last + max(token, last / 2)) / 2
        elif self._token is None and tokens >= _LEAST_MEASURED:
            self._token = seconds / tokens

    def chunk(self, share: float) -> int | None:
        """The number of prompt tokens that add a given fraction to the duration of a decoding step.

        Args:
            share: The fraction; it may exceed 1.

        Returns:
            A multiple of ``ROWS``, at least ``ROWS``; None until both durations have been measured.
        """
        if self.plain is None or not self._token:
            return None
        return max(int(share * self.plain / self._token) // ROWS, 1) * ROWS
