"""Specialization: compiles a kernel for argument types to kernel IR."""

# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# values of the user's program are Any

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from max._config import dump_log, flags
from max._lazy import lazy_module
from max.kernel.errors import KernelError, KernelTypeError
from max.kernel.frontend.division import MAX_SIZE
from max.kernel.frontend.inlining import annotation_in, evaluate_in
from max.kernel.frontend.state import Failure, Frame, Frontend
from max.kernel.frontend.syntax.expressions import EXPRESSIONS
from max.kernel.frontend.syntax.loops import LOOPS
from max.kernel.frontend.syntax.statements import STATEMENTS
from max.kernel.frontend.values import ContextValue, Index
from max.kernel.frontend.views.memory import memory_of
from max.kernel.frontend.views.views import View, contiguous_strides
from max.kernel.ir.nodes import (
    ArgSlot,
    Assign,
    Block,
    For,
    If,
    KernelIR,
    Let,
    Parallel,
    Stmt,
    Store,
    While,
)
from max.kernel.ir.printer import print_kernel
from max.kernel.ir.spec import verify
from max.kernel.language.parameters import OperandRecord, parameter_annotation
from max.kernel.language.source import Kernel, returns_early
from max.kernel.targets.cpu import host_target
from max.kernel.targets.target import Target
from max.kernel.types import (
    INDEX,
    POINTER,
    Access,
    Context,
    ScalarType,
    TensorSpec,
    scalar,
    scalar_type,
)

if TYPE_CHECKING:
    from max.kernel.interpreter import entry
else:
    entry = lazy_module("max.kernel.interpreter.entry")


def specialize(
    fn: Kernel,
    args: Sequence[TensorSpec | ScalarType],
    params: Mapping[str, Any] | None = None,
    target: Target | None = None,
) -> KernelIR:
    """Compiles a kernel for argument types to kernel IR.

    Args:
        fn: The kernel.
        args: One spec per run-time parameter, in order: a ``TensorSpec`` for a view, an element type for a scalar; a
            record of operands takes one per field. Further specs go to ``*extra``. The context has none.
        params: The values of the keyword-only parameters, which are known at compile time.
        target: The target; this machine by default.

    Raises:
        KernelError: The kernel does not compile for these arguments; the message has the source locations.
    """
    target = target or host_target()
    fe = _new_frontend(target, flags.MAX_KERNEL_CHECK)
    fe.name = fn.name
    slots = _Parameters(fe, fn, args, params or {}).bind()
    node = fn.source.node
    assert isinstance(node, ast.FunctionDef)
    _compile_body(fe, node)
    body = _freeze(fe.b.scopes[0].body)
    text = print_kernel(body, slots, fe.phases, fe.scratch_bytes, target.name)
    file, line = fn.location
    if fe.check:
        # messages of checks contain names and locations: kernels that differ in them must not share code
        text += "".join(f"{m.exception} {m.text}\n" for m in fe.messages)
    messages: list[Any] = list(fe.messages)
    if flags.MAX_KERNEL_INTERPRET:
        messages.append(entry.PythonMessage())
    ir = KernelIR(
        fn.symbol or fn.name,
        slots,
        fe.phases,
        fe.scratch_bytes,
        tuple(messages),
        body,
        text,
        file,
        line,
        # the origin, for the kernel in plain Python
        (fn, tuple(args), dict(params or {})),
    )
    if flags.MAX_CHECK >= 2:
        verify(ir)
    if dump := dump_log("kernels"):
        dump.info("kernel %s (%s:%d), key %s\n%s", ir.name, file, line, ir.key, text)
    return ir


def check_call(
    fn: Kernel,
    results: Sequence[TensorSpec],
    operands: Sequence[tuple[TensorSpec, bool]],
    params: Mapping[str, Any],
) -> None:
    """Checks an op's values against its kernel's signature, without compiling the kernel.

    Args:
        fn: The kernel.
        results: The results, which are the kernel's first parameters.
        operands: The operands, and whether the kernel may write to each.
        params: The values of the keyword-only parameters.

    Raises:
        KernelError: A count, a dtype, a rank or a parameter does not match, or the kernel writes to a read-only
            operand. The message has the location of the parameter.
    """
    bound = _Parameters(
        _new_frontend(host_target(), 0), fn, [*results, *(spec for spec, _ in operands)], params
    )
    bound.bind()
    try:
        for position, (p, name, access) in enumerate(bound.views):
            if position < len(results):
                if access.kind != "output":
                    bound.refuse(
                        p,
                        f"{name} is k.{_SHOWN[access.kind]}, but stands where result {position} of the op "
                        "comes: results are the first parameters, as k.Output",
                    )
            elif not operands[position - len(results)][1] and access.writable:
                bound.refuse(
                    p,
                    f"{name} is k.{_SHOWN[access.kind]}, but operand {position - len(results)} of the op is "
                    "a tensor, which cannot be written; ops.inplace_custom with a buffer fits",
                )
    except Failure as failure:
        raise failure.error_class([failure.diagnostic]) from None


