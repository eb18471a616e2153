"""Delivers the tokens of an execution of several steps while it runs.

The loop writes the tokens of each step into a row of its history, in native code without Python's lock.
A thread reads the rows. Nothing orders the two: a row starts as ``NO_TOKEN``, tokens are never negative,
and each is one aligned word, so any value but ``NO_TOKEN`` is a complete token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.interfaces import GenerationStatus, TextGenerationContext, TextGenerationOutput
from max.pipelines.core.context import TextContext

logger = logging.getLogger("max.pipelines")

NO_TOKEN = -1
"""Marks the entries of a history that no step has written yet."""
SHORTEST_INTERVAL_S = 2e-3
"""The shortest time in seconds between two deliveries; tokens of faster steps are delivered together."""
_FIRST_WAIT_S = 4e-3  # before a step was measured
# in units of a step: the wait from a delivery to the first poll, and between polls
_FIRST_POLL, _POLL_INTERVAL = 0.9, 0.25


@dataclass
class _Run:
    """An execution of several steps.

    Args:
        batch: The requests, in the order of the history's columns.
        ends: For each request the tokens that end it; None: its rows are not delivered.
        history: The tokens ``[steps, batch]``.
        begin: When it began.
        lengths: The length of each request before it.
        read: The rows that were delivered.
        last: Whether the remaining rows wait until the execution has returned.
    """

    batch: Sequence[TextGenerationContext]
    ends: Sequence[frozenset[int] | None]
    history: npt.NDArray[np.int64]
    begin: float
    lengths: Sequence[int]
    read: int = 0
    last: bool = False


class StepReader:
    """The thread that reads histories, one execution at a time.

    The last row, and a row with a token that ends a sequence, are left to the execution's own outputs, which
    follow at once: they say why a sequence has ended. So are the tokens of requests that a run of tokens
    may end (``eos_sequences``), since the loop does not look for those.

    Args:
        deliver: Receives the new tokens, by request; in the reader's thread.
    """

    def __init__(self, deliver: Callable[[list[TextGenerationOutput]], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()  # guards the next four
        self._run: _Run | None = None
        self._step_s: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, batch: Sequence[TextGenerationContext], history: npt.NDArray[np.int64]) -> None:
        """Delivers the rows of a history as they are written, until :meth:`end`.

        Args:
            batch: The requests; nothing changes them before :meth:`end`.
            history: The tokens ``[steps, batch]``, all ``NO_TOKEN``.
        """
        with self._changed:
            if self._closed:
                return
            ends, lengths = [_ends(c) for c in batch], [c.current_length for c in batch]
            self._run = _Run(batch, ends, history, time.perf_counter(), lengths)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="engine steps", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self, steps: int) -> list[int]:
        """Stops reading; nothing is delivered after it.

        Args:
            steps: The steps that have run; 0 after an error.

        Returns:
            For each request of the batch the number of its tokens that were delivered; an empty list
            if no history was read.
        """
        with self._changed:
            run, self._run = self._run, None
            if run is None:
                return []
            if steps:
                self._step_s = (time.perf_counter() - run.begin) / steps
            return [0 if ends is None else run.read for ends in run.ends]

    def end_interrupted(self) -> list[tuple[int, list[int]]]:
        """Stops reading an execution that has raised.

        Returns:
            For each request of the batch its length before the execution, and its tokens that were delivered
            although the execution returns none; an empty list if no history was read.
        """
        with self._changed:
            run = self._run
            counts = self.end(0)
        if run is None:
            return []
        columns = run.history.T.tolist()
        delivered = [column[:count] for column, count in zip(columns, counts, strict=True)]
        return list(zip(run.lengths, delivered, strict=True))

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._run, self._closed = None, True
            self._changed.notify()

    def _loop(self) -> None:
        while True:
            with self._changed:
                while (run := self._run) is None or run.last:
                    if self._closed:
                        return
                    self._changed.wait()
                wait = self._wait_s(delivered=True)
            while not run.last:
                time.sleep(wait)
                with self._changed:
                    if self._run is not run:
                        break
                    wait = self._wait_s(self._read(run))

    def _wait_s(self, delivered: bool) -> float:
        """Seconds until the next poll: most of a step after a delivery, otherwise a fraction of a step."""
        if self._step_s is None:
            return _FIRST_WAIT_S
        if delivered:
            return max(SHORTEST_INTERVAL_S, self._step_s * _FIRST_POLL)
        return max(SHORTEST_INTERVAL_S / 4, self._step_s * _POLL_INTERVAL)

    def _read(self, run: _Run) -> bool:
        """Delivers the rows that are complete; returns whether there was one."""
        first = run.read
        while not run.last and run.read < len(run.history) - 1:
            tokens = run.history[run.read].tolist()
            if min(tokens) < 0:
                break
            # only the returned execution shows which tokens follow the end of a sequence
            run.last = any(
                ends is not None and token in ends
                for token, ends in zip(tokens, run.ends, strict=True)
            )
            run.read += not run.last
        run.last = run.last or run.read == len(run.history) - 1
        if run.read == first:
            return False
        columns = run.history[first : run.read].T.tolist()
        try:
            self._deliver(
                [
                    TextGenerationOutput(context.request_id, tokens, GenerationStatus.ACTIVE)
                    for context, ends, tokens in zip(run.batch, run.ends, columns, strict=True)
                    if ends is not None
                ]
            )
        except OSError:
            run.last = True  # the channel is closed; the engine's thread gets the same error
        return True


def _ends(context: TextGenerationContext) -> frozenset[int] | None:
    """The tokens that end a request; None if single tokens do not determine its end."""
    if not isinstance(context, TextContext) or context.eos_sequences:
        return None
    return frozenset() if context.ignore_eos else frozenset(context.eos_token_ids)
