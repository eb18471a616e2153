"""Slots of recurrent states: each sequence continues from its own state in any schedule; memory of slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from max.driver import CPU
from max.dtype import DType
from max.interfaces import RequestID
from max.nn.kv_cache import KVCacheParams, RecurrentState
from max.pipelines.core import TextContext
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.memory import cache_bytes, pages_for_memory, state_bytes
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from tests.pipelines.test_scheduler import EOS, LIMITS, REQUEST, generate, next_token

STATES = (
    RecurrentState("conv", 3, (2, 5), DType.bfloat16),
    RecurrentState("scan", 2, (4,), DType.float32),
)
SLOT_BYTES = 3 * 10 * 2 + 2 * 4 * 4
PARAMS = KVCacheParams(DType.float32, 3, 4, page_size=5, states=STATES)


class RecurrentEngine:
    """Runs batches of a scheduler on a model whose state of a sequence, in a slot, is the list of its tokens."""

    def __init__(self, slots: int, pages: int, page_size: int, limits: SchedulerLimits) -> None:
        self.slots = StateSlots(slots)
        self.cache = RequestPages(PageManager(pages, page_size), self.slots)
        self.scheduler = TextScheduler(self.cache, limits)
        self.states: list[list[int]] = [[-1] for _ in range(slots)]
        self.ended: set[RequestID] = set()

    def add(self, prompt: list[int], new: int) -> TextContext:
        context = TextContext(
            max_length=len(prompt) + new, tokens=np.array(prompt), eos_token_ids={EOS}
        )
        self.scheduler.add(context)
        return context

    def step(self) -> list[TextContext]:
        inputs = self.scheduler.schedule()
        batch = [] if inputs is None else list(inputs.batch.values())
        owned = [self.slots.slot(context.request_id) for context in batch]
        assert len(set(owned)) == len(owned), "two sequences of a batch in one slot"
        for slot, context in zip(owned, batch, strict=True):
            # as kernels do: the state of a sequence without cached tokens is empty
            state = self.states[slot] if context.start_idx else []
            assert state == context.all_tokens[: context.start_idx].tolist(), "another's state"
            state = state + context.next_tokens.tolist()
            made = [next_token(state)]
            for _ in range(inputs.num_steps - 1):
                state.append(made[-1])
                made.append(next_token(state))
            self.states[slot] = state
            for token in made:
                if not context.is_done:
                    context.update(token)
        self.cache.step(batch)
        self.ended |= set(self.scheduler.update(batch))
        self.slots.check()
        return batch


class RecurrentScheduling(RuleBasedStateMachine):
    """Requests arrive, are cancelled and preempted; slots and pages run out."""

    @initialize(limits=LIMITS, more=st.integers(0, 1), paged=st.booleans())
    def begin(self, limits, more, paged):
        slots = limits.max_batch_size + more
        # without pages: one page per slot, as long as the longest sequence
        pages, size = (10, 2) if paged else (slots, 100)
        self.engine = RecurrentEngine(slots, pages, size, limits)
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
    def interrupt(self, data):
        key = data.draw(st.sampled_from(list(self.alive)))
        self.engine.scheduler.requeue(self.alive[key][0])

    @rule(n=st.integers(1, 4))
    def step(self, n):
        for _ in range(n):
            self.engine.step()
        self.take_ended()

    def take_ended(self):
        for key in self.engine.ended & self.alive.keys():
            context, prompt, new = self.alive.pop(key)
            assert context.generated_tokens.tolist() == generate(prompt, len(prompt) + new)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.step():
            pass
        self.take_ended()
        assert not self.alive, "a request did not end"
        assert self.engine.slots.free_slots == self.engine.slots.num_slots, "a slot is lost"


TestRecurrentScheduling = RecurrentScheduling.TestCase
TestRecurrentScheduling.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_slots_have_one_owner():
    slots, a, b, c = StateSlots(2), *map(RequestID, "abc")
    assert {slots.claim(a), slots.claim(b)} == {0, 1}
    with pytest.raises(ValueError, match="a has a slot already"):
        slots.claim(a)
    with pytest.raises(OutOfSlotsError, match="all 2 slots are in use") as error:
        slots.claim(c)
    assert (error.value.needed, error.value.free, error.value.total) == (1, 0, 2)
    slots.release(a)
    assert slots.free_slots == 1 and slots.claim(c) != slots.slot(b)
    for method in (slots.slot, slots.release):
        with pytest.raises(KeyError, match="a has no slot"):
            method(a)
    slots.check()
    with pytest.raises(ValueError, match="0 slots"):
        StateSlots(0)
    assert StateSlots(1).claim(a) == 0


def test_a_batch_without_a_slot_for_each_request_changes_nothing():
    cache = RequestPages(PageManager(9, 2), StateSlots(2))
    batch = [TextContext(max_length=9, tokens=np.arange(3)) for _ in range(3)]
    with pytest.raises(OutOfPagesError, match="2 slots"):
        cache.reserve(batch, 1)
    assert cache.free_pages == 9 and cache.slots.free_slots == 2
    assert cache.pages.requests == []
    cache.reserve(batch[:2], 1)
    assert cache.slots.free_slots == 0


def test_prefixes_are_not_shared_beside_states():
    with pytest.raises(ValueError, match="pages of a prefix do not hold"):
        RequestPages(PageManager(9, 2, True), StateSlots(2))
    with pytest.raises(ValueError, match="enable_prefix_caching is set"):
        KVCacheParams(DType.float32, 1, 1, page_size=1, states=STATES, enable_prefix_caching=True)


def test_the_parameters_of_states():
    with pytest.raises(ValueError, match="two states of one name"):
        KVCacheParams(DType.float32, 1, 1, page_size=1, states=(STATES[0], STATES[0]))
    for layers, shape in ((0, (1,)), (1, (2, 0))):
        with pytest.raises(ValueError, match="RecurrentState: x has"):
            RecurrentState("x", layers, shape)


def test_the_memory_of_states():
    assert state_bytes(PARAMS) == SLOT_BYTES
    page = 960
    assert cache_bytes(PARAMS, 2, max_batch_size=3, max_seq_len=11) == 9 * page + 3 * SLOT_BYTES
    size = {"max_batch_size": 3, "max_seq_len": 11}
    room = 9 * page + 3 * SLOT_BYTES
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=room) == (9,)
    assert pages_for_memory(PARAMS, 2, **size, available_bytes=room - 1) == (8,)
    # without attention: slots only
    assert cache_bytes(PARAMS, 0, max_batch_size=3, max_seq_len=11) == 3 * SLOT_BYTES
    assert pages_for_memory(PARAMS, 0, **size, available_bytes=3 * SLOT_BYTES) == (3,)
    with pytest.raises(ValueError, match="3 sequences need .* give a smaller max_batch_size"):
        pages_for_memory(PARAMS, 0, **size, available_bytes=3 * SLOT_BYTES - 1)


@pytest.mark.parametrize("layers", [2, 0])
def test_the_tensors_of_states(layers):
    cache = PagedKVCacheManager(
        PARAMS, num_layers=layers, num_pages=8, max_batch_size=4, max_seq_len=40, devices=[CPU()]
    )
    assert [state.shape for state in cache.states] == [(4, 3, 2, 5), (4, 2, 4)]
    assert [state.dtype for state in cache.states] == [DType.bfloat16, DType.float32]
    a, b = (TextContext(max_length=30, tokens=np.arange(7)) for _ in range(2))
    for one in (a, b):
        cache.claim(one.request_id)
        cache.alloc(one)
    inputs = cache.get_runtime_inputs([b, a])
    owned = [cache.slots.slot(one.request_id) for one in (b, a)]
    assert len(list(inputs)) == len(inputs) == 4 + 1 + 2
    assert inputs[4].to_numpy().tolist() == owned and inputs[4].dtype == DType.uint32
    assert list(inputs)[5:] == list(cache.states)
    if not layers:
        assert cache.pages.missing_pages(a.request_id, 40) == 0, "one page of any length"
    # a comes back after a preemption, in another slot
    for one in (a, b):
        one.update(1)
    cache.release(a.request_id)
    cache.claim(other := RequestID("other"))
    a.reset()
    cache.claim(a.request_id)
    cache.alloc(a)
    moved = cache.advance(inputs, [b, a])
    assert moved[4].to_numpy().tolist() == [owned[0], cache.slots.slot(a.request_id)]
    assert cache.slots.slot(other) == owned[1] != cache.slots.slot(a.request_id)
