"""Lowering of memory accesses: arguments, views and slots."""

from __future__ import annotations

from max.kernel.ir.nodes import Alloc, Assign, Atom, Effect, Let, Ref, Store
from max.kernel.lowering.types import MEMORY, llvm_type, vector_name
from max.kernel.lowering.writer import Writer
from max.kernel.types import ScalarType, Type


def arg(w: Writer, s: Let) -> None:
    """A slot of the argument block."""
    type = s.ref.type
    slot = w.temp(f"getelementptr inbounds i64, ptr %args, i64 {s.attr}")
    # a negative width stands for a pointer
    if type.width < 0:
        w.alias(s, w.temp(f"load ptr, ptr {slot}, align 8"))
        return
    memory = MEMORY[type.dtype.name]
    loaded = w.temp(f"load {memory}, ptr {slot}, align 8")
    if type.dtype.kind == "b":
        loaded = w.temp(f"icmp ne i8 {loaded}, 0")
    w.alias(s, loaded)


def gep(w: Writer, s: Let) -> None:
    """The address of an element."""
    pointer, offset = s.args
    w.out(
        f"%v{s.ref.id} = getelementptr inbounds {MEMORY[s.attr.name]}, ptr {w.atom(pointer)}, i64 {w.atom(offset)}"
    )


def address(w: Writer, s: Let) -> None:
    """An address as an integer."""
    w.out(f"%v{s.ref.id} = ptrtoint ptr {w.atom(s.args[0])} to i64")


def from_memory(w: Writer, element: str, type: Type) -> str:
    """Converts a loaded element to a value: bools are bytes in memory."""
    if type.dtype.kind != "b":
        return element
    memory = vector_name("i8", type.width)
    return w.temp(
        f"icmp ne {memory} {element}, zeroinitializer" if type.width else f"icmp ne i8 {element}, 0"
    )


def to_memory(w: Writer, a: Atom) -> tuple[str, str]:
    """Converts a value to its type in memory."""
    text = w.atom(a)
    if a.type.dtype.kind != "b":
        return llvm_type(a.type), text
    memory = vector_name("i8", a.type.width)
    return memory, w.temp(f"zext {llvm_type(a.type)} {text} to {memory}")


def load(w: Writer, s: Let) -> None:
    """An element, or consecutive elements."""
    type = s.ref.type
    memory = vector_name(MEMORY[type.dtype.name], type.width)
    # a view may begin at any element, so only its alignment is known
    line = f"load {memory}, ptr {w.atom(s.args[0])}, align {type.dtype.size}"
    if type.dtype.kind == "b":
        w.alias(s, from_memory(w, w.temp(line), type))
    else:
        w.lines.append(f"  %v{s.ref.id} = {line}")


def masked_load(w: Writer, s: Let) -> None:
    """Loads consecutive elements in the lanes whose mask is set."""
    pointer, mask, other = s.args
    type = s.ref.type
    # the lanes that are not loaded keep the passthrough
    memory, passthrough = to_memory(w, other)
    name = f"llvm.masked.load.v{type.width}{_short(MEMORY[type.dtype.name])}.p0"
    w.declarations.add(f"{memory} @{name}(ptr, <{type.width} x i1>, {memory})")
    loaded = w.temp(
        f"call {memory} @{name}(ptr align {type.dtype.size} {w.atom(pointer)}, "
        f"<{type.width} x i1> {w.atom(mask)}, {memory} {passthrough})"
    )
    w.alias(s, from_memory(w, loaded, type))


def store_memory(w: Writer, pointer: Atom, value: Atom, mask: Atom | None) -> None:
    """Lowers a `Store`."""
    memory, text = to_memory(w, value)
    size, width = value.type.dtype.size, value.type.width
    if mask is None:
        w.out(f"store {memory} {text}, ptr {w.atom(pointer)}, align {size}")
        return
    name = f"llvm.masked.store.v{width}{_short(MEMORY[value.type.dtype.name])}.p0"
    w.declarations.add(f"void @{name}({memory}, ptr, <{width} x i1>)")
    w.out(
        f"call void @{name}({memory} {text}, ptr align {size} {w.atom(pointer)}, <{width} x i1> {w.atom(mask)})"
    )


def _lane_pointers(w: Writer, pointer: Atom, offsets: Atom, dtype: ScalarType) -> str:
    # not inbounds: the offsets of lanes that are masked out may be anything
    width = offsets.type.width
    return w.temp(
        f"getelementptr {MEMORY[dtype.name]}, ptr {w.atom(pointer)}, <{width} x i64> {w.atom(offsets)}"
    )


