"""The machine-checked rules of the kernel IR: the ops, the types of their operands and results, the scope of names."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: these functions check their types

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from max._host.process_caches import process_cache
from max.kernel.ir.nodes import (
    Alloc,
    Assign,
    Atom,
    Barrier,
    Block,
    Const,
    Effect,
    For,
    If,
    KernelIR,
    Leave,
    Let,
    Parallel,
    Raise,
    Ref,
    Stmt,
    Store,
    While,
)
from max.kernel.types import (
    BOOL,
    INDEX,
    POINTER,
    ScalarType,
    Type,
    bf16,
    bool_,
    f32,
    f64,
    i32,
    scalar,
    u8,
    vector,
)


class IRError(Exception):
    """IR that breaks a rule: a defect of the compiler, not of the kernel."""


Rule = Callable[[Let], bool]


def _types(s: Let) -> list[Type]:
    return [a.type for a in s.args]


def _all_same(s: Let) -> bool:
    return all(t is s.ref.type for t in _types(s))


def _floats(s: Let) -> bool:
    return _all_same(s) and s.ref.type.dtype in (f32, f64)


def _numbers(s: Let) -> bool:
    dtype = s.ref.type.dtype
    return _all_same(s) and (dtype.is_integer or dtype in (f32, f64))


def _integers(s: Let) -> bool:
    return _all_same(s) and s.ref.type.dtype.is_integer


def _bits(s: Let) -> bool:
    return _all_same(s) and not s.ref.type.dtype.is_float


def _comparison(s: Let) -> bool:
    a, b = _types(s)
    return a is b and s.ref.type is a.with_dtype(bool_) and not a.dtype.is_narrow_float


def _index_comparison(s: Let) -> bool:
    return _comparison(s) and s.args[0].type.dtype is INDEX.dtype


def _same_lanes(s: Let) -> bool:
    return s.args[0].type.width == s.ref.type.width


def _extract(s: Let) -> bool:
    v, lane = _types(s)
    return v.is_vector and lane is INDEX and s.ref.type is scalar(v.dtype)


def _insert(s: Let) -> bool:
    v, x, lane = _types(s)
    return v is s.ref.type and x is scalar(v.dtype) and lane is INDEX


def _shuffle(s: Let) -> bool:
    a, b = _types(s)
    lanes = s.attr
    fits = all(0 <= i < 2 * a.width for i in lanes)
    return a is b and s.ref.type.width == len(lanes) and s.ref.type.dtype is a.dtype and fits


def _select(s: Let) -> bool:
    mask, a, b = _types(s)
    return a is b is s.ref.type and mask.dtype is bool_ and mask.width in (0, a.width)


def _bitcast(s: Let) -> bool:
    a, b = s.args[0].type, s.ref.type
    return a.dtype.bits * max(a.width, 1) == b.dtype.bits * max(b.width, 1)


def _reduction(s: Let) -> bool:
    """Whether a reduction takes a vector of numbers and gives its element type."""
    v = s.args[0].type
    return (
        v.is_vector
        and s.ref.type is scalar(v.dtype)
        and not v.dtype.is_narrow_float
        and v.dtype is not bool_
    )


def _mask_reduction(s: Let) -> bool:
    v = s.args[0].type
    return v.is_vector and v.dtype is bool_ and s.ref.type is BOOL


def _gather(s: Let) -> bool:
    """Whether a gather takes a pointer and one offset per lane, and its mask and default fit."""
    pointer, offsets, *masking = _types(s)  # masked: a mask and a default
    width = s.ref.type.width
    masked = not masking or (
        masking[0].dtype is bool_ and masking[0].width == width and masking[1] is s.ref.type
    )
    return pointer is POINTER and offsets.dtype is INDEX.dtype and offsets.width == width and masked


def _masked_load(s: Let) -> bool:
    pointer, mask, other = _types(s)
    width = s.ref.type.width
    return (
        pointer is POINTER and mask.dtype is bool_ and mask.width == width and other is s.ref.type
    )


def _dot(s: Let) -> bool:
    """Whether a `dot_bf16` adds pairs of bf16 lanes to f32 lanes."""
    acc, a, b = _types(s)
    return (
        acc is s.ref.type
        and acc.dtype is f32
        and a is b
        and a.dtype is bf16
        and a.width == 2 * acc.width
    )


def _lookup(s: Let) -> bool:
    """Whether a lookup takes 16 bytes and an index for each byte of its result."""
    table, index = _types(s)
    return table is vector(u8, 16) and index is s.ref.type and index.dtype is u8


def _permute(s: Let) -> bool:
    """Whether a permutation takes two vectors of f32 and an index for each lane of its result."""
    a, b, index = _types(s)
    width = a.width
    return a is b is s.ref.type and a.dtype is f32 and index is vector(i32, width)


def _no_args(s: Let) -> bool:
    return not s.args and isinstance(s.attr, int)


#: Each op: the number of operands (None: any), and the rule for operands, result and attribute.
OPS: dict[str, tuple[int | None, Rule]] = {
    # arithmetic
    **dict.fromkeys(("add", "sub", "mul"), (2, _numbers)),
    "div": (2, _floats),
    **dict.fromkeys(("floordiv", "mod", "udiv", "umod", "shl", "shr"), (2, _integers)),
    **dict.fromkeys(("and", "or", "xor"), (2, _bits)),
    **dict.fromkeys(("min", "max"), (2, _numbers)),
    "neg": (1, _numbers),
    "abs": (1, _numbers),
    "not": (1, _bits),
    "fma": (3, _floats),
    **dict.fromkeys(("sqrt", "floor", "ceil", "trunc", "round"), (1, _floats)),
    **dict.fromkeys(("copysign", "scale"), (2, _floats)),
    **dict.fromkeys(("popcount", "ctlz", "cttz"), (1, _integers)),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), (2, _comparison)),
    **dict.fromkeys(("ult", "uge"), (2, _index_comparison)),
    "libm": (
        None,
        lambda s: all(t.dtype is f64 and t.width == 0 for t in [*_types(s), s.ref.type]),
    ),
    # conversions and lanes
    "cast": (1, _same_lanes),
    "bitcast": (1, _bitcast),
    "splat": (1, lambda s: s.ref.type.is_vector and s.args[0].type is scalar(s.ref.type.dtype)),
    "extract": (2, _extract),
    "insert": (3, _insert),
    "shuffle": (2, _shuffle),
    "select": (3, _select),
    **dict.fromkeys(("reduce_add", "reduce_mul", "reduce_max", "reduce_min"), (1, _reduction)),
    **dict.fromkeys(("any", "all"), (1, _mask_reduction)),
    "lookup": (2, _lookup),
    "permute": (3, _permute),
    "dot_bf16": (3, _dot),
    # a lane of the sums takes four neighboring bytes of both factors
    **dict.fromkeys(
        ("dot_i8", "narrow_dot_i8", "signed_dot_i8", "narrow_signed_dot_i8"),
        (
            3,
            lambda s: s.args[0].type is s.ref.type and s.args[1].type.width == 4 * s.ref.type.width,
        ),
    ),
    # a lane of the sums takes two neighbors of both factors
    **dict.fromkeys(
        ("pair_dot_i8", "dot_i16"),
        (
            3,
            lambda s: s.args[0].type is s.ref.type and s.args[1].type.width == 2 * s.ref.type.width,
        ),
    ),
    # memory and context
    "gep": (
        2,
        lambda s: (
            _types(s) == [POINTER, INDEX]
            and s.ref.type is POINTER
            and isinstance(s.attr, ScalarType)
        ),
    ),
    "opaque": (1, lambda s: _types(s) == [INDEX] and s.ref.type is INDEX),
    "address": (1, lambda s: _types(s) == [POINTER] and s.ref.type is INDEX),
    "load": (1, lambda s: _types(s) == [POINTER]),
    "masked_load": (3, _masked_load),
    "gather": (2, _gather),
    "masked_gather": (4, _gather),
    "atomic_add": (2, lambda s: s.args[0].type is POINTER and s.args[1].type is s.ref.type),
    "read": (1, lambda s: s.args[0].type is INDEX),
    "arg": (0, _no_args),
    "ctx": (0, _no_args),
}
_EFFECTS = {
    *("prefetch", "assume", "brief", "print", "scatter"),
    *(f"tile_{name}" for name in ("configure", "release", "zero", "load", "store", "dot")),
}


_SIGNATURES = 1 << 14
_valid_signatures: set[tuple[Any, ...]] = process_cache(set())
"""Op, result type, attribute and operand types of bindings that passed their rule, as most bindings repeat others."""


def verify(ir: KernelIR) -> None:
    """Checks a kernel: known ops with operands that fit, names used where they are visible, labels that enclose.

    Raises:
        IRError: a rule is broken; the message names the statement.
    """
    _Verifier(ir).body(ir.body)


class _Verifier:
    def __init__(self, ir: KernelIR) -> None:
        self.ir = ir
        self.visible: set[Ref] = set()
        self.slots: dict[int, Alloc] = {}
        self.labels: list[int] = []
        self.bound: set[Ref] = set()
        self.in_parallel = False

    def fail(self, s: Any, why: str) -> None:
        raise IRError(f"{self.ir.name}: {why}: {s!r}")

    def body(self, statements: Iterable[Stmt]) -> None:
        """Names that a body binds are visible to its end."""
        defined: list[Ref] = []
        ended = False
        for s in statements:
            if ended:
                self.fail(s, "a statement after the end of its body")
            self.statement(s, defined)
            ended = isinstance(s, (Leave, Raise))
        self.visible.difference_update(defined)

    def bind(self, s: Stmt, ref: Ref) -> None:
        if ref in self.bound:
            self.fail(s, f"%{ref.id} is bound twice")
        self.bound.add(ref)
        self.visible.add(ref)

    def use(self, s: Stmt, *atoms: Atom) -> None:
        for a in atoms:
            if isinstance(a, Ref) and a not in self.visible:
                self.fail(s, f"%{a.id} is not visible here")
            if isinstance(a, Const) and isinstance(a.value, tuple) and len(a.value) != a.type.width:
                self.fail(s, f"a constant of {len(a.value)} lanes for {a.type}")

    def expect(self, s: Stmt, holds: bool, why: str) -> None:
        if not holds:
            self.fail(s, why)

    def verify_nested(self, s: Stmt, statements: Iterable[Stmt], *refs: Ref) -> None:
        for ref in refs:
            self.bind(s, ref)
        self.body(statements)
        self.visible.difference_update(refs)

    def statement(self, s: Stmt, defined_names: list[Ref]) -> None:
        """Verifies a statement; adds the name that it defines to `defined_names`."""
        if isinstance(s, Let):
            self.let(s)
            defined_names.append(s.ref)
        elif isinstance(s, Effect):
            self.use(s, *s.args)
            self.expect(s, s.op in _EFFECTS, "an unknown effect")
            if s.op.startswith("tile_"):
                moves = s.op in ("tile_load", "tile_store")
                expected = [POINTER, INDEX] if moves else []
                self.expect(s, [a.type for a in s.args] == expected, "operands that do not fit")
        elif isinstance(s, Alloc):
            self.slots[s.slot] = s
        elif isinstance(s, Assign):
            self.use(s, s.index, s.value)
            alloc = self.slots.get(s.slot)
            self.expect(
                s,
                alloc is not None and alloc.type is s.value.type,
                "a value of another type than the slot",
            )
        elif isinstance(s, Store):
            self.use(s, s.pointer, s.value)
            self.expect(s, s.pointer.type is POINTER, "no address")
            if s.mask is not None:
                self.use(s, s.mask)
                fits = s.mask.type.dtype is bool_ and s.mask.type.width == s.value.type.width
                self.expect(s, fits, "a mask that does not fit")
        elif isinstance(s, (Leave, Raise, Barrier)):
            self.jump(s)
        else:
            self.control(s)

    def let(self, s: Let) -> None:
        """Verifies a definition; each signature of an op is tested once per process."""
        self.use(s, *s.args)
        if s.op == "read":
            alloc = self.slots.get(s.attr)
            self.expect(s, alloc is not None and alloc.type is s.ref.type, "a slot of another type")
        # rules look at types and the attribute only; that of a read is the slot, tested above
        attr = None if s.op == "read" else s.attr
        # the class too: 1, 1.0 and True are equal
        signature = (s.op, s.ref.type, attr.__class__, attr, *[a.type for a in s.args])
        if signature not in _valid_signatures:
            self.signature(s)
            # attributes are numbers and names of any program
            if len(_valid_signatures) >= _SIGNATURES:
                _valid_signatures.clear()
            _valid_signatures.add(signature)
        self.bind(s, s.ref)

    def signature(self, s: Let) -> None:
        """Verifies the number and the types of an op's operands."""
        if s.op not in OPS:
            self.fail(s, "an unknown op")
        count, rule = OPS[s.op]
        self.expect(s, count is None or len(s.args) == count, f"{s.op} takes {count} operands")
        self.expect(
            s, rule(s), f"{s.op} does not take ({', '.join(map(str, _types(s)))}) to {s.ref.type}"
        )

    def jump(self, s: Leave | Raise | Barrier) -> None:
        """Verifies a statement that leaves a block, raises or waits."""
        if isinstance(s, Leave):
            self.expect(s, s.label in self.labels, "no such block encloses this")
        elif isinstance(s, Raise):
            self.use(s, *s.values)
            self.expect(s, 0 <= s.message < len(self.ir.messages), "no such message")
            # the error record has room for five values
            self.expect(
                s,
                len(s.values) == len(self.ir.messages[s.message].dtypes) <= 5,
                "values that do not fit",
            )
        else:
            self.expect(s, not self.in_parallel, "a barrier in a parallel loop")

    def control(self, s: Stmt) -> None:
        """Verifies a loop, branch or block, and its body."""
        if isinstance(s, For):
            self.use(s, s.start, s.stop)
            self.expect(
                s,
                s.start.type is s.stop.type is INDEX and s.step != 0,
                "bounds that are no indices",
            )
            self.verify_nested(s, s.body, s.var)
        elif isinstance(s, While):
            visible = set(self.visible)
            # not `body`: what the head binds is visible in the body
            for inner in s.head:
                self.statement(inner, [])
            self.use(s, s.cond)
            self.expect(s, s.cond.type is BOOL, "a condition that is no bool")
            self.body(s.body)
            self.visible = visible
        elif isinstance(s, If):
            self.use(s, s.cond)
            self.expect(s, s.cond.type is BOOL, "a condition that is no bool")
            self.body(s.then)
            self.body(s.orelse)
        elif isinstance(s, Block):
            self.labels.append(s.label)
            self.body(s.body)
            self.labels.pop()
        elif isinstance(s, Parallel):
            self.use(s, s.total, s.grain)
            self.expect(
                s,
                not self.in_parallel and 0 <= s.phase < self.ir.phases,
                "a parallel loop that does not fit",
            )
            self.in_parallel = True
            self.verify_nested(s, s.body, s.begin, s.end)
            self.in_parallel = False
        else:
            self.fail(s, "an unknown statement")