def argument_roles(fn: Kernel) -> list[str | None]:
    """The access of each argument, in order: ``input``, ``output`` or ``inout`` for a tensor, None for a scalar.

    A record of operands has one for each field; the context takes no argument.

    Args:
        fn: The kernel.

    Raises:
        KernelError: A parameter has no annotation, or one that is not valid for kernels.
    """
    bound = _Parameters(_new_frontend(host_target(), 0), fn, [], {})
    bound.fe.frame = Frame(fn.source, {}, 0)
    try:
        annotations = [a for p in _positional(fn) for a in _leaves(bound.annotation(p))]
    except Failure as failure:
        raise failure.error_class([failure.diagnostic]) from None
    return [a.kind if isinstance(a, Access) else None for a in annotations if a is not Context]


def tensor_roles(fn: Kernel) -> list[str]:
    """The access of each tensor argument, in order; see `argument_roles`."""
    return [role for role in argument_roles(fn) if role is not None]


def _positional(fn: Kernel) -> list[ast.arg]:
    a = fn.source.node.args
    return [*a.posonlyargs, *a.args]


def _leaves(annotation: Any) -> list[Any]:
    return list(annotation.leaves()) if isinstance(annotation, OperandRecord) else [annotation]


_SHOWN = {"input": "Input", "output": "Output", "inout": "InOut"}


class _Parameters:
    """Binds a kernel's parameters, and lays out its argument block."""

    def __init__(
        self, fe: Frontend, fn: Kernel, args: Sequence[Any], params: Mapping[str, Any]
    ) -> None:
        self.fe, self.fn, self.args, self.params = fe, fn, list(args), dict(params)
        self.slots: list[ArgSlot] = []
        self.sizes: dict[str, Any] = {}
        self.position = 0
        self.names: list[str] = []
        """The arguments, in order; those of a record as `record.field`."""
        self.views: list[tuple[ast.arg, str, Access]] = []
        """The tensor parameters, in order."""

    def bind(self) -> tuple[ArgSlot, ...]:
        """Binds each parameter in the frontend's first frame, and returns the argument slots."""
        fe, source = self.fe, self.fn.source
        env: dict[str, Any] = {}
        fe.frame = Frame(source, env, 0)
        a = source.node.args
        if a.kwarg is not None:
            self._fail(a.kwarg, "a kernel has no **parameters")
        try:
            for p in (*a.posonlyargs, *a.args):
                env[p.arg] = self._parameter(p, self.annotation(p))
            if a.vararg is not None:
                annotation, items = self.annotation(a.vararg), []
                if isinstance(annotation, OperandRecord):
                    self._fail(a.vararg, f"*{a.vararg.arg} takes views or scalars, not records")
                while self.position < len(self.args):
                    items.append(
                        self._argument(a.vararg, annotation, f"{a.vararg.arg}[{len(items)}]")
                    )
                env[a.vararg.arg] = tuple(items)
            for p, default in zip(a.kwonlyargs, a.kw_defaults, strict=True):
                self._keyword(p, default, env)
            if self.position < len(self.args):
                names = ", ".join(self.names)
                self._fail(
                    source.node,
                    f"{source.name} takes {self.position} arguments ({names}), got {len(self.args)}",
                )
            if self.params:
                declared = ", ".join(p.arg for p in a.kwonlyargs) or "none"
                unknown = ", ".join(sorted(self.params))
                self._fail(
                    source.node,
                    f"{source.name} has no parameter {unknown}; its compile-time parameters: {declared}",
                )
        except Failure as failure:
            raise failure.error_class([failure.diagnostic]) from None
        return tuple(self.slots)

    def _fail(self, node: ast.AST, message: str) -> NoReturn:
        self.fe.fail(message, KernelTypeError, node)

    refuse = _fail

    def annotation(self, p: ast.arg) -> Any:
        """The annotation of a parameter, as `parameter_annotation` gives it."""
        if p.annotation is None:
            self._fail(
                p,
                f"parameter {p.arg} needs an annotation: k.Input, k.Output, k.InOut, k.Context or an element type",
            )
        assert p.annotation is not None
        source = self.fn.source
        value = annotation_in(self.fe, source, p.annotation)
        try:
            return parameter_annotation(value, p.arg, source.scope)
        except KernelTypeError as error:
            self._fail(p, str(error))

    def _keyword(self, p: ast.arg, default: ast.expr | None, env: dict[str, Any]) -> None:
        """Binds a keyword-only parameter: the context, a compile-time parameter or its default."""
        if (
            p.annotation is not None
            and annotation_in(self.fe, self.fn.source, p.annotation) is Context
        ):
            env[p.arg] = ContextValue()
        elif p.arg in self.params:
            # removed: `bind` reports what is left as unknown
            env[p.arg] = self.params.pop(p.arg)
        elif default is not None:
            env[p.arg] = evaluate_in(self.fe, self.fn.source, default)
        else:
            self._fail(p, f"{self.fn.name} needs a value for its compile-time parameter {p.arg!r}")

    def _parameter(self, p: ast.arg, annotation: Any) -> Any:
        if annotation is Context:
            return ContextValue()
        if isinstance(annotation, OperandRecord):
            return annotation.bind(p.arg, lambda name, field: self._argument(p, field, name))
        return self._argument(p, annotation, p.arg)

    def _argument(self, p: ast.arg, annotation: Any, name: str) -> Any:
        """The view or scalar of a positional parameter, checked against its annotation."""
        self.names.append(name)
        if self.position >= len(self.args):
            self._fail(p, f"{self.fn.name} got {len(self.args)} arguments, and none for {name!r}")
        spec = self.args[self.position]
        position = self.position
        self.position += 1
        if isinstance(annotation, ScalarType):
            if not isinstance(spec, TensorSpec) and scalar_type(spec) is annotation:
                return self._slot(
                    ArgSlot(position, name, "scalar", 0, annotation), scalar(annotation)
                )
            self._fail(p, f"{name} is a scalar {annotation.name}, got {spec!r}")
        if not isinstance(spec, TensorSpec):
            self._fail(p, f"{name} is a tensor, got {spec!r}; a k.TensorSpec fits")
        if not isinstance(annotation, Access):
            self._fail(
                p,
                f"{name} is not a tensor: k.Context is for one parameter, which takes no argument",
            )
        access = annotation
        self.views.append((p, name, access))
        if access.dtype is not None and spec.dtype is not access.dtype:
            self._fail(p, f"{name} has dtype {access.dtype.name}, got {spec.dtype.name}")
        if access.rank is not None and spec.rank != access.rank:
            self._fail(p, f"{name} has rank {access.rank}, got {spec.rank}")
        return self._view(spec, position, name, access.writable)

    def _slot(self, slot: ArgSlot, type: Any) -> Any:
        self.slots.append(slot)
        value = self.fe.b.op("arg", (), type, len(self.slots) - 1)
        if slot.kind == "dim":
            # sizes are not negative and fit the address space: many checks fall away
            self.fe.b.intervals[value.id] = 0, MAX_SIZE
        return value

    def _view(self, spec: TensorSpec, index: int, name: str, writable: bool) -> View:
        """The view of a tensor argument, with slots for all sizes and strides that are not static."""
        base = self._slot(ArgSlot(index, name, "pointer", 0, spec.dtype), POINTER)
        shape: list[Index] = []
        for axis, size in enumerate(spec.shape):
            if isinstance(size, int):
                shape.append(size)
                continue
            value = self._slot(ArgSlot(index, name, "dim", axis, spec.dtype), INDEX)
            # equal names state equal sizes, which share one value
            shape.append(value if size is None else self.sizes.setdefault(size, value))
        if spec.strides is None:
            # strides of contiguous tensors are computed from the sizes: no slots
            strides = contiguous_strides(self.fe, tuple(shape))
        else:
            strides = tuple(
                s
                if s is not None
                else self._slot(ArgSlot(index, name, "stride", axis, spec.dtype), INDEX)
                for axis, s in enumerate(spec.strides)
            )
        memory = None
        # level 2 checks each access against the bytes of its tensor
        if self.fe.check >= 2:
            begin, end = (
                self._slot(ArgSlot(index, name, kind, 0, spec.dtype), INDEX)
                for kind in ("begin", "end")
            )
            memory = memory_of(begin, end, name, self.fe)
        return View(base, spec.dtype, tuple(shape), strides, name, writable, memory)


