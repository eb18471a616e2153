"""Converts weights while a model is loaded, by compiled kernels on all workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from max import mlir
from max._backends import Backends
from max._compiler.emit import Compiled
from max._runtime import platform
from max.driver import Tensor
from max.dtype import DType
from max.engine._program import LinkedProgram, arena_of
from max.graph import DeviceRef, Graph, TensorType
from max.graph.weights import LaterCast

__all__ = ["Caster"]

_FLOATS = frozenset({DType.float32, DType.bfloat16, DType.float16})

Compile = Callable[["mlir.ModuleOp"], tuple[Compiled, list[dict[str, int]]]]
"""Makes the program of a module, and for each device the addresses of its kernels."""


class Caster:
    """Converts weights; one program for each pair of dtypes.

    Args:
        compile: Compiles a module, through the disk cache.
        backends: The devices of the session; the CPU converts.
    """

    def __init__(self, compile: Compile, backends: Backends) -> None:
        self._compile = compile
        self._backends = backends
        self._programs: dict[tuple[DType, DType], tuple[Compiled, LinkedProgram]] = {}

    @staticmethod
    def takes(weight: LaterCast) -> bool:
        """Whether kernels convert a weight: contiguous floats of 32 and 16 bits."""
        return {weight.source.dtype, weight.dtype} <= _FLOATS and weight.source.is_contiguous

    def convert(self, weight: LaterCast, address: int, mapped: platform.MappedFiles) -> None:
        """Converts a weight; pages of mapped files are given back once they were read.

        Args:
            weight: The weight.
            address: Where the converted elements go.
            mapped: The mapped files.
        """
        source = weight.source
        if not source.num_elements:
            return
        compiled, program = self._program(source.dtype, weight.dtype)
        instance = program.instance((source.num_elements,))
        layout = compiled.bases
        bases = np.zeros(layout.count(), np.int64)
        bases[layout.arena()], _memory = arena_of(self._backends.host).take(
            instance.arena_bytes, instance.holes
        )
        bases[layout.inputs.start] = _address(source)
        bases[layout.outputs.start] = address
        program.run(instance, bases)
        mapped.give_back(_address(source), source.num_elements * source.dtype.size_in_bytes)

    def _program(self, source: DType, dtype: DType) -> tuple[Compiled, LinkedProgram]:
        if (source, dtype) not in self._programs:
            kind = TensorType(source, ["n"], DeviceRef.CPU())
            with Graph("convert", input_types=[kind]) as graph:
                graph.output(graph.inputs[0].tensor.cast(dtype))
            compiled, addresses = self._compile(graph.to_mlir())
            program = LinkedProgram(compiled, compiled.main, addresses, [], self._backends)
            self._programs[source, dtype] = compiled, program
        return self._programs[source, dtype]


def _address(tensor: Tensor) -> int:
    return tensor._ptr  # pyright: ignore[reportPrivateUsage]
