"""Quantized blocks as GGUF files store them: their formats, and conversions from and to NumPy arrays.

A block holds a fixed number of neighboring elements of a row in a fixed number of bytes (little-endian). With `d` and
`m` for the float16 scales of a block, `s` and `o` for the integer scales of its parts, and `q` for an element's bits,
an element is

======  ========  =====  ==============================================  ======================================
format  elements  bytes  element                                         bytes in order
======  ========  =====  ==============================================  ======================================
Q4_0    32        18     ``d (q - 8)``                                   d; 16 low and high halves
Q8_0    32        34     ``d q``, q signed                               d; 32 q
Q4_K    256       144    ``d s q - m o``, s and o of 32 elements, 6-bit  d, m; 12 of s and o; 128 halves
Q5_K    256       176    the same                                        d, m; 12; 32 fifth bits; 128 halves
Q6_K    256       210    ``d s (q - 32)``, s of 16 elements, signed      128 halves; 64 upper bits; 16 s; d
Q2_K    256       84     ``d s q - m o``, s and o of 16 elements, 4-bit  16 of s and o; 64 of 2 bits; d, m
Q3_K    256       110    ``d s (q - 4)``, s of 16 elements, 6-bit        32 third bits; 64 of 2 bits; 12 s; d
IQ4_NL  32        18     ``d level(q)``                                  d; 16 low and high halves
IQ4_XS  256       136    ``d s level(q)``, s of 32 elements, 6-bit       d; 2 upper and 4 low of s; 128 halves
======  ========  =====  ==============================================  ======================================

The last four are read and multiplied, but not encoded. The layouts are those of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and of the ``gguf`` package, whose
decoders give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max.dtype._block_parts import iq4_nl, iq4_xs, q2_k, q3_k

__all__ = ["BLOCK_FORMATS", "ENCODED_FORMATS", "BlockFormat", "decode", "encode"]

Floats = npt.NDArray[Any]
Bytes = npt.NDArray[Any]


class BlockFormat(NamedTuple):
    """The size of a block.

    Args:
        elements: The number of its elements.
        bytes: The number of its bytes.
    """

    elements: int
    bytes: int


BLOCK_FORMATS = {
    "Q4_0": BlockFormat(32, 18),
    "Q8_0": BlockFormat(32, 34),
    "Q4_K": BlockFormat(256, 144),
    "Q5_K": BlockFormat(256, 176),
    "Q6_K": BlockFormat(256, 210),
    "Q2_K": BlockFormat(256, 84),
    "Q3_K": BlockFormat(256, 110),
    "IQ4_NL": BlockFormat(32, 18),
    "IQ4_XS": BlockFormat(256, 136),
}
"""The sizes by name of the format."""
ENCODED_FORMATS = ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The formats that `encode` writes."""

_AT_ONCE = 1 << 14
"""The number of blocks that are converted at a time: intermediate results stay in the cache."""


def _form(what: str, name: str) -> BlockFormat:
    if name not in BLOCK_FORMATS:
        raise ValueError(f"{what}: the format is {name!r}, expected {', '.join(BLOCK_FORMATS)}")
    return BLOCK_FORMATS[name]


