"""Estimates of the times of steps and of drafting, from simulated durations."""

from __future__ import annotations

import numpy as np
import pytest

from max.interfaces import RequestID
from max.pipelines.generation.drafts.durations import DraftingSeconds, StepSeconds
from max.pipelines.generation.drafts.lengths import LONGEST_RUN, REST_STEPS, DraftLengths


@pytest.mark.parametrize(("once", "each"), [(0.8, 0.4), (0.0, 0.5), (2.0, 0.0)])
def test_drafting_takes_a_part_once_and_one_for_each_token(once: float, each: float) -> None:
    times, rng = DraftingSeconds(), np.random.default_rng(0)
    assert times.of(3) == 0
    for count in rng.choice([1, 2, 3, 5, 7], 60).tolist():
        times.add(count, (once + each * count) * rng.uniform(0.97, 1.03))
    for count in (1, 2, 4, 7, 11):
        assert times.of(count) == pytest.approx(once + each * count, rel=0.1, abs=0.1)


def test_drafts_of_one_length_tell_nothing_of_others() -> None:
    times = DraftingSeconds()
    for _ in range(10):
        times.add(4, 2.0)
    assert [times.of(count) for count in (1, 4, 8)] == pytest.approx([0.5, 2.0, 4.0])


def test_no_token_takes_less_than_nothing() -> None:
    times = DraftingSeconds()
    for count, seconds in [(1, 9.0), (2, 5.0), (8, 1.0)] * 9:
        times.add(count, seconds)
    values = [times.of(count) for count in range(1, 40)]
    assert values == sorted(values) and values[0] > 0


def test_the_first_drafts_and_slow_ones_count_little() -> None:
    times = DraftingSeconds()
    for seconds in (90.0, 2.0, 50.0):  # graphs were compiled
        times.add(2, seconds)
    assert times.of(2) == 2.0
    times.add(2, 1e6)
    assert times.of(2) <= 4.0


def measured(plain: float, drafted: dict[int, float]) -> StepSeconds:
    """Times that are known of many steps."""
    times = StepSeconds()
    for _ in range(8):
        times.record(1, 0, plain)
        for count, seconds in drafted.items():
            times.record(1, count, seconds)
    return times


def test_a_slower_machine_slows_the_steps_that_are_not_measured() -> None:
    times = measured(10.0, {2: 12.0, 3: 13.0})
    for _ in range(30):
        times.record(1, 3, 26.0)  # everything takes twice as long
    plain, two, three = times.plain(1), times.of(1, 2), times.of(1, 3)
    assert plain is not None and two is not None and three == pytest.approx(26.0, rel=0.01)
    assert 15 < plain <= 20 and two / plain == pytest.approx(1.2, rel=0.01)
    for _ in range(30):
        times.record(1, 3, 13.0)
    assert times.plain(1) == pytest.approx(10.0, rel=0.05)


def test_steps_of_other_batches_keep_their_times() -> None:
    times = measured(10.0, {3: 13.0})
    for _ in range(3):
        times.record(4, 0, 30.0)
    for _ in range(20):
        times.record(1, 0, 20.0)
    assert times.plain(4) == 30.0
    assert times.plain(1) == pytest.approx(20.0, rel=0.01)


def test_times_that_differ_in_truth_are_told_apart() -> None:
    """A part of each change stays with its step, so that wrong first times do not last."""
    times = measured(10.0, {3: 30.0})
    for _ in range(200):
        times.record(1, 0, 10.0)
        times.record(1, 3, 12.0)
    assert times.of(1, 3) == pytest.approx(12.0, rel=0.05)
    assert times.plain(1) == pytest.approx(10.0, rel=0.05)


def test_calls_without_drafts_grow_and_stop_at_a_draft() -> None:
    """The more steps had no draft, the more a call has; with drafts, and to measure a plain step, it has one."""
    lengths, key = DraftLengths(8), RequestID()
    assert lengths.plain_steps(1) == 1, "nothing is measured"
    counts = list[int | None]()
    for _ in range(20):
        steps = lengths.plain_steps(1)
        assert steps is not None
        counts.append(steps)
        lengths.step([key], 0, 0, 1.0, steps)
    rests = np.cumsum([0, *counts[:-1]])
    assert counts == [1 + rest // REST_STEPS for rest in rests] and counts[-1] > 2
    for _ in range(LONGEST_RUN):
        lengths.step([key], 3, 3, 1.1)
        assert lengths.plain_steps(1) == 1
    assert not lengths.may_draft(1)
    lengths._credit = -0.1
    assert lengths.plain_steps(1) is None, "the draft has to wait anyway"


@pytest.mark.parametrize("slow_drafts", [1, 2])
def test_slow_first_drafts_do_not_end_drafting(slow_drafts: int) -> None:
    """A graph is compiled in them, or the machine was busy: they are tried again as soon as there is credit."""
    lengths, key = DraftLengths(8), RequestID()
    found = []
    for _ in range(700):
        count = lengths.length(key, 1, 0, 3)
        found.append(count)
        if count:
            drafts = sum(map(bool, found))
            lengths.record_drafting(count, 90.0 if drafts <= slow_drafts else 0.4 * count)
            lengths.record_verification(key, count, count)
        lengths.step([key], count, count, 10.0 + 0.4 * count)
    assert sum(found[-60:]) > 150


def test_the_time_of_drafting_is_measured_again_after_a_rest() -> None:
    lengths, key = DraftLengths(8), RequestID()
    found = []
    for step in range(1500):
        slow = step < 100  # other work took the machine while drafts were measured
        count = lengths.length(key, 1, 0, 3)
        found.append(count)
        if count:
            lengths.record_drafting(count, 50.0 if slow else 0.4 * count)
            lengths.record_verification(key, count, count)
        lengths.step([key], count, count, 10.0 + 0.4 * count)
    assert sum(found[-60:]) > 150
