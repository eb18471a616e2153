"""Batches of text requests: prefill, decode, chunked prefill, preemption. No tensors.

A request *waits* until its prompt is read, in one step or in chunks; then it *runs*: each step
gives it a token. Reading prompts comes first, as long as there is room for the request to run.
When pages run out, the request that came last gives its pages back, waits again, and its tokens are
read anew; the request that came first always goes on, so every request ends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from max.interfaces import BatchType, RequestID, TextGenerationContext, TextGenerationInputs
from max.pipelines.core.exceptions import InputError
from max.pipelines.kv_cache.page_manager import OutOfPagesError


class PageSource(Protocol):
    """What a scheduler needs of a KV cache; ``PagedKVCacheManager`` is one."""

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        ...

    @property
    def total_num_pages(self) -> int:
        """All pages."""
        ...

    @property
    def free_pages(self) -> int:
        """Pages that no request holds."""
        ...

    def contains(self, request_id: RequestID) -> bool:
        """Whether a request has a page table.

        Args:
            request_id: The request.
        """
        ...

    def claim(self, request_id: RequestID) -> None:
        """Gives a request an empty page table.

        Args:
            request_id: The request.
        """
        ...

    def reuse_prefix(self, context: TextGenerationContext) -> int:
        """Takes pages that hold the beginning of the request's tokens.

        Args:
            context: The request.
        """
        ...

    def alloc(self, context: TextGenerationContext, num_steps: int = 1) -> None:
        """Extends a request's page table for its next steps, or raises ``OutOfPagesError``.

        Args:
            context: The request.
            num_steps: The steps.
        """
        ...

    def release(self, request_id: RequestID) -> None:
        """Takes a request's page table away.

        Args:
            request_id: The request.
        """
        ...


@dataclass(frozen=True)
class SchedulerLimits:
    """How big batches may be.

    Args:
        max_batch_size: Requests that run at once.
        max_ce_batch_size: Prompts that are read in one step.
        prefill_chunk_size: Tokens of prompts that are read in one step.
        enable_chunked_prefill: Whether a prompt may be read in chunks; if not, a prompt that is
            longer than ``prefill_chunk_size`` is read alone.
        enable_in_flight_batching: Whether running requests get a token in steps that read prompts.
        max_num_steps: Tokens a running request and execution.
        max_seconds: Executions of several tokens are not made longer than this, as steps took lately.
        max_batch_context_length: Tokens that the requests of a batch have together.

    Raises:
        ValueError: A limit is less than 1.
    """

    max_batch_size: int = 1
    max_ce_batch_size: int = 192
    prefill_chunk_size: int = 8192
    enable_chunked_prefill: bool = True
    enable_in_flight_batching: bool = False
    max_num_steps: int = 1
    max_seconds: float | None = None
    max_batch_context_length: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "max_seconds" or value is None or isinstance(value, bool):
                continue
            if value < 1:
                raise ValueError(f"SchedulerLimits: {name} is {value}; expected at least 1")
        if self.max_seconds is not None and self.max_seconds <= 0:
            raise ValueError(
                f"SchedulerLimits: max_seconds is {self.max_seconds}; expected more than 0"
            )


class TextScheduler:
    """Makes the batches of text requests.

    Args:
        pages: The KV cache.
        limits: How big batches may be.
    """

    def __init__(self, pages: PageSource, limits: SchedulerLimits) -> None:
        self._pages, self._limits = pages, limits
        self._waiting: OrderedDict[RequestID, TextGenerationContext] = OrderedDict()
        self._running: OrderedDict[RequestID, TextGenerationContext] = OrderedDict()
        self._arrival: dict[RequestID, int] = {}
        self._count = 0
        self._step_seconds: float | None = None
        self.preemptions = 0
        """How often a request had to give its pages back."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._arrival

    def add(self, context: TextGenerationContext) -> None:
        """Takes a new request.

        Args:
            context: The request.

        Raises:
            InputError: It can never run: at full length it needs more pages than there are.
            ValueError: It is here already.
        """
        key = context.request_id
        if key in self._arrival:
            raise ValueError(f"request {key} is scheduled already")
        longest = context.max_length or context.current_length + 1
        # the last token is never written
        needed = -(-(longest - 1) // self._pages.page_size)
        if needed > self._pages.total_num_pages:
            raise InputError(
                f"the request needs {needed} pages of the KV cache at {longest} tokens, and there "
                f"are {self._pages.total_num_pages}",
                "Ask for fewer new tokens, or give a greater --max-length to make room.",
            )
        self._arrival[key] = self._count
        self._count += 1
        self._waiting[key] = context

    def remove(self, request_id: RequestID) -> None:
        """Forgets a request, and frees its pages; nothing happens where it is not here.

        Args:
            request_id: The request.
        """
        if self._arrival.pop(request_id, None) is not None:
            self._waiting.pop(request_id, None)
            self._running.pop(request_id, None)
            self._free(request_id)

    def requeue(self, context: TextGenerationContext) -> None:
        """Takes a request's pages away; it waits, and its tokens are read anew.

        Args:
            context: The request, which is here.
        """
        if not context.is_done:
            self._preempt(context)

    def schedule(self) -> TextGenerationInputs[TextGenerationContext] | None:
        """The next batch, with its pages reserved; None where there is nothing to do.

        After it was run, and its contexts updated, :meth:`update` must be called.
        """
        prompts = self._prompts()
        if prompts:
            batch = list(prompts)
            if self._limits.enable_in_flight_batching:
                batch = [*self._decodable(1, keep=prompts), *batch]
            return self._inputs(batch, BatchType.CE, 1)
        steps = self._steps()
        batch = self._decodable(steps, keep=())
        if not batch and self._waiting:
            # all that ran has given its pages back to a request that waits
            return self.schedule()
        return self._inputs(batch, BatchType.TG, steps) if batch else None

    def took(self, seconds: float, steps: int) -> None:
        """Tells how long an execution of a decoding batch took.

        Args:
            seconds: How long.
            steps: How many tokens each request got.
        """
        if steps > 0:
            last = self._step_seconds
            now = seconds / steps
            # a single slow step shall not change much
            self._step_seconds = now if last is None else (last + now) / 2

    def update(self, batch: Iterable[TextGenerationContext]) -> list[RequestID]:
        """Takes a batch after it was run.

        Args:
            batch: Its contexts, updated.

        Returns:
            The requests that have ended; their pages are free.
        """
        ended: list[RequestID] = []
        for context in batch:
            key = context.request_id
            if key not in self._arrival:
                continue  # it was removed meanwhile
            if context.is_done:
                self.remove(key)
                ended.append(key)
            elif not context.needs_ce:
                if self._waiting.pop(key, None) is not None:
                    self._running[key] = context
        return ended

    def _inputs(
        self, batch: list[TextGenerationContext], kind: BatchType, steps: int
    ) -> TextGenerationInputs[TextGenerationContext]:
        return TextGenerationInputs(
            batches=[{context.request_id: context for context in batch}],
            num_steps=steps,
            batch_type=kind,
        )

    def _prompts(self) -> list[TextGenerationContext]:
        """The prompts, or chunks of them, to read in the next step."""
        if not self._waiting:
            return []
        limits, batch = self._limits, []
        room = limits.prefill_chunk_size
        lengths = sum(c.current_length for c in self._running.values())
        for context in list(self._waiting.values()):
            if (
                room < 1
                or len(batch) >= limits.max_ce_batch_size
                or len(self._running) + len(batch) >= limits.max_batch_size
            ):
                break
            if not self._admit(context, room, lengths, bool(batch)):
                break
            batch.append(context)
            room -= context.active_length
            lengths += context.current_length
        return batch

    def _admit(self, context: TextGenerationContext, room: int, lengths: int, others: bool) -> bool:
        """Reserves pages for a prompt, or for as much of it as fits; False where it must wait."""
        limits, key = self._limits, context.request_id
        fresh = not self._pages.contains(key)
        if fresh:
            self._pages.claim(key)
            self._pages.reuse_prefix(context)
        busy = others or bool(self._running)
        fits = context.active_length <= room
        if not fits and limits.enable_chunked_prefill:
            context.set_token_indices(active_idx=context.start_idx + room)
            fits = True
        bound = limits.max_batch_context_length
        if busy and (
            not (fits or not others)
            or (bound is not None and lengths + context.current_length > bound)
        ):
            return self._put_off(context, fresh)
        try:
            self._pages.alloc(context)
        except OutOfPagesError:
            # the first in line takes pages from those that came after it and hold some
            if not busy and self._preempt_one(than=context):
                return self._admit(context, room, lengths, others)
            return self._put_off(context, fresh)
        # a page for each running request: else one of them would soon take this one's pages
        if fresh and busy and self._pages.free_pages < len(self._running):
            return self._put_off(context, fresh)
        return True

    def _put_off(self, context: TextGenerationContext, fresh: bool) -> bool:
        if fresh:
            self._free(context.request_id)
            context.reset()
        else:
            context.set_token_indices(active_idx=context.end_idx)
        return False

    def _steps(self) -> int:
        """How many tokens the running requests can get in one execution: as many as the nearest end, and as pages are there for."""
        left = [
            context.compute_num_available_steps(context.max_length)
            for context in self._running.values()
            if context.max_length is not None
        ]
        most = self._limits.max_num_steps
        if self._limits.max_seconds is not None and most > 1:
            # the first step of all tells how long one takes
            step = self._step_seconds
            most = 1 if step is None else min(most, int(self._limits.max_seconds / max(step, 1e-6)))
        most = max(1, min([most, *left]))
        # nobody shall give pages back for the sake of further steps
        pages = len(self._running) * (1 + most // self._pages.page_size)
        return most if self._pages.free_pages >= pages else 1

    def _decodable(
        self, steps: int, keep: Iterable[TextGenerationContext]
    ) -> list[TextGenerationContext]:
        """The running requests whose next tokens have a place, the first come before others."""
        kept = {context.request_id for context in keep}
        batch: list[TextGenerationContext] = []
        for key in sorted(self._running, key=self._arrival.__getitem__):
            context = self._running.get(key)
            while context is not None:
                try:
                    self._pages.alloc(context, steps)
                    batch.append(context)
                    break
                except OutOfPagesError:
                    if not self._preempt_one(than=context, kept=kept):
                        if kept:
                            break  # it takes part in the next step without prompts
                        self._preempt(context)
                        break
        return batch

    def _preempt_one(self, than: TextGenerationContext, kept: set[RequestID] | None = None) -> bool:
        """Takes the pages of the request that came last, and after another; False: there is none."""
        after = self._arrival[than.request_id]
        holders = [
            key
            for key in (*self._waiting, *self._running)
            if self._arrival[key] > after and self._pages.contains(key) and key not in (kept or ())
        ]
        if not holders:
            return False
        last = max(holders, key=self._arrival.__getitem__)
        self._preempt(self._running.get(last) or self._waiting[last])
        return True

    def _preempt(self, context: TextGenerationContext) -> None:
        key = context.request_id
        self._free(key)
        context.reset()
        self.preemptions += 1
        self._running.pop(key, None)
        self._waiting[key] = context
        # those that came first are read first
        for other in sorted(self._waiting, key=self._arrival.__getitem__):
            self._waiting.move_to_end(other)

    def _free(self, request_id: RequestID) -> None:
        if self._pages.contains(request_id):
            self._pages.release(request_id)
