"""The scheduler with a page manager and no model: every request ends with the expected tokens."""

from __future__ import annotations

import ast
import itertools
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import max.pipelines
from max.interfaces import BatchType, RequestID
from max.pipelines.core import InputError, TextContext
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from max.pipelines.scheduler.step_times import StepEstimate

EOS = 7


def next_token(sequence: list[int]) -> int:
    """A model: its next token depends on all tokens before."""
    return zlib.crc32(bytes(sequence)) % 9


def generate(prompt: list[int], max_length: int) -> list[int]:
    sequence = list(prompt)
    while len(sequence) < max_length:
        sequence.append(next_token(sequence))
        if sequence[-1] == EOS:
            break
    return sequence[len(prompt) :]


class Engine:
    """Runs batches of a scheduler on a cache that stores the token ids."""

    def __init__(self, pages: int, page_size: int, prefix: bool, limits: SchedulerLimits) -> None:
        self.cache = RequestPages(PageManager(pages, page_size, prefix))
        self.limits = limits
        self.scheduler = TextScheduler(self.cache, limits)
        self.memory = np.full((pages, page_size), -1)
        self.contexts: dict[RequestID, TextContext] = {}
        self.ended: set[RequestID] = set()

    def add(self, prompt: list[int], new: int) -> TextContext:
        context = TextContext(
            max_length=len(prompt) + new, tokens=np.array(prompt), eos_token_ids={EOS}
        )
        self.scheduler.add(context)
        self.contexts[context.request_id] = context
        return context

    def step(self) -> bool:
        inputs = self.scheduler.schedule()
        if inputs is None:
            return False
        batch = list(inputs.batch.values())
        self.check(inputs, batch)
        self.check_writes(inputs, batch)
        for context in batch:
            table = self.cache.pages.pages(context.request_id)
            sequence = self.read(table, context.start_idx)
            assert sequence == context.all_tokens[: context.start_idx].tolist(), "a stale cache"
            sequence += context.next_tokens.tolist()
            made = []
            for _ in range(inputs.num_steps):
                made.append(next_token(sequence))
                self.write(table, sequence)
                sequence.append(made[-1])
            for token in made:
                if not context.is_done:
                    context.update(token)
        self.cache.step(batch)
        self.ended |= set(self.scheduler.update(batch))
        self.cache.pages.check()
        return True

    def check(self, inputs, batch) -> None:
        limits = self.limits
        assert batch and len({c.request_id for c in batch}) == len(batch)
        assert len(batch) <= limits.max_batch_size
        prompts = [c for c in batch if c.needs_ce]
        # all but the last token of a preempted request may be cached; it then has no prompt step
        assert inputs.batch_type == BatchType.CE or not prompts
        assert len(prompts) <= limits.max_ce_batch_size
        read = sum(c.active_length for c in prompts)
        if limits.enable_chunked_prefill:
            assert read <= limits.prefill_chunk_size
        else:
            assert read <= limits.prefill_chunk_size or len(prompts) == 1
        assert 1 <= inputs.num_steps <= limits.max_num_steps

    def check_writes(self, inputs, batch) -> None:
        """Checks that a page that is written is in one table only."""
        size = self.cache.page_size
        written: list[int] = []
        for context in batch:
            table = self.cache.pages.pages(context.request_id)
            last = context.active_idx + inputs.num_steps - 2
            written += table[context.start_idx // size : last // size + 1]
        tables = [self.cache.pages.pages(key) for key in self.cache.pages.requests]
        for page in written:
            assert sum(table.count(page) for table in tables) == 1, "two sequences write one page"

    def read(self, table: list[int], n: int) -> list[int]:
        size = self.cache.page_size
        return [int(self.memory[table[i // size], i % size]) for i in range(n)]

    def write(self, table: list[int], sequence: list[int]) -> None:
        size = self.cache.page_size
        for i, token in enumerate(sequence):
            assert i // size < len(table), "a token without a page"
            self.memory[table[i // size], i % size] = token

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                break
        assert len(self.scheduler) == 0, "a request did not end"
        assert self.cache.pages.used_pages == 0, "a page is lost"
        assert not self.scheduler._pages._opened, "an ended request is remembered"


LIMITS = st.builds(
    SchedulerLimits,
    max_batch_size=st.integers(1, 5),
    max_ce_batch_size=st.integers(1, 4),
    prefill_chunk_size=st.integers(1, 12),
    enable_chunked_prefill=st.booleans(),
    enable_in_flight_batching=st.booleans(),
    max_num_steps=st.integers(1, 3),
    max_batch_context_length=st.none() | st.integers(1, 30),
)
REQUEST = st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.integers(1, 9))


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(REQUEST, max_size=7),
    limits=LIMITS,
    pages=st.integers(10, 16),
    size=st.sampled_from([2, 3]),
    prefix=st.booleans(),
)
def test_each_request_gets_what_it_would_get_alone(requests, limits, pages, size, prefix):
    engine = Engine(pages, size, prefix, limits)
    made = [(engine.add(prompt, new), prompt, new) for prompt, new in requests]
    engine.run()
    for context, prompt, new in made:
        assert context.is_done
        assert context.generated_tokens.tolist() == generate(prompt, len(prompt) + new)


class Scheduling(RuleBasedStateMachine):
    """Requests arrive and are cancelled at any time."""

    @initialize(limits=LIMITS, prefix=st.booleans())
    def begin(self, limits, prefix):
        self.engine = Engine(10, 2, prefix, limits)
        self.alive: dict[RequestID, tuple[TextContext, list[int], int]] = {}

    @rule(request=REQUEST)
    def add(self, request):
        prompt, new = request
        context = self.engine.add(prompt, new)
        self.alive[context.request_id] = (context, prompt, new)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(list(self.alive)))
        self.engine.scheduler.remove(key)
        del self.alive[key]

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def go_back(self, data):
        """The last tokens of a request are removed; it generates the same ones again."""
        key = data.draw(st.sampled_from(list(self.alive)))
        context, prompt, _ = self.alive[key]
        if not context.is_done:
            length = data.draw(st.integers(len(prompt), context.end_idx))
            self.engine.scheduler.truncate(context, length)
            assert context.end_idx == length

    @rule(n=st.integers(1, 4))
    def step(self, n):
        for _ in range(n):
            self.engine.step()
        for key in self.engine.ended & self.alive.keys():
            context, prompt, new = self.alive.pop(key)
            assert context.generated_tokens.tolist() == generate(prompt, len(prompt) + new)

    @invariant()
    def every_request_is_somewhere(self):
        if hasattr(self, "engine"):
            left = {k for k in self.alive if k not in self.engine.ended}
            assert all(key in self.engine.scheduler for key in left)
            self.engine.cache.pages.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()


TestScheduling = Scheduling.TestCase
TestScheduling.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


class Trace:
    """A scheduler that records its batches: kind, steps, and the tokens ``start:active`` of each request."""

    def __init__(self, pages: int, page_size: int = 2, prefix: bool = False, **limits) -> None:
        self.cache = RequestPages(PageManager(pages, page_size, prefix))
        limits = {"max_batch_size": 9, **limits}
        self.scheduler = TextScheduler(self.cache, SchedulerLimits(**limits))
        self.contexts: dict[str, TextContext] = {}

    def add(
        self, name: str, length: int, new: int = 9, first: int = 0, priority: int = 0
    ) -> TextContext:
        tokens = np.arange(first, first + length)
        context = TextContext(
            request_id=RequestID(name), tokens=tokens, max_length=length + new, eos_token_ids={EOS}
        )
        self.scheduler.add(context, priority)
        self.contexts[name] = context
        return context

    def schedule(self):
        """Returns the next batch without running it."""
        self.inputs = self.scheduler.schedule()
        if self.inputs is None:
            return None
        parts = [f"{c.request_id}{c.start_idx}:{c.active_idx}" for c in self.inputs.batch.values()]
        return f"{self.inputs.batch_type.value}{self.inputs.num_steps} {' '.join(parts)}"

    def step(self, token: int = 0):
        """Runs the next batch and returns it."""
        text = self.schedule()
        if text is not None:
            batch = list(self.inputs.batch.values())
            for context in batch:
                for _ in range(self.inputs.num_steps):
                    context.update(token)
            self.cache.step(batch)
            self.ended = [str(key) for key in self.scheduler.update(batch)]
            self.cache.pages.check()
        return text

    def steps(self, count: int) -> list:
        return [self.step() for _ in range(count)]

    def pages(self, name: str) -> int | None:
        """Returns the length of a request's page table, or None if it has none."""
        key = RequestID(name)
        return len(self.cache.pages.pages(key)) if self.cache.contains(key) else None


def test_a_prompt_then_a_token_a_step():
    trace = Trace(8)
    trace.add("a", 3, new=3)
    assert len(trace.scheduler) == 1 and RequestID("a") in trace.scheduler
    assert trace.steps(2) == ["CE1 a0:3", "TG1 a3:4"]
    assert trace.ended == []
    assert trace.step() == "TG1 a4:5"
    assert trace.ended == ["a"] and len(trace.scheduler) == 0
    assert RequestID("a") not in trace.scheduler
    assert trace.step() is None
    assert trace.cache.free_pages == 8


def test_prompts_come_first_and_join_what_runs():
    trace = Trace(20, max_batch_size=3)
    for name in "abcd":
        trace.add(name, 2, new=4)
    assert trace.step() == "CE1 a0:2 b0:2 c0:2"
    assert trace.step() == "TG1 a2:3 b2:3 c2:3"
    trace.scheduler.remove(RequestID("b"))
    assert trace.step() == "CE1 d0:2"
    assert trace.step() == "TG1 a3:4 c3:4 d2:3"


def test_prompts_of_a_step_are_bounded_in_number():
    trace = Trace(20, max_ce_batch_size=2)
    for name in "abc":
        trace.add(name, 2)
    assert trace.steps(3) == ["CE1 a0:2 b0:2", "CE1 c0:2", "TG1 a2:3 b2:3 c2:3"]


def test_prompts_of_a_step_are_bounded_in_tokens():
    trace = Trace(30, prefill_chunk_size=5)
    for name, length in (("a", 3), ("b", 2), ("c", 4), ("d", 11), ("e", 1)):
        trace.add(name, length)
    assert trace.steps(5) == [
        "CE1 a0:3 b0:2", "CE1 c0:4 d0:1", "CE1 d1:6", "CE1 d6:11", "CE1 e0:1",
    ]  # fmt: skip


def test_without_chunks_a_long_prompt_is_read_alone():
    trace = Trace(30, prefill_chunk_size=5, enable_chunked_prefill=False)
    for name, length in (("a", 3), ("b", 2), ("c", 3), ("d", 3), ("e", 7), ("f", 2)):
        trace.add(name, length)
    assert trace.steps(2) == ["CE1 a0:3 b0:2", "CE1 c0:3"]
    assert trace.pages("d") is None
    assert trace.steps(2) == ["CE1 d0:3", "CE1 e0:7"]
    assert trace.step() == "CE1 f0:2"
    assert trace.cache.pages.used_pages == 2 + 1 + 2 + 2 + 4 + 1


def test_running_requests_get_a_token_beside_prompts():
    trace = Trace(30, enable_in_flight_batching=True, max_num_steps=4)
    trace.add("a", 3)
    trace.add("b", 3)
    trace.step()
    trace.add("c", 2)
    assert trace.schedule() == "CE1 a3:4 b3:4 c0:2"
    assert trace.pages("a") == 2, "for one step"
    assert trace.step() == "CE1 a3:4 b3:4 c0:2"
    assert trace.step() == "TG4 a4:5 b4:5 c2:3"


def test_beside_prompts_a_request_without_a_page_is_left_out():
    trace = Trace(5, enable_in_flight_batching=True, prefill_chunk_size=2)
    trace.add("a", 5, new=5)
    assert trace.steps(3) == ["CE1 a0:2", "CE1 a2:4", "CE1 a4:5"]
    trace.add("c", 6, new=2)
    assert trace.step() == "CE1 a5:6 c0:2"
    assert trace.step() == "CE1 c2:4", "c took the last page"
    assert trace.pages("a") == 3 and trace.scheduler.preemptions == 0
    assert trace.step() == "TG1 a6:7"
    assert trace.pages("c") is None


def test_the_context_of_a_batch_is_bounded():
    trace = Trace(30, max_batch_context_length=8, prefill_chunk_size=64)
    trace.add("a", 3)
    trace.add("b", 5)
    trace.add("c", 1)
    assert trace.step() == "CE1 a0:3 b0:5", "eight tokens fit"
    assert trace.step() == "TG1 a3:4 b5:6", "c waits"
    assert trace.pages("c") is None
    trace.scheduler.remove(RequestID("b"))
    trace.add("d", 3)
    assert trace.step() == "CE1 c0:1", "5 and 1, and 3 would be 9"
    trace = Trace(30, max_batch_context_length=8)
    trace.add("a", 9)
    trace.add("b", 1)
    assert trace.step() == "CE1 a0:9", "alone it may be longer"
    assert trace.step() == "TG1 a9:10"


@pytest.mark.parametrize(("pages", "joins"), [(6, True), (5, False)])
def test_a_prompt_leaves_a_page_for_each_running_request(pages, joins):
    trace = Trace(pages)
    trace.add("a", 2, new=7)
    trace.add("b", 2, new=7)
    trace.step()
    context = trace.add("c", 4, new=3)
    assert trace.step() == ("CE1 c0:4" if joins else "TG1 a2:3 b2:3")
    assert trace.pages("c") == (2 if joins else None)
    assert context.start_idx == (4 if joins else 0)


def test_the_headroom_is_for_running_requests_not_for_the_batch():
    trace = Trace(4)
    trace.add("a", 4, new=2)
    trace.add("b", 4, new=2)
    assert trace.step() == "CE1 a0:4 b0:4"
    assert trace.cache.free_pages == 0


def test_a_chunk_needs_no_headroom():
    trace = Trace(4, prefill_chunk_size=4)
    trace.add("a", 2, new=4)
    trace.add("b", 6, new=2)
    assert trace.step() == "CE1 a0:2 b0:2"
    assert trace.step() == "CE1 b2:6", "its last page too"
    assert trace.cache.free_pages == 0


def test_a_chunk_that_is_put_off_is_whole_again():
    trace = Trace(5, prefill_chunk_size=4)
    trace.add("a", 2, new=8)
    b = trace.add("b", 8, new=2)
    assert trace.step() == "CE1 a0:2 b0:2"
    assert trace.step() == "CE1 b2:6"
    trace.cache.claim(RequestID("other"))
    trace.cache.pages.reserve(RequestID("other"), 2)
    assert trace.step() == "TG1 a2:3", "it takes b's pages"
    assert trace.scheduler.preemptions == 1 and trace.pages("b") is None
    assert (b.start_idx, b.active_idx) == (0, 8)
    trace = Trace(6, prefill_chunk_size=4)
    trace.add("a", 2, new=8)
    b = trace.add("b", 8, new=2)
    assert trace.step() == "CE1 a0:2 b0:2"
    trace.cache.claim(RequestID("other"))
    trace.cache.pages.reserve(RequestID("other"), 6)
    assert trace.step() == "TG1 a2:3"
    assert (b.start_idx, b.active_idx, trace.pages("b")) == (2, 8, 1), "a part of it is read"


def test_a_prompt_that_is_put_off_takes_its_prefix_again():
    trace = Trace(6, prefix=True)
    trace.add("a", 4, new=3)
    trace.step()
    b = trace.add("b", 7, new=2)
    # three pages in use by a; b shares two of them, and two of its own would leave none for a
    trace.step()
    assert (b.start_idx, trace.pages("b")) == (7, 4)
    trace = Trace(5, prefix=True)
    trace.add("a", 4, new=6)
    assert trace.steps(2) == ["CE1 a0:4", "TG1 a4:5"]
    b = trace.add("b", 7, new=2)
    assert trace.step() == "TG1 a5:6"
    assert (b.start_idx, trace.pages("b")) == (0, None)
    trace.scheduler.remove(RequestID("a"))
    assert trace.step() == "CE1 b4:7"
    assert trace.cache.pages.reused_tokens == 4, "counted once"


def test_the_last_of_all_is_preempted():
    trace = Trace(6)
    for name in "abc":
        trace.add(name, 3, new=6)
    assert trace.steps(3) == ["CE1 a0:3 b0:3 c0:3", "TG1 a3:4 b3:4 c3:4", "TG1 a4:5 b4:5"]
    assert trace.scheduler.preemptions == 1 and trace.pages("c") is None
    assert trace.step() == "TG1 a5:6 b5:6"
    assert trace.step() == "TG1 a6:7"
    assert trace.scheduler.preemptions == 2
    # b arrived before c, and is prefilled before it
    assert list(map(str, trace.scheduler._waiting)) == ["b", "c"]
    while trace.ended != ["a"]:
        trace.step()
    assert trace.step() == "CE1 b0:7"
    assert trace.steps(3) == ["TG1 b7:8", "CE1 c0:5", "TG1 c5:6"]


def test_the_first_takes_pages_from_a_later_one_amid_its_prompt():
    trace = Trace(5, prefill_chunk_size=8)
    a = trace.add("a", 5, new=5)
    trace.add("b", 5, new=3)
    assert trace.steps(2) == ["CE1 a0:5 b0:3", "TG1 a5:6"], "b waits for a third page"
    trace.scheduler.requeue(a)
    assert trace.pages("b") == 2
    assert trace.step() == "CE1 a0:7 b0:1", "b begins again"
    assert trace.pages("b") == 1 and trace.scheduler.preemptions == 2


def test_what_runs_gives_way_to_an_earlier_prompt():
    trace = Trace(5, prefill_chunk_size=4, enable_in_flight_batching=True)
    a = trace.add("a", 4, new=6)
    trace.add("b", 4, new=6)
    assert trace.steps(2) == ["CE1 a0:4", "CE1 a4:5 b0:4"]
    trace.scheduler.requeue(a)
    assert trace.step() == "CE1 b4:5 a0:4"
    assert trace.pages("a") == 2 and trace.cache.free_pages == 0
    assert trace.step() == "TG1 b5:6"
    assert trace.step() == "CE1 a4:6 b0:2", "b had no page for its next token"


def test_an_unknown_request_is_not_requeued():
    trace = Trace(8)
    context = trace.add("a", 3)
    trace.step()
    trace.scheduler.requeue(context)
    assert trace.pages("a") is None and trace.scheduler.preemptions == 1
    assert trace.step() == "CE1 a0:4"
    trace.scheduler.remove(RequestID("a"))
    trace.scheduler.requeue(context)
    assert len(trace.scheduler) == 0 and trace.step() is None


def test_a_request_that_is_read_again_keeps_its_place():
    trace = Trace(20)
    a, _ = trace.add("a", 3), trace.add("b", 3)
    trace.step()
    trace.scheduler.requeue(a)
    assert trace.steps(2) == ["CE1 a0:4", "TG1 a4:5 b3:4"]


def test_a_request_that_leaves_amid_a_step():
    trace = Trace(8)
    trace.add("a", 3)
    trace.add("b", 3)
    trace.schedule()
    batch = list(trace.inputs.batch.values())
    trace.scheduler.remove(RequestID("a"))
    trace.scheduler.remove(RequestID("a"))
    for context in batch:
        context.update(EOS)
    assert [str(key) for key in trace.scheduler.update(batch)] == ["b"]
    assert trace.cache.free_pages == 8 and len(trace.scheduler) == 0


def test_several_steps_as_far_as_all_have_room():
    trace = Trace(30, max_num_steps=8)
    trace.add("a", 3, new=20)
    assert trace.steps(2) == ["CE1 a0:3", "TG8 a3:4"]
    trace.add("b", 3, new=6)
    assert trace.steps(3) == ["CE1 b0:3", "TG5 a11:12 b3:4", "TG6 a16:17"]
    assert trace.ended == ["a"]


@pytest.mark.parametrize(
    ("pages", "steps"), [(3, 2), (4, 4), (5, 6), (6, 6)], ids=lambda value: str(value)
)
def test_several_steps_as_far_as_pages_are_free(pages, steps):
    trace = Trace(pages, max_num_steps=6)
    trace.add("a", 4, new=2 * pages - 3)
    trace.step()
    # two pages are full; the others hold tokens 4, 5, …
    assert trace.schedule() == f"TG{min(steps, 2 * pages - 4)} a4:5"


def test_several_steps_preempt_nobody():
    trace = Trace(7, max_num_steps=6)
    trace.add("a", 3, new=8)
    trace.add("b", 4, new=8)
    trace.step()
    # of three free pages a needs one for every second token from its third on, b from its first on
    assert trace.step() == "TG3 a3:4 b4:5"
    assert trace.scheduler.preemptions == 0


def test_a_sequence_runs_in_the_pages_of_its_largest_step():
    """Of a window and a chunk, also if a call may have more steps than a chunk has tokens; with a page less it is
    refused, or the text is too short for its largest step to begin at the worst place.
    """
    refused = 0
    sizes = itertools.product((1, 3, 4), (1, 2, 5), (1, 2, 4), (1, 3, 9), range(2, 24, 3))
    for size, window, chunk, steps, length in sizes:
        held = PagePool(99, window).most_pages(length - 1, chunk, size)
        for pages in (held, held - 1) if held > 1 else (held,):
            trace = Trace(pages, size, prefill_chunk_size=chunk, max_num_steps=steps)
            trace.cache = RequestPages(PageManager(pages, size, window=window))
            trace.scheduler = TextScheduler(trace.cache, trace.scheduler._limits)
            if pages < held:
                with pytest.raises(InputError, match=f"needs {held} pages"):
                    trace.add("a", length // 2, new=length - length // 2)
                refused += 1
                continue
            one = trace.add("a", length // 2, new=length - length // 2)
            while trace.schedule():
                # the tokens that the next one sees, and all that the steps write
                end = one.active_idx + trace.inputs.num_steps - 1
                table = trace.cache.pages.pages(one.request_id)
                seen = [n for n in range(one.start_idx - window + 1, end) if n >= 0]
                assert all(table[place // size] < pages for place in seen)
                for _ in range(trace.inputs.num_steps):
                    one.update(0)
                trace.cache.step([one])
                trace.scheduler.update([one])
            assert one.is_done and len(one.generated_tokens) == length - length // 2
    assert refused > 100


def test_a_request_without_a_length_limit():
    class Endless(TextContext):
        max_length = None

        def __post_init__(self) -> None:
            self.max_length = 100
            super().__post_init__()
            self.max_length = None

    trace = Trace(4, max_num_steps=3)
    for length in (9, 8):
        context = Endless(request_id=RequestID("a"), tokens=np.arange(length), max_length=100)
        context.max_length = None
        if length == 9:
            with pytest.raises(InputError, match="needs 5 pages of the KV cache at 10 tokens"):
                trace.scheduler.add(context)
        else:
            trace.scheduler.add(context)
    assert trace.schedule() == "CE1 a0:8"


def test_executions_of_several_steps_have_a_time_limit():
    trace = Trace(100, max_num_steps=100, max_seconds=0.5)
    trace.add("a", 3, new=150)
    assert trace.steps(2) == ["CE1 a0:3", "TG1 a3:4"], "nothing was measured"
    trace.scheduler.record_step(9.0, 0)
    assert trace.schedule() == "TG1 a4:5", "no step, no measurement"
    trace.scheduler.record_step(0.5, 4)
    assert trace.schedule() == "TG4 a4:5"
    trace.scheduler.record_step(0.125, 2)  # the mean of 1/8 and 1/16 is 3/32
    assert trace.schedule() == "TG5 a4:5"
    trace.scheduler.record_step(10, 1)
    assert trace.schedule() == "TG1 a4:5"
    for _ in range(60):
        trace.scheduler.record_step(0.0, 1)
    assert trace.schedule() == "TG100 a4:5"


def test_limits():
    assert SchedulerLimits() == SchedulerLimits(
        max_batch_size=1, max_ce_batch_size=192, prefill_chunk_size=8192, enable_chunked_prefill=True,
        enable_in_flight_batching=False, max_num_steps=1, max_seconds=None,
        max_batch_context_length=None, mixed_step_ratio=None,
    )  # fmt: skip
    for name in (
        "max_batch_size", "max_ce_batch_size", "prefill_chunk_size", "max_num_steps", "max_batch_context_length",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"SchedulerLimits: {name} is 0; expected at least 1"):
            SchedulerLimits(**{name: 0})
        SchedulerLimits(**{name: 1})
    for seconds in (0, -0.1):
        with pytest.raises(ValueError, match=f"max_seconds is {seconds}; expected above 0"):
            SchedulerLimits(max_seconds=seconds)
    assert SchedulerLimits(max_seconds=0.01).max_seconds == 0.01
    for ratio in (1, 0.5):
        with pytest.raises(ValueError, match=f"mixed_step_ratio is {ratio}; expected above 1"):
            SchedulerLimits(mixed_step_ratio=ratio)
    assert SchedulerLimits(mixed_step_ratio=1.1).mixed_step_ratio == 1.1


def test_the_estimate_of_a_chunk():
    times = StepEstimate()
    assert times.chunk(1.0) is None
    times.record_prompts(0.2, 63, mixed=False)  # too short to tell
    times.record_plain(0.01, 0)
    assert times.plain is None
    times.record_plain(0.04, 4)
    assert times.plain == pytest.approx(0.01) and times.chunk(1.0) is None
    times.record_prompts(0.064, 64, mixed=False)  # 1 ms a token
    assert [times.chunk(share) for share in (0.1, 1.0, 1.59, 1.61, 4)] == [8, 8, 8, 16, 40]
    times.record_prompts(9.0, 64, mixed=False)  # of mixed steps alone from now on
    assert times.chunk(4) == 40
    times.record_prompts(0.01 + 0.024, 8, mixed=True)  # 3 ms a token: 2 with the one before
    assert times.chunk(8) == 40
    for _ in range(2):  # no token is taken for less than half of the last estimate
        times.record_prompts(0.001, 8, mixed=True)
    assert times.chunk(8) == int(80 / (2 * 0.75**2)) // 8 * 8


def test_page_tables_reserve_all_or_nothing():
    cache = RequestPages(PageManager(3, 2, True))
    assert (cache.page_size, cache.total_num_pages, cache.free_pages) == (2, 3, 3)
    a = TextContext(tokens=np.arange(4), max_length=9)
    b = TextContext(tokens=np.arange(5), max_length=9)
    assert cache.open(a) and not cache.open(a)
    cache.alloc(a)
    a.update(7)
    cache.step([a])
    cache.reserve([a], 1)
    assert cache.free_pages == 0 and cache.contains(a)
    cache.reserve([a], 2)
    assert cache.fits([a], 2) and not cache.fits([a], 3)
    assert cache.missing_pages(a, 2) == 0 and cache.missing_pages(a, 3) == 1
    with pytest.raises(OutOfPagesError):
        cache.reserve([a, b], 1)
    assert not cache.contains(b) and (b.start_idx, b.active_idx) == (0, 5)
    # b's first tokens are cached, but it has not run
    assert (cache.opened_tokens, cache.reused_tokens) == (4, 0)
    cache.close(b.request_id)
    cache.close(a.request_id)
    cache.reserve([b], 2)
    assert b.start_idx == 4 and cache.free_pages == 0
    assert (cache.opened_tokens, cache.reused_tokens) == (9, 4)
    cache.pages.check()


@pytest.mark.parametrize(("pages", "kept"), [(4, (0, 0)), (5, (2, 0)), (6, (2, 2))])
def test_drafted_tokens_take_no_pages_from_other_requests(pages, kept):
    trace = Trace(pages, max_num_steps=3)
    a, b = trace.add("a", 3, new=5), trace.add("b", 3, new=5)
    assert trace.step() == "CE1 a0:3 b0:3"
    for one in (a, b):
        one.set_draft([1, 2])
    assert trace.schedule() == "TG1 a3:4 b3:4", "a step that verifies is one step"
    assert (a.draft_length, b.draft_length) == kept
    assert [trace.pages(name) for name in "ab"] == [2 + bool(n) for n in kept]
    assert trace.scheduler.preemptions == 0


def test_a_batch_with_one_draft_runs_one_step():
    trace = Trace(20, max_num_steps=3)
    a, _ = trace.add("a", 3, new=9), trace.add("b", 3, new=9)
    assert trace.step() == "CE1 a0:3 b0:3"
    a.set_draft([1])
    assert trace.schedule() == "TG1 a3:4 b3:4"
    a.set_draft(())
    assert trace.schedule() == "TG3 a3:4 b3:4"
    two = Trace(20, max_num_steps=2)
    two.add("a", 3, new=9)
    assert two.steps(2) == ["CE1 a0:3", "TG2 a3:4"]


def test_steps_that_verify_drafts_are_repeated_where_the_pipeline_does():
    """As many as fit: each gives a token at least to each request."""
    trace = Trace(20, max_num_steps=3, repeats_drafts=True)
    a, b = trace.add("a", 3, new=9), trace.add("b", 3, new=9)
    assert trace.step() == "CE1 a0:3 b0:3"
    a.set_draft([1])
    assert trace.schedule() == "TG3 a3:4 b3:4"
    b.set_draft([1, 2])
    assert trace.schedule() == "TG3 a3:4 b3:4"
    b.max_length = b.end_idx + 2
    assert trace.schedule() == "TG2 a3:4 b3:4"
    few = Trace(6, max_num_steps=3, repeats_drafts=True)
    a, b = few.add("a", 3, new=9), few.add("b", 3, new=9)
    assert few.step() == "CE1 a0:3 b0:3"
    a.set_draft([1])
    b.set_draft([1])
    assert few.schedule() == "TG2 a3:4 b3:4"


def test_drafted_tokens_are_not_counted_twice_as_future_pages():
    """The pages that a running request needs until its end hold its drafted tokens too."""
    trace = Trace(5, enable_in_flight_batching=True)
    a = trace.add("a", 3, new=2)  # holds at most 4 tokens
    assert trace.step() == "CE1 a0:3"
    trace.add("b", 5, new=1)
    a.max_length = (
        8  # it may hold 7 tokens, in 4 pages: 3 free ones are not enough for b and one for a
    )
    a.set_draft([1, 2])
    assert trace.step() == "TG1 a3:4"
    other = Trace(5, enable_in_flight_batching=True)
    a = other.add("a", 1, new=3)  # holds at most 3 tokens in 2 pages, of which it gets both now
    assert other.step() == "CE1 a0:1"
    a.set_draft([1])
    other.cache.alloc(a)
    other.add("b", 6, new=1)
    assert other.step() == "CE1 a1:2 b0:6"


def test_a_request_that_goes_back_waits_if_tokens_are_read_again():
    trace = Trace(20)
    a, b = trace.add("a", 3), trace.add("b", 3)
    assert trace.steps(3) == ["CE1 a0:3 b0:3", "TG1 a3:4 b3:4", "TG1 a4:5 b4:5"]
    trace.scheduler.truncate(a, 4)
    trace.scheduler.truncate(b, 3)
    # a reads its last token again, as a step of decoding does; b reads the last token of its prompt
    assert trace.scheduler.counts()["waiting"] == 1
    assert trace.steps(2) == ["CE1 b2:3", "TG1 a3:4 b3:4"]
    trace.scheduler.remove(RequestID("b"))
    trace.scheduler.truncate(b, 3)
    assert len(trace.scheduler) == 1 and trace.step() == "TG1 a4:5"
    shared = Trace(20, prefix=True)
    one = shared.add("a", 3)
    shared.steps(4)
    shared.scheduler.truncate(one, 4)  # within the second page, which is full
    assert shared.steps(2) == ["CE1 a2:4", "TG1 a4:5"]
    assert shared.scheduler.preemptions == 0


def test_a_request_that_can_never_run_is_refused():
    engine = Engine(4, 2, False, SchedulerLimits())
    with pytest.raises(InputError, match="needs 5 pages of the KV cache at 10 tokens"):
        engine.add([1, 2], 8)
    context = engine.add([1, 2], 7)
    with pytest.raises(ValueError, match="scheduled already"):
        engine.scheduler.add(context)


def test_the_last_request_gives_its_pages_back():
    engine = Engine(6, 2, False, SchedulerLimits(max_batch_size=4))
    first, second = engine.add([0, 1, 2], 6), engine.add([2, 1, 0], 6)
    engine.run()
    assert engine.scheduler.preemptions > 0
    for context, prompt in ((first, [0, 1, 2]), (second, [2, 1, 0])):
        assert context.generated_tokens.tolist() == generate(prompt, 9)


@pytest.mark.parametrize("pages", [7, 8])
@pytest.mark.parametrize("steps", [1, 6])
def test_further_steps_take_pages_from_nobody(pages, steps):
    engine = Engine(pages, 2, False, SchedulerLimits(max_batch_size=3, max_num_steps=steps))
    for length, new in ((1, 9), (2, 7), (3, 9)):
        engine.add(list(range(length)), new)
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_page_tables_have_one_owner():
    """No file but the scheduler's opens and extends the page tables of its requests."""
    source = Path(max.pipelines.__file__).parent
    owners = {
        "scheduler/scheduler.py", "kv_cache/request_pages.py", "kv_cache/several_caches.py",
    }  # fmt: skip
    calls = [
        f"{path.relative_to(source).as_posix()}:{node.lineno} calls {node.func.attr}"
        for path in sorted(source.rglob("*.py"))
        if path.relative_to(source).as_posix() not in owners
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("claim", "reuse_prefix", "alloc")
    ]
    assert not calls


def test_there_are_two_ways_to_a_page():
    """Other folders use `RequestPages`; its implementation alone calls what takes and drops pages of a `PagePool`."""
    source = Path(max.__file__).parent
    inner = {"page_manager", "page_pool", "prefix_lookup"}
    found: list[str] = []
    for path in sorted(source.rglob("*.py")):
        name = path.relative_to(source).as_posix()
        tree = ast.parse(path.read_text())
        if not name.startswith("pipelines/kv_cache/"):
            found += [
                f"{name} imports {node.module}"
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom)
                and (node.module or "").startswith("max.pipelines.kv_cache.")
                and (node.module or "").rpartition(".")[2] in inner
            ]
        elif Path(name).stem not in inner:
            found += [
                f"{name}:{node.lineno} calls {node.func.attr}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("take", "drop", "share", "share_part", "copy_content")
            ]
    assert not found


def test_requests_without_a_priority_have_priority_0():
    for other, first in ((-1, "b"), (1, "a")):
        scheduler = TextScheduler(RequestPages.of(9, 4), SchedulerLimits())
        for name, priority in (("a", None), ("b", other)):
            context = TextContext(tokens=np.array([1]), max_length=9, request_id=RequestID(name))
            scheduler.add(context, *() if priority is None else (priority,))
        (key,) = scheduler.schedule().batch
        assert key == RequestID(first)
