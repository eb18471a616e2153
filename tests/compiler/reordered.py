"""Runs compiled programs in other orders that their barriers allow, which shows missing barriers.

Without a barrier a worker starts a launch before other workers have finished the launches ahead of it. All parallel
launches between two barriers may therefore run in any order; worker 0 runs serial launches in program order.
`reordered` permutes launches so that each pair without a barrier between them is exchanged in one of `ORDERS`. Results
equal those of the interpreter only if no such pair accesses the same memory.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest

from max._backends.program import Jump, Launch, Program
from max.engine.run import linked_program

ORDERS = ("serial first", "serial last")


def reorder(launches: Sequence[Launch], order: str) -> list[Launch]:
    """The launches between two barriers: parallel ones reversed, serial ones before or after them, each behind a
    barrier.
    """
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
    """Reorders the models that are loaded in the block; yields the number of moved launches of each program."""
    moved: list[int] = []

    def program(launches: Sequence[Launch], num_values: int, scratch_bytes: int) -> Program:
        changed = reorder(launches, order)
        moved.append(
            sum(
                a.name != b.name or a.slots != b.slots
                for a, b in zip(launches, changed, strict=True)
            )
        )
        return Program(changed, num_values, scratch_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linked_program, "Program", program)
        yield moved
