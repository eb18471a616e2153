"""The page tables of requests' contexts: the page manager's side of a KV cache. No tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from max.interfaces import ImageMetadata, RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots


class ContextPages:
    """A page manager that reads tokens and lengths from requests' contexts.

    A request owns a slot of the recurrent states as long as it has a page table. The state of a request without
    processed tokens is zero by definition, so a slot needs no reset: after a preemption the request begins anew.

    Args:
        pages: The page manager.
        slots: The slots of recurrent states; None: the model has none.

    Raises:
        ValueError: Prefixes are shared, and there are states, which pages do not hold.
    """

    def __init__(self, pages: PageManager, slots: StateSlots | None = None) -> None:
        if slots is not None and pages.enable_prefix_caching:
            raise ValueError("ContextPages: pages of a prefix do not hold recurrent states")
        self.pages, self.slots = pages, slots

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.pages.page_size

    @property
    def total_num_pages(self) -> int:
        """The number of pages, of all groups of layers."""
        return sum(pool.num_pages for pool in self.pages.pools)

    @property
    def used_pages(self) -> int:
        """Pages that requests hold, of all groups of layers."""
        return self.pages.used_pages

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, of the group that has the fewest."""
        return self.pages.free_pages

    def forget_prefixes(self) -> None:
        """Makes all cached pages empty, and lets no page in use serve another request."""
        self.pages.forget_prefixes()

    def contains(self, request_id: RequestID) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request.
        """
        return request_id in self.pages

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty page table, and a slot of the recurrent states.

        Args:
            request_id: The request.

        Raises:
            ValueError: It has one.
            OutOfSlotsError: No slot is free; nothing was changed.
        """
        self.pages.claim(request_id)
        if self.slots is not None:
            try:
                self.slots.claim(request_id)
            except OutOfSlotsError:
                self.pages.release(request_id)
                raise

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Shares cached pages that hold the first tokens of a request, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens; 0 if tokens of the request were processed already.
        """
        salt = _salt(context)
        if context.start_idx != 0 or salt is None:
            return 0
        reused = self.pages.reuse_prefix(context.request_id, context.all_tokens, salt)
        if reused:
            context.set_token_indices(start_idx=reused)
        return reused

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks, in each group of layers, for its next steps.

        Args:
            context: The request.
            num_steps: The steps.

        Raises:
            KeyError: The request has no page table.
        """
        return self.pages.missing_pages(context.request_id, _length_after(context, num_steps))

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Whether a request can never run; see :meth:`PageManager.lacking`.

        Args:
            length: The tokens of its whole sequence.
            step: The most tokens of a step.
        """
        return self.pages.lacking(length, step)

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request.
            num_steps: The steps.

        Raises:
            KeyError: The request has no page table.
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        self.pages.reserve(context.request_id, _length_after(context, num_steps))

    def step(self, batch: Sequence[TextGenerationContext]) -> None:
        """Records that the processed tokens of a batch are in the cache, and gives back pages that no layer can see any
        more.

        Args:
            batch: The requests; their contexts were updated.
        """
        for context in batch:
            salt = _salt(context)
            if salt is not None:
                processed = context.all_tokens[: context.start_idx]
                self.pages.commit(context.request_id, processed, salt)
            self.pages.return_unseen(context.request_id, context.start_idx)

    def release(self, request_id: RequestID) -> None:
        """Removes a request's page table, and takes its slot back.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has none.
        """
        self.pages.release(request_id)
        if self.slots is not None:
            self.slots.release(request_id)


def _length_after(context: TextGenerationContext, num_steps: int) -> int:
    """The tokens in the cache after some steps: the last step's token is not written."""
    return context.active_idx + num_steps - 1


def _salt(context: TextGenerationContext) -> bytes | None:
    """The images that a request's cache depends on besides its tokens; None: its pages cannot be shared."""
    images: Sequence[ImageMetadata] = getattr(context, "images", ())
    if not images:
        return b""
    if any(image.image_hash == -1 for image in images):
        return None
    hashes = b"".join(image.image_hash.to_bytes(8, "little", signed=True) for image in images)
    return hashlib.blake2b(hashes, digest_size=16).digest()
