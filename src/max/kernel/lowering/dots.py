"""Lowers dot products of adjacent elements, ``k.dot_bf16`` and ``k.dot_i8``, to dot instructions of the processor."""

from __future__ import annotations

import functools
from collections.abc import Callable

from max.kernel.ir.nodes import Atom, Let, Ref
from max.kernel.lowering.lanes import join_lanes, pieces
from max.kernel.lowering.writer import Writer

# number of lanes -> the intrinsics that multiply and add pairs: of unsigned and signed bytes, and of words
_MULTIPLY_ADD = {
    4: ("llvm.x86.ssse3.pmadd.ub.sw.128", "llvm.x86.sse2.pmadd.wd"),
    8: ("llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"),
    16: ("llvm.x86.avx512.pmaddubs.w.512", "llvm.x86.avx512.pmaddw.d.512"),
}
_SIGN = {4: "llvm.x86.ssse3.psign.b.128", 8: "llvm.x86.avx2.psign.b"}


def _factors(w: Writer, a: Atom, element: str, width: int, piece: int) -> list[str]:
    """Splits an operand, which has two or four elements per 32-bit lane of the sums, into pieces.

    On arm64 an instruction can broadcast a word from one lane of a register. LLVM prefers a broadcast load, which costs
    more than a plain load, so the load is disguised as a 64-bit load with a float in its low half.
    """
    count = a.type.width // width
    word = w.words.get(a.id) if isinstance(a, Ref) else None
    if word is None:
        return pieces(w, w.atom(a), element, count * width, count * piece)
    bits = w.temp(f"bitcast i32 {word} to float")
    low = w.temp(f"insertelement <2 x float> poison, float {bits}, i64 0")
    # instruction selection matches bf16 lanes only
    part, lanes = ("bfloat", 2) if element == "i16" else ("i32", 1)
    half = w.temp(f"bitcast <2 x float> {low} to <{2 * lanes} x {part}>")
    indices = ", ".join(f"i32 {i}" for i in range(lanes))
    mask = f"<{4 * lanes} x i32> <{', '.join([indices] * 4)}>"
    repeated = w.temp(
        f"shufflevector <{2 * lanes} x {part}> {half}, <{2 * lanes} x {part}> poison, {mask}"
    )
    text = w.temp(f"bitcast <{4 * lanes} x {part}> {repeated} to <{4 * count} x {element}>")
    return [text] * (width // piece)


def _by_pieces(
    w: Writer,
    s: Let,
    sums: str,
    element: str,
    piece: int,
    multiply: Callable[[str, str, str], str],
) -> None:
    """Multiplies in pieces of the instruction's width."""
    acc, a, b = s.args
    if isinstance(a, Ref) and a.id in w.words and a.type is b.type:
        a, b = b, a  # only the last operand may be a lane of a register
    width = acc.type.width
    results = [
        multiply(x, y, z)
        for x, y, z in zip(
            pieces(w, w.atom(acc), sums, width, piece),
            _factors(w, a, element, width, piece),
            _factors(w, b, element, width, piece),
            strict=True,
        )
    ]
    w.alias(s, join_lanes(w, results, sums, piece))


def _call_i8(w: Writer, name: str, lanes: int, acc: str, a: str, b: str) -> str:
    sums, octets = f"<{lanes} x i32>", f"<{4 * lanes} x i8>"
    return w.call(sums, name, [(sums, acc), (octets, a), (octets, b)])


def dot_bf16(w: Writer, s: Let) -> None:
    """``vdpbf16ps``, ``bfdot``."""
    piece = w.target.dot_bf16_lanes(s.ref.type.width)
    name = "llvm.aarch64.neon.bfdot.v4f32.v8bf16"
    if w.target.is_x86:
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * piece}"  # bits of a register
    floats, pairs = f"<{piece} x float>", f"<{2 * piece} x bfloat>"

    def multiply(acc: str, a: str, b: str) -> str:
        x, y = (w.temp(f"bitcast <{2 * piece} x i16> {v} to {pairs}") for v in (a, b))
        return w.call(floats, name, [(floats, acc), (pairs, x), (pairs, y)])

    _by_pieces(w, s, "float", "i16", piece, multiply)


def dot_i8(w: Writer, s: Let) -> None:
    """Unsigned by signed: ``vpdpbusd``, ``usdot``."""
    piece = w.target.dot_i8_lanes(s.ref.type.width)
    name = "llvm.aarch64.neon.usdot.v4i32.v16i8"
    if w.target.is_x86:
        name = f"llvm.x86.avx512.vpdpbusd.{32 * piece}"
    _by_pieces(w, s, "i32", "i8", piece, functools.partial(_call_i8, w, name, piece))


