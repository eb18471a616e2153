"""Lowering of ops on lanes: broadcast, extract, insert, shuffle, select."""

from __future__ import annotations

from max.kernel.ir.nodes import Let, Ref
from max.kernel.lowering.types import lane_list, llvm_type, vector_name
from max.kernel.lowering.writer import Writer


def splat(w: Writer, s: Let) -> None:
    """Broadcasts a scalar to all lanes."""
    a = s.args[0]
    # dot products on arm64 may take the scalar from a lane, see `dots`
    if w.target.is_arm64 and isinstance(a, Ref) and llvm_type(a.type) == "i32":
        w.words[s.ref.id] = w.atom(a)
    w.alias(s, splat_text(w, llvm_type(a.type), w.atom(a), s.ref.type.width))


def extract(w: Writer, s: Let) -> None:
    """One lane."""
    v, lane = s.args
    w.out(f"%v{s.ref.id} = extractelement {llvm_type(v.type)} {w.atom(v)}, i64 {w.atom(lane)}")


def insert(w: Writer, s: Let) -> None:
    """Replaces one lane of a vector."""
    v, x, lane = s.args
    w.out(
        f"%v{s.ref.id} = insertelement {llvm_type(v.type)} {w.atom(v)}, "
        f"{llvm_type(x.type)} {w.atom(x)}, i64 {w.atom(lane)}"
    )


def shuffle(w: Writer, s: Let) -> None:
    """Lanes of two vectors in a constant order."""
    a, b = s.args
    t = llvm_type(a.type)
    lanes = ", ".join(f"i32 {i}" for i in s.attr)
    w.out(
        f"%v{s.ref.id} = shufflevector {t} {w.atom(a)}, {t} {w.atom(b)}, <{len(s.attr)} x i32> <{lanes}>"
    )


def select(w: Writer, s: Let) -> None:
    """Selects lanes of two values by a mask."""
    mask, a, b = s.args
    t = llvm_type(a.type)
    w.out(
        f"%v{s.ref.id} = select {llvm_type(mask.type)} {w.atom(mask)}, {t} {w.atom(a)}, {t} {w.atom(b)}"
    )


# bytes -> the instruction that looks them up in the 16 bytes of each 128 bits
_SHUFFLES = {
    16: "llvm.x86.ssse3.pshuf.b.128",
    32: "llvm.x86.avx2.pshuf.b",
    64: "llvm.x86.avx512.pshuf.b.512",
}


def lookup(w: Writer, s: Let) -> None:
    """Bytes of a table of 16: ``vpermb``, ``vpshufb``, ``tbl``."""
    table, index = s.args
    width, piece = s.ref.type.width, w.target.lookup_lanes(s.ref.type.width)
    octets = f"<{piece} x i8>"
    lanes = ", ".join(f"i32 {i % 16}" for i in range(piece))
    repeated = w.temp(
        f"shufflevector <16 x i8> {w.atom(table)}, <16 x i8> poison, <{piece} x i32> <{lanes}>"
    )
    fifteen = f"<{', '.join(['i8 15'] * piece)}>"
    results: list[str] = []
    for part in pieces(w, w.atom(index), "i8", width, piece):
        # vpermb takes six bits of an index, and the table is repeated four times
        if piece == 64 and w.target.has("avx512vbmi"):
            name, operands = "llvm.x86.avx512.permvar.qi.512", (repeated, part)
        else:
            low = w.temp(f"and {octets} {part}, {fifteen}")
            arm = w.target.is_arm64
            name = "llvm.aarch64.neon.tbl1.v16i8" if arm else _SHUFFLES[piece]
            operands = (repeated, low)
        results.append(w.call(octets, name, [(octets, x) for x in operands]))
    w.alias(s, join_lanes(w, results, "i8", piece))


def permute(w: Writer, s: Let) -> None:
    """Lanes of two vectors at indices: ``vpermi2ps``."""
    a, b, index = s.args
    width = s.ref.type.width
    floats, words = vector_name("float", width), vector_name("i32", width)
    name = f"llvm.x86.avx512.vpermi2var.ps.{32 * width}"
    operands = [(floats, w.atom(a)), (words, w.atom(index)), (floats, w.atom(b))]
    w.alias(s, w.call(floats, name, operands))


def splat_text(w: Writer, element: str, text: str, width: int) -> str:
    """Broadcasts a scalar to all lanes."""
    first = w.temp(f"insertelement <{width} x {element}> poison, {element} {text}, i64 0")
    return w.temp(
        f"shufflevector <{width} x {element}> {first}, <{width} x {element}> poison, <{width} x i32> zeroinitializer"
    )


def pieces(w: Writer, text: str, element: str, width: int, piece: int) -> list[str]:
    """Splits a vector into vectors of ``piece`` lanes."""
    if width == piece:
        return [text]
    full_type = vector_name(element, width)
    parts: list[str] = []
    for first in range(0, width, piece):
        lanes = ", ".join(f"i32 {first + i}" for i in range(piece))
        parts.append(
            w.temp(
                f"shufflevector {full_type} {text}, {full_type} poison, <{piece} x i32> <{lanes}>"
            )
        )
    return parts


def join_lanes(w: Writer, parts: list[str], element: str, piece: int) -> str:
    """Concatenates vectors."""
    result, width = parts[0], piece
    for part in parts[1:]:
        if width != piece:  # both operands of a shuffle must have equal width
            part_type = vector_name(element, piece)
            lanes = ", ".join(f"i32 {i}" if i < piece else "i32 poison" for i in range(width))
            part = w.temp(
                f"shufflevector {part_type} {part}, {part_type} poison, <{width} x i32> <{lanes}>"
            )
        t, total = vector_name(element, width), width + piece
        lanes = lane_list(0, width) + ", " + lane_list(width, piece)
        result = w.temp(f"shufflevector {t} {result}, {t} {part}, <{total} x i32> <{lanes}>")
        width = total
    return result
