"""Stores the cached prefixes of an engine for the next engine of the same model."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from max._version import __version__
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core import InputError
from max.pipelines.kv_cache.journal_reader import JournalReader
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.prefix_costs import (
    DIGEST_DIGITS,
    StoredFile,
    cost_of_key,
    files_to_remove,
    key_with_cost,
)
from max.pipelines.kv_cache.prefix_file import (
    PageGroup,
    read_pages,
    remove_abandoned_parts,
    write_pages,
)
from max.pipelines.kv_cache.prefix_journal import (
    Journal,
    is_in_use,
    is_journal,
    journal_path,
    pages_in_order,
)
from max.pipelines.kv_cache.several_caches import CachesOfReplicas

logger = logging.getLogger("max.pipelines")
StoredCache: TypeAlias = PagedKVCacheManager | CachesOfReplicas
"""The cache of a model, or those of its copies: one file has the pages of all."""
SUFFIX = ".prefixes"
"""The suffix of the files in the folder."""
SLOT_SUFFIX = ".slot"
"""The suffix of files that users name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_ADDITIONS = 16
"""The number of journals of earlier engines that an engine leaves; one file then replaces them."""
JOINED_SHARE = 0.75
"""The largest fraction of the folder's size limit that this single file takes."""
SHARED_BYTES = 64 << 20
"""The most bytes that an engine reads of other engines' journals at a time, between two batches."""
SHARED_S = 0.2
"""The least interval in seconds at which new requests make an engine look for other engines' pages."""
BYTES_PER_S = 256 << 20
"""The write rate of an idle engine in bytes per second."""


