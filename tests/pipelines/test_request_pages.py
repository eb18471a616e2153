"""The pages of requests: what they share, what they hold besides pages, and what they read again."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from max.interfaces import ImageMetadata, RequestID
from max.pipelines.core.text_context import TextContext
from max.pipelines.core.vision_context import TextAndVisionContext
from max.pipelines.kv_cache.known_pages import Miss, MissReason
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_pool import pages_of
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots

SIZE = 4
IMAGE = 9
"""The token that stands for images."""


def text(*tokens: int, **more: Any) -> TextContext:
    return TextContext(tokens=np.array(tokens), max_length=60, **more)


def vision(length: int, *images: tuple[int, int, int]) -> TextAndVisionContext:
    """A prompt with images, each as first token, end and hash."""
    tokens = np.arange(20, 20 + length)
    for begin, end, _ in images:
        tokens[begin:end] = IMAGE
    return TextAndVisionContext(
        tokens=tokens,
        max_length=60,
        vision_token_ids=[IMAGE],
        images=[
            ImageMetadata(start_idx=b, end_idx=e, pixel_values=np.zeros(1), image_hash=h)
            for b, e, h in images
        ],
    )


def cache(prefix: bool = True) -> RequestPages:
    return RequestPages.of(20, SIZE, prefix)


def read(pages: RequestPages, context: TextContext) -> int:
    """Reads a prompt as a scheduler does, and ends the request; returns the number of tokens that were cached."""
    expected = pages.cached_length(context)
    pages.open(context)
    skipped = context.start_idx
    assert expected == skipped // SIZE * SIZE
    pages.alloc(context)
    context.update(0)
    pages.step(context)
    pages.close(context.request_id)
    pages.pages.check()
    return skipped


def read_parts(pages: RequestPages, context: TextContext) -> int:
    """As `read`, where pages are copied in part."""
    pages.open(context)
    skipped = context.start_idx
    pages.alloc(context)
    context.update(0)
    pages.step(context)
    pages.close(context.request_id)
    pages.pages.check()
    return skipped


def test_tokens_after_the_reusable_ones_are_not_kept() -> None:
    for length in range(2, 4 * SIZE):
        for reusable in range(length + 2):
            pages = cache()
            for pool in pages.pages.pools:
                pool.copy = lambda source, target, length: None
            untouched = pages.free_pages
            for number in range(3):
                # the last token of a prompt is always read
                found = min(reusable, length - 1) if number else 0
                assert read_parts(pages, text(*range(length), reusable_tokens=reusable)) == found
            kept = sum(len(pool._hash_of_page) for pool in pages.pages.pools)
            assert kept == pages_of(min(reusable, length), SIZE)
            assert pages.free_pages == untouched


def test_prompts_skip_the_full_pages_of_their_first_tokens() -> None:
    numbers = random.Random(3)
    for length in range(1, 4 * SIZE):
        pages = cache()
        first = [numbers.randrange(50) for _ in range(length)]
        assert read(pages, text(*first)) == 0
        assert read(pages, text(*first, 99)) == length // SIZE * SIZE
        # the last token is read again
        assert read(pages, text(*first)) == (length - 1) // SIZE * SIZE
        assert pages.reused_tokens == length // SIZE * SIZE + (length - 1) // SIZE * SIZE
        assert pages.opened_tokens == 3 * length + 1


def test_prefixes_are_cached_only_where_that_is_asked_for() -> None:
    assert not RequestPages.of(4, 2).pages.enable_prefix_caching
    pages = cache(prefix=False)
    assert read(pages, text(*range(9))) == read(pages, text(*range(9))) == 0
    again = text(*range(9))
    pages.open(again)
    assert pages.miss(again) is None


@pytest.mark.parametrize(
    "echo, logs", [(True, 1), (True, 0), (False, 1)], ids=["both", "echo", "logs"]
)
def test_a_prompt_whose_log_probabilities_are_asked_for_is_read_as_a_whole(
    echo: bool, logs: int
) -> None:
    pages = cache()
    read(pages, text(*range(9)))
    context = text(*range(9), log_probabilities=logs, log_probabilities_echo=echo)
    whole = echo and bool(logs)
    assert pages.cached_length(context) == (0 if whole else 8)
    pages.open(context)
    assert context.start_idx == (0 if whole else 8)
    assert pages.miss(context) == (Miss(MissReason.NOT_SHARED, 0, 8) if whole else None)


def test_why_tokens_were_not_cached() -> None:
    pages = cache()
    read(pages, text(*range(9)))
    other = text(*range(4), 50, 51, 52, 53, 54)
    pages.open(other)
    assert pages.miss(other) == Miss(MissReason.CHANGED, 4, 4)


def test_a_request_whose_tokens_were_processed_skips_none() -> None:
    pages = cache()
    read(pages, text(*range(9)))
    context = text(*range(9))
    context.set_token_indices(start_idx=1)
    assert pages.cached_length(context) == 0
    pages.claim(context.request_id)
    assert pages.reuse_prefix(context) == 0
    assert context.start_idx == 1 and pages.pages.pages(context.request_id) == []


SALTS: list[dict[str, Any]] = [
    {},
    {"adapter": "a"},
    {"adapter": "ab"},
    {"adapter": "a", "adapter_scale": 2.0},
    {"adapter": "a", "adapter_scale": 0.0},
    {"cache_salt": "a"},
    {"cache_salt": "\ud800"},
    {"adapter": "\ud800"},
    {"adapter": "a", "cache_salt": "bc"},
    {"adapter": "ab", "cache_salt": "c"},
]


def test_pages_of_other_salts_and_adapters_are_not_shared() -> None:
    pages = RequestPages.of(200, SIZE, True)
    for salt in SALTS:
        assert read(pages, text(*range(9), **salt)) == 0, salt
    for salt in SALTS:
        assert read(pages, text(*range(9), **salt)) == 8, salt
    # a scale without an adapter, and that of the file, change nothing
    assert read(pages, text(*range(9), adapter_scale=2.0)) == 8
    assert read(pages, text(*range(9), adapter="a", adapter_scale=1.0)) == 8


def test_digests_of_salts_have_a_key_and_those_of_adapters_have_none(tmp_path: Path) -> None:
    plain, other, stored, again = (cache() for _ in range(4))
    stored.salt_folder = again.salt_folder = tmp_path
    salted, adapted = text(1, cache_salt="key"), text(1, adapter="a")
    # pages of an adapter may be stored: each engine knows them again
    assert plain._salt(adapted) == other._salt(adapted) != b""
    assert plain._salt(salted) != other._salt(salted)
    assert stored._salt(salted) == again._salt(salted) != plain._salt(salted)
    assert stored.salt_key == again.salt_key and len(stored.salt_key) == len(plain.salt_key)
    # files of pages outlive a version: the digests stay what they are
    for context, name in (
        (adapted, b"a"),
        (text(1, adapter="a", adapter_scale=1.0), b"a"),
        (text(1, adapter="a", adapter_scale=0.5), b"a*0.5"),
    ):
        data = len(name).to_bytes(8, "little") + name
        assert plain._salt(context) == hashlib.blake2b(data, digest_size=32).digest()


@pytest.mark.parametrize("number", [0, -2, 1, 2**62, -(2**63)])
def test_images_of_equal_hashes_share_pages(number: int) -> None:
    pages = cache()
    read(pages, vision(13, (3, 5, number)))
    assert read(pages, vision(13, (3, 5, number))) == 12
    # the page before the image does not depend on it
    read(pages, vision(13, (6, 9, number)))
    assert read(pages, vision(13, (6, 9, number ^ 1))) == 4


def test_pages_from_an_image_without_hash_on_are_not_shared() -> None:
    pages = cache()
    # a prompt without images has the same tokens
    read(pages, text(*vision(13, (7, 9, -1)).all_tokens))
    for _ in range(2):
        assert read(pages, vision(13, (7, 9, -1))) == 4
    last = vision(13, (7, 9, -1))
    pages.open(last)
    # what follows the image is none of the cache's
    miss = pages.miss(last)
    assert miss is not None and miss[1:] == (4, 3)
    pages = cache()
    for _ in range(2):
        # up to the first of several images
        assert read(pages, vision(17, (6, 7, 5), (8, 9, -1), (10, 11, 6), (12, 13, -1))) <= 8
    assert read(pages, vision(17, (6, 7, 5), (8, 9, -1))) == 8


def test_no_image_is_read_in_part() -> None:
    pages = cache()
    first = vision(14, (4, 8, 3), (9, 12, 4))
    pages.open(first)
    pages.alloc(first)
    first.update(0)
    # an image that ends where the kept tokens do is kept
    for length, kept in ((13, 13), (12, 12), (11, 9), (8, 8), (7, 4)):
        assert pages.keep(first, length) == first.start_idx == kept
        pages.pages.check()


class Adapters:
    """Counts the requests that hold adapters."""

    def __init__(self) -> None:
        self.held: list[RequestID] = []
        self.full = False

    def hold(self, context: Any) -> None:
        if self.full:
            raise OutOfPagesError(1, 0, 1)
        self.held.append(context.request_id)

    def release(self, request_id: RequestID) -> None:
        if request_id in self.held:
            self.held.remove(request_id)

    def attach(self, context: Any) -> None: ...

    def detach(self, request_id: RequestID) -> None: ...


def test_an_adapter_is_held_as_long_as_a_page_table() -> None:
    pages, adapters = cache(), Adapters()
    pages.adapters = adapters
    first, second = text(1, 2), text(3)
    assert pages.open(first) and not pages.open(first)
    assert adapters.held == [first.request_id]
    adapters.full = True
    with pytest.raises(OutOfPagesError):
        pages.open(second)
    assert not pages.contains(second) and pages.contains(first)
    pages.close(first.request_id)
    assert adapters.held == [] and not pages.contains(first)


def test_a_request_that_its_context_claims_gets_its_prefix_with_its_first_pages() -> None:
    pages, adapters = cache(), Adapters()
    read(pages, text(*range(9)))
    pages.adapters = adapters
    plain, context, other = text(*range(9)), text(*range(9)), text(*range(9))
    # by its identifier nothing is looked up
    pages.claim(plain.request_id)
    pages.alloc(plain)
    assert plain.start_idx == 0 and adapters.held == []
    pages.claim(context)
    pages.claim(other)
    assert context.start_idx == 0 and adapters.held == []
    pages.alloc(context)
    assert context.start_idx == 8 and adapters.held == [context.request_id]
    # once
    context.set_token_indices(start_idx=5)
    pages.alloc(context)
    pages.alloc(plain)
    assert context.start_idx == 5 and adapters.held == [context.request_id]
    # a table that was released is forgotten with what it waited for
    pages.release(other)
    pages.claim(other.request_id)
    pages.alloc(other)
    assert other.start_idx == 0 and adapters.held == [context.request_id]
    pages.pages.check()


def test_slots_and_tables_are_claimed_together() -> None:
    with pytest.raises(ValueError, match="recurrent states"):
        RequestPages(PageManager(4, 2, True), StateSlots(1))
    pages = RequestPages(PageManager(8, SIZE), StateSlots(1))
    first, second = text(1, 2, 3), text(4)
    with pytest.raises(ValueError, match="the replica is 1; there is one, 0"):
        pages.claim(first, 1)
    pages.open(first)
    with pytest.raises(OutOfSlotsError):
        pages.open(second)
    assert not pages.contains(second)
    pages.close(first.request_id)
    assert pages.open(second)


@pytest.mark.parametrize("recurrent", [False, True])
def test_truncated_requests_read_again_what_they_must(recurrent: bool) -> None:
    pages = RequestPages(PageManager(8, SIZE), StateSlots(2) if recurrent else None)
    context = text(*range(6))
    pages.open(context)
    pages.alloc(context, 4)
    for token in range(4):
        context.update(token)
    pages.step(context)
    assert (context.start_idx, context.current_length) == (9, 10)
    # the tokens that the next step reads are none of the cache
    pages.truncate(context, 10)
    assert context.start_idx == 9
    pages.truncate(context, 8)
    assert context.start_idx == (0 if recurrent else 7)
    assert context.current_length == 8 and pages.pages.missing_pages(context.request_id, 7) == (
        2 if recurrent else 0
    )


def test_an_opening_that_leads_to_no_step_is_not_counted() -> None:
    pages = cache()
    read(pages, text(*range(9)))
    counts = pages.opened_tokens, pages.reused_tokens
    context = text(*range(9), 40)
    pages.open(context)
    assert (pages.opened_tokens, pages.reused_tokens) == (counts[0] + 10, counts[1] + 8)
    pages.retract(context.request_id)
    assert (pages.opened_tokens, pages.reused_tokens) == counts and not pages.contains(context)
    context.reset()
    pages.open(context)
    pages.close(context.request_id)
    with pytest.raises(KeyError):
        pages.retract(context.request_id)


def test_the_facts_of_a_cache() -> None:
    pages = cache()
    assert pages.replicas == (pages,) and pages.page_size == SIZE
    assert pages.page_shortage(20 * SIZE, 1) is None and pages.page_shortage(81, 1) == (21, 20)
    read(pages, text(*range(9)))
    pages.forget_prefixes()
    assert read(pages, text(*range(9))) == 0


def test_pages_follow_the_tokens() -> None:
    pages = cache(prefix=False)
    context = text(1, 2, 3, 4)
    pages.open(context)
    pages.alloc(context)
    assert pages.used_pages == 1
    context.update(5)
    # drafted tokens are written too
    context.set_draft((6, 7, 8, 9))
    assert pages.missing_pages(context, 1) == 2
    context.set_draft(())
    assert pages.missing_pages(context, 1) == 1
    # pages of steps that were not run are given back
    pages.alloc(context, 9)
    assert pages.used_pages == 4
    context.update(6)
    pages.step(context)
    assert context.start_idx == 5 and pages.used_pages == 2
    # a request without a table has no pages to cut
    pages.close(context.request_id)
    context.truncate(5)
    context.update(7)
    pages.truncate(context, 5)
    assert context.current_length == 5 and pages.used_pages == 0


def test_a_context_without_options_is_shared() -> None:
    class Plain:
        """A context of a pipeline of one's own: the protocol has no more."""

        request_id, log_probabilities, start_idx, current_length = RequestID("own"), 1, 0, 9
        all_tokens = np.arange(9)

    pages = cache()
    read(pages, text(*range(9)))
    assert pages.cached_length(Plain()) == 8  # type: ignore[arg-type]


