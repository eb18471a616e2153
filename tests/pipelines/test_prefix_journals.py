"""Journals of cached prefixes: what damage and a cut leave, and in which order pages are used again."""

from __future__ import annotations

import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from max.pipelines.kv_cache.journal_reader import JournalReader
from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.prefix_file import PageGroup
from max.pipelines.kv_cache.prefix_journal import (
    Journal,
    JournalRecord,
    is_in_use,
    is_journal,
    pages_in_order,
    read_journal,
)
from tests.pipelines.test_kept_prefixes import PROMPTS, answers, pipeline_of, run

SIZES = (40, 24)


def pages_of(path: Path, begin: int = 0, key: str = "key", sizes=SIZES) -> list[Any]:
    """The sound pages: group, hash and content."""
    records = read_journal(path, key, sizes, begin)
    return [(r.group, r.hash, r.content) for r in records if r.hash]


@given(seed=st.integers(0, 99), at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_damaged_journal_gives_sound_pages_or_none(tmp_path_factory, seed, at, bit) -> None:
    path = tmp_path_factory.mktemp("journal") / "file"
    rng = random.Random(seed)
    journal, pages, ends = Journal(path, "key", SIZES), [], [0]
    for number in range(rng.randrange(5)):
        group = rng.randrange(2)
        pages.append((group, rng.randbytes(32), rng.randbytes(SIZES[group])))
        journal.append(*pages[-1], is_first=number % 2 == 0)
        ends.append(journal.num_bytes)
    assert pages_of(path) == pages and is_in_use(path) and not journal.is_removed
    records = list(read_journal(path, "key", SIZES))
    assert [r.end for r in records] == ends[1:]
    assert [r.is_first for r in records] == [n % 2 == 0 for n in range(len(pages))]
    assert [] == pages_of(path, key="other") == pages_of(path, sizes=(40, 25))
    assert [] == pages_of(path, sizes=(40,))
    for number, end in enumerate(ends[1:], 1):
        assert pages_of(path, end) == pages[number:]
    journal.close()
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[int(at * len(whole))] ^= 1 << bit
    path.write_bytes(damaged)
    assert set(pages_of(path)) <= set(pages) and len(pages_of(path)) < max(len(pages), 1)
    # a record that was cut off is no damage
    path.write_bytes(whole[: int(at * len(whole))])
    assert pages_of(path) == pages[: len(pages_of(path))]
    records = list(read_journal(path, "key", SIZES))
    assert all(r.hash for r in records) or records == [JournalRecord(0, b"", b"", 0, sys.maxsize)]
    path.unlink()
    assert pages_of(path) == [] and not is_in_use(path)


def group_of(*hashes: bytes) -> PageGroup:
    return PageGroup(8, hashes, lambda place: None)


def test_the_first_pages_of_what_was_used_last_are_written_first() -> None:
    # two sequences of all tokens, and the windows of both: the first pages of a sequence are used last
    whole = group_of(b"a2", b"a1", b"a0", b"b3", b"b2", b"b1", b"b0")
    window = group_of(b"a2", b"b2", b"b3")
    groups = [window, whole]
    order = [(number, groups[number].hashes[place]) for number, place in pages_in_order(groups)]
    assert order == [
        (1, b"b0"), (1, b"b1"), (0, b"b2"), (1, b"b2"), (0, b"b3"), (1, b"b3"),
        (1, b"a0"), (1, b"a1"), (0, b"a2"), (1, b"a2"),
    ]  # fmt: skip
    assert list(pages_in_order([group_of(), group_of()])) == []


def test_what_was_written_before_a_cut_serves(tmp_path: Path) -> None:
    """Three prompts of six full pages, of which the last one was used last."""
    pipeline = pipeline_of(None)
    alone, _ = answers(pipeline, PROMPTS)
    written = pipeline_of(tmp_path)
    again, _ = answers(written, PROMPTS)
    assert again == alone
    (main,) = tmp_path.iterdir()
    main.unlink()
    store = written._prefixes
    assert store is not None
    store._kept = [set()]
    run(written.new_prefixes())
    (path,) = tmp_path.iterdir()
    assert is_journal(path)
    store._close()  # killed
    sizes = written.kv_managers[0].page_sizes()
    records = list(read_journal(path, store._key, sizes))
    assert [record.is_first for record in records] == [True] + [False] * 17
    os.truncate(path, records[9].end + 100)
    # of ten pages the six of the last prompt, and the first four of the one before
    again, stats = answers(pipeline_of(tmp_path), PROMPTS)
    assert again == alone and stats.reused_tokens == (6 + 4) * 16


class Cache:
    """Pools that a reader fills.

    Args:
        num_pages: The pages of each of two pools.
    """

    def __init__(self, num_pages: int) -> None:
        self.pools = [PagePool(num_pages) for _ in SIZES]
        self.kept: list[set[bytes]] = [set() for _ in SIZES]

    def reader_of(self, path: Path) -> JournalReader:
        def fill(group: int, page_hash: bytes, content: bytes) -> bool:
            return self.pools[group].fill(page_hash) is not None

        return JournalReader(path, "key", SIZES, self.pools, fill)

    @property
    def order(self) -> list[bytes]:
        """The contents of the first pool, in the order in which they are lost."""
        return [page_hash for page_hash, _ in self.pools[0].cached_contents()]


def write_batch(journal: Journal, *hashes: bytes) -> None:
    for number, page_hash in enumerate(hashes):
        journal.append(0, page_hash, page_hash * 20, is_first=number == 0)


def test_the_first_pages_of_each_batch_are_lost_last(tmp_path: Path) -> None:
    cache, journal = Cache(8), Journal(tmp_path / "file", "key", SIZES)
    write_batch(journal, b"a0", b"a1", b"a2")
    write_batch(journal, b"b0", b"b1")
    reader = cache.reader_of(journal.path)
    assert reader.read(None, cache.kept) == (5, 5 * 40)
    assert cache.order == [b"a2", b"a1", b"a0", b"b1", b"b0"]
    # a batch that is read in parts, a page of which a request takes meanwhile
    write_batch(journal, b"c0", b"c1", b"c2")
    assert reader.read(1, cache.kept) == (1, 40)
    (page,) = cache.pools[0].hold([b"c0"])
    assert reader.read(1, cache.kept) == (1, 40)
    assert cache.order[-1] == b"c1"
    cache.pools[0].drop(page)
    assert reader.read(None, cache.kept) == (1, 40)
    assert cache.order == [b"a2", b"a1", b"a0", b"b1", b"b0", b"c2", b"c1", b"c0"]
    # of what has no room the first pages are filled
    small = Cache(2)
    assert small.reader_of(journal.path).read(None, small.kept) == (2, 8 * 40)
    assert small.order == [b"a1", b"a0"]
    journal.close()


def test_damage_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path / "file", "key", SIZES)
    begins = []
    for number in range(6):
        begins.append(journal.num_bytes)
        journal.append(0, bytes([number]) * 2, bytes([number]) * 40)

    def damage(place: int, content: bytes) -> None:
        with journal.path.open("r+b") as file:
            file.seek(place)
            file.write(content)

    cache = Cache(8)
    reader = cache.reader_of(journal.path)
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        damage(begins[1] + 30, b"x")
        damage(begins[3] + 30, b"x")
        assert reader.read(None, cache.kept) == (4, 4 * 40)
        (said,) = caplog.messages
        assert said == (
            f"cached prefixes: 2 records of {journal.path} are damaged, the first one at byte {begins[1]}"
        )
        # pages that the engine appends are read, and nothing twice
        journal.append(0, b"new", b"n" * 40)
        assert reader.read(None, cache.kept) == (1, 40) and len(caplog.messages) == 1
        assert cache.kept[0] == {b"\0\0", b"\2\2", b"\4\4", b"\5\5", b"new"}
        # no record has such a group: where the next one begins is not known
        caplog.clear()
        damage(begins[4], b"\xff" * 4)
        reader = cache.reader_of(journal.path)
        assert reader.read(None, cache.kept)[1] == 2 * 40
        journal.append(0, b"later", b"l" * 40)
        assert reader.read(None, cache.kept) == (0, 0)
        (said,) = caplog.messages
        assert (
            f"3 records of {journal.path} are damaged, the first one at byte {begins[1]};" in said
        )
        assert said.endswith("what follows the last of them is not read")
        # a file of which nothing is read, and one that ends within a record
        caplog.clear()
        damage(30, b"\xff")
        assert cache.reader_of(journal.path).read(None, cache.kept) == (0, 0)
        assert "1 records" not in caplog.text
        assert f"a record of {journal.path} is damaged, at byte 0;" in caplog.text
        caplog.clear()
        whole = Journal(tmp_path / "other", "key", SIZES)
        write_batch(whole, b"a0", b"a1")
        os.truncate(whole.path, whole.num_bytes - 1)
        assert cache.reader_of(whole.path).read(None, cache.kept)[1] == 40
        assert not caplog.messages
        whole.close()
    journal.close()


def test_a_damaged_journal_is_said_and_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that reads it writes the sound pages to one file, and says what is lost."""
    pipeline = pipeline_of(tmp_path)
    pool = pipeline.kv_managers[0].pages.pools[0]
    for number in range(4):
        assert pool.fill(bytes([number])) is not None
    run(pipeline.new_prefixes())
    store = pipeline._prefixes
    assert store is not None
    store._close()
    (path,) = tmp_path.iterdir()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with caplog.at_level(logging.WARNING, "max.pipelines"):
        following = pipeline_of(tmp_path)
        following.load_prefixes()
        for _ in range(3):
            following.read_shared_prefixes()
    (said,) = [each for each in caplog.messages if "damaged" in each]
    assert f"a record of {path} is damaged" in said
    assert len(following.kv_managers[0].pages.pools[0].cached_contents()) == 3
    following.save_prefixes()
    (left,) = tmp_path.iterdir()
    assert left == store._path
