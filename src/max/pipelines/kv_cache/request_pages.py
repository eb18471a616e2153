"""The pages of a cache by request: what scheduler and pipelines use to open, extend and close page tables. No tensors.

There are two ways to a page: `RequestPages` by a request, for all other folders, and `PagePool` by its number, for the
tensors of this folder. What lies between them (`PageManager`) is an implementation of the first.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from max._lazy import lazy_module
from max.interfaces import ImageMetadata, RequestID, TextGenerationContext
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.known_pages import Miss, MissReason
from max.pipelines.kv_cache.page_changes import Changes, PageChanges
from max.pipelines.kv_cache.page_manager import PageManager
from max.pipelines.kv_cache.page_tables import Contents, OutOfPagesError
from max.pipelines.kv_cache.salts import SALT_KEY_BYTES, Salt, salt_key_of

if TYPE_CHECKING:
    from max.pipelines.kv_cache import state_slots
else:
    state_slots = lazy_module("max.pipelines.kv_cache.state_slots")


class AdapterSlots(Protocol):
    """The places of adapters in memory, which requests with page tables hold."""

    def hold(self, context: Any) -> None:
        """Keeps the adapter of a request in its place; raises OutOfPagesError if no place is free."""

    def release(self, request_id: RequestID) -> None:
        """Gives up the place of a request's adapter."""

    def attach(self, context: Any) -> None:
        """Binds a new request to the adapter that it names."""

    def detach(self, request_id: RequestID) -> None:
        """Ends the use of an adapter by a request."""


