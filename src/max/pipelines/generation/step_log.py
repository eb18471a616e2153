"""A log of an engine's steps, from which a simulation learns what they cost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from max.interfaces import TextGenerationContext
from max.pipelines.scheduler.measured_costs import Step, shape_of


class StepLog:
    """Appends a line of JSON for each execution of a batch: the fields of ``Step``. Engines may share the file.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._begun: Step | None = None
        self._end: float | None = None

    def begin(self, batch: Sequence[TextGenerationContext], now: float) -> None:
        """Notes a batch before it runs, as that changes its contexts.

        Args:
            batch: The requests.
            now: The time in seconds.
        """
        wait = 0.0 if self._end is None else now - self._end
        self._begun = Step(**asdict(shape_of(batch)), wait=wait)

    def end(self, steps: int, seconds: float, now: float | None) -> None:
        """Writes the line of the batch that has begun.

        Args:
            steps: How often the model ran.
            seconds: How long that took.
            now: The time in seconds; None: the engine has no further request, and what it does next costs none time.
        """
        self._end = now
        assert self._begun is not None
        line = json.dumps({**asdict(self._begun), "steps": steps, "seconds": seconds})
        # one write to a file that is appended to: lines of several engines do not mix
        os.write(self._file, line.encode() + b"\n")

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    __del__ = close
