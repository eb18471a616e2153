"""A loop over two programs as one program, for devices that carry out jumps."""

from __future__ import annotations

from dataclasses import replace

from max._backends.program import NO_VALUE, Jump, Launch, Program

__all__ = ["looped_program"]


def looped_program(body: Program, after: Program) -> Program:
    """Joins two programs into one that runs them in turn until a byte is 0.

    Args:
        body: The first program of each turn.
        after: The second one.

    Returns:
        A program over the values of `body`, then those of `after`, then the address of the byte.
    """
    launches = [*body.launches, *(_renumber_launch(launch, body) for launch in after.launches)]
    # the first launch of each program waits for the other program
    for index in {0, len(body.launches)} & set(range(len(launches))):
        launches[index] = replace(launches[index], barrier=True)
    flag = body.num_values + after.num_values
    # behind the two jumps that follow the launches
    end = len(launches) + 2
    launches.append(
        Jump(0, [(flag, 0)], phases=0, name="loop", kind="if_zero", target=end),
    )
    launches.append(Jump(0, [], phases=0, name="loop", kind="back", target=0))
    return Program(launches, flag + 1, max(body.scratch_bytes, after.scratch_bytes))


def _renumber_launch(launch: Launch, before: Program) -> Launch:
    """A launch renumbered for its place after the launches of another program."""
    slots = [
        (value if value == NO_VALUE else value + before.num_values, addend)
        for value, addend in launch.slots
    ]
    if isinstance(launch, Jump):
        return replace(launch, slots=slots, target=launch.target + len(before.launches))
    grid = launch.geometry
    if grid is not None:
        # the number of blocks is a value too
        places = [
            (value if value == NO_VALUE else value + before.num_values, addend)
            for value, addend in grid.grid
        ]
        grid = replace(grid, grid=tuple(places))
    return replace(launch, slots=slots, geometry=grid)
