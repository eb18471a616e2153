"""Checks that kernels share when they run: sizes, and offsets of ragged rows."""

from __future__ import annotations

from max import kernel as k


@k.inline
def check_size(name: str, size: k.Value, expected: k.Value) -> None:
    """Raises where a size is not that of the other operands.

    Args:
        name: The name of the size in the message (compile time).
        size: The size.
        expected: The size that fits.
    """
    if size != expected:
        raise ValueError("{} has size {}, expected {}", name, size, expected)


@k.inline
def check_rising(name: str, offsets: k.View, width: int) -> None:
    """Raises where an offset is less than the one before it.

    Args:
        name: The name of the offsets in the message (compile time).
        offsets: `[batch + 1]`.
        width: Offsets per vector.
    """
    for j, mask in k.vectors(offsets.size - 1, width):
        current = offsets.load(j, width=width, mask=mask)
        falls = current > offsets.load(j + 1, width=width, mask=mask)
        if mask is not None:
            falls = falls & mask
        if k.any(falls):
            # for the message: the first one that falls
            at = k.i64(j)
            while offsets[at] <= offsets[at + 1]:
                at += 1
            raise ValueError(
                "{}[{}] is {}, expected {} or more, the one before",
                name,
                at + 1,
                offsets[at + 1],
                offsets[at],
            )


@k.inline
def check_offsets(name: str, offsets: k.View, rows: k.Value, width: int) -> None:
    """Raises unless the offsets begin at 0, never fall, and end at the number of rows: each row then belongs to one
    sequence.

    Args:
        name: The name of the offsets in the message (compile time).
        offsets: `[batch + 1]`.
        rows: The number of rows.
        width: Offsets per vector.
    """
    last = offsets.size - 1
    if last < 0:
        raise ValueError("{} is empty, expected the first row of each sequence and {}", name, rows)
    if k.i64(offsets[0]) != 0:
        raise ValueError("{}[0] is {}, expected 0", name, offsets[0])
    if k.i64(offsets[last]) != rows:
        raise ValueError(
            "{}[{}] is {}, expected {}, the number of rows", name, last, offsets[last], rows
        )
    check_rising(name, offsets, width)
