"""Computes the masks of a step in a thread while the model runs; a row that takes too long fails without the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from max.interfaces import TextGenerationContext
from max.pipelines.core.native_calls import is_panic

MASK_S = 1.0
"""The time limit of a mask in seconds, in CPU time of its thread if the system measures it, as the batch waits for it.
A regular expression with nested counts takes seconds, which no limit of llguidance prevents."""
Mask = npt.NDArray[np.int32]


class OverdueMatcher:
    """The matcher of a request whose mask was not computed; it allows no token.

    Args:
        problem: The reason; None: it took too long.
    """

    def __init__(self, problem: str | None = None) -> None:
        limit = f"the tokens that may follow take more than {MASK_S:g} s to find"
        self._problem = problem or limit

    def consume_token(self, token: int) -> bool:
        """Accepts no token."""
        return False

    def is_error(self) -> bool:
        """Whether the grammar cannot be followed: always True."""
        return True

    def get_error(self) -> str:
        """The reason."""
        return self._problem


def fill(matcher: Any, line: npt.NDArray[np.int32]) -> None:
    """Computes a mask, in native code that releases the interpreter lock.

    Args:
        matcher: llguidance's matcher.
        line: Receives the mask, one bit per token.
    """
    matcher.unsafe_compute_mask_ptr(line.ctypes.data, line.nbytes)


def fill_after(matcher: Any, tokens: Sequence[int], lines: Mask) -> None:
    """Computes the masks at a place and after each of some tokens there, in native code that releases the interpreter
    lock. Lines after the first token that may not follow stay as they are.

    Args:
        matcher: llguidance's matcher, which is at the same place afterwards.
        tokens: The tokens.
        lines: Receives the masks ``[tokens + 1, words]``, contiguous.
    """
    matcher.unsafe_compute_mask_ptr_with_draft_token(lines.ctypes.data, lines[0].nbytes, tokens)


class MaskThread:
    """The thread that computes masks."""

    def __init__(self) -> None:
        self._pool = self._new_pool()
        self._left: list[_Work] = []

    @staticmethod
    def _new_pool() -> Executor:
        return ThreadPoolExecutor(1, "structured output")

    def submit(self, work: _Work) -> None:
        """Queues the masks of a step for the thread.

        Args:
            work: Computes the masks.
        """
        self._pool.submit(work.run)

    @property
    def overdue(self) -> int:
        """The number of abandoned threads that are still computing a mask."""
        self._left = [work for work in self._left if not work.finished.is_set()]
        return len(self._left)

    def replace(self, work: _Work) -> None:
        """Starts a new thread and abandons the current one, as its mask cannot be interrupted.

        Args:
            work: The work of the new thread.
        """
        self._left.append(work)
        self._pool.shutdown(wait=False)
        self._pool = self._new_pool()


class _Work:
    """The work of a thread: the rows in order.

    Args:
        masks: Receives the masks ``[batch, words]``; with tokens ``[batch, places, words]``.
        rows: The matchers and their rows.
        tokens: The tokens of each row, after each of which a mask is computed too; None: one mask for each row.
    """

    def __init__(
        self,
        masks: Mask,
        rows: deque[tuple[Any, int]],
        tokens: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.masks, self.rows, self.tokens = masks, rows, tokens
        self.finished = threading.Event()
        self.lock = threading.Lock()  # guards `row`
        self.row = -1
        self.error: BaseException | None = None
        self.panics: list[tuple[int, str]] = []  # rows that fail alone
        self._clock: int | None = None
        self._begin = 0.0

    def run(self) -> None:
        """Fills masks until no row is left; an exception is kept for the caller."""
        # this thread's own time: other work of the machine makes no mask overdue
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            while True:
                with self.lock:
                    if not self.rows:
                        return
                    matcher, self.row = self.rows.popleft()
                    self._begin = self._now()
                try:
                    if self.tokens is None:
                        fill(matcher, self.masks[self.row])
                    else:
                        own = self.tokens[self.row]
                        fill_after(matcher, own, self.masks[self.row, : len(own) + 1])
                except BaseException as error:
                    if not is_panic(error):
                        raise
                    # a row that allows all, as the matcher that `result` sets refuses the token
                    self.masks[self.row] = -1
                    self.panics.append((self.row, str(error)))
        except BaseException as error:
            self.error = error
        finally:
            self.finished.set()

    def seconds(self) -> float:
        """The time spent on the current row, in seconds."""
        with self.lock:
            return 0.0 if self.row < 0 else self._now() - self._begin

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)


class StepMasks:
    """The masks of a step that are being computed; or those after each of several tokens.

    Args:
        thread: Computes the masks.
        batch: The requests.
        rows: The indices of the requests that have a matcher.
        words: The number of 32-bit words of a mask.
        after: For each of these rows a matcher, and the tokens that follow there; None: one mask at the place of each
            request.
    """

    def __init__(
        self,
        thread: MaskThread,
        batch: Sequence[TextGenerationContext],
        rows: Sequence[int],
        words: int,
        after: Mapping[int, tuple[Any, Sequence[int]]] | None = None,
    ) -> None:
        self._thread, self._batch = thread, batch
        if after is None:
            masks = np.full((len(batch), words), -1, np.int32)
            self._limit_s = MASK_S
            self._work = _Work(masks, deque((batch[row].matcher, row) for row in rows))
        else:
            places = max(len(tokens) for _, tokens in after.values()) + 1
            # no bits are set after a token that may not follow
            masks = np.zeros((len(batch), places, words), np.int32)
            self._limit_s = MASK_S * places
            own = [after[row][1] if row in after else () for row in range(len(batch))]
            self._work = _Work(masks, deque((after[row][0], row) for row in rows), own)
        thread.submit(self._work)

    def wait(self, seconds: float) -> bool:
        """Waits for the masks unless one of them takes long; returns whether they are computed.

        Args:
            seconds: The time for a mask in seconds, as of `MASK_S`.
        """
        work = self._work
        while not work.finished.wait(max(seconds - work.seconds(), seconds / 4)):
            if work.seconds() > seconds:
                return False
        return True

    def result(self) -> Mask:
        """Waits for the masks. A request whose mask takes too long gets a matcher that refuses its next token.

        Returns:
            int32 ``[batch, words]``, one bit per token; with tokens ``[batch, places, words]``.
        """
        # read anew in each turn, as `_give_up` replaces it
        while not (work := self._work).finished.wait(max(self._limit_s - work.seconds(), 0.01)):
            if work.seconds() > self._limit_s:
                self._give_up(work)
        for row, problem in work.panics:
            self._batch[row].set_matcher(OverdueMatcher(f"the grammar's package fails: {problem}"))
        if work.error is not None:
            raise work.error
        return work.masks

    def _give_up(self, work: _Work) -> None:
        """Fails the row that the thread is computing; a new thread computes the rows after it."""
        with work.lock:
            # the abandoned thread finds no row after its current one
            left, work.rows = work.rows, deque()
            row = work.row
        self._batch[row].set_matcher(OverdueMatcher())
        masks = work.masks.copy()  # the abandoned thread still writes to its array
        masks[row] = -1
        self._work = _Work(masks, left, work.tokens)
        self._thread.replace(work)
        self._thread.submit(self._work)
