"""Chunks of prompts beside running requests: how long they are, and who reads them."""

from __future__ import annotations

import pytest

from max.interfaces import RequestID
from max.pipelines.core import InputError
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.state_slots import StateSlots
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from max.pipelines.scheduler.step_times import StepEstimate
from tests.pipelines.test_scheduler import Trace


def measured(ratio: float | None = 3.0, **limits) -> Trace:
    """A request "a" that runs; a step takes 10 ms, a token of a prompt 1 ms."""
    values = {
        "enable_in_flight_batching": True, "prefill_chunk_size": 64, "mixed_step_ratio": ratio,
        **limits,
    }  # fmt: skip
    trace = Trace(1000, **values)
    trace.add("a", 64, new=400)
    assert trace.step() == "CE1 a0:64"
    trace.scheduler.record_prompts(0.064)
    assert trace.step() == "TG1 a64:65"
    trace.scheduler.record_step(0.01, 1)
    return trace


def test_a_chunk_takes_the_time_that_the_ratio_leaves():
    trace = measured()
    trace.add("b", 200)
    # one waits and one runs, so the ratio decides: two steps of 10 ms are 20 tokens, in whole rows 16
    assert trace.step() == "CE1 a65:66 b0:16"
    trace.scheduler.record_prompts(0.01 + 16 * 0.003)  # 3 ms a token; 2 with the one before
    assert trace.step() == "CE1 a66:67 b16:24"
    trace.scheduler.record_prompts(0.01 + 8 * 0.001)  # the mean of 2 and 1
    assert trace.step() == "CE1 a67:68 b24:32", "13 tokens"


@pytest.mark.parametrize("ratio", [None, 9.0])
def test_a_chunk_has_the_limit_of_all_chunks(ratio):
    trace = measured(ratio)
    trace.add("b", 200)
    assert trace.step() == "CE1 a65:66 b0:64", "a ratio of 9 leaves 80 tokens"


def test_requests_that_wait_lengthen_chunks():
    """Of five places one request runs and four wait: the chunk takes four steps, whatever the ratio is."""
    trace = measured(ratio=1.5, max_batch_size=5)
    for name in "bcdefg":  # two find no place
        trace.add(name, 100)
    assert trace.step() == "CE1 a65:66 b0:40"
    trace = measured(ratio=1.5, max_batch_size=3)
    trace.add("x", 8)
    assert trace.step() == "CE1 a65:66 x0:8"
    for name in "bcdefg":
        trace.add(name, 100)
    assert trace.step() == "CE1 a66:67 x8:9 b0:8", "one place, two that run: half a step, 5 tokens"


def test_without_a_running_request_chunks_are_whole():
    trace = measured()
    trace.add("b", 200)
    trace.scheduler.remove(RequestID("a"))
    assert trace.steps(3) == ["CE1 b0:64", "CE1 b64:128", "CE1 b128:192"]


def test_without_decoding_beside_prompts_chunks_are_whole():
    trace = measured(enable_in_flight_batching=False)
    trace.add("b", 200)
    assert trace.step() == "CE1 b0:64"


def test_without_measurements_chunks_are_whole():
    trace = Trace(1000, prefill_chunk_size=64, enable_in_flight_batching=True, mixed_step_ratio=3.0)
    trace.add("a", 3)
    trace.step()
    trace.add("b", 200)
    assert trace.step() == "CE1 a3:4 b0:64"


def test_prompts_of_one_chunk_pass_those_of_several():
    trace = measured(ratio=4)  # three steps are 30 tokens
    trace.add("b", 104)
    trace.add("c", 200)
    trace.add("d", 64)  # no longer than a chunk
    assert trace.step() == "CE1 a65:66 b0:24 d0:40", "d has what is left of 64 tokens"
    assert trace.pages("c") is None and trace.contexts["c"].active_length == 200
    assert trace.step() == "CE1 a66:67 b24:48 d40:64"
    assert trace.step() == "CE1 a67:68 d64:65 b48:72"
    assert trace.step() == "CE1 a68:69 d65:66 b72:96"
    assert trace.step() == "CE1 a69:70 d66:67 b96:104 c0:16", "24 tokens for both together"
    assert trace.step() == "CE1 a70:71 b104:105 d67:68 c16:40"


