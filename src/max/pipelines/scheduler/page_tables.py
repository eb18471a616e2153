"""The owner of page tables: pages are claimed, extended and released here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import OutOfPagesError


class PageSource(Protocol):
    """The part of a KV cache that hands out pages; ``PagedKVCacheManager`` implements it."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def total_num_pages(self) -> int:
        """The number of pages, of all groups of layers."""
        ...

    @property
    def used_pages(self) -> int:
        """Pages that requests hold, of all groups of layers."""
        ...

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, of the group that has the fewest."""
        ...

    def forget_prefixes(self) -> None:
        """Makes all cached pages empty, and lets no page in use serve another request."""
        ...

    def contains(self, request_id: RequestID) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request.
        """
        ...

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty page table, and a slot if the model has recurrent states.

        Args:
            request_id: The request.

        Raises:
            OutOfPagesError: No slot is free; nothing was changed.
        """
        ...

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Shares cached pages that hold the first tokens of a request, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens.
        """
        ...

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks, in each group of layers, for its next steps.

        Args:
            context: The request.
            num_steps: The steps.
        """
        ...

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Whether a request can never run: it needs more pages than a group of layers has.

        Args:
            length: The tokens of its whole sequence.
            step: The most tokens of a step.

        Returns:
            The most pages that it holds at once and the pages of that group; None: all groups have enough.
        """
        ...

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request.
            num_steps: The steps.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Removes a request's page table.

        Args:
            request_id: The request.
        """
        ...


class PageTables:
    """Opens, extends and closes the page tables of requests.

    The scheduler decides which requests hold pages; a pipeline whose ``execute`` is called without a
    scheduler reserves through :meth:`reserve`. No other code claims or releases pages.

    Args:
        source: The KV cache.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        # tokens of each request when its table was opened, and those of them that were reused
        self._opened: dict[RequestID, tuple[int, int]] = {}
        self.opened_tokens = 0
        """The tokens of all requests, each time that they got a page table."""
        self.reused_tokens = 0
        """Those of them that were in the cache."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._source.page_size

    @property
    def total_pages(self) -> int:
        """The number of pages, of all groups of layers."""
        return self._source.total_num_pages

    @property
    def used_pages(self) -> int:
        """Pages that requests hold, of all groups of layers."""
        return self._source.used_pages

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, of the group that has the fewest."""
        return self._source.free_pages

    def __contains__(self, request_id: RequestID) -> bool:
        return self._source.contains(request_id)

    def open(self, context: TextGenerationContext) -> bool:
        """Gives a request a page table, filled with the cached pages of its first tokens.

        If the model has recurrent states, the request gets a slot of them too.

        Args:
            context: The request; it skips the tokens that are cached.

        Returns:
            Whether the table is new; False if the request has one.

        Raises:
            OutOfPagesError: No slot of the recurrent states is free; nothing was changed.
        """
        if context.request_id in self:
            return False
        self._source.claim(context.request_id)
        reused = self._source.reuse_prefix(context)
        self._opened[context.request_id] = context.current_length, reused
        self.opened_tokens += context.current_length
        self.reused_tokens += reused
        return True

    def retract(self, request_id: RequestID) -> None:
        """Removes a page table that :meth:`open` has just made, as if the request had never had it.

        Args:
            request_id: The request; no step has run with the table.
        """
        tokens, reused = self._opened[request_id]
        self.opened_tokens -= tokens
        self.reused_tokens -= reused
        self.close(request_id)

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Whether a request can never run; see :meth:`PageSource.lacking`.

        Args:
            length: The tokens of its whole sequence.
            step: The most tokens of a step.
        """
        return self._source.lacking(length, step)

    def missing(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks, in each group of layers, for its next steps.

        Args:
            context: The request; its table is open.
            num_steps: The steps.
        """
        return self._source.missing_pages(context, num_steps)

    def extend(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request; its table is open.
            num_steps: The steps.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        self._source.alloc(context, num_steps)

    def reserve(self, batch: Sequence[TextGenerationContext], num_steps: int) -> None:
        """Opens and extends the page tables of a batch; for batches of the scheduler a no-op.

        Args:
            batch: The requests.
            num_steps: The steps.

        Raises:
            OutOfPagesError: Too few pages are free; no table was opened, and those that were open
                may be longer.
        """
        opened: list[tuple[TextGenerationContext, int, int]] = []
        try:
            for context in batch:
                indices = context.start_idx, context.active_idx
                if self.open(context):
                    opened.append((context, *indices))
                self.extend(context, num_steps)
        except OutOfPagesError:
            for context, start, active in opened:
                self.retract(context.request_id)
                context.set_token_indices(start_idx=start, active_idx=active)
            raise

    def close(self, request_id: RequestID) -> None:
        """Removes a request's page table and frees its slot; nothing happens if it has none.

        Args:
            request_id: The request.
        """
        if request_id in self:
            self._source.release(request_id)
            self._opened.pop(request_id, None)
