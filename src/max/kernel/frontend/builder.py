"""Construction of the IR: nested bodies in SSA form, with common subexpression elimination and loop-invariant code
motion.
"""

from __future__ import annotations

import builtins
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from max.kernel.ir.nodes import Alloc, Assign, Atom, Const, Effect, Let, Ref, Stmt, Store
from max.kernel.types import INDEX, POINTER, ScalarType, Type

Interval = tuple[int, int]
"""The minimum and maximum of an integer."""
KnownInterval = tuple[int, int, int, int]
"""An interval, and the least and most definitions to follow that give it: `max.kernel.frontend.division`."""

_INTS = {int}
#: Index and pointer arithmetic, hoisted as far out as its operands allow, also out of branches.
_CHEAP = frozenset({"add", "sub", "mul", "gep", "splat", "neg", "cast", "shl"})
#: Ops that may trap, or depend on memory or control flow: never hoisted.
_FIXED = frozenset(
    {
        "load",
        "masked_load",
        "gather",
        "masked_gather",
        "read",
        "atomic_add",
        "opaque",
        "floordiv",
        "mod",
        "udiv",
        "umod",
        "libm",
    }
)
#: Ops whose value depends on memory: never shared.
_IMPURE = frozenset(
    {"load", "masked_load", "gather", "masked_gather", "read", "atomic_add", "opaque"}
)


class Scope:
    """A body under construction."""

    __slots__ = (
        "body",
        "checked",
        "generation",
        "home",
        "home_generation",
        "is_open",
        "kind",
        "known",
        "nonzero",
        "positive",
    )

    def __init__(self, kind: str, known_intervals: dict[int, KnownInterval] | None = None) -> None:
        self.kind = kind  # invariant values are hoisted out of "loop" bodies only
        self.body: list[Stmt] = []
        self.is_open = True
        self.home: Scope | None = None  # the scope that received this one's statements
        self.home_generation = 0  # the generation of `home` at that time
        self.generation = (
            0  # incremented when statements are dropped: values of earlier ones are invalid
        )
        self.positive: set[int] = set()  # ids of values proved greater than 0 in this body
        self.nonzero: set[int] = set()  # ids of values proved non-zero in this body
        self.checked: set[object] = set()  # conditions and accesses tested in this body
        # intervals by id, shared by the bodies in which the same values are positive
        self.known: dict[int, KnownInterval] = {} if known_intervals is None else known_intervals

    def forget(self, length: int) -> None:
        """Drops the statements from ``length`` on."""
        del self.body[length:]
        self.generation += 1
        # these facts may come from a dropped test
        self.positive.clear()
        self.nonzero.clear()
        self.checked.clear()
        self.known = {}