def decode(blocks: npt.NDArray[Any], name: str) -> Floats:
    """The elements of blocks.

    Args:
        blocks: uint8 ``[…, bytes]``.
        name: The format, such as ``Q4_K``.

    Returns:
        float32 ``[…, bytes / block_size * elements_per_block]``.

    Raises:
        ValueError: The format is unknown, the last dimension is not a multiple of its block, or the array is not uint8.
    """
    form = _form("decode", name)
    if blocks.dtype != np.uint8 or blocks.ndim < 1 or blocks.shape[-1] % form.bytes:
        raise ValueError(
            f"decode: {blocks.dtype} {list(blocks.shape)}, expected uint8 rows of a multiple of "
            f"{form.bytes} bytes, a block of {name}"
        )
    flat = np.ascontiguousarray(blocks).reshape(-1, form.bytes)
    out = np.empty((len(flat), form.elements), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), _AT_ONCE):
            out[start : start + _AT_ONCE] = _DECODERS[name](flat[start : start + _AT_ONCE])
    return out.reshape(*blocks.shape[:-1], blocks.shape[-1] // form.bytes * form.elements)


def encode(values: npt.NDArray[Any], name: str, weights: npt.NDArray[Any] | None = None) -> Bytes:
    """Blocks that hold values as closely as the format can.

    Without weights, Q4_0 and Q8_0 are those of the ``gguf`` package, bit by bit. Scales of the K formats are fitted by
    least squares, the best of a few roundings. With weights the scales of all formats but Q8_0 minimize the weighted
    sum of squared errors; a block that is better without the weights, under the same sum, is encoded without them.

    Args:
        values: Finite floats ``[…, elements]``.
        name: The format, such as ``Q4_K``.
        weights: The weight of each element's squared error, finite and not negative, of a shape that broadcasts to that
            of `values`; None: all are equal.

    Returns:
        uint8 ``[…, elements / elements_per_block * block_size]``.

    Raises:
        ValueError: The format is unknown, the last dimension is not a multiple of its block, a value is not finite or
            too large for float16 scales, or the weights do not fit.
    """
    form = _form("encode", name)
    if name not in ENCODED_FORMATS:
        raise ValueError(
            f"encode: {name} is read from files only, expected {', '.join(ENCODED_FORMATS)}"
        )
    if values.ndim < 1 or values.shape[-1] % form.elements:
        raise ValueError(
            f"encode: {list(values.shape)}, expected rows of a multiple of {form.elements} elements, a block of {name}"
        )
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, form.elements)
    if not np.isfinite(flat).all():
        raise ValueError(f"encode: {name} holds finite values only")
    of_blocks = None if weights is None else _weights(values, weights).reshape(-1, form.elements)
    out = np.empty((len(flat), form.bytes), np.uint8)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            w = None if of_blocks is None else of_blocks[part]
            out[part] = _best(flat[part], name, w)
    return out.reshape(*values.shape[:-1], values.shape[-1] // form.elements * form.bytes)


def _weights(values: npt.NDArray[Any], weights: npt.NDArray[Any]) -> Floats:
    """Weights of the shape of the values.

    Raises:
        ValueError: They do not broadcast to it, or one is negative or not finite.
    """
    try:
        wide = np.broadcast_to(weights.astype(np.float32), values.shape)
    except ValueError:
        raise ValueError(
            f"encode: weights {list(weights.shape)} of values {list(values.shape)}, expected a shape that broadcasts "
            "to it"
        ) from None
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("encode: a weight is negative or not finite")
    return wide


def _best(x: Floats, name: str, w: Floats | None) -> Bytes:
    """Blocks of the encoder; with weights, for each block the better of its results with and without them."""
    plain = _ENCODERS[name](x, None)
    if w is None or name == "Q8_0":
        return plain
    fitted = _ENCODERS[name](x, w)
    errors = [(w * np.square(_DECODERS[name](blocks) - x)).sum(1) for blocks in (plain, fitted)]
    return np.where((errors[1] < errors[0])[:, None], fitted, plain)


# bytes and bits --------------------------------------------------------------------------------


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, as a column."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _half_bytes(scale: Floats, name: str) -> Bytes:
    """Scales, a column, as float16."""
    half = scale.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError(f"encode: the values are too large for the float16 scales of {name}")
    return half.reshape(-1, 1).view(np.uint8)


def _halves(packed: Bytes) -> Bytes:
    """The low, then the high four bits along the axis before the last: ``[…, n]`` to ``[…, 2, n]``."""
    return np.stack([packed & 15, packed >> 4], -2)


def _inverse(scale: Floats) -> Floats:
    """1 / scale; 0 for 0."""
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale).astype(np.float32)


# blocks of 32 ----------------------------------------------------------------------------------


def _decode_q4_0(blocks: Bytes) -> Floats:
    q = _halves(blocks[:, 2:]).reshape(-1, 32).astype(np.int8) - np.int8(8)
    return _half(blocks, 0) * q.astype(np.float32)


def _encode_q4_0(x: Floats, w: Floats | None) -> Bytes:
    if w is not None:
        half = _half_bytes(_fit_symmetric(x, 8, w)[:, None], "Q4_0")
        d = half.view(np.float16).astype(np.float32)
        q = (np.clip(np.rint(x * _inverse(d)), -8, 7) + 8).astype(np.uint8)
        return np.concatenate([half, q[:, :16] | q[:, 16:] << 4], 1)
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    d = largest / np.float32(-8)
    # in float64, as the product and the sum are rounded once
    q = x.astype(np.float64) * _inverse(d).astype(np.float64) + 8.5
    q = np.clip(np.trunc(q.astype(np.float32)), 0, 15).astype(np.uint8)
    return np.concatenate([_half_bytes(d, "Q4_0"), q[:, :16] | q[:, 16:] << 4], 1)


