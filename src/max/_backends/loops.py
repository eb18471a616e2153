"""Several programs as one program with jumps between them, for devices that carry out jumps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from max._backends.program import NO_VALUE, Jump, Launch, PartJump, Program

__all__ = ["joined_program", "looped_program"]


def joined_program(
    parts: Sequence[Program], jumps: Sequence[PartJump], num_flags: int = 0
) -> Program:
    """Joins programs into one that runs them in order, except for jumps.

    Args:
        parts: The programs; one may be there several times, with values of its own each time.
        jumps: The jumps, in order of the parts that they follow. One that is always taken to an earlier part, or to the
            one before it, ends a loop.
        num_flags: The number of bytes that jumps depend on.

    Returns:
        A program over the values of the parts in order, then the addresses of the bytes.
    """
    num_values = sum(part.num_values for part in parts)
    # behind each part: the jumps that follow it; the places of parts are known only when all are counted
    starts, place = list[int](), sum(jump.after < 0 for jump in jumps)
    for index, part in enumerate(parts):
        starts.append(place)
        place += len(part.launches) + sum(jump.after == index for jump in jumps)
    starts.append(place)
    launches = [_jump(jump, starts, num_values) for jump in jumps if jump.after < 0]
    first_value = 0
    for index, part in enumerate(parts):
        own = [_renumber_launch(launch, first_value, starts[index]) for launch in part.launches]
        if own:
            # the first launch of each part waits for the one before it
            own[0] = replace(own[0], barrier=True)
        launches += own
        launches += [_jump(jump, starts, num_values) for jump in jumps if jump.after == index]
        first_value += part.num_values
    scratch = max((part.scratch_bytes for part in parts), default=0)
    return Program(launches, num_values + num_flags, scratch)


def looped_program(body: Program, after: Program) -> Program:
    """Joins two programs into one that runs them in turn until a byte is 0.

    Args:
        body: The first program of each turn.
        after: The second one.

    Returns:
        A program over the values of `body`, then those of `after`, then the address of the byte.
    """
    return joined_program([body, after], [PartJump(1, 2, 0), PartJump(1, 0)], 1)


def _jump(jump: PartJump, starts: Sequence[int], first_flag: int) -> Jump:
    """The launch of a jump."""
    target = starts[jump.to]
    if jump.flag is not None:
        slots = [(first_flag + jump.flag, 0)]
        return Jump(0, slots, phases=0, name="loop", kind="if_zero", target=target)
    kind = "back" if jump.to <= jump.after else "always"
    return Jump(0, [], phases=0, name="loop", kind=kind, target=target)


def _renumber_launch(launch: Launch, first_value: int, start: int) -> Launch:
    """A launch with the values and the place that its program has in a joined one."""
    slots = [
        (value if value == NO_VALUE else value + first_value, addend)
        for value, addend in launch.slots
    ]
    if isinstance(launch, Jump):
        return replace(launch, slots=slots, target=launch.target + start)
    grid = launch.geometry
    if grid is not None:
        # the number of blocks is a value too
        places = [
            (value if value == NO_VALUE else value + first_value, addend)
            for value, addend in grid.grid
        ]
        grid = replace(grid, grid=tuple(places))
    return replace(launch, slots=slots, geometry=grid)
