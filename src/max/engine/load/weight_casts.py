"""Casts of weights while a model is loaded, with compiled kernels on all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from max import mlir
from max._backends import Backends
from max._compiler.program.code import Compiled
from max._host import host_memory
from max._lazy import lazy_module
from max.driver import Tensor
from max.dtype import DType
from max.engine.load.program_store import ProgramStore, describe
from max.engine.run.arena import arena_of
from max.engine.run.linked_program import LinkedProgram

if TYPE_CHECKING:
    from max import graph as graphs
    from max.graph import weights as weight_files
else:
    # the graph layer is imported by callers that stage graphs
    graphs = lazy_module("max.graph")
    weight_files = lazy_module("max.graph.weights")

__all__ = ["Caster"]

_FLOATS = frozenset({DType.float32, DType.bfloat16, DType.float16})


class Caster:
    """Casts weights, with one program per pair of dtypes.

    Args:
        store: Compiles.
        backends: The devices of the session; casts run on the CPU.
    """

    def __init__(self, store: ProgramStore, backends: Backends) -> None:
        self._store = store
        self._backends = backends
        self._programs: dict[tuple[DType, DType], tuple[Compiled, LinkedProgram]] = {}

    @staticmethod
    def takes(weight: weight_files.LaterCast) -> bool:
        """Whether kernels can cast a weight: contiguous floats of 32 or 16 bits."""
        return {weight.source.dtype, weight.dtype} <= _FLOATS and weight.source.is_contiguous

    def convert(
        self, weight: weight_files.LaterCast, address: int, mapped_files: host_memory.MappedFiles
    ) -> None:
        """Casts a weight, and releases pages of mapped files after they are read.

        Args:
            weight: The weight.
            address: The address of the cast elements.
            mapped_files: The mapped files.
        """
        source = weight.source
        if not source.num_elements:
            return
        compiled, program = self._program(source.dtype, weight.dtype)
        instance = program.instance((source.num_elements,))
        layout = compiled.bases
        bases = np.zeros(layout.count(), np.int64)
        # `_memory` keeps the arena alive until the run is over
        bases[layout.arena()], _memory = arena_of(self._backends.host).take(
            instance.arena_bytes, instance.holes
        )
        bases[layout.inputs.start] = _address(source)
        bases[layout.outputs.start] = address
        program.run(instance, bases.tobytes())
        mapped_files.give_back(_address(source), source.num_elements * source.dtype.size_in_bytes)

    def _program(self, source: DType, dtype: DType) -> tuple[Compiled, LinkedProgram]:
        """The program that converts a tensor of one dtype to another; made once per pair."""
        if (source, dtype) not in self._programs:
            description = describe(("convert", source, dtype))
            loaded = self._store.load_staged_graph(description, lambda: (_cast(source, dtype), ()))
            compiled = loaded.compiled
            program = LinkedProgram(compiled, compiled.main, loaded.kernels, [], self._backends)
            self._programs[source, dtype] = compiled, program
        return self._programs[source, dtype]


def _cast(source: DType, dtype: DType) -> mlir.ModuleOp:
    """The module of a graph that converts a vector."""
    kind = graphs.TensorType(source, ["n"], graphs.DeviceRef.CPU())
    with graphs.Graph("convert", input_types=[kind]) as graph:
        graph.output(graph.inputs[0].tensor.cast(dtype))
    return graph.to_mlir()


def _address(tensor: Tensor) -> int:
    return tensor._ptr  # pyright: ignore[reportPrivateUsage]
