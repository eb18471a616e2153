"""Walks a module op by op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from max._interpreter.registry import CUSTOM, OPS, Array, Dims, Result
from max.mlir import CallOp, GraphOp, ModuleOp, MoOp, entry, subgraphs
from max.mlir.types import BufferType, ChainType, ShapedType

__all__ = ["InterpreterError", "run"]


class InterpreterError(RuntimeError):
    """A module cannot be interpreted: an op or a custom op has no meaning here, or a weight is missing."""


def run(
    graph: Any, inputs: Sequence[Array], weights: Mapping[str, Array] | None = None
) -> list[Array]:
    """Evaluates a graph.

    Args:
        graph: A ``max.graph.Graph``, or a module of `mo`.
        inputs: One array an input, without the chain; the arrays of buffers are changed in place.
        weights: The values of the external constants by name.

    Returns:
        The outputs, in new arrays or views of the inputs.

    Raises:
        InterpreterError: Something has no meaning here, or a weight is missing.
        ValueError: An input does not have the type that the graph says.
    """
    module = graph if isinstance(graph, ModuleOp) else graph._module
    run_ = _Run(subgraphs(module), {} if weights is None else weights)
    with np.errstate(all="ignore"):
        return run_.graph(entry(module), list(inputs), "")


class _Run:
    def __init__(self, callees: Mapping[str, GraphOp], weights: Mapping[str, Array]) -> None:
        self.callees = callees
        self.weights = weights

    def graph(self, graph: GraphOp, inputs: list[Array], prefix: str) -> list[Array]:
        shaped = [a for a in graph.args if not isinstance(a.type, ChainType)]
        if len(shaped) != len(inputs):
            raise ValueError(f"{graph.sym_name}: {len(shaped)} inputs expected, got {len(inputs)}")
        env: dict[str, int] = {}
        values: dict[Any, Array] = {}
        for index, (arg, value) in enumerate(zip(shaped, inputs, strict=True)):
            self._bind(f"input {index} of {graph.sym_name}", cast(ShapedType, arg.type), value, env)
            values[arg] = value
        for op in graph.body:
            operands = [values[v] for v in op.operands if not isinstance(v.type, ChainType)]
            if op.name == "mo.output":
                return operands
            try:
                made = self._op(op, operands, env, prefix)
            except (ValueError, IndexError) as error:
                raise type(error)(f"{op.name}: {error}") from error
            tensors = [r for r in op.results if not isinstance(r.type, ChainType)]
            for result, value in zip(tensors, made, strict=True):
                type_ = cast(ShapedType, result.type)
                dtype = type_.dtype.to_numpy()
                if not isinstance(type_, BufferType):
                    value = np.asarray(value).astype(dtype, copy=False)
                self._bind(f"result of {op.name}", type_, value, env)
                values[result] = value
        raise ValueError(f"{graph.sym_name}: the outputs are not set")

    def _op(
        self, op: MoOp, operands: list[Array], env: dict[str, int], prefix: str
    ) -> Sequence[Array]:
        if isinstance(op, CallOp):
            return self.graph(self.callees[op.callee], operands, prefix + op.prefix)
        if op.name == "mo.constant.external":
            name = prefix + op.attr("name")
            if name not in self.weights:
                raise InterpreterError(f"the weight {name!r} is missing")
            return [np.asarray(self.weights[name])]
        results = []
        for value in op.results:
            if isinstance(value.type, ChainType):
                continue
            type_ = cast(ShapedType, value.type)
            # a dim that is known only once the op has run is -1
            shape = tuple(
                d.evaluate(env) if all(s in env for s in d.symbols) else -1 for d in type_.shape
            )
            results.append(Result(shape, np.dtype(type_.dtype.to_numpy())))
        if op.name == "mo.custom":
            return self._custom(op, operands, results)
        if op.name not in OPS:
            raise InterpreterError(f"{op.name} has no meaning here")
        made = OPS[op.name](op, operands, results, Dims(env))
        return [made] if isinstance(made, np.ndarray | np.generic) else made

    def _custom(self, op: MoOp, operands: list[Array], results: list[Result]) -> Sequence[Array]:
        symbol = op.attr("symbol")
        if symbol in CUSTOM:
            return CUSTOM[symbol](operands, op.attr("parameters"), results)
        from max import kernel as k

        try:
            function = k.registered(symbol)
        except KeyError as error:
            raise InterpreterError(f"the custom op {symbol!r} has no meaning here") from error
        made = [np.empty(r.shape, r.dtype) for r in results]
        k.interpret(function, [*made, *operands], dict(op.attr("parameters")))
        return made

    def _bind(self, what: str, type_: ShapedType, value: Array, env: dict[str, int]) -> None:
        """Checks a value against its type; a symbol that is met for the first time takes its size."""
        if value.dtype != type_.dtype.to_numpy() or value.ndim != type_.rank:
            raise ValueError(
                f"{what}: expected {type_.short}, got {value.dtype}{list(value.shape)}"
            )
        for axis, (dim, size) in enumerate(zip(type_.shape, value.shape, strict=True)):
            name = dim.symbol_name
            if name is not None and name not in env:
                env[name] = size
            elif all(s in env for s in dim.symbols) and dim.evaluate(env) != size:
                raise ValueError(
                    f"{what}: axis {axis} is {size}, expected {dim} = {dim.evaluate(env)}"
                )
