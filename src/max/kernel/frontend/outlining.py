"""Outlined functions: a body that was compiled once is reused for equal calls, by all kernels of the process.

The body of a call is compiled with *formals* in place of its run-time arguments. A formal has a type, and for integers
an interval and whether it may be 0; these and the compile-time arguments determine the body. At each call the body is
copied: arguments replace the formals, and the numbers of names continue those of the kernel.
"""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, cast

from max._host.process_caches import process_cache
from max._host.reentry import reentrant_lock
from max.kernel.frontend.division import interval, is_nonzero
from max.kernel.frontend.state import Frame, Frontend, NeverReturns
from max.kernel.frontend.values import (
    Closure,
    ContextValue,
    Runtime,
    SlotVar,
    describe,
    is_number,
    tuple_like,
)
from max.kernel.frontend.views.views import View
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
    Leave,
    Let,
    Parallel,
    Raise,
    Ref,
    Stmt,
    Store,
    While,
)
from max.kernel.language.source import InlineFunction

__all__ = ["outlined_body"]


class _Body(NamedTuple):
    """A compiled body."""

    statements: tuple[Stmt, ...]
    formals: tuple[Ref, ...]
    first: int
    """The number before its first value, slot and label."""
    last: int
    """The highest number of a value, slot or label."""
    level: int
    """The level of its outermost values."""
    leaves: bool
    """Whether it contains a run-time return."""
    ends: bool
    """Whether control may reach its end; otherwise it raises on every path."""
    writable: tuple[bool, ...]
    """For each view argument, whether the body requires it to be writable."""


_MAX_BODIES = 256
_bodies: OrderedDict[Hashable, _Body] = process_cache(OrderedDict())
_lock = reentrant_lock()


def outlined_body(
    fe: Frontend, function: InlineFunction, frame: Frame, compile_body: Callable[[], Any]
) -> None:
    """Emits the body of a call as a block of its own.

    Args:
        fe: The frontend.
        function: The function.
        frame: The frame of the call, with its arguments.
        compile_body: Compiles the function in that frame, and returns its result.

    Raises:
        NeverReturns: The body raises on every path.
    """
    arguments = _Arguments(fe)
    try:
        # not shared: checks name the place of the call, tail masks are values of the caller
        if fe.check or any(fe.tail_masks) or not _is_fixed(function):
            raise _UnknownError
        env = {name: arguments.formal(value) for name, value in frame.env.items()}
    except _UnknownError:  # for example a tile, which is memory of the caller
        body, _ = _compile_body(fe, function, compile_body, _Arguments(fe))
        shift = fe.b.outlined_shift(function.name, body.first)
        fe.b.emit(Block(fe.b.label(), body.statements, True, shift))
        if not body.ends:
            raise NeverReturns from None
        return
    # besides its arguments a body depends on the target and on what surrounds the call
    key = (function, fe.target, fe.is_conditional, frame.in_branch,
       fe.parallel_depth > 0, fe.loop_depth > 0, *arguments.key)  # fmt: skip
    with _lock:
        body = _bodies.get(key)
        if body is not None and arguments.may_use(body):
            _bodies.move_to_end(key)
        else:
            body = None
    reusable = False
    if body is None:
        frame.env = env
        body, reusable = _compile_body(fe, function, compile_body, arguments)
        first = body.first
    else:
        first = fe.b.continue_outlined(function.name, body.last - body.first)
        fe.may_have_left |= body.leaves
    copy = _Copy(body, first, len(fe.b.scopes), arguments.actuals, fe.b.line)
    statements = copy.statements(body.statements)
    shift = fe.b.outlined_shift(function.name, first)
    fe.b.emit(Block(fe.b.label(), statements, True, shift))
    if not body.ends:
        raise NeverReturns
    # a body that names further values of this kernel fits no other kernel
    if reusable and not copy.uses_others:
        with _lock:
            _bodies[key] = body
            while len(_bodies) > _MAX_BODIES:
                _bodies.popitem(last=False)


