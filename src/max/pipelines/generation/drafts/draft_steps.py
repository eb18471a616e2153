"""Steps of a pipeline that verify drafted tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.driver import CPU, Device, Tensor
from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.config.pipeline_config import PipelineConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.core.text_context import TextContext, draft_length
from max.pipelines.generation.drafts.drafter import Drafter
from max.pipelines.generation.drafts.lookup import LookupDrafter
from max.pipelines.generation.steps.step_tokens import reasoning_limit
from max.pipelines.kv_cache.state_slots import StateSlots
from max.pipelines.models.inputs import ModelOutputs
from max.pipelines.models.pipeline_model import PipelineModel
from max.pipelines.sampling.sampler import Sampler, needs_sampler

__all__ = ["DraftSteps"]


class DraftSteps:
    """Drafts the tokens of a pipeline's requests, and finds which of them are right.

    A drafted token is right if it is the token that the model chooses there: the likeliest one, or the one that the
    request's seed samples at this position. So a text is the same as without drafts, except that the logits of a step
    with several tokens may differ in their last bits.

    Args:
        drafter: Proposes the tokens.
        most: The maximum number of drafted tokens of a request.
        sampler: Chooses the tokens of rows.
    """

    def __init__(self, drafter: Drafter, most: int, sampler: Sampler) -> None:
        self._drafter, self.most, self._sampler = drafter, most, sampler
        self._truncations: dict[RequestID, int] = {}  # as the drafter knows them
        self.drafted, self.accepted, self.verified = 0, 0, 0
        """The number of tokens that were drafted, of those that were right, and of drafts."""

    @classmethod
    def of(
        cls,
        config: PipelineConfig,
        model: PipelineModel[Any],
        sampler: Sampler,
        slots: StateSlots | None,
        drafter: Drafter | None = None,
    ) -> DraftSteps | None:
        """The drafts of a configuration; None if it has none.

        Args:
            config: The configuration, resolved.
            model: The model.
            sampler: Chooses tokens.
            slots: The slots of its recurrent states; None: it has none.
            drafter: Proposes the tokens; None: the one that the configuration names.

        Raises:
            ConfigError: The model cannot verify drafted tokens.
        """
        method = config.speculative_method
        if method is None or not config.drafts_tokens:
            return None
        if slots is not None or not model.verifies_drafts:
            why = (
                "has recurrent states, which cannot go back"
                if slots is not None
                else "gives one token a step"
            )
            raise ConfigError(
                f"speculative_method is {method.value!r}, and the model {why}",
                "Leave --speculative-method out.",
            )
        most = config.num_speculative_tokens
        return cls(drafter or LookupDrafter(most), most, sampler)

    def drop(self, batch: Iterable[TextGenerationContext]) -> None:
        """Removes the drafts of requests that now need more than the model's own choice of tokens.

        Args:
            batch: The requests; their options may have changed since they were drafted.
        """
        for context in batch:
            if (
                isinstance(context, TextContext)
                and context.draft_length
                and _needs_single_tokens(context)
            ):
                context.set_draft(())

    def propose(self, batch: Sequence[TextGenerationContext]) -> None:
        """Drafts the tokens that the next step verifies.

        Args:
            batch: The requests of the last step, with their new tokens.
        """
        chunks: list[TextContext] = []
        contexts: list[TextContext] = []
        most: list[int] = []
        for context in batch:
            if not isinstance(context, TextContext):
                continue
            if context.is_done:
                self._drafter.learn(context)
                self.forget(context.request_id)
                continue
            if context.truncations != self._truncations.get(context.request_id, 0):
                self._truncations[context.request_id] = context.truncations
                self._drafter.rewind(context)
            if context.active_length > 1:
                chunks.append(context)
                continue
            # a step gives one token more than it drafts, and both must fit
            room = min(self.most, context.max_length - context.end_idx - 1)
            if room > 0 and not _needs_single_tokens(context):
                contexts.append(context)
                most.append(room)
        if chunks:
            self._drafter.read(chunks)
        if contexts:
            proposed = self._drafter.propose_all(contexts, most)
            for context, tokens in zip(contexts, proposed, strict=True):
                context.set_draft(tokens)

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended."""
        self._truncations.pop(request_id, None)
        self._drafter.forget(request_id)

    def verified_tokens(
        self, outputs: ModelOutputs, batch: Sequence[TextGenerationContext], device: Device
    ) -> list[list[int]]:
        """The new tokens of drafted requests: those of the draft that are right, and the one after them.

        Args:
            outputs: The outputs of a step whose inputs had the drafted tokens.
            batch: The requests, before their new tokens.
            device: The device of the logits.

        Returns:
            The tokens of each request; none for a request without a draft.

        Raises:
            ValueError: The model did not return the logits of the drafted tokens.
        """
        if outputs.logit_offsets is None:
            raise ValueError(
                "drafted tokens are verified by their logits, which the model does not return"
            )
        offsets = outputs.logit_offsets.to(CPU()).to_numpy()
        # rows of the logits: one before each drafted token, and the one after the last
        counts = [n + 1 if (n := draft_length(context)) else 0 for context in batch]
        rows = np.concatenate(
            [np.arange(end - count, end) for end, count in zip(offsets[1:], counts, strict=True)]
        )
        # [sum of counts, vocab]: the rows of a request are side by side
        logits = np.ascontiguousarray(outputs.logits.to(CPU()).to_numpy()[rows.astype(np.int64)])
        chosen = self._chosen_tokens(Tensor.from_numpy(logits).to(device), batch, counts)
        tokens: list[list[int]] = []
        begin = 0
        for context, count in zip(batch, counts, strict=True):
            own = chosen[begin : begin + count]
            begin += count
            # and the token after the last right one, which the same rows give
            tokens.append(own[: self._count_right(context, own) + 1] if count else [])
        return tokens

    def _chosen_tokens(
        self, logits: Tensor, batch: Sequence[TextGenerationContext], counts: Sequence[int]
    ) -> list[int]:
        """The token that the model chooses after each row, with the seed of its position."""
        contexts = [context for context, n in zip(batch, counts, strict=True) for _ in range(n)]
        steps = [step for n in counts for step in range(n)]
        tokens: npt.NDArray[np.int64] = (
            self._sampler.sample_rows(logits, contexts, steps).to(CPU()).to_numpy()
        )
        return tokens.tolist()

    def _count_right(self, context: TextGenerationContext, chosen: Sequence[int]) -> int:
        """The number of drafted tokens that are those that the model chooses."""
        if not isinstance(context, TextContext) or not context.draft_tokens:
            return 0
        draft, right = context.draft_tokens, 0
        while right < len(draft) and draft[right] == chosen[right]:
            right += 1
        self.count(len(draft), right)
        self._drafter.observe(context, len(draft), right)
        return right

    def count(self, drafted: int, accepted: int) -> None:
        """Counts a draft that was verified.

        Args:
            drafted: The number of drafted tokens.
            accepted: The number of these that were right.
        """
        self.drafted += drafted
        self.accepted += accepted
        self.verified += 1


def _needs_single_tokens(context: TextGenerationContext) -> bool:
    """Whether a token of a request depends on those before it in more than the logits, or has log-probabilities."""
    return (
        needs_sampler(context)
        or context.log_probabilities > 0
        or reasoning_limit(context) is not None
    )