class PrefixStore:
    """The files with the cached pages of a model; created by :meth:`of`.

    One file contains what an engine wrote when it stopped. A running engine appends pages that no file has to a journal
    of its own. Engines of one model share the folder: each reads what the others append, and a journal is only removed
    by its engine, or after that has ended. One file replaces the journals when they leave too little room, or are many.
    One thread at a time uses a store; while a `PrefixWrite` runs, only requests may run beside it.

    Args:
        cache: The cache.
        path: The path of the main file.
        key: Identifies everything besides tokens on which the contents of pages depend.
        most_bytes: The maximum size of all pages, in bytes.
    """

    def __init__(self, cache: StoredCache, path: Path, key: str, most_bytes: int) -> None:
        self._cache, self._path, self._key, self._most_bytes = cache, path, key, most_bytes
        # for each group the hashes of the pages that the files contain
        self._kept: list[set[bytes]] = [set() for _ in range(cache.num_groups)]
        self._journal: Journal | None = None
        self._read: dict[Path, JournalReader] = {}
        """The journals of other engines, as far as each was read."""
        self._next_read = 0.0
        self._failed = False

    @classmethod
    def of(cls, config: PipelineConfig, cache: StoredCache) -> PrefixStore | None:
        """The store for a configuration; None if it has no folder, or prefixes are not cached.

        Args:
            config: The configuration, resolved.
            cache: The cache.
        """
        options = config.kv_cache_config
        if options.kv_cache_folder is None or not cache.pages.enable_prefix_caching:
            return None
        key = _key_of(config, cache)
        folder = options.kv_cache_folder.expanduser()
        for copy in cache.replicas:
            copy.salt_folder = folder
        path = folder / (key + SUFFIX)
        return cls(cache, path, key, int(options.kv_cache_folder_gb * 2**30))

    def _fill_from(self, path: Path) -> tuple[int, list[set[bytes]]]:
        """Fills empty pages with the pages of a file; a file that does not fit is ignored.

        Returns:
            The number of filled pages, and for each group the hashes of the file's pages.
        """
        count = 0
        hashes: list[set[bytes]] = [set() for _ in range(self._cache.num_groups)]
        for group, page_hash, content in read_pages(path, self._key, self._cache.page_sizes()):
            hashes[group].add(page_hash)
            count += self._cache.fill_page(group, page_hash, content)
        return count, hashes

    def load(self) -> None:
        """Fills the cache with the valid pages of the files."""
        count, hashes = self._fill_from(self._path)
        for kept, of_file in zip(self._kept, hashes, strict=True):
            kept |= of_file
        count += self._read_journals(None)
        remove_abandoned_parts(self._path.parent)
        if count:
            logger.info("KV cache: %d pages of prefixes from %s", count, self._path)

    def save(self) -> None:
        """Writes all cached pages to one file; warns if the folder cannot be written.

        While other engines of the model run, new pages are appended to the journal instead.
        """
        if any(is_in_use(path) for path in self._others()):
            groups = self._cache.cached_prefixes(self._most_bytes, self._kept)
            if _size_of(groups):
                self._append(groups)
        else:
            self._write(self._cache.cached_prefixes(self._most_bytes))
        self._close()

    def new_pages(self) -> PrefixWrite | None:
        """The cached pages that are in no file, to be written by another thread; None if there are none.

        Pages that other engines have appended are read first.
        """
        self._read_journals(SHARED_BYTES)
        groups = self._cache.cached_prefixes(self._most_bytes, self._kept)
        size = _size_of(groups)
        if not size:
            return None
        own = [] if self._journal is None else [self._journal.path]
        others = self._others()
        files = sum(_size_on_disk(path) for path in (self._path, *own, *others))
        ended = [path for path in others if not is_in_use(path)]
        if files + size <= self._most_bytes and len(ended) < MOST_ADDITIONS:
            return PrefixWrite(groups, self._append)
        # leave room for later pages, so that not every write replaces the whole file
        groups = self._cache.cached_prefixes(int(self._most_bytes * JOINED_SHARE))
        return PrefixWrite(groups, self._write)

    def read_shared(self) -> None:
        """Fills the cache with pages that other engines have appended, at most every `SHARED_S` seconds."""
        if time.monotonic() >= self._next_read:
            self._read_journals(SHARED_BYTES)
            self._next_read = time.monotonic() + SHARED_S

    def keep(self, action: str, name: str) -> tuple[int, int]:
        """Saves the cached pages to a file that nothing removes by itself, fills the cache from it, or removes it.

        Args:
            action: ``save``, ``restore`` or ``erase``.
            name: The name of the file.

        Returns:
            The tokens whose pages were saved or restored, and the size of the file.

        Raises:
            InputError: The name is no plain name, there is no such file, or it is of another model.
            OSError: The file cannot be written.
        """
        if not _NAME.fullmatch(name):
            raise InputError(
                f"{name[:100]!r} is no name of a file of prefixes",
                "Use up to 100 letters, digits, dots, dashes and underscores, with a letter or digit first.",
            )
        path = self._path.with_name(name + SLOT_SUFFIX)
        page_size = self._cache.pages.page_size
        # the pages of a group hold all tokens
        if action == "save":
            groups = self._cache.cached_prefixes(self._most_bytes)
            write_pages(path, self._key, groups)
            return len(groups[0].hashes) * page_size, _size_on_disk(path)
        size = _size_on_disk(path)
        if not path.is_file():
            raise InputError(f"there is no file of prefixes {name!r}", "Save it first.")
        if action == "erase":
            path.unlink(missing_ok=True)
            return 0, size
        _, hashes = self._fill_from(path)
        if not any(hashes):
            raise InputError(
                f"the file of prefixes {name!r} has no page of this model",
                "Save it with this model.",
            )
        return len(hashes[0]) * page_size, size

    def forget(self) -> None:
        """Deletes the files, so that the next engine does not load prefixes that were to be forgotten."""
        self._close()
        for path in (self._path, *self._others()):
            path.unlink(missing_ok=True)
        self._read = {}
        self._kept = [set() for _ in self._kept]

    def _others(self) -> list[Path]:
        """The journals of the model but that of this engine, by their time of creation."""
        own = None if self._journal is None else self._journal.path
        return sorted(p for p in self._path.parent.glob(f"{self._key}.*{SUFFIX}") if p != own)

    def _read_journals(self, most_bytes: int | None) -> int:
        """Fills the cache with pages that other engines have appended since the last call; returns their number."""
        count = read = 0
        for path in self._others():
            reader = self._read.get(path)
            if _size_on_disk(path) <= (reader.end if reader else 0):
                continue
            if reader is None:
                reader = self._read[path] = self._reader_of(path)
                if not is_journal(path):  # an addition of an earlier version
                    filled, hashes = self._fill_from(path)
                    count += filled
                    for kept, of_file in zip(self._kept, hashes, strict=True):
                        kept |= of_file
                    reader.end = _size_on_disk(path)
                    continue
            left = None if most_bytes is None else most_bytes - read
            filled, size = reader.read(left, self._kept)
            count, read = count + filled, read + size
            if most_bytes is not None and read >= most_bytes:
                break
        return count

    def _reader_of(self, path: Path) -> JournalReader:
        pools = [pool for copy in self._cache.replicas for pool in copy.pages.pools]
        sizes = self._cache.page_sizes()
        return JournalReader(path, self._key, sizes, pools, self._cache.fill_page)

    def _close(self) -> None:
        """Releases the journal."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _append(self, groups: Sequence[PageGroup]) -> None:
        """Appends pages to the journal."""
        count = 0
        try:
            if self._journal is not None and self._journal.is_removed:
                self._close()
            if self._journal is None:
                path = journal_path(self._path.parent, self._key, SUFFIX)
                sizes = self._cache.page_sizes()
                self._journal = Journal(path, self._key, sizes)
            for number, place in pages_in_order(groups):
                content = groups[number].content(place)
                if content is not None:
                    page_hash = groups[number].hashes[place]
                    self._journal.append(number, page_hash, content, is_first=count == 0)
                    self._kept[number].add(page_hash)
                    count += 1
            self._remove_others()
        except OSError as error:
            self._warn(error)
        else:
            self._failed = False
            logger.debug("KV cache: %d pages of prefixes to %s", count, self._journal.path)

    def _write(self, groups: Sequence[PageGroup]) -> None:
        """Writes the file that replaces all others but the journals of running engines."""
        try:
            count = write_pages(self._path, self._key, groups)
            hashes = [set(group.hashes) for group in groups]
            # only now, as the journals hold the pages until the whole file does
            self._remove_own()
            for path in self._others():
                # one that this engine has read, so that its pages were in the cache
                if path in self._read and not is_in_use(path):
                    path.unlink(missing_ok=True)
            self._kept = hashes
            self._remove_others()
        except OSError as error:
            self._warn(error)
        else:
            self._failed = False
            logger.info("KV cache: %d pages of prefixes to %s", count, self._path)

    def _remove_own(self) -> None:
        """Deletes the journal."""
        if self._journal is not None:
            self._journal.path.unlink(missing_ok=True)
            self._close()

    def _warn(self, error: OSError) -> None:
        if not self._failed:  # warn once, as an engine retries often
            logger.warning("cached prefixes cannot be kept in %s: %s", self._path, error)
        self._failed = True

    def _remove_others(self) -> None:
        """Removes files of other models until the folder fits its size limit: old ones, and those of pages that are
        computed again soon, first.
        """
        folder, own = self._path.parent, {self._path, *self._others()}
        if self._journal is not None:
            own.add(self._journal.path)
        room = self._most_bytes - sum(map(_size_on_disk, own))
        now, files = time.time(), list[StoredFile]()
        for path in folder.glob("*" + SUFFIX):
            if path not in own:
                stat = path.stat()
                cost = cost_of_key(path.name.partition(".")[0]) or cost_of_key(self._key) or 1.0
                age = now - stat.st_mtime_ns / 1e9
                # an unknown cost is that of this model
                files.append(StoredFile(path, stat.st_size, age, cost))
        for file in files_to_remove(files, room):
            if not is_in_use(file.path):
                file.path.unlink(missing_ok=True)
        remove_abandoned_parts(self._path.parent)


class PrefixWrite:
    """A set of pages for another thread to write.

    Args:
        groups: The pages.
        write: Writes them.
    """

    def __init__(
        self, groups: Sequence[PageGroup], write: Callable[[Sequence[PageGroup]], None]
    ) -> None:
        self._groups, self._write = groups, write

    def run(self, go_on: Callable[[int], bool]) -> None:
        """Writes the pages at a rate of at most `BYTES_PER_S`.

        Args:
            go_on: Called before each page with its size in bytes. It waits while requests run, and returns whether to
                continue; if not, the file is discarded.
        """
        paced = [
            PageGroup(group.page_bytes, group.hashes, _paced_reads(group, go_on))
            for group in self._groups
        ]
        try:
            self._write(paced)
        except _StoppedError:
            pass


class _StoppedError(Exception):
    """A write was stopped."""


def _paced_reads(group: PageGroup, go_on: Callable[[int], bool]) -> Callable[[int], bytes | None]:
    """The contents of a group's pages, read at the rate of an idle engine; ends the write if `go_on` is false."""

    def content(place: int) -> bytes | None:
        time.sleep(group.page_bytes / BYTES_PER_S)
        if not go_on(group.page_bytes):
            raise _StoppedError
        return group.content(place)

    return content


