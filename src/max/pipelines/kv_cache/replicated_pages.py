"""The caches of the copies of a model: a request has its pages in one of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from max.interfaces import RequestID, TextGenerationContext
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.kv_cache.joined_pages import SeveralCaches
from max.pipelines.kv_cache.known_pages import Miss
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.prefix_file import PageGroup


class ReplicatedPages(SeveralCaches[PagedKVCacheManager]):
    """Caches of equal shape.

    The scheduler of each copy uses the cache of its copy. This object is for callers without a scheduler, which claim
    pages and look for those of a request, and for what concerns all copies.

    Args:
        caches: The cache of each copy of the model.
    """

    def __init__(self, caches: Sequence[PagedKVCacheManager]) -> None:
        super().__init__(caches[0].pages, caches[0].slots)
        self._caches = caches

    @property
    def replicas(self) -> Sequence[PagedKVCacheManager]:
        """The cache of each copy of the model."""
        return self._caches

    @property
    def params(self) -> KVCacheParams:
        """The shape of the caches, over all devices."""
        copies = len(self._caches)
        return replace(self._caches[0].params, n_devices=copies, data_parallel_degree=copies)

    @property
    def num_groups(self) -> int:
        """The number of groups of layers, over all copies."""
        return sum(cache.num_groups for cache in self._caches)

    @property
    def free_pages(self) -> int:
        """The number of pages that no request holds, of the copy with the most."""
        return max(cache.free_pages for cache in self._caches)

    def cache_of(self, request: RequestID | TextGenerationContext) -> PagedKVCacheManager:
        """The cache that has the pages of a request.

        Args:
            request: The request, by its identifier or its context.

        Raises:
            KeyError: No cache has a page table for it.
        """
        for cache in self._caches:
            if cache.contains(request):
                return cache
        raise KeyError(f"KV cache: no copy of the model has a page table for request {request}")

    def contains(self, request_id: RequestID | TextGenerationContext) -> bool:
        """Whether a copy has a page table for a request.

        Args:
            request_id: The request, by its identifier or its context.
        """
        return any(cache.contains(request_id) for cache in self._caches)

    def claim(self, request_id: RequestID | TextGenerationContext, replica_idx: int = 0) -> None:
        """Gives a request an empty page table in the cache of a copy, and a slot of its recurrent states.

        Args:
            request_id: The request, by its identifier or its context.
            replica_idx: The copy of the model.

        Raises:
            ValueError: The request already has a page table, or there is no such copy.
            OutOfSlotsError: No slot is free; nothing was changed.
        """
        if not 0 <= replica_idx < len(self._caches):
            raise ValueError(
                f"claim: the replica is {replica_idx}; there are {len(self._caches)}, from 0 on"
            )
        if self.contains(request_id):
            raise ValueError(f"KV cache: request {request_id} has a page table already")
        self._caches[replica_idx].claim(request_id)

    def release(self, request_id: RequestID | TextGenerationContext) -> None:
        """Removes a request's page table, and frees its slot.

        Args:
            request_id: The request, by its identifier or its context.

        Raises:
            KeyError: It has none.
        """
        self.cache_of(request_id).release(request_id)

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps; see `RequestPages.alloc`.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
            OutOfPagesError: Too few pages of its copy are free; no page was taken.
        """
        self.cache_of(context).alloc(context, num_steps)

    def step(self, batch: TextGenerationContext | Sequence[TextGenerationContext]) -> None:
        """Records that the processed tokens of a batch are in the caches; see `RequestPages.step`."""
        for context in batch if isinstance(batch, Sequence) else (batch,):
            self.cache_of(context).step(context)

    def miss(self, context: TextGenerationContext) -> Miss | None:
        """Why the first tokens of a request were not in the cache of its copy; None if all but the last were.

        Args:
            context: The request; its table is open.

        Raises:
            KeyError: The request has no page table.
        """
        return self.cache_of(context).miss(context)

    def cached_prefixes(
        self, most_bytes: int, stored_hashes: Sequence[Collection[bytes]] | None = None
    ) -> list[PageGroup]:
        """The pages whose contents may serve a request, of all groups of the first copy, then of the next one.

        Args:
            most_bytes: The maximum size of all pages, in bytes, which the copies share equally.
            stored_hashes: For each group the hashes to leave out; None: no hash.
        """
        groups: list[PageGroup] = []
        for cache in self._caches:
            end = len(groups) + cache.num_groups
            own = stored_hashes[len(groups) : end] if stored_hashes else None
            groups += cache.cached_prefixes(most_bytes // len(self._caches), own)
        return groups

    def page_sizes(self) -> list[int]:
        """The bytes of one page of each group, copy by copy."""
        return [size for cache in self._caches for size in cache.page_sizes()]

    def fill_page(self, group: int, page_hash: bytes, content: bytes) -> bool:
        """Fills an empty page with one of a file.

        Args:
            group: The number of the group, over all copies.
            page_hash: The hash of the content.
            content: The content.

        Returns:
            Whether a page was filled.
        """
        for cache in self._caches:
            if group < cache.num_groups:
                return cache.fill_page(group, page_hash, content)
            group -= cache.num_groups
        return False

    def get_runtime_inputs(
        self, batch: Sequence[TextGenerationContext], num_steps: int = 1
    ) -> RaggedKVCacheInputs:
        """The inputs of the first step of a batch.

        Args:
            batch: The requests, all of one copy; their pages are reserved.
            num_steps: The number of steps that run without new inputs.

        Raises:
            ValueError: The requests are of several copies.
        """
        caches = {id(cache): cache for cache in map(self.cache_of, batch)}
        if len(caches) != 1:
            raise ValueError(
                f"get_runtime_inputs: requests of {len(caches)} copies of the model; expected those of one"
            )
        (cache,) = caches.values()
        return cache.get_runtime_inputs(batch, num_steps)


def replicated_cache(
    caches: Sequence[PagedKVCacheManager],
) -> PagedKVCacheManager | ReplicatedPages:
    """The cache of a model, or those of its copies.

    Args:
        caches: The cache of each copy of the model, at least one.
    """
    return caches[0] if len(caches) == 1 else ReplicatedPages(caches)
