"""The recorder: records calls on eager tensors, and runs them when a value is needed.

A thread that repeats the calls of an earlier stretch follows its trace instead (`_traces`, `_replays`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from threading import get_ident
from types import CodeType
from typing import Any
from weakref import ref

from max import driver
from max._config import flags
from max._host.process_caches import process_cache
from max._host.reentry import (
    ReentryError,
    exclusively,
    hold_lock,
    reentrant_lock,
    refuse_second_use,
)
from max.engine import ExecutionInterrupted
from max.experimental.programs.argument_trees import describe
from max.experimental.programs.lazy_values import Call, Cell
from max.experimental.programs.programs import Recording, execute, program_of, stage_recording
from max.experimental.programs.signatures import signature_of
from max.experimental.programs.staging import Structure
from max.experimental.programs.value_types import type_of
from max.experimental.record.nan_checks import check_nans
from max.experimental.replay.pending_tensors import LOCK, PENDING
from max.experimental.replay.replays import Replay, settle_all
from max.experimental.replay.symbolic_traces import generalized_trace
from max.experimental.replay.traces import Capture, Trace, UserLine
from max.graph import Graph
from max.graph.staging.current import CURRENT
from max.graph.staging.user_lines import user_frame, user_place

__all__ = [
    "NAME",
    "PENDING_CALLS",
    "RECORDING",
    "THREAD",
    "use_recorder",
    "begin",
    "compute",
    "compute_all",
    "end_replay",
    "materialize",
    "pending_tensors",
    "record",
    "staged_graph",
]

PENDING_CALLS = 1024
"""The number of recorded calls at which all run, so that a program that needs no value uses bounded memory."""
_PACKAGES = ("max", "numpy", "xdsl", "llvmlite")
"""Where errors of runs are raised."""
_SITES = 1024
"""The maximum number of lines with a trace; the oldest are dropped."""
_MISSES = 2
"""The number of stretches in a row that may leave a trace before it is dropped."""
_MOST_SKIPPED = 255
"""The maximum number of stretches between the drop of a trace and the next capture."""


class _Site:
    """A line of the program at which stretches begin.

    Attributes:
        code: Its code, kept alive as its identity is the key of the site.
        trace: The calls of the last stretch from this line; None if none is kept.
        misses: The number of stretches in a row that left the trace.
        skipped: The number of further stretches that are recorded without a capture.
        pause: The value that `skipped` was last set to.
    """

    __slots__ = ("code", "misses", "pause", "skipped", "trace")

    def __init__(self, code: CodeType) -> None:
        self.code = code
        self.trace: Trace | None = None
        self.misses = self.skipped = self.pause = 0

    def count_miss(self) -> None:
        """Counts a stretch that left the trace. A trace that is left repeatedly is dropped, each time for longer."""
        self.misses += 1
        if self.misses > _MISSES:
            self.trace, self.misses = None, 0
            self.skipped = self.pause = min(2 * self.pause + 1, _MOST_SKIPPED)

    def learn(self, trace: Trace | None, recording: Recording) -> None:
        """Sets the trace to that of a new stretch, or generalizes the earlier trace.

        Args:
            trace: The trace; None if the stretch cannot be followed.
            recording: The calls that were run in it.
        """
        general = None
        if trace is not None and self.trace is not None:
            general = generalized_trace(self.trace, trace, recording)
        if general is not None and general.symbolic is not None:
            self.misses = 0
        self.trace = general or trace


class _Thread(threading.local):
    """The recorder's state of a thread.

    Attributes:
        replay: The replay in progress; None if the thread records.
        capture: The calls since the last value, if they are captured.
        site: The line where the stretch began.
        begins: Whether the next call begins a stretch.
        calls: The number of calls recorded since the last value.
    """

    replay: Replay | None = None
    capture: Capture | None = None
    site: _Site | None = None
    begins = True
    calls = 0


THREAD = _Thread()
RECORDING: set[int] = set()
"""The threads that use the recorder. Their signal handlers and finalizers get an error instead of a call or a value."""
NAME = "the record of eager tensors"
_sites: dict[tuple[int, int, Callable[..., Any]], _Site] = process_cache({})
_sites_lock = reentrant_lock()


def begin(op: Callable[..., Any]) -> Replay | None:
    """Begins a stretch with a call of an op, made by the caller's caller.

    Returns:
        The replay of its trace; None to record.
    """
    THREAD.begins = False
    if flags.MAX_DEBUG_NANS:
        return None
    frame, _ = user_frame(2)
    code = frame.f_code
    key = (id(code), frame.f_lasti, op)
    site = THREAD.site = _sites.get(key)
    if site is None:
        with _sites_lock:
            if len(_sites) >= _SITES:
                _sites.pop(next(iter(_sites)))
            _sites[key] = THREAD.site = _Site(code)
    elif site.trace is not None:
        replay = THREAD.replay = Replay(site.trace)
        return replay
    elif site.skipped:
        site.skipped -= 1
    else:
        THREAD.capture = Capture()
    return None


def end_replay(replay: Replay) -> None:
    """Ends this thread's replay, as the next call differs from the trace; its calls are recorded."""
    THREAD.replay = None
    THREAD.calls = replay.position
    replay.settle()
    site = THREAD.site
    if site is not None:
        site.count_miss()
        if site.trace is not None:
            THREAD.capture = replay.capture()