def _decode_q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _encode_q8_0(x: Floats, w: Floats | None) -> Bytes:
    del w  # 8 bits need no weights
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    # halves away from zero
    magnitude = np.floor(np.abs(scaled))
    q = np.sign(scaled) * (magnitude + np.floor(2 * (np.abs(scaled) - magnitude)))
    return np.concatenate([_half_bytes(d, "Q8_0"), q.astype(np.int8).view(np.uint8)], 1)


# blocks of 256 ---------------------------------------------------------------------------------


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """The 8 scales and 8 offsets in 12 bytes."""
    low, high, both = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, both & 15 | low >> 6 << 4], 1)
    offsets = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], 1)
    return scales, offsets


def _six_bits_bytes(scales: Bytes, offsets: Bytes) -> Bytes:
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    high = offsets[:, :4] | offsets[:, 4:] >> 4 << 6
    return np.concatenate([low, high, scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4], 1)


def _affine(blocks: Bytes, q: Bytes) -> Floats:
    """``d s q - m o`` for ``q`` of shape ``[n, 8, 32]``; each product is exact."""
    scales, offsets = _six_bits(blocks[:, 4:16])
    scale = _half(blocks, 0) * scales.astype(np.float32)
    offset = _half(blocks, 2) * offsets.astype(np.float32)
    return (scale[:, :, None] * q.astype(np.float32) - offset[:, :, None]).reshape(-1, 256)


