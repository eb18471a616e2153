"""Evaluation of a module, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from xdsl.ir import Attribute, SSAValue

from max import mlir
from max.driver import Tensor
from max.dtype import DType
from max.mlir import MoOp
from max.mlir.conditions import first_unmet
from max.mlir.ops.control import CallOp, GraphOp, IfOp, WhileOp
from max.mlir.types import ShapedType, short_types

__all__ = [
    "AfterOp",
    "IMPLEMENTATIONS",
    "REFERENCES",
    "Array",
    "Frame",
    "InterpreterError",
    "implements",
    "register",
    "run",
]

Array = npt.NDArray[Any]
AfterOp: TypeAlias = "Callable[[MoOp, Sequence[Array], Sequence[Array]], None]"

Implementation = Callable[["Frame", MoOp, Sequence[Array]], Array | Sequence[Array] | None]
"""Maps the frame, the op and its operands to its results; operands and results exclude chains."""

IMPLEMENTATIONS: dict[str, Implementation] = {}
"""The implementation of each op, by its name."""
REFERENCES: dict[str, Callable[..., Any]] = {}
"""The NumPy references that are functions of arrays and keywords, by the symbol of a custom op or the name of an op."""

_I = TypeVar("_I", bound=Callable[..., Any])


class InterpreterError(RuntimeError):
    """A graph cannot be evaluated: an input or weight does not match its type, or an op fails."""


class HasModule(Protocol):
    """A graph."""

    def to_mlir(self) -> mlir.ModuleOp:
        """The module of the graph."""
        ...


def implements(*names: str) -> Callable[[_I], _I]:
    """Registers the implementation of `mo` ops.

    Args:
        names: The names without dialect, such as ``add``.
    """

    def decorate(function: _I) -> _I:
        for name in names:
            IMPLEMENTATIONS[f"mo.{name}"] = function
        return function

    return decorate


def register(symbol: str) -> Callable[[_I], _I]:
    """Registers the NumPy reference of a custom op, or of an op of the dialect.

    The function takes the operands as arrays, without chains, and the parameters of the custom op, or the attributes of
    the op, as keywords. It may write to buffers. It returns an array, a sequence of arrays, or None for no results.

    Args:
        symbol: The symbol of the custom op, or the full name of the op, such as ``mo.attention.ragged.paged``.
    """

    def decorate(function: _I) -> _I:
        def evaluate(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Any:
            return function(*operands, **op.attrs)

        REFERENCES[symbol] = function
        if symbol in mlir.OPS:
            IMPLEMENTATIONS[symbol] = evaluate
        return function

    return decorate


@dataclass
class Frame:
    """One evaluation of one graph."""

    module: mlir.ModuleOp
    weights: Mapping[str, Any]
    prefix: str
    """The prefix of the names of this graph's weights."""
    sizes: dict[str, int]
    """The sizes of the symbols bound so far."""
    before_op: Callable[[], None]
    """A callback before each op; it may raise to end the evaluation."""
    after_op: AfterOp | None = None
    """A callback after each op, with its operands and results; it may raise too."""

    def evaluate(self, graph: GraphOp, args: Sequence[Array]) -> list[Array]:
        """Evaluates a graph and returns its outputs, without chains."""
        values: dict[SSAValue, Array] = {}
        parameters = [a for a in graph.args if not isinstance(a.type, mlir.ChainType)]
        values.update(zip(parameters, args, strict=True))
        live = _live_ops(graph)
        for op in graph.body:
            if op not in live:
                continue
            self.before_op()
            operands = [values[v] for v in op.operands if not isinstance(v.type, mlir.ChainType)]
            if op.name == "mo.output":
                return operands
            # conditions over sizes that are known before the op
            self.check(op)
            results = [r for r in op.results if not isinstance(r.type, mlir.ChainType)]
            arrays = self._evaluate_op(op, operands)
            if self.after_op is not None:
                self.after_op(op, operands, arrays)
            for result, array in zip(results, arrays, strict=True):
                values[result] = array
            # again, for conditions over symbols that the op itself has bound
            self.check(op)
        raise InterpreterError(f"graph {graph.sym_name}: the outputs are not set")

    def check(self, op: MoOp) -> None:
        """Checks the conditions of an op over bound symbols.

        Raises:
            InterpreterError: A condition does not hold.
        """
        failure = first_unmet(op.conditions(), self.sizes)
        if failure is not None:
            raise InterpreterError(failure)

    def _evaluate_op(self, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
        implementation = IMPLEMENTATIONS.get(op.name)
        if implementation is None:
            raise NotImplementedError(f"the interpreter does not know {op.name}")
        # infinities, NaN and wrapped integers are results, not warnings
        with np.errstate(all="ignore"):
            returned = implementation(self, op, operands)
        if isinstance(returned, np.ndarray | np.generic):
            returned = [np.asarray(returned)]
        results = [] if returned is None else list(returned)
        types = [r.type for r in op.results if not isinstance(r.type, mlir.ChainType)]
        if len(types) != len(results):
            raise InterpreterError(f"{op.name}: {len(results)} results, expected {len(types)}")
        return [self._finish(op, a, t) for a, t in zip(results, types, strict=True)]

    def _finish(self, op: MoOp, array: Array, type_: Attribute) -> Array:
        """Rounds a result to its dtype, checks its sizes, and binds new symbols to them."""
        if not isinstance(type_, ShapedType):
            return array
        # references compute in wider types: rounded once, here
        if array.dtype != type_.dtype.to_numpy():
            array = array.astype(type_.dtype.to_numpy())
        self.bind(op.name, type_, array)
        return array

    def bind(self, label: str, type_: ShapedType, array: Array) -> None:
        """Checks an array's shape against a type and binds new symbols to its sizes.

        Raises:
            InterpreterError: A size differs.
        """
        if array.ndim != type_.rank:
            raise InterpreterError(f"{label}: shape {list(array.shape)} for the type {type_.short}")
        # symbols first: another axis may be an expression over them
        for dim, size in zip(type_.shape, array.shape, strict=True):
            if dim.symbol_name is not None:
                self.sizes.setdefault(dim.symbol_name, size)
        for axis, (dim, size) in enumerate(zip(type_.shape, array.shape, strict=True)):
            if all(name in self.sizes for name in dim.symbols):
                expected = dim.evaluate(self.sizes)
                if expected != size:
                    sizes = ", ".join(f"{n} = {self.sizes[n]}" for n in dim.symbols)
                    raise InterpreterError(
                        f"{label}: axis {axis} of {type_.short} has size {size}, expected {dim}"
                        + (f" = {expected} ({sizes})" if sizes else "")
                    )

    def shape(self, type_: Attribute) -> tuple[int, ...]:
        """The sizes of a type's dimensions."""
        assert isinstance(type_, ShapedType)
        return tuple(dim.evaluate(self.sizes) for dim in type_.shape)

    def dims(self, dims: Sequence[mlir.DimExpr]) -> tuple[int, ...]:
        """The sizes of dimensions."""
        return tuple(dim.evaluate(self.sizes) for dim in dims)

    def weight(self, name: str, type_: Attribute) -> Array:
        """Reads a weight by its name in this graph, and checks it against its type.

        Raises:
            InterpreterError: The weight is missing, or its dtype or shape differs.
        """
        full = self.prefix + name
        assert isinstance(type_, ShapedType)
        if full not in self.weights:
            names = ", ".join(sorted(self.weights)[:8]) or "none"
            raise InterpreterError(f"the weight {full!r} is missing; given: {names}")
        array = to_array(self.weights[full])
        if array.dtype != type_.dtype.to_numpy():
            raise InterpreterError(f"the weight {full!r} is {array.dtype}, expected {type_.short}")
        self.bind(f"the weight {full!r}", type_, array)
        return array


def _live_ops(graph: GraphOp) -> set[MoOp]:
    """The ops that outputs, side effects or sizes depend on. Dead ops are not evaluated: their errors do not show."""
    ops = list(graph.body)
    known = {name for value in graph.args for name in _symbols(value)}
    # the symbols that the result of an op is the first to have
    given: dict[MoOp, set[str]] = {}
    for op in ops:
        given[op] = {name for result in op.results for name in _symbols(result)} - known
        known |= given[op]
    live: set[MoOp] = set()
    needed: set[str] = set()
    for op in reversed(ops):
        if (
            not op.is_pure
            or any(use.operation in live for r in op.results for use in r.uses)
            or given[op] & needed
        ):
            live.add(op)
            for inner in op.walk():
                for value in (*inner.operands, *inner.results):
                    needed |= _symbols(value)
                for attribute in inner.attributes.values():
                    if isinstance(attribute, mlir.ShapeAttr):
                        needed |= {name for dim in attribute.data for name in dim.symbols}
    return live


def _symbols(value: SSAValue) -> set[str]:
    """The symbols in the sizes of a value."""
    if not isinstance(value.type, ShapedType):
        return set()
    return {name for dim in value.type.shape for name in dim.symbols}


def to_array(value: Any) -> Array:
    """Converts an array, a driver tensor or a DLPack object to a NumPy array without copying."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(cast(Array, value))
    if hasattr(value, "to_numpy"):
        return value.to_numpy()
    if hasattr(value, "__dlpack__"):
        return Tensor.from_dlpack(value).to_numpy()
    return np.asarray(value)


def run(
    graph: HasModule | mlir.ModuleOp,
    inputs: Sequence[Any],
    weights: Mapping[str, Any] | None = None,
    before_op: Callable[[], None] = lambda: None,
    after_op: AfterOp | None = None,
) -> list[Array]:
    """Evaluates a graph.

    Args:
        graph: The graph, or its module.
        inputs: One array per input; arrays of buffers are modified in place.
        weights: The weights by name.
        before_op: A callback before each op; it may raise to end the evaluation.
        after_op: A callback after each op, with its operands and results.

    Returns:
        One array per output.

    Raises:
        InterpreterError: An input or a weight does not match its type, or a size contradicts the graph.
        NotImplementedError: A custom op has no reference.
        IndexError: An index is out of range.
    """
    module = graph if isinstance(graph, mlir.ModuleOp) else graph.to_mlir()
    entry = mlir.entry(module)
    frame = Frame(module, {} if weights is None else weights, "", {}, before_op, after_op)
    types = entry.input_types
    if len(inputs) != len(types):
        raise InterpreterError(
            f"{entry.sym_name} takes {len(types)} inputs ({short_types(types)}), got {len(inputs)}"
        )
    arrays = [to_array(value) for value in inputs]
    for index, (array, type_) in enumerate(zip(arrays, types, strict=True)):
        if not isinstance(type_, ShapedType):
            continue
        if array.dtype != type_.dtype.to_numpy():
            raise InterpreterError(
                f"input {index} of {entry.sym_name} is {array.dtype}, expected {type_.short}"
            )
        if isinstance(type_, mlir.BufferType) and not array.flags.writeable:
            raise InterpreterError(f"input {index} of {entry.sym_name} is a read-only buffer")
        frame.bind(f"input {index} of {entry.sym_name}", type_, array)
    return frame.evaluate(entry, arrays)


def widen(array: Array) -> Array:
    """Converts floats narrower than 32 bits to float32; other arrays are unchanged."""
    dtype = DType.from_numpy(array.dtype)
    return array.astype(np.float32) if dtype.is_float() and dtype.size_in_bits < 32 else array


def widest(array: Array) -> Array:
    """Converts floats to float64, in which sums are exact enough for a reference; integers are unchanged."""
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


@implements("chain_create")
def _chain_create(frame: Frame, op: MoOp, operands: Sequence[Array]) -> None:
    return None


@implements("call")
def _call(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    assert isinstance(op, CallOp)
    return _run(frame, op.target(), operands, op.prefix)


def _run(
    frame: Frame, callee: GraphOp, operands: Sequence[Array], prefix: str = ""
) -> Sequence[Array]:
    """Evaluates a subgraph."""
    inner = Frame(
        frame.module, frame.weights, frame.prefix + prefix, {}, frame.before_op, frame.after_op
    )
    types = [t for t in callee.input_types if not isinstance(t, mlir.ChainType)]
    for index, (array, type_) in enumerate(zip(operands, types, strict=True)):
        if isinstance(type_, ShapedType):
            inner.bind(f"input {index} of {callee.sym_name}", type_, array)
    # symbols that the callee's inputs do not bind are those of the caller
    inner.sizes = {**frame.sizes, **inner.sizes}
    return inner.evaluate(callee, operands)


@implements("if")
def _if(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    assert isinstance(op, IfOp)
    then, otherwise = op.callees
    name = then if operands[0] else otherwise
    return _run(frame, mlir.subgraphs(frame.module)[name], operands[1:])


@implements("while")
def _while(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
    assert isinstance(op, WhileOp)
    graphs = mlir.subgraphs(frame.module)
    condition, body = (graphs[name] for name in op.callees)
    count = sum(not isinstance(r.type, mlir.ChainType) for r in op.results)
    # captured values are inputs of both graphs, and results of neither
    carried, captured = list(operands[:count]), operands[count:]
    while _run(frame, condition, [*carried, *captured])[0]:
        carried = list(_run(frame, body, [*carried, *captured]))
    return carried


@implements("custom")
def _custom(frame: Frame, op: MoOp, operands: Sequence[Array]) -> Any:
    symbol: str = op.attr("symbol")
    reference = REFERENCES.get(symbol)
    if reference is None:
        symbols = ", ".join(sorted(REFERENCES)) or "none"
        raise NotImplementedError(
            f"the custom op {symbol!r} has no NumPy reference (max._interpreter.register); symbols: "
            f"{symbols}"
        )
    return reference(*operands, **op.attr("parameters"))
