"""Where an engine keeps its cached prefixes for the next one with the same model."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from max._version import __version__
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.kv_cache.manager import PagedKVCacheManager

logger = logging.getLogger("max.pipelines")
SUFFIX = ".prefixes"
"""Of the files in the folder."""


class PrefixStore:
    """A file for the cached pages of a model; use :meth:`of`.

    Args:
        cache: The cache.
        path: The file.
        key: What the contents of pages depend on besides their tokens.
        most_bytes: The most bytes of pages.
    """

    def __init__(self, cache: PagedKVCacheManager, path: Path, key: str, most_bytes: int) -> None:
        self._cache, self._path, self._key, self._most_bytes = cache, path, key, most_bytes

    @classmethod
    def of(cls, config: PipelineConfig, cache: PagedKVCacheManager) -> PrefixStore | None:
        """The store that a configuration has; None without a folder, or where no prefix is ever cached.

        Args:
            config: The configuration, resolved.
            cache: The cache.
        """
        options = config.kv_cache_config
        if options.kv_cache_folder is None or not cache.pages.enable_prefix_caching:
            return None
        key = _key_of(config, cache)
        path = options.kv_cache_folder.expanduser() / (key + SUFFIX)
        return cls(cache, path, key, int(options.kv_cache_folder_gb * 2**30))

    def load(self) -> None:
        """Fills the cache with the pages of the file that are sound."""
        if count := self._cache.load_prefixes(self._path, self._key):
            logger.info("KV cache: %d pages of prefixes from %s", count, self._path)

    def save(self) -> None:
        """Writes the cached pages; a folder that cannot be written is a warning."""
        try:
            count = self._cache.save_prefixes(self._path, self._key, self._most_bytes)
            self._remove_others()
        except OSError as error:
            logger.warning("cached prefixes cannot be kept in %s: %s", self._path, error)
        else:
            logger.info("KV cache: %d pages of prefixes to %s", count, self._path)

    def _remove_others(self) -> None:
        """Removes the files of other models that are beyond the folder's size, those written first."""
        files = [(p.stat(), p) for p in self._path.parent.glob("*" + SUFFIX) if p != self._path]
        left = self._most_bytes - self._path.stat().st_size
        for stat, path in sorted(files, key=lambda each: each[0].st_mtime_ns, reverse=True):
            left -= stat.st_size
            if left < 0:
                path.unlink(missing_ok=True)


def _key_of(config: PipelineConfig, cache: PagedKVCacheManager) -> str:
    """A digest of all that keys and values depend on besides tokens."""
    model = config.model_config
    files: list[Any] = []
    for path in model.weight_paths():
        real = path.resolve()
        stat = real.stat()
        files.append([str(real), stat.st_size, stat.st_mtime_ns])
    text = json.dumps(
        [
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
