"""Floats to quantised blocks. Q4_0 and Q8_0 round as `max.dtype.blocks.encode` does; scales of the K formats are fitted by the same
least squares, with sums in another order.
"""

from __future__ import annotations

from typing import Any

from max import kernel as k
from max._kernel_library.products.quantised.dequantise import WIDTH, half_at, lower_flat
from max.dtype.blocks import BLOCK_FORMATS

TRIES = 15
"""Roundings of a part of a K block, of which the best is taken."""
UNFITTED = 3e38
"""An error above all others."""


@k.inline
def store_half(block: Any, at: int, value: Any) -> None:
    """Writes a float16 at a byte of a block."""
    bits = k.bitcast(k.f16(value), k.u16)
    block[at] = k.u8(bits & 255)
    block[at + 1] = k.u8(bits >> 8)


@k.inline
def inverse(scale: Any) -> Any:
    """1 / scale; 0 for 0."""
    return k.f32(0) if scale == 0.0 else 1.0 / scale


@k.inline
def encode_q8_0(out: Any, x: Any) -> None:
    """A block of Q8_0; halves are rounded away from zero."""
    top = k.splat(k.f32(0), WIDTH)
    for i in k.static_range(0, 32, WIDTH):
        top = k.max(top, k.abs(k.cast(x.load(i, width=WIDTH), k.f32)))
    d = k.reduce_max(top) / 127.0
    store_half(out, 0, d)
    for i in k.static_range(0, 32, WIDTH):
        scaled = k.cast(x.load(i, width=WIDTH), k.f32) * inverse(d)
        size = k.abs(scaled)
        whole = k.floor(size)
        q = k.copysign(whole + k.floor(2.0 * (size - whole)), scaled)
        out.store(2 + i, value=k.bitcast(k.cast(q, k.i8), k.u8))


@k.inline
def encode_q4_0(out: Any, x: Any) -> None:
    """A block of Q4_0: the largest element becomes -8."""
    largest = k.f32(0)
    for i in range(32):
        value = k.f32(x[i])
        if k.abs(value) > k.abs(largest):
            largest = value
    d = largest / -8.0
    store_half(out, 0, d)
    scale = k.f64(inverse(d))
    for i in range(16):
        # in f64 and then in f32, as the reference rounds
        low = k.f32(k.f64(k.f32(x[i])) * scale + 8.5)
        high = k.f32(k.f64(k.f32(x[i + 16])) * scale + 8.5)
        out[2 + i] = k.u8(k.min(low, 15.0)) | k.u8(k.min(high, 15.0)) << 4


@k.inline
def load_half_part(x: Any, at: Any) -> Any:
    """16 neighbours as f32."""
    return k.cast(x.load(at, width=WIDTH), k.f32)


@k.inline
def levels_of(most: int, attempt: Any) -> Any:
    """How many steps an attempt gives the range: ``most - 1`` to ``most + 1``."""
    return k.f32(attempt) * (2.0 / (TRIES - 1)) + (most - 1.0)


@k.inline
def rounded_within(q: Any, least: Any, most: Any) -> Any:
    """The nearest integers, halves to even, within bounds."""
    return k.min(k.max(k.round(q), k.splat(k.f32(least), WIDTH)), k.splat(k.f32(most), WIDTH))


@k.inline
def fit_affine(x: Any, most: int) -> Any:
    """Scale and offset of 32 elements, so that ``scale q - offset`` is near them for q in 0 … most."""
    v0, v1 = load_half_part(x, 0), load_half_part(x, WIDTH)
    low = k.min(k.reduce_min(k.min(v0, v1)), 0.0)
    width = k.reduce_max(k.max(v0, v1)) - low
    sum_x = k.reduce_add(v0 + v1)
    best = k.f32(UNFITTED)
    scale = width / k.f32(most)
    offset = -low
    for attempt in range(TRIES):
        steps = levels_of(most, attempt) * inverse(width)
        q0 = rounded_within((v0 - low) * steps, 0, most)
        q1 = rounded_within((v1 - low) * steps, 0, most)
        sum_q = k.reduce_add(q0 + q1)
        sum_qq = k.reduce_add(q0 * q0 + q1 * q1)
        sum_qx = k.reduce_add(q0 * v0 + q1 * v1)
        slope = (32.0 * sum_qx - sum_x * sum_q) * inverse(32.0 * sum_qq - sum_q * sum_q)
        start = (sum_x - slope * sum_q) / 32.0
        if start > 0.0:  # offsets are not negative: the line then goes through 0
            slope = sum_qx * inverse(sum_qq)
            start = k.f32(0)
        # the squared error less the sum of x^2, which is the same for all attempts
        error = slope * (slope * sum_qq + 2.0 * (start * sum_q - sum_qx))
        error += start * (32.0 * start - 2.0 * sum_x)
        if error < best:
            if slope > 0.0:
                best = error
                scale = slope
                offset = -start
    return scale, offset


@k.inline
def pack_six_bits(out: Any, fields: Any) -> None:
    """Writes the 8 scales and 8 offsets of 6 bits in 12 bytes."""
    for i in k.static_range(4):
        out[i] = fields[i] | fields[4 + i] >> 4 << 6
        out[4 + i] = fields[8 + i] | fields[12 + i] >> 4 << 6
        out[8 + i] = fields[4 + i] & 15 | (fields[12 + i] & 15) << 4


