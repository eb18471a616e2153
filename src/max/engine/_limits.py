"""Which of two ways kernels take for how many rows: measured where a program is loaded, and remembered.

A kernel that multiplies few rows otherwise than many takes the limit as an argument (`max._kernel_library.lowering.Limit`). Where it is best depends
on the processor, its caches and the shape. So the first model with such a product on a machine runs some of its own launches both ways, on
memory of its own, for rows around the guess; a tenth of a second each. Both ways give the same result: nothing but time depends on it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from max._backends import Backend
from max._compiler.emit import ChoiceCode, Compiled, LaunchCode, ProgramCode
from max._compiler.sizes import product, size_function
from max._config import flags
from max._runtime import platform
from max._runtime.cache import content_key, default_cache, source_fingerprint
from max.engine._program import LinkedProgram

__all__ = ["Linker", "find_limits"]

logger = logging.getLogger("max.engine")

Linker = Callable[[ProgramCode, Mapping[str, int]], LinkedProgram]
"""Makes a program with given limits."""

LEAST_BYTES = 1 << 20
"""Of weights; with less of them it matters little."""
SAMPLE_BYTES = 48 << 20
"""Of weights that are multiplied in a measurement, about: more than caches hold, as in a model, where each is read once a step."""
MOST_INPUT_BYTES = 64 << 20
"""Launches that read or write more of what comes from outside are not measured."""
MOST_ROWS = 128
ROUNDS, FEWEST_ROUNDS = 8, 4
"""Runs of each way, in turn."""
ENOUGH_SECONDS = 0.1
"""After that much no further rounds are begun."""
CLEARLY = 0.9
"""A guess is left for a way that takes at most this part of the time, in each half of the runs."""
UNDISTURBED = 0.9
"""Of the time of its workers the process must have had this part: on a busy machine the way with smaller tasks would seem faster."""

_known: dict[str, int] = {}


def find_limits(compiled: Compiled, link: Linker, backend: Backend) -> dict[str, int]:
    """The limits of a program's launches that are known or can be measured, by name.

    Args:
        compiled: The program; what is computed once was computed.
        link: Makes parts of it ready.
        backend: The device that it runs on.
    """
    groups: dict[str, list[LaunchCode]] = {}
    for launch in compiled.main.launches:
        if launch.choice is not None:
            groups.setdefault(launch.choice.name, []).append(launch)
    if not groups or not flags.MAX_AUTOTUNE or flags.MAX_KERNEL_INTERPRET:
        return {}
    found: dict[str, int] = {}
    cache = default_cache()
    makers = [source_fingerprint(package) for package in ("_kernel_library", "kernel", "engine")]
    for name, launches in groups.items():
        sample = _sample(compiled, launches)
        if not sample:
            continue
        key = content_key(
            name, backend.target.cache_key, str(backend.workers), *makers,
        )  # fmt: skip
        limit = _known.get(key)
        if limit is None and (stored := cache.get("limits", key)) is not None:
            limit = int.from_bytes(stored, "little")
        if limit is None:
            start = time.perf_counter()
            limit = _Measurement(compiled, link, sample, backend.workers).limit()
            if limit is None:
                continue  # the guess, until the next time
            logger.info(
                "%s: up to %d rows are few (%.0f ms)",
                name,
                limit,
                1e3 * (time.perf_counter() - start),
            )
            cache.put("limits", key, limit.to_bytes(4, "little"))
        found[name] = _known[key] = limit
    return found


def _sample(compiled: Compiled, launches: Sequence[LaunchCode]) -> list[LaunchCode]:
    """Some launches, those with small weights first; none where all together have little."""
    sizes = [
        sum(
            compiled.fixed[fixed].bytes
            for fixed in {slot.fixed for slot in launch.slots}
            if fixed >= 0
        )
        for launch in launches
    ]
    if sum(sizes) < LEAST_BYTES:
        return []
    order = sorted(range(len(launches)), key=sizes.__getitem__)
    ends = itertools.accumulate(sizes[i] for i in order)
    taken = [launches[i] for i, end in zip(order, ends, strict=True) if end <= SAMPLE_BYTES]
    return taken or [launches[order[0]]]


@dataclass
class _Ready:
    """Both ways for a number of rows."""

    offsets: npt.NDArray[np.int64]
    bases: npt.NDArray[np.int64]
    memory: list[npt.NDArray[np.uint8]]


class _Measurement:
    """Runs launches of a program by themselves.

    Args:
        compiled: The program.
        link: Makes parts of it ready.
        launches: The launches; they have a limit of the same name.
        workers: How many workers share the work of a launch.
    """

    def __init__(
        self, compiled: Compiled, link: Linker, launches: Sequence[LaunchCode], workers: int
    ) -> None:
        self._compiled = compiled
        self._workers = workers
        choice = launches[0].choice
        assert choice is not None
        self._choice: ChoiceCode = choice
        guess = launches[0].slots[choice.slot].addend
        self._most = min(choice.most, MOST_ROWS)
        self._guess = min(guess, self._most)
        # all wait for each other, as in the program
        part = replace(
            compiled.main,
            launches=[replace(launch, barrier=True) for launch in launches],
            discoveries=[], checks=[], outputs=[],
        )  # fmt: skip
        self._ways = [link(part, {choice.name: limit}) for limit in (choice.most, 0)]
        used = {
            part.values[slot.value].base
            for launch in launches
            for slot in (*launch.slots, choice.rows)
        }
        layout = compiled.bases
        tensors = dict(enumerate(compiled.inputs, layout.inputs.start))
        tensors |= dict(enumerate(compiled.outputs, layout.outputs.start))
        self._used = sorted(used & tensors.keys())
        self._other = bool(used - tensors.keys() - {layout.NOTHING, layout.arena()})
        given = [tensors[base] for base in self._used]
        sizes = [product(tensor.shape) * tensor.dtype.size_in_bytes for tensor in given]
        self._sizes = size_function(sizes, compiled.symbols)

    def limit(self) -> int | None:
        """Up to how many rows the first way is taken; None where the program cannot have the rows that are needed, or others use the processor."""
        few, many = 1, self._most + 1
        rows = self._guess
        while few < rows < many:
            faster = self._few_is_faster(rows)
            if faster is None:
                return None
            if faster:
                few, rows = rows, min(2 * rows, self._most)
            else:
                many, rows = rows, rows // 2
        between = (few + many) // 2
        if few < between < many <= self._most:
            faster = self._few_is_faster(between)
            if faster is None:
                return None
            few = between if faster else few
        # the greatest that was measured stands for all beyond
        return self._choice.most if few == self._most else few

    def _few_is_faster(self, rows: int) -> bool | None:
        ready = self._prepare(rows)
        if ready is None:
            return None
        taken: tuple[list[float], list[float]] = ([], [])
        begin, cpu = 0.0, 0.0
        for turn in range(ROUNDS + 1):
            if turn == 1:  # the first touches memory, and wakes workers
                begin, cpu = time.perf_counter(), time.process_time()
            elif turn > FEWEST_ROUNDS and time.perf_counter() - begin > ENOUGH_SECONDS:
                break
            for way, program in zip(taken, self._ways, strict=True):
                start = time.perf_counter()
                program.executor.run_at(ready.bases, program.bases, ready.offsets)
                way.append(time.perf_counter() - start)
        had = time.process_time() - cpu
        if had < UNDISTURBED * self._workers * (time.perf_counter() - begin):
            return None
        middle = (len(taken[0]) + 1) // 2
        halves = slice(1, middle), slice(middle, None)
        best = [[min(way[half]) for way in taken] for half in halves]
        if rows <= self._guess:
            return any(many > CLEARLY * few for few, many in best)
        return all(few <= CLEARLY * many for few, many in best)

    def _prepare(self, rows: int) -> _Ready | None:
        """Sizes and memory with which the launches have so many rows; None where there are none."""
        program, count = self._ways[0], len(self._compiled.symbols)
        if self._other:
            return None
        one = [1] * count
        tries = [(rows,) * count, *[(*one[:i], rows, *one[i + 1 :]) for i in range(count)]]
        for symbols in tries:
            instance = program.instance(symbols)
            bases = np.zeros(self._compiled.bases.count(), np.int64)
            slot = self._choice.rows
            have = bases.take(program.bases)[slot.value] + instance.offsets[slot.value]
            sizes = self._sizes(symbols)
            if have + slot.addend != rows or sum(sizes) > MOST_INPUT_BYTES:
                continue
            memory = [platform.allocate(max(size, 1)) for size in (instance.arena_bytes, *sizes)]
            for block in memory:
                block[:] = 0
            places = [self._compiled.bases.arena(), *self._used]
            for base, block in zip(places, memory, strict=True):
                bases[base] = block.ctypes.data
            return _Ready(instance.offsets, bases, memory)
        return None
