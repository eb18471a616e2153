"""Filters of convolutions `[taps…, C, F]` packed as strips of 32 columns.

A strip holds 32 columns of the filter, one row for each tap and channel; with elements of 16 bits pairs of neighboring
channels::

    [group][strip] │ tap 0, channel 0: 32 columns │ tap 0, channel 1 │ … │ tap 1, channel 0 │ …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from max import kernel as k
from max._backends.cpu.kernels.products.blocking import LANES_K
from max._backends.cpu.kernels.products.dense.panels import storage
from max._backends.cpu.kernels.tiles.packing import pack_columns
from max._backends.cpu.kernels.tiles.strips import COLUMNS
from max._backends.cpu.kernels.tiles.tiling import Tiling, tiling
from max._backends.kernel_call import product
from max.dtype import DType
from max.kernel import Target


class Filter(NamedTuple):
    """A packed filter.

    Args:
        lanes: The strips, flat lanes.
        dtype: Element type of the filter.
        channels: Channels of a group.
        groups: Groups of channels and columns.
        strip_tiling: The lanes of the strips.
    """

    lanes: Any
    dtype: Any
    channels: Any
    groups: int
    strip_tiling: Tiling


def conv_tiling(target: Target, x: k.ScalarType, weight: k.ScalarType) -> Tiling:
    """The tiling of products: as of matrices, but small integers are summed in 32 bits.

    Args:
        target: The target.
        x: Element type of the input.
        weight: Element type of the filter.
    """
    t = tiling(target, x, weight)
    # a dot product of small integers would overflow its dtype
    if not t.sums.is_float and t.sums.bits < 32:
        return replace(t, sums=k.i32, lane=k.i32, width=target.width(k.i32))
    return t


def is_pairs(dtype: k.ScalarType) -> bool:
    """Whether a packed filter has two neighboring channels side by side."""
    return dtype.is_float and dtype.bits == 16


def filter_tiling(target: Target, dtype: k.ScalarType, t: Tiling) -> Tiling:
    """The lanes of packed filters.

    Args:
        target: The target.
        dtype: Element type of the filter.
        t: The tiling of the products.
    """
    return storage(target, dtype) if is_pairs(dtype) else t


@k.inline
def pack_strips(
    packed: k.View, weight: k.View, groups: int, stored_tiling: Tiling, ctx: k.Context
) -> None:
    """Packs a filter `[taps…, C / groups, F]` as `[groups, strips, taps * channels][COLUMNS]`, pairs of rows side by
    side, zero-filled.

    Args:
        packed: Flat view of lanes.
        weight: The filter.
        groups: Groups of columns.
        stored_tiling: The lanes of the packed filter.
        ctx: The context.
    """
    # [taps * channels] rows of the filter
    size = weight.shape[0] * weight.shape[1] * weight.shape[2] * weight.shape[3]
    lanes = k.ceildiv(size, stored_tiling.pair)
    features = weight.shape[4] // groups
    strips = k.ceildiv(features, COLUMNS)
    rows = weight.reshape(size, weight.shape[4])
    chunk = LANES_K * stored_tiling.pair
    for g, strip, part in ctx.parallel((groups, strips, k.ceildiv(size, chunk))):
        column = g * features + strip * COLUMNS
        # the last strip of a group ends with the group
        last = k.min(column + COLUMNS, (g + 1) * features)
        # [group][strip][lanes along k], whole strips of `lanes` rows
        at = ((g * strips + strip) * lanes + part * LANES_K) * COLUMNS
        source = rows[part * chunk : k.min(part * chunk + chunk, size), column:last]
        pack_columns(packed[at:], source, COLUMNS // stored_tiling.width, stored_tiling)


@k.kernel
def pack_filter(out: k.Output, weight: k.Input, ctx: k.Context, *, groups: int) -> None:
    """`out` `[groups * strips, elements]` from `weight` `[Q, R, S, C / groups, F]`."""
    t = conv_tiling(ctx.target, weight.dtype, weight.dtype)
    stored = filter_tiling(ctx.target, weight.dtype, t)
    flat = out.reshape(out.shape[0] * out.shape[1])
    pack_strips(flat.view(stored.lane), weight, groups, stored, ctx)


def filter_elements(taps: Sequence[int], channels: int, dtype: DType) -> int:
    """Elements of a strip of a packed filter.

    Args:
        taps: The number of taps along each axis.
        channels: Channels of a group.
        dtype: Element type of the filter.
    """
    pair = 2 if dtype in (DType.bfloat16, DType.float16) else 1
    return -(-product(taps) * channels // pair) * pair * COLUMNS
