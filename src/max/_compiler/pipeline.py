"""The compiler from top to bottom: the ordered list of passes, then kernels, memory, program."""

from __future__ import annotations

import time
from collections.abc import Iterator

from max import kernel as k
from max._backends.backend import Backends
from max._compiler import mok
from max._compiler.analysis.outer_symbols import scopes
from max._compiler.locations import number_ops
from max._compiler.lowering.graph_lowering import lower_graph
from max._compiler.lowering.kernel_tables import KernelTables
from max._compiler.passes.attention import fuse_attention
from max._compiler.passes.base import DevicePass, GraphPass, ModulePass, Pass, PassesOfBackends
from max._compiler.passes.canonicalize import canonicalize
from max._compiler.passes.channels import move_channels
from max._compiler.passes.codes import keep_codes_in_floats
from max._compiler.passes.collectives import expand_collectives
from max._compiler.passes.condition_checks import insert_checks
from max._compiler.passes.constants import fold_constants
from max._compiler.passes.fuse import fuse
from max._compiler.passes.hoist_to_load import compute_once
from max._compiler.passes.materialize import materialize
from max._compiler.passes.place import place_operands
from max._compiler.passes.redundant_ops import drop_dead_ops, merge_equal_ops
from max._compiler.passes.resolve import resolve_sizes
from max._compiler.passes.split import split_concats
from max._compiler.passes.views import push_views
from max._compiler.program.code import Compiled
from max._compiler.program.emit import emit
from max._compiler.program.flatten import flatten
from max._compiler.record import Compilation, new_record
from max._compiler.stats import stats
from max._config import dump_log, flags
from max.mlir import (
    VerifyError,
    clone_module,
    entry,
    graphs,
    print_module,
    resources,
    subgraphs,
    verify_module,
)
from max.mlir.builtin import ModuleOp

__all__ = ["PASSES", "compile_module", "optimize", "steps"]


PASSES: tuple[Pass, ...] = (
    GraphPass("drop-unused-ops", drop_dead_ops),
    ModulePass("resolve-sizes", resolve_sizes),
    # before ops are rewritten: the conditions are those of the staged ops
    GraphPass("insert-checks", insert_checks),
    # collectives become ops that the later passes know
    GraphPass("expand-collectives", expand_collectives),
    GraphPass("canonicalize", canonicalize),
    DevicePass("place-operands", place_operands),
    GraphPass("fold-constants", fold_constants),
    GraphPass("merge-equal-ops", merge_equal_ops),
    GraphPass("fuse-attention", fuse_attention),
    GraphPass("move-channels", move_channels),
    GraphPass("split-concats", split_concats),
    GraphPass("push-views", push_views),
    GraphPass("drop-dead-ops", drop_dead_ops),
    PassesOfBackends("weights"),
    # after the passes for weights, whose packing it hoists
    GraphPass("compute-once", compute_once),
    # from here on each view has a layout
    GraphPass("materialize", materialize),
    PassesOfBackends("regions"),
    GraphPass("fuse", fuse),
    # in regions only: between them codes take a quarter of the memory of floats
    GraphPass("keep-codes-in-floats", keep_codes_in_floats),
    # regions have copies of the views that they read through
    GraphPass("drop-dead-views", drop_dead_ops),
)
"""The passes in their order, with places for those of backends. Each takes valid IR and leaves valid IR."""


def steps(backends: Backends) -> Iterator[Pass]:
    """The passes in their order, those of the backends at their places."""
    for step in PASSES:
        if isinstance(step, PassesOfBackends):
            yield from step.of(backends)
        else:
            yield step


def optimize(
    module: ModuleOp,
    backends: Backends,
    last: str | None = None,
    compilation: Compilation | None = None,
) -> None:
    """Runs the passes on a module, in place.

    Args:
        module: The module.
        backends: The devices to compile for.
        last: The name of the pass to stop after; None runs all.
        compilation: The record that gets the module after each pass.
    """
    if compilation is not None:
        compilation.module("as staged", module, 0.0)
    for step in steps(backends):
        start = time.perf_counter()
        step.run(module, backends)
        end = stats.add(step.name, start)
        if compilation is not None:
            compilation.module(step.name, module, end - start)
        if dump := dump_log("passes"):
            dump.info("// ----- after %s -----\n%s", step.name, print_module(module))
        if flags.MAX_CHECK >= 2:
            verify_module(module)
        if flags.MAX_CHECK >= 3:
            check_text(module, step.name)
        if step.name == last:
            break


def check_text(module: ModuleOp, step: str) -> None:
    """Checks that a module survives printing and parsing.

    Raises:
        VerifyError: The printed text parses to a different module.
    """
    again = mok.parse(print_module(module), resources(module))
    if not again.is_structurally_equivalent(module):
        raise VerifyError(f"after {step}: the printed module does not parse back to the same")


def compile_module(
    module: ModuleOp, input_names: list[str], backends: Backends, ahead: bool = False
) -> tuple[Compiled, list[dict[str, k.KernelIR]]]:
    """Compiles a module of `mo`; the module is not changed.

    Args:
        module: The module.
        input_names: The names of the entry graph's inputs, chains left out.
        backends: The devices to compile for.
        ahead: Whether devices start to compile kernels while others are still specialized; for programs that are
            loaded.

    Returns:
        The program, and for each device the IR of its kernels by key.

    Raises:
        UnsupportedOpError: An op has no kernel.
    """
    start = time.perf_counter()
    if flags.MAX_CHECK >= 1:
        verify_module(module)
    start = stats.add("verify", start)
    work = clone_module(module)
    number_ops(work)
    start = stats.add("clone", start)
    compilation = new_record()
    optimize(work, backends, compilation=compilation)
    start = time.perf_counter()
    tables = KernelTables(backends, ahead)
    callees = subgraphs(work)
    outer_symbols = scopes(work)
    lowered_graphs = {
        graph.sym_name: lower_graph(graph, tables, callees, outer_symbols.get(graph.sym_name, ()))
        for graph in graphs(work)
    }
    start = stats.add("lower", start)
    name = entry(work).sym_name
    lowered = lowered_graphs[name]
    flat = flatten(
        lowered_graphs,
        name,
        lambda device, exact: tables[device].check(exact),
        [backend.runs_jumps for backend in backends],
    )
    start = stats.add("flatten", start)
    compiled = emit(
        name,
        flat,
        [table.infos for table in tables],
        [info for _, info in lowered.inputs],
        input_names,
        [info for _, info in lowered.outputs],
    )
    stats.add("emit", start)
    stats.modules += 1
    stats.kernels += sum(len(table.irs) for table in tables)
    irs = [
        {key: table.irs[key] for key in used}
        for table, used in zip(tables, compiled.kernels, strict=True)
    ]
    if compilation is not None:
        compilation.finish(flat, compiled, irs, backends)
    return compiled, irs
