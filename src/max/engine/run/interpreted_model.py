"""Models that the NumPy interpreter runs, under ``MAX_INTERPRET=1``."""

# part of the engine: it reads the private fields of tensors
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from max import _interpreter, mlir
from max._compiler.program.code import Compiled, ProgramCode, TensorInfo
from max._host.interrupts import check_interrupt
from max.driver import DLPackArray, Tensor
from max.driver._device import device_named
from max.engine._model import Model
from max.engine.run.arena import Arena
from max.engine.run.linked_program import Linked
from max.engine.run.nan_check import raise_for_nans
from max.graph import Graph
from max.graph.print_options import PrintOptions
from max.mlir.sizes import simplify

__all__ = ["interpreted_model"]


def _info(type_: mlir.ShapedType) -> TensorInfo:
    shape = tuple([simplify(dim) for dim in type_.shape])
    return TensorInfo(type_.dtype, shape, type_.device.data, isinstance(type_, mlir.BufferType))


class _NoLinker:
    def link(self, compiled: Compiled, registry: Mapping[str, DLPackArray] | None) -> Linked:
        """Never called: an interpreted model is not linked."""
        raise RuntimeError(f"{compiled.name} is interpreted")


class _Run:
    """Runs a graph with the interpreter."""

    def __init__(
        self,
        graph: Graph,
        weights: Mapping[str, Tensor],
        outputs: Sequence[TensorInfo],
        printing: PrintOptions,
        after_op: _interpreter.AfterOp | None = None,
    ) -> None:
        self.graph = graph
        self.after_op = after_op
        self.top = mlir.entry(graph.to_mlir())
        self.outputs = outputs
        self.printing = printing
        self.weights = {name: tensor._on_host().to_numpy() for name, tensor in weights.items()}

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        on_host = [tensor._on_host() for tensor in inputs]
        arrays = [tensor.to_numpy() for tensor in on_host]
        token = _interpreter.printing.CURRENT.set(self.printing)
        try:
            results = _interpreter.run(
                self.graph, arrays, self.weights, check_interrupt, self.after_op
            )
        finally:
            _interpreter.printing.CURRENT.reset(token)
        # the interpreter changed the copies on the host
        for tensor, copy, type_ in zip(inputs, on_host, self.top.input_types, strict=False):
            if isinstance(type_, mlir.BufferType) and tensor is not copy:
                tensor.inplace_copy_from(copy)
        outputs: list[Tensor] = []
        for result, info in zip(results, self.outputs, strict=True):
            # an output may be a mutable input itself
            output = next((t for t, a in zip(inputs, arrays, strict=True) if result is a), None)
            if output is None:
                device = device_named(*info.device)
                output = Tensor.from_numpy(np.array(result, order="C")).to(device)
            outputs.append(output)
        return outputs


def interpreted_model(
    graph: Graph,
    names: list[str],
    weights: Mapping[str, Tensor],
    arena: Arena,
    printing: PrintOptions,
    nan_check: bool,
) -> Model:
    """A model that runs on the interpreter.

    Args:
        graph: The graph.
        names: The names of its inputs.
        weights: The values of its weights.
        arena: The session's arena, which is not used.
        printing: How it shows tensors.
        nan_check: Whether an op whose result has a NaN raises.
    """
    top = mlir.entry(graph.to_mlir())
    inputs = [_info(t) for t in top.input_types if isinstance(t, mlir.ShapedType)]
    outputs = [_info(t) for t in top.output_types if isinstance(t, mlir.ShapedType)]
    symbols = dict.fromkeys(
        symbol
        for info in inputs
        for dim in info.shape
        if not isinstance(dim, int)
        for symbol in dim.symbols
    )
    no_program = ProgramCode()
    compiled = Compiled(
        graph.name, tuple(symbols), inputs, names, outputs, [-1] * len(outputs), [no_program], no_program, [], [], [{}]
    )  # fmt: skip
    return Model(
        compiled,
        None,
        _NoLinker(),
        arena,
        _Run(graph, weights, outputs, printing, raise_for_nans if nan_check else None),
    )
