"""Replays: calls that follow a trace, which costs a comparison each instead of a record.

While calls are those of the trace, only tensors without elements are made. Where the value that the trace ends with is
asked for, its program runs. Where a call or a value differs, calls so far become records (`Replay.settle`), as if they had
been recorded one by one, and recording goes on.

A thread follows its own replay without a lock. Other threads that need one of its values settle it under the lock of the
recorder; the calls that follow are settled when the replay ends.
"""

# the cells of tensors are read directly: a property would cost as much as the comparison
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from max._config import flags
from max.experimental._cells import Call, Cell, Unsettled
from max.experimental._holders import LOCK, hold
from max.experimental._programs import execute
from max.experimental._traces import Trace, equals
from max.experimental._types import CellType
from max.graph._places import user_place

__all__ = ["Replay", "bind_tensor", "settle_all"]

_tensor_type: type[Any]
_checks_nans = flags.named("MAX_DEBUG_NANS")._overrides
_replays: set[Replay] = set()
"""Replays with calls that are not settled."""
_MOST_REPLAYS = 16
"""Replays that go on at once, in as many threads; when one more begins, the others are settled."""
_new = object.__new__
_frame = sys._getframe


def bind_tensor(tensor_type: type[Any]) -> None:
    """Gives this module the class of tensors, which is built on it."""
    global _tensor_type
    _tensor_type = tensor_type


class Replay(Unsettled):
    """A stretch of a program that has followed a trace so far.

    Args:
        trace: The trace.
    """

    __slots__ = (
        "_closed",
        "_holders",
        "_places",
        "_settled",
        "_steps",
        "_trace",
        "_values",
        "position",
    )

    def __init__(self, trace: Trace) -> None:
        self._trace, self._steps = trace, trace.steps
        self.position = 0
        """How many calls followed the trace."""
        self._values: list[Cell] = []
        self._holders: list[ref[Any]] = []
        """Refers to the tensor on each result."""
        self._places: dict[int, tuple[str, int]] = {}
        """The lines of calls that were made elsewhere than those of the trace."""
        self._settled = 0
        """How many calls were recorded."""
        self._closed = False
        if len(_replays) >= _MOST_REPLAYS:
            settle_all()
        _replays.add(self)

    def follow(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns; None if it is not the next one of the trace.

        Args:
            op: The op.
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        position = self.position
        try:
            expected, specs, keywords, structure, types, line, _, _, _ = self._steps[position]
        except IndexError:
            return None
        if (
            op is not expected
            or len(args) != len(specs)
            or len(kwargs) != len(keywords)
            or _checks_nans
            or self._closed
        ):
            return None
        values = self._values
        try:
            for arg, spec in zip(args, specs):  # noqa: B905  (the lengths are equal)
                kind = type(spec)
                if kind is int:
                    if arg._cell is not values[spec]:
                        return None
                elif kind is tuple:
                    constant = spec[0]
                    if arg is not constant and not equals(arg, constant):
                        return None
                elif not _matches(arg, spec, values):
                    return None
            if kwargs:
                for (name, arg), (expected_name, spec) in zip(
                    kwargs.items(), keywords, strict=True
                ):
                    if name != expected_name or not _matches(arg, spec, values):
                        return None
        except AttributeError:
            return None  # a number where a tensor was
        frame = _frame(line[2])
        if frame.f_code is not line[0] or frame.f_lasti != line[1]:
            self._places[position] = user_place()
        tensors: list[Any] = []
        for type_ in types:
            cell = _new(Cell)
            cell.type, cell.storage, cell.call = type_, None, self
            tensor = _new(_tensor_type)
            tensor._cell, tensor._value = cell, None
            values.append(cell)
            self._holders.append(ref(tensor))
            tensors.append(tensor)
        self.position = position + 1
        if self._closed:
            # another thread settled the calls before, so nobody would find this one
            self.settle()
        return tensors[0] if structure is None else structure(tensors)

    def _held(self) -> list[bool]:
        return [holder() is not None for holder in self._holders]

    def finish(self, targets: Sequence[Cell]) -> bool:
        """Runs the program of the trace if it is the one for the calls so far and these values.

        Args:
            targets: The values that are asked for, which have no elements.

        Returns:
            Whether it ran. If not, the calls are recorded.

        Raises:
            Exception: What the program raises. The calls are recorded then.
        """
        trace, values = self._trace, self._values
        if (
            self.position != len(trace.steps)
            or self._closed
            or len(targets) != len(trace.targets)
            or any([values[n] is not cell for cell, n in zip(targets, trace.targets, strict=True)])
            or self._held() != trace.held
            or any([values[a].storage is not values[b].storage for a, b in trace.shared])
        ):
            self.settle()
            return False
        try:
            storages = execute(
                trace.program,
                [values[number].storage for number in trace.leaves],
                lambda call: self._place(trace.order[call]),
            )
        except BaseException:
            self.settle()
            raise
        for number, storage in zip(trace.outputs, storages, strict=True):
            values[number].keep(storage)
        if trace.lasting:
            self.settle()
        else:
            _replays.discard(self)
        return True

    def _place(self, position: int) -> tuple[str, int]:
        return self._places.get(position) or self._steps[position].line.place

    def settle(self) -> None:
        """Records the calls so far that were not recorded before, and ends the replay.

        If another thread does so, a call that its own thread is about to follow records itself.
        """
        with LOCK:
            self._closed = True
            values, holders, end = self._values, iter(self._holders), self.position
            for position in range(end):
                step = self._steps[position]
                cells = values[step.first : step.first + len(step.types)]
                tensors = [next(holders)() for _ in cells]
                if position < self._settled:
                    continue
                inputs = [values[number] for number in step.inputs]
                call = Call(step.signature, inputs, self._place(position))
                call.results = tuple([ref(cell) for cell in cells])
                for index, (cell, tensor) in enumerate(zip(cells, tensors, strict=True)):
                    if cell.storage is None:
                        cell.call, cell.index, cell.holder = call, index, None
                        if tensor is not None:
                            hold(cell, tensor)
            self._settled = end
            _replays.discard(self)


def settle_all() -> None:
    """Records the calls of all replays, which ends them."""
    with LOCK:
        for replay in list(_replays):
            replay.settle()


def _matches(arg: Any, spec: Any, values: list[Cell]) -> bool:
    """Whether an argument is the one of a specification; a tensor in memory becomes the next value."""
    kind = type(spec)
    if kind is int:
        return arg._cell is values[spec]
    if kind is tuple:
        return arg is spec[0] or equals(arg, spec[0])
    if kind is CellType:
        cell = arg._cell
        if cell is None or cell.type is not spec or cell.storage is None:
            return False
        values.append(cell)
        return True
    container, items = spec
    if type(arg) is not container:
        return False
    if container is slice:
        arg = (arg.start, arg.stop, arg.step)
    if len(arg) != len(items):
        return False
    for item, inner in zip(arg, items):  # noqa: B905  (the lengths are equal)
        if not _matches(item, inner, values):
            return False
    return True