def test_requests_that_end_are_forgotten():
    trace = measured()
    trace.add("b", 200, new=2)
    trace.add("c", 200, new=2)
    trace.steps(3)
    assert trace.scheduler._long == {RequestID("b"), RequestID("c")}
    trace.scheduler.remove(RequestID("b"))
    assert trace.scheduler._long == {RequestID("c")}
    while trace.contexts["c"].needs_ce:
        trace.step()
    assert not trace.scheduler._long
    while len(trace.scheduler) > 1:
        trace.step()
    trace.scheduler.remove(RequestID("a"))
    assert trace.step() is None and trace.cache.free_pages == 1000


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"prefill_chunk_size": 4}, True),
        ({"prefill_chunk_size": 12}, False),
        ({"prefill_chunk_size": 4, "max_num_steps": 12}, True),
        ({"prefill_chunk_size": 4, "enable_chunked_prefill": False}, False),
        ({"prefill_chunk_size": 99, "enable_chunked_prefill": False}, False),
    ],
)
def test_where_windows_give_pages_back_a_chunk_decides_whether_a_request_fits(limits, fits):
    """Pages for 12 tokens: a window of 4 with a chunk of 4 fits, a prompt of 40 tokens at once does not.

    A call has as many steps as pages are free for.
    """
    trace = Trace(6)
    trace.cache = RequestPages(PageManager(6, 2, window=4))
    trace.scheduler = TextScheduler(trace.cache, SchedulerLimits(**limits))
    if not fits:
        with pytest.raises(InputError, match="pages of the KV cache at 45 tokens, and there are 6"):
            trace.add("a", 40, new=5)
        return
    trace.add("a", 40, new=5)
    while trace.step():
        pass
    assert trace.contexts["a"].is_done and trace.cache.free_pages == 6


@pytest.mark.parametrize(
    ("new", "joins"),
    [(2, True), (3, False), (4, False)],
    ids=["no further page", "one page", "one page and a half"],
)
def test_headroom_is_for_requests_that_need_further_pages(new, joins):
    """The last token of a sequence needs no place: 3 and 2 tokens fill the two pages that the prompt has."""
    trace = Trace(4)
    trace.add("r", 3, new=new)
    assert trace.step() == "CE1 r0:3"
    trace.add("c", 4, new=1)
    assert trace.step() == ("CE1 c0:4" if joins else "TG1 r3:4")


def test_headroom_is_for_requests_without_a_length_limit():
    trace = Trace(4)
    r = trace.add("r", 3, new=2)
    assert trace.step() == "CE1 r0:3"
    trace.add("c", 4, new=1)
    r.max_length = None
    assert trace.schedule() == "TG1 r3:4"


def with_slots(slots: int, **limits) -> Trace:
    """A scheduler of a model with recurrent states, whose prompts are read in chunks of 4."""
    trace = Trace(50, prefill_chunk_size=4, **limits)
    trace.cache = RequestPages(PageManager(50, 2), StateSlots(slots))
    trace.scheduler = TextScheduler(
        trace.cache, SchedulerLimits(max_batch_size=9, prefill_chunk_size=4)
    )
    return trace


def test_the_first_request_takes_the_slot_of_a_later_one_amid_its_prompt():
    trace = with_slots(1)
    trace.add("b", 10, new=2)
    assert trace.step() == "CE1 b0:4"
    trace.add("a", 4, new=2, priority=-1)
    assert trace.step() == "CE1 a0:4"
    assert trace.pages("b") is None and trace.scheduler.preemptions == 1
    assert trace.step() == "TG1 a4:5"
    assert trace.step() == "CE1 b0:4"


def test_beside_a_running_request_no_slot_is_taken_from_a_later_one():
    trace = with_slots(2)
    trace.add("r", 4, new=3)
    assert trace.step() == "CE1 r0:4"
    trace.add("b", 10, new=2)
    assert trace.step() == "CE1 b0:4"
    trace.add("a", 4, new=2, priority=-1)
    assert trace.steps(2) == ["TG1 r4:5", "TG1 r5:6"]
    assert trace.pages("b") == 2 and trace.scheduler.preemptions == 0
    assert trace.step() == "CE1 a0:4", "in the slot of r"
    assert trace.pages("b") == 2


def test_the_load_is_counted():
    trace = Trace(12, prefix=True, max_batch_size=2)
    trace.add("a", 4, new=4)
    trace.step()
    trace.add("b", 4, new=2)
    trace.add("c", 2, new=2, first=50)
    trace.step()
    assert trace.scheduler.counts() == {
        "running": 2, "waiting": 1, "used_pages": 3, "preemptions": 0, "prompt_tokens": 8, "reused_tokens": 2,
    }  # fmt: skip
    trace.scheduler.requeue(trace.contexts["b"])
    counts = trace.scheduler.counts()
    assert (counts["running"], counts["waiting"], counts["preemptions"]) == (1, 2, 1)


def test_a_mixed_step_before_the_first_decoding_one_counts_as_a_step_of_prompts():
    times = StepEstimate()
    times.record_prompts(0.64, 64, mixed=True)
    assert times.chunk(1.0) is None
    times.record_plain(0.32, 1)
    # a token takes 10 ms: 32 of them a step
    assert times.chunk(1.0) == 32