def _size_on_disk(path: Path) -> int:
    """The size of a file; 0 if it is absent."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _size_of(groups: Sequence[PageGroup]) -> int:
    return sum(group.page_bytes * len(group.hashes) for group in groups)


def _key_of(config: PipelineConfig, cache: StoredCache) -> str:
    """A digest of everything besides tokens that keys and values depend on: model, encoding, shape of the cache."""
    model = config.model_config
    files: list[Any] = []
    for path in model.weight_paths():
        real = path.resolve()
        stat = real.stat()
        files.append([str(real), stat.st_size, stat.st_mtime_ns])
    text = json.dumps(
        [
            # another version may compute keys and values otherwise
            __version__,
            files,
            repr(model.huggingface_config),
            str(model.quantization_encoding),
            {name: str(getattr(model, name)) for name in ("quantize", "rope_type", "device_specs")},
            config.batch_invariant,
            repr(cache.params),
            [repr(pool.window) for pool in cache.pages.pools],
        ]
    )
    digest = hashlib.blake2b(text.encode(), digest_size=DIGEST_DIGITS // 2).hexdigest()
    # all weights are read for a token, at most
    weights = sum(path.stat().st_size for path in model.weight_paths())
    return key_with_cost(digest, weights * cache.pages.page_size / max(sum(cache.page_sizes()), 1))
