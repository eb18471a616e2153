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


_MARGIN = 2
"""The number of tokens more than of others that force text before all are expected to."""


class KeptAfter:
    """The tokens after which a call goes on under one mask.

    Args:
        flags: Those without experience, bool ``[vocab]``; changed.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags = flags
        self._forced = self._others = 0

    def learn(self, token: int, forces: bool) -> None:
        """Notes whether a token forced text.

        Args:
            token: The token.
            forces: Whether it did.
        """
        self.flags[token] = not forces
        self._forced, self._others = self._forced + forces, self._others + (not forces)
        # as the last digit of a date, where each token forces what follows
        if forces and self._forced > self._others + _MARGIN:
            self.flags[:] = False


class KeptTokens:
    """For each mask, the tokens after which a call goes on.

    Args:
        ordinary: The tokens without experience, by the tokens that end the answer.
        vocabulary: The number of logits of a token.
    """

    def __init__(self, ordinary: Callable[[frozenset[int]], Flags], vocabulary: int) -> None:
        self._ordinary, self._vocabulary = ordinary, vocabulary
        self._known: OrderedDict[tuple[bytes, frozenset[int]], KeptAfter] = OrderedDict()

    def after(self, mask: npt.NDArray[np.int32], ends: frozenset[int]) -> KeptAfter:
        """The tokens after which a call goes on, for the caller to add what it learns.

        Args:
            mask: The tokens that may follow, ``[words]``.
            ends: The tokens that end the answer.
        """
        key = mask.tobytes(), ends
        if (kept := self._known.get(key)) is None:
            found = self._ordinary(ends)[: self._vocabulary]
            flags = np.zeros(self._vocabulary, np.bool_)
            flags[: len(found)] = found
            kept = self._known[key] = KeptAfter(flags)
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        return kept
