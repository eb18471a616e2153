"""Describes a compiled graph as data: passes, kernels, launches, memory over time."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from max import kernel as k
from max._backends import BackendOptions, backends_for
from max._compiler import pipeline
from max._compiler.lowering.lowered_graph import Buffer, Launch
from max._compiler.program.code import ALIGNMENT, Compiled, TensorInfo
from max._compiler.program.flatten import Flat
from max._compiler.program.memory_plan import MemoryPlan
from max._compiler.record import Compilation, record
from max.engine.load.opaque_buffers import with_buffers
from max.engine.load.program_store import input_names
from max.engine.tune.row_thresholds import find_thresholds
from max.graph import Graph
from max.kernel.language.extensions import load_extensions
from max.mlir.sizes import NOMINAL, Size, nominal

_PAGED = ".ragged.paged"
"""The end of the names of launches on a paged KV cache."""
_GATHERING = ("gather", "rope.ragged.paged")
"""The ends of the names of launches that read some rows of a table."""
_READS_CACHE = "attention.ragged.paged"
"""The end of the names of launches that read all cached tokens."""
_CACHE_RANK = 6
_LAYER = re.compile(r"^.*\d\.")
"""The prefix of the call of a numbered layer."""

__all__ = ["as_data", "explain_graph", "explanations"]


def explain_graph(graph: Graph | Path) -> dict[str, Any]:
    """Compiles a graph for this machine, without weights, and describes the result.

    Args:
        graph: The graph, or the path of a saved graph.

    Returns:
        See `as_data`.

    Raises:
        ValueError: The file is not a graph.
        OSError: The file cannot be read.
        NotImplementedError: An op cannot be compiled.
    """
    built = Graph(path=graph) if isinstance(graph, Path) else graph
    load_extensions(list(built.kernel_libraries_paths))
    module = with_buffers(built.to_mlir())
    with record() as compilations:
        pipeline.compile_module(module, input_names(module), backends_for((), BackendOptions()))
    return as_data(compilations[0])


@contextmanager
def explanations() -> Generator[list[dict[str, Any]]]:
    """Describes all graphs that sessions load in a `with` block; the list is filled at the end of the block."""
    descriptions: list[dict[str, Any]] = []
    with record() as compilations:
        yield descriptions
    descriptions.extend(
        as_data(compilation) for compilation in compilations if compilation.compiled is not None
    )


def as_data(compilation: Compilation) -> dict[str, Any]:
    """A compilation as dictionaries, lists, numbers and strings.

    Sizes are in bytes; where they depend on symbols, ``bytes`` is what they would be with each symbol at a nominal
    size, and ``size`` the formula. Of a KV cache ``bytes`` of a launch counts the new tokens; ``cached`` is what the
    launch reads for each token that is in the cache already. Of a table that rows are gathered from, the rows count.

    Args:
        compilation: The record of a compilation that has ended.
    """
    flat, plan, compiled = compilation.flat, compilation.plan, compilation.compiled
    assert flat is not None and plan is not None and compiled is not None
    launches = _launches(flat, plan, compiled)
    memory, arena_bytes = _memory(flat, plan)
    return {
        "name": compiled.name,
        "inputs": [_tensor(info) for info in compiled.inputs],
        "outputs": [_tensor(info) for info in compiled.outputs],
        "passes": [
            {"name": p.name, "ops": p.ops, "milliseconds": 1e3 * p.seconds, "text": p.text}
            for p in compilation.passes
        ],
        "launches": launches,
        "row_thresholds": _row_thresholds(compilation, compiled),
        "once": len(flat.once),
        "kernels": sorted(_kernels(compilation, flat, launches), key=lambda x: -len(x["launches"])),
        "memory": memory,
        "bytes": {
            "arena": arena_bytes,
            "weights": sum(item.bytes for item in compiled.fixed_buffers if item.kind == "weight"),
            "constants": sum(
                item.bytes for item in compiled.fixed_buffers if item.kind == "constant"
            ),
            "computed once": sum(
                item.bytes for item in compiled.fixed_buffers if item.kind == "kept"
            ),
        },
        "symbols": list(compiled.symbols),
    }


def _launches(flat: Flat, plan: MemoryPlan, compiled: Compiled) -> list[dict[str, Any]]:
    """The launches of an execution, in order."""
    # the first buffers are the inputs
    caches = {
        b: _token_bytes(info)
        for b, info in enumerate(compiled.inputs)
        if info.mutable and len(info.shape) == _CACHE_RANK
    }
    return [
        {
            "index": position,
            "name": launch.name,
            "kernel": launch.kernel,
            "jump": launch.jump.kind if launch.jump else "",
            "barrier": barrier,
            "serial": launch.serial,
            "reads": list(launch.reads),
            "writes": list(launch.writes),
            "bytes": _touched_bytes(launch, flat.buffers, caches),
            "cached": sum(caches[b] for b in launch.reads if b in caches)
            if launch.name.endswith(_READS_CACHE)
            else 0,
        }
        for position, (launch, barrier) in enumerate(zip(flat.launches, plan.barriers, strict=True))
    ]


def _row_thresholds(compilation: Compilation, compiled: Compiled) -> list[dict[str, Any]]:
    """The products with two paths, and the most rows of the first one: measured on this machine, or the default."""
    assert compilation.backends is not None
    measured: dict[str, int] = {}
    for backend in compilation.backends:
        measured |= find_thresholds(compiled, backend).rows
    defaults: dict[str, int] = {}
    for launch in compiled.main.launches:
        if launch.limit is not None:
            defaults[launch.limit.name] = launch.slots[launch.limit.slot].addend
    return [
        {"products": name, "rows": measured.get(name, rows), "measured": name in measured}
        for name, rows in sorted(defaults.items())
    ]


def _kernels(
    compilation: Compilation, flat: Flat, launches: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The kernels of all devices; `launches` are those of `_launches`."""
    all_launches = [*flat.once, *flat.launches]
    assert compilation.backends is not None
    targets = [backend.target for backend in compilation.backends]
    return [
        {
            "key": key,
            "name": ir.name,
            "holds": sorted({_LAYER.sub("", x.name) for x in all_launches if x.kernel == key}),
            "launches": [x["index"] for x in launches if x["kernel"] == key],
            "at_load": sum(x.kernel == key for x in flat.once),
            "ir": str(ir),
            "llvm": k.emit_llvm(ir, target) if isinstance(target, k.LLVMTarget) else "",
        }
        for target, irs in zip(targets, compilation.irs, strict=True)
        for key, ir in irs.items()
    ]


