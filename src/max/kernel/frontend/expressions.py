"""Evaluates expressions: what is known at compile time becomes a Python value, the rest becomes IR."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any: what they are is what these functions find out

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from max.kernel.errors import (
    KernelError,
    KernelIndexError,
    KernelNameError,
    KernelSyntaxError,
    KernelTypeError,
    KernelValueError,
)
from max.kernel.frontend.arithmetic import (
    Runtime,
    SlotVar,
    Suppressed,
    Type_of,
    describe,
    is_number,
    is_pure,
    is_record,
    is_runtime,
    tuple_like,
)
from max.kernel.frontend.builder import Scope
from max.kernel.frontend.views import METHODS, Host, Tile, View, attribute, subscript, tile_get
from max.kernel.ir.nodes import Const, If, Ref
from max.kernel.language import lang
from max.kernel.language.source import FunctionSource, InlineFunction
from max.kernel.types import ScalarType, Type

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and",
    ast.BitOr: "or",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "shr",
    ast.Pow: "pow",
}
_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "eq",
    ast.NotEq: "ne",
    ast.Lt: "lt",
    ast.LtE: "le",
    ast.Gt: "gt",
    ast.GtE: "ge",
}
_UNARY: dict[type[ast.unaryop], str] = {ast.USub: "neg", ast.UAdd: "pos", ast.Invert: "not"}

Handler = Callable[..., Any]
_MAX_UNROLL = 65536


@dataclass(frozen=True, slots=True)
class Unbound:
    """A name that has no value here, and why."""

    reason: str


class Poison:
    """The value of something whose error was reported."""

    def __repr__(self) -> str:
        return "an erroneous value"


POISON = Poison()


@dataclass(frozen=True, slots=True, eq=False)
class Method(Runtime):
    """A method of a view or of the context, before it is called."""

    fn: Handler
    owner: Any

    def __str__(self) -> str:
        return "a method"


@dataclass(frozen=True, slots=True, eq=False)
class Closure(Runtime):
    """A function defined inside a kernel, or a lambda."""

    source: FunctionSource
    env: dict[str, Any]

    def __str__(self) -> str:
        return f"the function {self.source.name}"


@dataclass(frozen=True, slots=True)
class RangeValue:
    """``range(…)``: a run-time loop, unless it is unrolled."""

    start: Any
    stop: Any
    step: int

    def static(self) -> range | None:
        """The range where its bounds are known."""
        bounds = (self.start, self.stop)
        return range(*bounds, self.step) if all(isinstance(v, int) for v in bounds) else None


@dataclass(eq=False)
class Frame:
    """A function that is being compiled."""

    source: FunctionSource
    env: dict[str, Any]
    depth: int
    label: int | None = None  # the block that an early return leaves
    leaves: bool = False  # a return stands inside of run-time control flow
    results: list[tuple[Any, Scope]] = field(default_factory=list[Any])
    outer_env: Mapping[str, Any] | None = None


class Expressions(Host):
    """Expressions of the kernel language."""

    frame: Frame
    depth: int

    def __init__(self) -> None:
        super().__init__()
        self._expressions: dict[type[ast.AST], Callable[[Any], Any]] = {
            ast.Constant: lambda n: n.value,
            ast.Name: self._name,
            ast.BinOp: self._binop,
            ast.UnaryOp: self._unaryop,
            ast.BoolOp: self._boolop,
            ast.Compare: self._compare,
            ast.Call: self._call,
            ast.Attribute: self._attribute,
            ast.Subscript: self._subscript,
            ast.Tuple: self._tuple,
            ast.List: self._tuple,
            ast.IfExp: self._ifexp,
            ast.Slice: self._slice,
            ast.Lambda: self._lambda,
            ast.ListComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.NamedExpr: self._walrus,
            ast.JoinedStr: self._fstring,
            ast.Dict: self._dict,
        }

    # ***** hooks of the statements *****
    def bind(self, name: str, value: Any) -> None:
        """Assigns a local variable."""
        raise NotImplementedError

    def call_inline(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Inlines a function."""
        raise NotImplementedError

    handlers: Mapping[Any, Handler]

    # ***** expressions *****
    def expr(self, node: ast.expr) -> Any:
        """The value of an expression."""
        visit = self._expressions.get(node.__class__)
        self.node = node
        if visit is None:
            self.fail(
                f"{type(node).__name__} is not part of the kernel language", KernelSyntaxError
            )
        return visit(node)

    def _name(self, node: ast.Name) -> Any:
        return self.lookup(node.id)

    def lookup(self, name: str) -> Any:
        """The value of a name: local, enclosing, global, built in."""
        frame = self.frame
        env = frame.env
        if name in env:
            value = env[name]
        elif frame.outer_env is not None and name in frame.outer_env:
            value = frame.outer_env[name]
        else:
            source = frame.source
            if name in source.closure:
                return source.closure[name]
            if name in source.globals:
                return source.globals[name]
            if name in _BUILTINS:
                return _BUILTINS[name]
            self.fail(f"name {name!r} is not defined", KernelNameError)
        kind = value.__class__
        if kind is SlotVar:
            return self.b.read(value.slot, value.type)
        if kind is Unbound:
            self.fail(f"{name!r} has no value here: {value.reason}", KernelNameError)
        if kind is Poison:
            raise Suppressed
        return value

    def _tuple(self, node: ast.Tuple | ast.List) -> tuple[Any, ...]:
        items: list[Any] = []
        for item in node.elts:
            if isinstance(item, ast.Starred):
                items.extend(self.sequence(self.expr(item.value), item))
            else:
                items.append(self.expr(item))
        return tuple(items)

    def sequence(self, value: Any, node: ast.AST) -> tuple[Any, ...]:
        """The items of something that is a sequence at compile time."""
        self.node = node
        if isinstance(value, RangeValue):
            static = value.static()
            if static is None:
                self.fail("the bounds of a range that is unrolled are known at compile time")
            value = static
        if (
            isinstance(value, range)
            and value
            and abs(value[-1] - value[0]) // abs(value.step) >= _MAX_UNROLL
        ):
            self.fail(
                f"{value} has more than {_MAX_UNROLL} items to unroll; use a run-time loop",
                KernelValueError,
            )
        if isinstance(value, (tuple, list, range, dict, zip, enumerate, reversed, str, frozenset)):
            return tuple(value)
        self.fail(f"expected a sequence known at compile time, got {describe(value)}")

    def _dict(self, node: ast.Dict) -> dict[Any, Any]:
        return {
            self.expr(k): self.expr(v)
            for k, v in zip(node.keys, node.values, strict=True)
            if k is not None
        }

    def _binop(self, node: ast.BinOp) -> Any:
        left = self.expr(node.left)
        right = self.expr(node.right)
        self.node = node
        if isinstance(left, Runtime) or isinstance(right, Runtime):
            self._operator_error(left, right)
        return self.binary(_BINARY[type(node.op)], left, right)

    def _operator_error(self, *values: Any) -> NoReturn:
        for v in values:
            if isinstance(v, View):
                hint = f"{v.name}[…] or {v.name}.load(…) gives its elements"
                self.fail(f"arithmetic does not take {describe(v)}; {hint}")
        self.fail(f"arithmetic does not take {' and '.join(describe(v) for v in values)}")

    def _unaryop(self, node: ast.UnaryOp) -> Any:
        value = self.expr(node.operand)
        self.node = node
        if isinstance(node.op, ast.Not):
            value = self.truth(value)
            return self.b.op("not", (value,), value.type) if isinstance(value, Ref) else not value
        if isinstance(value, Runtime):
            self._operator_error(value)
        return self.unary(_UNARY[type(node.op)], value)

    def _boolop(self, node: ast.BoolOp) -> Any:
        op = "and" if isinstance(node.op, ast.And) else "or"
        return self._short_circuit(op, node.values, node)

    def _short_circuit(self, op: str, nodes: list[ast.expr], node: ast.AST) -> Any:
        first = self.expr(nodes[0])
        self.node = nodes[0]
        if not is_runtime(first):  # as in Python, the value decides and is the result
            if len(nodes) == 1 or bool(first) is (op == "or"):
                return first
            return self._short_circuit(op, nodes[1:], node)
        cond = self.truth(first)
        if len(nodes) == 1:
            return cond
        if not isinstance(cond, Ref):  # a constant, or a tuple of run-time values
            return cond if cond is (op == "or") else self._short_circuit(op, nodes[1:], node)
        scope = self.b.open("branch")
        try:
            rest = self.truth(self._short_circuit(op, nodes[1:], node))
        finally:
            self.b.close()
        self.node = node
        if is_pure(scope.body):
            self.b.splice(scope)
            return self.binary(op, cond, rest)
        slot = self.b.alloc(cond.type)
        self.b.assign(slot, cond)
        with self.b.reopened(scope):
            self.b.assign(slot, self.coerce(rest, self.type_of(True)))
        run = cond if op == "and" else self.b.op("not", (cond,), cond.type)
        self.b.emit(If(run, tuple(scope.body), (), self.b.line))
        return self.b.read(slot, self.type_of(True))

    def _compare(self, node: ast.Compare) -> Any:
        left = self.expr(node.left)
        result: Any = True
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.expr(right_node)
            self.node = node
            if isinstance(op, (ast.Is, ast.IsNot)):
                step: Any = (left is right) is isinstance(op, ast.Is)
            elif isinstance(op, (ast.In, ast.NotIn)):
                if is_runtime(left) or is_runtime(right):
                    self.fail("'in' is for values known at compile time")
                step = (left in right) is isinstance(op, ast.In)
            else:
                kind = _COMPARE[type(op)]
                if isinstance(left, tuple) or isinstance(right, tuple):
                    step = self._compare_tuples(kind, left, right)
                else:
                    step = self.binary(kind, left, right)
            result = (
                step
                if result is True
                else self.binary("and", result, step)
                if result is not False
                else False
            )
            left = right
        return result

    def _compare_tuples(self, kind: str, left: Any, right: Any) -> Any:
        if kind not in ("eq", "ne") or not (isinstance(left, tuple) and isinstance(right, tuple)):
            return self._at_compile_time(kind, left, right)
        if len(left) != len(right):
            return kind == "ne"
        equal: Any = True
        for a, b in zip(left, right, strict=True):
            step = self.binary("eq", a, b)
            equal = (
                step
                if equal is True
                else self.binary("and", equal, step)
                if equal is not False
                else False
            )
        return (
            equal
            if kind == "eq"
            else self.b.op("not", (equal,), equal.type)
            if isinstance(equal, Ref)
            else not equal
        )

    def _ifexp(self, node: ast.IfExp) -> Any:
        cond = self.expr(node.test)
        self.node = node.test
        cond = self.truth(cond)
        if not isinstance(cond, Ref):
            return self.expr(node.body if cond else node.orelse)
        arms: list[tuple[Any, Scope]] = []
        for arm in (node.body, node.orelse):
            scope = self.b.open("branch")
            try:
                arms.append((self.expr(arm), scope))
            finally:
                self.b.close()
        (a, then), (b, orelse) = arms
        self.node = node
        if is_pure(then.body) and is_pure(orelse.body) and not isinstance(a, (tuple, Runtime)):
            self.b.splice(then)
            self.b.splice(orelse)
            x, y = self.together("'if … else'", a, b)
            return self.select(cond, x, y)
        merged, finish = self.join(a, then, b, orelse, "the branches of 'if … else'")
        self.b.emit(If(cond, tuple(then.body), tuple(orelse.body), self.b.line))
        return finish() if finish is not None else merged

    def select(self, cond: Any, x: Any, y: Any) -> Any:
        """``k.select`` on operands of one type."""
        return self.b.op("select", (cond, x, y), x.type)

    def join(
        self, a: Any, then: Scope, b: Any, orelse: Scope, what: str
    ) -> tuple[Any, Callable[[], Any] | None]:
        """Merges two values at the end of two bodies that are not emitted yet.

        Gives the value, or (where it needs a slot) a function that reads it after the `If` was emitted.
        """
        if a is b or (
            not is_runtime(a) and not is_runtime(b) and type(a) is type(b) and _same(a, b)
        ):
            return a, None
        if isinstance(a, tuple) and type(a) is type(b) and len(a) == len(b):
            parts = [self.join(x, then, y, orelse, what) for x, y in zip(a, b, strict=True)]
            return None, lambda: tuple_like(a, (v if read is None else read() for v, read in parts))
        numeric = (Ref, Const, SlotVar)
        if not all(isinstance(v, numeric) or is_number(v) for v in (a, b)):
            if isinstance(a, Poison) or isinstance(b, Poison):
                return POISON, None
            return Unbound(
                f"{what} give {describe(a)} and {describe(b)}, which cannot be chosen at run time"
            ), None
        (ta, wa), (tb, wb) = (self.loose_type(v) for v in (a, b))
        common = self.unify(ta, wa, tb, wb)
        if common is None:
            return Unbound(
                f"{what} give {describe(a)} and {describe(b)}, which have no common type"
            ), None
        slot = self.b.alloc(common)
        for value, scope in ((a, then), (b, orelse)):
            with self.b.reopened(scope):
                self.b.assign(slot, self.coerce(value, common))
        return None, lambda: self.b.read(slot, common)

    def loose_type(self, v: Any) -> tuple[Type, bool]:
        """A number's type, and whether it is only a literal's."""
        if isinstance(v, SlotVar):
            return v.type, v.weak
        return self.type_of(v), not isinstance(v, (Ref, Const))

    def _slice(self, node: ast.Slice) -> slice:
        start, stop, step = (
            None if n is None else self.expr(n) for n in (node.lower, node.upper, node.step)
        )
        return slice(start, stop, step)

    def _subscript(self, node: ast.Subscript) -> Any:
        value = self.expr(node.value)
        index = self.expr(node.slice)
        self.node = node
        kind = value.__class__
        if kind is View:
            return subscript(self, value, index)
        if kind is Tile:
            return tile_get(self, value, index)
        if isinstance(value, (Ref, Const)):
            return self.extract(value, index)
        if isinstance(index, Const):
            index = index.value
        if is_runtime(index):
            self.fail(
                f"{describe(value)} is indexed by values known at compile time; use a tile or a view"
            )
        try:
            return value[index]
        except (IndexError, KeyError, TypeError) as error:
            self.fail(f"{describe(value)}[{index!r}]: {error}", KernelIndexError)

    def extract(self, v: Any, index: Any) -> Any:
        """``v[i]``: one lane."""
        if not v.type.is_vector:
            self.fail(f"{describe(v)} has no lanes to index")
        i = self.as_index(index)
        if isinstance(i, int) and not 0 <= i < v.type.width:
            self.fail(f"lane {i} out of range for {describe(v)}", KernelIndexError)
        return self.b.op("extract", (v, self.b.index(i)), Type_of(v.type.dtype, 0))

    def _attribute(self, node: ast.Attribute) -> Any:
        value = self.expr(node.value)
        self.node = node
        name = node.attr
        if isinstance(value, View):
            method = METHODS.get(name)
            if method is not None:
                return Method(method, value)
            found = attribute(self, value, name)
        elif isinstance(value, (Ref, Const)):
            known = {
                "dtype": value.type.dtype,
                "width": max(value.type.width, 1),
                "is_vector": value.type.is_vector,
            }
            found = known.get(name)
        elif isinstance(value, Tile):
            found = {
                "dtype": value.type.dtype,
                "shape": value.shape,
                "width": value.type.width,
            }.get(name)
        elif isinstance(value, Runtime):
            found = self.context_attribute(value, name)
        else:
            try:
                return getattr(value, name)
            except (AttributeError, TypeError) as error:  # a record's property may compute
                self.fail(f"{describe(value)}: {error}", KernelNameError)
        if found is None:
            self.fail(f"{describe(value)} has no attribute {name!r}", KernelNameError)
        return found

    def context_attribute(self, value: Any, name: str) -> Any:
        """An attribute of the context."""
        raise NotImplementedError

    def _lambda(self, node: ast.Lambda) -> Closure:
        frame = self.frame
        return Closure(
            FunctionSource(node, frame.source.file, frame.source.globals, frame.source.closure),
            frame.env,
        )

    def _walrus(self, node: ast.NamedExpr) -> Any:
        value = self.expr(node.value)
        self.node = node
        self.bind(node.target.id, value)
        return self.lookup(node.target.id)

    def _fstring(self, node: ast.JoinedStr) -> str:
        text, values = self.format_parts(node)
        if values:
            self.node = node
            self.fail("a string holds values known at compile time only")
        return text.format()

    def format_parts(self, node: ast.JoinedStr) -> tuple[str, list[Any]]:
        """An f-string as a format text and the run-time values in it."""
        text, values = "", list[Any]()
        for part in node.values:
            if isinstance(part, ast.Constant):
                text += str(part.value).replace("{", "{{").replace("}", "}}")
            elif isinstance(part, ast.FormattedValue):
                value = self.expr(part.value)
                if isinstance(value, (Ref, Const)):
                    text += "{}"
                    values.append(value)
                else:
                    text += str(value).replace("{", "{{").replace("}", "}}")
        return text, values

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp) -> tuple[Any, ...]:
        if len(node.generators) != 1:
            self.fail("a comprehension has one 'for'", KernelSyntaxError)
        generator = node.generators[0]
        items: list[Any] = []
        saved = dict(self.frame.env)
        for item in self.sequence(self.expr(generator.iter), generator.iter):
            self.bind_target(generator.target, item)
            for test in generator.ifs:
                cond = self.truth(self.expr(test))
                if isinstance(cond, Ref):
                    self.fail("the condition of a comprehension is known at compile time")
                if not cond:
                    break
            else:
                items.append(self.expr(node.elt))
        self.frame.env.clear()
        self.frame.env.update(saved)
        return tuple(items)

    def bind_target(self, target: ast.expr, value: Any) -> None:
        """Assigns to a target of an assignment or loop."""
        raise NotImplementedError

    # ***** calls *****
    def _call(self, node: ast.Call) -> Any:
        function = self.expr(node.func)
        args: list[Any] = []
        for arg in node.args:
            if arg.__class__ is ast.Starred:
                args.extend(self.sequence(self.expr(arg.value), arg))  # type: ignore[attr-defined]
            elif arg.__class__ is ast.JoinedStr and function in (
                _BUILTINS["print"],
                lang.print,
            ):
                text, values = self.format_parts(arg)  # type: ignore[arg-type]
                args += [text, *values]
            else:
                args.append(self.expr(arg))
        kwargs: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.expr(keyword.value)
            if keyword.arg is None:
                kwargs.update(value)
            else:
                kwargs[keyword.arg] = value
        self.node = node
        return self.call(function, args, kwargs)

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Calls something that is known at compile time."""
        kind = function.__class__
        if kind is Method:
            return self._handled(function.fn, (function.owner, *args), kwargs)
        if kind is InlineFunction or kind is Closure:
            return self.call_inline(function, args, kwargs)
        if kind is ScalarType:
            if len(args) != 1 or kwargs:
                self.fail(f"k.{function.name}(x) takes one value")
            if isinstance(args[0], Runtime):
                self.fail(f"cannot convert {describe(args[0])} to {function.name}")
            return self.cast(args[0], function)
        handler = self.handlers.get(function) if _hashable(function) else None
        if handler is not None:
            return self._handled(handler, args, kwargs)
        if isinstance(function, (Ref, Const, Runtime)):
            self.fail(f"{describe(function)} cannot be called")
        owner = getattr(function, "__self__", None)  # of a bound method
        holds = is_record(function) or (is_record(owner) and function.__name__ == "_replace")
        runtime = [v for v in (*args, *kwargs.values()) if is_runtime(v)]
        if runtime and not holds:
            name = getattr(function, "__qualname__", repr(function))
            self.fail(
                f"{name} is a Python function and cannot take {describe(runtime[0])}; mark it @k.inline"
            )
        try:
            return function(*args, **kwargs)
        except KernelError:
            raise
        except (
            Exception
        ) as error:  # the function is the user's: whatever it raises belongs to this call
            self.fail(
                f"{getattr(function, '__qualname__', function)}: {type(error).__name__}: {error}",
                KernelValueError,
            )

    def _handled(self, handler: Handler, args: Any, kwargs: dict[str, Any]) -> Any:
        try:
            return handler(self, *args, **kwargs)
        except TypeError as error:
            if isinstance(error, KernelError):
                raise
            try:
                inspect.signature(handler).bind(self, *args, **kwargs)
            except TypeError as wrong:
                self.fail(f"{handler.__name__.removeprefix('emit_')}: {wrong}")
            self.fail(f"{handler.__name__.removeprefix('emit_')}: {error}", KernelTypeError)


def _hashable(v: Any) -> bool:
    try:
        hash(v)
    except TypeError:
        return False
    return True


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a is b
    return bool(a == b)


_ALLOWED_BUILTINS = (
    "abs all any bool dict enumerate float int isinstance len list max min pow print range reversed round str sum tuple zip "
    "True False None ValueError IndexError TypeError RuntimeError OverflowError ZeroDivisionError ArithmeticError "
    "KeyError NotImplementedError Exception slice getattr hasattr sorted type divmod AssertionError MemoryError LookupError"
).split()
_BUILTINS: dict[str, Any] = {name: getattr(builtins, name) for name in _ALLOWED_BUILTINS}

__all__ = ["KernelTypeError"]