def _freeze(body: Iterable[Stmt]) -> tuple[Stmt, ...]:
    """Converts a body to tuples, and drops empty blocks."""
    out: list[Stmt] = []
    for s in body:
        kind = s.__class__
        if kind in _LEAVES:
            out.append(s)
        elif isinstance(s, (For, Parallel)):
            out.append(replace(s, body=_freeze(s.body)))
        elif isinstance(s, Block):
            inner = _freeze(s.body)
            if inner:
                out.append(replace(s, body=inner))
        elif isinstance(s, While):
            out.append(replace(s, head=_freeze(s.head), body=_freeze(s.body)))
        elif isinstance(s, If):
            out.append(replace(s, then=_freeze(s.then), orelse=_freeze(s.orelse)))
        else:
            out.append(s)
    return tuple(out)


_LEAVES = frozenset({Let, Store, Assign})
"""The most frequent statements; they have no body."""


def _new_frontend(target: Target, check: int) -> Frontend:
    """The state of a compilation for a target, at a level of ``MAX_KERNEL_CHECK``."""
    return Frontend(target, check, EXPRESSIONS, {**STATEMENTS, **LOOPS})


def _compile_body(fe: Frontend, node: ast.FunctionDef) -> None:
    """Compiles a kernel's body; its parameters must be bound.

    Raises:
        KernelError: The body has errors; the exception has all of them.
    """
    # an early return leaves this block
    label = fe.b.label() if returns_early(node) else None
    scope = fe.b.open("branch") if label is not None else None
    fe.frame.label = label
    fe.body(node.body)
    if scope is not None and label is not None:
        fe.b.close()
        fe.b.emit(Block(label, tuple(scope.body)))
    if fe.diagnostics:
        # a single error keeps its class; several have only the base class in common
        raise (fe.error_class if len(fe.diagnostics) == 1 else KernelError)(fe.diagnostics)
