"""Stores the cached prefixes of an engine for the next engine of the same model."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from max._version import __version__
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.prefix_file import PageGroup, remove_abandoned_parts, write_pages
from max.pipelines.kv_cache.replicated_pages import ReplicatedPages

logger = logging.getLogger("max.pipelines")
StoredCache: TypeAlias = PagedKVCacheManager | ReplicatedPages
"""The cache of a model, or those of its copies: one file has the pages of all."""
SUFFIX = ".prefixes"
"""The suffix of the files in the folder."""
MOST_ADDITIONS = 16
"""The number of files that an idle engine adds before a single file replaces them."""
JOINED_SHARE = 0.75
"""The largest fraction of the folder's size limit that this single file takes."""
BYTES_PER_S = 64 << 20
"""The write rate of an idle engine in bytes per second."""


class PrefixStore:
    """The files with the cached pages of a model; created by :meth:`of`.

    One file contains what an engine wrote when it stopped; further files contain what it wrote while it was idle, that
    is, pages that no file had. The files are joined if they are many or leave too little room. One thread at a time
    uses a store; while a `PrefixWrite` runs, only requests may run beside it.

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
        self._additions: list[Path] = []
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

    def load(self) -> None:
        """Fills the cache with the valid pages of the files."""
        # additions are named by their time of writing
        self._additions = sorted(self._path.parent.glob(f"{self._key}.*{SUFFIX}"))
        count = 0
        for path in (self._path, *self._additions):
            filled, hashes = self._cache.load_prefixes(path, self._key)
            count += filled
            for kept, of_file in zip(self._kept, hashes, strict=True):
                kept |= of_file
        remove_abandoned_parts(self._path.parent)
        if count:
            logger.info("KV cache: %d pages of prefixes from %s", count, self._path)

    def save(self) -> None:
        """Writes all cached pages to one file; warns if the folder cannot be written."""
        self._write(self._path, self._cache.cached_prefixes(self._most_bytes))

    def new_pages(self) -> PrefixWrite | None:
        """The cached pages that are in no file, to be written while the engine is idle; None if there are none."""
        groups = self._cache.cached_prefixes(self._most_bytes, self._kept)
        size = _size_of(groups)
        if not size:
            return None
        files = sum(path.stat().st_size for path in (self._path, *self._additions) if path.exists())
        if files + size <= self._most_bytes and len(self._additions) < MOST_ADDITIONS:
            path = self._path.with_name(f"{self._key}.{time.time_ns()}{SUFFIX}")
            return PrefixWrite(groups, lambda paced: self._write(path, paced))
        # leave room for later additions, so that not every addition rewrites the whole file
        groups = self._cache.cached_prefixes(int(self._most_bytes * JOINED_SHARE))
        return PrefixWrite(groups, lambda paced: self._write(self._path, paced))

    def forget(self) -> None:
        """Deletes the files, so that the next engine does not load prefixes that were to be forgotten."""
        for path in (self._path, *self._additions):
            path.unlink(missing_ok=True)
        self._additions = []
        self._kept = [set() for _ in self._kept]

    def _write(self, path: Path, groups: Sequence[PageGroup]) -> None:
        """Writes an addition, or the file that replaces all others."""
        try:
            count = write_pages(path, self._key, groups)
            hashes = [set(group.hashes) for group in groups]
            # only now, as the additions hold the pages until the whole file does
            if path == self._path:
                for addition in self._additions:
                    addition.unlink(missing_ok=True)
                self._additions, self._kept = [], hashes
            else:
                self._additions.append(path)
                self._kept = [a | b for a, b in zip(self._kept, hashes, strict=True)]
            self._remove_others()
            self._failed = False
        except OSError as error:
            if not self._failed:  # warn once, as an idle engine retries often
                logger.warning("cached prefixes cannot be kept in %s: %s", path, error)
            self._failed = True
        else:
            logger.info("KV cache: %d pages of prefixes to %s", count, path)

    def _remove_others(self) -> None:
        """Removes the oldest files of other models until the folder fits its size limit."""
        own = {self._path, *self._additions}
        left = self._most_bytes - sum(path.stat().st_size for path in own if path.exists())
        files = [(p.stat(), p) for p in self._path.parent.glob("*" + SUFFIX) if p not in own]
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime_ns, reverse=True):
            left -= stat.st_size
            if left < 0:
                path.unlink(missing_ok=True)
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
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
