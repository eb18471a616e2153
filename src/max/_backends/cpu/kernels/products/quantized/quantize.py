"""Quantization of floats: plain rounding for Q8_0 and Q4_0, fitted scales for K formats and with importance weights.

Without weights, Q4_0 and Q8_0 are bit-identical to `max.dtype.blocks.encode`. The other encodings try several scales
(`TRIES`, `WEIGHTED_TRIES`) and keep the one with the least squared error. Lane `i` of a vector is attempt `i`, so 16
attempts are fitted at once; shuffles transpose the sums over a part's elements so that lanes become attempts::

    affine_sums    attempt 0: lanes = elements ┐
                   attempt 1: lanes = elements ├→ 4 steps of `joined_halves` →  lane i = sum of attempt i
                   …                           ┘

A task is one block; its data is in registers and some hundred bytes of scratch memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.products.quantized.dequantize import (
    WIDTH,
    decode_block,
    half_at,
    lower_flat,
)
from max._backends.kernel_call import KernelCall, Operand, view
from max.dtype.blocks import BLOCK_FORMATS

TRIES = 15
"""The number of attempts to fit the scale of a part of a K block."""
WEIGHTED_TRIES = 31
"""The number of attempts if elements have weights."""
UNFITTED = 3e38
"""Larger than the error of any attempt."""


@k.inline
def store_half(block: k.View, at: int, value: k.Value) -> None:
    """Stores a float16 at a byte offset of a block."""
    bits = k.bitcast(k.f16(value), k.u16)
    block[at] = k.u8(bits & 255)
    block[at + 1] = k.u8(bits >> 8)


@k.inline
def inverse(scale: k.Value) -> Any:
    """The reciprocal of a scale; 0 for scale 0."""
    return k.f32(0) if scale == 0.0 else 1.0 / scale


@k.inline
def encode_q8_0(out: k.View, x: k.View) -> None:
    """Encodes a block of Q8_0; ties are rounded away from zero."""
    top = k.splat(k.f32(0), WIDTH)
    for i in k.static_range(0, 32, WIDTH):
        top = k.max(top, k.abs(k.cast(x.load(i, width=WIDTH), k.f32)))
    d = k.reduce_max(top) / 127.0
    store_half(out, 0, d)
    for i in k.static_range(0, 32, WIDTH):
        scaled = k.cast(x.load(i, width=WIDTH), k.f32) * inverse(d)
        size = k.abs(scaled)
        floor = k.floor(size)
        # 1 is added where the rest is at least a half
        q = k.copysign(floor + k.floor(2.0 * (size - floor)), scaled)
        out.store(2 + i, value=k.bitcast(k.cast(q, k.i8), k.u8))


@k.inline
def encode_q4_0(out: k.View, x: k.View) -> None:
    """Encodes a block of Q4_0: the element of largest magnitude becomes -8."""
    largest = k.f32(0)
    for i in range(32):
        value = k.f32(x[i])
        # of equal magnitudes the first, whose sign counts
        if k.abs(value) > k.abs(largest):
            largest = value
    d = largest / -8.0
    store_half(out, 0, d)
    scale = k.f64(inverse(d))
    for i in range(16):
        # in f64, then in f32, to match the rounding of the reference
        low = k.f32(k.f64(k.f32(x[i])) * scale + 8.5)
        high = k.f32(k.f64(k.f32(x[i + 16])) * scale + 8.5)
        # the opposite of the largest element would become 16
        out[2 + i] = k.u8(k.min(low, 15.0)) | k.u8(k.min(high, 15.0)) << 4


@k.inline
def load_half_part(x: k.View, at: k.Integer) -> Any:
    """Loads 16 adjacent elements as f32."""
    return k.cast(x.load(at, width=WIDTH), k.f32)


@k.inline
def load_weights(w: k.View, at: k.Integer, weighted: bool) -> Any:
    """Loads the weights of 16 adjacent elements; 1 if all are equal."""
    if weighted:
        return load_half_part(w, at)
    return k.splat(k.f32(1), WIDTH)


@k.inline
def levels_of(max_q: int, attempt: k.Value, weighted: bool) -> Any:
    """The number of steps into which an attempt divides the range.

    Attempts range over ``max_q - 1`` to ``max_q + 1``, with weights over ``max_q - 3`` to ``max_q + 3``.
    """
    if weighted:
        return k.f32(attempt) * (6.0 / (WEIGHTED_TRIES - 1)) + (max_q - 3.0)
    return k.f32(attempt) * (2.0 / (TRIES - 1)) + (max_q - 1.0)


@k.inline
def rounded_within(q: k.Value, min_q: k.Value, max_q: k.Value) -> Any:
    """The nearest integers, ties to even, clamped to ``[min_q, max_q]``."""
    return k.min(k.max(k.round(q), k.splat(k.f32(min_q), WIDTH)), k.splat(k.f32(max_q), WIDTH))


@k.inline
def joined_halves(a: k.Value, b: k.Value, size: int) -> Any:
    """Adds the two halves of each run of `size` lanes, of `a` and then of `b`: a step of the reduction of 16 vectors.

    ::

        size 4    a  a0 a1 a2 a3 | …    b  b0 b1 b2 b3 | …    →    a0+a2 a1+a3 | … | b0+b2 b1+b3 | …
    """
    half = size // 2
    low = [i for i in range(2 * WIDTH) if i % size < half]
    high = [i for i in range(2 * WIDTH) if i % size >= half]
    return k.shuffle(a, b, low) + k.shuffle(a, b, high)


@k.inline
def affine_sums(
    v0: k.Value,
    v1: k.Value,
    w0: k.Value,
    w1: k.Value,
    low: k.Value,
    unit: k.Value,
    max_q: int,
    weighted: bool,
    first: int,
    count: int,
) -> Any:
    """Sums of ``w q``, ``w q^2`` and ``w q x`` of `count` attempts from `first`, in runs of ``WIDTH / count`` lanes
    each.
    """
    if count == 1:
        steps = levels_of(max_q, first, weighted) * unit
        q0 = rounded_within((v0 - low) * steps, 0, max_q)
        q1 = rounded_within((v1 - low) * steps, 0, max_q)
        wq0, wq1 = w0 * q0, w1 * q1
        return wq0 + wq1, wq0 * q0 + wq1 * q1, wq0 * v0 + wq1 * v1
    half = count // 2
    a = affine_sums(v0, v1, w0, w1, low, unit, max_q, weighted, first, half)
    b = affine_sums(v0, v1, w0, w1, low, unit, max_q, weighted, first + half, half)
    size = WIDTH // half  # lanes of each attempt's run in `a` and `b`
    return (
        joined_halves(a[0], b[0], size),
        joined_halves(a[1], b[1], size),
        joined_halves(a[2], b[2], size),
    )


@k.inline
def inverses(scales: k.Value) -> Any:
    """The reciprocals of 16 scales; 0 for scale 0."""
    return k.select(scales == 0.0, k.splat(k.f32(0), WIDTH), 1.0 / scales)


@k.inline
def fit_affine(x: k.View, w: k.View, max_q: int, weighted: bool) -> Any:
    """Fits scale and offset of 32 elements, so that ``scale q - offset`` approximates them for q in 0 … max_q.

    The sums of 16 attempts are the lanes of vectors, so their lines are fitted together.
    """
    v0, v1 = load_half_part(x, 0), load_half_part(x, WIDTH)
    w0, w1 = load_weights(w, 0, weighted), load_weights(w, WIDTH, weighted)
    # offsets are not negative, so the range includes 0
    low = k.min(k.reduce_min(k.min(v0, v1)), 0.0)
    width = k.reduce_max(k.max(v0, v1)) - low
    unit = inverse(width)
    sum_w = k.reduce_add(w0 + w1) if weighted else k.f32(32)
    sum_x = k.reduce_add(w0 * v0 + w1 * v1)
    best = k.f32(UNFITTED)
    scale = width / k.f32(max_q)
    offset = -low
    lanes = k.iota(k.i32, WIDTH)
    tries = WEIGHTED_TRIES if weighted else TRIES
    for first in k.static_range(0, tries, WIDTH):
        sum_q, sum_qq, sum_qx = affine_sums(
            v0, v1, w0, w1, low, unit, max_q, weighted, first, WIDTH
        )
        # weighted linear regression of x by q
        slope = (sum_w * sum_qx - sum_x * sum_q) * inverses(sum_w * sum_qq - sum_q * sum_q)
        start = (sum_x - slope * sum_q) / sum_w
        # offsets must not be negative: otherwise fit a line through 0
        above = start > 0.0
        slope = k.select(above, sum_qx * inverses(sum_qq), slope)
        start = k.select(above, k.splat(k.f32(0), WIDTH), start)
        # the sum of squared errors without the term in x^2, which is the same for all attempts
        error = slope * (slope * sum_qq + 2.0 * (start * sum_q - sum_qx))
        error += start * (sum_w * start - 2.0 * sum_x)
        # the last lanes of the last vector have no attempt
        fits = (error < best) & (slope > 0.0) & (lanes < tries - first)
        min_error = k.reduce_min(k.select(fits, error, k.splat(k.f32(UNFITTED), WIDTH)))
        if min_error < best:
            best = min_error
            chosen = fits & (error == min_error)
            # the first of equal attempts
            lane = k.reduce_min(k.select(chosen, lanes, k.splat(k.i32(WIDTH), WIDTH)))
            lowest = k.splat(k.f32(-UNFITTED), WIDTH)
            # the lane is known at run time only: a reduction takes its element
            scale = k.reduce_max(k.select(lanes == lane, slope, lowest))
            offset = -k.reduce_max(k.select(lanes == lane, start, lowest))
    return scale, offset


@k.inline
def pack_six_bits(out: k.View, fields: Any) -> None:
    """Writes eight 6-bit scales and eight 6-bit offsets to 12 bytes."""
    for i in k.static_range(4):
        out[i] = fields[i] | fields[4 + i] >> 4 << 6
        out[4 + i] = fields[8 + i] | fields[12 + i] >> 4 << 6
        out[8 + i] = fields[4 + i] & 15 | (fields[12 + i] & 15) << 4


@k.inline
def encode_affine(
    out: k.View, x: k.View, w: k.View, floats: k.View, fields: k.View, fifth: bool, weighted: bool
) -> None:
    """Encodes a block of Q4_K or Q5_K; `floats` and `fields` are scratch memory of 16 elements each."""
    max_q = 31 if fifth else 15
    scale_top, offset_top = k.f32(0), k.f32(0)
    for part in range(8):
        scale, offset = fit_affine(x[part * 32 :], w[part * 32 :], max_q, weighted)
        floats[part] = scale
        floats[8 + part] = offset
        scale_top, offset_top = k.max(scale_top, scale), k.max(offset_top, offset)
    # fields have 6 bits
    store_half(out, 0, scale_top / 63.0)
    store_half(out, 2, offset_top / 63.0)
    for i in range(16):
        # fields divide by the scale as stored in f16
        d = half_at(out, 0) if i < 8 else half_at(out, 2)
        field = k.min(k.max(k.round(floats[i] * inverse(d)), 0.0), 63.0)
        fields[i] = k.u8(field)
        # elements are rounded with the scale that a reader computes
        floats[i] = d * field
    pack_six_bits(out[4:], fields)
    halves = 48 if fifth else 16
    for i in k.static_range(0, 32, WIDTH):
        upper = k.splat(k.u8(0), WIDTH)
        for part in k.static_range(0, 8, 2):
            low = quantized_part(x, part, i, floats, max_q)
            high = quantized_part(x, part + 1, i, floats, max_q)
            out.store(halves + part * 16 + i, value=low & 15 | high << 4)
            # bit `part` of a byte is the fifth bit of that part's element
            upper = upper | low >> 4 << part | high >> 4 << (part + 1)
        if fifth:
            out.store(16 + i, value=upper)


@k.inline
def quantized_part(x: k.View, part: int, at: int, floats: Any, max_q: int) -> Any:
    """Quantizes 16 elements of a part to bytes."""
    q = (load_half_part(x, part * 32 + at) + floats[8 + part]) * inverse(floats[part])
    return k.cast(rounded_within(q, 0, max_q), k.u8)


@k.inline
def symmetric_sums(
    v: Any, w: Any, unit: k.Value, max_q: int, weighted: bool, first: int, count: int
) -> Any:
    """Sums of ``w q x`` and ``w q^2`` of attempts, as `affine_sums`; `v` and `w` are tuples of vectors."""
    if count == 1:
        steps = -levels_of(max_q, first, weighted) * unit
        q = rounded_within(v[0] * steps, -max_q, max_q - 1)
        qx, qq = w[0] * q * v[0], w[0] * q * q
        if len(v) > 1:
            q = rounded_within(v[1] * steps, -max_q, max_q - 1)
            return qx + w[1] * q * v[1], qq + w[1] * q * q
        return qx, qq
    half = count // 2
    # the end -max_q has one step more, and takes the largest magnitude
    a = symmetric_sums(v, w, unit, max_q, weighted, first, half)
    b = symmetric_sums(v, w, unit, max_q, weighted, first + half, half)
    size = WIDTH // half
    return joined_halves(a[0], b[0], size), joined_halves(a[1], b[1], size)


@k.inline
def fit_symmetric(v: Any, w: Any, max_q: int, weighted: bool) -> Any:
    """Fits the scale of one or two vectors of 16 elements: ``scale q`` approximates them for q in -max_q … max_q -
    1.
    """
    top, bottom = k.reduce_max(v[0]), k.reduce_min(v[0])
    if len(v) > 1:
        top = k.max(top, k.reduce_max(v[1]))
        bottom = k.min(bottom, k.reduce_min(v[1]))
    largest = top
    if -bottom > top:
        largest = bottom
    unit = inverse(largest)
    scale = largest / k.f32(-max_q)
    best = k.f32(-1)
    lanes = k.iota(k.i32, WIDTH)
    lowest = k.splat(k.f32(-UNFITTED), WIDTH)
    tries = WEIGHTED_TRIES if weighted else TRIES
    for first in k.static_range(0, tries, WIDTH):
        sum_qx, sum_qq = symmetric_sums(v, w, unit, max_q, weighted, first, WIDTH)
        fitted = sum_qx * inverses(sum_qq)
        # the sum of squared errors is that of x^2 minus this gain
        gain = sum_qx * fitted
        fits = (gain > best) & (lanes < tries - first)
        max_gain = k.reduce_max(k.select(fits, gain, lowest))
        if max_gain > best:
            best = max_gain
            chosen = fits & (gain == max_gain)
            # the first of equal attempts
            lane = k.reduce_min(k.select(chosen, lanes, k.splat(k.i32(WIDTH), WIDTH)))
            scale = k.reduce_max(k.select(lanes == lane, fitted, lowest))
    return scale


@k.inline
def encode_weighted_q4_0(out: k.View, x: k.View, w: k.View) -> None:
    """Encodes a block of Q4_0 with the scale that minimizes the weighted error."""
    v = load_half_part(x, 0), load_half_part(x, WIDTH)
    weights = load_half_part(w, 0), load_half_part(w, WIDTH)
    store_half(out, 0, fit_symmetric(v, weights, 8, True))
    d = inverse(half_at(out, 0))
    low = k.cast(rounded_within(v[0] * d, -8, 7) + 8.0, k.u8)
    high = k.cast(rounded_within(v[1] * d, -8, 7) + 8.0, k.u8)
    out.store(2, value=low | high << 4)


@k.inline
def encode_q6_k(out: k.View, x: k.View, w: k.View, floats: k.View, weighted: bool) -> None:
    """Encodes a block of Q6_K; `floats` is scratch memory of 16 elements."""
    largest = k.f32(0)
    for part in range(16):
        v = load_half_part(x, part * 16)
        scale = fit_symmetric((v,), (load_weights(w, part * 16, weighted),), 32, weighted)
        floats[part] = scale
        if k.abs(scale) > k.abs(largest):
            largest = scale
    # -128 has one step more than 127
    store_half(out, 208, largest / -128.0)
    d = half_at(out, 208)
    for part in range(16):
        level = k.min(k.max(k.round(floats[part] * inverse(d)), -128.0), 127.0)
        out[192 + part] = k.bitcast(k.i8(level), k.u8)
        floats[part] = d * level
    for half in k.static_range(2):
        for i in k.static_range(2):
            upper = k.splat(k.u8(0), WIDTH)
            for group in k.static_range(2):
                # parts of groups 0 and 1 are in low halves, those of groups 2 and 3 in high ones
                low = quantized_q6(x, half * 8 + group * 2 + i, floats)
                high = quantized_q6(x, half * 8 + group * 2 + 4 + i, floats)
                out.store(half * 64 + group * 32 + 16 * i, value=low & 15 | high << 4)
                upper = upper | low >> 4 << (2 * group) | high >> 4 << (2 * group + 4)
            out.store(128 + half * 32 + 16 * i, value=upper)


@k.inline
def quantized_q6(x: k.View, part: int, floats: Any) -> Any:
    """Quantizes the 16 elements of a part to bytes."""
    q = rounded_within(load_half_part(x, part * 16) * inverse(floats[part]), -32, 31)
    return k.cast(q + 32.0, k.u8)


@k.inline
def encode_block(
    block: k.View,
    x: k.View,
    w: k.View,
    floats: k.View,
    fields: k.View,
    encoding: str,
    weighted: bool,
) -> None:
    """Encodes a block. `floats` and `fields` are scratch memory of 16 elements each."""
    if encoding == "Q8_0":
        encode_q8_0(block, x)
    if encoding == "Q4_0":
        if weighted:
            encode_weighted_q4_0(block, x, w)
        else:
            encode_q4_0(block, x)
    if encoding == "Q4_K":
        encode_affine(block, x, w, floats, fields, False, weighted)
    if encoding == "Q5_K":
        encode_affine(block, x, w, floats, fields, True, weighted)
    if encoding == "Q6_K":
        encode_q6_k(block, x, w, floats, weighted)


@k.inline
def weighted_error(block: k.View, x: k.View, w: k.View, scratch: k.View, encoding: str) -> Any:
    """The weighted sum of squared errors of a block; `scratch` is scratch memory of its elements."""
    decode_block(scratch, block, encoding)
    total = k.splat(k.f32(0), WIDTH)
    for i in range(0, BLOCK_FORMATS[encoding].elements, WIDTH):
        error = load_half_part(scratch, i) - load_half_part(x, i)
        total = total + load_half_part(w, i) * error * error
    return k.reduce_add(total)


@k.kernel
def quantize(out: k.Output, x: k.Input, ctx: k.Context, *, encoding: str) -> None:
    """`out` `[blocks * bytes]` from `x` `[blocks * elements]`."""
    elements, size = BLOCK_FORMATS[encoding]
    floats = ctx.scratch(k.f32, (16,))
    fields = ctx.scratch(k.u8, (16,))
    for b in ctx.parallel(x.shape[0] // elements):
        values = x[b * elements :]
        encode_block(out[b * size :], values, values, floats, fields, encoding, False)


@k.kernel
def quantize_weighted(
    out: k.Output, x: k.Input, weights: k.Input, ctx: k.Context, *, encoding: str
) -> None:
    """`out` `[blocks * bytes]` from `x` `[blocks * elements]`, rows of as many elements as there are weights.

    Each block is encoded with and without weights, and the encoding with the smaller weighted error is kept.
    """
    elements, size = BLOCK_FORMATS[encoding]
    floats = ctx.scratch(k.f32, (16,))
    fields = ctx.scratch(k.u8, (16,))
    decoded = ctx.scratch(k.f32, (elements,))
    fitted = ctx.scratch(k.u8, (size,))
    in_row = weights.shape[0] // elements
    for b in ctx.parallel(x.shape[0] // elements):
        block, values = out[b * size :], x[b * elements :]
        # rows have the same weights
        w = weights[b % in_row * elements :]
        encode_block(block, values, values, floats, fields, encoding, False)
        encode_block(fitted, values, w, floats, fields, encoding, True)
        plain = weighted_error(block, values, w, decoded, encoding)
        if weighted_error(fitted, values, w, decoded, encoding) < plain:
            for i in range(size):
                block[i] = fitted[i]


_lower_plain = lower_flat(quantize)


def _lower(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.quantize`, with or without weights of the columns."""
    # 8-bit encodings ignore weights
    if len(operands) == 1 or attributes["encoding"] == "Q8_0":
        return _lower_plain(operands[:1], results, attributes, target)
    args = (
        view("result", 0, results[0], (range(len(results[0].shape)),), static=False),
        view("operand", 0, operands[0], (range(len(operands[0].shape)),), static=False),
        view("operand", 1, operands[1], static=False),
    )
    return KernelCall(quantize_weighted, args, {"encoding": attributes["encoding"]})


LOWERINGS = {"mo.quantize": _lower}