def _add_narrow(w: Writer, piece: int, acc: str, a: str, b: str) -> str:
    """Adds sums of four products of unsigned and signed bytes: ``vpmaddubsw`` and ``vpmaddwd``."""
    bytes_name, words_name = _MULTIPLY_ADD[piece]
    sums, shorts, octets = f"<{piece} x i32>", f"<{2 * piece} x i16>", f"<{4 * piece} x i8>"
    # vpmaddubsw saturates at 16 bits, hence the condition on sums; factors of 1 add neighbors
    ones = f"<{', '.join(['i16 1'] * (2 * piece))}>"
    pairs = w.call(shorts, bytes_name, [(octets, a), (octets, b)])
    fours = w.call(sums, words_name, [(shorts, pairs), (shorts, ones)])
    return w.temp(f"add {sums} {acc}, {fours}")


def narrow_dot_i8(w: Writer, s: Let) -> None:
    """Unsigned by signed, if the sum of two products fits in 16 bits: ``vpmaddubsw`` and ``vpmaddwd``."""
    piece = w.target.narrow_dot_i8_lanes(s.ref.type.width)
    _by_pieces(w, s, "i32", "i8", piece, functools.partial(_add_narrow, w, piece))


def narrow_signed_dot_i8(w: Writer, s: Let) -> None:
    """Signed by signed, if the sum of two products fits in 16 bits: on x86 unsigned magnitudes, with the signs moved to
    the other operand by ``vpsignb``.
    """
    if not w.target.is_x86:
        signed_dot_i8(w, s)
        return
    piece = w.target.narrow_signed_dot_i8_lanes(s.ref.type.width)
    octets = f"<{4 * piece} x i8>"

    def multiply(acc: str, a: str, b: str) -> str:
        # abs(-128) wraps to -128, whose bits are 128 as an unsigned byte
        size = w.call(octets, f"llvm.abs.v{4 * piece}i8", [(octets, a), ("i1", "false")])
        signed = w.call(octets, _SIGN[piece], [(octets, b), (octets, a)])
        return _add_narrow(w, piece, acc, size, signed)

    _by_pieces(w, s, "i32", "i8", piece, multiply)


def pair_dot_i8(w: Writer, s: Let) -> None:
    """Unsigned by signed, with sums of two products in 16 bits: ``vpmaddubsw``."""
    lanes = s.ref.type.width // 2
    piece = w.target.narrow_dot_i8_lanes(lanes)
    shorts, octets = f"<{2 * piece} x i16>", f"<{4 * piece} x i8>"

    def multiply(acc: str, a: str, b: str) -> str:
        pairs = w.call(shorts, _MULTIPLY_ADD[piece][0], [(octets, a), (octets, b)])
        return w.temp(f"add {shorts} {acc}, {pairs}")

    _by_pieces(w, s, "i16", "i8", 2 * piece, multiply)


def dot_i16(w: Writer, s: Let) -> None:
    """Products of 16-bit elements, with sums of two in 32 bits: ``vpmaddwd``."""
    piece = w.target.narrow_dot_i8_lanes(s.ref.type.width)
    sums, shorts = f"<{piece} x i32>", f"<{2 * piece} x i16>"

    def multiply(acc: str, a: str, b: str) -> str:
        pairs = w.call(sums, _MULTIPLY_ADD[piece][1], [(shorts, a), (shorts, b)])
        return w.temp(f"add {sums} {acc}, {pairs}")

    _by_pieces(w, s, "i32", "i16", piece, multiply)


def signed_dot_i8(w: Writer, s: Let) -> None:
    """Signed by signed: ``sdot``, or products in 16 bits, available on every arm64 processor."""
    piece = 4
    if w.target.has("dotprod"):
        name = "llvm.aarch64.neon.sdot.v4i32.v16i8"
        multiply = functools.partial(_call_i8, w, name, piece)
    else:
        narrow = s.op == "narrow_signed_dot_i8"
        multiply = functools.partial(_signed_products, w, narrow)
    _by_pieces(w, s, "i32", "i8", piece, multiply)


def _signed_products(w: Writer, narrow: bool, acc: str, a: str, b: str) -> str:
    """16-bit products; sums of two in 16 bits if they fit, else in 32 bits; then sums of four."""
    sums, shorts, octets = "<4 x i32>", "<8 x i16>", "<8 x i8>"
    low, high = (
        w.call(shorts, "llvm.aarch64.neon.smull.v8i16", [(octets, x), (octets, y)])
        for x, y in zip(*(pieces(w, v, "i8", 16, 8) for v in (a, b)), strict=True)
    )
    pairwise = "llvm.aarch64.neon.saddlp.v4i32.v8i16"
    if narrow:
        twos = w.call(shorts, "llvm.aarch64.neon.addp.v8i16", [(shorts, low), (shorts, high)])
        fours = w.call(sums, pairwise, [(shorts, twos)])
    else:
        low, high = (w.call(sums, pairwise, [(shorts, x)]) for x in (low, high))
        fours = w.call(sums, "llvm.aarch64.neon.addp.v4i32", [(sums, low), (sums, high)])
    return w.temp(f"add {sums} {acc}, {fours}")
