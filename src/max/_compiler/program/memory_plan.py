"""Memory planning: places temporaries in the arena, and barriers between launches.

Buffers whose lifetimes do not overlap share an arena *block*. The assignment is made once, at compile time; block sizes
follow from the symbols at run time. Barriers depend only on the assignment, so they hold for all sizes.

A launch needs a barrier if an unfinished launch conflicts with it:

* read after write: it reads memory that the other writes;
* write after read: it writes memory that the other reads;
* write after write: both write it, unless each writes a disjoint part.

Serial launches run in order on worker 0 and need no barrier between each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field

from max._compiler.lowering.lowered_graph import Buffer, Launch
from max._compiler.program.code import ALIGNMENT
from max._dataclass import dataclass
from max.mlir.sizes import Size, nominal

__all__ = ["MemoryPlan", "plan_memory"]

REUSE_FACTOR = 4
"""The largest ratio between the sizes of a buffer and of a free block that it may take."""


@dataclass(slots=True)
class Block:
    """A part of the arena; its size is the largest of `sizes`."""

    sizes: list[Size]
    estimate: int
    segment: int
    """The segment whose arena holds the block."""


@dataclass(slots=True)
class MemoryPlan:
    """The result of planning."""

    block_of: dict[int, int] = field(default_factory=dict[int, int])
    """The block of each temporary buffer."""
    blocks: list[Block] = field(default_factory=list[Block])
    barriers: list[bool] = field(default_factory=list[bool])
    """Whether all workers finish the earlier launches before each launch."""


class _Planner:
    """Walks the launches in order, with the accesses since the last barrier."""

    def __init__(
        self,
        buffers: list[Buffer],
        launches: list[Launch],
        cuts: Sequence[int],
        host_reads: Sequence[tuple[int, int]],
        labels: Iterable[int],
        loops: Sequence[tuple[int, int]],
        share: bool,
    ) -> None:
        self.buffers = buffers
        self.share = share
        self.launches = launches
        self.cuts = frozenset(cuts)
        self.segment = 0
        self.plan = MemoryPlan()
        self.last_use: dict[int, int] = {}
        for index, launch in enumerate(launches):
            for buffer in (*launch.reads, *launch.writes):
                if buffers[buffer].kind == "temp":
                    self.last_use[buffer] = index
        for position, buffer in host_reads:
            self.last_use[buffer] = max(self.last_use.get(buffer, position), position)
        # jump targets: the launches before them depend on the path, so a barrier ends all of them
        self.joins = frozenset(labels)
        self.ends = self.keep_through_loops(loops)
        # blocks of this segment whose users are all finished
        self.free: list[int] = []
        # blocks whose last user may still be running: free after the next barrier
        self.pending: list[int] = []
        # memory written and read since the last barrier, by parallel (0) and by serial launches (1); for
        # written memory, whether all writers wrote disjoint parts
        self.written: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        self.read: tuple[set[int], set[int]] = (set(), set())

    def keep_through_loops(self, loops: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        """Extends the lifetime of buffers that live before a loop, or between iterations, to the loop's end.

        Returns:
            The extended buffers, by the position of the loop's last launch.
        """
        first_use: dict[int, int] = {}
        for index, launch in enumerate(self.launches):
            for buffer in (*launch.reads, *launch.writes):
                first_use.setdefault(buffer, index)
        self.hoisted = self.allocate_before_loops(loops, first_use)
        ends: dict[int, list[int]] = {}
        for start, end in loops:
            used = {
                buffer
                for launch in self.launches[start:end]
                for buffer in (*launch.reads, *launch.writes)
                if buffer in self.last_use
                and (first_use[buffer] < start or buffer in self.hoisted.get(start, ()))
            }
            for buffer in used:
                if self.last_use[buffer] < end - 1:
                    self.last_use[buffer] = end - 1
                    ends.setdefault(end - 1, []).append(buffer)
        return ends

    def allocate_before_loops(
        self, loops: Sequence[tuple[int, int]], first_use: dict[int, int]
    ) -> dict[int, list[int]]:
        """Moves the first use of uninitialized buffers (`buffer_create`) from a loop to its start: what an iteration
        stores in them, later iterations and launches read.

        Returns:
            The buffers, by the position of the loop's first launch.
        """
        hoisted: dict[int, list[int]] = {}
        for start, end in sorted(loops):
            for index in range(start, end):
                if index > start and index in self.cuts:
                    # sizes that the segments before compute are not known at the start
                    break
                launch = self.launches[index]
                for buffer in dict.fromkeys((*launch.reads, *launch.writes)):
                    if (
                        self.buffers[buffer].kind == "temp"
                        and first_use[buffer] == index
                        and buffer in launch.reads
                    ):
                        first_use[buffer] = start
                        hoisted.setdefault(start, []).append(buffer)
        return hoisted

    def run(self) -> MemoryPlan:
        """Assigns blocks and barriers launch by launch, and releases the blocks of buffers that are not used again."""
        for index, launch in enumerate(self.launches):
            if index in self.cuts:
                self.begin_segment()
            # all workers read the predicate of a branch, or repeat a loop, after all launches before
            waits = launch.jump is not None and launch.jump.kind in ("if_zero", "back")
            barrier = index in self.joins or (index > 0 and (waits or self.conflicts(launch)))
            if barrier:
                self.pass_barrier()
            for buffer in self.hoisted.get(index, ()):
                if buffer not in self.plan.block_of:
                    self.plan.block_of[buffer] = self.take(self.buffers[buffer].bytes)
            reused = self.allocate(index, launch)
            if reused and self.conflicts(launch):
                # the launch overwrites an operand in place: its other readers must be finished
                barrier = True
                self.pass_barrier()
            self.plan.barriers.append(barrier)
            lane = 1 if launch.serial else 0
            self.read[lane].update(self.memory(b) for b in launch.reads)
            for buffer in launch.writes:
                memory = self.memory(buffer)
                part = buffer in launch.parts
                self.written[lane][memory] = part and self.written[lane].get(memory, True)
            ending = {*launch.reads, *launch.writes, *self.ends.get(index, ())}
            touched = [b for b in ending if b in self.plan.block_of]
            dead = {self.plan.block_of[b] for b in touched if self.last_use[b] == index}
            # a result in place has the block of its operand, which lives on
            self.pending.extend(
                dead - {self.plan.block_of[b] for b in touched if self.last_use[b] > index}
            )
        return self.plan

    def begin_segment(self) -> None:
        """Starts a new arena, whose size depends on sizes that the launches before it compute."""
        self.pass_barrier()
        self.free.clear()
        self.segment += 1

    def memory(self, buffer: int) -> int:
        """A key that is equal for accesses to the same memory: the block, or the buffer if it has none."""
        block = self.plan.block_of.get(buffer)
        # negative: blocks and buffers are numbered apart
        return buffer if block is None else -1 - block

    def conflicts(self, launch: Launch) -> bool:
        """Whether a launch conflicts with one that may still be running; serial launches never conflict with each
        other.
        """
        lanes = (0,) if launch.serial else (0, 1)
        for lane in lanes:
            written, read = self.written[lane], self.read[lane]
            for buffer in launch.reads:
                if self.memory(buffer) in written:
                    return True
            for buffer in launch.writes:
                memory = self.memory(buffer)
                if memory in read:
                    return True
                if memory in written and not (buffer in launch.parts and written[memory]):
                    return True
        return False

    def pass_barrier(self) -> None:
        """Forgets the accesses before a barrier; blocks whose users have finished become free."""
        for lane in (0, 1):
            self.written[lane].clear()
            self.read[lane].clear()
        # blocks of earlier segments are not reused: the layout of their arenas is final
        self.free.extend([b for b in self.pending if self.plan.blocks[b].segment == self.segment])
        self.pending.clear()

    def allocate(self, index: int, launch: Launch) -> bool:
        """Assigns blocks to temporaries at their first launch; returns whether one reuses an operand in place."""
        reused = False
        for buffer in launch.writes:
            if self.buffers[buffer].kind != "temp" or buffer in self.plan.block_of:
                continue
            source = self.in_place_source(buffer, launch, index)
            if source is not None:
                self.plan.block_of[buffer] = self.plan.block_of[source]
                reused = True
            else:
                self.plan.block_of[buffer] = self.take(self.buffers[buffer].bytes)
        for buffer in launch.reads:
            if self.buffers[buffer].kind == "temp" and buffer not in self.plan.block_of:
                # an uninitialized buffer (`buffer_create`) is read before it is written
                self.plan.block_of[buffer] = self.take(self.buffers[buffer].bytes)
        return reused

    def in_place_source(self, buffer: int, launch: Launch, index: int) -> int | None:
        """The operand that a result may overwrite: a temporary of equal size that is last used here; else None."""
        if not self.share:
            return None
        for written, read in launch.in_place:
            if (
                written == buffer
                and self.buffers[read].kind == "temp"
                # two inputs of a callee may be one buffer here, which it reads at other positions too
                and launch.reads.count(read) == 1
                and self.last_use[read] == index
                and self.buffers[read].bytes == self.buffers[buffer].bytes
                and sum(
                    self.plan.block_of.get(other) == self.plan.block_of.get(read)
                    for other in launch.writes
                )
                == 0
            ):
                return read
        return None

    def take(self, size: Size) -> int:
        """Takes the free block with the least waste, or a new one."""
        expected = nominal(size)
        best, best_waste = -1, 0
        for position, block in enumerate(self.free if self.share else ()):
            candidate = self.plan.blocks[block]
            # no waste, whatever the symbols are
            if size in candidate.sizes:
                best = position
                break
            # static and symbolic sizes do not share: static blocks then have constant offsets
            if isinstance(size, int) != isinstance(candidate.sizes[0], int):
                continue
            waste = abs(candidate.estimate - expected)
            fits = candidate.estimate <= REUSE_FACTOR * max(
                expected, ALIGNMENT
            ) and expected <= REUSE_FACTOR * max(candidate.estimate, ALIGNMENT)
            if fits and (best < 0 or waste < best_waste):
                best, best_waste = position, waste
        if best < 0:
            self.plan.blocks.append(Block([size], expected, self.segment))
            return len(self.plan.blocks) - 1
        block = self.free.pop(best)
        chosen = self.plan.blocks[block]
        if size not in chosen.sizes:
            chosen.sizes.append(size)
            chosen.estimate = max(chosen.estimate, expected)
        return block


def plan_memory(
    buffers: list[Buffer],
    launches: list[Launch],
    cuts: Sequence[int] = (),
    host_reads: Sequence[tuple[int, int]] = (),
    labels: Iterable[int] = (),
    loops: Sequence[tuple[int, int]] = (),
    share: bool = True,
) -> MemoryPlan:
    """Assigns temporaries to arena blocks, and barriers to launches.

    Args:
        buffers: All buffers.
        launches: All launches, in order.
        cuts: Positions of launches that begin a new segment of the program, with its own arena.
        host_reads: Pairs (position, buffer): the host reads the buffer before the launch at the position.
        labels: Positions of jump targets.
        loops: The positions of the first launch of each loop and of the one after its last, inner loops first.
        share: Whether buffers share memory.
    """
    return _Planner(buffers, launches, cuts, host_reads, labels, loops, share).run()
