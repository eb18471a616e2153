"""Recurrent states around steps that verify drafted tokens: saved before, and taken back where a token was wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from max._lazy import lazy_module
from max.driver import Tensor
from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.core.draft_tree import draft_length

if TYPE_CHECKING:
    from max.pipelines.kv_cache import state_slots
else:
    state_slots = lazy_module("max.pipelines.kv_cache.state_slots")

__all__ = ["restore_state", "rewind_states", "save_state", "save_states"]


def save_states(
    slots: state_slots.StateSlots | None,
    states: Sequence[Tensor],
    batch: Sequence[TextGenerationContext],
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
        save_state(slots, states, context.request_id)


def save_state(
    slots: state_slots.StateSlots, states: Sequence[Tensor], request_id: RequestID
) -> None:
    """Saves the state of a request in a spare slot.

    Args:
        slots: The slots of states.
        states: The states ``[slots, layers, …]``.
        request_id: The request, which has a slot.

    Raises:
        OutOfSlotsError: No spare slot is free.
    """
    slot, spare = slots.save(request_id)
    _copy(states, slot, spare)


def restore_state(
    slots: state_slots.StateSlots, states: Sequence[Tensor], request_id: RequestID
) -> None:
    """Copies the saved state of a request back, whose slot stays the same: inputs that were made name it.

    Args:
        slots: The slots of states.
        states: The states ``[slots, layers, …]``.
        request_id: The request.

    Raises:
        KeyError: No state is saved.
    """
    slot, spare = slots.saved_slots(request_id)
    _copy(states, spare, slot)
    slots.keep(request_id)


def _copy(states: Sequence[Tensor], source: int, target: int) -> None:
    for state in states:
        rest = (slice(None),) * (len(state.shape) - 1)
        state[(target, *rest)].inplace_copy_from(state[(source, *rest)])


def rewind_states(
    slots: state_slots.StateSlots | None,
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
