"""Runs the program that computes results from weights once, in parts, so that memory is freed early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from max._backends import Backends
from max._backends.backend import HOST
from max._compiler.program.code import Compiled, LaunchCode, ProgramCode
from max._host import host_memory
from max._load_steps import STEPS
from max.engine.run.arena import arena_of
from max.engine.run.linked_program import LinkedProgram

__all__ = ["inputs_of", "needed_later", "run_once"]

PART_BYTES = 16 << 20
"""The approximate size of the weights that one part reads."""


def run_once(
    compiled: Compiled,
    link: Callable[[ProgramCode], LinkedProgram],
    fixed_addresses: Sequence[int],
    backends: Backends,
    mapped_files: host_memory.MappedFiles,
    prepare: Callable[[set[int]], None],
    drop: Callable[[set[int]], None],
) -> None:
    """Runs `compiled.once`.

    A program on the CPU runs in parts. Pages of mapped files are released after each part, as their packed copies take
    the same amount of memory. Pages that are read later (rows of an embedding table) are loaded again on demand.

    Args:
        compiled: The model.
        link: Links a part of the program.
        fixed_addresses: The addresses of the fixed buffers.
        backends: The devices of the session.
        mapped_files: The mapped files.
        prepare: Called before each part with the indices of the fixed buffers that it reads.
        drop: Called after each part with the weights and constants that later parts do not read.
    """
    needed = needed_later(compiled)
    # several devices, or another one than the CPU: all at once
    if len(compiled.once) > 1 or compiled.once[0].device != HOST:
        used = set[int]().union(*(_used_buffers(part) for part in compiled.once))
        prepare(used)
        _run_segments(compiled, link)
        drop({i for i in used - needed if compiled.fixed_buffers[i].kind != "kept"})
        return
    (once,) = compiled.once
    arena = arena_of(backends.host)
    done, total = 0, len(once.launches)
    for launches, read, finished in _parts(compiled, once.launches):
        STEPS.at("packing weights", done, total)
        done += len(launches)
        prepare(read)
        program = link(replace(once, launches=launches))
        instance = program.instance((0,) * len(compiled.symbols))
        address, _memory = arena.take(instance.arena_bytes, instance.holes)
        bases = np.zeros(compiled.bases.count(), np.int64)
        bases[compiled.bases.arena()] = address
        program.run(instance, bases.tobytes())
        for index in finished:
            mapped_files.give_back(fixed_addresses[index], compiled.fixed_buffers[index].bytes)
        drop(finished - needed)


def needed_later(compiled: Compiled) -> set[int]:
    """The fixed buffers that executions read, by their numbers."""
    return _used_buffers(compiled.main).union(*(_used_buffers(part) for part in compiled.later))


def inputs_of(compiled: Compiled) -> set[int]:
    """The fixed buffers that `compiled.once` reads or writes, by their numbers."""
    return set[int]().union(*(_used_buffers(part) for part in compiled.once))


def _run_segments(compiled: Compiled, link: Callable[[ProgramCode], LinkedProgram]) -> None:
    """Runs programs of several devices, or of another device than the CPU, with copies between them."""
    layout = compiled.bases
    programs = [link(code) for code in compiled.once]
    bases = np.zeros(layout.count(len(programs)), np.int64)
    owners: list[object] = []
    for segment, program in enumerate(programs):
        instance = program.instance((0,) * len(compiled.symbols))
        arena = arena_of(program.backend)
        block = arena.separate(instance.arena_bytes, instance.holes)
        bases[layout.arena(segment)] = block.address
        owners.append(block.owner)
        if not program.empty:
            program.run(instance, bases.tobytes())
        program.run_host_steps(instance, bases, {})
    for backend in {program.backend for program in programs if program.waits}:
        backend.synchronize()


def _parts(
    compiled: Compiled, launches: Sequence[LaunchCode]
) -> Iterator[tuple[list[LaunchCode], set[int], set[int]]]:
    """Splits the launches into parts; yields each with the weights that it reads, and those that it reads last.

    A large constant is a weight too.
    """
    weights = {i for i, item in enumerate(compiled.fixed_buffers) if item.kind != "kept"}
    reads = [{s.fixed_buffer for s in launch.slots} & weights for launch in launches]
    # a weight is finished at the last launch that reads it
    last = {index: n for n, read in enumerate(reads) for index in read}
    part: list[LaunchCode] = []
    read: set[int] = set()
    finished: set[int] = set()
    size = 0
    for n, launch in enumerate(launches):
        part.append(launch)
        read |= reads[n]
        finished_here = {index for index in reads[n] if last[index] == n}
        finished |= finished_here
        # only weights that nothing reads any more free memory
        size += sum(compiled.fixed_buffers[index].bytes for index in finished_here)
        if size >= PART_BYTES or n + 1 == len(launches):
            yield part, read, finished
            part, read, finished, size = [], set[int](), set[int](), 0


def _used_buffers(code: ProgramCode) -> set[int]:
    slots = [slot for launch in code.launches for slot in launch.slots]
    slots += [slot for item in code.host_steps for slot in (*item.bounds, *item.shape)]
    return {slot.fixed_buffer for slot in slots if slot.fixed_buffer >= 0}
