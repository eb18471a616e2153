"""Arrays between pages that nothing may touch: a read or a write outside of one ends the process where it happens.

::

    x = guarded(np.arange(6, dtype=np.float32))            # its last byte is the last before a page that cannot be read
    y = guarded(np.zeros((2, 3)), end=False)               # its first byte is the first after such a page
    margins = Margins(); z = margins.guard(np.zeros(5)); ...; margins.check()

What lies between an array and the page on its other side has a pattern, which `Margins.check` compares: writes that
stay in the page show there.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from max._host import guard

PATTERN = 0xA5
"""The byte that lies between an array and the page on its other side."""
Array = np.ndarray[Any, Any]


def _placed(nbytes: int, end: bool, align: int) -> tuple[Array, Array, int]:
    """Bytes between two inaccessible pages, all that lies between them, and where in that the bytes begin."""
    inner = guard.between_pages(nbytes, PATTERN)
    start = (inner.size - nbytes) // align * align if end else 0
    return inner[start : start + nbytes], inner, start


class Margins:
    """Guarded arrays, and what lies beside each of them."""

    def __init__(self) -> None:
        self._kept: list[tuple[Array, int, int]] = []

    def guard(self, source: Array, end: bool = True, align: int = 1) -> Array:
        """A contiguous copy of an array between inaccessible pages.

        Args:
            source: What is copied.
            end: Whether it ends where the page after it begins; else it begins where the page before it ends.
            align: What its address is a multiple of, besides the element's size. Beyond 1 some bytes may lie between
                its end and the page.
        """
        align = max(align, source.dtype.alignment)
        part, inner, start = _placed(source.nbytes, end, align)
        made = part.view(source.dtype).reshape(source.shape)
        made[...] = source
        self._kept.append((inner, start, source.nbytes))
        return made

    def check(self) -> None:
        """Compares what lies beside the arrays.

        Raises:
            AssertionError: A byte differs: something was written outside of an array.
        """
        for inner, start, size in self._kept:
            for what, margin in (("before", inner[:start]), ("behind", inner[start + size :])):
                wrong = np.flatnonzero(margin != PATTERN)
                assert wrong.size == 0, (
                    f"{wrong.size} bytes were written {what} an array of {size} bytes, "
                    f"the first {wrong[0]} bytes into {margin.size}"
                )


def guarded(source: Array, end: bool = True, align: int = 1) -> Array:
    """`Margins.guard` for tests that do not compare margins."""
    return Margins().guard(source, end, align)
