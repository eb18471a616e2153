"""The pages of a group of layers: pages that are not full, and copies of contents."""

from __future__ import annotations

import pytest

from max.pipelines.kv_cache.page_pool import PagePool

A, B = b"a", b"b"


def pool_with_copies(pages: int) -> tuple[PagePool, list[tuple[int, int, int]]]:
    pool, copies = PagePool(pages), list[tuple[int, int, int]]()
    pool.copy = lambda *copied: copies.append(copied)
    return pool, copies


def test_a_page_that_is_full_serves_as_such() -> None:
    pool, _ = pool_with_copies(3)
    full, other = pool.take(), pool.take()
    pool.share(full, A)
    # the page has a content already, and so has the hash
    pool.share_part(full, B)
    pool.share_part(other, A)
    assert pool.is_cached(A) and not pool.is_cached(B)
    pool.drop(full)
    pool.drop(other)
    assert pool.cached_contents() == [(A, full)]
    pool.check([])


def test_a_page_that_is_not_full_serves_by_copies_only() -> None:
    pool, _ = pool_with_copies(3)
    page = pool.take()
    pool.share_part(page, A)
    assert pool.is_cached(A)
    pool.drop(page)
    assert pool.cached_contents() == [] and pool.is_cached(A, on_device=True)
    pool.check([])


@pytest.mark.parametrize("free, in_use, copied", [(0, True, False), (1, True, True), (2, True, True),
                                                  (1, False, False), (2, False, True)])  # fmt: skip
def test_a_copy_needs_a_free_page_beside_its_source(free: int, in_use: bool, copied: bool) -> None:
    """`free` counts the source, if no table holds it."""
    pool, copies = pool_with_copies(4)
    pages = [pool.take() for _ in range(4)]
    source = pages.pop()
    pool.share(source, A)
    if not in_use:
        pool.drop(source)
    while pool.free_pages < free:
        pool.drop(pages.pop())
    held = [*pages, *[source] * in_use]
    page = pool.copy_content(A, 5)
    if copied:
        assert page is not None and page != source and copies == [(source, page, 5)]
        held.append(page)
    else:
        assert page is None and copies == []
    # the source is held as before, and its content stays
    pool.check(held)
    assert pool.is_cached(A)


def test_a_pool_without_copies_has_no_page_for_one() -> None:
    pool = PagePool(3)
    page = pool.take()
    pool.share(page, A)
    assert pool.copy_content(A, 5) is None
    pool.check([page])


def test_a_page_that_is_not_full_is_forgotten_with_its_content() -> None:
    for forget in (False, True):
        pool, _ = pool_with_copies(2)
        page = pool.take()
        pool.share_part(page, A)
        pool.drop(page)
        if forget:
            pool.forget()
        held = [pool.take(), pool.take()]
        assert not pool.is_cached(A)
        pool.check(held)
        # from now on the content is that of a full page
        pool.share(held[0], A)
        pool.drop(held[0])
        assert pool.cached_contents() == [(A, held[0])]


def test_pages_that_were_written_are_taken_first_after_a_reset() -> None:
    pool = PagePool(9)
    pages = [pool.take() for _ in range(4)]
    for page in pages[1:]:
        pool.share(page, bytes([page]))
        pool.drop(page)
    pool.forget()
    pool.check(pages[:1])
    # in the order of their release, then those that nobody had
    assert [pool.take() for _ in range(8)] == [*pages[1:], *(set(range(9)) - set(pages))]
