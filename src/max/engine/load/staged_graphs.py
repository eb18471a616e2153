"""Loads a graph that a function stages; the function is not called if the program is on the disk.

A description of what the function reads stands for the graph, see `max.engine.load.program_store`::

    description = describe_staging(arguments, weights)
    model = load_staged_graph(session, description, weights, lambda: staged(*arguments, weights))
"""

# reads private fields of sessions and models, as part of the engine
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

from max import mlir
from max._host import host_memory
from max._host.reserve import Reserve
from max.driver import DLPackArray, Tensor
from max.dtype import DType
from max.engine._model import Model
from max.engine._session import InferenceSession
from max.engine.load.opaque_buffers import with_buffers
from max.engine.load.program_store import describe
from max.graph import Graph
from max.graph.weights import LaterCast, WeightData

__all__ = ["describe_staging", "load_staged_graph", "while_compiling"]

ALIGNMENT = 64
"""The largest alignment of a weight that staging may depend on."""


class _Source(NamedTuple):
    """The value of a graph's weight: a weight of the caller, converted where there is a dtype."""

    name: str
    dtype: DType | None


def load_staged_graph(
    session: InferenceSession,
    description: str | None,
    weights: Mapping[str, WeightData],
    stage: Callable[[], tuple[Graph, Mapping[str, DLPackArray]]],
    dtype: DType | None = None,
) -> Model:
    """Loads the graph that a function stages.

    Args:
        session: The session.
        description: All that `stage` reads, see `describe_staging`; None stages at each call.
        weights: The weights that `stage` takes its values from.
        stage: Returns the graph, and a value for each of its weights. It must not read the elements of `weights`.
        dtype: The dtype that the model computes in, to which weights of wider floats are converted; None: as they
            are stored.

    Raises:
        Exception: As `stage` and `InferenceSession.load`.
    """
    registry: Mapping[str, DLPackArray] = {}
    reserve: Reserve | None = None

    def module() -> tuple[mlir.ModuleOp, dict[str, _Source] | None]:
        """Stages the graph while a thread allocates packed weights; returns the module and its weights' sources."""
        nonlocal registry, reserve
        # no program is on the disk: the pages of packed weights are requested while it is compiled
        reserve = Reserve(_expected_bytes(weights, dtype))
        graph, registry = stage()
        staged = with_buffers(graph.to_mlir())
        session._check_devices(staged)
        sources = None if graph.kernel_libraries_paths else _sources(registry, weights)
        return staged, sources

    # modules that are interpreted or written must be staged
    if session._interprets() or session.debug.ir_output_dir:
        graph, registry = stage()
        return session.load(graph, weights_registry=registry)
    try:
        loaded = session._store.load_staged_graph(description, module)
        # `stage` may not have run: the note says where each value comes from
        if loaded.note:
            sources = cast("dict[str, _Source]", loaded.note)
            registry = {
                name: _value(weights[source.name], source) for name, source in sources.items()
            }
        return session._link_model(
            loaded, registry, host_memory.allocate if reserve is None else reserve.take
        )
    finally:
        if reserve is not None:
            reserve.close()


@contextmanager
def while_compiling(session: InferenceSession, work: Callable[[], object]) -> Generator[None]:
    """Has the first program that a ``with`` block compiles call a function while LLVM compiles its kernels.

    While LLVM compiles, the thread that loads the program would only wait. If all programs are on the disk, the
    function is not called.

    Args:
        session: The session that loads the program.
        work: The function. It may load a model, which a later load of an equal graph then finds. The load raises what
            it raises.
    """
    session._store.meanwhile.append(work)
    try:
        yield
    finally:
        if work in session._store.meanwhile:
            session._store.meanwhile.remove(work)


def _expected_bytes(weights: Mapping[str, WeightData], dtype: DType | None) -> int:
    """The approximate size of the packed weights: each as stored, or in the model's dtype if that is smaller."""
    total = 0
    for weight in weights.values():
        stored = _stored_elements(weight.data)
        width = stored.dtype.size_in_bytes
        if dtype is not None and stored.dtype.is_float():
            width = min(width, dtype.size_in_bytes)
        total += stored.num_elements * width
    return total


def describe_staging(arguments: Sequence[object], weights: Mapping[str, WeightData]) -> str | None:
    """A text of what a function that stages a graph reads; None where an argument is of an unknown kind.

    Of the weights it has names, dtypes, shapes, encodings and alignments, not the elements.

    Args:
        arguments: The arguments, of the kinds that `max.engine.load.program_store.describe` takes.
        weights: The weights by name.
    """
    types = [
            (name, value.dtype, [int(dim) for dim in value.shape], value.quantization_encoding, _alignment(value))
            for name, value in weights.items()
        ]  # fmt: skip
    return describe([*arguments, types])


def _alignment(value: WeightData) -> int:
    """The alignment of a weight's elements, at most `ALIGNMENT`."""
    pointer = _stored_elements(value.data)._ptr
    # the lowest bit that is set: the greatest power of two that divides the address
    return min(pointer & -pointer, ALIGNMENT) if pointer else ALIGNMENT


def _stored_elements(data: DLPackArray) -> Tensor:
    """The elements as stored: those that a cast reads."""
    return Tensor.from_dlpack(data.source if isinstance(data, LaterCast) else data)


def _memory(tensor: Tensor) -> tuple[int, DType, tuple[int, ...]]:
    return tensor._ptr, tensor.dtype, tuple(tensor.shape)


def _sources(
    registry: Mapping[str, DLPackArray], weights: Mapping[str, WeightData]
) -> dict[str, _Source] | None:
    """The source of each value; None if a value is neither a weight nor a converted weight, or two share memory."""
    names: dict[tuple[int, DType, tuple[int, ...]], str] = {}
    for name, weight in weights.items():
        if isinstance(weight.data, LaterCast):
            return None
        # two names of one memory: the source of a value would be ambiguous
        if names.setdefault(_memory(_stored_elements(weight.data)), name) != name:
            return None
    sources: dict[str, _Source] = {}
    for name, value in registry.items():
        source = names.get(_memory(_stored_elements(value)))
        if source is None:
            return None
        sources[name] = _Source(source, value.dtype if isinstance(value, LaterCast) else None)
    return sources


def _value(weight: WeightData, source: _Source) -> DLPackArray:
    return (weight if source.dtype is None else weight.cast_at_load(source.dtype)).data
