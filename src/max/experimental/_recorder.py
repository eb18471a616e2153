"""The recorder: calls on eager tensors are recorded, and run when a value is needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

from max._config import flags
from max.experimental._cells import Call, Cell
from max.experimental._nans import check_nans
from max.experimental._programs import Recording, run, staged
from max.experimental._signatures import signature_of
from max.experimental._templates import Template, describe
from max.experimental._types import type_of
from max.graph import Graph
from max.graph.graph import user_place

__all__ = ["PENDING_CALLS", "materialize", "materialize_all", "pending", "record", "staged_graph"]

PENDING_CALLS = 1024
"""Calls that are recorded before they run by themselves, so that a program that needs no value uses bounded memory."""

pending: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The tensors that are not computed yet, by the identity of their cells."""
_recorded = threading.local()
_lock = threading.RLock()


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
    template = Template(
        op,
        tuple([describe(arg, cells, numbers) for arg in (*args, *kwargs.values())]),
        tuple(kwargs),
    )
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
    if all(cell.storage is not None for cell in cells):
        return
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
            cell.storage, cell.call = storage, None
            pending.pop(id(cell), None)
        _recorded.calls = 0


def materialize_all() -> None:
    """Computes all tensors that the program holds."""
    with _lock:
        materialize([tensor._cell for tensor in list(pending.values())])


def _recording(targets: Sequence[Cell]) -> tuple[Recording, list[Cell]]:
    """The calls that cells need, in order; and the cells to keep: the targets, and tensors on the way to them."""
    numbers: dict[Call, int] = {}
    calls: list[Call] = []
    leaves: dict[int, int] = {}
    leaf_cells: list[Cell] = []
    inputs: list[tuple[tuple[int, int], ...]] = []
    # depth first, without recursion: chains are as long as PENDING_CALLS
    stack: list[tuple[Call, bool]] = [(cell.call, False) for cell in reversed(targets) if cell.call]
    while stack:
        call, entered = stack.pop()
        if call in numbers:
            continue
        if not entered:
            stack.append((call, True))
            stack.extend(
                [
                    (cell.call, False)
                    for cell in reversed(call.inputs)
                    if cell.storage is None and cell.call
                ]
            )
            continue
        sources: list[tuple[int, int]] = []
        for cell in call.inputs:
            if cell.storage is None:
                assert cell.call is not None
                sources.append((numbers[cell.call], cell.index))
                continue
            # one input for each memory, whatever the cells on it
            leaf = leaves.get(id(cell.storage))
            if leaf is None:
                leaf = leaves[id(cell.storage)] = len(leaf_cells)
                leaf_cells.append(cell)
            sources.append((-1, leaf))
        numbers[call] = len(calls)
        calls.append(call)
        inputs.append(tuple(sources))
    kept = {id(cell): cell for cell in targets}
    for call in calls:
        for reference in call.results:
            cell = reference()
            if cell is not None and id(cell) in pending:
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
        recording, _ = _recording([tensor._cell for tensor in list(pending.values())])
    return staged(recording)
