"""A run of a program whose inputs and outputs are addresses."""

from __future__ import annotations

from max._abi import BaseLayout
from max._runtime.program import packed_words
from max.engine.run.arena import Arena
from max.engine.run.linked_program import Instance, Linked

__all__ = ["run_at"]


def run_at(
    arena: Arena, linked: Linked, instance: Instance, inputs: list[int], outputs: list[int]
) -> None:
    """Runs a program of one segment: takes the arena, adds the addresses, waits for the device's queue.

    Args:
        arena: The memory for temporary buffers.
        linked: The program.
        instance: The plan for its sizes.
        inputs: The addresses of the inputs.
        outputs: The addresses of the outputs.
    """
    if linked.main.empty:
        return
    # this frame keeps the memory alive until the run is over
    address, _memory = arena.take(instance.arena_bytes, instance.holes)
    bases = BaseLayout.addresses(address, inputs, outputs)
    linked.main.run(instance, packed_words(bases))
    if linked.main.waits:
        linked.main.backend.synchronize()
