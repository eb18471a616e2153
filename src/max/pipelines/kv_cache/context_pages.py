"""The pages of requests' contexts: what schedulers need of a KV cache. No tensors."""

from __future__ import annotations

from collections.abc import Sequence

from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import PageManager


class ContextPages:
    """Reserves, shares and frees the pages that requests need.

    Args:
        pages: Hands out the pages.
    """

    def __init__(self, pages: PageManager) -> None:
        self.pages = pages

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.pages.page_size

    @property
    def total_num_pages(self) -> int:
        """All pages."""
        return self.pages.num_pages

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        return self.pages.free_pages

    def contains(self, request_id: RequestID) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request.
        """
        return request_id in self.pages

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty page table.

        Args:
            request_id: The request.

        Raises:
            ValueError: It has one.
        """
        self.pages.claim(request_id)

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Takes pages that hold the beginning of a new request's tokens; it skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of tokens that it skips.
        """
        if context.start_idx != 0:
            return 0
        reused = self.pages.reuse_prefix(
            context.request_id, context.all_tokens, self._salt(context)
        )
        if reused:
            context.set_token_indices(start_idx=reused)
        return reused

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request.
            num_steps: The steps.

        Raises:
            OutOfPagesError: There are too few free pages; nothing was changed.
        """
        self.pages.reserve(context.request_id, context.active_idx + num_steps - 1)

    def step(self, batch: Sequence[TextGenerationContext]) -> None:
        """Tells that a batch's tokens are in the cache, after its contexts were updated.

        Args:
            batch: The requests.
        """
        for context in batch:
            done = context.all_tokens[: context.start_idx]
            self.pages.commit(context.request_id, done, self._salt(context))

    def release(self, request_id: RequestID) -> None:
        """Takes a request's page table away.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has none.
        """
        self.pages.release(request_id)

    @staticmethod
    def _salt(context: TextGenerationContext) -> bytes:
        """What the cache of a request depends on besides its tokens: its images."""
        images = getattr(context, "images", None) or []
        return b"".join(i.image_hash.to_bytes(8, "little", signed=True) for i in images)[:64]
