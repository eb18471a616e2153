"""Quantized blocks of GGUF files for which there are no kernels: their values, and blocks with kernels that hold them.

A value is ``d s q`` or ``d s q + m o`` with `d` and `m` floats of the block, `s` and `o` small integers of a group of
neighbors and `q` an 8-bit integer of the element. With `n` for the low (first) and high halves of bytes, the bytes of
a block are

=======  ========  =====  ==============  ==================================================================
format   elements  bytes  group           bytes in order
=======  ========  =====  ==============  ==================================================================
Q4_1     32        20     32              d, m; 16 n
Q5_0     32        22     32              d; 4 of fifth bits; 16 n; q is the bits less 16
Q5_1     32        24     32              d, m; 4 of fifth bits; 16 n
Q8_K     256       292    256             d in float32; 256 q; 16 sums
IQ1_S    256       50     32              d; 32 indices; 8 words: 4 times 3 bits of indices, s, the shift's sign
IQ1_M    256       56     16              32 indices; 16 n: 3 bits of an index, the shift's sign; 4 words: s, part of d
IQ2_XXS  256       66     32              d; for each 32: 4 indices, a word of 4 signs and s
IQ2_XS   256       74     16              d; 32 words of index and signs; 8 n of s
IQ2_S    256       82     16              d; 32 indices; 32 of signs; 8 of 2 bits of indices; 8 n of s
IQ3_XXS  256       98     32              d; 64 indices; 8 words of 4 signs and s
IQ3_S    256       110    32              d; 64 indices; 8 of ninth bits of indices; 32 of signs; 4 n of s
MXFP4    32        17     32              e, d is ``2 ** (e - 128)``; 16 n, numbers of levels
NVFP4    64        36     16              4 d in float8 without sign; 32 n, numbers of levels
Q1_0     128       18     128             d; 16 of bits, which are signs
TQ1_0    256       54     256             52 of 5 (the last 4 of 4) digits in base 3; d
TQ2_0    256       66     256             64 of 2 bits; d
=======  ========  =====  ==============  ==================================================================

An index stands for a vector of a grid (`max.dtype._block_grids`). The layouts are those of ``ggml/src/ggml-common.h``
in https://github.com/ggml-org/llama.cpp; values are the bits that the ``gguf`` package decodes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max.dtype._block_grids import SIGNS, grid
from max.dtype._block_parts import (
    Parts,
    alternating_nibbles,
    half_at,
    halves,
    one,
    pairs_of_bits,
    signed_values,
    words_at,
)
from max.dtype.blocks import BLOCK_FORMATS, BlockFormat, encode

__all__ = ["FILE_FORMATS", "decode_file_blocks", "to_kernel_blocks"]

Array = npt.NDArray[Any]


class FileFormat(NamedTuple):
    """A format.

    Args:
        block: Elements and bytes of a block.
        parts: Reads the numbers of blocks, uint8 ``[blocks, bytes]``.
        kernel: The format with kernels that holds its values.
        exact: Whether each element's integer is kept there; else elements are rounded to 8 bits.
    """

    block: BlockFormat
    parts: Callable[[Array], Parts]
    kernel: str
    exact: bool = True


_CHUNK = 1 << 15
"""The number of groups of 32 elements that are converted at a time: intermediate results stay in the cache."""

MOST_ERROR = 1 / 128
"""The greatest root mean square error of 8 bits, relative to the values; with a greater one values become bfloat16."""


def decode_file_blocks(blocks: Array, name: str) -> Array:
    """The elements of blocks.

    Args:
        blocks: uint8 ``[…, bytes]``, rows of whole blocks.
        name: The format, a key of `FILE_FORMATS`.

    Returns:
        float32 ``[…, elements]``.

    Raises:
        ValueError: The array is not uint8, or its rows are not whole blocks.
    """
    form = FILE_FORMATS[name]
    flat, step = _chunks(blocks, form)
    out = np.empty((len(flat), form.block.elements), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(flat), step):
            out[start : start + step] = form.parts(flat[start : start + step]).values()
    row = blocks.shape[-1] // form.block.bytes * form.block.elements
    return out.reshape(*blocks.shape[:-1], row)


def to_kernel_blocks(blocks: Array, name: str) -> tuple[Array, str] | None:
    """The blocks of a format with kernels that hold the same values.

    Elements keep their integers where that format has their groups, and only the product of a group's scales is
    rounded, to float16; elements of other formats are rounded to the 8 bits of Q8_0.

    Args:
        blocks: uint8 ``[…, bytes]``, rows of whole blocks.
        name: The format, a key of `FILE_FORMATS`.

    Returns:
        The blocks, uint8 ``[…, bytes]``, and their format; None if the root mean square error would be over
        `MOST_ERROR` of the values', as where scales are outside the range of float16.

    Raises:
        ValueError: The array is not uint8, or its rows are not whole blocks.
    """
    form = FILE_FORMATS[name]
    flat, step = _chunks(blocks, form)
    elements, size = BLOCK_FORMATS[form.kernel]
    row = blocks.shape[-1] // form.block.bytes * form.block.elements // elements * size
    if not len(flat):
        return np.empty((*blocks.shape[:-1], row), np.uint8), form.kernel
    write = _WRITERS[form.kernel] if form.exact else _rounded_blocks

    def convert_blocks(start: int) -> _Converted:
        with np.errstate(all="ignore"):
            return write(form.parts(flat[start : start + step]))

    # NumPy runs without the interpreter's lock
    with ThreadPoolExecutor(os.cpu_count(), "file blocks") as threads:
        try:
            parts = list(threads.map(convert_blocks, range(0, len(flat), step)))
        except ValueError:  # a value is not finite, or a scale is too large
            return None
    error, power = sum(part.error for part in parts), sum(part.power for part in parts)
    if not error <= MOST_ERROR**2 * power:  # NaN is no bound
        return None
    return np.concatenate([part.blocks for part in parts]).reshape(
        *blocks.shape[:-1], row
    ), form.kernel


def _chunks(blocks: Array, form: FileFormat) -> tuple[Array, int]:
    """Blocks ``[n, bytes]``, and the number that is converted at a time."""
    if blocks.dtype != np.uint8 or blocks.ndim < 1 or blocks.shape[-1] % form.block.bytes:
        raise ValueError(
            f"blocks of {form.block.bytes} bytes: {blocks.dtype} {list(blocks.shape)}, expected uint8 rows of whole "
            "blocks"
        )
    flat = np.ascontiguousarray(blocks).reshape(-1, form.block.bytes)
    return flat, max(_CHUNK * 32 // form.block.elements, 1)


# blocks with kernels ---------------------------------------------------------------------------


class _Converted(NamedTuple):
    blocks: Array
    error: float
    power: float


def _half_scales(scale: Array, q: Array) -> tuple[Array, float, float]:
    """Scales ``[n, 1]`` of elements ``[n, 32]`` as float16, the squares of the error that this makes, and those of the
    values.
    """
    half = scale.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError("a scale is too large for float16")
    exact = scale.astype(np.float64)
    squares = np.square(q, dtype=np.int16).sum(-1, dtype=np.int64, keepdims=True)
    error = float((np.square(half - exact) * squares).sum())
    return half, error, float((np.square(exact) * squares).sum())


def _to_q8_0(numbers: Parts) -> _Converted:
    """Blocks of Q8_0; a group is 32 elements or more of them."""
    n, _, size = numbers.q.shape
    scale = np.repeat(numbers.d * numbers.s.astype(np.float32), size // 32, 1).reshape(-1, 1)
    q = numbers.q.reshape(-1, 32)
    half, error, power = _half_scales(scale, q)
    blocks = np.concatenate([half.view(np.uint8), q.view(np.uint8)], 1)
    return _Converted(blocks.reshape(n, -1), error, power)


def _to_q4_0(numbers: Parts) -> _Converted:
    """Blocks of Q4_0, whose integers are -8 to 7."""
    n, _, size = numbers.q.shape
    scale = np.repeat(numbers.d * numbers.s.astype(np.float32), size // 32, 1).reshape(-1, 1)
    q = numbers.q.reshape(-1, 32)
    half, error, power = _half_scales(scale, q)
    bits = (q + np.int8(8)).view(np.uint8)
    blocks = np.concatenate([half.view(np.uint8), bits[:, :16] | bits[:, 16:] << 4], 1)
    return _Converted(blocks.reshape(n, -1), error, power)


def _to_q6_k(numbers: Parts) -> _Converted:
    """Blocks of Q6_K: s and q keep their values, d becomes a float16."""
    n = len(numbers.q)
    weighted = numbers.s[:, :, None].astype(np.int16) * numbers.q
    half = numbers.d.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError("a scale is too large for float16")
    squares = np.square(weighted, dtype=np.int32).sum((1, 2), dtype=np.int64)[:, None]
    exact = numbers.d.astype(np.float64)
    error = float((np.square(half - exact) * squares).sum())
    power = float((np.square(exact) * squares).sum())
    bits = (numbers.q + np.int8(32)).view(np.uint8).reshape(n, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    upper = np.bitwise_or.reduce(bits >> 4 << shifts, 2).reshape(n, 64)
    low = bits[:, :, :2] & 15 | (bits[:, :, 2:] & 15) << 4
    scales = numbers.s.astype(np.int8).view(np.uint8)
    blocks = np.concatenate([low.reshape(n, 128), upper, scales, half.view(np.uint8)], 1)
    return _Converted(blocks, error, power)


def _rounded_blocks(numbers: Parts) -> _Converted:
    """Blocks of Q8_0 of the elements, each rounded to 8 bits."""
    values = numbers.values()
    if not np.isfinite(values).all():
        raise ValueError("a value is not finite")
    blocks = encode(values, "Q8_0")
    # an element is off by half a step at most, by a twelfth of its square in the mean
    d = np.ascontiguousarray(blocks.reshape(-1, 34)[:, :2]).view(np.float16).astype(np.float64)
    largest = np.abs(values.reshape(-1, 32)).max(1, keepdims=True)
    lost = np.square(d - largest.astype(np.float64) / 127) * 127**2
    error = float((np.square(d) / 12 + lost).sum() * 32)
    return _Converted(blocks, error, float(np.square(values, dtype=np.float64).sum()))


_WRITERS: dict[str, Callable[[Parts], _Converted]] = {
    "Q8_0": _to_q8_0,
    "Q4_0": _to_q4_0,
    "Q6_K": _to_q6_k,
}


# bytes and bits --------------------------------------------------------------------------------


def _bits(packed: Array) -> Array:
    """The bits of each byte, the lowest first: ``[n, b]`` to ``[n, 8 b]``."""
    return np.unpackbits(np.ascontiguousarray(packed), axis=-1, bitorder="little")


def _signs_of_bits(packed: Array) -> Array:
    """-1 for each bit that is set, the lowest first."""
    return 1 - 2 * _bits(packed).astype(np.int8)


def _odd(s: Array) -> Array:
    """``2 s + 1``."""
    return 2 * s.astype(np.int16) + 1


# formats with one scale ------------------------------------------------------------------------


def _q4_1(b: Array) -> Parts:
    return Parts(half_at(b, 0), one(b), signed_values(halves(b[:, 4:]), 1), half_at(b, 2))


def _q5_0(b: Array) -> Parts:
    q = halves(b[:, 6:]) | _bits(b[:, 2:6]) << 4
    return Parts(half_at(b, 0), one(b), signed_values(q, 1) - np.int8(16))


def _q5_1(b: Array) -> Parts:
    q = halves(b[:, 8:]) | _bits(b[:, 4:8]) << 4
    return Parts(half_at(b, 0), one(b), signed_values(q, 1), half_at(b, 2))


def _q8_k(b: Array) -> Parts:
    return Parts(words_at(b, 0, 4, "<f4"), one(b), b[:, 4:260].view(np.int8)[:, None])


def _q1_0(b: Array) -> Parts:
    return Parts(half_at(b, 0), one(b), -_signs_of_bits(b[:, 2:])[:, None])


def _tq1_0(b: Array) -> Parts:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    # a byte is a fraction in base 3: multiplied, its whole part is a digit
    parts = [
        (b[:, None, :32] * powers),
        (b[:, None, 32:48] * powers),
        (b[:, None, 48:52] * powers[:4]),
    ]
    digits = np.concatenate([part.reshape(len(b), -1) for part in parts], 1).astype(np.uint16)
    return Parts(half_at(b, 52), one(b), signed_values(digits * 3 >> 8, 1) - np.int8(1))


def _tq2_0(b: Array) -> Parts:
    return Parts(half_at(b, 64), one(b), signed_values(pairs_of_bits(b[:, :64]), 1) - np.int8(1))


# formats with a scale a group ------------------------------------------------------------------


# formats of levels -----------------------------------------------------------------------------

_FP4_LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the numbers of float4_e2m1."""


