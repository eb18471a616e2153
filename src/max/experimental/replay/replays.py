"""Replays: calls that follow a trace, so that each is compared with a step instead of being recorded.

While the calls match the trace, only tensors without elements are made. When the value at the end of the trace is
needed, its program runs. When a call or a value differs, the calls so far are recorded (`Replay.settle`), as if they
had been recorded one by one, and recording continues.

A thread follows its own replay without a lock. Another thread that needs one of its values settles it under the lock
of the recorder; a call that the owner makes meanwhile settles itself.
"""

# the cells of tensors are read directly: a property would cost as much as the comparison
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

from max._config import flags
from max._host.reentry import hold_lock
from max.experimental.programs.lazy_values import Call, Cell, Unsettled
from max.experimental.programs.number_patterns import Symbol
from max.experimental.programs.programs import execute
from max.experimental.programs.signatures import Signature, signature_of
from max.experimental.programs.tensor_class import TENSOR
from max.experimental.programs.value_types import CellType, cell_type
from max.experimental.replay.pending_tensors import LOCK, PENDING
from max.experimental.replay.specifications import (
    Nested,
    VaryingLeaf,
    VaryingNumber,
    is_number,
    same_constant,
)
from max.experimental.replay.traces import Capture, Step, Trace, VaryingType
from max.graph.dim import StaticDim
from max.graph.staging.user_lines import user_place
from max.mlir.conditions import first_unmet

__all__ = ["Replay", "settle_all"]

_checks_nans = flags.flag_of("MAX_DEBUG_NANS")._overrides
_replays: set[Replay] = set()
"""The replays with calls that are not settled."""
_MOST_REPLAYS = 16
"""The maximum number of replays at once, one per thread; when another begins, all of them are settled."""
_new = object.__new__
_frame = sys._getframe


