"""Copies between tensors, several in one call."""

from __future__ import annotations

from collections.abc import Sequence

from max.driver._tensor import Tensor
from max.dtype import DType

__all__ = ["batch_inplace_copy", "copy_pinned_to_destinations", "inplace_copy_from"]


def inplace_copy_from(self: Tensor, src: Tensor) -> None:
    """`Tensor.inplace_copy_from` as a function.

    Args:
        self: The tensor that is written.
        src: The source.
    """
    self.inplace_copy_from(src)


def batch_inplace_copy(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
    """Copies the bytes of each source to the destination of its position.

    Nothing is written if a pair does not fit.

    Args:
        dsts: The tensors that are written.
        srcs: The sources, each of the size in bytes of its destination.

    Raises:
        ValueError: There are more of one than of the other, a pair differs in size, or one is not contiguous.
        TypeError: One is not a tensor.
    """
    op = "batch_inplace_copy"
    if len(dsts) != len(srcs):
        raise ValueError(f"{op}: {len(dsts)} destinations and {len(srcs)} sources")
    pairs: list[tuple[Tensor, Tensor]] = []
    for index, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        size, source_size = _num_bytes(op, index, dst), _num_bytes(op, index, src)
        if size != source_size:
            raise ValueError(
                f"{op}: destination {index} has {size} bytes, its source {source_size}"
            )
        shape = (size,)
        pairs.append((dst.view(DType.uint8, shape), src.view(DType.uint8, shape)))
    for dst, src in pairs:
        dst.inplace_copy_from(src)


def _num_bytes(op: str, index: int, tensor: Tensor) -> int:
    """The size of a contiguous tensor in bytes.

    Args:
        op: The call, for error messages.
        index: The tensor's position, for error messages.
        tensor: The tensor.

    Raises:
        TypeError: It is no tensor.
        ValueError: It is not contiguous.
    """
    if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{op}: pair {index} has a {type(tensor).__name__}, expected a Tensor")
    if not tensor.is_contiguous:
        raise ValueError(f"{op}: a tensor of pair {index} has strides {tensor.strides}")
    return tensor.num_elements * tensor.element_size


def copy_pinned_to_destinations(source: Tensor, destinations: Sequence[Tensor]) -> None:
    """Copies one tensor to each of several.

    Args:
        source: The source; on a CPU it need not be pinned.
        destinations: The tensors that are written, of the source's size.

    Raises:
        ValueError: A destination differs in size, or a tensor is not contiguous.
        TypeError: One is not a tensor.
    """
    batch_inplace_copy(destinations, [source] * len(destinations))