def test_batches_get_pages_all_or_none() -> None:
    pages = RequestPages.of(4, SIZE, True)
    held, first, second = text(*range(5)), text(*range(30, 34)), text(*range(40, 49))
    pages.reserve([held], 1)
    with pytest.raises(OutOfPagesError):
        pages.reserve([held, first, second], 1)
    assert pages.contains(held) and not pages.contains(first) and not pages.contains(second)
    assert (first.start_idx, first.active_idx, pages.free_pages) == (0, 4, 2)
    # the token of the last step is not in the cache: 4 tokens and 5 more steps fill two pages
    assert pages.open(first) and pages.fits([held, first], 4)
    assert pages.missing_pages(first, 1) == 1 and pages.missing_pages(first, 5) == 2
    assert not pages.fits([held, first], 6)
    pages.reserve([first], 5)
    assert pages.free_pages == 0 and pages.used_pages == pages.total_num_pages == 4


def test_a_batch_without_room_is_as_it_was() -> None:
    pages = RequestPages.of(4, SIZE, True)
    held, second = text(*range(5)), text(*range(40, 49))
    pages.reserve([held], 1)
    # a prefix that was skipped is read again, as its pages are given back
    held.update(0)
    pages.step([held])
    again, chunk = text(*range(5), 6, 7), text(*range(5), 8, 9)
    chunk.set_token_indices(active_idx=6)
    with pytest.raises(OutOfPagesError):
        pages.reserve([again, chunk, second], 1)
    assert (again.start_idx, again.active_idx) == (0, 7)
    assert (chunk.start_idx, chunk.active_idx) == (0, 6)


def test_a_page_before_an_image_that_a_window_has_passed_is_not_kept() -> None:
    for window, kept in ((SIZE, 4), (12, 6)):
        pages = RequestPages(PageManager(8, SIZE, True, window))
        (pool,) = pages.pages.pools
        pool.copy = lambda source, target, length: None
        read(pages, vision(14, (6, 7, -1)))
        assert read(pages, vision(14, (6, 7, -1))) == kept
        assert sorted(pool._hash_of_page) == ([0] if window == SIZE else [0, 1])
