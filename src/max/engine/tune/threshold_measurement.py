"""Measurement of a row threshold: runs launches of a loaded program on both paths, on separate memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from max._backends.backend import Backend, MemoryBlock
from max._backends.program import NativeArray
from max._compiler.program.code import Compiled, LaunchCode, LimitCode, ProgramCode
from max._dataclass import dataclass
from max.engine.run.linked_program import LinkedProgram
from max.engine.tune.row_thresholds import Threshold
from max.mlir.sizes import product, size_function

__all__ = ["Linker", "Measurement", "PoolIsBusyError", "stats"]

Linker = Callable[[ProgramCode, Mapping[str, int]], LinkedProgram]
"""Links a program with thresholds by name."""

MOST_INPUT_BYTES = 64 << 20
"""The maximum size of the operands and results, other than weights, of measured launches."""
ROUNDS, FEWEST_ROUNDS = 8, 4
"""The number of alternating runs of each path."""
ENOUGH_SECONDS = 0.1
"""The time after which no further round begins."""
CLEAR_GAIN = 0.9
"""A path replaces the default if it takes at most this share of its time, in each half of the runs."""
TURN_RUNS = 4
"""What a turn adds to the pool's number of runs: two runs count twice each."""
PAUSE = 0.0002
"""Seconds between rounds without the pool's lock: a lock that is retaken at once is never handed over."""


@dataclass
class MeasureStats:
    """Counts since the process started; tests gate on them."""

    num_measured: int = 0
    """The number of measured thresholds."""
    given_up: int = 0
    """The number of measurements abandoned because the pool was needed."""


stats = MeasureStats()


class PoolIsBusyError(Exception):
    """Something else ran on the pool during a measurement."""


@dataclass
class _Ready:
    """Sizes and memory of the launches for a number of rows."""

    offsets: NativeArray
    bases: bytes
    memory: list[MemoryBlock]