def _decode_q4_k(blocks: Bytes) -> Floats:
    return _affine(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _decode_q5_k(blocks: Bytes) -> Floats:
    low = _halves(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _affine(blocks, low | fifth << 4)


def _attempts(most: int, weighted: bool) -> Floats:
    """The number of steps of the range of a part, for each attempt of a fit.

    Attempts with weights reach further: elements of little weight may be clipped.
    """
    reach, count = (3, 31) if weighted else (1, 15)
    return np.linspace(most - reach, most + reach, count, dtype=np.float32)


def _fit_affine(x: Floats, most: int, w: Floats | None) -> tuple[Floats, Floats]:
    """Scale and offset of parts ``[…, 32]``, so that ``scale q - offset`` is near x for q in 0 … most."""
    low = np.minimum(x.min(-1, keepdims=True), 0)
    width = x.max(-1, keepdims=True) - low
    best = np.full(low.shape, np.inf, np.float32)
    scale: Floats = width / np.float32(most)
    offset: Floats = -low
    n = np.float32(x.shape[-1]) if w is None else w.sum(-1, keepdims=True)
    wx = x if w is None else w * x
    sum_x = wx.sum(-1, keepdims=True)
    for levels in _attempts(most, w is not None):
        q = np.clip(np.rint((x - low) * (levels * _inverse(width))), 0, most)
        wq = q if w is None else w * q
        sum_q, sum_qq = wq.sum(-1, keepdims=True), (wq * q).sum(-1, keepdims=True)
        sum_qx = (wq * x).sum(-1, keepdims=True)
        slope: Floats = (n * sum_qx - sum_x * sum_q) * _inverse(n * sum_qq - sum_q * sum_q)
        start = (sum_x - slope * sum_q) / n
        # offsets are not negative: the line then goes through 0
        through = sum_qx * _inverse(sum_qq)
        slope = np.where(start > 0, through, slope)
        start = np.minimum(start, 0)
        squares = np.square(slope * q + start - x)
        error = (squares if w is None else w * squares).sum(-1, keepdims=True)
        better = (error < best) & (slope > 0)
        best = np.where(better, error, best)
        scale, offset = np.where(better, slope, scale), np.where(better, -start, offset)
    return scale[..., 0], offset[..., 0]


def _encode_affine(x: Floats, most: int, name: str, w: Floats | None) -> tuple[Bytes, Bytes]:
    """The first 16 bytes of blocks, and q ``[n, 8, 32]``."""
    parts = x.reshape(-1, 8, 32)
    scale, offset = _fit_affine(parts, most, None if w is None else w.reshape(-1, 8, 32))
    head: list[Bytes] = []
    fields: list[Bytes] = []
    factors: list[Floats] = []
    for exact in (scale, offset):
        d = exact.max(1, keepdims=True) / np.float32(63)
        head.append(_half_bytes(d, name))
        d = head[-1].view(np.float16).astype(np.float32)
        fields.append(np.clip(np.rint(exact * _inverse(d)), 0, 63).astype(np.uint8))
        factors.append((d * fields[-1].astype(np.float32))[:, :, None])
    q = np.clip(np.rint((parts + factors[1]) * _inverse(factors[0])), 0, most).astype(np.uint8)
    return np.concatenate([*head, _six_bits_bytes(*fields)], 1), q


def _packed_halves(q: Bytes, shape: tuple[int, ...]) -> Bytes:
    """The inverse of `_halves`."""
    pairs = (q & 15).reshape(shape)
    return (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(len(pairs), -1)


def _encode_q4_k(x: Floats, w: Floats | None) -> Bytes:
    head, q = _encode_affine(x, 15, "Q4_K", w)
    return np.concatenate([head, _packed_halves(q, (-1, 4, 2, 32))], 1)


def _encode_q5_k(x: Floats, w: Floats | None) -> Bytes:
    head, q = _encode_affine(x, 31, "Q5_K", w)
    fifth = np.bitwise_or.reduce(q >> 4 << np.arange(8, dtype=np.uint8)[:, None], 1)
    return np.concatenate([head, fifth, _packed_halves(q, (-1, 4, 2, 32))], 1)


def _decode_q6_k(blocks: Bytes) -> Floats:
    # a half of a block is 4 groups of 32: low bits of two in 64 bytes, upper bits of four in 32
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    q = (low | upper << 4).astype(np.int8) - np.int8(32)
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scale[:, :, None] * q.reshape(-1, 16, 16).astype(np.float32)).reshape(-1, 256)


def _fit_symmetric(x: Floats, most: int, w: Floats | None) -> Floats:
    """Scales of parts, so that ``scale q`` is near x for q in -most … most - 1."""
    largest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)
    best = np.full(largest.shape, -1, np.float32)
    scale = largest / np.float32(-most)
    for levels in _attempts(most, w is not None):
        q = np.clip(np.rint(x * (-levels * _inverse(largest))), -most, most - 1)
        wq = q if w is None else w * q
        sum_qx, sum_qq = (wq * x).sum(-1, keepdims=True), (wq * q).sum(-1, keepdims=True)
        fitted = sum_qx * _inverse(sum_qq)
        # the sum of squared errors is that of x^2 less this
        gain = sum_qx * fitted
        better = gain > best
        best, scale = np.where(better, gain, best), np.where(better, fitted, scale)
    return scale[..., 0]


def _encode_q6_k(x: Floats, w: Floats | None) -> Bytes:
    parts = x.reshape(-1, 16, 16)
    scale = _fit_symmetric(parts, 32, None if w is None else w.reshape(-1, 16, 16))
    largest = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = _half_bytes(largest / np.float32(-128), "Q6_K")
    unit = d.view(np.float16).astype(np.float32)
    factors = np.clip(np.rint(scale * _inverse(unit)), -128, 127).astype(np.int8)
    factor = (unit * factors.astype(np.float32))[:, :, None]
    q = np.clip(np.rint(parts * _inverse(factor)), -32, 31).astype(np.int8)
    bits = (q + np.int8(32)).view(np.uint8).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = np.bitwise_or.reduce(bits >> 4 << shifts, 2).reshape(-1, 64)
    low = _packed_halves(bits, (-1, 2, 2, 64))
    return np.concatenate([low, upper, factors.view(np.uint8), d], 1)


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _decode_q4_0,
    "Q8_0": _decode_q8_0,
    "Q4_K": _decode_q4_k,
    "Q5_K": _decode_q5_k,
    "Q6_K": _decode_q6_k,
    "Q2_K": lambda blocks: q2_k(blocks).values(),
    "Q3_K": lambda blocks: q3_k(blocks).values(),
    "IQ4_NL": lambda blocks: iq4_nl(blocks).values(),
    "IQ4_XS": lambda blocks: iq4_xs(blocks).values(),
}
_ENCODERS: dict[str, Callable[[Floats, Floats | None], Bytes]] = {
    "Q4_0": _encode_q4_0,
    "Q8_0": _encode_q8_0,
    "Q4_K": _encode_q4_k,
    "Q5_K": _encode_q5_k,
    "Q6_K": _encode_q6_k,
}
