"""Several caches of one pipeline, such as those of a model and of a smaller model that drafts its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_changes import Changes
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages

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


class JoinedPages(SeveralCaches[RequestPages]):
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
        return [joined_caches(caches) for caches in zip(*copies, strict=True)]

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


def joined_caches(caches: Sequence[RequestPages]) -> RequestPages:
    """The pages of a pipeline's caches.

    Args:
        caches: The caches.

    Raises:
        ValueError: There is none.
    """
    if not caches:
        raise ValueError("the pipeline has no KV cache; expected at least one")
    return caches[0] if len(caches) == 1 else JoinedPages(caches)
