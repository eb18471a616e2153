"""The scheduler of several copies of a model, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from max.interfaces import BatchType, RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler import (
    ReplicaScheduler,
    SchedulerLimits,
    TextScheduler,
    scheduler_of,
)

LIMITS = SchedulerLimits(max_batch_size=4, max_num_steps=4)


class Copies(RequestPages):
    """The caches of two copies."""

    def __init__(self, pages: int = 40) -> None:
        self.caches = [RequestPages.of(pages, 4, True) for _ in range(2)]
        super().__init__(PageManager(pages, 4, True))

    @property
    def replicas(self) -> Sequence[RequestPages]:
        return self.caches


def text(name: str, length: int, new: int = 30) -> TextContext:
    return TextContext(
        request_id=RequestID(name), tokens=np.arange(length), max_length=length + new
    )


def names(inputs: Any) -> list[list[str]]:
    return [[key.value for key in batch] for batch in inputs.batches]


def run(inputs: Any, steps: int = 1) -> list[TextContext]:
    """Computes the tokens of a batch, as a pipeline does."""
    contexts = list(inputs.batch.values())
    for context in contexts:
        for _ in range(steps):
            context.update(7)
    return contexts


def test_one_copy_needs_no_scheduler_of_several() -> None:
    assert isinstance(scheduler_of(RequestPages.of(4, 4), LIMITS), TextScheduler)
    assert isinstance(scheduler_of(Copies(), LIMITS), ReplicaScheduler)


def test_copies_decode_one_step_beside_one_that_reads() -> None:
    scheduler = ReplicaScheduler(Copies(), LIMITS)
    a, b = text("a", 5), text("b", 6)
    scheduler.add(a)
    first = scheduler.schedule()
    assert first is not None and names(first) == [["a"], []]
    assert first.batch_type is BatchType.CE and first.num_steps == 1
    assert scheduler.update(run(first)) == []
    scheduler.add(b)
    mixed = scheduler.schedule()
    assert mixed is not None and names(mixed) == [["a"], ["b"]]
    # a copy reads: all run one step
    assert mixed.batch_type is BatchType.CE and mixed.num_steps == 1
    scheduler.update(run(mixed))
    both = scheduler.schedule()
    assert both is not None and both.batch_type is BatchType.TG and both.num_steps == 4
    assert scheduler.counts()["running"] == 2 and scheduler.counts()["waiting"] == 0


def test_times_are_recorded_where_a_copy_took_part() -> None:
    scheduler = ReplicaScheduler(Copies(), SchedulerLimits(max_batch_size=4))
    one, two = scheduler.schedulers
    prompts, steps = dict[TextScheduler, list[float]](), dict[TextScheduler, list[Any]]()
    for each in (one, two):
        prompts[each], steps[each] = [], []
        each.record_prompts = prompts[each].append  # type: ignore[method-assign]
        each.record_step = lambda *args, each=each: steps[each].append(args)  # type: ignore[method-assign]
    a, b = text("a", 5), text("b", 6)
    scheduler.add(a)
    first = scheduler.schedule()
    scheduler.record_prompts(0.5)
    assert prompts == {one: [0.5], two: []}
    scheduler.update(run(first))
    scheduler.add(b)
    second = scheduler.schedule()
    scheduler.record_prompts(0.25)
    # the first copy decodes beside the prompt of the second one
    assert prompts == {one: [0.5], two: [0.25]}
    scheduler.update(run(second))
    scheduler.remove(a.request_id)
    scheduler.schedule()
    scheduler.record_step(0.125, 3)
    assert steps == {one: [], two: [(0.125, 3)]}


def test_requests_are_found_in_their_copy() -> None:
    scheduler = ReplicaScheduler(Copies(), LIMITS)
    contexts = [text(name, 5 + index) for index, name in enumerate("abc")]
    for context in contexts:
        scheduler.add(context)
    assert all(context.request_id in scheduler for context in contexts) and len(scheduler) == 3
    assert RequestID("x") not in scheduler
    with pytest.raises(ValueError, match="is scheduled already"):
        scheduler.add(contexts[0])
    scheduler.update(run(scheduler.schedule()))
    scheduler.update(run(scheduler.schedule(), 4))
    # cut and preempted by the scheduler that has it
    contexts[1].truncate(contexts[1].current_length)
    length = contexts[1].current_length
    with pytest.raises(ValueError):
        scheduler.truncate(contexts[1], 1)
    scheduler.truncate(contexts[1], length)
    assert scheduler.preemptions == 0
    scheduler.requeue(contexts[2])
    scheduler.requeue(text("unknown", 3))
    assert scheduler.preemptions == 1 and contexts[2].start_idx == 0
    assert scheduler.counts() == {
        **scheduler.counts(),
        "running": 2,
        "waiting": 1,
        "preemptions": 1,
    }
    with pytest.raises(KeyError):
        scheduler.truncate(text("unknown", 3), 2)


def test_ended_requests_leave_their_copy() -> None:
    scheduler = ReplicaScheduler(Copies(), LIMITS)
    short, long = text("short", 5, new=1), text("long", 6)
    scheduler.add(short)
    scheduler.add(long)
    assert scheduler.update(run(scheduler.schedule())) == [short.request_id]
    assert len(scheduler) == 1 and short.request_id not in scheduler
    # its name is free again, and late contexts of it are ignored
    assert scheduler.update([short]) == []
    scheduler.add(text("short", 7))
    assert len(scheduler) == 2
    for name in ("short", "long", "unknown"):
        scheduler.remove(RequestID(name))
    assert len(scheduler) == 0 and scheduler.schedule() is None


def test_priorities_and_clients_hold_in_each_copy() -> None:
    limits = SchedulerLimits(max_batch_size=1)
    scheduler = ReplicaScheduler(Copies(), limits)
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", -1)):
        scheduler.add(text(name, 5, new=1), priority)
    scheduler.add(text("f", 5, new=1))
    order = []
    while (inputs := scheduler.schedule()) is not None:
        order.append(sorted(sum(names(inputs), [])))
        scheduler.update(run(inputs))
    assert order == [["b", "e"], ["a", "f"], ["c", "d"]]


def test_a_request_goes_to_the_copy_with_few_requests_that_has_read_its_start() -> None:
    scheduler = ReplicaScheduler(Copies(), LIMITS)
    start = [9, *b"wxyz" * 3]
    read = [
        TextContext(tokens=np.array(tokens), max_length=90) for tokens in ([1, *start], [*start, 1])
    ]
    for context in read:
        scheduler.add(context)
    run(scheduler.schedule())
    for context, copy in zip(read, scheduler.schedulers, strict=True):
        copy.pages.step(context)
        scheduler.remove(context.request_id)
    again, more = (TextContext(tokens=np.array([*start, n]), max_length=90) for n in (2, 3))
    scheduler.add(again)
    assert again.request_id in scheduler.schedulers[1]
    # the other copy has no request, whatever this one has read
    scheduler.add(more)
    assert more.request_id in scheduler.schedulers[0]
