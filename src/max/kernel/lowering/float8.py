"""Conversions between f32 and 8-, 6- and 4-bit floats, as LLVM IR on lanes of integers.

The formats are those of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022), e4m3fn and e5m2, and of "8-bit
Numerical Formats for Deep Neural Networks" (Noune et al., 2022), the fnuz ones: a bias larger by one, no negative zero,
whose code is the only NaN. 4- and 6-bit floats (e2m1fn, e2m3fn, e3m2fn, of the OCP Microscaling Formats, 2023)
occupy a byte. Rounding is to nearest, ties to even. As in ml_dtypes, overflow gives infinity, or NaN in formats without
infinity; 4- and 6-bit formats have neither: they saturate, and NaN becomes the code of negative zero.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from max._dataclass import dataclass
from max.kernel.types import ScalarType

Emit = Callable[[str], str]
"""Emits an instruction; returns the name of its result."""


@dataclass(frozen=True)
class Float8:
    """A floating-point format of at most 8 bits.

    Args:
        mantissa: The number of mantissa bits.
        bias: The bias of the exponent.
        special: The smallest code, without sign, that is not finite; 128 if only the code of negative zero is not
            finite.
        overflow: The code that overflow gives.
        limit: The smallest magnitude that overflows, halfway beyond the largest number.
        sign: The sign bit.
    """

    mantissa: int
    bias: int
    special: int
    overflow: int
    limit: int
    sign: int = 0x80

    @property
    def only_nan(self) -> bool:
        """Whether the code of negative zero is NaN."""
        return self.special == self.sign == 0x80


def _bits(x: float) -> int:
    return int.from_bytes(struct.pack("<f", x), "little")


FORMATS = {
    "f8e4m3fn": Float8(3, 7, 0x7F, 0x7F, _bits(464.0) + 1),
    "f8e5m2": Float8(2, 15, 0x7C, 0x7C, _bits(61440.0)),
    "f8e4m3fnuz": Float8(3, 8, 0x80, 0x80, _bits(248.0)),
    "f8e5m2fnuz": Float8(2, 16, 0x80, 0x80, _bits(61440.0)),
    "f4e2m1fn": Float8(1, 1, 0x08, 0x07, _bits(7.0), 0x08),
    "f6e2m3fn": Float8(3, 1, 0x20, 0x1F, _bits(7.75), 0x20),
    "f6e3m2fn": Float8(2, 3, 0x20, 0x1F, _bits(30.0), 0x20),
}
"""The formats by type name. 464 is the midpoint of 448 and the code of NaN; as a tie it rounds to 448."""


def _types(width: int) -> tuple[str, str, str, str]:
    if width:
        return f"<{width} x i8>", f"<{width} x i32>", f"<{width} x float>", f"<{width} x i1>"
    return "i8", "i32", "float", "i1"


def _integer(value: int, width: int) -> str:
    return f"splat (i32 {value})" if width else str(value)


def _number(value: float, width: int) -> str:
    text = "0x" + struct.pack(">d", value).hex().upper()
    return f"splat (float {text})" if width else text


def widen(emit: Emit, text: str, dtype: ScalarType, width: int) -> str:
    """Converts codes to f32, exactly.

    Args:
        emit: Emits an instruction.
        text: The codes.
        dtype: Their type.
        width: The number of lanes; 0 for a scalar.
    """
    form = FORMATS[dtype.name]
    codes, ints, floats, flags = _types(width)

    def c(value: int) -> str:
        return _integer(value, width)

    wide = emit(f"zext {codes} {text} to {ints}")
    magnitude = emit(f"and {ints} {wide}, {c(form.sign - 1)}")
    # shift exponent and mantissa into place; a product corrects the bias, also of subnormals
    shifted = emit(f"shl {ints} {magnitude}, {c(23 - form.mantissa)}")
    small = emit(f"bitcast {ints} {shifted} to {floats}")
    scaled = emit(f"fmul {floats} {small}, {_number(2.0 ** (127 - form.bias), width)}")
    bits = emit(f"bitcast {floats} {scaled} to {ints}")
    sign = emit(f"and {ints} {wide}, {c(form.sign)}")
    high = emit(f"shl {ints} {sign}, {c(32 - form.sign.bit_length())}")
    if form.sign != 0x80:
        # no code is infinite or NaN
        return emit(f"bitcast {ints} {emit(f'or {ints} {bits}, {high}')} to {floats}")
    if form.only_nan:
        whole = emit(f"or {ints} {bits}, {high}")
        special = emit(f"icmp eq {ints} {wide}, {c(0x80)}")
        chosen = emit(f"select {flags} {special}, {ints} {c(0x7FC00000)}, {ints} {whole}")
        return emit(f"bitcast {ints} {chosen} to {floats}")
    special = emit(f"icmp uge {ints} {magnitude}, {c(form.special)}")
    infinite = emit(f"or {ints} {shifted}, {c(0x7F800000)}")
    chosen = emit(f"select {flags} {special}, {ints} {infinite}, {ints} {bits}")
    whole = emit(f"or {ints} {chosen}, {high}")
    return emit(f"bitcast {ints} {whole} to {floats}")


def narrow(emit: Emit, text: str, dtype: ScalarType, width: int) -> str:
    """Rounds f32 to codes, to nearest, ties to even.

    Args:
        emit: Emits an instruction.
        text: The lanes.
        dtype: The type to round to.
        width: The number of lanes; 0 for a scalar.
    """
    form = FORMATS[dtype.name]
    codes, ints, floats, flags = _types(width)
    drop = 23 - form.mantissa

    def c(value: int) -> str:
        return _integer(value, width)

    bits = emit(f"bitcast {floats} {text} to {ints}")
    magnitude = emit(f"and {ints} {bits}, {c(0x7FFFFFFF)}")
    # normal results: round to even at the last bit that stays, then correct the bias
    odd = emit(f"and {ints} {emit(f'lshr {ints} {magnitude}, {c(drop)}')}, {c(1)}")
    half = (1 << (drop - 1)) - 1 - ((127 - form.bias) << 23)
    rounded = emit(f"add {ints} {emit(f'add {ints} {magnitude}, {c(half)}')}, {odd}")
    normal = emit(f"lshr {ints} {rounded}, {c(drop)}")
    # subnormal results: the hardware rounds when a number is added whose last bit is the unit of subnormals
    unit = 2.0 ** (24 - form.bias - form.mantissa)
    positive = emit(f"bitcast {ints} {magnitude} to {floats}")
    total = emit(f"fadd {floats} {positive}, {_number(unit, width)}")
    subnormal = emit(f"sub {ints} {emit(f'bitcast {floats} {total} to {ints}')}, {c(_bits(unit))}")
    tiny = emit(f"icmp ult {ints} {magnitude}, {c((128 - form.bias) << 23)}")
    finite = emit(f"select {flags} {tiny}, {ints} {subnormal}, {ints} {normal}")
    down = 32 - form.sign.bit_length()
    sign = emit(f"and {ints} {emit(f'lshr {ints} {bits}, {c(down)}')}, {c(form.sign)}")
    big = emit(f"icmp uge {ints} {magnitude}, {c(form.limit)}")
    if form.only_nan:
        # no negative zero
        zero = emit(f"icmp eq {ints} {finite}, {c(0)}")
        kept = emit(f"select {flags} {zero}, {ints} {c(0)}, {ints} {sign}")
        signed = emit(f"or {ints} {finite}, {kept}")
        chosen = emit(f"select {flags} {big}, {ints} {c(form.overflow)}, {ints} {signed}")
        return emit(f"trunc {ints} {chosen} to {codes}")
    bounded = emit(f"select {flags} {big}, {ints} {c(form.overflow)}, {ints} {finite}")
    nan = emit(f"icmp ugt {ints} {magnitude}, {c(0x7F800000)}")
    if form.sign != 0x80:
        signed = emit(f"or {ints} {bounded}, {sign}")
        chosen = emit(f"select {flags} {nan}, {ints} {c(form.sign)}, {ints} {signed}")
        return emit(f"trunc {ints} {chosen} to {codes}")
    chosen = emit(f"select {flags} {nan}, {ints} {c(0x7F)}, {ints} {bounded}")
    whole = emit(f"or {ints} {chosen}, {sign}")
    return emit(f"trunc {ints} {whole} to {codes}")