def use_recorder(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function that uses the recorder.

    Raises:
        RuntimeError: A signal handler, finalizer or trace function called it inside another use by this thread.
    """
    replay = THREAD.replay
    if replay is not None and replay.in_use:
        refuse_second_use(replay, NAME)
    if CURRENT.get() and get_ident() in RECORDING:
        return function(*args)  # the function that stages an op reads a value
    return exclusively(RECORDING, NAME, function, *args)


def pending_tensors() -> list[Any]:
    """The tensors that are not computed yet."""
    return use_recorder(_pending_tensors)


def _pending_tensors() -> list[Any]:
    settle_all()
    return PENDING.alive()


def record(
    op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Structure | None, list[Cell]]:
    """Records a call.

    Args:
        op: A function that stages ops of a graph and returns a tensor, or a list or tuple of tensors.
        args: Its arguments, eager tensors among them.
        kwargs: Its keyword arguments.

    Returns:
        The structure of its results (None for one tensor, else `list` or `tuple`), and their cells.

    Raises:
        ValueError, TypeError: What the op raises for tensors that do not fit.
    """
    cells: list[Cell] = []
    numbers: list[int | float] = []
    described = [describe(arg, cells, numbers) for arg in args]
    if kwargs:
        described += [describe(arg, cells, numbers) for arg in kwargs.values()]
    arguments = (op, tuple(described), tuple(kwargs))
    place = user_place()
    signature = signature_of(arguments, tuple([cell.type for cell in cells]), tuple(numbers), place)
    call = Call(signature, cells, place)
    structure = signature.family.structure
    # the types of the results depend on values: the call runs now
    if None in signature.results:
        results = _run_now(call)
        if flags.MAX_DEBUG_NANS:
            check_nans(call, cells, results)
        return structure, results
    results = [
        Cell(type_, None, call, index) for index, type_ in enumerate(signature.results) if type_
    ]
    # weakly: a result that the program drops is not kept alive by its call
    call.results = tuple([ref(cell) for cell in results])
    capture = THREAD.capture
    if capture is not None:
        frame, depth = user_frame()
        line = UserLine(frame.f_code, frame.f_lasti, depth, place)
        capture.add(call, args, kwargs, results, line)
    if flags.MAX_DEBUG_NANS:
        compute(results)
        check_nans(call, cells, results)
    count = THREAD.calls + 1
    THREAD.calls = count
    # bounds the memory of a loop that never needs a value
    if count >= PENDING_CALLS:
        _flush(results)
    return structure, results


def _flush(results: Sequence[Cell]) -> None:
    """Computes all recorded calls, the last of which has these results."""
    compute(results)
    compute_all()


class _FlushingStructure:
    """The structure of the results of a call that flushes the record."""

    def __init__(self, structure: Structure | None) -> None:
        self._structure = structure

    def __call__(self, tensors: list[Any]) -> Any:
        use_recorder(_flush, [tensor._cell for tensor in tensors])
        return tensors[0] if self._structure is None else self._structure(tensors)


def materialize(cells: Sequence[Cell]) -> None:
    """Computes cells, and those values that they depend on which the program holds."""
    use_recorder(compute, cells)


@hold_lock(LOCK)
def compute(cells: Sequence[Cell]) -> None:
    """`materialize`, for functions that use the recorder already."""
    targets = [cell for cell in cells if cell.storage is None]
    if not targets:
        return
    # the stretch ends here, even if the run raises
    replay, capture = THREAD.replay, THREAD.capture
    THREAD.replay = THREAD.capture = None
    THREAD.begins, THREAD.calls = True, 0
    if replay is not None and _finish(replay, targets):
        return
    recording, outputs = _recording_of(targets)
    # before the run: a tensor that is freed meanwhile was still an output
    held = [] if capture is None else capture.held_results(targets)
    program = program_of(recording)
    storages = execute(
        program,
        recording.leaves,
        lambda number: recording.calls[number].place,
    )
    if capture is not None and THREAD.site is not None:
        # a trace that ends with a full record must flush at the same call when it is replayed
        structure = None
        if capture.calls == PENDING_CALLS:
            structure = _FlushingStructure
        trace = capture.finish(targets, recording, outputs, held, program, structure)
        THREAD.site.learn(trace, recording)
    for cell, storage in zip(outputs, storages, strict=True):
        cell.keep(storage)


def _finish(replay: Replay, targets: Sequence[Cell]) -> bool:
    """Runs the program of this thread's replay; returns False if it does not compute these values."""
    site = THREAD.site
    if not replay.finish(targets):
        if site is not None:
            site.count_miss()
        return False
    if site is not None:
        site.misses = site.pause = 0
    return True


@hold_lock(LOCK)
def compute_all() -> None:
    """Computes all tensors that the program holds, for functions that use the recorder already.

    Nothing is raised, as the program needs none of the values here: a tensor that cannot be computed keeps its error,
    which each use of it raises.
    """
    # one program for all; if it fails, one by one, to find the value that cannot be computed
    cells = [tensor._cell for tensor in _pending_tensors()]
    try:
        compute(cells)
    except Exception as error:
        if not _is_lasting(error):
            raise
        for cell in cells:
            try:
                compute([cell])
            except Exception as error:
                if not _is_lasting(error):
                    raise
                _call_of(cell).error = error


def _is_lasting(error: Exception) -> bool:
    """Whether a run raises an error again; not those of signal handlers and events, which end any run."""
    if isinstance(error, ReentryError | ExecutionInterrupted):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return raised_in.partition(".")[0] in _PACKAGES


def _recording_of(targets: Sequence[Cell]) -> tuple[Recording, list[Cell]]:
    """The calls that compute cells, in order; and the cells to keep: the targets, and the held ones on the way."""
    numbers: dict[Call, int] = {}
    calls: list[Call] = []
    leaves: dict[int, int] = {}
    leaf_cells: list[Cell] = []
    inputs: list[tuple[tuple[int, int], ...]] = []
    # depth first, without recursion: chains are as long as PENDING_CALLS
    stack: list[Call] = [_call_of(cell) for cell in reversed(targets)]
    while stack:
        call = stack[-1]
        if call in numbers:
            stack.pop()
            continue
        if call.error is not None:
            raise call.error.with_traceback(None)
        sources: list[tuple[int, int]] = []
        first: list[Call] = []
        for cell in call.inputs:
            storage = cell.storage
            if storage is None:
                source = _call_of(cell)
                number = numbers.get(source)
                if number is None:
                    first.append(source)
                else:
                    sources.append((number, cell.index))
                continue
            # one input for each memory, even if several cells are on it
            leaf = leaves.get(id(storage))
            if leaf is None:
                leaf = leaves[id(storage)] = len(leaf_cells)
                leaf_cells.append(cell)
            sources.append((-1, leaf))
        if first:
            stack.extend(reversed(first))
            continue
        stack.pop()
        numbers[call] = len(calls)
        calls.append(call)
        inputs.append(tuple(sources))
    kept = {id(cell): cell for cell in targets}
    for call in calls:
        for reference in call.results:
            cell = reference()
            if (
                cell is not None
                and cell.tensor_reference is not None
                and cell.tensor_reference() is not None
            ):
                kept[id(cell)] = cell
    outputs: list[tuple[int, int]] = []
    for cell in kept.values():
        outputs.append((numbers[_call_of(cell)], cell.index))
    return Recording(calls, leaf_cells, inputs, outputs), list(kept.values())


def _call_of(cell: Cell) -> Call:
    """The call that computes a cell."""
    call = cell.call
    if isinstance(call, Replay):
        call.settle()
        call = cell.call
    assert isinstance(call, Call)
    return call


def _run_now(call: Call) -> list[Cell]:
    """Runs a call at once, as the sizes of its results are only known after the run."""
    # the call ends the stretch, as a value does
    THREAD.capture, THREAD.begins = None, True
    storages = _execute_call(call)
    return [Cell(type_of(storage), storage) for storage in storages]


@hold_lock(LOCK)
def _execute_call(call: Call) -> list[driver.Tensor]:
    """Runs a call and what it depends on."""
    compute(call.inputs)
    leaves: dict[int, int] = {}
    cells: list[Cell] = []
    for cell in call.inputs:
        if id(cell.storage) not in leaves:
            leaves[id(cell.storage)] = len(cells)
            cells.append(cell)
    sources = tuple([(-1, leaves[id(cell.storage)]) for cell in call.inputs])
    outputs = [(0, index) for index in range(len(call.signature.results))]
    return execute(
        program_of(Recording([call], cells, [sources], outputs)),
        cells,
        lambda _: call.place,
    )


def staged_graph() -> Graph:
    """A graph of what was recorded, with the tensors that are not computed yet as outputs."""
    return use_recorder(_staged_graph)


@hold_lock(LOCK)
def _staged_graph() -> Graph:
    recording, _ = _recording_of([tensor._cell for tensor in _pending_tensors()])
    return stage_recording(recording)
