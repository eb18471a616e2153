"""The page tables of requests, addressed by their contexts: the tensor-free side of a KV cache."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from max.interfaces import ImageMetadata, RequestID, TextGenerationContext
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.salt_key import SALT_KEY_BYTES, salt_key_of
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
        self._unread: set[RequestID] = set()
        """Requests that were claimed by their contexts, and have no pages yet."""
        self.salt_folder: Path | None = None
        """The folder that holds the key of salts, as pages are stored there; None: the key is of this cache only."""

    @cached_property
    def salt_key(self) -> bytes:
        """The key of the digests of salts: the hashes of pages, which a file may hold, do not tell the salts."""
        if self.salt_folder is None:
            return secrets.token_bytes(SALT_KEY_BYTES)
        return salt_key_of(self.salt_folder)

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

    def contains(self, request_id: RequestID | TextGenerationContext) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request, by its number or its context.
        """
        return _number(request_id) in self.pages

    def claim(self, request_id: RequestID | TextGenerationContext, replica_idx: int = 0) -> None:
        """Gives a request an empty page table, and a slot of the recurrent states.

        Args:
            request_id: The request, by its number or its context.
            replica_idx: The replica of the model, of which there is one: 0.

        Raises:
            ValueError: The request already has a page table, or there is no such replica.
            OutOfSlotsError: No slot is free; nothing was changed.
        """
        if replica_idx != 0:
            raise ValueError(f"claim: the replica is {replica_idx}; there is one, 0")
        number = _number(request_id)
        self.pages.claim(number)
        if self.slots is not None:
            try:
                self.slots.claim(number)
            except OutOfSlotsError:
                self.pages.release(number)
                raise
        if number is not request_id:
            self._unread.add(number)

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Adds cached pages that hold the first tokens of a request to its table, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens; 0 if tokens of the request were already processed.
        """
        salt = self._salt(context)
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

        The first time for a request that was claimed by its context, cached pages of its first tokens are added before,
        and these tokens are skipped.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
            OutOfPagesError: Too few pages are free; no page was taken.
        """
        if context.request_id in self._unread:
            self._unread.discard(context.request_id)
            self.reuse_prefix(context)
        self.pages.reserve(context.request_id, _length_after(context, num_steps))

    def step(self, batch: TextGenerationContext | Sequence[TextGenerationContext]) -> None:
        """Records that the processed tokens of a batch are in the cache, and releases pages that the windows have
        passed.

        Args:
            batch: The requests, or one; their contexts are already updated.
        """
        for context in batch if isinstance(batch, Sequence) else (batch,):
            salt = self._salt(context)
            if salt is not None:
                processed = context.all_tokens[: context.start_idx]
                self.pages.commit(context.request_id, processed, salt)
            self.pages.return_unseen(context.request_id, context.start_idx)

    def release(self, request_id: RequestID | TextGenerationContext) -> None:
        """Removes a request's page table, and frees its slot.

        Args:
            request_id: The request, by its number or its context.

        Raises:
            KeyError: It has none.
        """
        number = _number(request_id)
        self.pages.release(number)
        self._unread.discard(number)
        if self.slots is not None:
            self.slots.release(number)

    def _salt(self, context: TextGenerationContext) -> bytes | None:
        """The digest of what a request's pages depend on besides tokens: its images, and those who may share them;
        None: its pages cannot be shared.
        """
        images = _image_hashes(context)
        text: str = getattr(context, "cache_salt", "")
        if images is None or not (images or text):
            return images
        if not text:
            return hashlib.blake2b(images, digest_size=16).digest()
        data = len(images).to_bytes(8, "little") + images + text.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(data, digest_size=32, key=self.salt_key).digest()


def _image_hashes(context: TextGenerationContext) -> bytes | None:
    """The hashes of a request's images; None: one has none."""
    images: Sequence[ImageMetadata] = getattr(context, "images", ())
    if any(image.image_hash == -1 for image in images):
        return None
    return b"".join(image.image_hash.to_bytes(8, "little", signed=True) for image in images)


def _length_after(context: TextGenerationContext, num_steps: int) -> int:
    """The number of cached tokens after some steps; the token of the last step is not written to the cache."""
    return context.active_idx + num_steps - 1


def _number(request: RequestID | TextGenerationContext) -> RequestID:
    """The number of a request that is given by it or by its context."""
    return request if isinstance(request, RequestID) else request.request_id
