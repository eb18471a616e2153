"""Runs compiled programs in the orders that their barriers allow: a missing barrier gives another result.

Workers pass a launch without a barrier before the others have finished the launches ahead of it. So all launches between
two barriers may run in any order, but for serial ones, which worker 0 runs one after the other. `reordered` replaces a
program's order by an extreme one: each pair of launches that no barrier separates runs the other way around in one of
`ORDERS`. Results then equal those of the interpreter only if no such pair touches the same memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from max._runtime.program import Jump, Launch, Program
from max.engine import _program

ORDERS = ("serial first", "serial last")


def reorder(launches: Sequence[Launch], order: str) -> list[Launch]:
    """The launches between two barriers, parallel ones backwards, serial ones before or after them; a barrier before each."""
    targets = {launch.target for launch in launches if isinstance(launch, Jump)}
    result: list[Launch] = []
    epoch: list[Launch] = []

    def close() -> None:
        serial = [launch for launch in epoch if launch.serial]
        parallel = [launch for launch in reversed(epoch) if not launch.serial]
        both = [*serial, *parallel] if order == "serial first" else [*parallel, *serial]
        result.extend(replace(launch, barrier=True) for launch in both)
        epoch.clear()

    for index, launch in enumerate(launches):
        if isinstance(launch, Jump) or launch.barrier or index in targets:
            close()
        if isinstance(launch, Jump):
            result.append(launch)
        else:
            epoch.append(launch)
    close()
    return result


@contextmanager
def reordered(order: str) -> Generator[list[int]]:
    """Models that are loaded in the block run in another order; yields the number of launches that moved, per program."""
    moved: list[int] = []

    def program(launches: Sequence[Launch], num_values: int, scratch_bytes: int) -> Program:
        changed = reorder(launches, order)
        moved.append(sum(a.name != b.name or a.slots != b.slots for a, b in zip(launches, changed, strict=True)))  # fmt: skip
        return Program(changed, num_values, scratch_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_program, "Program", program)
        yield moved
