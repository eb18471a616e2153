"""When the thread of masks looks for the tokens of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max.pipelines.structured import call_masks
from max.pipelines.structured.call_masks import CallMemory, FollowedRow, _CallWork
from max.pipelines.structured.kept_tokens import KeptTokens


class Clock:
    """A clock, and a lock that lets its time pass, while tokens come at given times.

    Args:
        history: Receives the tokens ``[steps, batch]``.
        times: When those of each step come.
    """

    def __init__(self, history: Any, times: Any) -> None:
        self.history, self.times, self.now, self.waits = history, times, 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def acquire(self, timeout: float) -> bool:
        assert timeout > 0
        self.waits, self.now = self.waits + 1, self.now + timeout
        self.history[: np.searchsorted(self.times, self.now, "right")] = 7
        return False


@pytest.mark.parametrize("expected", [1.0, 1.05, 0.95])
def test_few_looks_find_the_tokens_of_a_step_soon(
    monkeypatch: pytest.MonkeyPatch, expected: float
) -> None:
    draw, late, waits, kept = (
        np.random.default_rng(3),
        list[float](),
        0,
        KeptTokens(lambda ends: np.ones(9, np.bool_), 9),
    )
    memory = CallMemory(np.zeros((2, 9), np.bool_), np.zeros((2, 9), np.bool_), 1)
    rows = [FollowedRow(None, False, frozenset())] * 2
    for _ in range(20):
        history = np.full((8, 2), -1, np.int64)
        clock = Clock(history, np.cumsum(draw.uniform(0.98, 1.02, 8)))
        monkeypatch.setattr(call_masks, "time", clock)
        work = _CallWork(rows, memory, kept, history, np.zeros(1, np.int64), expected)
        monkeypatch.setattr(work, "_running", clock)
        for step in range(8):
            assert work._tokens(step) == [7, 7]
            late.append(clock.now - clock.times[step])
            clock.now += 0.1  # what follows takes time too
        waits += clock.waits
    assert waits < 1.75 * len(late) and np.mean(late) < 0.15 and max(late) < 0.35


def test_a_step_that_takes_long_is_looked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    history = np.full((2, 1), -1, np.int64)
    clock = Clock(history, [100.0])
    monkeypatch.setattr(call_masks, "time", clock)
    memory = CallMemory(np.zeros((1, 9), np.bool_), np.zeros((1, 9), np.bool_), 1)
    row, kept = (
        FollowedRow(None, False, frozenset()),
        KeptTokens(lambda ends: np.ones(9, np.bool_), 9),
    )
    work = _CallWork([row], memory, kept, history, np.zeros(1, np.int64), 1.0)
    monkeypatch.setattr(work, "_running", clock)
    assert work._tokens(0) == [7] and clock.waits < 20 and clock.now < 150
    monkeypatch.undo()
    work.end(1)
    assert work._tokens(1) == []


def test_a_step_has_the_tokens_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those whose number is 0."""
    history = np.full((2, 2), -1, np.int64)

    class Rows(Clock):
        def acquire(self, timeout: float) -> bool:
            self.waits, self.now = self.waits + 1, self.now + timeout
            assert self.waits < 99
            history[0, 1] = 3
            if self.now > 2:
                history[0, 0] = 0
            return False

    clock = Rows(history, [])
    monkeypatch.setattr(call_masks, "time", clock)
    memory = CallMemory(np.zeros((2, 9), np.bool_), np.zeros((2, 9), np.bool_), 1)
    rows = [FollowedRow(None, False, frozenset())] * 2
    kept = KeptTokens(lambda ends: np.ones(9, np.bool_), 9)
    work = _CallWork(rows, memory, kept, history, np.zeros(1, np.int64), 1.0)
    monkeypatch.setattr(work, "_running", clock)
    assert work._tokens(0) == [0, 3]
