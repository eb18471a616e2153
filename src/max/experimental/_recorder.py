"""The recorder: calls on eager tensors are recorded, and run when a value is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from max._config import flags
from max.experimental._cells import Call, Cell
from max.experimental._nans import check_nans
from max.experimental._programs import Recording, run, staged
from max.experimental._signatures import signature_of
from max.experimental._templates import describe
from max.experimental._types import type_of
from max.graph import Graph
from max.graph.graph import user_place

__all__ = [
    "PENDING_CALLS",
    "hold",
    "materialize",
    "materialize_all",
    "pending",
    "record",
    "staged_graph",
]

PENDING_CALLS = 1024
"""Calls that are recorded before they run by themselves, so that a program that needs no value uses bounded memory."""

_holders: list[ref[Any]] = []
"""Tensors that were not computed when they were made."""
_most_holders = 4 * PENDING_CALLS
"""With more of them, those that are gone or computed are removed."""
_recorded = threading.local()
_lock = threading.RLock()


def hold(cell: Cell, tensor: Any) -> None:
    """Notes that a tensor is on a cell that is not computed, so that a run which comes by keeps its value."""
    global _most_holders
    holder = cell.holder = ref(tensor)
    _holders.append(holder)
    if len(_holders) > _most_holders:
        with _lock:
            _holders[:] = [ref(tensor) for tensor in pending()]
            _most_holders = max(4 * PENDING_CALLS, 2 * len(_holders))


def pending() -> list[Any]:
    """The tensors that are not computed yet."""
    tensors = [holder() for holder in list(_holders)]
    return [tensor for tensor in tensors if tensor is not None and tensor._cell.storage is None]


def record(
    op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[type | None, list[Cell]]:
    """Records a call.

    Args:
        op: A function that stages ops of a graph and returns a tensor, or a list or tuple of tensors.
        args: Its arguments, eager tensors among them.
        kwargs: Its keyword arguments.

    Returns:
        What it returns (None for one tensor, else `list` or `tuple`), and the tensors.

    Raises:
        ValueError, TypeError: What the op raises for tensors that do not fit.
    """
    cells: list[Cell] = []
    numbers: list[int | float] = []
    described = [describe(arg, cells, numbers) for arg in args]
    if kwargs:
        described += [describe(arg, cells, numbers) for arg in kwargs.values()]
    template = (op, tuple(described), tuple(kwargs))
    place = user_place()
    signature = signature_of(template, tuple([cell.type for cell in cells]), tuple(numbers), place)
    call = Call(signature, cells, place)
    structure = signature.family.structure
    if None in signature.results:
        results = _run_now(call)
        if flags.MAX_DEBUG_NANS:
            check_nans(call, cells, results)
        return structure, results
    results = [
        Cell(type_, None, call, index) for index, type_ in enumerate(signature.results) if type_
    ]
    call.results = tuple([ref(cell) for cell in results])
    if flags.MAX_DEBUG_NANS:
        materialize(results)
        check_nans(call, cells, results)
    count = getattr(_recorded, "calls", 0) + 1
    _recorded.calls = count
    if count >= PENDING_CALLS:
        materialize(results)
        materialize_all()
    return structure, results


def materialize(cells: Sequence[Cell]) -> None:
    """Computes cells, and with them what they depend on that the program holds."""
    with _lock:
        targets = [cell for cell in cells if cell.storage is None]
        if not targets:
            return
        recording, outputs = _recording(targets)
        for cell, storage in zip(outputs, run(recording), strict=True):
            if cell.type.shape != storage.shape:
                raise RuntimeError(
                    f"an eager tensor of shape {list(cell.type.shape)} was computed with shape {list(storage.shape)}; "
                    "please report this"
                )
            cell.storage, cell.call, cell.holder = storage, None, None
        _recorded.calls = 0


def materialize_all() -> None:
    """Computes all tensors that the program holds."""
    with _lock:
        materialize([tensor._cell for tensor in pending()])


def _recording(targets: Sequence[Cell]) -> tuple[Recording, list[Cell]]:
    """The calls that cells need, in order; and the cells to keep: the targets, and tensors on the way to them."""
    numbers: dict[Call, int] = {}
    calls: list[Call] = []
    leaves: dict[int, int] = {}
    leaf_cells: list[Cell] = []
    inputs: list[tuple[tuple[int, int], ...]] = []
    # depth first, without recursion: chains are as long as PENDING_CALLS
    stack: list[Call] = [cell.call for cell in reversed(targets) if cell.call]
    while stack:
        call = stack[-1]
        if call in numbers:
            stack.pop()
            continue
        sources: list[tuple[int, int]] = []
        first: list[Call] = []
        for cell in call.inputs:
            storage = cell.storage
            if storage is None:
                source = cell.call
                assert source is not None
                number = numbers.get(source)
                if number is None:
                    first.append(source)
                else:
                    sources.append((number, cell.index))
                continue
            # one input for each memory, whatever the cells on it
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
            if cell is not None and cell.holder is not None and cell.holder() is not None:
                kept[id(cell)] = cell
    outputs: list[tuple[int, int]] = []
    for cell in kept.values():
        assert cell.call is not None
        outputs.append((numbers[cell.call], cell.index))
    return Recording(calls, leaf_cells, inputs, outputs), list(kept.values())


def _run_now(call: Call) -> list[Cell]:
    """Runs a call with results whose sizes only a run tells."""
    with _lock:
        materialize(call.inputs)
        leaves: dict[int, int] = {}
        cells: list[Cell] = []
        for cell in call.inputs:
            if id(cell.storage) not in leaves:
                leaves[id(cell.storage)] = len(cells)
                cells.append(cell)
        sources = tuple([(-1, leaves[id(cell.storage)]) for cell in call.inputs])
        outputs = [(0, index) for index in range(len(call.signature.results))]
        storages = run(Recording([call], cells, [sources], outputs))
    return [Cell(type_of(storage), storage) for storage in storages]


def staged_graph() -> Graph:
    """A graph of what was recorded, with the tensors that are not computed yet as outputs."""
    with _lock:
        recording, _ = _recording([tensor._cell for tensor in pending()])
    return staged(recording)
