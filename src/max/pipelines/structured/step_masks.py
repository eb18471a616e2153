"""Computes the masks of a step in a thread while the model runs; a row that takes too long fails without the others."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Container
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

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
    # `line.ctypes` runs Python
    matcher.unsafe_compute_mask_ptr(line.__array_interface__["data"][0], line.nbytes)


def unpack_mask(masks: Mask, vocabulary: int) -> npt.NDArray[np.bool_]:
    """Unpacks masks to one byte per token.

    Args:
        masks: int32 ``[batch, words]``, one bit per token.
        vocabulary: The width of the logits; tokens beyond the mask are disallowed if the row has a constraint.

    Returns:
        bool ``[batch, vocabulary]``; True if a token is allowed.
    """
    # [batch, words] to [batch, 32 * words]
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").view(np.bool_)
    if bits.shape[1] >= vocabulary:
        return np.ascontiguousarray(bits[:, :vocabulary])
    # a request without a grammar has a mask of ones, and allows the tokens past the mask too
    free = (masks == -1).all(axis=1, keepdims=True)
    unmasked = np.broadcast_to(free, (len(masks), vocabulary - bits.shape[1]))
    return np.concatenate([bits, unmasked], axis=1)


def forced_tokens(matcher: Any, eos: Container[int]) -> list[int]:
    """The tokens that a grammar forces next, as the tokenizer writes their text, up to the end of the answer.

    The last characters of a forced text are left out where the tokenizer could join them with what follows.

    Args:
        matcher: llguidance's matcher.
        eos: The tokens that end the answer.
    """
    if matcher.is_error():
        return []
    tokens: list[int] = matcher.compute_ff_tokens()
    if not tokens:
        return tokens
    ends = (place for place, token in enumerate(tokens) if token in eos)
    return tokens[: next(ends, len(tokens))]


class MaskThread:
    """The thread that computes masks."""

    def __init__(self) -> None:
        self._pool = self._new_pool()
        self._left: list[MaskWork] = []
        self._unattended: MaskWork | None = None

    @staticmethod
    def _new_pool() -> Executor:
        return ThreadPoolExecutor(1, "structured output")

    def submit(self, work: MaskWork) -> None:
        """Queues masks for the thread.

        Args:
            work: Computes the masks.
        """
        self.settle()
        self._pool.submit(work.run)

    def settle(self) -> None:
        """Waits for the end of the work that was left alone, as long as a mask may take; then it writes no more."""
        before, self._unattended = self._unattended, None
        if before is not None and not before.wait(MASK_S):
            self.replace(before)

    def leave(self, work: MaskWork) -> None:
        """Leaves the end of a work alone: it does not hold up the next one longer than a mask may take.

        Args:
            work: What the thread does last.
        """
        self._unattended = work

    @property
    def overdue(self) -> int:
        """The number of abandoned threads that are still computing a mask."""
        self._left = [work for work in self._left if not work.finished.is_set()]
        return len(self._left)

    def replace(self, work: MaskWork) -> None:
        """Starts a new thread and abandons the current one, as its mask cannot be interrupted.

        Args:
            work: The work of the current thread.
        """
        if self._unattended is work:
            self._unattended = None
        # under its lock: what the thread writes after a mask is complete or left out
        with work.lock:
            work.abandoned = True
        self._left.append(work)
        self._pool.shutdown(wait=False)
        self._pool = self._new_pool()


class MaskWork:
    """The work of a thread: the rows in order.

    Args:
        masks: Receives the masks ``[batch, words]``.
        rows: The matchers and their rows.
    """

    def __init__(self, masks: Mask, rows: deque[tuple[Any, int]]) -> None:
        self.masks, self.rows = masks, rows
        self.finished = threading.Event()
        self.lock = threading.Lock()  # guards `row`
        self.row = -1
        self.abandoned = False
        self.error: BaseException | None = None
        self.panics: list[tuple[int, str]] = []  # rows that fail alone
        self._clock: int | None = None
        self._begin = 0.0

    def run(self) -> None:
        """Fills masks; an exception is kept for the caller."""
        # this thread's own time: other work of the machine makes no mask overdue
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            self.fill()
        except BaseException as error:
            self.error = error
        finally:
            self.finished.set()

    def fill(self) -> None:
        """Fills masks until no row is left."""
        while True:
            with self.lock:
                if not self.rows:
                    self.row = -1
                    return
                matcher, self.row = self.rows.popleft()
                self._begin = self._now()
            try:
                fill(matcher, self.masks[self.row])
            except BaseException as error:
                if not is_panic(error):
                    raise
                # a row that allows all, as its request gets a matcher that refuses the token
                self.masks[self.row] = -1
                self.panics.append((self.row, str(error)))

    def wait(self, seconds: float) -> bool:
        """Waits for the end unless a mask takes long; returns whether the work has ended.

        Args:
            seconds: The time for a mask in seconds, as of `MASK_S`.
        """
        # again and again: the thread's CPU time may be behind the clock
        while not self.finished.wait(max(seconds - self.seconds(), 0.01)):
            if self.seconds() > seconds:
                return False
        return True

    def seconds(self) -> float:
        """The time spent on the current row, in seconds."""
        with self.lock:
            return 0.0 if self.row < 0 else self._now() - self._begin

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else time.clock_gettime(self._clock)


class StepMasks:
    """The masks of a step that are being computed.

    Args:
        thread: Computes the masks.
        work: Its work.
        fail: Called for each row whose mask cannot be computed, with a matcher that refuses every token.
    """

    def __init__(
        self, thread: MaskThread, work: MaskWork, fail: Callable[[int, OverdueMatcher], None]
    ) -> None:
        self._thread, self._work, self._fail = thread, work, fail
        thread.submit(work)

    def result(self) -> Mask:
        """Waits for the masks. A row whose mask takes too long fails.

        Returns:
            int32 ``[batch, words]``, one bit per token.
        """
        # read anew in each turn, as `_give_up` replaces it
        while not (work := self._work).wait(MASK_S):
            self._give_up(work)
        for row, problem in work.panics:
            self._fail(row, OverdueMatcher(f"the grammar's package fails: {problem}"))
        if work.error is not None:
            raise work.error
        return work.masks

    def _give_up(self, work: MaskWork) -> None:
        """Fails the row that the thread is computing; a new thread computes the rows after it."""
        with work.lock:
            # the abandoned thread finds no row after its current one
            left, work.rows = work.rows, deque()
            row = work.row
        if row < 0:
            return  # it has ended just now
        self._fail(row, OverdueMatcher())
        masks = work.masks.copy()  # the abandoned thread still writes to its array
        masks[row] = -1
        self._work = MaskWork(masks, left)
        self._work.panics = work.panics
        self._thread.replace(work)
        self._thread.submit(self._work)
