"""Lowers matrix tiles to LLVM IR: AMX instructions, or on other targets emulation with the same results.

In emulation the eight tiles are 8 KB on the worker's stack, with rows 64 bytes apart, and every operation calls a
function of the module. Emulation makes the kernels portable; it is not meant to be fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max.kernel.ir.nodes import Assign, Effect, For, If, Let, Parallel, Stmt, Store, While
from max.kernel.ir.nodes import Block as IRBlock
from max.kernel.language.tile_values import MAX_BYTES, MAX_ROWS, MAX_TILES, Shapes
from max.kernel.lowering.writer import Writer

_TILE_BYTES = MAX_ROWS * MAX_BYTES
#: The LLVM name of the emulated tiles' memory.
STATE = "%tiles"

_COPY = """define internal void @tile_copy(ptr %to, i64 %to.step, ptr %from, i64 %from.step, i64 %rows, i64 %bytes) #0 {
entry:
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %next, %row ]
  %to.offset = mul nsw i64 %r, %to.step
  %from.offset = mul nsw i64 %r, %from.step
  %p = getelementptr i8, ptr %to, i64 %to.offset
  %q = getelementptr i8, ptr %from, i64 %from.offset
  call void @llvm.memcpy.p0.p0.i64(ptr %p, ptr %q, i64 %bytes, i1 false)
  %next = add nsw i64 %r, 1
  %again = icmp slt i64 %next, %rows
  br i1 %again, label %row, label %done
done:
  ret void
}"""

# as in the instruction, the first and second elements of pairs have separate sums
_DOT_BF16 = """define internal void @tile_tdpbf16ps(ptr %c, ptr %a, ptr %b, i64 %rows, i64 %steps) #0 {
entry:
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %next.row, %done.row ]
  %offset = shl i64 %r, 6
  %left = getelementptr i8, ptr %a, i64 %offset
  %sums = getelementptr i8, ptr %c, i64 %offset
  br label %step
step:
  %k = phi i64 [ 0, %row ], [ %next, %step ]
  %first = phi <16 x float> [ zeroinitializer, %row ], [ %first.sum, %step ]
  %second = phi <16 x float> [ zeroinitializer, %row ], [ %second.sum, %step ]
  %pair.at = getelementptr i32, ptr %left, i64 %k
  %pair = load i32, ptr %pair.at, align 4
  %one = insertelement <16 x i32> poison, i32 %pair, i64 0
  %x = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %step.offset = shl i64 %k, 6
  %right = getelementptr i8, ptr %b, i64 %step.offset
  %y = load <16 x i32>, ptr %right, align 64
  %x.low = shl <16 x i32> %x, splat (i32 16)
  %y.low = shl <16 x i32> %y, splat (i32 16)
  %x.high = and <16 x i32> %x, splat (i32 -65536)
  %y.high = and <16 x i32> %y, splat (i32 -65536)
  %x0 = bitcast <16 x i32> %x.low to <16 x float>
  %y0 = bitcast <16 x i32> %y.low to <16 x float>
  %x1 = bitcast <16 x i32> %x.high to <16 x float>
  %y1 = bitcast <16 x i32> %y.high to <16 x float>
  %first.sum = call <16 x float> @llvm.FMA.v16f32(<16 x float> %x0, <16 x float> %y0, <16 x float> %first)
  %second.sum = call <16 x float> @llvm.FMA.v16f32(<16 x float> %x1, <16 x float> %y1, <16 x float> %second)
  %next = add nsw i64 %k, 1
  %again = icmp slt i64 %next, %steps
  br i1 %again, label %step, label %done.row