def _compile_body(
    fe: Frontend, function: InlineFunction, compile_body: Callable[[], Any], arguments: _Arguments
) -> tuple[_Body, bool]:
    """Compiles a body; also returns whether other kernels may share it."""
    b = fe.b
    before = len(fe.messages), fe.phases, fe.scratch_bytes
    left, fe.may_have_left = fe.may_have_left, False
    # statements after a jump may be skipped, so a `raise` in the body must not fail at compile time
    fe.frame.in_branch |= left
    try:
        with b.outline(function.name) as scope:
            first, level = b.next_id, len(b.scopes) - 1
            scope.nonzero.update(f.id for f in arguments.formals if f.id in b.nonzero_formals)
            result, ends = None, True
            try:
                result = compile_body()
            except NeverReturns:
                ends = False
            last = max(b.next_id, b.next_slot, b.next_label)
    finally:
        leaves, fe.may_have_left = fe.may_have_left, fe.may_have_left or left
    if result is not None:
        fe.fail(
            f"{function.name} is outlined and returns {describe(result)}; it can only write memory"
        )
    body = _Body(
        tuple(scope.body), tuple(arguments.formals), first, last, level, leaves, ends,
        tuple([view.asked for view in arguments.views]),
    )  # fmt: skip
    # a body that adds messages, counters or scratch memory changes the kernel around it
    return body, before == (len(fe.messages), fe.phases, fe.scratch_bytes)


def _is_fixed(function: InlineFunction) -> bool:
    """Whether the globals of a function are constant; a user's globals may change."""
    return str(function.source.globals.get("__name__", "")).startswith("max.")


class _UnknownError(Exception):
    """An argument that cannot become a formal."""


class _Writable:
    """Whether a view may be written; records each query of a store."""

    __slots__ = ("asked", "value")

    def __init__(self, value: bool) -> None:
        self.value, self.asked = value, False

    def __bool__(self) -> bool:
        self.asked = True
        return self.value


class _Arguments:
    """The arguments of a call, and the formals that replace them.

    Args:
        fe: The frontend.
    """

    def __init__(self, fe: Frontend) -> None:
        self._b = fe.b
        self._of_actual: dict[Ref, Ref] = {}
        self.formals: list[Ref] = []
        self.actuals: list[Ref] = []
        self.views: list[_Writable] = []
        self.key: list[Hashable] = []
        """Everything that the body depends on, flat, as a cache key."""

    def formal(self, v: Any) -> Any:
        """Replaces run-time values by formals.

        Raises:
            _UnknownError: The value holds memory of the caller, or is of an unknown kind.
        """
        key = self.key
        if isinstance(v, Ref):
            return self._formal_of(v)
        if isinstance(v, Const):
            # texts, as True equals 1 and -0.0 equals 0.0
            key.append((Const, repr(v.value), v.type))
            return v
        if isinstance(v, View) and v.memory is None:
            key.append((View, v.dtype, v.rank))
            writable = _Writable(bool(v.writable))
            self.views.append(writable)
            base = self.formal(v.base)
            shape = tuple([self.formal(size) for size in v.shape])
            strides = tuple([self.formal(stride) for stride in v.strides])
            return View(base, v.dtype, shape, strides, v.name, cast(bool, writable))
        if isinstance(v, tuple):
            key.append((type(v), len(v)))
            return tuple_like(v, [self.formal(item) for item in v])
        if isinstance(v, ContextValue):
            key.append(ContextValue)
            return v
        if is_number(v):
            key.append((type(v), repr(v)))
            return v
        if isinstance(v, (Runtime, SlotVar, Closure)):
            raise _UnknownError
        if isinstance(v, InlineFunction) and not _is_fixed(v):
            raise _UnknownError
        try:
            hash(v)
        except TypeError:
            raise _UnknownError from None
        key.append((type(v), v))
        return v

    def may_use(self, body: _Body) -> bool:
        """Whether a body with an equal key writes to no view that is read-only in this call."""
        views = zip(self.views, body.writable, strict=True)
        return all(view.value or not needed for view, needed in views)

    def _formal_of(self, actual: Ref) -> Ref:
        """The name that stands for a run-time argument, with its type and interval; adds both to the key."""
        formal = self._of_actual.get(actual)
        if formal is not None:
            # the position of its first use: f(x, x) and f(x, y) have different bodies
            self.key.append(formal.id - self.formals[0].id)
            return formal
        b = self._b
        formal = b.formal(actual.type)
        facts = None
        if actual.type.dtype.is_integer:
            low, high = interval(b, actual)
            facts = b.intervals[formal.id] = _rounded_bound(low), _rounded_bound(high)
            if is_nonzero(b, actual):
                b.nonzero_formals.add(formal.id)
                facts = (*facts, "nonzero")
        self._of_actual[actual] = formal
        self.formals.append(formal)
        self.actuals.append(actual)
        self.key.append((Ref, actual.type, facts))
        return formal


def _rounded_bound(limit: int) -> int:
    """A bound of an interval, rounded outwards to a power of two if it exceeds every size in a program."""
    # exact bounds that large would only divide equal calls among several bodies
    if abs(limit) < _UNLIKELY:
        return limit
    power = 1 << (abs(limit) - 1).bit_length()
    return min(power, _MAX_I64) if limit > 0 else -power


