"""Expressions: values known at compile time are Python objects, others become IR."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
import builtins
from types import ModuleType
from typing import Any, NoReturn

from max.kernel.errors import KernelIndexError, KernelNameError, KernelSyntaxError
from max.kernel.frontend.arithmetic import at_compile_time, binary, truth, unary
from max.kernel.frontend.builder import Scope
from max.kernel.frontend.conversions import coerce, extract, promote_together, sequence, type_of
from max.kernel.frontend.functions.context import context_attribute
from max.kernel.frontend.merging import is_pure, join
from max.kernel.frontend.state import ExpressionVisitor, Frontend, Suppressed
from max.kernel.frontend.syntax.assignment import bind, bind_target
from max.kernel.frontend.syntax.calls import call_node
from max.kernel.frontend.syntax.formatting import format_parts
from max.kernel.frontend.values import (
    Closure,
    Method,
    Poison,
    Runtime,
    SlotVar,
    Unbound,
    describe,
    is_runtime,
)
from max.kernel.frontend.views.methods import VIEW_METHODS, attribute, subscript
from max.kernel.frontend.views.tiles import Tile, tile_get
from max.kernel.frontend.views.views import View
from max.kernel.ir.nodes import Const, If, Ref
from max.kernel.language.source import FunctionSource

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


def _name(fe: Frontend, node: ast.Name) -> Any:
    return lookup(fe, node.id)


def lookup(fe: Frontend, name: str) -> Any:
    """Looks a name up: local, enclosing, global, then built in."""
    frame = fe.frame
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
        fe.fail(f"name {name!r} is not defined", KernelNameError)
    kind = value.__class__
    if kind is SlotVar:
        return fe.b.read(value.slot, value.type)
    if kind is Unbound:
        fe.fail(f"{name!r} has no value here: {value.reason}", KernelNameError)
    if kind is Poison:
        raise Suppressed
    return value


def _tuple(fe: Frontend, node: ast.Tuple | ast.List) -> tuple[Any, ...]:
    """The items of a tuple or list; starred items are expanded."""
    items: list[Any] = []
    for item in node.elts:
        if isinstance(item, ast.Starred):
            items.extend(sequence(fe, fe.expr(item.value), item))
        else:
            items.append(fe.expr(item))
    return tuple(items)


def _dict(fe: Frontend, node: ast.Dict) -> dict[Any, Any]:
    return {
        fe.expr(k): fe.expr(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None
    }


def _binop(fe: Frontend, node: ast.BinOp) -> Any:
    """A binary operator."""
    left = fe.expr(node.left)
    right = fe.expr(node.right)
    fe.node = node
    if isinstance(left, Runtime) or isinstance(right, Runtime):
        _operator_error(fe, left, right)
    return binary(fe, _BINARY[type(node.op)], left, right)


def _operator_error(fe: Frontend, *values: Any) -> NoReturn:
    for v in values:
        if isinstance(v, View):
            hint = f"{v.name}[…] or {v.name}.load(…) gives its elements"
            fe.fail(f"arithmetic does not take {describe(v)}; {hint}")
    fe.fail(f"arithmetic does not take {' and '.join(describe(v) for v in values)}")


def _unaryop(fe: Frontend, node: ast.UnaryOp) -> Any:
    """A unary operator; `not` tests the truth of its operand."""
    value = fe.expr(node.operand)
    fe.node = node
    if isinstance(node.op, ast.Not):
        value = truth(fe, value)
        return fe.b.op("not", (value,), value.type) if isinstance(value, Ref) else not value
    if isinstance(value, Runtime):
        _operator_error(fe, value)
    return unary(fe, _UNARY[type(node.op)], value)


def _boolop(fe: Frontend, node: ast.BoolOp) -> Any:
    op = "and" if isinstance(node.op, ast.And) else "or"
    return _short_circuit(fe, op, node.values, node)


def _short_circuit(fe: Frontend, op: str, nodes: list[ast.expr], node: ast.AST) -> Any:
    """`and` or `or` of the nodes; operands after a run-time condition are evaluated in a branch."""
    first = fe.expr(nodes[0])
    fe.node = nodes[0]
    if not is_runtime(first):  # as in Python, the deciding operand is the result
        if len(nodes) == 1 or bool(first) is (op == "or"):
            return first
        return _short_circuit(fe, op, nodes[1:], node)
    cond = truth(fe, first)
    if len(nodes) == 1:
        return cond
    if not isinstance(cond, Ref):  # a constant, or a tuple of run-time values
        return cond if cond is (op == "or") else _short_circuit(fe, op, nodes[1:], node)
    scope = fe.b.open("branch")
    try:
        right = truth(fe, _short_circuit(fe, op, nodes[1:], node))
    finally:
        fe.b.close()
    fe.node = node
    # operands without effects are evaluated unconditionally, which is cheaper than a branch
    if is_pure(scope.body):
        fe.b.splice(scope)
        return binary(fe, op, cond, right)
    # the right operand runs only where the left one does not decide
    slot = fe.b.alloc(cond.type)
    fe.b.assign(slot, cond)
    with fe.b.reopen(scope):
        fe.b.assign(slot, coerce(fe, right, type_of(fe, True)))
    run = cond if op == "and" else fe.b.op("not", (cond,), cond.type)
    fe.b.emit(If(run, tuple(scope.body), (), fe.b.line))
    return fe.b.read(slot, type_of(fe, True))


def _compare(fe: Frontend, node: ast.Compare) -> Any:
    """A chain of comparisons, joined by `and`."""
    left = fe.expr(node.left)
    result: Any = True
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = fe.expr(right_node)
        fe.node = node
        if isinstance(op, (ast.Is, ast.IsNot)):
            step: Any = (left is right) is isinstance(op, ast.Is)
        elif isinstance(op, (ast.In, ast.NotIn)):
            if is_runtime(left) or is_runtime(right):
                fe.fail("'in' is for values known at compile time")
            step = (left in right) is isinstance(op, ast.In)
        else:
            kind = _COMPARE[type(op)]
            if isinstance(left, tuple) or isinstance(right, tuple):
                step = _compare_tuples(fe, kind, left, right)
            else:
                step = binary(fe, kind, left, right)
        result = (
            step
            if result is True
            else binary(fe, "and", result, step)
            if result is not False
            else False
        )
        left = right
    return result


def _compare_tuples(fe: Frontend, comparison: str, left: Any, right: Any) -> Any:
    """Equality of two tuples, item by item; other comparisons are for compile-time values."""
    if comparison not in ("eq", "ne") or not (isinstance(left, tuple) and isinstance(right, tuple)):
        return at_compile_time(fe, comparison, left, right)
    if len(left) != len(right):
        return comparison == "ne"
    equal: Any = True
    for a, b in zip(left, right, strict=True):
        step = binary(fe, "eq", a, b)
        equal = (
            step
            if equal is True
            else binary(fe, "and", equal, step)
            if equal is not False
            else False
        )
    return (
        equal
        if comparison == "eq"
        else fe.b.op("not", (equal,), equal.type)
        if isinstance(equal, Ref)
        else not equal
    )


def _ifexp(fe: Frontend, node: ast.IfExp) -> Any:
    """`a if condition else b`: one arm, a select of pure arms, or a branch."""
    cond = fe.expr(node.test)
    fe.node = node.test
    cond = truth(fe, cond)
    if not isinstance(cond, Ref):
        return fe.expr(node.body if cond else node.orelse)
    arms: list[tuple[Any, Scope]] = []
    for arm in (node.body, node.orelse):
        scope = fe.b.open("branch")
        try:
            arms.append((fe.expr(arm), scope))
        finally:
            fe.b.close()
    (a, then), (b, orelse) = arms
    fe.node = node
    # a select costs less than a branch, and pure arms may both run
    if is_pure(then.body) and is_pure(orelse.body) and not isinstance(a, (tuple, Runtime)):
        fe.b.splice(then)
        fe.b.splice(orelse)
        x, y = promote_together(fe, "'if … else'", a, b)
        return fe.b.op("select", (cond, x, y), x.type)
    merged, finish = join(fe, a, then, b, orelse, "the branches of 'if … else'")
    fe.b.emit(If(cond, tuple(then.body), tuple(orelse.body), fe.b.line))
    return finish() if finish is not None else merged


def _slice(fe: Frontend, node: ast.Slice) -> slice:
    start, stop, step = (
        None if n is None else fe.expr(n) for n in (node.lower, node.upper, node.step)
    )
    return slice(start, stop, step)


def _subscript(fe: Frontend, node: ast.Subscript) -> Any:
    """The element of a view, tile, vector or compile-time sequence at an index."""
    value = fe.expr(node.value)
    index = fe.expr(node.slice)
    fe.node = node
    kind = value.__class__
    if kind is View:
        return subscript(fe, value, index)
    if kind is Tile:
        return tile_get(fe, value, index)
    if isinstance(value, (Ref, Const)):
        return extract(fe, value, index)
    if isinstance(index, Const):
        index = index.value
    if is_runtime(index):
        fe.fail(
            f"{describe(value)} is indexed by values known at compile time; use a tile or a view"
        )
    try:
        return value[index]
    except (IndexError, KeyError, TypeError) as error:
        fe.fail(f"{describe(value)}[{index!r}]: {error}", KernelIndexError)


def _attribute(fe: Frontend, node: ast.Attribute) -> Any:
    """An attribute of a view, a value, the context or a compile-time object."""
    value = fe.expr(node.value)
    fe.node = node
    name = node.attr
    if value.__class__ is ModuleType:  # most often: the language's own names
        return _python_attribute(fe, value, name)
    if isinstance(value, View):
        method = VIEW_METHODS.get(name)
        if method is not None:
            return Method(method, value)
        result = attribute(fe, value, name)
    elif isinstance(value, (Ref, Const)):
        lane_attributes = {
            "dtype": value.type.dtype,
            "width": max(value.type.width, 1),  # a scalar counts as one lane
            "is_vector": value.type.is_vector,
        }
        result = lane_attributes.get(name)
    elif isinstance(value, Tile):
        result = {
            "dtype": value.type.dtype,
            "shape": value.shape,
            "width": value.type.width,
        }.get(name)
    elif isinstance(value, Runtime):
        result = context_attribute(fe, value, name)
    else:
        return _python_attribute(fe, value, name)
    if result is None:
        fe.fail(f"{describe(value)} has no attribute {name!r}", KernelNameError)
    return result


def _python_attribute(fe: Frontend, value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except (AttributeError, TypeError) as error:  # TypeError: from the body of a record's property
        fe.fail(f"{describe(value)}: {error}", KernelNameError)


def _lambda(fe: Frontend, node: ast.Lambda) -> Closure:
    frame = fe.frame
    return Closure(
        FunctionSource(node, frame.source.file, frame.source.globals, frame.source.closure),
        frame.env,
    )


def _walrus(fe: Frontend, node: ast.NamedExpr) -> Any:
    value = fe.expr(node.value)
    fe.node = node
    bind(fe, node.target.id, value)
    return lookup(fe, node.target.id)


def _fstring(fe: Frontend, node: ast.JoinedStr) -> str:
    text, values = format_parts(fe, node)
    if values:
        fe.node = node
        fe.fail("a string can only contain values known at compile time")
    return text.format()


def _comprehension(fe: Frontend, node: ast.ListComp | ast.GeneratorExp) -> tuple[Any, ...]:
    """The items of a comprehension with one `for`, unrolled."""
    if len(node.generators) != 1:
        fe.fail("a comprehension has one 'for'", KernelSyntaxError)
    generator = node.generators[0]
    items: list[Any] = []
    # the names of a comprehension are its own, as in Python
    saved = dict(fe.frame.env)
    for item in sequence(fe, fe.expr(generator.iter), generator.iter):
        bind_target(fe, generator.target, item)
        for test in generator.ifs:
            cond = truth(fe, fe.expr(test))
            if isinstance(cond, Ref):
                fe.fail("the condition of a comprehension must be known at compile time")
            if not cond:
                break
        else:
            items.append(fe.expr(node.elt))
    # but what `:=` binds belongs to the function around it
    bound = {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}
    kept = {name: value for name, value in fe.frame.env.items() if name in bound}
    # in place: closures hold this dict
    fe.frame.env.clear()
    fe.frame.env.update(saved | kept)
    return tuple(items)


_ALLOWED_BUILTINS = (
    "abs all any bool dict enumerate float int isinstance len list max min pow print range reversed round str sum "
    "tuple zip True False None ValueError IndexError TypeError RuntimeError OverflowError ZeroDivisionError "
    "ArithmeticError KeyError NotImplementedError Exception slice getattr hasattr sorted type divmod AssertionError "
    "MemoryError LookupError"
).split()
_BUILTINS: dict[str, Any] = {name: getattr(builtins, name) for name in _ALLOWED_BUILTINS}


EXPRESSIONS: dict[type[ast.AST], ExpressionVisitor] = {
    ast.Constant: lambda fe, node: node.value,
    ast.Name: _name,
    ast.BinOp: _binop,
    ast.UnaryOp: _unaryop,
    ast.BoolOp: _boolop,
    ast.Compare: _compare,
    ast.Call: call_node,
    ast.Attribute: _attribute,
    ast.Subscript: _subscript,
    ast.Tuple: _tuple,
    ast.List: _tuple,
    ast.IfExp: _ifexp,
    ast.Slice: _slice,
    ast.Lambda: _lambda,
    ast.ListComp: _comprehension,
    ast.GeneratorExp: _comprehension,
    ast.NamedExpr: _walrus,
    ast.JoinedStr: _fstring,
    ast.Dict: _dict,
}
