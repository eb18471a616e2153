"""Several caches as one: those of several models hold the same requests, those of a model's copies hold different ones.

A model and a smaller one that drafts its tokens have a cache each; a request has pages in all of them, or in none. Of
the copies of a model, each of which has a cache, one answers a request: its pages are in that cache only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from max._lazy import lazy_module
from max.interfaces import RequestID, TextGenerationContext
from max.nn.kv_cache.cache_params import KVCacheParams
from max.nn.kv_cache.manager import RaggedKVCacheInputs
from max.pipelines.kv_cache.known_pages import Miss
from max.pipelines.kv_cache.manager import PagedKVCacheManager
from max.pipelines.kv_cache.page_changes import Changes
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages

if TYPE_CHECKING:
    from max.pipelines.kv_cache import prefix_file
else:
    prefix_file = lazy_module("max.pipelines.kv_cache.prefix_file")

CacheT = TypeVar("CacheT", bound=RequestPages)


class SeveralCaches(RequestPages, Generic[CacheT]):
    """What caches count together: those of several models, or of the copies of one."""

    _caches: Sequence[CacheT]

    @property
    def total_num_pages(self) -> int:
        """The number of pages of all caches."""
        return sum(cache.total_num_pages for cache in self._caches)

    @property
    def used_pages(self) -> int:
        """The number of pages that requests hold in all caches."""
        return sum(cache.used_pages for cache in self._caches)

    def forget_prefixes(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
        for cache in self._caches:
            cache.forget_prefixes()


class CachesOfModels(SeveralCaches[RequestPages]):
    """Caches that hold the same tokens of each request: a request gets its pages in all of them or in none.

    The caches may differ in the size of pages, in windows and in states. A request skips the tokens that all caches
    have.

    Args:
        caches: The caches, at least one.
    """

    def __init__(self, caches: Sequence[RequestPages]) -> None:
        super().__init__(caches[0].pages)
        self.slots = next((cache.slots for cache in caches if cache.slots is not None), None)
        self.adapters = next((c.adapters for c in caches if c.adapters is not None), None)
        self._caches = caches

    @property
    def replicas(self) -> Sequence[RequestPages]:
        """The caches of each copy of the models, joined."""
        copies = [cache.replicas for cache in self._caches]
        if len(copies[0]) == 1:
            return (self,)
        return [caches_of_models(caches) for caches in zip(*copies, strict=True)]

    @property
    def free_pages(self) -> int:
        """The number of pages that no request holds, of the cache with the fewest."""
        return min(cache.free_pages for cache in self._caches)

    @property
    def used_salt_key(self) -> bytes:
        """The key of the digests of salts in the first cache; empty before a request had a salt."""
        return self._caches[0].used_salt_key

    def report_changes(self) -> None:
        """Notes the contents that the first cache gains and loses; the others get the same requests."""
        self._caches[0].report_changes()

    def take_changes(self) -> Changes:
        """The contents that the first cache gained and lost since the last call."""
        return self._caches[0].take_changes()

    def page_shortage(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run because a cache has too few pages.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.
        """
        return next(
            filter(None, (cache.page_shortage(length, step) for cache in self._caches)), None
        )

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks for its next steps, of the cache where it lacks the most.

        Args:
            context: The request.
            num_steps: The number of steps.
        """
        return max(cache.missing_pages(context, num_steps) for cache in self._caches)

    def fits(self, batch: Iterable[TextGenerationContext], num_steps: int) -> bool:
        """Whether each cache has enough free pages for the next steps of requests.

        Args:
            batch: The requests; their tables are open.
            num_steps: The number of steps.
        """
        contexts = list(batch)
        return all(cache.fits(contexts, num_steps) for cache in self._caches)

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page tables for its next steps, in all caches or in none.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            OutOfPagesError: Too few pages of a cache are free; no page was taken.
        """
        # check all caches before taking pages of any, so that a failure changes nothing
        for cache in self._caches:
            missing = cache.missing_pages(context, num_steps)
            if missing > cache.free_pages:
                raise OutOfPagesError(missing, cache.free_pages, cache.total_num_pages)
        for cache in self._caches:
            cache.alloc(context, num_steps)

    def step(self, batch: TextGenerationContext | Sequence[TextGenerationContext]) -> None:
        """Records in each cache that the processed tokens of a batch are in it; see `RequestPages.step`."""
        for cache in self._caches:
            cache.step(batch)

    def claim(self, request_id: RequestID | TextGenerationContext, replica_idx: int = 0) -> None:
        """Gives a request an empty page table in each cache, and slots of the recurrent states.

        Args:
            request_id: The request, by its identifier or its context.
            replica_idx: The copy of the models.

        Raises:
            OutOfSlotsError: A cache has no free slot; nothing was changed.
        """
        claimed: list[RequestPages] = []
        try:
            for cache in self._caches:
                cache.claim(request_id, replica_idx)
                claimed.append(cache)
        # an interrupt too: pages without a table that all caches know would never be freed
        except BaseException:
            for cache in claimed:
                cache.release(request_id)
            raise

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Adds the cached pages of the first tokens that all caches have to the tables of a request.

        Args:
            context: The request; its page tables are empty.

        Returns:
            The number of skipped tokens.
        """
        if context.start_idx != 0:
            return 0
        counts: list[int] = []
        for cache in self._caches:
            counts.append(cache.reuse_prefix(context))
            # the next cache looks up from the first token again
            context.set_token_indices(start_idx=0)
        return self.keep(context, min(counts))

    def keep(self, context: TextGenerationContext, length: int) -> int:
        """Keeps the first tokens of a request, as many in each cache as all can keep.

        Args:
            context: The request.
            length: The maximum number of tokens.

        Returns:
            The number of tokens.
        """
        # a cache may keep fewer tokens than asked for: ask until all keep the same number
        while True:
            held = length
            for cache in self._caches:
                held = cache.keep(context, held)
            if held == length:
                return held
            length = held

    def release(self, request_id: RequestID | TextGenerationContext) -> None:
        """Removes a request's page tables, and frees its slots.

        Args:
            request_id: The request, by its identifier or its context.

        Raises:
            KeyError: It has none.
        """
        for cache in self._caches:
            cache.release(request_id)
        self.forget_opening(request_id)

    def close(self, request_id: RequestID) -> None:
        """Removes what page tables a request has, and frees its slots; nothing happens if it has none."""
        # a pipeline may have released one of them
        for cache in self._caches:
            cache.close(request_id)
        self.forget_opening(request_id)


def caches_of_models(caches: Sequence[RequestPages]) -> RequestPages:
    """The pages of a pipeline's caches.

    Args:
        caches: The caches.

    Raises:
        ValueError: There is none.
    """
    if not caches:
        raise ValueError("the pipeline has no KV cache; expected at least one")
    return caches[0] if len(caches) == 1 else CachesOfModels(caches)


class CachesOfReplicas(SeveralCaches[PagedKVCacheManager]):
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
    ) -> list[prefix_file.PageGroup]:
        """The pages whose contents may serve a request, of all groups of the first copy, then of the next one.

        Args:
            most_bytes: The maximum size of all pages, in bytes, which the copies share equally.
            stored_hashes: For each group the hashes to leave out; None: no hash.
        """
        groups: list[prefix_file.PageGroup] = []
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


def caches_of_replicas(
    caches: Sequence[PagedKVCacheManager],
) -> PagedKVCacheManager | CachesOfReplicas:
    """The cache of a model, or those of its copies.

    Args:
        caches: The cache of each copy of the model, at least one.
    """
    return caches[0] if len(caches) == 1 else CachesOfReplicas(caches)
