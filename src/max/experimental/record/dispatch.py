"""Calling ops of a graph on eager tensors: recorded, or staged where a graph is being built."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from max._host.reentry import mark_guarded, refuse_in_collection, refuse_second_use
from max.experimental.programs.tensor_class import TENSOR
from max.experimental.record.recorder import NAME, RECORDING, THREAD, begin, end_replay, record
from max.graph import Value
from max.graph.staging.current import CURRENT

__all__ = ["apply", "in_graph"]


def in_graph() -> bool:
    """Whether a graph is being built, so that ops are staged into it."""
    return bool(CURRENT.get())


@mark_guarded
def apply(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls an op of `max.graph.ops` on tensors.

    Where a graph is being built it is staged there, else it is recorded.

    Raises:
        RuntimeError: A signal handler, finalizer or trace function called it while this thread uses the recorder.
    """
    if CURRENT.get():
        refuse_in_collection("staging an op")
        result = op(*args, **kwargs)
        if isinstance(result, Value):
            return TENSOR.of_value(result)
        if isinstance(result, list | tuple):
            return getattr(type(result), "_make", type(result))(
                [TENSOR.of_value(item) for item in result]
            )
        return result
    in_use: object
    in_use = replay = THREAD.replay
    thread = get_ident()
    if replay is not None:
        if not replay.in_use:
            replay.in_use = True
            result = replay.follow(op, args, kwargs)
            if result is not None:
                return result
        else:
            refuse_second_use(replay, NAME)
    # `exclusively`, in this frame: the recorder counts the frames of the program above it
    if thread in RECORDING:
        refuse_second_use(RECORDING, NAME)
    in_use = RECORDING  # noqa: F841  read by `refuse_second_use`
    try:
        RECORDING.add(thread)
        # read again: a signal handler may have made a call
        replay = THREAD.replay
        if replay is not None:
            end_replay(replay)
        elif THREAD.begins and (replay := begin(op)) is not None:
            result = replay.follow(op, args, kwargs)
            if result is not None:
                return result
            end_replay(replay)
        structure, cells = record(op, args, kwargs)
        if structure is None:
            return TENSOR.of_cell(cells[0])
        return structure([TENSOR.of_cell(cell) for cell in cells])
    finally:
        RECORDING.discard(thread)
