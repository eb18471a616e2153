"""Replays: calls that follow a trace, which costs a comparison each instead of a record.

While calls are those of the trace, only tensors without elements are made. Where the value that the trace ends with is
asked for, its program runs. Where a call or a value differs, calls so far become records (`Replay.settle`), as if they
had been recorded one by one, and recording goes on.

A thread follows its own replay without a lock. Other threads that need one of its values settle it under the lock of
the recorder; the calls that follow are settled when the replay ends.
"""

# the cells of tensors are read directly: a property would cost as much as the comparison
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

from max._config import flags
from max.experimental._cells import Call, Cell, Unsettled
from max.experimental._holders import LOCK, hold
from max.experimental._patterns import Symbol
from max.experimental._programs import execute
from max.experimental._signatures import Signature, signature_of
from max.experimental._specifications import (
    Nested,
    VaryingLeaf,
    VaryingNumber,
    equals,
    is_number,
)
from max.experimental._traces import Capture, Step, Trace, VaryingType
from max.experimental._types import CellType, cell_type
from max.graph._places import user_place
from max.graph.dim import StaticDim
from max.mlir.conditions import first_unmet

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
        "_calls",
        "_closed",
        "_followed",
        "_holders",
        "_places",
        "_settled",
        "_sizes",
        "_steps",
        "_trace",
        "_types",
        "position",
        "values",
    )

    def __init__(self, trace: Trace) -> None:
        self._trace, self._steps, self._followed = trace, trace.steps, trace.followed
        self.position = 0
        """How many calls followed the trace."""
        self.values: list[Cell] = []
        self._holders: list[ref[Any]] = []
        """Refers to the tensor on each result."""
        self._places: dict[int, tuple[str, int]] = {}
        """The lines of calls that were made elsewhere than those of the trace."""
        self._settled = 0
        """How many calls were recorded."""
        self._calls: list[Call] = []
        """Those."""
        self._closed = False
        self._sizes: dict[str, Any] = {}
        """The values of the symbols that are known so far."""
        self._types: dict[int, CellType] = {}
        """The types with symbols that were evaluated."""
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
            expected, match, specs, structure, types, line = self._followed[position]
            if op is not expected or _checks_nans or not match(self, args, kwargs, specs):
                return None
        except (AttributeError, IndexError):
            return None  # a number where a tensor was, or the end
        try:
            frame = _frame(line[2])
            if frame.f_code is not line[0] or frame.f_lasti != line[1]:
                self._places[position] = user_place()
        except ValueError:  # the stack has fewer frames than that of the trace had
            self._places[position] = user_place()
        results: list[Any] | None = None if structure is None else []
        tensor: Any = None
        for type_ in types:
            if type(type_) is VaryingType:
                type_ = self._evaluated(type_)
                if 0 in type_.shape:
                    return None  # recorded: bounds of an empty slice are no conditions
            cell = _new(Cell)
            cell.type, cell.storage, cell.call = type_, None, self  # type: ignore[assignment]
            tensor = _new(_tensor_type)
            tensor._cell, tensor._value = cell, None
            self.values.append(cell)
            self._holders.append(ref(tensor))
            if results is not None:
                results.append(tensor)
        self.position = position + 1
        if self._closed:
            # another thread settled the calls before, so nobody would find this one
            self.settle()
        return tensor if structure is None else structure(results)

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
        trace, values = self._trace, self.values
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
            program = trace.program
            if trace.symbolic is not None:
                program = trace.symbolic.bound(self._sizes)
            storages = execute(
                program,
                [values[number] for number in trace.leaves],
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
            # values that nothing holds refer to the replay: a cycle that would keep the results until garbage is
            # collected
            values.clear()
        return True

    def _place(self, position: int) -> tuple[str, int]:
        return self._places.get(position) or self._steps[position].line.place

    def settle(self) -> None:
        """Records the calls so far that were not recorded before, and ends the replay.

        If another thread does so, a call that its own thread is about to follow records itself.
        """
        with LOCK:
            self._closed, self._followed = True, ()
            values, holders, end = self.values, iter(self._holders), self.position
            for position in range(end):
                step = self._steps[position]
                cells = values[step.first : step.first + len(step.types)]
                tensors = [next(holders)() for _ in cells]
                if position < self._settled:
                    continue
                inputs = [values[number] for number in step.inputs]
                call = Call(self._signature(position, inputs), inputs, self._place(position))
                self._calls.append(call)
                call.results = tuple([ref(cell) for cell in cells])
                for index, (cell, tensor) in enumerate(zip(cells, tensors, strict=True)):
                    if cell.storage is None:
                        cell.call, cell.index, cell.holder = call, index, None
                        if tensor is not None:
                            hold(cell, tensor)
            self._settled = end
            _replays.discard(self)

    def _signature(self, position: int, inputs: Sequence[Cell]) -> Signature:
        step = self._steps[position]
        if self._trace.symbolic is None:
            return step.signature
        numbers: list[Any] = []
        for spec in [*step.args, *[spec for _, spec in step.keywords]]:
            self._numbers(spec, numbers)
        template = step.signature.family.template
        types = tuple([cell.type for cell in inputs])
        return signature_of(
            (template.op, template.args, template.names),
            types,
            tuple(numbers),
            self._place(position),
        )

    def _numbers(self, spec: Any, numbers: list[Any]) -> None:
        """Appends the numbers of an argument."""
        if isinstance(spec, Nested):
            for item in spec.items:
                self._numbers(item, numbers)
        elif isinstance(spec, VaryingNumber):
            numbers.append(self._value(spec.symbol))
        elif type(spec) is tuple and is_number(spec[0]):
            numbers.append(int(spec[0]) if isinstance(spec[0], StaticDim) else spec[0])

    def capture(self) -> Capture:
        """A capture of the stretch that goes on after the calls so far, which are settled."""
        return Capture.resumed(
            [self._exact(position) for position in range(self._settled)],
            self._calls,
            self.values[: self._end()],
        )

    def _end(self) -> int:
        """The number of values of the calls that were recorded."""
        if not self._settled:
            return 0
        last = self._steps[self._settled - 1]
        return last.first + len(last.types)

    def _exact(self, position: int) -> Step:
        """A step with the types and numbers that it has here."""
        step = self._steps[position]
        if self._trace.symbolic is None:
            return step
        end = step.first + len(step.types)
        leaves = iter(self.values[step.first - len(step.new_leaves()) : step.first])
        return step._replace(
            args=tuple([self._exact_spec(spec, leaves) for spec in step.args]),
            keywords=tuple([(name, self._exact_spec(s, leaves)) for name, s in step.keywords]),
            types=tuple([cell.type for cell in self.values[step.first : end]]),
            signature=self._calls[position].signature,
        )

    def _exact_spec(self, spec: Any, leaves: Iterator[Cell]) -> Any:
        if isinstance(spec, Nested):
            return Nested(spec.kind, tuple([self._exact_spec(s, leaves) for s in spec.items]))
        if isinstance(spec, CellType | VaryingLeaf):
            return next(leaves).type
        if isinstance(spec, VaryingNumber):
            return (self._value(spec.symbol),)
        return spec

    def _value(self, symbol: Symbol) -> Any:
        return self._sizes[f"s{symbol.number}"] * symbol.factor + symbol.offset

    def _evaluated(self, type_: VaryingType) -> CellType:
        """A type of a result for the sizes here."""
        found = self._types.get(type_.number)
        if found is None:
            dtype, _, device = type_.kind
            shape = tuple([dim.evaluate(self._sizes) for dim in type_.shape])
            found = self._types[type_.number] = cell_type(dtype, shape, device)
        return found

    def _bind(self, symbol: Symbol, value: Any) -> bool:
        """Compares a size or number with its symbol, or gives the symbol its value; False where the trace ends."""
        if type(value) is int and value < 0:
            return False  # a bound that counts from the end
        name = f"s{symbol.number}"
        if name in self._sizes:
            return bool(self._value(symbol) == value)
        base, rest = value, 0
        if type(value) is int:
            base, rest = divmod(value - symbol.offset, symbol.factor)
        if rest or base < 0 and type(value) is int:
            return False
        self._sizes[name] = base
        return first_unmet(self._trace.conditions, self._sizes) is None

    def matches(self, arg: Any, spec: Any) -> bool:
        """Whether an argument is the one of a specification; a tensor in memory becomes the next value."""
        kind = type(spec)
        values = self.values
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
        if kind is Nested:
            container, items = spec
            if type(arg) is not container:
                return False
            if container is slice:
                arg = (arg.start, arg.stop, arg.step)
            if len(arg) != len(items):
                return False
            for item, inner in zip(arg, items):  # noqa: B905  (the lengths are equal)
                if not self.matches(item, inner):
                    return False
            return True
        if kind is VaryingNumber:
            if isinstance(arg, StaticDim):
                arg = int(arg)
            if type(arg) is not spec.kind or (spec.kind is float and not is_number(arg)):
                return False
            return self._bind(spec.symbol, arg)
        cell = arg._cell
        if cell is None or cell.type.kind != spec.kind or cell.storage is None:
            return False
        for dim, size in zip(spec.dims, cell.type.shape, strict=True):
            if not (self._bind(dim, size) if isinstance(dim, Symbol) else dim == size):
                return False
        values.append(cell)
        return True


def settle_all() -> None:
    """Records the calls of all replays, which ends them."""
    with LOCK:
        for replay in list(_replays):
            replay.settle()
