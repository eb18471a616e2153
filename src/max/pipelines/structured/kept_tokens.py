"""The tokens after which a call goes on: those that force no text, as far as is known.

Forced text costs no step if the call ends before it. What is expected changes how fast a text comes, never the text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]

_MOST_KNOWN = 64
"""The maximum number of masks that something is known of."""


class KeptTokens:
    """For each mask, the tokens after which a call goes on.

    Args:
        ordinary: The tokens without experience, by the tokens that end the answer.
        vocabulary: The number of logits of a token.
    """

    def __init__(self, ordinary: Callable[[frozenset[int]], Flags], vocabulary: int) -> None:
        self._ordinary, self._vocabulary = ordinary, vocabulary
        self._known: OrderedDict[tuple[bytes, frozenset[int]], Flags] = OrderedDict()

    def after(self, mask: npt.NDArray[np.int32], ends: frozenset[int]) -> Flags:
        """The tokens after which a call goes on, bool ``[vocab]``, for the caller to change by what it learns.

        Args:
            mask: The tokens that may follow, ``[words]``.
            ends: The tokens that end the answer.
        """
        key = mask.tobytes(), ends
        if (kept := self._known.get(key)) is None:
            found = self._ordinary(ends)[: self._vocabulary]
            kept = self._known[key] = np.zeros(self._vocabulary, np.bool_)
            kept[: len(found)] = found
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return kept
