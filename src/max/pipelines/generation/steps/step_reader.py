"""Delivers the tokens of an execution of several steps while it runs.

The loop writes the tokens of each step into a row of its history, in native code without Python's lock. A thread polls
the rows. No synchronization is needed: a row starts as ``NO_TOKEN``, tokens are never negative, and each is one aligned
word, so any other value is complete: a token, or the mark of a place without one in a step that verifies drafts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.interfaces import GenerationStatus, RequestID, TextGenerationContext, TextGenerationOutput
from max.pipelines.core.text_context import TextContext

logger = logging.getLogger("max.pipelines")

NO_TOKEN = -1
"""Marks the entries of a history that no step has written yet."""
SHORTEST_INTERVAL_S = 2e-3
"""The minimum time in seconds between two deliveries; tokens of faster steps are delivered together."""
_FIRST_WAIT_S = 4e-3  # used until a step has been measured
# as fractions of a step: the time from a delivery to the first poll, and between polls
_FIRST_POLL, _POLL_INTERVAL = 0.9, 0.25


Watch: TypeAlias = Callable[[Sequence[Sequence[int]]], object]
"""Is called with the tokens of each request so far whenever there are new ones."""


@dataclass
class _Run:
    """The state of one execution of several steps.

    Args:
        batch: The requests, in the order of the history's columns.
        ends: The tokens that end each request; None: the rows of this request are not delivered.
        history: The tokens ``[steps, batch, width]``, given without the last axis if it is 1; places without a token
            are negative and not ``NO_TOKEN``.
        begin: The start time.
        counted_steps: The number of rows whose tokens count, as far as is known now; None: all of them.
        watch: Is called with the tokens of each request; None: nothing is.
        read: The number of delivered rows.
        last: Whether the remaining rows are left to the result of the execution.
    """

    batch: Sequence[TextGenerationContext]
    ends: Sequence[frozenset[int] | None]
    history: npt.NDArray[np.int64]
    begin: float
    counted_steps: Callable[[], int] | None = None
    watch: Watch | None = None
    read: int = 0
    last: bool = False

    def __post_init__(self) -> None:
        if self.history.ndim == 2:
            self.history = self.history[:, :, None]


class StepReader:
    """The thread that reads histories, of one execution at a time.

    The last row, and a row with a token that ends a sequence, are not delivered, as the result of the execution follows
    at once and states why a sequence has ended. Nor are tokens of requests with ``eos_sequences``, since the loop does
    not check for these.

    Args:
        deliver: Receives the new tokens by request; called in the reader's thread.
    """

    def __init__(self, deliver: Callable[[list[TextGenerationOutput]], None]) -> None:
        self._deliver = deliver
        self._changed = threading.Condition()  # guards the next five attributes
        self._run: _Run | None = None
        self._ended_runs: list[_Run] = []  # of other copies of the model, in the same execution
        self._step_s: float | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(
        self,
        batch: Sequence[TextGenerationContext],
        history: npt.NDArray[np.int64],
        counted_steps: Callable[[], int] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Starts to deliver the rows of a history as they are written, until :meth:`end`, or until the next copy of the
        model begins in the same execution.

        Args:
            batch: The requests, which must not change before :meth:`end`.
            history: The tokens ``[steps, batch]``, or of steps that give several ones ``[steps, batch, width]``;
                initially all ``NO_TOKEN``. A place that a step leaves without a token is another negative number.
            counted_steps: The number of steps whose tokens count, as far as is known now; None: all of them.
            watch: Is called with the tokens of each request so far, until :meth:`end_watch`; None: nothing is.
        """
        with self._changed:
            if self._closed:
                return
            if self._run is not None:
                self._ended_runs.append(self._run)
            ends = [_ends(context) for context in batch]
            self._run = _Run(batch, ends, history, time.perf_counter(), counted_steps, watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="engine steps", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end_watch(self) -> None:
        """Ends the watch of the execution; it is not called afterwards."""
        with self._changed:
            if self._run is not None:
                self._run.watch = None

    def end(self, steps: int) -> dict[RequestID, list[int]]:
        """Stops reading; nothing is delivered afterwards.

        Args:
            steps: The number of steps that ran; 0 after an error or an interrupt.

        Returns:
            The delivered tokens of each request in the batch; empty if no history was read.
        """
        with self._changed:
            run = self._run
            if run is not None and steps:
                self._step_s = (time.perf_counter() - run.begin) / steps
            runs = self._ended_runs if run is None else [*self._ended_runs, run]
            self._run, self._ended_runs = None, []
        return {
            context.request_id: [] if ends is None else column
            for run in runs
            for context, ends, column in zip(
                run.batch, run.ends, _columns(run.history[: run.read]), strict=True
            )
        }

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._run, self._closed = None, True
            self._changed.notify()

    def _loop(self) -> None:
        """The thread: delivers the rows of each execution until its last one."""
        while True:
            with self._changed:
                while (run := self._run) is None or run.last:
                    if self._closed:
                        return
                    self._changed.wait()
                wait = self._wait_s(delivered=True)
            while not run.last:
                time.sleep(wait)
                # delivered under the lock, so that nothing is delivered after `end`
                with self._changed:
                    if self._run is not run:
                        break
                    wait = self._wait_s(self._read(run))

    def _wait_s(self, delivered: bool) -> float:
        """The seconds until the next poll: most of a step after a delivery, otherwise a fraction of a step."""
        if self._step_s is None:
            return _FIRST_WAIT_S
        if delivered:
            return max(SHORTEST_INTERVAL_S, self._step_s * _FIRST_POLL)
        return max(SHORTEST_INTERVAL_S / 4, self._step_s * _POLL_INTERVAL)

    def _read(self, run: _Run) -> bool:
        """Delivers the complete rows; returns whether there were any."""
        first = run.read
        # the last row comes with the result of the execution
        while not run.last and run.read < len(run.history) - 1:
            row = run.history[run.read]
            # a row is complete when each of its entries is
            if (row == NO_TOKEN).any():
                break
            # after the row: the masks of a step fail before it has tokens
            if run.counted_steps is not None and run.counted_steps() <= run.read:
                run.last = True
                break
            # which tokens follow the end of a sequence is known only from the result of the execution
            run.last = any(
                ends is not None and not ends.isdisjoint(tokens)
                for tokens, ends in zip(row.tolist(), run.ends, strict=True)
            )
            run.read += not run.last
        run.last = run.last or run.read == len(run.history) - 1
        if run.read == first:
            return False
        if run.watch is not None:
            run.watch(_columns(run.history[: run.read]))
        columns = _columns(run.history[first : run.read])
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
    """The tokens that end a request; None if its end does not depend on single tokens only."""
    if not isinstance(context, TextContext) or context.eos_sequences:
        return None
    return frozenset() if context.ignore_eos else frozenset(context.eos_token_ids)


def _columns(history: npt.NDArray[np.int64]) -> list[list[int]]:
    """The tokens of each request in rows of a history ``[steps, batch, width]``, in order."""
    columns = history.transpose(1, 0, 2).reshape(history.shape[1], -1)
    if history.shape[2] == 1:
        return columns.tolist()
    return [column[column >= 0].tolist() for column in columns]
