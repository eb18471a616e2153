"""Reads on in the journal of another engine, and fills a cache with its pages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from max.pipelines.kv_cache.page_pool import PagePool
from max.pipelines.kv_cache.prefix_journal import JournalRecord, read_journal

__all__ = ["JournalReader"]

logger = logging.getLogger("max.pipelines")


class JournalReader:
    """A journal, and how far it was read.

    Args:
        path: The file.
        key: Its key.
        page_bytes: The bytes of a page of each group.
        pools: The pages of each group.
        fill: Fills a page of a group with a content, by its hash; returns whether it did.
    """

    def __init__(
        self,
        path: Path,
        key: str,
        page_bytes: Sequence[int],
        pools: Sequence[PagePool],
        fill: Callable[[int, bytes, bytes], bool],
    ) -> None:
        self.path, self._key, self._page_bytes = path, key, page_bytes
        self._pools, self._fill = pools, fill
        self.end = 0
        """The place behind the last record that was read."""
        self._batch: list[JournalRecord] = []
        """What was filled of the last batch, without contents."""
        self._is_told = False

    def read(self, most_bytes: int | None, file_hashes: Sequence[set[bytes]]) -> tuple[int, int]:
        """Fills the cache with the next pages, and warns of the first damage.

        Args:
            most_bytes: The bytes of contents after which it stops; None: it reads all.
            file_hashes: For each group the hashes of pages in files; those that were read are added.

        Returns:
            The number of filled pages, and the bytes of contents that were read.
        """
        count = read = 0
        damaged: list[JournalRecord] = []
        for record in read_journal(self.path, self._key, self._page_bytes, self.end):
            self.end = record.end
            if record.is_first:
                self._renew()
                self._batch = []
            if not record.hash:
                damaged.append(record)
                continue
            file_hashes[record.group].add(record.hash)
            if self._fill(record.group, record.hash, record.content):
                count += 1
                self._batch.append(record)
            read += len(record.content)
            if most_bytes is not None and read >= most_bytes:
                break
        self._renew()
        if damaged and not self._is_told:
            self._is_told = True
            self._tell(damaged)
        return count, read

    def _renew(self) -> None:
        """Lets the first pages of a batch count as those that were used last, as they did where it was written."""
        for record in reversed(self._batch):
            self._pools[record.group].renew(record.hash)

    def _tell(self, records: Sequence[JournalRecord]) -> None:
        are = f"{len(records)} records of {self.path} are damaged, the first one at"
        if len(records) == 1:
            are = f"a record of {self.path} is damaged, at"
        rest = "; what follows the last of them is not read" if self.end == sys.maxsize else ""
        logger.warning("cached prefixes: %s byte %d%s", are, records[0].begin, rest)
