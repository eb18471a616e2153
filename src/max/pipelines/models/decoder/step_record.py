"""The inputs of a decoder's graph by name: one record for their types, their values in the graph, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["StepRecord"]

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class StepRecord(Generic[T]):
    """The inputs of a step; `max.pipelines.models.decoder.graph` has their types and meanings.

    Args:
        tokens: The new tokens.
        input_row_offsets: The offset of each sequence in ``tokens``.
        return_n_logits: How many last tokens have logits.
        cache: The tensors of the cache.
        embeddings: Hidden states that replace those of some tokens, such as of an image; None: the graph takes none.
        embedding_rows: The rows of ``tokens`` that they replace.
        sampling: The sampling parameters; empty: the graph does not sample.
        adapters: The memory of adapters, their forms, and the slot and the scale of each request; empty: the graph
            takes no adapters.
    """

    tokens: T
    input_row_offsets: T
    return_n_logits: T
    cache: Sequence[T]
    embeddings: T | None = None
    embedding_rows: T | None = None
    sampling: Sequence[T] = ()
    adapters: Sequence[T] = ()

    def flat_inputs(self) -> list[T]:
        """The inputs in the order of the graph."""
        flat = [self.tokens, self.input_row_offsets, self.return_n_logits, *self.cache]
        if self.embeddings is not None and self.embedding_rows is not None:
            flat += [self.embeddings, self.embedding_rows]
        return [*flat, *self.sampling, *self.adapters]

    def with_inputs(self, inputs: Sequence[U]) -> StepRecord[U]:
        """A record with other inputs in the same places, such as the values of a graph in those of their types.

        Args:
            inputs: The inputs in the order of the graph.

        Raises:
            ValueError: There are more or fewer than this record has.
        """
        if len(inputs) != len(self.flat_inputs()):
            raise ValueError(
                f"StepRecord: {len(inputs)} inputs; the graph takes {len(self.flat_inputs())}"
            )
        rest = iter(inputs)
        tokens, offsets, last = next(rest), next(rest), next(rest)
        cache = [next(rest) for _ in self.cache]
        embeddings = rows = None
        if self.embeddings is not None and self.embedding_rows is not None:
            embeddings, rows = next(rest), next(rest)
        sampling = [next(rest) for _ in self.sampling]
        return StepRecord(tokens, offsets, last, cache, embeddings, rows, sampling, list(rest))
