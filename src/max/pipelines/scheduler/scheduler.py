"""Batches of text requests: prefill, decode, chunked prefill, preemption. No tensors.

A request is *waiting* until its whole prompt is in the cache, read in one step or in chunks; then it is *running*,
and each step adds a token. Prompts are read before requests decode, as long as pages are free. If pages run out,
the request with the last rank (:class:`RequestOrder`: priority, fairness, arrival) is preempted: it loses its pages,
waits again, and its tokens are read again. The first request in the order is never preempted for another, so every
request ends unless requests of a higher priority keep arriving.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable

from max.interfaces import BatchType, RequestID, TextGenerationContext, TextGenerationInputs
from max.pipelines.core.draft_tree import draft_length
from max.pipelines.core.exceptions import InputError
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.page_tables import OutOfPagesError
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.order import RequestOrder
from max.pipelines.scheduler.step_times import StepEstimate


class TextScheduler:
    """Forms the batches of text requests, and reserves their pages.

    Args:
        pages: The KV cache.
        limits: The limits of batches.
    """

    def __init__(self, pages: RequestPages, limits: SchedulerLimits) -> None:
        self._pages, self._limits = pages, limits
        # both dictionaries are sorted by rank
        self._waiting: dict[RequestID, TextGenerationContext] = {}
        self._running: dict[RequestID, TextGenerationContext] = {}
        self._long: set[RequestID] = set()  # waiting requests whose prompts take several chunks
        self._order = RequestOrder()
        self._times = StepEstimate()
        self._prompt_tokens, self._mixed = 0, False  # of the last step that read prompts
        self.preemptions = 0
        """The number of times that a request lost its pages."""

    @property
    def pages(self) -> RequestPages:
        """The pages of the KV cache, or of all caches."""
        return self._pages

    @property
    def running_requests(self) -> Collection[TextGenerationContext]:
        """The requests whose prompts are read, by rank."""
        return self._running.values()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._order

    def counts(self) -> dict[str, int]:
        """The load: running and waiting requests, used pages, preemptions, tokens read and tokens reused."""
        pages = self._pages
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "used_pages": pages.used_pages,
            "preemptions": self.preemptions,
            "prompt_tokens": pages.opened_tokens,
            "reused_tokens": pages.reused_tokens,
        }

    def add(self, context: TextGenerationContext, priority: int = 0, client: str = "") -> None:
        """Adds a request.

        Args:
            context: The request.
            priority: Lower values come first, regardless of arrival.
            client: The client that sent it; clients share the engine equally.

        Raises:
            InputError: The request can never run: at full length it needs more pages than the cache has, or its
                adapter is not loaded.
            ValueError: The scheduler already has it.
        """
        key = context.request_id
        if key in self._order:
            raise ValueError(f"request {key} is scheduled already")
        longest = context.max_length or context.current_length + 1
        # a sequence of full length holds one token less, as the last token is never written to the cache
        limits = self._limits
        chunk = limits.prefill_chunk_size if limits.enable_chunked_prefill else longest
        # not for several steps in a call: they are fewer where pages lack
        lacking = self._pages.page_shortage(longest - 1, chunk)
        if lacking is not None:
            needed, pages = lacking
            raise InputError(
                f"the request needs {needed} pages of the KV cache at {longest} tokens, and there "
                f"are {pages}",
                "Ask for fewer new tokens, or give a greater --max-length to make room.",
            )
        if self._pages.adapters is not None:
            self._pages.adapters.attach(context)
        self._order.add(context, priority, client)
        last = next(reversed(self._waiting.values()), None)
        self._waiting[key] = context
        # sort only if the new request does not come last: a sort per request would make arrivals quadratic
        if last is not None and self._order.rank(last) > self._order.rank(context):
            self._waiting = self._order.sorted_requests(self._waiting)

    def remove(self, request_id: RequestID) -> None:
        """Removes a request and frees its pages; nothing happens if it is unknown."""
        # a request may have ended in the step that its client cancelled it in
        if self._pages.adapters is not None:
            self._pages.adapters.detach(request_id)
        if self._order.remove(request_id):
            self._long.discard(request_id)
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)
            self._pages.close(request_id)

    def requeue(self, context: TextGenerationContext) -> None:
        """Preempts a request whose cache contents are unknown, for example after an interrupted step.

        Args:
            context: The request; nothing happens if it is unknown.
        """
        if context.request_id in self._order:
            self._preempt(context)

    def truncate(self, context: TextContext, length: int) -> None:
        """Removes the last tokens of a request, between two steps; what remains may have to be read again.

        Args:
            context: The request; its generation has not ended.
            length: The number of tokens to keep.

        Raises:
            ValueError: The prompt, or tokens that were returned already, would be removed; nothing was changed.
        """
        self._pages.truncate(context, length)
        if self._running.get(context.request_id) is context and context.needs_ce:
            self._wait_again(context)

    def steady_steps(self) -> int:
        """The number of next steps that give the running requests a token each, and change nothing else.

        No request can join before they have run, none loses its pages, and none reaches its maximum length before the
        last of them. So they can be scheduled as one if no request is added meanwhile and no token ends one.

        Returns:
            The number; 0: the next step may read a prompt or preempt a request, or steps are joined by the limits.
        """
        limits, running = self._limits, self._running
        if limits.max_num_steps > 1 or not running or any(map(_is_wide, running.values())):
            return 0
        if self._waiting and len(running) < limits.max_batch_size:
            return 0
        steps = min(
            (c.compute_num_available_steps(c.max_length) if c.max_length else 1)
            for c in running.values()
        )
        # the most steps that the free pages suffice for: with each one, more pages are missing
        if self._pages.fits(running.values(), steps):
            return steps
        return bisect_left(
            range(1, steps), True, key=lambda count: not self._pages.fits(running.values(), count)
        )

    def schedule(
        self, steps: int | None = None
    ) -> TextGenerationInputs[TextGenerationContext] | None:
        """The next batch, with its pages reserved; None if no request is left.

        Call :meth:`update` after the batch has run and its contexts are updated.

        Args:
            steps: The tokens of each running request, at most :meth:`steady_steps`; None: as the limits say.

        Raises:
            RuntimeError: Requests of others hold the pages that the first one needs; a later call may succeed.
        """
        if steps is not None:
            return _inputs(self._decodable(steps), BatchType.TG, steps)
        # prompts first: a request that waits has no token yet, one that runs has some to show
        prompts = self._prompts()
        if prompts:
            decoding: list[TextGenerationContext] = []
            if self._limits.enable_in_flight_batching:
                decoding = self._decodable(1, batch_ids={context.request_id for context in prompts})
            self._prompt_tokens = sum(context.active_length for context in prompts)
            self._mixed = bool(decoding)
            return _inputs([*decoding, *prompts], BatchType.CE, 1)
        if self._waiting and not self._running:
            # no request of this scheduler that comes later holds pages now
            raise RuntimeError(
                f"no request can run: {self._pages.used_pages} pages of the KV cache are used by requests of another "
                "engine; all requests of a pipeline must go through one engine"
            )
        steps = self._steps()
        batch = self._decodable(steps)
        if batch:
            return _inputs(batch, BatchType.TG, steps)
        # decoding preempted every running request in favor of waiting ones: admit these now
        return self.schedule() if self._waiting else None

    def record_step(self, seconds: float, steps: int) -> None:
        """Records the duration of a decoding batch, from which :meth:`schedule` chooses the number of steps.

        Args:
            seconds: The duration of the batch.
            steps: The number of tokens that each request got.
        """
        self._times.record_plain(seconds, steps)

    def record_prompts(self, seconds: float) -> None:
        """Records the duration of the last batch with prompts, from which the size of the next chunks is chosen.

        Args:
            seconds: The duration of the batch.
        """
        self._times.record_prompts(seconds, self._prompt_tokens, self._mixed)

    def update(self, batch: Iterable[TextGenerationContext]) -> list[RequestID]:
        """Updates the queues after a batch has run.

        Args:
            batch: The contexts of the batch, updated.

        Returns:
            The requests that have ended; their pages are freed.
        """
        ended: list[RequestID] = []
        for context in batch:
            key = context.request_id
            if key not in self._order:
                continue  # removed while the batch ran
            if context.is_done:
                self.remove(key)
                ended.append(key)
            elif key in self._waiting and not context.needs_ce:  # the whole prompt is in the cache
                del self._waiting[key]
                self._long.discard(key)
                self._running[key] = context
                self._running = self._order.sorted_requests(self._running)
        return ended

    def _prompts(self) -> list[TextGenerationContext]:
        """The prompts, or chunks of prompts, that the next step reads; their pages are reserved."""
        limits = self._limits
        batch: list[TextGenerationContext] = []
        if not self._waiting:
            return batch
        tokens_left, long_left = limits.prefill_chunk_size, self._chunk()
        room = min(limits.max_ce_batch_size, limits.max_batch_size - len(self._running))
        # `max_batch_context_length` bounds running requests and new prompts together
        context_length = 0
        if limits.max_batch_context_length is not None:
            context_length = sum(context.current_length for context in self._running.values())
        for context in list(self._waiting.values()):
            if tokens_left < 1 or len(batch) >= room:
                break
            left = tokens_left, long_left
            joins = self._may_read(context, long_left) and self._admit(
                context, left, context_length, bool(batch)
            )
            # `_admit` may have found that the prompt takes several chunks: then a shorter prompt may still join
            if not joins and self._may_read(context, long_left):
                break
            if not joins:
                continue  # a later prompt that fits one chunk may join
            batch.append(context)
            # virtual time: a client that was idle gets no credit for it
            self._order.start(context)
            tokens_left -= context.active_length
            if context.request_id in self._long:
                long_left -= context.active_length
            context_length += context.current_length
        return batch

    def _chunk(self) -> int:
        """The number of tokens that the next step may read of prompts that take several chunks.

        Running requests wait while a chunk is read, so chunks are short enough that the step takes only
        `mixed_step_ratio` times a decoding step. The number grows if more requests wait than run.
        """
        limits, ratio = self._limits, self._limits.mixed_step_ratio
        if ratio is None or not limits.enable_in_flight_batching or not self._running:
            return limits.prefill_chunk_size
        running = len(self._running)
        waiting = min(len(self._waiting), limits.max_batch_size - running)
        # the chunk's share of the step, relative to a decoding step
        chunk = self._times.chunk(max(ratio - 1, waiting / running))
        return min(limits.prefill_chunk_size, chunk or limits.prefill_chunk_size)

    def _may_read(self, context: TextGenerationContext, long_left: int) -> bool:
        """Whether the step can read a prompt; prompts of several chunks share `long_left` tokens."""
        return long_left > 0 or context.request_id not in self._long

    def _room(self, context: TextGenerationContext, tokens_left: int, long_left: int) -> int:
        """The number of tokens of a prompt that the next step can read, with chunked prefill."""
        if context.active_length > self._limits.prefill_chunk_size:
            self._long.add(context.request_id)
        return min(tokens_left, long_left) if context.request_id in self._long else tokens_left

    def _admit(
        self,
        context: TextGenerationContext,
        budgets: tuple[int, int],
        context_length: int,
        joins: bool,
    ) -> bool:
        """Reserves the pages of a prompt, or of its next chunk; False if it has to wait.

        Args:
            context: The first waiting request that is not in the batch.
            budgets: The tokens that the step can still read of all prompts, and of prompts of several chunks.
            context_length: The number of tokens of all requests that run or are in the batch.
            joins: Whether the batch already has prompts.
        """
        limits = self._limits
        busy = joins or bool(self._running)
        try:
            is_new = self._pages.open(context)
        except OutOfPagesError:
            # a later waiting request with part of its prompt read may hold the last slot
            if not busy and self._preempt_last(after=context):
                return self._admit(context, budgets, context_length, joins)
            return False
        tokens_left = budgets[0]
        if limits.enable_chunked_prefill:
            tokens_left = self._room(context, *budgets)
            if tokens_left < 1:
                return self._put_off(context, is_new)
        if context.active_length > tokens_left:
            if limits.enable_chunked_prefill:
                context.set_token_indices(active_idx=context.start_idx + tokens_left)
            elif joins:
                return self._put_off(context, is_new)
        bound = limits.max_batch_context_length
        if busy and bound is not None and context_length + context.current_length > bound:
            return self._put_off(context, is_new)
        try:
            self._pages.alloc(context)
        except OutOfPagesError:
            # nothing runs, so later waiting requests with part of their prompts read hold the pages
            if not busy and self._preempt_last(after=context):
                return self._admit(context, budgets, context_length, joins)
            return self._put_off(context, is_new)
        # keep one free page per request that grows: otherwise one of them would soon preempt this request
        if is_new and self._pages.free_pages < len(self._running):
            if self._pages.free_pages < sum(map(self._grows, self._running.values())):
                return self._put_off(context, is_new)
        return True

    def _grows(self, context: TextGenerationContext) -> bool:
        """Whether a running request needs further pages before it ends."""
        if context.max_length is None:
            return True
        # the last token is sampled, not cached
        left = max(1, context.max_length - context.active_idx - draft_length(context))
        return self._pages.missing_pages(context, left) > 0

    def _put_off(self, context: TextGenerationContext, is_new: bool) -> bool:
        """Restores a waiting request to its state before :meth:`_admit`; always returns False."""
        if is_new:
            self._pages.retract(context.request_id)
            context.reset()
        else:
            context.set_token_indices(active_idx=context.end_idx)
        return False

    def _steps(self) -> int:
        """The number of steps of one execution, limited by the room left in each sequence: each gives a token or more
        to each running request."""
        if self._limits.max_num_steps == 1:
            return 1
        # others than those with drafts of a pipeline that repeats these give several tokens by themselves
        if any(
            _is_wide(context) and not (self._limits.repeats_drafts and draft_length(context))
            for context in self._running.values()
        ):
            return 1
        room = [
            context.compute_num_available_steps(context.max_length)
            for context in self._running.values()
            if context.max_length is not None
        ]
        # all requests take the same number of steps: the shortest room bounds it
        steps = min([self._limits.max_num_steps, *room])
        # ends after at most `max_num_steps` attempts
        while steps > 1 and not self._fits(steps):
            steps -= 1
        return steps

    def _fits(self, steps: int) -> bool:
        """Whether an execution of several steps is short enough and needs no preemption."""
        longest, step = self._limits.max_seconds, self._times.plain
        if longest is not None and (step is None or step * steps > longest):
            return False
        return self._pages.fits(self._running.values(), steps)

    def _decodable(
        self, steps: int, batch_ids: Collection[RequestID] = ()
    ) -> list[TextGenerationContext]:
        """The running requests for the next steps, with their pages reserved.

        Args:
            steps: The number of steps.
            batch_ids: Requests of the same batch, which must keep their pages.
        """
        batch: list[TextGenerationContext] = []
        # a copy: `_preempt` takes requests out of the queue
        for key, context in list(self._running.items()):
            # each turn frees pages or drops a draft, so the loop ends
            while key in self._running:
                try:
                    self._pages.alloc(context, steps)
                    batch.append(context)
                    break
                except OutOfPagesError:
                    # drafted tokens are a guess: they take no pages from other requests
                    if isinstance(context, TextContext) and context.draft_tokens:
                        context.set_draft(())
                        continue
                    if self._preempt_last(after=context, batch_ids=batch_ids):
                        continue
                    if batch_ids:
                        break  # this request decodes in the next step that reads no prompts
                    self._preempt(context)
        return batch

    def _preempt_last(
        self, after: TextGenerationContext, batch_ids: Collection[RequestID] = ()
    ) -> bool:
        """Preempts the request with the last rank among those with pages, if it ranks after `after`."""
        holders = [
            context
            for context in (*self._waiting.values(), *self._running.values())
            if self._pages.contains(context) and context.request_id not in batch_ids
        ]
        # the request of the least right loses its pages: what is lost is read again
        last = max(holders, key=self._order.rank, default=after)
        if self._order.rank(last) <= self._order.rank(after):
            return False
        self._preempt(last)
        return True

    def _preempt(self, context: TextGenerationContext) -> None:
        """Releases the pages of a request and moves it to the waiting requests; its tokens are read again."""
        self._pages.close(context.request_id)
        context.reset()
        self.preemptions += 1
        self._wait_again(context)

    def _wait_again(self, context: TextGenerationContext) -> None:
        """Moves a request to the waiting requests, as its tokens are read again."""
        self._running.pop(context.request_id, None)
        self._waiting[context.request_id] = context
        self._waiting = self._order.sorted_requests(self._waiting)


def _is_wide(context: TextGenerationContext) -> bool:
    """Whether the next step of a running request has several tokens: drafted ones, or ones that its grammar forced."""
    return context.active_length > 1


def _inputs(
    batch: list[TextGenerationContext], batch_type: BatchType, steps: int
) -> TextGenerationInputs[TextGenerationContext]:
    """The inputs of a batch for the pipeline."""
    return TextGenerationInputs(
        batches=[{context.request_id: context for context in batch}],
        num_steps=steps,
        batch_type=batch_type,
    )