def _memory(flat: Flat, plan: MemoryPlan) -> tuple[list[dict[str, Any]], int]:
    """The temporaries in the arena with their lifetimes, in launches, and the bytes of the arena."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, launch in enumerate(flat.launches):
        for buffer in (*launch.reads, *launch.writes):
            first.setdefault(buffer, position)
            last[buffer] = position
    offsets, arena_bytes = _offsets(plan)
    memory = [
        {
            "buffer": b,
            "first": first[b],
            "last": last[b],
            "offset": offsets[plan.block_of[b]],
            "bytes": nominal(flat.buffers[b].bytes),
            "size": str(flat.buffers[b].bytes),
        }
        for b in sorted(first)
        if b in plan.block_of
    ]
    return memory, arena_bytes


def _token_bytes(cache: TensorInfo) -> int:
    """The bytes of the keys and values of one token in one layer of a paged cache."""
    _, pair, _, _, heads, size = cache.shape  # [pages, 2, layers, tokens, heads, size]
    return nominal(pair * heads * size) * cache.dtype.size_in_bytes


def _touched_bytes(launch: Launch, buffers: list[Buffer], caches: dict[int, int]) -> int:
    """The bytes that a launch reads and writes, with each symbol at a nominal size."""
    sizes = {b: nominal(buffers[b].bytes) for b in (*launch.reads, *launch.writes)}
    written = sum(sizes[b] for b in launch.writes if b not in caches)
    # of a cache only new tokens are touched: a nominal number of them
    if launch.name.endswith(_PAGED):
        sizes |= {b: NOMINAL * size for b, size in caches.items() if b in sizes}
    if launch.name.endswith(_GATHERING):
        # the largest operand is the table: as much of it is read as written
        table = max((b for b in launch.reads if b not in caches), key=lambda b: sizes[b])
        sizes[table] = min(sizes[table], written)
    return sum(sizes.values())


def _tensor(info: TensorInfo) -> str:
    dims = ", ".join(map(str, info.shape))
    return f"{'buffer ' if info.mutable else ''}{info.dtype.name}[{dims}]"


def _offsets(plan: MemoryPlan) -> tuple[list[int], int]:
    """Where each block of the arena begins, at nominal sizes, and where the last one ends."""
    offsets: list[int] = []
    end = 0
    for block in plan.blocks:
        offsets.append(end)
        # a block is as long as the longest buffer that shares it
        sizes: list[Size] = block.sizes
        end += -(-max(nominal(size) for size in sizes) // ALIGNMENT) * ALIGNMENT
    return offsets, end