done.row:
  %both = fadd <16 x float> %first.sum, %second.sum
  %before = load <16 x float>, ptr %sums, align 64
  %after = fadd <16 x float> %before, %both
  store <16 x float> %after, ptr %sums, align 64
  %next.row = add nsw i64 %r, 1
  %more = icmp slt i64 %next.row, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}"""


def _dot_bytes(name: str) -> str:
    """The function of a byte product; the letters of the instruction's name are the signedness of the operands."""

    def byte(word: str, result: str, j: int, signed: bool) -> list[str]:
        if signed:
            # to the top, and back with copies of the sign
            up = f"  {result}.up = shl <16 x i32> {word}, splat (i32 {24 - 8 * j})"
            return [up, f"  {result} = ashr <16 x i32> {result}.up, splat (i32 24)"]
        down = f"  {result}.down = lshr <16 x i32> {word}, splat (i32 {8 * j})"
        return [down, f"  {result} = and <16 x i32> {result}.down, splat (i32 255)"]

    body: list[str] = []
    total = "%sum"
    for j in range(4):
        body += byte("%x", f"%x{j}", j, name[4] == "s")
        body += byte("%y", f"%y{j}", j, name[5] == "s")
        body.append(f"  %p{j} = mul <16 x i32> %x{j}, %y{j}")
        body.append(f"  %s{j} = add <16 x i32> {total}, %p{j}")
        total = f"%s{j}"
    lines = "\n".join(body)
    return f"""define internal void @tile_{name}(ptr %c, ptr %a, ptr %b, i64 %rows, i64 %steps) #0 {{
entry:
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %next.row, %done.row ]
  %offset = shl i64 %r, 6
  %left = getelementptr i8, ptr %a, i64 %offset
  %sums = getelementptr i8, ptr %c, i64 %offset
  %before = load <16 x i32>, ptr %sums, align 64
  br label %step
step:
  %k = phi i64 [ 0, %row ], [ %next, %step ]
  %sum = phi <16 x i32> [ %before, %row ], [ %s3, %step ]
  %quad.at = getelementptr i32, ptr %left, i64 %k
  %quad = load i32, ptr %quad.at, align 4
  %one = insertelement <16 x i32> poison, i32 %quad, i64 0
  %x = shufflevector <16 x i32> %one, <16 x i32> poison, <16 x i32> zeroinitializer
  %step.offset = shl i64 %k, 6
  %right = getelementptr i8, ptr %b, i64 %step.offset
  %y = load <16 x i32>, ptr %right, align 64
{lines}
  %next = add nsw i64 %k, 1
  %again = icmp slt i64 %next, %steps
  br i1 %again, label %step, label %done.row
done.row:
  store <16 x i32> %s3, ptr %sums, align 64
  %next.row = add nsw i64 %r, 1
  %more = icmp slt i64 %next.row, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}}"""


def uses_tiles(body: Iterable[Stmt]) -> bool:
    """Whether a kernel configures matrix tiles."""
    for s in body:
        kind = s.__class__
        if kind is Let or kind is Store or kind is Assign:  # most statements
            continue
        if isinstance(s, Effect):
            if s.op == "tile_configure":
                return True
        elif isinstance(s, If):
            if uses_tiles(s.then) or uses_tiles(s.orelse):
                return True
        elif isinstance(s, While):
            if uses_tiles(s.head) or uses_tiles(s.body):
                return True
        elif isinstance(s, (For, Parallel, IRBlock)) and uses_tiles(s.body):
            return True
    return False


def tile_entry(w: Writer) -> list[str]:
    """The allocation of emulated tiles at the start of the kernel."""
    if not (w.uses_tiles and _emulated_tile(w)):
        return []
    lines = [f"  {STATE} = alloca [{MAX_TILES * _TILE_BYTES} x i8], align 64"]
    for tile in range(MAX_TILES):
        offset = tile * _TILE_BYTES
        lines.append(f"  {_tile(tile)} = getelementptr inbounds i8, ptr {STATE}, i64 {offset}")
    return lines


def leave_tiles(w: Writer) -> None:
    """Releases the tiles when a kernel ends early."""
    if w.uses_tiles and not _emulated_tile(w):
        _call(w, "tilerelease")


def _emulated_tile(w: Writer) -> bool:
    return not w.target.tile_instructions


