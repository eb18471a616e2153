"""The scheduler with a page manager and no model: every request ends, with the tokens it should."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from max.interfaces import BatchType, RequestID
from max.pipelines.core import InputError, TextContext
from max.pipelines.kv_cache.context_pages import ContextPages
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.scheduler import SchedulerLimits, TextScheduler

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
    """Runs batches of a scheduler on a cache that holds one token a place."""

    def __init__(self, pages: int, page_size: int, prefix: bool, limits: SchedulerLimits) -> None:
        self.cache = ContextPages(PageManager(pages, page_size, prefix))
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
        # a request that was preempted may find all but its last token in the cache: no prompt then
        assert inputs.batch_type == BatchType.CE or not prompts
        assert len(prompts) <= limits.max_ce_batch_size
        read = sum(c.active_length for c in prompts)
        if limits.enable_chunked_prefill:
            assert read <= limits.prefill_chunk_size
        else:
            assert read <= limits.prefill_chunk_size or len(prompts) == 1
        assert 1 <= inputs.num_steps <= limits.max_num_steps

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
    """Requests come, and leave, at any time."""

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


def test_limits_are_checked():
    with pytest.raises(ValueError, match="max_batch_size is 0"):
        SchedulerLimits(max_batch_size=0)


@pytest.mark.parametrize("pages", [7, 8])
@pytest.mark.parametrize("steps", [1, 6])
def test_further_steps_take_pages_from_nobody(pages, steps):
    engine = Engine(pages, 2, False, SchedulerLimits(max_batch_size=3, max_num_steps=steps))
    for length, new in ((1, 9), (2, 7), (3, 9)):
        engine.add(list(range(length)), new)
    engine.run()
    assert engine.scheduler.preemptions == 0
