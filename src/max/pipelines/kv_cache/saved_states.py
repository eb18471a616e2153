"""Recurrent states around steps that verify drafted tokens: saved before, and taken back where a token was wrong."""

from __future__ import annotations

from collections.abc import Sequence

from max.driver import Tensor
from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.core.text_context import draft_length
from max.pipelines.kv_cache.state_slots import StateSlots

__all__ = ["rewind_states", "save_states"]


def save_states(
    slots: StateSlots | None, states: Sequence[Tensor], batch: Sequence[TextGenerationContext]
) -> None:
    """Saves the states of requests with drafts before the step that verifies these, and says that the states of the
    others will be those of all their processed tokens.

    Args:
        slots: The slots of states; None: the model has none.
        states: The states ``[slots, layers, …]``.
        batch: The requests.
    """
    if slots is None:
        return
    for context in batch:
        if not draft_length(context):
            slots.keep(context.request_id)
            continue
        slot, spare = slots.save(context.request_id)
        for state in states:
            rest = (slice(None),) * (len(state.shape) - 1)
            state[(spare, *rest)].inplace_copy_from(state[(slot, *rest)])


def rewind_states(
    slots: StateSlots | None,
    batch: Sequence[TextGenerationContext],
    tokens: Sequence[Sequence[int]],
) -> set[RequestID]:
    """Takes back the states of requests of whose drafts a token was wrong.

    Args:
        slots: The slots of states; None: the model has none.
        batch: The requests after a step, before their new tokens.
        tokens: The new tokens of those with drafts.

    Returns:
        The requests whose states have gone back: their next step begins where this one did.
    """
    rewound = set[RequestID]()
    for context, own in zip(batch, tokens, strict=True):
        drafted, key = draft_length(context), context.request_id
        if slots is None or not drafted:
            continue
        right = len(own) - 1
        # a grammar may replace tokens that are right
        constrained = getattr(context, "matcher", None) is not None
        if right == drafted and not constrained:
            slots.keep(key)
            continue
        processed = context.active_idx - context.start_idx
        slots.rewind(key, processed + (0 if constrained else right))
        rewound.add(key)
    return rewound
