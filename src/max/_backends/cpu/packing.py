"""The rules for packing weights: which of them the kernels of a device read in a packed layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace

from max import kernel as k
from max._dataclass import dataclass
from max.dtype import DType

__all__ = ["CPU_PACKING", "NO_PACKING", "Packing", "packing_of"]


@dataclass(frozen=True)
class Packing:
    """The rules of one kind of device; the layouts themselves are those of `mok.pack` and `mok.pack_filter`.

    Args:
        dense: Dtypes of dense weights that become panels.
        filters: Dtypes of filters of convolutions that become strips.
        quantized: Encodings of quantized weights that are packed.
        int8: Whether weights of 8-bit integers are packed.
        int8_filters: Whether filters of 8-bit integers are; else their convolutions become products.
        min_size: A dense weight with fewer rows or columns is not packed: its panels would be mostly padding.
        streamed_bytes: Packed weights of a graph of at least this size are not expected to stay in caches between
            executions.
        codings: The lossless encodings of streamed dense weights, by dtype; other dtypes are not coded.
    """

    dense: frozenset[DType] = frozenset()
    filters: frozenset[DType] = frozenset()
    quantized: frozenset[str] = frozenset()
    int8: bool = False
    int8_filters: bool = False
    min_size: int = 8
    streamed_bytes: int = 32 << 20
    codings: Mapping[DType, str] = field(default_factory=dict[DType, str])


NO_PACKING = Packing()
"""Kernels read weights in the layout of the graph."""

# stated here, so that a program from the disk cache runs without importing a kernel
_PANELS = frozenset({DType.float32, DType.bfloat16, DType.float16})
CPU_PACKING = Packing(
    dense=_PANELS,
    filters=_PANELS,
    quantized=frozenset(
        {"Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}
    ),
    int8=True,
)
"""The rules of CPUs."""


def packing_of(target: k.Target) -> Packing:
    """The rules of a CPU: `CPU_PACKING`, with the encodings that its instructions decode fast enough.

    Measured on Zen 4 (docs/log/2026-11-28-coded-weights.md). A lookup of a vector of bytes and a product of pairs are
    one instruction each, or decoding takes longer than the reads that it saves.
    """
    width = target.width(k.f32)
    fast = target.lookup_lanes(4 * width) == 4 * width
    coded = {DType.float32: "halved float32"}
    if fast and target.dot_bf16_lanes(width):
        coded[DType.bfloat16] = "coded bfloat16"
    if fast and target.vector_bits >= 512:
        coded[DType.float32] = "coded float32"
    # an instruction multiplies four bytes a lane; matrix tiles are faster, and multiply copied patches
    by_bytes = bool(target.dot_i8_lanes(width)) or target.signed_bytes
    int8_filters = by_bytes and not target.tile_products
    return replace(CPU_PACKING, codings=coded, int8_filters=int8_filters)
