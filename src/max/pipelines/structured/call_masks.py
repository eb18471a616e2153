"""Masks of the steps of a call, each computed in a thread while the model runs its step.

The call and the thread take turns. The call writes the tokens of a step into a row of its history. The thread sees
them, follows the grammars, writes the tables of the next step, and counts that step as prepared. The call reads the
tables of prepared steps only. A step that is not prepared when the model has run ends the call, and has no tokens:
these are sampled afterwards, under the same masks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.interfaces import TextGenerationContext
from max.pipelines.core.native_calls import is_panic
from max.pipelines.structured.kept_tokens import Flags, KeptAfter, KeptTokens
from max.pipelines.structured.known_masks.string_run import StringRun
from max.pipelines.structured.step_masks import (
    Mask,
    MaskThread,
    MaskWork,
    OverdueMatcher,
    StepMasks,
    forced_tokens,
)

_FIRST_LOOK, _NEXT_LOOK = 31 / 32, 1 / 8
"""When the thread looks for the tokens of a step, as fractions of a step: after those of the last one were there, and
from look to look. As it wakes on the cores of the model, few looks count for more than early masks: a first look that
finds the tokens brings the next one forward, and after four of them one look is too early."""
_SHORTEST_LOOK_S = 5e-5
_SLOWER = 1.5
"""By what the time from look to look grows, for steps that other work of the machine delays."""


class CallMemory:
    """What a call reads while the thread writes it.

    Args:
        allowed: Whether a token may follow, one bit per token of the model, int32 ``[batch, ceil(vocab / 32)]``.
        kept: Whether a further step may follow a token, ``[batch, vocab]``.
        words: The number of words of a mask, one bit per token of the tokenizer.
    """

    def __init__(self, allowed: Mask, kept: Flags, words: int) -> None:
        self.allowed, self.kept, self.words = allowed, kept, words
        self.all_tokens = np.full(words, -1, np.int32)
        """The mask that allows all."""
        self._flags: list[Flags | None] = [None] * len(allowed)
        """What each row was set to last; None: to one value."""
        self._shared: list[Mask | None] = [None] * len(allowed)
        """The mask that each row was set to last; None: to one that changes."""

    def allow(self, row: int, mask: Mask, shared: bool = False) -> bool:
        """Sets the tokens that may follow in a row; returns whether they are others than before.

        Args:
            row: The row.
            mask: One bit per token.
            shared: Whether the mask never changes, so that it need not be compared.
        """
        if shared and self._shared[row] is mask:
            return False
        self._shared[row] = mask if shared else None
        own = self.allowed[row]
        # a model may have more logits than its tokenizer has tokens, or fewer
        width = min(len(mask), len(own))
        if own[:width].tobytes() == mask[:width].tobytes():
            return False
        own[:width] = mask[:width]
        # without a grammar tokens past the mask may follow, too
        own[width:] = -1 if width < len(own) and (mask == -1).all() else 0
        return True

    def keep(self, row: int, flags: Flags | bool, shared: bool = False) -> None:
        """Sets the tokens that a further step may follow in a row.

        Args:
            row: The row.
            flags: Whether one may, bool ``[tokens]``, or for all tokens.
            shared: Whether the flags never change, so that they need not be set again.
        """
        if isinstance(flags, bool):
            self.kept[row], self._flags[row] = flags, None
        elif not shared or self._flags[row] is not flags:
            # a model may have more logits than its tokenizer has tokens, or fewer
            width = min(len(flags), self.kept.shape[1])
            self.kept[row, :width], self.kept[row, width:] = flags[:width], False
            self._flags[row] = flags


@dataclass
class FollowedRow:
    """A request of a call.

    Args:
        matcher: Its grammar, at its place; None: it has none.
        jumps: Whether tokens that its grammar forces are appended to it without a step.
        ends: The tokens that end its answer.
        run: Where its text is, also after tokens that the matcher has not followed yet; None: no mask is known.
    """

    matcher: Any
    jumps: bool
    ends: frozenset[int]
    run: StringRun | None = None

    @property
    def mask(self) -> Mask | None:
        """The mask of the next token; None if it is to be computed."""
        return None if self.run is None or self.matcher is None else self.run.mask()


class _CallWork(MaskWork):
    """The work of the thread during a call.

    Args:
        rows: The requests.
        memory: What the call reads.
        kept: What is known of the tokens after which a call goes on.
        history: The tokens ``[steps, batch]``, negative until they are sampled.
        prepared: Receives the number of steps whose tables are complete, ``[1]``.
        step_s: The expected time of a step in seconds.
    """

    def __init__(
        self,
        rows: Sequence[FollowedRow],
        memory: CallMemory,
        kept: KeptTokens,
        history: npt.NDArray[np.int64],
        prepared: npt.NDArray[np.int64],
        step_s: float,
    ) -> None:
        super().__init__(np.full((len(rows), memory.words), -1, np.int32), deque())
        self._requests, self._memory, self._kept = rows, memory, kept
        self._history, self._prepared, self._step_s = history, prepared, step_s
        self._kept_after: list[KeptAfter | None] = [None] * len(rows)
        # a lock, as a wait for an event takes several times as long
        self._running, self._has_ended = threading.Lock(), False
        self._running.acquire()
        self._needed, self._seen = len(history), time.monotonic()
        self._forced: dict[int, int] = {}
        """The next token of each row in which it is forced."""
        self._unread: list[list[int]] = [[] for _ in rows]
        """The last tokens of each row, after which its mask is known: its matcher has not followed them yet."""
        self.step = 0
        self.failed: dict[int, int] = {}
        """The steps of rows whose masks could not be computed."""
        self.counted_steps = len(history)
        """The number of steps whose tokens count in all rows."""

    def end(self, needed_steps: int) -> None:
        """Ends the work, after a number of steps at most, of which the call has all tokens but those of the last."""
        self._needed = needed_steps
        if not self._has_ended:
            self._has_ended = True
            self._running.release()

    def fill(self) -> None:
        """Computes the masks of each step once the tokens before it are sampled."""
        for row in range(len(self._requests)):
            self._find_forced(row)
        while True:
            # also the last tokens, of which something may be learned
            if self.step and not self._follow(self.step - 1):
                return
            if self.step >= self._needed:
                return
            for row, token in self._forced.items():
                self.masks[row] = 0
                self.masks[row].view(np.uint32)[token >> 5] = 1 << (token & 31)
            computed = list[tuple[Any, int]]()
            for row, request in enumerate(self._requests):
                if (known := request.mask) is not None:
                    self.masks[row] = known
                elif request.matcher is not None and row not in self._forced:
                    computed.append((request.matcher, row))
            with self.lock:
                self.rows.extend(computed)
            super().fill()
            for row, _ in self.panics:
                if self.failed.setdefault(row, self.step) == self.step:
                    self._leave(row)
            # under the lock, as an abandoned thread must not write any more
            with self.lock:
                if self.abandoned:
                    return
                for _, row in computed:
                    request = self._requests[row]
                    if request.run is not None and request.matcher is not None:
                        request.run.learn(self.masks[row])
                self._write()
            # taken anew: other processors see the tables before the number
            with self.lock:
                self._prepared[0] = self.step + 1
            self.step += 1

    def _leave(self, row: int) -> None:
        """Follows a row no longer: what is sampled there from the step of the next masks on does not count."""
        self.counted_steps = min(self.counted_steps, self.step)
        self._requests[row].matcher = None
        self._forced.pop(row, None)
        self.masks[row] = -1

    def _follow(self, step: int) -> bool:
        """Waits for the tokens of a step, and follows them; returns False if there are none."""
        tokens = self._tokens(step)
        for row, request in enumerate(self._requests if tokens else ()):
            if request.matcher is None:
                continue
            unread = self._unread[row]
            unread.append(tokens[row])
            if request.run is not None:
                request.run.advance(tokens[row])
                if request.mask is not None:
                    self._forced.pop(row, None)
                    continue
            try:
                follows = all(map(request.matcher.consume_token, unread))
                unread.clear()
                if follows:
                    self._find_forced(row)
            except BaseException as error:
                if not is_panic(error):
                    raise
                follows = False
            kept = self._kept_after[row]
            if not follows:
                self._leave(row)  # the request itself refuses the token too
            elif kept is not None:
                forces = row in self._forced
                kept.learn(tokens[row], forces)
                if not forces:  # else the tables of the next step have no kept token in the row
                    self._memory.kept[row, tokens[row]] = True
        return bool(tokens)

    def _tokens(self, step: int) -> list[int]:
        """The tokens of a step; none if the call has ended before it."""
        row, wait = self._history[step], self._step_s * _NEXT_LOOK
        due = self._seen + self._step_s * _FIRST_LOOK
        while True:
            ended = self._has_ended
            # after the end all tokens are there that ever will be
            tokens: list[int] = row.tolist()
            now = time.monotonic()
            if min(tokens) >= 0:
                self._seen = now
                return tokens
            if ended:
                return []
            if now >= due:
                due, wait = now + max(wait, _SHORTEST_LOOK_S), wait * _SLOWER
            self._running.acquire(timeout=due - now)

    def _find_forced(self, row: int) -> None:
        """Finds the next token of a row if it is forced."""
        self._forced.pop(row, None)
        request = self._requests[row]
        if request.matcher is not None and request.jumps:
            forced = forced_tokens(request.matcher, request.ends)
            if forced:
                self._forced[row] = forced[0]

    def _write(self) -> None:
        """Writes the tables of a step."""
        memory = self._memory
        for row, request in enumerate(self._requests):
            changed = memory.allow(row, self.masks[row])
            if row in self._forced:
                # the others that are forced are appended without steps
                memory.keep(row, False)
                self._kept_after[row] = None
            elif request.matcher is None:
                if self.step == 0 or self._kept_after[row] is not None:
                    memory.keep(row, True)
                    self._kept_after[row] = None
            elif request.run is not None and request.mask is not None:
                memory.keep(row, request.run.plain, shared=True)
                self._kept_after[row] = None
            elif changed or self._kept_after[row] is None:
                kept = self._kept.after(self.masks[row], request.ends)
                memory.keep(row, kept.flags)
                self._kept_after[row] = kept


class CallMasks:
    """The masks of the steps of a call.

    Args:
        thread: Computes them.
        rows: The requests; their matchers are changed.
        memory: What the call reads.
        kept: What is known of the tokens after which a call goes on.
    """

    def __init__(
        self,
        thread: MaskThread,
        rows: Sequence[FollowedRow],
        memory: CallMemory,
        kept: KeptTokens,
    ) -> None:
        self._thread, self._rows, self._memory, self._kept = thread, rows, memory, kept
        self._work: _CallWork | None = None
        self._masks: StepMasks | None = None
        self._failures: dict[int, tuple[int, OverdueMatcher]] = {}

    def begin(
        self, history: npt.NDArray[np.int64], prepared: npt.NDArray[np.int64], step_s: float
    ) -> None:
        """Starts to compute the masks; to be called before the call begins.

        Args:
            history: Where the call writes the tokens of its steps ``[steps, batch]``, all negative.
            prepared: Where the call reads how many steps are prepared, ``[1]``: 0. Of this call only, as the thread may
                still be at work for the last one.
            step_s: The expected time of a step in seconds.
        """
        self._work = _CallWork(self._rows, self._memory, self._kept, history, prepared, step_s)
        self._masks = StepMasks(self._thread, self._work, self._fail)

    def _fail(self, row: int, matcher: OverdueMatcher) -> None:
        work = self._work
        assert work is not None
        self._failures[row] = work.failed.get(row, work.step), matcher

    def counted_steps(self) -> int:
        """The number of steps whose tokens count, as far as is known now: those that were sampled under masks."""
        assert self._work is not None
        return self._work.counted_steps

    def end(self, needed_steps: int = 0) -> None:
        """Ends the computation; to be called after the call has ended, also by an error.

        Args:
            needed_steps: The number of steps whose masks are needed: up to the one that has no tokens, if there is one.
        """
        if self._work is not None:
            self._work.end(needed_steps)
            self._thread.leave(self._work)

    def last(self) -> Mask:
        """The masks of the last step that is needed, once they are computed.

        Returns:
            int32 ``[batch, words]``, one bit per token.
        """
        assert self._masks is not None
        return self._masks.result()

    def valid(
        self, batch: Sequence[TextGenerationContext], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """The tokens of a call that were sampled under masks. A request without any of them gets a matcher that refuses
        its next token.

        Args:
            batch: The requests, before these tokens.
            tokens: The tokens of each request.
        """
        work, found = self._work, [list(own) for own in tokens]
        assert work is not None
        for row, problem in work.panics:
            self._fail(row, OverdueMatcher(f"the grammar's package fails: {problem}"))
        for row, (step, matcher) in self._failures.items():
            if step:
                del found[row][step:]
            else:
                batch[row].set_matcher(matcher)
        return found


class ReadyMasks:
    """The masks of a call that are known before it and the same in all steps: nothing is computed.

    Args:
        masks: That of each row, one bit per token.
        steps: The maximum number of steps.
    """

    def __init__(self, masks: Sequence[Mask], steps: int) -> None:
        self._masks, self._steps = masks, steps

    @classmethod
    def of(
        cls, thread: MaskThread, rows: Sequence[FollowedRow], memory: CallMemory, steps: int
    ) -> ReadyMasks | None:
        """Writes the tables of a call; None if the mask of a row is not known, or not for all steps.

        Args:
            thread: Computes masks, perhaps still those of the last call.
            rows: The requests.
            memory: What the call reads.
            steps: The maximum number of steps.
        """
        masks = list[Mask]()
        for request in rows:
            if request.matcher is None:
                known = memory.all_tokens
            elif request.run is None or (known := request.run.mask(steps)) is None:
                return None
            masks.append(known)
        thread.settle()  # it may have learned from the last tokens
        for row, request in enumerate(rows):
            memory.allow(row, masks[row], shared=True)
            if request.matcher is not None and request.run is not None:
                memory.keep(row, request.run.plain, shared=True)
            else:
                memory.keep(row, True)
        return cls(masks, steps)

    def begin(
        self, history: npt.NDArray[np.int64], prepared_steps: npt.NDArray[np.int64], step_s: float
    ) -> None:
        """As of `CallMasks`: all steps are prepared."""
        prepared_steps[0] = len(history)

    def counted_steps(self) -> int:
        """As of `CallMasks`: all steps."""
        return self._steps

    def end(self, needed_steps: int = 0) -> None:
        """As of `CallMasks`: there is nothing to end."""

    def last(self) -> Mask:
        """As of `CallMasks`."""
        return np.stack(self._masks)

    def valid(
        self, batch: Sequence[TextGenerationContext], tokens: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """As of `CallMasks`: all tokens."""
        return [list(own) for own in tokens]
