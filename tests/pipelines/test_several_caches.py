"""Several caches of one pipeline: pages of other sizes, windows, states, and one set of tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.interfaces import ImageMetadata
from max.pipelines.core import TextAndVisionContext, TextContext
from max.pipelines.generation.batch_pipeline import StepResult
from max.pipelines.generation.engine import Engine
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.several_caches import CachesOfModels, caches_of_models
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots
from max.pipelines.scheduler import SchedulerLimits, TextScheduler
from tests.pipelines.counting_pipeline import CountingPipeline, context, expected
from tests.pipelines.test_scheduler import EOS, LIMITS, REQUEST, generate, next_token


class Memory:
    """A cache of one group whose pages hold the token ids, read only where the window sees."""

    def __init__(self, pages: int, size: int, window: int | None, prefix: bool, slots: int) -> None:
        states = StateSlots(slots) if slots else None
        self.cache = RequestPages(PageManager(pages, size, prefix and not slots, window), states)
        self.rows = np.full((pages, size), -1)
        self.states: dict[int, list[int]] = {}
        self.window = window

    def read(self, context: TextContext) -> None:
        """Checks what a step sees of the earlier tokens."""
        key, end = context.request_id, context.start_idx
        table, size = self.cache.pages.pages(key), self.cache.page_size
        first = 0 if self.window is None else max(0, end - self.window + 1)
        seen = [int(self.rows[table[i // size], i % size]) for i in range(first, end)]
        assert seen == context.all_tokens[first:end].tolist(), "a stale page"
        if self.cache.slots is not None:
            state = self.states.get(self.cache.slots.slot(key), []) if end else []
            assert state == context.all_tokens[:end].tolist(), "a stale state"

    def write(self, context: TextContext, sequence: list[int]) -> None:
        key, size = context.request_id, self.cache.page_size
        table = self.cache.pages.pages(key)
        for i in range(context.start_idx, len(sequence)):
            page = table[i // size]
            users = [k for k in self.cache.pages.requests if page in self.cache.pages.pages(k)]
            assert users == [key], "two requests write one page"
            self.rows[page, i % size] = sequence[i]
        if self.cache.slots is not None:
            self.states[self.cache.slots.slot(key)] = list(sequence)


MEMORY = st.builds(
    Memory,
    pages=st.integers(10, 16),
    size=st.sampled_from([2, 3, 5]),
    window=st.sampled_from([None, None, 3, 6]),
    prefix=st.booleans(),
    slots=st.sampled_from([0, 0, 0, 6]),
)


@settings(max_examples=120, deadline=None)
@given(
    memories=st.lists(MEMORY, min_size=2, max_size=3),
    limits=LIMITS,
    requests=st.lists(REQUEST, min_size=1, max_size=7),
    backs=st.lists(st.integers(0, 5), max_size=12),
)
def test_each_request_gets_what_it_would_get_alone(memories, limits, requests, backs):
    caches = [memory.cache for memory in memories]
    scheduler = TextScheduler(caches_of_models(caches), limits)
    made = []
    for prompt, new in requests:
        one = TextContext(
            max_length=len(prompt) + new, tokens=np.array(prompt), eos_token_ids={EOS}
        )
        scheduler.add(one)
        made.append((one, prompt, new))
    for _ in range(10_000):
        inputs = scheduler.schedule()
        if inputs is None:
            break
        batch = list(inputs.batch.values())
        for one in batch:
            sequence = one.all_tokens[: one.active_idx].tolist()
            tokens = [next_token(sequence)]
            for _ in range(inputs.num_steps - 1):
                sequence.append(tokens[-1])
                tokens.append(next_token(sequence))
            for memory in memories:
                memory.read(one)
            for memory in memories:
                memory.write(one, sequence)
            for token in tokens:
                if not one.is_done:
                    one.update(token)
        scheduler.pages.step(batch)
        scheduler.update(batch)
        if backs and not batch[0].is_done:
            one = batch[0]
            scheduler.truncate(one, max(len(one.prompt_tokens), one.end_idx - backs.pop()))
        for cache in caches:
            cache.pages.check()
            assert cache.pages.requests == caches[0].pages.requests
    assert len(scheduler) == 0 and scheduler.pages.used_pages == 0
    for one, prompt, new in made:
        assert one.generated_tokens.tolist() == generate(prompt, len(prompt) + new)


def test_the_pages_of_all_caches():
    small, large = RequestPages(PageManager(3, 2)), RequestPages(PageManager(5, 3))
    with pytest.raises(ValueError, match="expected at least one"):
        caches_of_models([])
    assert caches_of_models([small]) is small
    pages = caches_of_models([small, large])
    assert isinstance(pages, CachesOfModels) and pages.page_size == 2
    assert (pages.total_num_pages, pages.free_pages, pages.used_pages) == (8, 3, 0)
    assert pages.page_shortage(6, 1) is None and pages.page_shortage(7, 1) == (4, 3)
    assert caches_of_models([large, small]).page_shortage(7, 1) == (4, 3)
    one = TextContext(tokens=np.arange(4), max_length=20)
    pages.reserve([one], 1)
    assert (pages.used_pages, pages.free_pages) == (4, 1)
    assert pages.missing_pages(one, 3) == 1 and pages.missing_pages(one, 1) == 0
    assert pages.fits(iter([one]), 3) and not pages.fits(iter([one]), 4)
    with pytest.raises(OutOfPagesError, match="2 more pages are needed, 1 of 3 are free"):
        pages.alloc(one, 4)
    assert pages.used_pages == 4, "in all caches or in none"
    with pytest.raises(OutOfPagesError, match="2 more pages are needed, 1 of 3 are free"):
        caches_of_models([large, small]).alloc(one, 4)
    assert pages.used_pages == 4, "whatever their order"
    pages.alloc(one)
    assert pages.used_pages == 4
    pages.alloc(one, 3)
    assert (small.used_pages, large.used_pages) == (3, 2)
    pages.close(one.request_id)
    assert pages.used_pages == 0 and not large.contains(one) and not pages._opened
    with pytest.raises(KeyError):
        pages.release(one)


def test_a_cache_without_a_free_slot():
    plain, slots = RequestPages(PageManager(9, 2)), StateSlots(1)
    pages = caches_of_models([plain, RequestPages(PageManager(9, 2), slots)])
    one, other = (TextContext(tokens=np.arange(3), max_length=9) for _ in range(2))
    pages.reserve([one], 1)
    with pytest.raises(OutOfSlotsError):
        pages.reserve([other], 1)
    assert plain.pages.requests == [one.request_id] and pages.slots is slots


def test_a_prefix_is_reused_as_far_as_all_caches_have_it():
    sizes = (2, 3, 4)
    caches = [RequestPages(PageManager(30, size, True)) for size in sizes]
    pages = caches_of_models(caches)
    first = TextContext(tokens=np.arange(25), max_length=40)
    pages.reserve([first], 1)
    first.update(7)
    pages.step([first])
    second = TextContext(tokens=np.arange(24), max_length=40)
    pages.reserve([second], 1)
    # the caches have 22, 21 and 20 tokens; a page that is full is never cut, so all keep 12
    assert second.start_idx == 12 and pages.reused_tokens == 12
    assert [len(cache.pages.pages(second.request_id)) for cache in caches] == [12, 8, 6]
    third = TextContext(tokens=np.arange(24), max_length=40)
    third.set_token_indices(start_idx=1)
    pages.claim(third.request_id)
    assert pages.reuse_prefix(third) == 0 and third.start_idx == 1
    pages.forget_prefixes()
    fourth = TextContext(tokens=np.arange(24), max_length=40)
    assert pages.open(fourth) and fourth.start_idx == 0
    for cache in caches:
        cache.pages.check()


def test_an_image_is_kept_in_all_caches_or_in_none():
    caches = [RequestPages(PageManager(30, size, True)) for size in (4, 6)]
    pages = caches_of_models(caches)

    def asked(tail: int) -> TextAndVisionContext:
        image = ImageMetadata(start_idx=7, end_idx=17, pixel_values=np.zeros(1), image_hash=3)
        tokens = np.array([*range(20, 27), *[7] * 10, *[tail] * 9])
        return TextAndVisionContext(
            tokens=tokens, max_length=40, vision_token_ids=[7], images=[image]
        )

    first, second = asked(1), asked(2)
    pages.reserve([first], 1)
    first.update(0)
    pages.step([first])
    pages.open(
        second
    )  # 16 and 12 tokens are cached: both are within the image, which begins after 7
    assert second.start_idx == 0
    third = asked(1)
    pages.open(third)
    assert third.start_idx == 24


class TwoCaches(CountingPipeline):
    """A pipeline with a second cache, whose pages it does not read."""

    def __init__(self) -> None:
        super().__init__(pages=20, prefix=True)
        self.other = RequestPages(PageManager(9, 5, True, more=[PagePool(6, 4)]))

    @property
    def kv_managers(self):
        return [self.cache, self.other]

    def execute(self, inputs):
        result = StepResult(super().execute(inputs))
        self.other.step(list(inputs.batch.values()))
        return result


def test_an_engine_with_two_caches():
    engine = Engine(pipeline := TwoCaches(), SchedulerLimits(max_batch_size=4))
    requests = [context([1, 2, n], 9) for n in range(5)]
    for one in requests:
        engine.submit(one)
    while not engine.idle:
        engine.step()
    for n, one in enumerate(requests):
        assert one.generated_tokens.tolist() == expected([1, 2, n], 9)
    # the pipeline's own `release` frees one of them only
    assert pipeline.other.used_pages == pipeline.cache.used_pages == 0
    pipeline.forget_prefixes()
    assert (
        not pipeline.other.pages.pools[0].cached_contents()
        and not pipeline.cache.pages.pools[0].cached_contents()
    )
