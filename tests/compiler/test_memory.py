"""The memory plan: random programs keep their values, and have exactly the barriers that their hazards need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from max._compiler.lowering.lowered_graph import Buffer, Jump, Launch
from max._compiler.program.memory_plan import MemoryPlan, plan_memory
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size

pytestmark = pytest.mark.any_target


def launch(reads: Sequence[int], writes: Sequence[int], **options) -> Launch:
    return Launch(
        "k", (), tuple(reads), tuple(writes), options.pop("serial", False), "k", **options
    )


def test_values_that_the_host_reads_keep_their_memory() -> None:
    buffers = [Buffer("temp", 256) for _ in range(3)]
    launches = [launch((), (0,)), launch((0,), (1,)), launch((1,), (2,))]
    reused = plan_memory(buffers, launches).block_of
    assert reused[2] == reused[0]
    kept = plan_memory(buffers, launches, [3], [(3, 0)]).block_of
    assert kept[2] != kept[0]
    # the host reads it before the last launch of the program does
    early = plan_memory(buffers, launches, [1], [(0, 0)]).block_of
    assert early[2] != early[0], "blocks of an earlier segment are not taken"


@dataclass
class Program:
    """A random program; a position is the number of a launch."""

    rng: random.Random
    buffers: list[Buffer] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)
    labels: set[int] = field(default_factory=set)
    loops: list[tuple[int, int]] = field(default_factory=list)
    branches: dict[int, int] = field(default_factory=dict)
    """The target of the jump at each position, forwards."""
    cuts: list[int] = field(default_factory=list)
    held: list[tuple[int, int]] = field(default_factory=list)

    def buffer(self, kind: str = "temp") -> int:
        self.buffers.append(Buffer(kind, 64 * self.rng.choice((1, 2, 3, 8, 40))))
        return len(self.buffers) - 1

    def block(self, visible: list[int], depth: int, length: int) -> None:
        """Appends launches that read visible buffers; those of loops and branches are seen in them only."""
        rng = self.rng
        visible = list(visible)
        for _ in range(length):
            kind = rng.random()
            if depth < 2 and kind < 0.12:
                start = len(self.launches)
                self.labels.add(start)
                self.block(visible, depth + 1, rng.randint(1, 5))
                self.launches.append(launch((), (), jump=Jump("back", 0)))
                self.loops.append((start, len(self.launches)))
            elif depth < 2 and kind < 0.2:
                at = len(self.launches)
                self.launches.append(launch((rng.choice(visible),), (), jump=Jump("if_zero", 0)))
                self.block(visible, depth + 1, rng.randint(1, 4))
                self.branches[at] = len(self.launches)
                self.labels.add(len(self.launches))
            elif depth == 0 and kind < 0.25 and self.launches:
                self.cuts.append(len(self.launches))
                self.held.append((len(self.launches), rng.choice(visible)))
            else:
                self.step(visible, depth)

    def step(self, visible: list[int], depth: int) -> None:
        rng = self.rng
        serial = rng.random() < 0.3
        reads = rng.choices(visible[-6:], k=rng.randint(0, 3))
        if depth == 0 and rng.random() < 0.1:
            whole = self.buffer()
            for _ in range(rng.randint(1, 3)):
                part = rng.choices(visible[-6:], k=rng.randint(0, 2))
                serial = rng.random() < 0.3
                self.launches.append(launch(part, (whole,), serial=serial, parts=(whole,)))
            visible.append(whole)
            return
        written = [
            self.buffer("temp" if rng.random() < 0.9 else "output")
            for _ in range(rng.randint(1, 2))
        ]
        pairs = [(w, r) for w in written for r in sorted(set(reads)) if rng.random() < 0.6]
        for w, r in pairs:
            if rng.random() < 0.7:
                self.buffers[w] = Buffer(self.buffers[w].kind, self.buffers[r].bytes)
        old = [b for b in visible if self.buffers[b].kind != "input" and b not in reads]
        if old and rng.random() < 0.15:
            written.append(rng.choice(old))  # a value that a loop carries
        self.launches.append(launch(reads, written, serial=serial, in_place=tuple(pairs)))
        visible.extend(b for b in written if b not in visible)


def random_program(seed: int) -> Program:
    program = Program(random.Random(seed))
    inputs = [program.buffer("input") for _ in range(2)]
    program.block(inputs, 0, program.rng.randint(3, 14))
    return program


def places(program: Program, plan: MemoryPlan, buffers: Sequence[int]) -> list[tuple[str, int]]:
    """What identifies the memory of buffers."""
    return [("block", plan.block_of[b]) if b in plan.block_of else ("buffer", b) for b in buffers]


def path(program: Program) -> list[int]:
    """The positions of a run with random jumps."""
    rng, position, jumps = program.rng, 0, 0
    starts = {end - 1: start for start, end in program.loops}
    positions: list[int] = []
    while position < len(program.launches):
        positions.append(position)
        if position in program.branches and rng.random() < 0.5:
            position = program.branches[position]
        elif position in starts and jumps < 12 and rng.random() < 0.6:
            position, jumps = starts[position], jumps + 1
        else:
            position += 1
    return positions


def check_values(program: Program, plan: MemoryPlan) -> None:
    """Runs the program on memory that holds which value was written there last."""
    memory: dict[tuple[str, int], tuple[int, int]] = {}
    versions: dict[int, int] = {}
    held = dict(program.held)
    for position in path(program):
        step = program.launches[position]
        if position in held and held[position] in versions:
            (place,) = places(program, plan, [held[position]])
            assert memory[place] == (held[position], versions[held[position]])
        for buffer, place in zip(step.reads, places(program, plan, step.reads), strict=True):
            if buffer in versions:
                assert memory[place] == (buffer, versions[buffer]), f"{position}: {buffer} is lost"
        written = places(program, plan, step.writes)
        assert len(set(written)) == len(written), f"{position}: two results in one place"
        for buffer, place in zip(step.writes, written, strict=True):
            for read, source in zip(step.reads, places(program, plan, step.reads), strict=True):
                if source == place:
                    assert (buffer, read) in step.in_place and step.reads.count(read) == 1
                    assert program.buffers[read].bytes == program.buffers[buffer].bytes
            if buffer in step.parts and buffer in versions:
                assert memory[place] == (buffer, versions[buffer]), f"{position}: a part is lost"
                continue
            versions[buffer] = versions.get(buffer, 0) + 1
            memory[place] = (buffer, versions[buffer])


def expected_barriers(program: Program, plan: MemoryPlan) -> list[bool]:
    """A barrier where a launch conflicts with one since the last barrier, each pair looked at."""

    def conflict(earlier: Launch, later: Launch) -> bool:
        if earlier.serial and later.serial:
            return False
        reads, writes = (places(program, plan, x) for x in (earlier.reads, earlier.writes))
        if set(writes) & set(places(program, plan, later.reads)):
            return True
        for buffer, place in zip(later.writes, places(program, plan, later.writes), strict=True):
            if place in reads:
                return True
            if place in writes and not (buffer in later.parts and buffer in earlier.parts):
                return True
        return False

    running: list[Launch] = []
    barriers: list[bool] = []
    for position, step in enumerate(program.launches):
        if position in program.cuts:
            running = []
        waits = step.jump is not None and position > 0
        waits = waits or position in program.labels
        barriers.append(waits or any(conflict(other, step) for other in running))
        running = [step] if barriers[-1] else [*running, step]
    return barriers


def test_random_programs_keep_their_values_and_wait_where_they_must() -> None:
    shared = in_place = 0
    for seed in range(250):
        program = random_program(seed)
        plan = plan_memory(
            program.buffers, program.launches, sorted(set(program.cuts)), program.held,
            program.labels, program.loops,
        )  # fmt: skip
        used = {b for step in program.launches for b in (*step.reads, *step.writes)}
        assert set(plan.block_of) == {b for b in used if program.buffers[b].kind == "temp"}
        for buffer, block in plan.block_of.items():
            assert program.buffers[buffer].bytes in plan.blocks[block].sizes
        for _ in range(5):
            check_values(program, plan)
        assert plan.barriers == expected_barriers(program, plan), seed
        shared += len(plan.block_of) > len(plan.blocks)
        in_place += any(
            plan.block_of.get(w, -1) == plan.block_of.get(r, -2)
            for step in program.launches
            for w, r in step.in_place
        )
        alone = plan_memory(program.buffers, program.launches, share=False)
        assert len(alone.blocks) == len(alone.block_of) == len(set(alone.block_of.values()))
    assert shared > 125 and in_place > 25


def test_a_buffer_that_is_read_before_it_is_written_has_memory() -> None:
    buffers = [Buffer("temp", 64), Buffer("output", 64), Buffer("temp", 64), Buffer("temp", 64)]
    result = plan_memory(buffers, [launch((0,), (1,)), launch((1,), (2,)), launch((2, 0), (3,))])
    assert sorted(result.block_of) == [0, 2, 3]
    assert len(set(result.block_of.values())) == 3


N, M = DimExpr.symbol("n") * 4, DimExpr.symbol("m") * 4


@pytest.mark.parametrize(
    ("free", "size", "taken"),
    [
        # a ratio of 4 at most
        ([256], 256, 0), ([1024], 256, 0), ([1025], 256, None), ([256], 1024, 0), ([255], 1024, None),
        # of what is aligned to 64 bytes
        ([256], 1, 0), ([257], 1, None), ([1], 256, 0), ([1], 257, None), ([0], 256, 0), ([256], 0, 0),
        # the least waste, in both directions; the first of equal ones
        ([1024, 512, 300], 256, 2), ([300, 512, 1024], 256, 0), ([128, 300], 256, 1), ([250, 300], 256, 0),
        ([512, 512], 256, 0), ([257, 256], 256, 1), ([2000, 512], 256, 1), ([512, 2000], 256, 0),
        # static and symbolic sizes stay apart
        ([512], N, None), ([N], 512, None), ([N], M, 0), ([N, M], M, 1), ([512, N], M, 1), ([N, 512], 500, 1),
        ([M * 4], N, 0), ([M * 5], N, None),
    ],
)  # fmt: skip
def test_the_block_that_is_taken(free: list[Size], size: Size, taken: int | None) -> None:
    count = len(free)
    outputs = range(count, count + 3)
    buffers = [*[Buffer("temp", s) for s in free], *[Buffer("output", 64) for _ in outputs]]
    buffers += [Buffer("temp", size)]
    one, two, three = outputs
    result = plan_memory(
        buffers,
        [
            launch((), range(count)), launch(range(count), (one,)), launch((one,), (two,)),
            launch((two,), (three, len(buffers) - 1)),
        ],
    )  # fmt: skip
    block = result.block_of[len(buffers) - 1]
    assert block == (count if taken is None else taken)
    estimate = 512 if isinstance(size, DimExpr) else size
    if taken is None:
        assert (result.blocks[block].sizes, result.blocks[block].estimate) == ([size], estimate)
    else:
        assert set(result.blocks[block].sizes) == {free[taken], size}
        assert result.blocks[block].estimate >= estimate


def test_a_block_that_has_held_the_size_is_taken_before_one_with_less_waste() -> None:
    """The first block has held 256 and 1,024 bytes, the other one 260."""
    sizes = [256, 1024, 260, 256]
    buffers = [Buffer("temp", s) for s in sizes] + [Buffer("output", 64) for _ in range(6)]
    result = plan_memory(
        buffers,
        [
            launch((), (0,)), launch((0,), (4,)), launch((4,), (5,)),
            launch((5,), (1, 2)), launch((1, 2), (6,)), launch((6,), (7,)), launch((7,), (8, 3)),
        ],
    )  # fmt: skip
    assert result.block_of == {0: 0, 1: 0, 2: 1, 3: 0}
    assert [(block.sizes, block.estimate) for block in result.blocks] == [
        ([256, 1024], 1024), ([260], 260),
    ]  # fmt: skip


def test_memory_of_loops_is_reused() -> None:
    """What a loop makes is dead within it; what it reads from outside, at its end; what it does not read, before."""
    buffers = [Buffer("temp", 256) for _ in range(12)]
    back = launch((), (), jump=Jump("back", 0))
    result = plan_memory(
        buffers,
        [
            launch((), (0, 1)),
            launch((0,), (2,)),  # 0 is not read in the loop
            launch((1, 2), (3,)), launch((3,), (4,)), launch((4,), (5,)), launch((5,), (6,)), back,
            launch((6, 1), (7, 8, 9, 10, 11)),
        ],
        labels=[2, 7], loops=[(2, 7)],
    ).block_of  # fmt: skip
    assert result[0] in [result[b] for b in (3, 4, 5, 6)]
    assert result[3] == result[5]
    assert not {result[1], result[2]} & {result[b] for b in (3, 4, 5, 6)}
    assert result[2] in {result[b] for b in (7, 8, 9, 10, 11)}
    assert result[1] not in {result[b] for b in (7, 8, 9, 10, 11)}
