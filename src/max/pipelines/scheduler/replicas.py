"""Schedules the requests of several copies of a model, each by a scheduler of its own. No tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from max.interfaces import BatchType, RequestID, TextGenerationContext, TextGenerationInputs
from max.pipelines.core.text_context import TextContext
from max.pipelines.kv_cache.request_pages import RequestPages
from max.pipelines.scheduler.limits import SchedulerLimits
from max.pipelines.scheduler.scheduler import TextScheduler


class ReplicaScheduler:
    """Assigns requests to the copies of a model, and joins the batches of all copies.

    A request stays with the copy that it was assigned to, since its pages do. A step joins the next batch of each
    copy; if a copy reads prompts, the others decode one token.

    Args:
        pages: The KV caches of all copies.
        limits: The limits of the batches of each copy.
    """

    def __init__(self, pages: RequestPages, limits: SchedulerLimits) -> None:
        self.pages = pages
        """The pages of all copies."""
        self.schedulers = [TextScheduler(own, limits) for own in pages.replicas]
        """The scheduler of each copy."""
        self._scheduler_of: dict[RequestID, TextScheduler] = {}
        # the batch of each copy in the last step; None: it had none
        self._last: Sequence[TextGenerationInputs[TextGenerationContext] | None] = ()

    @property
    def preemptions(self) -> int:
        """The number of times that a request lost its pages."""
        return sum(scheduler.preemptions for scheduler in self.schedulers)

    def __len__(self) -> int:
        return sum(map(len, self.schedulers))

    def __contains__(self, request_id: object) -> bool:
        return any(request_id in scheduler for scheduler in self.schedulers)

    def counts(self) -> dict[str, int]:
        """The load over all copies, as in `TextScheduler.counts`."""
        total = Counter[str]()
        for scheduler in self.schedulers:
            # `update` adds, and keeps counts of 0
            total.update(scheduler.counts())
        return dict(total)

    def add(self, context: TextGenerationContext, priority: int = 0, client: str = "") -> None:
        """Adds a request to the copy with the fewest requests; of several such copies, to the one that has the most of
        its first tokens in its cache.

        Args:
            context: The request.
            priority: Lower values come first, regardless of arrival.
            client: The client that sent it; clients share each copy equally.

        Raises:
            InputError: The request can never run: at full length it needs more pages than a cache has.
            ValueError: A scheduler already has it.
        """
        if context.request_id in self._scheduler_of:
            raise ValueError(f"request {context.request_id} is scheduled already")
        fewest = min(map(len, self.schedulers))
        idle = [scheduler for scheduler in self.schedulers if len(scheduler) == fewest]
        # `max` takes the first of equals, so requests without a known prefix go to the first copies
        scheduler = max(idle, key=lambda each: each.pages.cached_length(context))
        scheduler.add(context, priority, client)
        self._scheduler_of[context.request_id] = scheduler

    def remove(self, request_id: RequestID) -> None:
        """Removes a request and frees its pages; nothing happens if it is unknown."""
        scheduler = self._scheduler_of.pop(request_id, None)
        if scheduler is not None:
            scheduler.remove(request_id)

    def requeue(self, context: TextGenerationContext) -> None:
        """Preempts a request whose cache contents are unknown, for example after an interrupted step.

        Args:
            context: The request; nothing happens if it is unknown.
        """
        if context.request_id in self._scheduler_of:
            self._scheduler_of[context.request_id].requeue(context)

    def truncate(self, context: TextContext, length: int) -> None:
        """Removes the last tokens of a request, between two steps; what remains may have to be read again.

        Args:
            context: The request; its generation has not ended.
            length: The number of tokens to keep.

        Raises:
            KeyError: The request is unknown.
            ValueError: The prompt, or tokens that were returned already, would be removed; nothing was changed.
        """
        self._scheduler_of[context.request_id].truncate(context, length)

    def schedule(self) -> TextGenerationInputs[TextGenerationContext] | None:
        """The next batch of each copy, with its pages reserved; None if no request is left."""
        self._last = [scheduler.schedule() for scheduler in self.schedulers]
        own = [inputs for inputs in self._last if inputs is not None]
        if not own:
            return None
        reads = any(inputs.batch_type is BatchType.CE for inputs in own)
        return TextGenerationInputs(
            batches=[{} if inputs is None else inputs.batch for inputs in self._last],
            # pages that a copy has reserved for further steps are released after this one
            num_steps=min(inputs.num_steps for inputs in own),
            batch_type=BatchType.CE if reads else BatchType.TG,
        )

    def record_step(self, seconds: float, steps: int) -> None:
        """Records the duration of a step in which all copies decoded.

        Args:
            seconds: The duration of the step.
            steps: The number of tokens that each request got.
        """
        for scheduler, inputs in zip(self.schedulers, self._last, strict=True):
            if inputs is not None:
                scheduler.record_step(seconds, steps)

    def record_prompts(self, seconds: float) -> None:
        """Records the duration of a step in which a copy read prompts.

        Args:
            seconds: The duration of the step.
        """
        for scheduler, inputs in zip(self.schedulers, self._last, strict=True):
            if inputs is not None and inputs.batch_type is BatchType.CE:
                scheduler.record_prompts(seconds)

    def update(self, batch: Iterable[TextGenerationContext]) -> list[RequestID]:
        """Updates the queues after a batch has run.

        Args:
            batch: The contexts of the batch, updated.

        Returns:
            The requests that have ended; their pages are freed.
        """
        ended: list[RequestID] = []
        for context in batch:
            scheduler = self._scheduler_of.get(context.request_id)
            if scheduler is not None:
                ended += scheduler.update([context])
        for request_id in ended:
            del self._scheduler_of[request_id]
        return ended


def scheduler_of(pages: RequestPages, limits: SchedulerLimits) -> TextScheduler | ReplicaScheduler:
    """The scheduler of a pipeline.

    Args:
        pages: Its KV cache, or those of the copies of its model.
        limits: The limits of batches.
    """
    single = len(pages.replicas) == 1
    return TextScheduler(pages, limits) if single else ReplicaScheduler(pages, limits)
