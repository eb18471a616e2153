"""The tokens of a request as an object of their own, which later versions' models read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.pipelines.core.exceptions import InputError

__all__ = ["TokenBuffer"]

Tokens = npt.NDArray[np.integer[Any]]


class TokenBuffer:
    """A prompt and the tokens generated after it, with the part that the next step processes.

    Args:
        array: The tokens, integers ``[n]``, converted to int64.
        processed_length: The tokens that are in the KV cache.
        active_end: One past the last token of the next step; None: the end.
        prompt_length: The tokens of the prompt; None: all.

    Raises:
        InputError: There are no tokens, or they are not integers of one dimension.
        ValueError: The lengths are out of order.
    """

    def __init__(
        self,
        array: Tokens | Sequence[int],
        processed_length: int = 0,
        active_end: int | None = None,
        prompt_length: int | None = None,
    ) -> None:
        tokens = np.asarray(array)
        if tokens.ndim != 1 or not tokens.size or tokens.dtype.kind not in "iu":
            raise InputError(
                f"TokenBuffer: tokens of shape {tokens.shape} and dtype {tokens.dtype}; expected integers of one "
                "dimension, 1 or more"
            )
        self.all: Tokens = tokens.astype(np.int64, copy=False)
        self.processed_length = processed_length
        self._active_end = len(tokens) if active_end is None else active_end
        self.prompt_length = len(tokens) if prompt_length is None else prompt_length
        in_order = 0 <= processed_length < self._active_end <= len(tokens)
        if not in_order or not 0 < self.prompt_length <= len(tokens):
            raise ValueError(
                f"TokenBuffer: {processed_length} processed tokens, active to {self._active_end}, a prompt of "
                f"{self.prompt_length}; expected 0 <= processed < active <= {len(tokens)} tokens"
            )

    def __len__(self) -> int:
        return len(self.all)

    @property
    def array(self) -> Tokens:
        """All tokens, int64 ``[n]``."""
        return self.all

    @property
    def active(self) -> Tokens:
        """The tokens of the next step."""
        return self.all[self.processed_length : self._active_end]

    @property
    def active_length(self) -> int:
        """The number of tokens of the next step."""
        return self._active_end - self.processed_length

    @property
    def current_position(self) -> int:
        """One past the last token of the next step."""
        return self._active_end

    @property
    def actively_chunked(self) -> bool:
        """Whether tokens follow those of the next step."""
        return self._active_end < len(self.all)

    @property
    def prompt(self) -> Tokens:
        """The tokens of the prompt."""
        return self.all[: self.prompt_length]

    @property
    def generated(self) -> Tokens:
        """The tokens after the prompt."""
        return self.all[self.prompt_length :]

    @property
    def generated_length(self) -> int:
        """The number of tokens after the prompt."""
        return len(self.all) - self.prompt_length
