"""Which weights the kernels of a device take packed: laid out anew, once, when a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from max._kernel_library.products.dense.panels import DTYPES
from max._kernel_library.products.quantised.packed import FORMATS
from max.dtype import DType

__all__ = ["CPU_PACKING", "NO_PACKING", "Packing"]


@dataclass(frozen=True)
class Packing:
    """The rules of one kind of device; the layouts themselves are those of `mok.pack` and `mok.pack_filter`.

    Args:
        dense: Dtypes of dense weights that become panels.
        filters: Dtypes of filters of convolutions that become strips.
        quantised: Encodings of quantised weights that are packed.
        int8: Whether weights of 8-bit integers are packed.
        min_size: A dense weight with fewer rows or columns is not packed: a panel would hold mostly padding.
        streamed_bytes: Packed weights of a graph of at least this size are not expected to stay in caches between executions.
    """

    dense: frozenset[DType] = frozenset()
    filters: frozenset[DType] = frozenset()
    quantised: frozenset[str] = frozenset()
    int8: bool = False
    min_size: int = 32
    streamed_bytes: int = 32 << 20


NO_PACKING = Packing()
"""Kernels read weights as they are."""

CPU_PACKING = Packing(
    dense=frozenset(DTYPES), filters=frozenset(DTYPES), quantised=frozenset(FORMATS), int8=True
)
"""The rules of CPUs."""