class Builder:
    """Emits statements into a stack of scopes."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = [Scope("kernel")]
        self.next_id: int = 0
        self.next_slot: int = 0
        self.tile_bytes: int = 0
        """The bytes of all tiles so far."""
        self.unrolled: int = 0
        """The iterations of all unrolled loops so far."""
        self.next_label: int = 0
        self._next_numbers: dict[int, int] = {}
        self._num_formals = 0
        self.nonzero_formals: set[int] = set()
        """The ids of formals that stand for values proved non-zero."""
        self.line = 0
        self.constants: dict[Any, Const] = {}
        self.shared: dict[Any, tuple[Ref, Scope, int]] = {}
        self.floor = 0
        """The scope of the innermost outlined function; values are not hoisted out of it."""
        self.definitions: dict[int, Let] = {}
        """The definitions of values other than memory accesses, by id."""
        self.intervals: dict[int, tuple[int, int]] = {}
        """The minimum and maximum of arguments and loop variables, by id."""

    # ***** atoms *****
    def const(self, value: Any, type: Type) -> Const:
        """A literal of ``type``; equal literals are the same object."""
        # texts of other values, as True equals 1 and -0.0 equals 0.0
        is_exact = value.__class__ is int or (
            value.__class__ is tuple and set(map(builtins.type, value)) == _INTS
        )
        key = (value if is_exact else repr(value), type)
        constant = self.constants.get(key)
        if constant is None:
            constant = self.constants[key] = Const(value, type)
        return constant

    def index(self, value: int | Atom) -> Atom:
        """Converts an index to an atom."""
        return self.const(value, INDEX) if isinstance(value, int) else value

    def ref(self, type: Type) -> Ref:
        """A new name for a value that the next opened body binds, such as a loop variable."""
        self.next_id += 1
        return Ref(self.next_id, type, len(self.scopes))

    def formal(self, type: Type) -> Ref:
        """A name that stands for an argument in an outlined body; `max.kernel.frontend.outlining` replaces it."""
        self._num_formals += 1
        return Ref(-self._num_formals, type, 0)

    # ***** values *****
    def op(self, name: str, args: tuple[Atom, ...], type: Type, attr: Any = None) -> Ref:
        """Emits ``name(args)`` and returns its value; an equal value that is in scope is reused."""
        scopes = self.scopes
        top = len(scopes) - 1
        if name in _IMPURE:
            target = top
            key = None
        else:
            level = self.floor
            for arg in args:
                if isinstance(arg, Ref) and arg.level > level:
                    level = arg.level
            key = (name, args, type, attr)
            earlier = self.shared.get(key)
            if earlier is not None:
                # valid if the scope is open, or was spliced, directly or not, into one that is
                ref, scope, generation = earlier
                while scope.generation == generation:
                    if scope.home is None:
                        if scope.is_open:
                            return ref
                        break
                    scope, generation = scope.home, scope.home_generation
            target = self._place(name, level, top, type)
        self.next_id += 1
        ref = Ref(self.next_id, type, target)
        scope = scopes[target]
        let = Let(ref, name, args, attr, self.line)
        scope.body.append(let)
        if key is not None:
            self.definitions[ref.id] = let
            self.shared[key] = (ref, scope, scope.generation)
        return ref

    def _place(self, name: str, level: int, top: int, type: Type) -> int:
        """The scope for an op whose operands are available from scope `level` on."""
        if level >= top or name in _FIXED:
            return top
        if name in _CHEAP and (name == "splat" or type is INDEX or type is POINTER):
            return level
        # out of loops only: an op that left a branch would run when the branch does not
        while top > level and self.scopes[top].kind == "loop":
            top -= 1
        return top

    def effect(self, name: str, args: tuple[Atom, ...], attr: Any = None) -> None:
        """Emits an op without a value."""
        self.emit(Effect(name, args, attr, self.line))

    def store(self, pointer: Atom, value: Atom, mask: Atom | None = None) -> None:
        """Emits a store to memory."""
        self.emit(Store(pointer, value, mask, self.line))

    # ***** index arithmetic, folded at compile time if possible *****
    def add(self, a: int | Atom, b: int | Atom) -> int | Atom:
        """``a + b`` of indices, which does not overflow."""
        if isinstance(a, int):
            if isinstance(b, int):
                return a + b
            a, b = b, a
        if isinstance(b, int):
            if b == 0:
                return a
            b = self.const(b, INDEX)
        return self.op("add", (a, b), INDEX, "nsw")

    def mul(self, a: int | Atom, b: int | Atom) -> int | Atom:
        """``a * b`` of indices, which does not overflow."""
        if isinstance(a, int):
            if isinstance(b, int):
                return a * b
            a, b = b, a
        if isinstance(b, int):
            if b in (0, 1):
                return a if b else 0
            b = self.const(b, INDEX)
        return self.op("mul", (a, b), INDEX, "nsw")

    def sub(self, a: int | Atom, b: int | Atom) -> int | Atom:
        """``a - b`` of indices, which does not overflow."""
        if isinstance(b, int):
            return self.add(a, -b)
        return self.op("sub", (self.index(a), b), INDEX, "nsw")

    def gep(self, pointer: Atom, offset: int | Atom, dtype: ScalarType) -> Atom:
        """``pointer`` plus ``offset`` elements."""
        if offset == 0 and isinstance(offset, int):
            return pointer
        return self.op("gep", (pointer, self.index(offset)), POINTER, dtype)

    # ***** slots *****
    def alloc(self, type: Type, count: int = 1) -> int:
        """Allocates a slot: a mutable variable of ``count`` values."""
        self.next_slot += 1
        self.emit(Alloc(self.next_slot, type, count))
        return self.next_slot

    def read(self, slot: int, type: Type, index: int | Atom = 0) -> Ref:
        """The current value of a slot."""
        return self.op("read", (self.index(index),), type, slot)

    def assign(self, slot: int, value: Atom, index: int | Atom = 0) -> None:
        """Stores to a slot."""
        self.emit(Assign(slot, self.index(index), value, self.line))

    # ***** bodies *****
    def prove_positive(self, scope: Scope, id: int) -> None:
        """Records that a value is positive in an open body and those inside it."""
        depth = self.scopes.index(scope)
        is_new = all(id not in around.positive for around in self.scopes[: depth + 1])
        scope.positive.add(id)
        if is_new:
            # intervals of before lack the fact
            for inside in self.scopes[depth:]:
                inside.known = {}

    def emit(self, stmt: Stmt) -> None:
        """Appends a statement to the innermost body."""
        self.scopes[-1].body.append(stmt)

    def label(self) -> int:
        """A new block label."""
        self.next_label += 1
        return self.next_label

    def open(self, kind: str) -> Scope:
        """Opens a nested body."""
        scope = Scope(kind, self.scopes[-1].known)
        self.scopes.append(scope)
        return scope

    def close(self) -> Scope:
        """Closes the innermost body."""
        scope = self.scopes.pop()
        scope.is_open = False
        return scope

    @contextmanager
    def reopen(self, scope: Scope) -> Generator[None]:
        """Reopens a closed body, to append to it; it must still be nested in the innermost body."""
        # more may be proved in the bodies around it than when it was closed
        scope.known = {} if scope.positive else self.scopes[-1].known
        self.scopes.append(scope)
        scope.is_open = True
        try:
            yield
        finally:
            self.close()

    def splice(self, scope: Scope) -> None:
        """Appends the statements of a closed body to the innermost one."""
        self.scopes[-1].body.extend(scope.body)
        scope.home = self.scopes[-1]
        scope.home_generation = scope.home.generation

    @contextmanager
    def outline(self, name: str) -> Generator[Scope]:
        """Opens the body of a function of its own, and closes it.

        No value is hoisted out of it, only outside values that the body refers to are used, and numbers depend only on
        the function's name, so that equal bodies in several kernels give equal code.

        Args:
            name: The function's name.
        """
        outer = self.floor, self.shared, self.next_id, self.next_slot, self.next_label
        base = _base_number(name)
        # a second body continues the numbers, as these are unique in a kernel
        first = self._next_numbers.get(base, base)
        scope = self.open("branch")
        self.floor, self.shared = len(self.scopes) - 1, {}
        self.next_id, self.next_slot, self.next_label = first, first, first
        try:
            yield scope
        finally:
            self._next_numbers[base] = max(self.next_id, self.next_slot, self.next_label)
            self.floor, self.shared, self.next_id, self.next_slot, self.next_label = outer
        self.close()

    def continue_outlined(self, name: str, count: int) -> int:
        """Reserves ``count`` numbers for a further body of a function; returns the number before the first.

        Args:
            name: The function's name.
            count: The highest number of the body minus that before its first.
        """
        base = _base_number(name)
        first = self._next_numbers.get(base, base)
        self._next_numbers[base] = first + count
        return first

    @staticmethod
    def outlined_shift(name: str, first: int) -> int:
        """The offset between the numbers of a function's body and those of its first body in a kernel.

        Args:
            name: The function's name.
            first: The number before the body's first.
        """
        return first - _base_number(name)

    def unwind(self, depth: int) -> None:
        """Closes the innermost bodies until ``depth`` are open."""
        while len(self.scopes) > depth:
            self.close()


def _base_number(name: str) -> int:
    """The number before the first one in the body of an outlined function."""
    # 2**24 numbers for each function; those below belong to the kernel itself
    return (zlib.crc32(name.encode()) + 1) << 24
