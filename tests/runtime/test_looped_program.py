"""Two programs as one that runs them in turn: values, places and barriers of the joined launches."""

from __future__ import annotations

import pytest

from max._backends.loops import joined_program, looped_program
from max._backends.program import (
    NO_VALUE,
    Jump,
    Launch,
    LaunchGeometry,
    PartJump,
    Program,
    check_program,
)


def launch(kernel: int, *slots: tuple[int, int], **more: object) -> Launch:
    return Launch(kernel, list(slots), barrier=False, name=f"k{kernel}", **more)  # type: ignore[arg-type]


def test_launches_of_the_second_program_have_new_values_and_places() -> None:
    grid = LaunchGeometry(((2, 5), (NO_VALUE, 3)), (4,), 64)
    body = Program([launch(1, (1, 8), (NO_VALUE, 7)), launch(2, (2, 0), geometry=grid)], 3, 10)
    skip = Jump(0, [(1, 0)], barrier=False, phases=0, name="skip", kind="if_zero", target=2)
    after = Program([skip, launch(3, (2, 16), (NO_VALUE, 9)), launch(4, geometry=grid)], 4, 20)
    joined = looped_program(body, after)
    check_program(joined)
    # the address of the byte is the last value
    assert (joined.num_values, joined.scratch_bytes) == (8, 20)
    one, two, jump, three, four, ends, back = joined.launches
    assert one.slots == [(1, 8), (NO_VALUE, 7)] and two.geometry == grid
    assert isinstance(jump, Jump) and jump.target == 4 and jump.slots == [(4, 0)]
    assert three.slots == [(5, 16), (NO_VALUE, 9)]
    assert four.geometry == LaunchGeometry(((5, 5), (NO_VALUE, 3)), (4,), 64)
    assert isinstance(ends, Jump) and isinstance(back, Jump)
    assert (ends.kind, ends.target, ends.slots, ends.phases) == ("if_zero", 7, [(7, 0)], 0)
    assert (back.kind, back.target, list(back.slots), back.phases) == ("back", 0, [], 0)
    assert (ends.kernel, back.kernel, ends.name, back.name) == (0, 0, "loop", "loop")
    # the first launch of each program waits for the other one, and no other launch of theirs does
    assert [item.barrier for item in joined.launches[:5]] == [True, False, True, False, False]


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0)])
def test_a_program_without_launches(first: int, second: int) -> None:
    body, after = (Program([launch(i) for i in range(1, n + 1)], 1) for n in (first, second))
    joined = looped_program(body, after)
    check_program(joined)
    plain = joined.launches[:-2]
    assert len(plain) == first + second and all(item.barrier for item in plain)
    jump = joined.launches[-2]
    assert isinstance(jump, Jump) and jump.target == len(joined.launches)


def test_parts_with_an_inner_loop_and_a_start_amid_them() -> None:
    """A part may be there twice; jumps come at the start, or behind the part that they follow."""
    once = Program([launch(1, (1, 8)), launch(2, (2, 0))], 3, 10)
    jumps = [PartJump(-1, 1), PartJump(0, 2, 1), PartJump(1, 2, 0), PartJump(1, 1), PartJump(2, 0)]
    joined = joined_program([once, once, Program([], 2, 30)], jumps, 2)
    check_program(joined)
    assert (joined.num_values, joined.scratch_bytes) == (10, 30)
    kinds = [item.kind if isinstance(item, Jump) else item.kernel for item in joined.launches]
    assert kinds == ["always", 1, 2, "if_zero", 1, 2, "if_zero", "back", "back"]
    places = [item.target for item in joined.launches if isinstance(item, Jump)]
    assert places == [4, 8, 8, 4, 1]
    assert [list(item.slots) for item in joined.launches] == [
        [], [(1, 8)], [(2, 0)], [(9, 0)], [(4, 8)], [(5, 0)], [(8, 0)], [], [],
    ]  # fmt: skip
    assert [item.barrier for item in joined.launches[1:3]] == [True, False]
    assert [item.barrier for item in joined.launches[4:6]] == [True, False]