class Measurement:
    """Runs launches of a program separately.

    Args:
        compiled: The program; results computed once must exist.
        link: Links parts of it.
        launches: The launches; their thresholds have one name.
        backend: The device.
        is_stopped: Called between runs; returns whether to abandon the measurement.
    """

    def __init__(
        self,
        compiled: Compiled,
        link: Linker,
        launches: Sequence[LaunchCode],
        backend: Backend,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._compiled = compiled
        self._backend = backend
        self._stopped = is_stopped
        limit = launches[0].limit
        assert limit is not None
        self._limit: LimitCode = limit
        default = launches[0].slots[limit.slot].addend
        assert backend.tuning is not None
        self._max_rows = min(limit.maximum, backend.tuning.most_rows)
        self._default = min(default, self._max_rows)
        # each launch waits for the one before, as in the program
        part = replace(
            compiled.main,
            launches=[replace(launch, barrier=True) for launch in launches],
            host_steps=[], checks=[], outputs=[],
        )  # fmt: skip
        # the first always takes the GEMV path, the second never
        self._paths = [link(part, {limit.name: rows}) for rows in (limit.maximum, 0)]
        used = {
            part.values[slot.value].base
            for launch in launches
            for slot in (*launch.slots, limit.rows)
        }
        layout = compiled.bases
        tensors = dict(enumerate(compiled.inputs, layout.inputs.start))
        tensors |= dict(enumerate(compiled.outputs, layout.outputs.start))
        self._used_bases = sorted(used & tensors.keys())
        # such as the arena of another segment: nothing stands for it
        self._needs_other_memory = bool(used - tensors.keys() - {layout.NOTHING, layout.arena()})
        operands = [tensors[base] for base in self._used_bases]
        sizes = [product(tensor.shape) * tensor.dtype.size_in_bytes for tensor in operands]
        self._sizes = size_function(sizes, compiled.symbols)
        self._quality = 1.0

    def threshold(self) -> Threshold | None:
        """Measures at once, with pauses.

        Returns:
            The threshold; None if no sizes of the program give the required rows.

        Raises:
            PoolIsBusyError: Something else ran on the pool, or `is_stopped` returned true.
        """
        turns, run_number = self.turns(), self._backend.run_number()
        while True:
            time.sleep(PAUSE)
            if self._stopped() or self._backend.run_number() != run_number:
                stats.given_up += 1
                raise PoolIsBusyError
            try:
                next(turns)
            except StopIteration as end:
                return end.value
            run_number += TURN_RUNS

    def turns(self) -> Generator[None, None, Threshold | None]:
        """Doubles or halves the rows from the default until the other path is faster, then tries a number in between;
        stops after each turn, which runs both paths once.

        Returns:
            The threshold; None if no sizes of the program give the required rows.
        """
        faster_rows, slower_rows = 1, self._max_rows + 1
        rows = self._default
        while faster_rows < rows < slower_rows:
            faster = yield from self._few_is_faster(rows)
            if faster is None:
                return None
            if faster:
                faster_rows, rows = rows, min(2 * rows, self._max_rows)
            else:
                slower_rows, rows = rows, rows // 2
        between = (faster_rows + slower_rows) // 2
        if faster_rows < between and slower_rows <= self._max_rows:
            faster = yield from self._few_is_faster(between)
            if faster is None:
                return None
            faster_rows = between if faster else faster_rows
        stats.num_measured += 1
        # the result for the greatest measured number of rows holds for all greater ones
        return Threshold(
            self._limit.maximum if faster_rows == self._max_rows else faster_rows, self._quality
        )

    def _few_is_faster(self, rows: int) -> Generator[None, None, bool | None]:
        """Whether the GEMV path is faster; None if the program cannot have this number of rows."""
        ready = self._prepare(rows)
        if ready is None:
            return None
        backend = self._backend
        seconds: tuple[list[float], list[float]] = ([], [])
        elapsed = cpu = 0.0
        for turn in range(ROUNDS + 1):
            if turn > FEWEST_ROUNDS and elapsed > ENOUGH_SECONDS:
                break
            begin, begin_cpu = time.perf_counter(), time.process_time()
            for path_seconds, program in zip(seconds, self._paths, strict=True):
                start = time.perf_counter()
                program.executor.run_at(ready.bases, program.bases, ready.offsets)
                path_seconds.append(time.perf_counter() - start)
            if turn:  # the first turn is a warm-up: it touches memory and wakes the workers
                elapsed += time.perf_counter() - begin
                cpu += time.process_time() - begin_cpu
            yield
        self._quality = min(self._quality, max(cpu / (backend.workers * elapsed), 0.0))
        middle = (len(seconds[0]) + 1) // 2
        halves = slice(1, middle), slice(middle, None)
        best = [[min(path_seconds[half]) for path_seconds in seconds] for half in halves]
        # the default stays unless the other path clearly wins
        if rows <= self._default:
            return any(many_time > CLEAR_GAIN * few_time for few_time, many_time in best)
        return all(few_time <= CLEAR_GAIN * many_time for few_time, many_time in best)

    def _prepare(self, rows: int) -> _Ready | None:
        """Sizes and memory for which the launches have this number of rows; None if no sizes give it."""
        program, count = self._paths[0], len(self._compiled.symbols)
        if self._needs_other_memory:
            return None
        ones = [1] * count
        # all symbols at once, then each alone: any of them may count the rows
        candidates = [(rows,) * count, *[(*ones[:i], rows, *ones[i + 1 :]) for i in range(count)]]
        for symbols in candidates:
            instance = program.instance(symbols)
            bases = np.zeros(self._compiled.bases.count(), np.int64)
            slot = self._limit.rows
            base = bases.take(program.bases.array)[slot.value] + instance.offsets.array[slot.value]
            sizes = self._sizes(symbols)
            if base + slot.addend != rows or sum(sizes) > MOST_INPUT_BYTES:
                continue
            memory = [
                self._backend.allocate(max(size, 1), zero=True)
                for size in (instance.arena_bytes, *sizes)
            ]
            places = [self._compiled.bases.arena(), *self._used_bases]
            for base, block in zip(places, memory, strict=True):
                bases[base] = block.address
            return _Ready(instance.offsets, bases.tobytes(), memory)
        return None