class RequestPages:
    """The page tables and slots of requests, whose tokens and lengths it reads from their contexts.

    The scheduler opens and extends the tables of its requests. A pipeline whose ``execute`` is called without a
    scheduler reserves pages by :meth:`reserve`.

    A request owns a slot of the recurrent states as long as it has a page table. A request without processed tokens
    starts from a zero state by definition, so slots need no reset; a preempted request is read again from its start.

    Args:
        pages: The page manager.
        slots: The slots of recurrent states; None: the model has none.

    Raises:
        ValueError: Prefixes are cached although the model has recurrent states, which pages do not store.
    """

    def __init__(self, pages: PageManager, slots: state_slots.StateSlots | None = None) -> None:
        if slots is not None and pages.enable_prefix_caching:
            raise ValueError("RequestPages: pages of a prefix do not hold recurrent states")
        self.pages, self.slots = pages, slots
        self._unread: set[RequestID] = set()
        """Requests that were claimed by their contexts, and have no pages yet."""
        self.adapters: AdapterSlots | None = None
        """Keeps the adapters of requests with page tables in memory; None: requests take no adapters."""
        self.salt_folder: Path | None = None
        """The folder that holds the key of salts, as pages are stored there; None: the key is of this cache only."""
        # for each request the number of its tokens when its table was opened, and how many of these were reused
        self._opened: dict[RequestID, tuple[int, int]] = {}
        self.opened_tokens = 0
        """The total number of tokens of requests when their page table was opened, counted at each opening."""
        self.reused_tokens = 0
        """The number of these tokens that were in the cache."""

    @classmethod
    def of(
        cls,
        num_pages: int,
        page_size: int,
        enable_prefix_caching: bool = False,
        most_known: int | None = None,
    ) -> RequestPages:
        """The pages of one group of layers, without tensors.

        Args:
            num_pages: The number of pages.
            page_size: Tokens per page.
            enable_prefix_caching: Whether requests with equal first tokens share pages.
            most_known: As of `PageManager`.
        """
        pages = PageManager(num_pages, page_size, enable_prefix_caching, most_known=most_known)
        return cls(pages)

    @cached_property
    def salt_key(self) -> bytes:
        """The key of the digests of salts: the hashes of pages, which a file may hold, do not tell the salts."""
        if self.salt_folder is None:
            return secrets.token_bytes(SALT_KEY_BYTES)
        return salt_key_of(self.salt_folder)

    @property
    def used_salt_key(self) -> bytes:
        """The key of the digests of salts, once a request had a salt; else empty."""
        return self.__dict__.get("salt_key", b"")

    @property
    def replicas(self) -> Sequence[RequestPages]:
        """The cache of each copy of the model; this one by default."""
        return (self,)

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

    def report_changes(self) -> None:
        """Notes the contents that are gained and lost from now on, for :meth:`take_changes`.

        Those of one group of layers stand for all: the first one without a window, as it keeps pages the longest.
        """
        pools = self.pages.pools
        pool = next((each for each in pools if each.window is None), pools[0])
        pool.changes = PageChanges()

    def take_changes(self) -> Changes:
        """The contents that were gained and lost since the last call; none before :meth:`report_changes`."""
        noted = [pool.changes for pool in self.pages.pools if pool.changes is not None]
        return noted[0].pop() if noted else Changes()

    def forget_prefixes(self) -> None:
        """Empties all cached pages, and excludes pages in use from sharing with further requests."""
        self.pages.forget_prefixes()

    def contains(self, request_id: RequestID | TextGenerationContext) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request, by its identifier or its context.
        """
        return _id_of(request_id) in self.pages

    def cached_length(self, context: TextGenerationContext) -> int:
        """The number of first tokens of a request that :meth:`open` would find in full pages; opens nothing.

        Args:
            context: The request, which has no page table.
        """
        if context.start_idx != 0 or _echoes(context):
            return 0
        salt, contents, end = self._identity(context)
        return self.pages.cached_length(context.all_tokens[: end + 1], salt, contents)

    def open(self, context: TextGenerationContext) -> bool:
        """Gives a request a page table that starts with the cached pages of its first tokens, and a slot.

        Args:
            context: The request; it skips the tokens that are cached.

        Returns:
            Whether the table is new; False if the request already has one.

        Raises:
            OutOfPagesError: No slot of the recurrent states is free; nothing was changed.
        """
        if self.contains(context.request_id):
            return False
        self.claim(context.request_id)
        try:
            self.hold_adapter(context)
        except BaseException:
            self.release(context.request_id)
            raise
        reused = self.reuse_prefix(context)
        # for `retract`, which undoes an opening that did not lead to a step
        self._opened[context.request_id] = context.current_length, reused
        self.opened_tokens += context.current_length
        self.reused_tokens += reused
        return True

    def hold_adapter(self, context: TextGenerationContext) -> None:
        """Keeps the adapter of a request in memory until its page table is released.

        Args:
            context: The request.

        Raises:
            OutOfPagesError: The memory is full of adapters of running requests.
        """
        if self.adapters is not None:
            self.adapters.hold(context)

    def miss(self, context: TextGenerationContext) -> Miss | None:
        """Why the first tokens of a request were not in the cache; None if all but the last were, or nothing is cached.

        Args:
            context: The request; its table is open.

        Raises:
            KeyError: The request has no page table.
        """
        if not self.pages.enable_prefix_caching:
            return None
        if _echoes(context):
            return Miss(MissReason.NOT_SHARED, 0, context.current_length - 1)
        return self.pages.miss(context.request_id)

    def retract(self, request_id: RequestID) -> None:
        """Removes a page table that :meth:`open` has just made, and takes its tokens out of the counts.

        Args:
            request_id: The request; no step has run with the table.
        """
        tokens, reused = self._opened[request_id]
        self.opened_tokens -= tokens
        self.reused_tokens -= reused
        self.close(request_id)

    def close(self, request_id: RequestID) -> None:
        """Removes a request's page table and frees its slot; nothing happens if it has none."""
        if self.contains(request_id):
            self.release(request_id)

    def page_shortage(self, length: int, step: int) -> tuple[int, int] | None:
        """Checks whether a request can never run; see :meth:`PageManager.page_shortage`."""
        return self.pages.page_shortage(length, step)

    def missing_pages(self, context: TextGenerationContext, num_steps: int) -> int:
        """The number of pages that a request lacks for its next steps, the same in each group of layers.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
        """
        return self.pages.missing_pages(context.request_id, _length_after(context, num_steps))

    def fits(self, batch: Iterable[TextGenerationContext], num_steps: int) -> bool:
        """Whether enough pages are free for the next steps of requests.

        Args:
            batch: The requests; their tables are open.
            num_steps: The number of steps.
        """
        return sum(self.missing_pages(context, num_steps) for context in batch) <= self.free_pages

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps, and for the drafted tokens that the first one verifies.

        The first time for a request that was claimed by its context, cached pages of its first tokens are added before,
        and these tokens are skipped.

        Args:
            context: The request.
            num_steps: The number of steps.

        Raises:
            KeyError: The request has no page table.
            OutOfPagesError: Too few pages are free; no page was taken.
        """
        if self._unread and context.request_id in self._unread:
            self._unread.discard(context.request_id)
            self.hold_adapter(context)
            self.reuse_prefix(context)
        self.pages.reserve(context.request_id, _length_after(context, num_steps))

    def reserve(self, batch: Sequence[TextGenerationContext], num_steps: int) -> None:
        """Opens and extends the page tables of a batch; does nothing for batches of the scheduler.

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
                if context.request_id not in self.pages:
                    indices = context.start_idx, context.active_idx
                    self.open(context)
                    opened.append((context, *indices))
                self.alloc(context, num_steps)
        except OutOfPagesError:
            # only the tables that this call has opened; the others keep theirs
            for context, start, active in opened:
                self.retract(context.request_id)
                context.set_token_indices(start_idx=start, active_idx=active)
            raise

    def step(self, batch: TextGenerationContext | Sequence[TextGenerationContext]) -> None:
        """Records that the processed tokens of a batch are in the cache, and releases the pages that were reserved for
        tokens that were not accepted, and those that the windows have passed.

        Args:
            batch: The requests, or one; their contexts are already updated.
        """
        for context in batch if isinstance(batch, Sequence) else (batch,):
            key, length = context.request_id, context.start_idx
            if self.pages.enable_prefix_caching:
                salt, contents, end = self._identity(context)
                reusable = getattr(context, "reusable_tokens", None)
                end = min(length, end, length if reusable is None else reusable)
                self.pages.commit(key, context.all_tokens[:end], salt, contents)
            # after `commit`: a page that is released stays cached under its hash
            if self.slots is None or not self.slots.behind(
                key
            ):  # else its next step writes these pages again
                self.pages.trim(key, length)

    def truncate(self, context: TextContext, length: int) -> None:
        """Removes the last tokens of a request from its context and from the cache.

        What must be read again, besides the last remaining token: the tokens of a full page that the end is within; all
        tokens if a window has passed pages that are needed, or if the model has recurrent states, which cannot go back.

        Args:
            context: The request; its table, if it has one, holds its processed tokens.
            length: The number of tokens to keep.

        Raises:
            ValueError: The prompt, or tokens that were returned already, would be removed; nothing was changed.
        """
        # the last token is processed again, as its logits are needed
        kept = min(context.start_idx, length - 1)
        goes_back = kept < context.start_idx
        # first, as it refuses lengths; the pages are changed only if it succeeds
        context.truncate(length)
        if goes_back and self.contains(context.request_id):
            # a recurrent state cannot go back to any earlier token: all tokens are read again
            if self.slots is not None:
                self.slots.keep(context.request_id)
            self.keep(context, 0 if self.slots is not None else kept)

    def keep(self, context: TextGenerationContext, length: int) -> int:
        """Keeps the first tokens of a request in the cache, and removes the others; no image is kept in part.

        Args:
            context: The request; its next step begins after the kept tokens.
            length: The maximum number of tokens to keep.

        Returns:
            The number of tokens; see :meth:`PageManager.truncate`.
        """
        # pages may hold fewer tokens than asked for, and no image is cut: until both agree
        while True:
            held = self.pages.truncate(context.request_id, length)
            length = _before_image(context, held)
            if length == held:
                context.set_token_indices(start_idx=held)
                return held

    def claim(self, request_id: RequestID | TextGenerationContext, replica_idx: int = 0) -> None:
        """Gives a request an empty page table, and a slot of the recurrent states.

        Args:
            request_id: The request, by its identifier or its context.
            replica_idx: The copy of the model; this cache is of one: 0.

        Raises:
            ValueError: The request already has a page table, or there is no such copy.
            OutOfSlotsError: No slot is free; nothing was changed.
        """
        if replica_idx != 0:
            raise ValueError(f"claim: the replica is {replica_idx}; there is one, 0")
        own_id = _id_of(request_id)
        self.pages.claim(own_id)
        if self.slots is not None:
            try:
                self.slots.claim(own_id)
            # both or neither: a table without a slot would never run
            except state_slots.OutOfSlotsError:
                self.pages.release(own_id)
                raise
        if own_id is not request_id:
            # a claim takes no pages: the first `alloc` looks up the cached ones
            self._unread.add(own_id)

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Adds cached pages that hold the first tokens of a request to its table, and skips these tokens.

        Args:
            context: The request; its page table is empty.

        Returns:
            The number of skipped tokens; 0 if tokens of the request were already processed, or if the
            log-probabilities of the prompt are requested, for which it is read as a whole.
        """
        if context.start_idx != 0 or _echoes(context):
            return 0
        salt, contents, end = self._identity(context)
        # one token more, as `PageManager.reuse_prefix` leaves the last one to be read
        tokens = context.all_tokens[: end + 1]
        reused = self.pages.reuse_prefix(context.request_id, tokens, salt, contents)
        return self.keep(context, _before_image(context, reused)) if reused else 0

    def release(self, request_id: RequestID | TextGenerationContext) -> None:
        """Removes a request's page table, and frees its slot.

        Args:
            request_id: The request, by its identifier or its context.

        Raises:
            KeyError: It has none.
        """
        own_id = _id_of(request_id)
        self.pages.release(own_id)
        self._unread.discard(own_id)
        self.forget_opening(own_id)
        if self.adapters is not None:
            self.adapters.release(own_id)
        if self.slots is not None:
            self.slots.release(own_id)

    def forget_opening(self, request_id: RequestID | TextGenerationContext) -> None:
        """Forgets how many tokens a request had when its table was opened.

        Args:
            request_id: The request, by its identifier or its context.
        """
        self._opened.pop(_id_of(request_id), None)

    def _identity(self, context: TextGenerationContext) -> tuple[bytes, Contents, int]:
        """What the pages of a request depend on besides its tokens: a salt for all of them, the images, and the number
        of tokens whose pages may be shared: those before the first image without a hash.
        """
        images: Sequence[ImageMetadata] = getattr(context, "images", ())
        if not images:
            return self._salt(context), (), context.current_length
        end, contents = context.current_length, list[tuple[int, bytes]]()
        for image in images:
            # an image without a hash equals no other: pages from it on are not shared
            if image.image_hash == -1:
                end = image.start_idx
                break
            contents.append((image.start_idx, image.image_hash.to_bytes(8, "little", signed=True)))
        return self._salt(context), contents, end

    def _salt(self, context: TextGenerationContext) -> bytes:
        """The digest of a request's adapter, and of those who may share its pages."""
        adapter: str = getattr(context, "adapter", "")
        scale: float = getattr(context, "adapter_scale", 1.0)
        salt = Salt(adapter, scale, getattr(context, "cache_salt", ""))
        # the key is made when it is needed first
        return salt.digest(self.salt_key if salt.needs_key else b"")


def _before_image(context: TextGenerationContext, index: int) -> int:
    """The index, or the first token of the image that it is within."""
    images: Sequence[ImageMetadata] = getattr(context, "images", ())
    inside = (image.start_idx for image in images if image.start_idx < index < image.end_idx)
    return next(inside, index)


def _length_after(context: TextGenerationContext, num_steps: int) -> int:
    """The number of cached tokens after some steps, with all drafted tokens; the token of the last step is not written
    to the cache.
    """
    return context.active_idx + draft_length(context) + num_steps - 1


def _id_of(request: RequestID | TextGenerationContext) -> RequestID:
    """The identifier of a request that is given by it or by its context."""
    return request if isinstance(request, RequestID) else request.request_id


def _echoes(context: TextGenerationContext) -> bool:
    """Whether the log-probabilities of the prompt's tokens are requested."""
    return bool(context.log_probabilities and getattr(context, "log_probabilities_echo", False))