_UNLIKELY = 1 << 40
_MAX_I64 = (1 << 63) - 1


class _Copy:
    """Copies a body with new numbers, and with arguments in place of formals.

    Args:
        body: The body.
        first: The number before its first value.
        level: The level of its outermost values.
        actuals: The values that replace the formals.
        line: The source line of its statements.
    """

    def __init__(
        self, body: _Body, first: int, level: int, actuals: Iterable[Ref], line: int
    ) -> None:
        self._refs: dict[Ref, Ref] = dict(zip(body.formals, actuals, strict=True))
        self._shift = first - body.first
        self._deeper = level - body.level
        self._line = line
        self.uses_others = False
        """Whether it uses caller's values that are not arguments, or contains outlined bodies."""

    def _new_ref(self, ref: Ref) -> Ref:
        copy = self._refs[ref] = Ref(ref.id + self._shift, ref.type, ref.level + self._deeper)
        return copy

    def _atom(self, a: Atom) -> Atom:
        """The copy of an operand; a name that the copy does not define stays, and is noted in `uses_others`."""
        if isinstance(a, Const):
            return a
        copy = self._refs.get(a)
        if copy is None:
            self.uses_others = True
            return a
        return copy

    def _atoms(self, atoms: Iterable[Atom]) -> tuple[Atom, ...]:
        return tuple([self._atom(a) for a in atoms])

    def statements(self, body: Iterable[Stmt]) -> tuple[Stmt, ...]:
        """A copy of statements, in their order."""
        return tuple([_COPIES[s.__class__](self, s) for s in body])

    def let_(self, s: Let) -> Let:
        args = self._atoms(s.args)
        # the attribute of a read is its slot, which is numbered too
        attr = s.attr + self._shift if s.op == "read" else s.attr
        return Let(self._new_ref(s.ref), s.op, args, attr, self._line)

    def effect_(self, s: Effect) -> Effect:
        return Effect(s.op, self._atoms(s.args), s.attr, self._line)

    def alloc_(self, s: Alloc) -> Alloc:
        return Alloc(s.slot + self._shift, s.type, s.count)

    def assign_(self, s: Assign) -> Assign:
        slot = s.slot + self._shift
        return Assign(slot, self._atom(s.index), self._atom(s.value), self._line)

    def store_(self, s: Store) -> Store:
        mask = None if s.mask is None else self._atom(s.mask)
        return Store(self._atom(s.pointer), self._atom(s.value), mask, self._line)

    def for_(self, s: For) -> For:
        start, stop = self._atom(s.start), self._atom(s.stop)
        var = self._new_ref(s.var)
        return For(var, start, stop, s.step, self.statements(s.body), self._line, s.max_iterations)

    def while_(self, s: While) -> While:
        head = self.statements(s.head)
        return While(head, self._atom(s.cond), self.statements(s.body), self._line)

    def if_(self, s: If) -> If:
        then, orelse = self.statements(s.then), self.statements(s.orelse)
        return If(self._atom(s.cond), then, orelse, self._line)

    def block_(self, s: Block) -> Block:
        # a nested outlined body has its own numbers, so it is copied only within the place of its compilation
        self.uses_others |= s.outlined
        return Block(s.label + self._shift, self.statements(s.body), s.outlined, s.shift)

    def leave_(self, s: Leave) -> Leave:
        return Leave(s.label + self._shift)

    def parallel_(self, s: Parallel) -> Parallel:
        total, grain = self._atom(s.total), self._atom(s.grain)
        begin, end = self._new_ref(s.begin), self._new_ref(s.end)
        body = self.statements(s.body)
        return Parallel(begin, end, total, grain, s.multiple, s.phase, body, self._line)

    def barrier_(self, s: Barrier) -> Barrier:
        return Barrier(self._line)

    def raise_(self, s: Raise) -> Raise:
        return Raise(s.message, self._atoms(s.values), self._line)


_COPIES: dict[type[Any], Callable[[_Copy, Any], Any]] = {
    Let: _Copy.let_,
    Effect: _Copy.effect_,
    Alloc: _Copy.alloc_,
    Assign: _Copy.assign_,
    Store: _Copy.store_,
    For: _Copy.for_,
    While: _Copy.while_,
    If: _Copy.if_,
    Block: _Copy.block_,
    Leave: _Copy.leave_,
    Parallel: _Copy.parallel_,
    Barrier: _Copy.barrier_,
    Raise: _Copy.raise_,
}
