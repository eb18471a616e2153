"""The rules for packing weights: which of them the kernels of a device read in a packed layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from max import kernel as k
from max._dataclass import dataclass
from max.dtype import DType

__all__ = [
    "CPU_PACKING",
    "NO_PACKING",
    "Packing",
    "has_narrow_groups",
    "narrow_channels",
    "packing_of",
]


@dataclass(frozen=True)
class Packing:
    """The rules of one kind of device; the layouts themselves are those of `mok.pack` and `mok.pack_filter`.

    Args:
        dense: Dtypes of dense weights that become panels.
        filters: Dtypes of filters of convolutions that become strips.
        quantized: Encodings of quantized weights that are packed.
        int8: Whether weights of 8-bit integers are packed.
        int8_filters: Whether filters of 8-bit integers are; else their convolutions become products.
        narrow_channels: The channels up to which groups of a convolution are narrow, by dtype; see
            `has_narrow_groups`. Filters of narrow groups are not packed.
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
    narrow_channels: Mapping[DType, int] = field(default_factory=dict[DType, int])
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
    narrow = {dtype: narrow_channels(target, dtype) for dtype in CPU_PACKING.filters}
    return replace(CPU_PACKING, codings=coded, int8_filters=int8_filters, narrow_channels=narrow)


def narrow_channels(target: k.Target, dtype: DType) -> int:
    """The channels up to which the columns of several groups share a vector.

    What strips of 32 columns leave empty costs more than a shuffle for each product.

    Args:
        target: The target.
        dtype: Element type of the filter.
    """
    lanes = target.vector_bits // 8 // max(dtype.size_in_bytes, 4)
    # an instruction multiplies two channels a lane
    paired = dtype is DType.bfloat16 and target.dot_bf16_lanes(lanes)
    return lanes // 2 if paired else lanes


def has_narrow_groups(shape: Sequence[Any], groups: int, limit: int) -> bool:
    """Whether the groups of a convolution have as many columns as channels, and vectors hold whole groups.

    Args:
        shape: The shape of the filter `[taps…, channels of a group, columns]`.
        groups: Groups of channels.
        limit: The channels that a narrow group may have, a power of two.
    """
    channels, columns = shape[-2:]
    return (
        isinstance(channels, int)
        and columns == channels * groups
        and 0 < channels <= limit
        and limit % channels == 0
    )