def gather(w: Writer, s: Let) -> None:
    """Loads one element per lane."""
    type = s.ref.type
    width = type.width
    pointers = _lane_pointers(w, s.args[0], s.args[1], type.dtype)
    memory = vector_name(MEMORY[type.dtype.name], width)
    if s.op == "masked_gather":
        mask = w.atom(s.args[2])
        passthrough = to_memory(w, s.args[3])[1]
    else:
        # all lanes are loaded: nothing passes through
        mask, passthrough = "splat (i1 true)", "poison"
    name = f"llvm.masked.gather.v{width}{_short(MEMORY[type.dtype.name])}.v{width}p0"
    w.declarations.add(f"{memory} @{name}(<{width} x ptr>, <{width} x i1>, {memory})")
    loaded = w.temp(
        f"call {memory} @{name}(<{width} x ptr> align {type.dtype.size} {pointers}, <{width} x i1> {mask}, "
        f"{memory} {passthrough})"
    )
    w.alias(s, from_memory(w, loaded, type))


def scatter(w: Writer, s: Effect) -> None:
    """Stores one element per lane."""
    pointer, offsets, value = s.args[:3]
    width, dtype = value.type.width, value.type.dtype
    mask = w.atom(s.args[3]) if len(s.args) == 4 else "splat (i1 true)"
    pointers = _lane_pointers(w, pointer, offsets, dtype)
    memory, text = to_memory(w, value)
    name = f"llvm.masked.scatter.v{width}{_short(MEMORY[dtype.name])}.v{width}p0"
    w.declarations.add(f"void @{name}({memory}, <{width} x ptr>, <{width} x i1>)")
    w.out(
        f"call void @{name}({memory} {text}, <{width} x ptr> align {dtype.size} {pointers}, <{width} x i1> {mask})"
    )


def atomic_add(w: Writer, s: Let) -> None:
    """Adds atomically to shared memory."""
    pointer, value = s.args
    dtype = value.type.dtype
    # monotonic: only the sum counts, barriers order what is read afterwards
    op = "fadd" if dtype.is_float else "add"
    w.out(
        f"%v{s.ref.id} = atomicrmw {op} ptr {w.atom(pointer)}, {llvm_type(value.type)} {w.atom(value)} "
        f"monotonic, align {dtype.size}"
    )


def opaque(w: Writer, s: Let) -> None:
    """An integer that LLVM does not see through; loads do not move across it."""
    w.out(f'%v{s.ref.id} = call i64 asm sideeffect "", "=r,0,~{{memory}}"(i64 {w.atom(s.args[0])})')


def _slot_pointer(w: Writer, slot: int, index: Atom, type: str) -> str:
    """The pointer to an element of a slot."""
    base = w.slots[slot]
    if not isinstance(index, Ref):
        if index.value == 0:
            return base
        return w.temp(f"getelementptr inbounds {type}, ptr {base}, i64 {index.value}")
    return w.temp(f"getelementptr inbounds {type}, ptr {base}, i64 {w.atom(index)}")


def read_slot(w: Writer, s: Let) -> None:
    """The value of a slot."""
    type = llvm_type(s.ref.type)
    pointer = _slot_pointer(w, s.attr, s.args[0], type)
    w.out(f"%v{s.ref.id} = load {type}, ptr {pointer}, align {_align_of(s.ref)}")


def lower_assign(w: Writer, s: Assign) -> None:
    """Writes a slot."""
    type = llvm_type(s.value.type)
    pointer = _slot_pointer(w, s.slot, s.index, type)
    w.out(f"store {type} {w.atom(s.value)}, ptr {pointer}, align {_align_of(s.value)}")


def lower_store(w: Writer, s: Store) -> None:
    """Writes a scalar or a vector to memory."""
    store_memory(w, s.pointer, s.value, s.mask)


def _short(element: str) -> str:
    return {"float": "f32", "double": "f64"}.get(element, element)


def alloc_alignment(s: Alloc) -> int:
    """The alignment of a slot in bytes."""
    return _natural(s.type.dtype.size * max(s.type.width, 1)) if s.type.dtype.kind != "b" else 8


def _align_of(a: Atom) -> int:
    if a.type.dtype.kind == "b":
        return 1
    return _natural(a.type.dtype.size * max(a.type.width, 1))


def _natural(size: int) -> int:
    # the largest power of two that divides the size
    return min(64, size & -size)
