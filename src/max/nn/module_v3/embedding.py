"""A look-up table of vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from max.experimental import functional as F
from max.experimental import random
from max.experimental.tensor import Tensor
from max.graph import Dim, DimLike, ShapeLike
from max.nn.module_v3.module import Module

__all__ = ["Embedding"]


class Embedding(Module):
    """A table of vectors, looked up by index; the vectors are initialized at random.

    Args:
        vocab_size: The number of vectors.
        dim: The size of a vector.
        dims: The shape of a vector, if it does not have exactly one axis.

    Raises:
        TypeError: Not exactly one of `dim` and `dims` is given.
    """

    weight: Tensor
    """The vectors, of shape (`vocab_size`, `*dims`)."""

    def __init__(
        self, vocab_size: DimLike, *, dim: DimLike | None = None, dims: ShapeLike | None = None
    ) -> None:
        if dim is not None and dims is None:
            dims = [dim]
        elif dim is not None or dims is None:
            raise TypeError("Embedding: expected one of dim and dims")
        self.weight = random.normal([vocab_size, *dims])

    @property
    def vocab_size(self) -> Dim:
        """The number of vectors; indices are below it."""
        return self.weight.shape[0]

    @property
    def dim(self) -> Dim:
        """The size of a vector.

        Raises:
            TypeError: The rank of the vectors is not 1.
        """
        if len(self.dims) != 1:
            raise TypeError(
                f"the vectors have the shape {list(self.dims)}, which is no single dimension"
            )
        return self.dims[0]

    @property
    def dims(self) -> Sequence[Dim]:
        """The shape of a vector."""
        return list(self.weight.shape[1:])

    def __call__(self, indices: Tensor) -> Tensor:
        """Looks up vectors.

        Args:
            indices: Integers, of any shape.

        Returns:
            The vectors, of shape (`*indices.shape`, `*dims`).

        Raises:
            IndexError: An index is not below `vocab_size`; raised when the result is computed.
        """
        return F.gather(self.weight, indices, axis=0)

    def _repr_items(self) -> Iterator[tuple[str, object]]:
        yield "vocab_size", self.vocab_size
        dims = list(self.dims)
        yield ("dim", dims[0]) if len(dims) == 1 else ("dims", dims)
