"""The owner of page tables: no other code of the scheduler claims, extends or releases pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import OutOfPagesError


class PageSource(Protocol):
    """The interface of a KV cache that provides pages; ``PagedKVCacheManager`` implements it."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        ...

    @property
    def total_num_pages(self) -> int:
        """The number of pages, over all groups of layers."""
        ...

    @property
    def used_pages(self) -> int:
        """The number of pages that requests hold, over all groups of layers."""
        ...

    @property
    def free_pages(self) -> int:
        """The number of pages that no request holds, of the group of layers with the fewest."""
        ...

    def forget_prefixes(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
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
        """Adds cached pages that hold the first tokens of a request to its table, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens.
        """
        ...

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks for its next steps, the same in each group of layers.

        Args:
            context: The request.
            num_steps: The number of steps.
        """
        ...

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run because it needs more pages than a group of layers has.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.

        Returns:
            The maximum number of pages that it holds at once, and the number of pages of that group; None: all groups
            have enough.
        """
        ...

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request.
            num_steps: The number of steps.

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

    The scheduler decides which requests hold pages. A pipeline whose ``execute`` is called without a scheduler
    reserves pages by :meth:`reserve`. No other code claims or releases pages.

    Args:
        source: The KV cache.
    """

    def __init__(self, source: PageSource) -> None:
        self._source = source
        # for each request the number of its tokens when its table was opened, and how many of these were reused
        self._opened: dict[RequestID, tuple[int, int]] = {}
        self.opened_tokens = 0
        """The total number of tokens of requests when their page table was opened, counted at each opening."""
        self.reused_tokens = 0
        """The number of these tokens that were in the cache."""

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._source.page_size

    @property
    def total_pages(self) -> int:
        """The number of pages, over all groups of layers."""
        return self._source.total_num_pages

    @property
    def used_pages(self) -> int:
        """The number of pages that requests hold, over all groups of layers."""
        return self._source.used_pages

    @property
    def free_pages(self) -> int:
        """The number of pages that no request holds, of the group of layers with the fewest."""
        return self._source.free_pages

    def __contains__(self, request_id: RequestID) -> bool:
        return self._source.contains(request_id)

    def open(self, context: TextGenerationContext) -> bool:
        """Gives a request a page table that starts with the cached pages of its first tokens.

        If the model has recurrent states, the request gets a slot of them too.

        Args:
            context: The request; it skips the tokens that are cached.

        Returns:
            Whether the table is new; False if the request already has one.

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
        """Removes a page table that :meth:`open` has just made, and takes its tokens out of the counts.

        Args:
            request_id: The request; no step has run with the table.
        """
        tokens, reused = self._opened[request_id]
        self.opened_tokens -= tokens
        self.reused_tokens -= reused
        self.close(request_id)

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run; see :meth:`PageSource.lacking`.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.
        """
        return self._source.lacking(length, step)

    def missing(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks for its next steps, the same in each group of layers.

        Args:
            context: The request; its table is open.
            num_steps: The number of steps.
        """
        return self._source.missing_pages(context, num_steps)

    def extend(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request; its table is open.
            num_steps: The number of steps.

        Raises:
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        self._source.alloc(context, num_steps)

    def reserve(self, batch: Sequence[TextGenerationContext], num_steps: int) -> None:
        """Opens and extends the page tables of a batch; a no-op for batches of the scheduler.

        Args:
            batch: The requests.
            num_steps: The number of steps.

        Raises:
            OutOfPagesError: Too few pages are free; no table was opened, and tables that were already open may have
                been extended.
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
