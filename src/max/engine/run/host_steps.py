"""Host steps: what the host does at the end of a program's segment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from max._compiler.program.code import HostStepCode, SlotCode
from max._lazy import lazy_module
from max.driver._memory import DeviceMemory, copy_between
from max.dtype import DType

if TYPE_CHECKING:
    from max._interpreter import printing
    from max.graph import print_options
else:
    print_options = lazy_module("max.graph.print_options")
    printing = lazy_module("max._interpreter.printing")  # few programs print

__all__ = ["HostSteps", "range_size", "slice_sizes", "slot_address"]

MOST_ELEMENTS = 1 << 47
"""The most elements of a tensor: addresses have 47 bits."""


def slot_address(slot: SlotCode, fixed_addresses: Sequence[int]) -> tuple[int, int]:
    """The value of a slot, and the number to add to it.

    Args:
        slot: The slot of a launch or a host step.
        fixed_addresses: The addresses of the fixed buffers.
    """
    return slot.value, slot.addend if slot.fixed_buffer < 0 else slot.addend + fixed_addresses[
        slot.fixed_buffer
    ]


class HostSteps:
    """The host steps of a segment: they read sizes, print, copy between devices and branch.

    Args:
        steps: The steps, in order.
        fixed_addresses: The addresses of the fixed buffers.
        memories: The memories of the session's devices.
        style: The style of printed tensors.
    """

    def __init__(
        self,
        steps: Sequence[HostStepCode],
        fixed_addresses: Sequence[int],
        memories: Sequence[DeviceMemory],
        style: print_options.PrintOptions,
    ) -> None:
        self._steps, self._fixed, self._memories, self._style = (
            steps,
            fixed_addresses,
            memories,
            style,
        )

    def run(self, values: npt.NDArray[np.int64], sizes_of: dict[str, int]) -> int:
        """Carries out the steps.

        Args:
            values: The program's values in this run.
            sizes_of: Gets the sizes that were read, by symbol.

        Returns:
            The number of the segment to run next; -1: the following one.

        Raises:
            ValueError: A range or slice has a step of 0, or a range has bounds without a size.
        """
        for code in self._steps:
            is_jump = code.rule == "jump"
            if code.rule == "if_zero":
                is_jump = not self._read(code, 0, values, 1, DType.uint8).item()
            if is_jump:
                return code.target
            # a cut only ends the segment
            if code.rule in ("cut", "if_zero"):
                continue
            shape = [self._value(slot, values) for slot in code.shape]
            if code.rule == "copy":
                self._copy(code, values, *shape)
                continue
            if code.rule == "print":
                self._print(code, shape, values)
                continue
            # a slice has bounds for each axis
            count = len(shape) if code.rule == "slice" else 1
            bounds = [self._read(code, n, values, count) for n in range(len(code.bounds))]
            if code.rule == "slice":
                sizes = slice_sizes(shape, *bounds)
            elif code.rule == "range":
                sizes = [range_size(*bounds)]
            else:
                (size,) = bounds
                sizes = [size.item()] * len(code.symbols)
            sizes_of.update({n: s for n, s in zip(code.symbols, sizes, strict=True) if n})
        return -1

    def _print(
        self, code: HostStepCode, shape: Sequence[int], values: npt.NDArray[np.int64]
    ) -> None:
        if not code.bounds:
            printing.write(code.label)
            return
        elements = math.prod(shape)
        array = self._read(code, 0, values, max(elements, 1))
        printing.show(code.label, array[:elements].reshape(shape), self._style)

    def _value(self, slot: SlotCode, values: npt.NDArray[np.int64]) -> int:
        value, addend = slot_address(slot, self._fixed)
        return int(values[value]) + addend

    def _read(
        self,
        code: HostStepCode,
        index: int,
        values: npt.NDArray[np.int64],
        count: int,
        dtype: DType | None = None,
    ) -> npt.NDArray[Any]:
        """The first `count` elements at a bound of a host step, read from the memory of its device."""
        dtype = code.dtype if dtype is None else dtype
        memory = self._memories[code.devices[index]]
        data = memory.read(self._value(code.bounds[index], values), count * dtype.size_in_bytes)
        return data.view(dtype.to_numpy())

    def _copy(self, code: HostStepCode, values: npt.NDArray[np.int64], nbytes: int) -> None:
        """Copies `nbytes` bytes from one device's memory to another's."""
        source, target = [self._value(slot, values) for slot in code.bounds]
        from_memory, to_memory = [self._memories[device] for device in code.devices]
        copy_between(to_memory, target, from_memory, source, nbytes)


def range_size(start: npt.NDArray[Any], stop: npt.NDArray[Any], step: npt.NDArray[Any]) -> int:
    """The number of elements of a range.

    Raises:
        ValueError: The step is 0, a bound is NaN, or the number of elements is infinite or over `MOST_ELEMENTS`.
    """
    first, last, by = start.item(), stop.item(), step.item()
    if by == 0:
        raise ValueError("range: the step is 0")
    if isinstance(first, float):
        exact = (last - first) / by
        if math.isnan(exact) or exact == math.inf:
            raise ValueError(f"range: from {first} to {last} in steps of {by} is not a range")
        size = math.ceil(max(exact, 0))
    else:
        # rounds up, for steps of either sign
        size = -((first - last) // by)
    if size > MOST_ELEMENTS:
        raise ValueError(
            f"range: from {first} to {last} in steps of {by} has {size} elements; no memory holds them"
        )
    return max(size, 0)


def slice_sizes(
    shape: Sequence[int],
    start: npt.NDArray[Any],
    stop: npt.NDArray[Any],
    step: npt.NDArray[Any],
) -> list[int]:
    """The size of each axis of a slice, by Python's rules.

    Raises:
        ValueError: A step is 0.
    """
    if not step.all():
        raise ValueError("slice: a step is 0")
    bounds = zip(shape, start.tolist(), stop.tolist(), step.tolist(), strict=True)
    # bounds beyond the ends are clamped to the size, as in Python
    return [len(range(*slice(first, last, by).indices(size))) for size, first, last, by in bounds]