class Replay(Unsettled):
    """A stretch of a program that has followed a trace so far.

    Args:
        trace: The trace.
    """

    __slots__ = (
        "_calls",
        "_closed",
        "_followed",
        "_references",
        "_places",
        "_settled",
        "_sizes",
        "_steps",
        "_trace",
        "_types",
        "in_use",
        "position",
        "values",
    )

    def __init__(self, trace: Trace) -> None:
        self._trace, self._steps, self._followed = trace, trace.steps, trace.followed_steps
        self.position = 0
        """The number of calls that followed the trace."""
        self.in_use = True
        """Whether a call is being compared; a signal handler must not make another one.

        It stays if an exception ends the comparison, as of a signal handler: the values may include some of that call.
        The first call is compared at once.
        """
        self.values: list[Cell] = []
        self._references: list[ref[Any]] = []
        """A weak reference to the tensor on each result."""
        self._places: dict[int, tuple[str, int]] = {}
        """The lines of calls that are at other lines than those of the trace, by position."""
        self._settled = 0
        """The number of calls that were recorded."""
        self._calls: list[Call] = []
        """The recorded calls."""
        self._closed = False
        self._sizes: dict[str, Any] = {}
        """The values of the symbols that are bound so far."""
        self._types: dict[int, CellType] = {}
        """The evaluated types of results with symbols, by their numbers."""
        if len(_replays) >= _MOST_REPLAYS:
            settle_all()
        _replays.add(self)

    def follow(self, op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compares a call with the next step of the trace; returns the call's results, or None if it differs.

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
            return None  # a number in place of a tensor, or the end of the trace
        try:
            frame = _frame(line[2])
            if frame.f_code is not line[0] or frame.f_lasti != line[1]:
                self._places[position] = user_place()
        except ValueError:  # the stack has fewer frames than at the trace
            self._places[position] = user_place()
        results: list[Any] | None = None if structure is None else []
        tensor: Any = None
        for type_ in types:
            if type(type_) is VaryingType:
                type_ = self._evaluated_type(type_)
                if 0 in type_.shape:
                    return None  # to be recorded: the bounds of an empty slice have no conditions
            # without __init__: a replay sets only the fields that it needs
            cell = _new(Cell)
            cell.type, cell.storage, cell.call = type_, None, self  # type: ignore[assignment]
            tensor = _new(TENSOR.type)
            tensor._cell, tensor._value = cell, None
            self.values.append(cell)
            self._references.append(ref(tensor))
            if results is not None:
                results.append(tensor)
        self.position = position + 1
        self.in_use = False
        if self._closed:
            # another thread has settled the earlier calls, and does not know of this one
            self.settle()
        return tensor if structure is None else structure(results)

    def _held_results(self) -> list[bool]:
        return [reference() is not None for reference in self._references]

    def finish(self, targets: Sequence[Cell]) -> bool:
        """Runs the program of the trace if the calls so far are the whole trace, and these values its targets.

        Args:
            targets: The values that are needed, which have no elements.

        Returns:
            Whether it ran. If not, the calls are recorded.

        Raises:
            Exception: What the program raises. The calls are recorded then.
        """
        trace, values = self._trace, self.values
        # the program's outputs are the held values, and leaves on the same memory are one input of it
        if (
            self.position != len(trace.steps)
            or self._closed
            or self.in_use
            or len(targets) != len(trace.targets)
            or any([values[n] is not cell for cell, n in zip(targets, trace.targets, strict=True)])
            or self._held_results() != trace.is_held
            or any([values[a].storage is not values[b].storage for a, b in trace.shared_leaves])
        ):
            self.settle()
            return False
        try:
            program = trace.program
            if trace.symbolic is not None:
                program = trace.symbolic.bind(self._sizes)
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
            self.settle()  # held values that were not computed need their calls
        else:
            _replays.discard(self)
            # values without a tensor refer to the replay: without this, the cycle would keep the results alive until
            # the next garbage collection
            values.clear()
        return True

    def _place(self, index: int) -> tuple[str, int]:
        return self._places.get(index) or self._steps[index].line.place

    @hold_lock(LOCK)
    def settle(self) -> None:
        """Records the calls that are not yet recorded, and ends the replay.

        If another thread calls this, a call that the replay's own thread is making records itself.
        """
        # no further step matches; `_closed` tells a call that passed its match before
        self._closed, self._followed = True, ()
        values, references, end = self.values, iter(self._references), self.position
        for position in range(end):
            step = self._steps[position]
            cells = values[step.first : step.first + len(step.types)]
            tensors = [next(references)() for _ in cells]
            if position < self._settled:
                continue  # recorded by an earlier call of this method
            inputs = [values[number] for number in step.inputs]
            call = Call(self._signature(position, inputs), inputs, self._place(position))
            self._calls.append(call)
            call.results = tuple([ref(cell) for cell in cells])
            for index, (cell, tensor) in enumerate(zip(cells, tensors, strict=True)):
                if cell.storage is None:
                    cell.call, cell.index, cell.tensor_reference = call, index, None
                    if tensor is not None:
                        PENDING.add(cell, tensor)
        self._settled = end
        _replays.discard(self)

    def _signature(self, index: int, inputs: Sequence[Cell]) -> Signature:
        step = self._steps[index]
        if self._trace.symbolic is None:
            return step.signature
        numbers: list[int | float] = []
        for spec in [*step.args, *[spec for _, spec in step.keywords]]:
            self._numbers(spec, numbers)
        arguments = step.signature.family.arguments
        types = tuple([cell.type for cell in inputs])
        return signature_of(
            (arguments.op, arguments.args, arguments.names),
            types,
            tuple(numbers),
            self._place(index),
        )

    def _numbers(self, spec: Any, numbers: list[int | float]) -> None:
        """Appends the numbers of an argument."""
        if isinstance(spec, Nested):
            for item in spec.items:
                self._numbers(item, numbers)
        elif isinstance(spec, VaryingNumber):
            numbers.append(self._value(spec.symbol))
        elif type(spec) is tuple and is_number(spec[0]):
            numbers.append(int(spec[0]) if isinstance(spec[0], StaticDim) else spec[0])

    def capture(self) -> Capture:
        """A capture that continues the stretch after the calls so far, which are settled."""
        return Capture.resumed_capture(
            [self._exact_step(position) for position in range(self._settled)],
            self._calls,
            self.values[: self._end()],
        )

    def _end(self) -> int:
        """The number of values of the calls that were recorded."""
        if not self._settled:
            return 0
        last = self._steps[self._settled - 1]
        return last.first + len(last.types)

    def _exact_step(self, index: int) -> Step:
        """A step with the types and numbers of this replay."""
        step = self._steps[index]
        if self._trace.symbolic is None:
            return step
        end = step.first + len(step.types)
        # the leaves of a step are numbered right before its results
        leaves = iter(self.values[step.first - len(step.new_leaves()) :])
        return step._replace(
            args=tuple([self._exact_spec(spec, leaves) for spec in step.args]),
            keywords=tuple([(name, self._exact_spec(s, leaves)) for name, s in step.keywords]),
            types=tuple([cell.type for cell in self.values[step.first : end]]),
            signature=self._calls[index].signature,
        )

    def _exact_spec(self, spec: Any, leaves: Iterator[Cell]) -> Any:
        if isinstance(spec, Nested):
            return Nested(spec.cls, tuple([self._exact_spec(s, leaves) for s in spec.items]))
        if isinstance(spec, CellType | VaryingLeaf):
            return next(leaves).type
        if isinstance(spec, VaryingNumber):
            return (self._value(spec.symbol),)
        return spec

    def _value(self, symbol: Symbol) -> Any:
        return self._sizes[f"s{symbol.number}"] * symbol.factor + symbol.offset

    def _evaluated_type(self, type_: VaryingType) -> CellType:
        """The type of a result for the sizes of this replay."""
        evaluated = self._types.get(type_.number)
        if evaluated is None:
            dtype, _, device = type_.kind
            shape = tuple([dim.evaluate(self._sizes) for dim in type_.shape])
            evaluated = self._types[type_.number] = cell_type(dtype, shape, device)
        return evaluated

    def _bind(self, symbol: Symbol, value: int | float) -> bool:
        """Compares a size or number with its symbol, or binds the symbol; returns False if it does not match."""
        if type(value) is int and value < 0:
            return False  # a bound that counts from the end has no symbol
        name = f"s{symbol.number}"
        if name in self._sizes:
            return bool(self._value(symbol) == value)
        base, remainder = value, 0
        if type(value) is int:
            # solves value = factor * symbol + offset
            base, remainder = divmod(value - symbol.offset, symbol.factor)
        if remainder or base < 0 and type(value) is int:
            return False
        self._sizes[name] = base
        return first_unmet(self._trace.conditions, self._sizes) is None

    def matches(self, arg: Any, spec: Any) -> bool:
        """Whether an argument matches a specification; a tensor in memory becomes the next value.

        Raises:
            AttributeError: It is a number or a value of a graph in place of a tensor.
        """
        kind = type(spec)
        values = self.values
        if kind is int:
            return arg._cell is values[spec]
        if kind is tuple:
            return arg is spec[0] or same_constant(arg, spec[0])
        if kind is CellType:
            cell = arg._cell
            if cell.type is not spec or cell.storage is None:
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
            if type(arg) is not spec.cls or not is_number(arg):
                return False
            return self._bind(spec.symbol, arg)
        cell = arg._cell
        if cell.type.kind != spec.kind or cell.storage is None:
            return False
        for dim, size in zip(spec.dims, cell.type.shape, strict=True):
            if not (self._bind(dim, size) if isinstance(dim, Symbol) else dim == size):
                return False
        values.append(cell)
        return True


@hold_lock(LOCK)
def settle_all() -> None:
    """Records the calls of all replays, and ends them."""
    for replay in list(_replays):
        replay.settle()