def _mxfp4(b: Array) -> Parts:
    # in float64: with exponents 0 and 1, half of the numbers are subnormal in float32
    d = np.ldexp(1.0, b[:, :1].astype(np.int32) - 128).astype(np.float32)
    return Parts(d, one(b), _FP4_LEVELS[halves(b[:, 1:])][:, None])


def _nvfp4(b: Array) -> Parts:
    exponent, mantissa = (b[:, :4] >> 3 & 15).astype(np.int32), (b[:, :4] & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    scale = np.where(exponent == 0, np.ldexp(mantissa, -9), normal)
    # 127 is no number of the format: it counts as 0
    scale = np.where(b[:, :4] == 127, 0, scale) / 2
    q = _FP4_LEVELS[halves(b[:, 4:].reshape(-1, 4, 8))]
    return Parts(np.ones((len(b), 1), np.float32), scale.astype(np.float32), q)


# formats of grids ------------------------------------------------------------------------------


def _eighth(b: Array, at: int) -> Array:
    return half_at(b, at) / np.float32(8)


def _signs_and_scale(words: Array) -> tuple[Array, Array]:
    """Of words ``[n, 8]`` the signs of 4 times 8 elements, ``[n, 8, 32]``, and s in the upper 4 bits."""
    numbers = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & 127
    return SIGNS[numbers].reshape(-1, 8, 32), _odd(words >> 28)


def _iq2_xxs(b: Array) -> Parts:
    words = words_at(b, 2, 66, "<u4").reshape(-1, 8, 2)
    indices = np.ascontiguousarray(words[:, :, 0]).view(np.uint8)
    signs, s = _signs_and_scale(words[:, :, 1])
    return Parts(_eighth(b, 0), s, grid("IQ2_XXS")[indices].reshape(-1, 8, 32) * signs)


def _iq2_xs(b: Array) -> Parts:
    words = words_at(b, 2, 66, "<u2")
    q = grid("IQ2_XS")[words & 511] * SIGNS[words >> 9]
    return Parts(_eighth(b, 0), _odd(alternating_nibbles(b[:, 66:])), q.reshape(-1, 16, 16))


def _iq2_s(b: Array) -> Parts:
    upper = b[:, 66:74, None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3
    indices = b[:, 2:34] | upper.reshape(-1, 32).astype(np.uint16) << 8
    q = grid("IQ2_S")[indices].reshape(-1, 256) * _signs_of_bits(b[:, 34:66])
    return Parts(_eighth(b, 0), _odd(alternating_nibbles(b[:, 74:])), q.reshape(-1, 16, 16))


def _iq3_xxs(b: Array) -> Parts:
    signs, s = _signs_and_scale(words_at(b, 66, 98, "<u4"))
    q = grid("IQ3_XXS")[b[:, 2:66]].reshape(-1, 8, 32) * signs
    return Parts(half_at(b, 0) / np.float32(4), s, q)


def _iq3_s(b: Array) -> Parts:
    indices = b[:, 2:66] | _bits(b[:, 66:74]).astype(np.uint16) << 8
    q = grid("IQ3_S")[indices].reshape(-1, 256) * _signs_of_bits(b[:, 74:106])
    return Parts(half_at(b, 0), _odd(alternating_nibbles(b[:, 106:])), q.reshape(-1, 8, 32))


def _shifted_vectors(indices: Array, negative: Array, groups: int) -> Array:
    """Eight times the vectors of IQ1, each element shifted by an eighth."""
    shift = np.where(negative, np.int8(-1), np.int8(1))
    return (8 * grid("IQ1")[indices] + shift[..., None]).reshape(len(indices), groups, -1)


def _iq1_s(b: Array) -> Parts:
    words = words_at(b, 34, 50, "<u2")
    upper = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    indices = b[:, 2:34].reshape(-1, 8, 4) | upper << 8
    negative = np.broadcast_to((words >> 15)[:, :, None], indices.shape)
    return Parts(_eighth(b, 0), _odd(words >> 12 & 7), _shifted_vectors(indices, negative, 8))


def _iq1_m(b: Array) -> Parts:
    words = words_at(b, 48, 56, "<u2")
    d = np.bitwise_or.reduce((words >> 12) << np.arange(0, 16, 4, dtype=np.uint16), 1)
    s = words[:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7
    upper = alternating_nibbles(b[:, 32:48])
    indices = b[:, :32] | (upper & 7).astype(np.uint16) << 8
    scale = d[:, None].astype(np.uint16).view(np.float16).astype(np.float32) / np.float32(8)
    return Parts(scale, _odd(s.reshape(-1, 16)), _shifted_vectors(indices, upper >> 3, 16))


FILE_FORMATS = {
    "Q4_1": FileFormat(BlockFormat(32, 20), _q4_1, "Q8_0", exact=False),
    "Q5_0": FileFormat(BlockFormat(32, 22), _q5_0, "Q8_0"),
    "Q5_1": FileFormat(BlockFormat(32, 24), _q5_1, "Q8_0", exact=False),
    "Q8_K": FileFormat(BlockFormat(256, 292), _q8_k, "Q8_0"),
    "IQ1_S": FileFormat(BlockFormat(256, 50), _iq1_s, "Q8_0"),
    "IQ1_M": FileFormat(BlockFormat(256, 56), _iq1_m, "Q6_K"),
    "IQ2_XXS": FileFormat(BlockFormat(256, 66), _iq2_xxs, "Q8_0"),
    "IQ2_XS": FileFormat(BlockFormat(256, 74), _iq2_xs, "Q8_0", exact=False),
    "IQ2_S": FileFormat(BlockFormat(256, 82), _iq2_s, "Q8_0", exact=False),
    "IQ3_XXS": FileFormat(BlockFormat(256, 98), _iq3_xxs, "Q8_0"),
    "IQ3_S": FileFormat(BlockFormat(256, 110), _iq3_s, "Q8_0"),
    "MXFP4": FileFormat(BlockFormat(32, 17), _mxfp4, "Q8_0"),
    "NVFP4": FileFormat(BlockFormat(64, 36), _nvfp4, "Q8_0", exact=False),
    "Q1_0": FileFormat(BlockFormat(128, 18), _q1_0, "Q4_0"),
    "TQ1_0": FileFormat(BlockFormat(256, 54), _tq1_0, "Q4_0"),
    "TQ2_0": FileFormat(BlockFormat(256, 66), _tq2_0, "Q4_0"),
}
"""The formats by name."""
