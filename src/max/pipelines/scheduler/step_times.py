"""The times of recent steps, by which the scheduler chooses how long the next ones are."""

from __future__ import annotations

ROWS = 8
"""Chunks of prompts are multiples of this: matrix products compute that many rows together."""
_FEWEST = 64  # tokens of a step of prompts alone whose time says what a token costs


class StepEstimate:
    """Means of recent times, in which a single slow step changes little."""

    def __init__(self) -> None:
        self.plain: float | None = None
        """Seconds of a step that reads no prompt; None before the first one."""
        self._token: float | None = None  # seconds that a prompt's token adds to a step

    def record_plain(self, seconds: float, steps: int) -> None:
        """Adds steps that read no prompt.

        Args:
            seconds: The time of all of them.
            steps: Their number; nothing is added where it is 0.
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
            # one step that was fast by chance must not make the next chunk much longer
            last = token if self._token is None else self._token
            self._token = (last + max(token, last / 2)) / 2
        elif self._token is None and tokens >= _FEWEST:
            self._token = seconds / tokens

    def chunk(self, share: float) -> int | None:
        """The tokens of prompts that take a share of a plain step.

        Args:
            share: The share.

        Returns:
            A multiple of ``ROWS``, at least one of them; None where too little was measured.
        """
        if self.plain is None or not self._token:
            return None
        return max(int(share * self.plain / self._token) // ROWS, 1) * ROWS
