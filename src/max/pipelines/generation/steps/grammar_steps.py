"""Decoding steps of batches with grammars, one or several in a call, sampled under masks on the model's device.

All steps of a call have the masks of the first one. A call takes several steps if each mask was the same for the last
step, as in the middle of a string, and ends after a token that may change a mask. Afterwards the grammars are followed:
tokens that were sampled under a mask that had changed are dropped, so the text is the same as with single steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from max._dataclass import dataclass
from max.driver import Device, Tensor
from max.interfaces import RequestID, TextGenerationContext
from max.pipelines.core.text_context import draft_length
from max.pipelines.generation.steps.decode_loop import TokenTables
from max.pipelines.generation.steps.step_tokens import reasoning_limit
from max.pipelines.sampling.sampler import changes_logits
from max.pipelines.structured.constraint import Constraints, unpack_mask
from max.pipelines.structured.next_masks import GrammarPlace, KnownMasks, NextMasks
from max.pipelines.structured.step_masks import Mask, StepMasks

__all__ = ["GrammarRun", "GrammarSteps"]

Flags = npt.NDArray[np.bool_]

_PATIENCE_S = 5e-4
"""The time in seconds of a mask that a step waits for; slower ones are computed while the model runs."""
_IMPATIENT_STEPS = 16
"""The number of steps that do not wait after a slow mask."""
_MOST_KNOWN = 64
"""The maximum number of masks that something is known of, and of tokens that change one of them."""


@dataclass
class GrammarRun:
    """A call of steps with the same masks.

    Args:
        masks: The masks ``[batch, words]``.
        steps: The maximum number of steps.
        tables: The same for the model's device.
    """

    masks: Mask
    steps: int
    tables: TokenTables


class _FoundMasks:
    """The masks after the last tokens of a call.

    Args:
        batch: The requests before these tokens.
        words: The number of words of a mask.
    """

    def __init__(self, batch: Sequence[TextGenerationContext], words: int) -> None:
        self._batch, self._ends = batch, [context.end_idx for context in batch]
        self.places = [GrammarPlace(None) for _ in batch]
        self.masks = np.full((len(batch), words), -1, np.int32)

    def set(self, row: int, mask: npt.NDArray[np.int32]) -> None:
        """Sets the mask of a request, which is computed."""
        self.places[row], self.masks[row] = GrammarPlace(self._batch[row].matcher), mask

    def count(self, tokens: Sequence[int]) -> None:
        """Sets the number of new tokens of each request."""
        self._ends = [end + count for end, count in zip(self._ends, tokens, strict=True)]

    def fit(self, batch: Sequence[TextGenerationContext]) -> bool:
        """Whether a batch is the same, with the new tokens and no others."""
        return len(batch) == len(self._batch) and all(
            context is own and context.end_idx == end and (context.matcher is None) == free
            for context, own, end, free in zip(
                batch,
                self._batch,
                self._ends,
                (place.matcher is None for place in self.places),
                strict=True,
            )
        )


class _KnownMask:
    """The tokens after which a mask is expected to be the same.

    Args:
        ordinary: Those without experience, ``[vocab]``.
    """

    def __init__(self, ordinary: Flags) -> None:
        self._ordinary = ordinary
        self.kept = ordinary.copy()
        self.version = 0
        """Counts the changes."""
        self._changing = set[int]()

    def record(self, token: int, same: bool) -> None:
        """Records whether the mask was the same after a token.

        Args:
            token: The token.
            same: Whether it was.
        """
        if not same:
            self._changing.add(token)
            # at the end of a bounded string any token may change the mask once
            if len(self._changing) > _MOST_KNOWN:
                self._changing.clear()
                self.kept = self._ordinary.copy()
                self.version += 1
                return
        kept = same and token not in self._changing
        if kept != self.kept[token]:
            self.kept[token] = kept
            self.version += 1


class GrammarSteps:
    """Plans the calls of batches with grammars, and follows their grammars.

    Args:
        constraints: The grammars of requests.
        vocabulary: The number of logits of a token.
        device: The device of the model.
        repeats: Whether calls have several steps; a model with recurrent states cannot go back to a dropped token.
    """

    def __init__(
        self, constraints: Constraints, vocabulary: int, device: Device, repeats: bool
    ) -> None:
        self._constraints, self._vocabulary, self._device = constraints, vocabulary, device
        self._repeats = repeats
        self._next: NextMasks | None = None
        self._impatient = 0
        self._found: _FoundMasks | None = None
        self._last_masks: dict[RequestID, tuple[npt.NDArray[np.int32], _KnownMask | None]] = {}
        self._tables: tuple[list[tuple[_KnownMask, int] | None], TokenTables] | None = None
        self._ordinary: dict[frozenset[int], Flags] = {}
        self._known: OrderedDict[bytes, _KnownMask] = OrderedDict()

    def look_ahead(self, batch: Sequence[TextGenerationContext]) -> None:
        """Starts to compute the masks of the next step of a batch, if it can be one of `plan`.

        Args:
            batch: The requests after a step.
        """
        found, self._found = self._found, None
        going = [context for context in batch if not context.is_done]
        if any(context.matcher is not None for context in going) and all(map(_is_plain, going)):
            self._discard()
            if found is not None and found.fit(going):
                self._next = NextMasks(going, found.places, KnownMasks(found.masks))
            else:
                self._next = self._constraints.start_next_masks(going)

    def masks(self, batch: Sequence[TextGenerationContext]) -> StepMasks | NextMasks | None:
        """The masks of a step that was not planned, which are computed while the model runs; None without a grammar.

        Args:
            batch: The requests.
        """
        if (masks := self._next) is not None and masks.fit(batch):
            self._next = None
            return masks
        self._discard()
        return self._constraints.start_masks(batch)

    def _discard(self) -> None:
        if (masks := self._next) is not None:
            self._next = None
            masks.discard()

    def plan(self, batch: Sequence[TextGenerationContext], most: int) -> GrammarRun | None:
        """A call of a decoding batch; None if a mask takes long, or a request needs another way.

        Args:
            batch: The requests, each with one new token.
            most: The maximum number of steps.
        """
        following = self._next
        if following is None or not following.fit(batch) or not all(map(_is_plain, batch)):
            return None
        if self._impatient:
            self._impatient -= 1
            return None
        if not following.wait(_PATIENCE_S):
            self._impatient = _IMPATIENT_STEPS
            return None
        self._next = None
        masks, steps = following.result(), most if self._repeats else 1
        known: list[_KnownMask | None] = [None] * len(batch)
        for row, context in enumerate(batch):
            if context.matcher is None:
                continue
            mask, same = masks[row], None
            last, of_last = self._last_masks.get(context.request_id, (None, None))
            if last is None or not np.array_equal(last, mask):
                steps = 1
            else:
                same = known[row] = of_last or self._known_mask(context, mask)
                same.record(int(context.all_tokens[context.end_idx - 1]), True)
            self._last_masks[context.request_id] = mask, same
        return GrammarRun(masks, steps, self._token_tables(masks, known if steps > 1 else ()))

    def _token_tables(self, masks: Mask, known: Sequence[_KnownMask | None]) -> TokenTables:
        """The tables of masks on the model's device, those of the last call if they are the same; without what is known
        of the masks for a single step."""
        versions = [None if one is None else (one, one.version) for one in known]
        if known and self._tables is not None and self._tables[0] == versions:
            return self._tables[1]
        allowed = self._on_device(unpack_mask(masks, self._vocabulary))
        if not known:
            return TokenTables(allowed, allowed)
        kept = np.ones((len(masks), self._vocabulary), np.bool_)
        for row, one in enumerate(known):
            if one is not None:
                kept[row] = one.kept
        tables = TokenTables(allowed, self._on_device(kept))
        self._tables = versions, tables
        return tables

    def _on_device(self, table: Flags) -> Tensor:
        return Tensor.from_numpy(table).to(self._device)

    def _known_mask(
        self, context: TextGenerationContext, mask: npt.NDArray[np.int32]
    ) -> _KnownMask:
        """What is known of the mask of a request."""
        key = mask.tobytes()
        if (known := self._known.get(key)) is None:
            ends = frozenset(context.eos_token_ids)
            if (ordinary := self._ordinary.get(ends)) is None:
                found = self._constraints.ordinary_tokens(ends)[: self._vocabulary]
                ordinary = np.zeros(self._vocabulary, np.bool_)
                ordinary[: len(found)] = found
                self._ordinary[ends] = ordinary
            known = self._known[key] = _KnownMask(ordinary)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return known

    def follow(
        self,
        run: GrammarRun,
        batch: Sequence[TextGenerationContext],
        tokens: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """The tokens of a call that were sampled under the masks of their own places.

        Args:
            run: The call.
            batch: The requests, before these tokens.
            tokens: The new tokens of each request.

        Returns:
            The tokens of each request, at least one.
        """
        valid = list(map(len, tokens))
        if max(valid) > 1:
            masks = self._constraints.masks_after(batch, tokens)
            found = _FoundMasks(batch, masks.shape[-1])
            for row, context in enumerate(batch):
                if context.matcher is None:
                    continue
                own = run.masks[row]
                for step, mask in enumerate(masks[row, : valid[row]]):
                    changed = not np.array_equal(mask, own)
                    if not changed and step + 1 < valid[row]:
                        continue
                    # without bits nothing is known of the mask: the token may not follow
                    if mask.any():
                        found.set(row, mask)
                        if changed and step + 1 < valid[row]:
                            self._known_mask(context, own).record(tokens[row][step], False)
                    valid[row] = step + 1
                    break
            found.count(valid)
            self._found = found
        return [list(own[:count]) for own, count in zip(tokens, valid, strict=True)]

    def forget(self, request_id: RequestID) -> None:
        """Forgets a request that has ended."""
        self._last_masks.pop(request_id, None)


def _is_plain(context: TextGenerationContext) -> bool:
    """Whether the next step of a request gives one token, by its grammar, the model's logits and nothing else."""
    return (
        context.active_length == 1
        and context.active_idx == context.end_idx
        and not draft_length(context)
        and not context.log_probabilities
        and not changes_logits(context)
        and reasoning_limit(context) is None
    )
