"""Requests as models of 26.x read them: their tokens are a `TokenBuffer`, and a batch is a list per replica."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from max.pipelines.core import TextContext
from max.pipelines.core.exceptions import InputError

__all__ = ["ContextView", "TokenBuffer", "flat_batch", "replica_views", "view_of"]

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

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Tokens:
        return np.array(self.all, dtype, copy=copy)

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


class ContextView:
    """A request whose ``tokens`` are a `TokenBuffer`; all other attributes are the request's.

    The class of a view is a subclass of `ContextView` and of the request's class (`view_of`).
    """

    _context: Any

    def __getattribute__(self, name: str) -> Any:
        if name in ("_context", "__class__", "__dict__"):
            return object.__getattribute__(self, name)
        context = self._context
        return _token_buffer(context) if name == "tokens" else getattr(context, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._context, name, value)


def _token_buffer(context: Any) -> TokenBuffer:
    """The tokens of a request, as they are now."""
    if not isinstance(context, TextContext):
        return TokenBuffer(context.tokens[: context.active_length])
    return TokenBuffer(
        context.all_tokens, context.start_idx, context.active_idx, len(context.prompt_tokens)
    )


def view_of(context: Any) -> Any:
    """The view of a request.

    Args:
        context: The request, or a view of it.
    """
    if isinstance(context, ContextView):
        return context
    view = object.__new__(_view_class(type(context)))
    object.__setattr__(view, "_context", context)
    return view


@functools.cache
def _view_class(cls: type[Any]) -> type[Any]:
    """The class of the views of requests of a class."""
    return type(cls.__name__, (ContextView, cls), {"__module__": cls.__module__})


def replica_views(batch: Sequence[Any]) -> list[list[Any]]:
    """A batch in the form of 26.x: one list of views per replica, of which there is one.

    Args:
        batch: The requests, or lists of requests or of views.
    """
    return [[view_of(context) for context in flat_batch(batch)]]


def flat_batch(batch: Sequence[Any]) -> list[Any]:
    """The requests of a batch, given as one list or as a list per replica of the model.

    Args:
        batch: The requests, or lists of them.
    """
    return [
        context
        for part in batch
        for context in (part if isinstance(part, (list, tuple)) else [part])
    ]