@k.inline
def encode_affine(out: Any, x: Any, floats: Any, fields: Any, fifth: bool) -> None:
    """A block of Q4_K or Q5_K; `floats` and `fields` are scratch memory of 16 elements each."""
    most = 31 if fifth else 15
    scale_top, offset_top = k.f32(0), k.f32(0)
    for part in range(8):
        scale, offset = fit_affine(x[part * 32 :], most)
        floats[part] = scale
        floats[8 + part] = offset
        scale_top, offset_top = k.max(scale_top, scale), k.max(offset_top, offset)
    store_half(out, 0, scale_top / 63.0)
    store_half(out, 2, offset_top / 63.0)
    for i in range(16):
        d = half_at(out, 0) if i < 8 else half_at(out, 2)
        field = k.min(k.max(k.round(floats[i] * inverse(d)), 0.0), 63.0)
        fields[i] = k.u8(field)
        floats[i] = d * field
    pack_six_bits(out[4:], fields)
    halves = 48 if fifth else 16
    for i in k.static_range(0, 32, WIDTH):
        upper = k.splat(k.u8(0), WIDTH)
        for part in k.static_range(0, 8, 2):
            low = quantised_part(x, part, i, floats, most)
            high = quantised_part(x, part + 1, i, floats, most)
            out.store(halves + part * 16 + i, value=low & 15 | high << 4)
            upper = upper | low >> 4 << part | high >> 4 << (part + 1)
        if fifth:
            out.store(16 + i, value=upper)


@k.inline
def quantised_part(x: Any, part: int, at: int, floats: Any, most: int) -> Any:
    """16 elements of a part as bytes."""
    q = (load_half_part(x, part * 32 + at) + floats[8 + part]) * inverse(floats[part])
    return k.cast(rounded_within(q, 0, most), k.u8)


@k.inline
def fit_symmetric(v: Any) -> Any:
    """The scale of 16 elements, so that ``scale q`` is near them for q in -32 … 31."""
    top, bottom = k.reduce_max(v), k.reduce_min(v)
    largest = top
    if -bottom > top:
        largest = bottom
    scale = largest / -32.0
    best = k.f32(-1)
    for attempt in range(TRIES):
        q = rounded_within(v * (-levels_of(32, attempt) * inverse(largest)), -32, 31)
        sum_qx, sum_qq = k.reduce_add(q * v), k.reduce_add(q * q)
        fitted = sum_qx * inverse(sum_qq)
        # the squared error is sum x^2 less this
        gain = sum_qx * fitted
        if gain > best:
            best = gain
            scale = fitted
    return scale


@k.inline
def encode_q6_k(out: Any, x: Any, floats: Any) -> None:
    """A block of Q6_K; `floats` is scratch memory of 16 elements."""
    largest = k.f32(0)
    for part in range(16):
        scale = fit_symmetric(load_half_part(x, part * 16))
        floats[part] = scale
        if k.abs(scale) > k.abs(largest):
            largest = scale
    store_half(out, 208, largest / -128.0)
    d = half_at(out, 208)
    for part in range(16):
        whole = k.min(k.max(k.round(floats[part] * inverse(d)), -128.0), 127.0)
        out[192 + part] = k.bitcast(k.i8(whole), k.u8)
        floats[part] = d * whole
    for half in k.static_range(2):
        for i in k.static_range(2):
            upper = k.splat(k.u8(0), WIDTH)
            for group in k.static_range(2):
                low = quantised_q6(x, half * 8 + group * 2 + i, floats)
                high = quantised_q6(x, half * 8 + group * 2 + 4 + i, floats)
                out.store(half * 64 + group * 32 + 16 * i, value=low & 15 | high << 4)
                upper = upper | low >> 4 << (2 * group) | high >> 4 << (2 * group + 4)
            out.store(128 + half * 32 + 16 * i, value=upper)


@k.inline
def quantised_q6(x: Any, part: int, floats: Any) -> Any:
    """The 16 elements of a part as bytes."""
    q = rounded_within(load_half_part(x, part * 16) * inverse(floats[part]), -32, 31)
    return k.cast(q + 32.0, k.u8)


@k.kernel
def quantise(out: k.Output, x: k.Input, ctx: k.Context, *, encoding: str) -> None:
    """`out` `[blocks * bytes]` from `x` `[blocks * elements]`."""
    elements, size = BLOCK_FORMATS[encoding]
    floats = ctx.scratch(k.f32, (16,))
    fields = ctx.scratch(k.u8, (16,))
    for b in ctx.parallel(x.shape[0] // elements):
        block, values = out[b * size :], x[b * elements :]
        if encoding == "Q8_0":
            encode_q8_0(block, values)
        if encoding == "Q4_0":
            encode_q4_0(block, values)
        if encoding == "Q4_K":
            encode_affine(block, values, floats, fields, False)
        if encoding == "Q5_K":
            encode_affine(block, values, floats, fields, True)
        if encoding == "Q6_K":
            encode_q6_k(block, values, floats)


LOWERINGS = {"mo.quantize": lower_flat(quantise)}
