"""Lowers single ops to LLVM instructions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from max._abi import Context
from max.kernel.ir.nodes import Atom, Const, Effect, Let, Ref
from max.kernel.lowering import float8
from max.kernel.lowering.contraction import Contraction
from max.kernel.lowering.dots import DotLowering
from max.kernel.lowering.tiles import TileLowering
from max.kernel.lowering.types import MEMORY, const_text, llvm_type, number_text, vector_name
from max.kernel.targets.target import LLVMTarget
from max.kernel.types import ScalarType, Type, bf16, bool_, f16, f32, f64

_INT = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "shl": "shl",
}
_FLOAT = {"add": "fadd", "sub": "fsub", "mul": "fmul", "div": "fdiv"}
_COMPARE_FLOAT = {"eq": "oeq", "ne": "une", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge"}
_COMPARE_SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
_COMPARE_UNSIGNED = {"eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge"}
_INTRINSIC = {
    "sqrt": "sqrt",
    "floor": "floor",
    "ceil": "ceil",
    "trunc": "trunc",
    "round": "roundeven",
    "popcount": "ctpop",
}


class OpLowering:
    """Lowers `Let` and `Effect`; the subclass has control flow and slots."""

    def __init__(self, target: LLVMTarget) -> None:
        self.target = target
        self.lines: list[str] = []
        self.globals: list[str] = []
        self.declarations: set[str] = set()
        self.temps = 0
        self.aliases: dict[int, str] = {}  # names of values that are not called %v<id>
        self.contraction = Contraction({}, {})
        self.dots = DotLowering(self)
        self.tiles = TileLowering(target, self.out, self.declarations, self.atom)
        self._ops: dict[str, Callable[[Let], None]] = {
            "read": self.read_slot,
            "load": self._load,
            "masked_load": self._masked_load,
            "gather": self._gather,
            "masked_gather": self._gather,
            "gep": self._gep,
            "arg": self._arg,
            "ctx": lambda s: self.alias(s, self.context(Context(s.attr), llvm_type(s.ref.type))),
            "address": self._address,
            "splat": self._splat,
            "extract": self._extract,
            "insert": self._insert,
            "shuffle": self._shuffle,
            "select": self._select,
            "cast": self._cast,
            "bitcast": self._bitcast,
            "neg": self._neg,
            "not": self._not,
            "abs": self._abs,
            "fma": self._fma,
            "min": self._extremum,
            "max": self._extremum,
            "floordiv": self._floordiv,
            "mod": self._floordiv,
            "shr": self._shift,
            "shl": self._shift,
            "copysign": self._copysign,
            "scale": self._scale,
            "reduce_add": self._reduce,
            "reduce_mul": self._reduce,
            "reduce_max": self._reduce_extremum,
            "reduce_min": self._reduce_extremum,
            "any": lambda s: self._mask_reduce(s, "or"),
            "all": lambda s: self._mask_reduce(s, "and"),
            "ctlz": lambda s: self._count_zeros(s, "ctlz"),
            "cttz": lambda s: self._count_zeros(s, "cttz"),
            "dot_bf16": self.dots.bf16,
            "dot_i8": self.dots.i8,
            "narrow_dot_i8": self.dots.narrow_i8,
            "signed_dot_i8": self.dots.signed_i8,
            "narrow_signed_dot_i8": self.dots.signed_i8,
            "atomic_add": self._atomic_add,
            "libm": self._libm,
            "ult": lambda s: self._compare_unsigned(s, "ult"),
            "uge": lambda s: self._compare_unsigned(s, "uge"),
            "udiv": lambda s: self._plain(s, "udiv"),
            "umod": lambda s: self._plain(s, "urem"),
        }

    # ***** hooks *****
    def context(self, field: Context, type: str) -> str:
        raise NotImplementedError

    def read_slot(self, s: Let) -> None:
        raise NotImplementedError

    # ***** text *****
    def out(self, line: str) -> None:
        """Emits an instruction."""
        self.lines.append("  " + line)

    def temp(self, instruction: str) -> str:
        """Emits an instruction and names its value."""
        self.temps += 1
        name = f"%t{self.temps}"
        self.lines.append(f"  {name} = {instruction}")
        return name

    def atom(self, a: Atom) -> str:
        """A value without its type."""
        if isinstance(a, Ref):
            return self.aliases.get(a.id) or f"%v{a.id}"
        return const_text(a)

    def alias(self, s: Let, name: str) -> None:
        """Gives a value the name of another one."""
        self.aliases[s.ref.id] = name

    def call(self, type: str, intrinsic: str, args: list[tuple[str, str]], flags: str = "") -> str:
        """Calls an intrinsic or a C function and names the result."""
        self.declarations.add(f"{type} @{intrinsic}({', '.join(t for t, _ in args)})")
        given = ", ".join(f"{t} {a}" for t, a in args)
        return self.temp(f"call {flags}{type} @{intrinsic}({given})")

    # ***** dispatch *****
    def let(self, s: Let) -> None:
        """Lowers one binding."""
        op = s.op
        special = self._ops.get(op)
        if special is not None:
            special(s)
            return
        type = s.args[0].type
        dtype = type.dtype
        if op in _COMPARE_FLOAT:
            if dtype.is_float:
                self._plain(s, f"fcmp {_COMPARE_FLOAT[op]}")
            else:
                table = _COMPARE_SIGNED if dtype.kind == "i" else _COMPARE_UNSIGNED
                self._plain(s, f"icmp {table[op]}")
        elif dtype.is_float and op in _FLOAT:
            if op == "mul" and s.ref.id in self.contraction.products:
                return
            position = self.contraction.sums.get(s.ref.id)
            if position is None:
                self._plain(s, _FLOAT[op])
            else:
                self._contracted(s, position)
        elif op in _INT:
            self._plain(s, f"{_INT[op]} {s.attr}" if s.attr else _INT[op])
        elif op in _INTRINSIC:
            t = llvm_type(type)
            self.alias(
                s,
                self.call(t, f"llvm.{_INTRINSIC[op]}.{mangled(type)}", [(t, self.atom(s.args[0]))]),
            )
        else:
            raise ValueError(f"the kernel IR has no op {op!r}")

    def _plain(self, s: Let, instruction: str) -> None:
        a, b = s.args
        self.lines.append(
            f"  %v{s.ref.id} = {instruction} {llvm_type(a.type)} {self.atom(a)}, {self.atom(b)}"
        )

    def _compare_unsigned(self, s: Let, predicate: str) -> None:
        self._plain(s, f"icmp {predicate}")

    # ***** memory *****
    def _arg(self, s: Let) -> None:
        type = s.ref.type
        slot = self.temp(f"getelementptr inbounds i64, ptr %args, i64 {s.attr}")
        if type.width < 0:
            self.alias(s, self.temp(f"load ptr, ptr {slot}, align 8"))
            return
        memory = MEMORY[type.dtype.name]
        loaded = self.temp(f"load {memory}, ptr {slot}, align 8")
        if type.dtype.kind == "b":
            loaded = self.temp(f"icmp ne i8 {loaded}, 0")
        self.alias(s, loaded)

    def _gep(self, s: Let) -> None:
        pointer, offset = s.args
        self.out(
            f"%v{s.ref.id} = getelementptr inbounds {MEMORY[s.attr.name]}, ptr {self.atom(pointer)}, i64 {self.atom(offset)}"
        )

    def _address(self, s: Let) -> None:
        self.out(f"%v{s.ref.id} = ptrtoint ptr {self.atom(s.args[0])} to i64")

    def from_memory(self, loaded: str, type: Type) -> str:
        """A loaded element as a value: bools are bytes in memory."""
        if type.dtype.kind != "b":
            return loaded
        memory = vector_name("i8", type.width)
        return self.temp(
            f"icmp ne {memory} {loaded}, zeroinitializer"
            if type.width
            else f"icmp ne i8 {loaded}, 0"
        )

    def to_memory(self, a: Atom) -> tuple[str, str]:
        """A value as it is stored, with its type."""
        text = self.atom(a)
        if a.type.dtype.kind != "b":
            return llvm_type(a.type), text
        memory = vector_name("i8", a.type.width)
        return memory, self.temp(f"zext {llvm_type(a.type)} {text} to {memory}")

    def _load(self, s: Let) -> None:
        type = s.ref.type
        memory = vector_name(MEMORY[type.dtype.name], type.width)
        line = f"load {memory}, ptr {self.atom(s.args[0])}, align {type.dtype.size}"
        if type.dtype.kind == "b":
            self.alias(s, self.from_memory(self.temp(line), type))
        else:
            self.lines.append(f"  %v{s.ref.id} = {line}")

    def _masked_load(self, s: Let) -> None:
        pointer, mask, other = s.args
        type = s.ref.type
        memory, passthrough = self.to_memory(other)
        name = f"llvm.masked.load.v{type.width}{_short(MEMORY[type.dtype.name])}.p0"
        self.declarations.add(f"{memory} @{name}(ptr, <{type.width} x i1>, {memory})")
        loaded = self.temp(
            f"call {memory} @{name}(ptr align {type.dtype.size} {self.atom(pointer)}, "
            f"<{type.width} x i1> {self.atom(mask)}, {memory} {passthrough})"
        )
        self.alias(s, self.from_memory(loaded, type))

    def store_memory(self, pointer: Atom, value: Atom, mask: Atom | None) -> None:
        """Lowers a `Store`."""
        memory, text = self.to_memory(value)
        size, width = value.type.dtype.size, value.type.width
        if mask is None:
            self.out(f"store {memory} {text}, ptr {self.atom(pointer)}, align {size}")
            return
        name = f"llvm.masked.store.v{width}{_short(MEMORY[value.type.dtype.name])}.p0"
        self.declarations.add(f"void @{name}({memory}, ptr, <{width} x i1>)")
        self.out(
            f"call void @{name}({memory} {text}, ptr align {size} {self.atom(pointer)}, <{width} x i1> {self.atom(mask)})"
        )

    def _lane_pointers(self, pointer: Atom, offsets: Atom, dtype: ScalarType) -> str:
        width = offsets.type.width
        return self.temp(
            f"getelementptr {MEMORY[dtype.name]}, ptr {self.atom(pointer)}, <{width} x i64> {self.atom(offsets)}"
        )

    def _gather(self, s: Let) -> None:
        type = s.ref.type
        width = type.width
        pointers = self._lane_pointers(s.args[0], s.args[1], type.dtype)
        memory = vector_name(MEMORY[type.dtype.name], width)
        if s.op == "masked_gather":
            mask = self.atom(s.args[2])
            passthrough = self.to_memory(s.args[3])[1]
        else:
            mask, passthrough = "splat (i1 true)", "poison"
        name = f"llvm.masked.gather.v{width}{_short(MEMORY[type.dtype.name])}.v{width}p0"
        self.declarations.add(f"{memory} @{name}(<{width} x ptr>, <{width} x i1>, {memory})")
        loaded = self.temp(
            f"call {memory} @{name}(<{width} x ptr> align {type.dtype.size} {pointers}, <{width} x i1> {mask}, "
            f"{memory} {passthrough})"
        )
        self.alias(s, self.from_memory(loaded, type))

    def _scatter(self, s: Effect) -> None:
        pointer, offsets, value = s.args[:3]
        width, dtype = value.type.width, value.type.dtype
        mask = self.atom(s.args[3]) if len(s.args) == 4 else "splat (i1 true)"
        pointers = self._lane_pointers(pointer, offsets, dtype)
        memory, text = self.to_memory(value)
        name = f"llvm.masked.scatter.v{width}{_short(MEMORY[dtype.name])}.v{width}p0"
        self.declarations.add(f"void @{name}({memory}, <{width} x ptr>, <{width} x i1>)")
        self.out(
            f"call void @{name}({memory} {text}, <{width} x ptr> align {dtype.size} {pointers}, <{width} x i1> {mask})"
        )

    def _atomic_add(self, s: Let) -> None:
        pointer, value = s.args
        dtype = value.type.dtype
        op = "fadd" if dtype.is_float else "add"
        self.out(
            f"%v{s.ref.id} = atomicrmw {op} ptr {self.atom(pointer)}, {llvm_type(value.type)} {self.atom(value)} "
            f"monotonic, align {dtype.size}"
        )

    # ***** lanes *****
    def splat_text(self, element: str, text: str, width: int) -> str:
        """A scalar in all lanes."""
        one = self.temp(f"insertelement <{width} x {element}> poison, {element} {text}, i64 0")
        return self.temp(
            f"shufflevector <{width} x {element}> {one}, <{width} x {element}> poison, <{width} x i32> zeroinitializer"
        )

    def _splat(self, s: Let) -> None:
        a = s.args[0]
        self.dots.note_word(s, a)
        self.alias(s, self.splat_text(llvm_type(a.type), self.atom(a), s.ref.type.width))

    def _extract(self, s: Let) -> None:
        v, lane = s.args
        self.out(
            f"%v{s.ref.id} = extractelement {llvm_type(v.type)} {self.atom(v)}, i64 {self.atom(lane)}"
        )

    def _insert(self, s: Let) -> None:
        v, x, lane = s.args
        self.out(
            f"%v{s.ref.id} = insertelement {llvm_type(v.type)} {self.atom(v)}, "
            f"{llvm_type(x.type)} {self.atom(x)}, i64 {self.atom(lane)}"
        )

    def _shuffle(self, s: Let) -> None:
        a, b = s.args
        t = llvm_type(a.type)
        lanes = ", ".join(f"i32 {i}" for i in s.attr)
        self.out(
            f"%v{s.ref.id} = shufflevector {t} {self.atom(a)}, {t} {self.atom(b)}, <{len(s.attr)} x i32> <{lanes}>"
        )

    def _select(self, s: Let) -> None:
        mask, a, b = s.args
        t = llvm_type(a.type)
        self.out(
            f"%v{s.ref.id} = select {llvm_type(mask.type)} {self.atom(mask)}, {t} {self.atom(a)}, {t} {self.atom(b)}"
        )

    # ***** conversions *****
    def to_f32(self, a: Atom) -> str:
        """A float of at most 32 bits as f32."""
        return self._widen(self.atom(a), a.type)

    def _widen(self, text: str, type: Type) -> str:
        dtype, width = type.dtype, type.width
        if dtype is bf16:
            ints = vector_name("i32", width)
            wide = self.temp(f"zext {vector_name('i16', width)} {text} to {ints}")
            sixteen = "splat (i32 16)" if width else "16"
            high = self.temp(f"shl {ints} {wide}, {sixteen}")
            return self.temp(f"bitcast {ints} {high} to {vector_name('float', width)}")
        if dtype is f16:
            return self._widen_f16(text, width)
        if dtype.is_narrow_float:
            return float8.widen(self.temp, text, dtype, width)
        return text

    def _widen_f16(self, text: str, width: int) -> str:
        halves, floats = vector_name("half", width), vector_name("float", width)
        if self.target.has_f16_conversion:
            half = self.temp(f"bitcast {vector_name('i16', width)} {text} to {halves}")
            return self.temp(f"fpext {halves} {half} to {floats}")
        # exponent and mantissa move into place; multiplying by 2^112 corrects the bias, also of subnormals
        ints = vector_name("i32", width)
        c = _constants(width)
        wide = self.temp(f"zext {vector_name('i16', width)} {text} to {ints}")
        magnitude = self.temp(f"and {ints} {wide}, {c('i32', 0x7FFF)}")
        shifted = self.temp(f"shl {ints} {magnitude}, {c('i32', 13)}")
        small = self.temp(f"bitcast {ints} {shifted} to {floats}")
        scaled = self.temp(f"fmul {floats} {small}, {c('float', 2.0**112)}")
        bits = self.temp(f"bitcast {floats} {scaled} to {ints}")
        special = self.temp(f"icmp uge {ints} {magnitude}, {c('i32', 0x7C00)}")
        infinite = self.temp(f"or {ints} {shifted}, {c('i32', 0x7F800000)}")
        chosen = self.temp(
            f"select {vector_name('i1', width)} {special}, {ints} {infinite}, {ints} {bits}"
        )
        sign = self.temp(f"and {ints} {wide}, {c('i32', 0x8000)}")
        high = self.temp(f"shl {ints} {sign}, {c('i32', 16)}")
        whole = self.temp(f"or {ints} {chosen}, {high}")
        return self.temp(f"bitcast {ints} {whole} to {floats}")

    def narrow(self, text: str, dtype: ScalarType, width: int) -> str:
        """f32 rounded to a float of 8 or 16 bits."""
        if dtype.bits == 8:
            return float8.narrow(self.temp, text, dtype, width)
        floats = vector_name("float", width)
        shorts = vector_name("i16", width)
        if dtype is bf16:
            if self.target.has("avx512bf16") and (
                width % 16 == 0 and width or (self.target.has("avx512vl") and width in (4, 8))
            ):
                short = vector_name("bfloat", width)
                if width > 16:
                    # LLVM 22 aborts where it finds that the upper half of two registers is undefined
                    text = self.temp(f"freeze {floats} {text}")
                rounded = self.temp(f"fptrunc {floats} {text} to {short}")
                return self.temp(f"bitcast {short} {rounded} to {shorts}")
            if self.target.is_arm64 and self.target.has("bf16") and width % 4 == 0:
                short = vector_name("bfloat", width)
                rounded = self.temp(f"fptrunc {floats} {text} to {short}")
                return self.temp(f"bitcast {short} {rounded} to {shorts}")
            return self._round_bf16(text, width)
        if self.target.has_f16_conversion:
            halves = vector_name("half", width)
            half = self.temp(f"fptrunc {floats} {text} to {halves}")
            return self.temp(f"bitcast {halves} {half} to {shorts}")
        return self._round_f16(text, width)

    def _round_bf16(self, text: str, width: int) -> str:
        ints, floats = vector_name("i32", width), vector_name("float", width)
        shorts, c = vector_name("i16", width), _constants(width)
        bits = self.temp(f"bitcast {floats} {text} to {ints}")
        high = self.temp(f"lshr {ints} {bits}, {c('i32', 16)}")
        odd = self.temp(f"and {ints} {high}, {c('i32', 1)}")
        bias = self.temp(f"add {ints} {odd}, {c('i32', 0x7FFF)}")
        rounded = self.temp(f"add {ints} {bits}, {bias}")
        cut = self.temp(f"lshr {ints} {rounded}, {c('i32', 16)}")
        nan = self.temp(f"fcmp uno {floats} {text}, {text}")
        chosen = self.temp(
            f"select {vector_name('i1', width)} {nan}, {ints} {c('i32', 0x7FC0)}, {ints} {cut}"
        )
        return self.temp(f"trunc {ints} {chosen} to {shorts}")

    def _round_f16(self, text: str, width: int) -> str:
        ints, floats, flags = (
            vector_name("i32", width),
            vector_name("float", width),
            vector_name("i1", width),
        )
        c = _constants(width)
        bits = self.temp(f"bitcast {floats} {text} to {ints}")
        magnitude = self.temp(f"and {ints} {bits}, {c('i32', 0x7FFFFFFF)}")
        # normal results: round to even at bit 13, then correct the bias
        odd = self.temp(
            f"and {ints} {self.temp(f'lshr {ints} {magnitude}, ' + c('i32', 13))}, {c('i32', 1)}"
        )
        biased = self.temp(f"add {ints} {magnitude}, {c('i32', 0x0FFF - (112 << 23))}")
        rounded = self.temp(f"add {ints} {biased}, {odd}")
        normal = self.temp(f"lshr {ints} {rounded}, {c('i32', 13)}")
        # subnormal results: adding 0.5 makes the hardware round at the right bit
        positive = self.temp(f"bitcast {ints} {magnitude} to {floats}")
        sum_ = self.temp(f"fadd {floats} {positive}, {c('float', 0.5)}")
        sum_bits = self.temp(f"bitcast {floats} {sum_} to {ints}")
        subnormal = self.temp(f"sub {ints} {sum_bits}, {c('i32', 0x3F000000)}")
        tiny = self.temp(f"icmp ult {ints} {magnitude}, {c('i32', 113 << 23)}")
        finite = self.temp(f"select {flags} {tiny}, {ints} {subnormal}, {ints} {normal}")
        big = self.temp(f"icmp uge {ints} {magnitude}, {c('i32', 0x477FF000)}")
        bounded = self.temp(f"select {flags} {big}, {ints} {c('i32', 0x7C00)}, {ints} {finite}")
        nan = self.temp(f"icmp ugt {ints} {magnitude}, {c('i32', 0x7F800000)}")
        chosen = self.temp(f"select {flags} {nan}, {ints} {c('i32', 0x7E00)}, {ints} {bounded}")
        sign = self.temp(
            f"and {ints} {self.temp(f'lshr {ints} {bits}, ' + c('i32', 16))}, {c('i32', 0x8000)}"
        )
        whole = self.temp(f"or {ints} {chosen}, {sign}")
        return self.temp(f"trunc {ints} {whole} to {vector_name('i16', width)}")

    def _cast(self, s: Let) -> None:
        a = s.args[0]
        source, goal, width = a.type.dtype, s.ref.type.dtype, a.type.width
        text, from_, to = self.atom(a), llvm_type(a.type), llvm_type(s.ref.type)
        if source.is_narrow_float:
            text, from_, source = self._widen(text, a.type), vector_name("float", width), f32
            if goal is f32:
                self.alias(s, text)
                return
        if goal.is_narrow_float:
            if source is f64:
                text = self._round_to_odd(text, width)
            elif source is not f32:
                text = self._number_cast(
                    text, from_, source, vector_name("float", width), f32, width, s.attr
                )
            self.alias(s, self.narrow(text, goal, width))
            return
        self.alias(s, self._number_cast(text, from_, source, to, goal, width, s.attr))

    def _round_to_odd(self, text: str, width: int) -> str:
        """f64 as f32; inexact results have a last bit of 1, so that rounding them again is as rounding `text`."""
        doubles, floats = vector_name("double", width), vector_name("float", width)
        ints, flags, c = vector_name("i32", width), vector_name("i1", width), _constants(width)
        nearest = self.temp(f"fptrunc {doubles} {text} to {floats}")
        back = self.temp(f"fpext {floats} {nearest} to {doubles}")
        bits = self.temp(f"bitcast {floats} {nearest} to {ints}")
        inexact = self.temp(f"fcmp one {doubles} {back}, {text}")
        last = self.temp(f"and {ints} {bits}, {c('i32', 1)}")
        even = self.temp(f"icmp eq {ints} {last}, {c('i32', 0)}")
        move = self.temp(f"and {flags} {inexact}, {even}")
        # bits of floats grow with their magnitude: the odd neighbour on the side of `text`
        name = f"llvm.fabs.{mangled(Type(f64, width))}"
        magnitudes = [self.call(doubles, name, [(doubles, x)]) for x in (back, text)]
        smaller = self.temp(f"fcmp olt {doubles} {magnitudes[0]}, {magnitudes[1]}")
        step = self.temp(f"select {flags} {smaller}, {ints} {c('i32', 1)}, {ints} {c('i32', -1)}")
        moved = self.temp(f"add {ints} {bits}, {step}")
        odd = self.temp(f"select {flags} {move}, {ints} {moved}, {ints} {bits}")
        return self.temp(f"bitcast {ints} {odd} to {floats}")

    def _number_cast(
        self, text: str, from_: str, a: ScalarType, to: str, b: ScalarType, width: int, mode: Any
    ) -> str:
        if b.kind == "b":
            zero = "zeroinitializer" if width else ("0.0" if a.is_float else "0")
            return self.temp(f"{'fcmp une' if a.is_float else 'icmp ne'} {from_} {text}, {zero}")
        if a.is_float and b.is_float:
            op = "fpext" if b.bits > a.bits else "fptrunc"
        elif a.is_float:
            op = "fptosi" if b.kind == "i" else "fptoui"
            if mode != "unchecked":
                lanes = f"v{width}" if width else ""
                name = f"llvm.{op}.sat.{lanes}i{b.bits}.{lanes}f{a.bits}"
                return self.call(to, name, [(from_, text)])
        elif b.is_float:
            op = "sitofp" if a.kind == "i" else "uitofp"
        elif b.bits == a.bits:
            return text
        elif b.bits < a.bits:
            op = "trunc"
        else:
            op = "sext" if a.kind == "i" else "zext"
        return self.temp(f"{op} {from_} {text} to {to}")

    def _bitcast(self, s: Let) -> None:
        a = s.args[0]
        from_, to = llvm_type(a.type), llvm_type(s.ref.type)
        self.dots.note_bits(s, a)
        if from_ == to:
            self.alias(s, self.atom(a))
        else:
            self.out(f"%v{s.ref.id} = bitcast {from_} {self.atom(a)} to {to}")

    # ***** arithmetic *****
    def _neg(self, s: Let) -> None:
        a = s.args[0]
        t = llvm_type(a.type)
        if a.type.dtype.is_float:
            self.out(f"%v{s.ref.id} = fneg {t} {self.atom(a)}")
        else:
            self.out(
                f"%v{s.ref.id} = sub {t} {'zeroinitializer' if a.type.width else '0'}, {self.atom(a)}"
            )

    def _not(self, s: Let) -> None:
        a = s.args[0]
        ones = "true" if a.type.dtype.kind == "b" else "-1"
        element = llvm_type(Type(a.type.dtype, 0))
        text = f"splat ({element} {ones})" if a.type.width else ones
        self.out(f"%v{s.ref.id} = xor {llvm_type(a.type)} {self.atom(a)}, {text}")

    def _abs(self, s: Let) -> None:
        a = s.args[0]
        t = llvm_type(a.type)
        if a.type.dtype.is_float:
            self.alias(s, self.call(t, f"llvm.fabs.{mangled(a.type)}", [(t, self.atom(a))]))
        else:
            self.alias(s, self.call_immediate(t, f"llvm.abs.{mangled(a.type)}", self.atom(a)))

    def call_immediate(self, type: str, intrinsic: str, text: str) -> str:
        """An intrinsic with one operand and a flag that is off."""
        self.declarations.add(f"{type} @{intrinsic}({type}, i1)")
        return self.temp(f"call {type} @{intrinsic}({type} {text}, i1 false)")

    def _count_zeros(self, s: Let, op: str) -> None:
        a = s.args[0]
        self.alias(
            s, self.call_immediate(llvm_type(a.type), f"llvm.{op}.{mangled(a.type)}", self.atom(a))
        )

    def _fma(self, s: Let) -> None:
        t = llvm_type(s.ref.type)
        # without the instruction llvm.fma would be a slow exact library call
        name = "fma" if self.target.has_fma else "fmuladd"
        self.alias(
            s,
            self.call(t, f"llvm.{name}.{mangled(s.ref.type)}", [(t, self.atom(a)) for a in s.args]),
        )

    def _contracted(self, s: Let, position: int) -> None:
        """A sum or difference one operand of which is a product, as one fused multiply-add."""
        product, other = s.args[position], s.args[1 - position]
        assert isinstance(product, Ref)
        x, y = (self.atom(a) for a in self.contraction.products[product.id].args)
        z, t = self.atom(other), llvm_type(s.ref.type)
        if s.op == "sub":
            if position == 0:
                z = self.temp(f"fneg {t} {z}")
            else:
                x = self.temp(f"fneg {t} {x}")
        self.alias(s, self.call(t, f"llvm.fma.{mangled(s.ref.type)}", [(t, x), (t, y), (t, z)]))

    def _extremum(self, s: Let) -> None:
        a, b = s.args
        if isinstance(a, Const):
            a, b = b, a
        t, x, y = llvm_type(a.type), self.atom(a), self.atom(b)
        if not a.type.dtype.is_float:
            name = f"llvm.{'s' if a.type.dtype.kind != 'u' else 'u'}{s.op}.{mangled(a.type)}"
            self.alias(s, self.call(t, name, [(t, x), (t, y)]))
            return
        self.alias(s, self.float_extremum(s.op, t, x, y, a.type.width, isinstance(b, Const)))

    def float_extremum(self, op: str, t: str, x: str, y: str, width: int, y_is_number: bool) -> str:
        """Min or max that keeps NaN: one instruction where ``y`` is known to be a number."""
        if self.target.is_arm64:  # one instruction
            lanes = f"v{width}" if width else ""
            element = "f64" if "double" in t else "f32"
            return self.call(t, f"llvm.{op}imum.{lanes}{element}", [(t, x), (t, y)])
        flags, predicate = vector_name("i1", width), "ogt" if op == "max" else "olt"
        if y_is_number:  # the comparison fails on NaN, so x stays
            better = self.temp(f"fcmp {predicate} {t} {y}, {x}")
            return self.temp(f"select {flags} {better}, {t} {y}, {t} {x}")
        # NaN first: what follows is then one instruction on x86
        nan = self.temp(f"fcmp uno {t} {x}, {x}")
        y = self.temp(f"select {flags} {nan}, {t} {x}, {t} {y}")
        better = self.temp(f"fcmp {predicate} {t} {x}, {y}")
        return self.temp(f"select {flags} {better}, {t} {x}, {t} {y}")

    def _floordiv(self, s: Let) -> None:
        a, b = s.args
        t, x, y = llvm_type(a.type), self.atom(a), self.atom(b)
        divide, rest = ("sdiv", "srem") if a.type.dtype.kind == "i" else ("udiv", "urem")
        if a.type.dtype.kind == "u":
            self._plain(s, divide if s.op == "floordiv" else rest)
            return
        flags = vector_name("i1", a.type.width)
        zero = "zeroinitializer" if a.type.width else "0"
        minus_one = ""
        if s.attr == "wrap":
            # the least number divided by -1 traps: by 1 instead, and the quotient is set below
            ones = _constants(a.type.width)(f"i{a.type.dtype.bits}", -1)
            minus_one = self.temp(f"icmp eq {t} {y}, {ones}")
            one = _constants(a.type.width)(f"i{a.type.dtype.bits}", 1)
            y = self.temp(f"select {flags} {minus_one}, {t} {one}, {t} {y}")
        remainder = self.temp(f"{rest} {t} {x}, {y}")
        # C truncates: step down where the remainder has the other sign than the divisor
        nonzero = self.temp(f"icmp ne {t} {remainder}, {zero}")
        signs = self.temp(f"xor {t} {remainder}, {y}")
        differ = self.temp(f"icmp slt {t} {signs}, {zero}")
        adjust = self.temp(f"and {flags} {nonzero}, {differ}")
        if s.op == "mod":
            moved = self.temp(f"add {t} {remainder}, {y}")
            self.out(f"%v{s.ref.id} = select {flags} {adjust}, {t} {moved}, {t} {remainder}")
        else:
            quotient = self.temp(f"{divide} {t} {x}, {y}")
            step = self.temp(f"sext {flags} {adjust} to {t}")
            if not minus_one:
                self.out(f"%v{s.ref.id} = add {t} {quotient}, {step}")
                return
            floor = self.temp(f"add {t} {quotient}, {step}")
            negated = self.temp(f"sub {t} {zero}, {x}")
            self.out(f"%v{s.ref.id} = select {flags} {minus_one}, {t} {negated}, {t} {floor}")

    def _shift(self, s: Let) -> None:
        a, b = s.args
        op = "shl" if s.op == "shl" else "ashr" if a.type.dtype.kind == "i" else "lshr"
        t, amount = llvm_type(a.type), self.atom(b)
        if not isinstance(b, Const):  # as processors do, and without undefined results
            limit = _constants(a.type.width)(f"i{a.type.dtype.bits}", a.type.dtype.bits - 1)
            amount = self.temp(f"and {t} {amount}, {limit}")
        self.out(f"%v{s.ref.id} = {op} {t} {self.atom(a)}, {amount}")

    def _copysign(self, s: Let) -> None:
        t = llvm_type(s.ref.type)
        self.alias(
            s,
            self.call(
                t, f"llvm.copysign.{mangled(s.ref.type)}", [(t, self.atom(a)) for a in s.args]
            ),
        )

    # ***** reductions *****
    def _reduce(self, s: Let) -> None:
        a = s.args[0]
        t, element = llvm_type(a.type), llvm_type(s.ref.type)
        op = s.op.removeprefix("reduce_")
        if a.type.dtype.is_float:
            start = number_text(-0.0 if op == "add" else 1.0, a.type.dtype)
            args = [(element, start), (t, self.atom(a))]
            self.alias(
                s,
                self.call(element, f"llvm.vector.reduce.f{op}.{mangled(a.type)}", args, "reassoc "),
            )
        else:
            self.alias(
                s,
                self.call(
                    element, f"llvm.vector.reduce.{op}.{mangled(a.type)}", [(t, self.atom(a))]
                ),
            )

    def _reduce_extremum(self, s: Let) -> None:
        a = s.args[0]
        t, element, width = llvm_type(a.type), llvm_type(s.ref.type), a.type.width
        op = s.op.removeprefix("reduce_")
        if not a.type.dtype.is_float:
            sign = "u" if a.type.dtype.kind == "u" else "s"
            self.alias(
                s,
                self.call(
                    element, f"llvm.vector.reduce.{sign}{op}.{mangled(a.type)}", [(t, self.atom(a))]
                ),
            )
            return
        text = self.atom(a)
        if self.target.is_arm64:
            name = f"llvm.vector.reduce.f{op}imum.{mangled(a.type)}"
            self.alias(s, self.call(element, name, [(t, text)]))
            return
        nan = self.temp(f"fcmp uno {t} {text}, {text}")
        flags = vector_name("i1", width)
        any_nan = self.call("i1", f"llvm.vector.reduce.or.v{width}i1", [(flags, nan)])
        while width > 1 and width % 2 == 0:
            whole, half = vector_name(element, width), width // 2
            low, high = (
                self.temp(f"shufflevector {whole} {text}, {whole} poison, <{half} x i32> <{lanes}>")
                for lanes in (_lane_list(0, half), _lane_list(half, half))
            )
            text = self.float_extremum(op, vector_name(element, half), low, high, half, True)
            width = half
        lanes_left = [
            self.temp(f"extractelement {vector_name(element, width)} {text}, i64 {i}")
            for i in range(width)
        ]
        result = lanes_left[0]
        for lane in lanes_left[1:]:
            result = self.float_extremum(op, element, result, lane, 0, True)
        number = const_text(Const(math.nan, s.ref.type))
        self.alias(s, self.temp(f"select i1 {any_nan}, {element} {number}, {element} {result}"))

    def _mask_reduce(self, s: Let, op: str) -> None:
        a = s.args[0]
        self.alias(
            s,
            self.call(
                "i1",
                f"llvm.vector.reduce.{op}.v{a.type.width}i1",
                [(llvm_type(a.type), self.atom(a))],
            ),
        )

    # ***** instructions of one processor *****
    def pieces(self, text: str, element: str, width: int, piece: int) -> list[str]:
        if width == piece:
            return [text]
        whole = vector_name(element, width)
        found: list[str] = []
        for first in range(0, width, piece):
            lanes = ", ".join(f"i32 {first + i}" for i in range(piece))
            found.append(
                self.temp(
                    f"shufflevector {whole} {text}, {whole} poison, <{piece} x i32> <{lanes}>"
                )
            )
        return found

    def joined(self, parts: list[str], element: str, piece: int) -> str:
        """The lanes of all parts, one after the other."""
        result, width = parts[0], piece
        for part in parts[1:]:
            if width != piece:  # both operands of a shuffle have one width
                whole = vector_name(element, piece)
                lanes = ", ".join(f"i32 {i}" if i < piece else "i32 poison" for i in range(width))
                part = self.temp(
                    f"shufflevector {whole} {part}, {whole} poison, <{width} x i32> <{lanes}>"
                )
            t, total = vector_name(element, width), width + piece
            lanes = _lane_list(0, width) + ", " + _lane_list(width, piece)
            result = self.temp(f"shufflevector {t} {result}, {t} {part}, <{total} x i32> <{lanes}>")
            width = total
        return result

    def _scale(self, s: Let) -> None:
        x, n = s.args
        width, double = x.type.width, x.type.dtype is f64
        element, piece = ("double", 8) if double else ("float", 16)
        t = vector_name(element, piece)
        suffix, mask = ("pd", "i8") if double else ("ps", "i16")
        name = f"llvm.x86.avx512.mask.scalef.{suffix}.512"
        results: list[str] = []
        for a, b in zip(
            self.pieces(self.atom(x), element, width, piece),
            self.pieces(self.atom(n), element, width, piece),
            strict=True,
        ):
            self.declarations.add(f"{t} @{name}({t}, {t}, {t}, {mask}, i32)")
            results.append(
                self.temp(
                    f"call {t} @{name}({t} {a}, {t} {b}, {t} zeroinitializer, {mask} -1, i32 4)"
                )
            )
        self.alias(s, self.joined(results, element, piece))

    def _libm(self, s: Let) -> None:
        self.alias(s, self.call("double", s.attr, [("double", self.atom(a)) for a in s.args]))

    # ***** effects *****
    def effect(self, s: Effect) -> None:
        """Lowers an op that has no value."""
        if s.op == "scatter":
            self._scatter(s)
        elif s.op == "prefetch":
            write, locality = s.attr
            self.declarations.add("void @llvm.prefetch.p0(ptr, i32, i32, i32)")
            self.out(
                f"call void @llvm.prefetch.p0(ptr {self.atom(s.args[0])}, i32 {write}, i32 {locality}, i32 1)"
            )
        elif s.op == "assume":
            self.declarations.add("void @llvm.assume(i1)")
            self.out(f"call void @llvm.assume(i1 {self.atom(s.args[0])})")
        elif s.op == "brief":
            pass
        elif s.op == "print":
            self._print(s)
        elif s.op.startswith("tile_"):
            self.tiles.lower(s)
        else:
            raise ValueError(f"the kernel IR has no effect {s.op!r}")

    def _print(self, s: Effect) -> None:
        text = ""
        for part in s.attr:
            if isinstance(part, ScalarType):
                text += "%g" if part.is_float else "%lld"
            else:
                text += part.replace("%", "%%")
        data = (text + "\n").encode() + b"\0"
        name = f"@text{len(self.globals)}"
        escaped = "".join(
            chr(c) if 32 <= c < 127 and c not in (34, 92) else f"\\{c:02X}" for c in data
        )
        self.globals.append(
            f'{name} = private unnamed_addr constant [{len(data)} x i8] c"{escaped}"'
        )
        self.declarations.add("i32 @printf(ptr, ...)")
        self.declarations.add("i32 @fflush(ptr)")
        args = "".join(f", {llvm_type(a.type)} {self.atom(a)}" for a in s.args)
        self.temp(f"call i32 (ptr, ...) @printf(ptr {name}{args})")
        self.temp("call i32 @fflush(ptr null)")


def _constants(width: int) -> Callable[[str, Any], str]:
    """Makes literals, in all lanes where there are lanes."""

    def make(element: str, value: Any) -> str:
        text = number_text(value, f32) if element == "float" else str(value)
        return f"splat ({element} {text})" if width else text

    return make


def _lane_list(first: int, count: int) -> str:
    return ", ".join(f"i32 {first + i}" for i in range(count))


def _short(element: str) -> str:
    return {"float": "f32", "double": "f64"}.get(element, element)


def mangled(type: Type) -> str:
    """A type's name in an intrinsic's."""
    dtype = type.dtype
    element = f"f{dtype.bits}" if dtype.is_float else f"i{dtype.bits}"
    return f"v{type.width}{element}" if type.width > 0 else element


__all__ = ["OpLowering", "bool_"]
