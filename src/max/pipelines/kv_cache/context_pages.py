"""The page tables of requests, addressed by their contexts: the tensor-free side of a KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from max.interfaces import ImageMetadata, RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.state_slots import OutOfSlotsError, StateSlots


class ContextPages:
    """A page manager that reads tokens and lengths from the contexts of requests.

    A request owns a slot of the recurrent states as long as it has a page table. A request without processed tokens
    starts from a zero state by definition, so slots need no reset; a preempted request is read again from its start.

    Args:
        pages: The page manager.
        slots: The slots of recurrent states; None: the model has none.

    Raises:
        ValueError: Prefixes are cached although the model has recurrent states, which pages do not store.
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
        """The number of pages, over all groups of layers."""
        return sum(pool.num_pages for pool in self.pages.pools)

    @property
    def used_pages(self) -> int:
        """The number of pages that requests hold, over all groups of layers."""
        return self.pages.used_pages

    @property
    def free_pages(self) -> int:
        """The number of pages that no request holds, of the group of layers with the fewest."""
        return self.pages.free_pages

    def forget_prefixes(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
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
            ValueError: The request already has a page table.
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
        """Adds cached pages that hold the first tokens of a request to its table, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens; 0 if tokens of the request were already processed.
        """
        salt = _salt(context)
        if context.start_idx != 0 or salt is None:
            return 0
        reused = self.pages.reuse_prefix(context.request_id, context.all_tokens, salt)
        if reused:
            context.set_token_indices(start_idx=reused)
        return reused

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks for its next steps, the same in each group of layers.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
        """
        return self.pages.missing_pages(context.request_id, _length_after(context, num_steps))

    def lacking(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run; see :meth:`PageManager.lacking`.

        Args:
            length: The number of tokens of its whole sequence.
            step: The maximum number of tokens per step.
        """
        return self.pages.lacking(length, step)

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
            OutOfPagesError: Too few pages are free; nothing was changed.
        """
        self.pages.reserve(context.request_id, _length_after(context, num_steps))

    def step(self, batch: Sequence[TextGenerationContext]) -> None:
        """Records that the processed tokens of a batch are in the cache, and releases pages that the windows have
        passed.

        Args:
            batch: The requests; their contexts are already updated.
        """
        for context in batch:
            salt = _salt(context)
            if salt is not None:
                processed = context.all_tokens[: context.start_idx]
                self.pages.commit(context.request_id, processed, salt)
            self.pages.return_unseen(context.request_id, context.start_idx)

    def release(self, request_id: RequestID) -> None:
        """Removes a request's page table, and frees its slot.

        Args:
            request_id: The request.

        Raises:
            KeyError: It has none.
        """
        self.pages.release(request_id)
        if self.slots is not None:
            self.slots.release(request_id)


def _length_after(context: TextGenerationContext, num_steps: int) -> int:
    """The number of cached tokens after some steps; the token of the last step is not written to the cache."""
    return context.active_idx + num_steps - 1


def _salt(context: TextGenerationContext) -> bytes | None:
    """The digest of the images on which a request's cache depends besides tokens; None: its pages cannot be shared."""
    images: Sequence[ImageMetadata] = getattr(context, "images", ())
    if not images:
        return b""
    if any(image.image_hash == -1 for image in images):
        return None
    hashes = b"".join(image.image_hash.to_bytes(8, "little", signed=True) for image in images)
    return hashlib.blake2b(hashes, digest_size=16).digest()