def _call(w: Writer, name: str, *args: tuple[str, Any]) -> None:
    """Calls an intrinsic of AMX."""
    types = ", ".join(type for type, _ in args)
    w.declarations.add(f"void @llvm.x86.{name}({types})")
    arguments = ", ".join(f"{type} {value}" for type, value in args)
    w.out(f"call void @llvm.x86.{name}({arguments})")


def _tile(tile: int) -> str:
    """The address of an emulated tile."""
    return f"{STATE}.{tile}"


def _configure(w: Writer, s: Effect) -> None:
    """Loads a tile configuration; emulated tiles are zeroed."""
    shapes: Shapes = s.attr
    # ldtilecfg zeroes the tiles
    if _emulated_tile(w):
        _set_zero(w, STATE, MAX_TILES * _TILE_BYTES)
        return
    # the operand of ldtilecfg: bytes of a row from offset 16, 2 each; numbers of rows from 48
    data = bytearray(64)
    data[0] = 1  # the palette
    for tile, (rows, size) in enumerate(shapes):
        data[16 + 2 * tile : 18 + 2 * tile] = size.to_bytes(2, "little")
        data[48 + tile] = rows
    name = f"@tiles{len(w.tile_globals)}"
    content = "".join(f"\\{byte:02X}" for byte in data)
    w.tile_globals.append(
        f'{name} = private unnamed_addr constant [64 x i8] c"{content}", align 64'
    )
    _call(w, "ldtilecfg", ("ptr", name))


def _set_zero(w: Writer, pointer: str, size: int) -> None:
    w.declarations.add("void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
    w.out(f"call void @llvm.memset.p0.i64(ptr align 64 {pointer}, i8 0, i64 {size}, i1 false)")


def _release(w: Writer, s: Effect) -> None:
    if not _emulated_tile(w):
        _call(w, "tilerelease")


def _zero(w: Writer, s: Effect) -> None:
    tile: int = s.attr[0]
    if _emulated_tile(w):
        _set_zero(w, _tile(tile), _TILE_BYTES)
    else:
        _call(w, "tilezero", ("i8", tile))


def _move(w: Writer, s: Effect) -> None:
    """Loads or stores a tile; `step` is the distance of rows in bytes."""
    tile, rows, size = s.attr
    pointer, step = (w.atom(a) for a in s.args)
    if not _emulated_tile(w):
        name = "tileloadd64" if s.op == "tile_load" else "tilestored64"
        _call(w, name, ("i8", tile), ("ptr", pointer), ("i64", step))
        return
    w.tile_functions["copy"] = _COPY
    w.declarations.add("void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)")
    inside = f"ptr {_tile(tile)}, i64 {MAX_BYTES}"
    outside = f"ptr {pointer}, i64 {step}"
    to, from_ = (inside, outside) if s.op == "tile_load" else (outside, inside)
    w.out(f"call void @tile_copy({to}, {from_}, i64 {rows}, i64 {size})")


def _dot(w: Writer, s: Effect) -> None:
    """A product of two tiles, added to a third."""
    name, c, a, b, rows, steps = s.attr
    if not _emulated_tile(w):
        _call(w, name, ("i8", c), ("i8", a), ("i8", b))
        return
    if name == "tdpbf16ps":
        fma = "fma" if w.target.has_fma else "fmuladd"
        w.tile_functions[name] = _DOT_BF16.replace("FMA", fma)
        vector = "<16 x float>"
        w.declarations.add(f"{vector} @llvm.{fma}.v16f32({vector}, {vector}, {vector})")
    else:
        w.tile_functions[name] = _dot_bytes(name)
    tiles = ", ".join(f"ptr {_tile(t)}" for t in (c, a, b))
    w.out(f"call void @tile_{name}({tiles}, i64 {rows}, i64 {steps})")


TILE_EFFECTS: dict[str, Callable[[Writer, Effect], None]] = {
    "tile_configure": _configure,
    "tile_release": _release,
    "tile_zero": _zero,
    "tile_load": _move,
    "tile_store": _move,
    "tile_dot": _dot,
}
