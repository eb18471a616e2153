"""Evaluation of a module, op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

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

Implementation = Callable[["Frame", MoOp, Sequence[Array]], Array | Sequence[Array] | None]
"""From the frame, the op and its operands (chains left out) to its results (chains left out)."""

IMPLEMENTATIONS: dict[str, Implementation] = {}
"""How each op is evaluated, by its name."""
REFERENCES: dict[str, Callable[..., Any]] = {}
"""How each custom op is evaluated, by its symbol."""

_I = TypeVar("_I", bound=Callable[..., Any])


class InterpreterError(RuntimeError):
    """A graph cannot be evaluated: an input or weight does not fit, or an op fails."""


class HasModule(Protocol):
    """A graph."""

    def to_mlir(self) -> mlir.ModuleOp:
        """The module of the graph."""
        ...


def implements(*names: str) -> Callable[[_I], _I]:
    """Registers the evaluation of `mo` ops.

    Args:
        names: The names without dialect, such as ``add``.
    """

    def decorate(function: _I) -> _I:
        for name in names:
            IMPLEMENTATIONS[f"mo.{name}"] = function
        return function

    return decorate


def register(symbol: str) -> Callable[[_I], _I]:
    """Registers the NumPy reference of a custom op.

    The function takes the operands as arrays (buffers may be written to; chains are left out), and the
    parameters as keywords. It returns an array, a sequence of arrays, or None for no results.

    Args:
        symbol: The name of the op, such as ``mo.attention.ragged.paged``.
    """

    def decorate(function: _I) -> _I:
        REFERENCES[symbol] = function
        return function

    return decorate


@dataclass
class Frame:
    """One evaluation of one graph."""

    module: mlir.ModuleOp
    weights: Mapping[str, Any]
    prefix: str
    """What comes before the names of this graph's weights."""
    sizes: dict[str, int]
    """The sizes of the symbolic dimensions that are known so far."""
    before_op: Callable[[], None]
    """Called before each op; may raise to end the evaluation."""

    def evaluate(self, graph: GraphOp, args: Sequence[Array]) -> list[Array]:
        """The outputs of a graph, chains left out."""
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
            self.check(op)
            kept = [r for r in op.results if not isinstance(r.type, mlir.ChainType)]
            for result, array in zip(kept, self._evaluate_op(op, operands), strict=True):
                values[result] = array
            # what the op itself tells is known now
            self.check(op)
        raise InterpreterError(f"graph {graph.sym_name}: the outputs are not set")

    def check(self, op: MoOp) -> None:
        """Checks the conditions of an op whose sizes are known.

        Raises:
            InterpreterError: The sizes do not meet one.
        """
        failure = first_unmet(op.conditions(), self.sizes)
        if failure is not None:
            raise InterpreterError(failure)

    def _evaluate_op(self, op: MoOp, operands: Sequence[Array]) -> Sequence[Array]:
        implementation = IMPLEMENTATIONS.get(op.name)
        if implementation is None:
            raise NotImplementedError(f"the interpreter does not know {op.name}")
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
        """A result, rounded to its dtype; its sizes are checked, and bound to new symbols."""
        if not isinstance(type_, ShapedType):
            return array
        if array.dtype != type_.dtype.to_numpy():
            array = array.astype(type_.dtype.to_numpy())
        self.bind(op.name, type_, array)
        return array

    def bind(self, what: str, type_: ShapedType, array: Array) -> None:
        """Checks an array's shape against a type; symbols that are not known yet take their size.

        Raises:
            InterpreterError: A size differs.
        """
        if array.ndim != type_.rank:
            raise InterpreterError(f"{what}: shape {list(array.shape)} for the type {type_.short}")
        for dim, size in zip(type_.shape, array.shape, strict=True):
            if dim.symbol_name is not None:
                self.sizes.setdefault(dim.symbol_name, size)
        for axis, (dim, size) in enumerate(zip(type_.shape, array.shape, strict=True)):
            if all(name in self.sizes for name in dim.symbols):
                expected = dim.evaluate(self.sizes)
                if expected != size:
                    sizes = ", ".join(f"{n} = {self.sizes[n]}" for n in dim.symbols)
                    raise InterpreterError(
                        f"{what}: axis {axis} of {type_.short} has size {size}, expected {dim}"
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
        """The weight of a name, checked against its type.

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
    """The ops that a result or an effect depends on; an op that nothing uses has no meaning, and raises nothing."""
    live: set[MoOp] = set()
    for op in reversed(list(graph.body)):
        if not op.is_pure or any(use.operation in live for r in op.results for use in r.uses):
            live.add(op)
    return live


def to_array(value: Any) -> Array:
    """The NumPy array of an array, a driver tensor or a DLPack object, not copied."""
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
) -> list[Array]:
    """Evaluates a graph.

    Args:
        graph: The graph, or its module.
        inputs: An array for each input; those of buffers are changed in place.
        weights: The weights by name.
        before_op: Called before each op; may raise to end the evaluation.

    Returns:
        An array for each output.

    Raises:
        InterpreterError: An input or a weight does not fit, or a shape is not what the graph says.
        NotImplementedError: A custom op has no reference.
        IndexError: An index is out of range.
    """
    module = graph if isinstance(graph, mlir.ModuleOp) else graph.to_mlir()
    entry = mlir.entry(module)
    frame = Frame(module, {} if weights is None else weights, "", {}, before_op)
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
    """Floats narrower than 32 bits as float32; all else as it is."""
    dtype = DType.from_numpy(array.dtype)
    return array.astype(np.float32) if dtype.is_float() and dtype.size_in_bits < 32 else array


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
    """The outputs of a subgraph."""
    # symbols that the callee's inputs do not bind mean what they mean here
    inner = Frame(frame.module, frame.weights, frame.prefix + prefix, {}, frame.before_op)
    types = [t for t in callee.input_types if not isinstance(t, mlir.ChainType)]
    for index, (array, type_) in enumerate(zip(operands, types, strict=True)):
        if isinstance(type_, ShapedType):
            inner.bind(f"input {index} of {callee.sym_name}", type_, array)
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
