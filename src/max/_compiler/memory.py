"""Where buffers lie in the arena, and where workers must wait for each other.

Buffers that do not live at the same time share an arena *block*. Which do is decided once, at compile time; how long
the blocks are follows from the symbols when the program runs. So the barriers between launches, which depend on who
shares memory with whom, hold for all sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from max._compiler.sizes import Size, nominal
from max._compiler.template import Buffer, Launch

__all__ = ["MemoryPlan", "plan_memory"]

ALIGNMENT = 64
REUSE_FACTOR = 4
"""A buffer may take a free block that is so many times larger; with more waste it gets a new one."""


@dataclass(slots=True)
class Block:
    """A part of the arena: as long as the longest of the sizes."""

    sizes: list[Size]
    estimate: int
    segment: int = 0
    """Which of the program's arenas it is in."""


@dataclass(slots=True)
class MemoryPlan:
    """The result of planning."""

    block_of: dict[int, int] = field(default_factory=dict[int, int])
    """For each temporary buffer its block."""
    blocks: list[Block] = field(default_factory=list[Block])
    barriers: list[bool] = field(default_factory=list[bool])
    """For each launch, whether workers wait for all earlier ones before it."""


class _Planner:
    def __init__(
        self,
        buffers: list[Buffer],
        launches: list[Launch],
        cuts: Sequence[int],
        held: Sequence[tuple[int, int]],
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
        for position, buffer in held:
            self.last_use[buffer] = max(self.last_use.get(buffer, 0), position)
        # where jumps lead to: what came before depends on the way
        self.joins = frozenset(labels)
        self.ends = self.keep_through_loops(loops)
        self.free: list[int] = []
        # blocks whose last reader may still be running: free after the next barrier
        self.pending: list[int] = []
        # what was read and written by parallel and by serial launches since the last barrier
        # and whether all that was written there were parts of their own
        self.written: tuple[dict[int, bool], dict[int, bool]] = ({}, {})
        self.read: tuple[set[int], set[int]] = (set(), set())

    def keep_through_loops(self, loops: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        """What was made before a loop and is used in it lasts to its end; gives what ends there, by position."""
        first_use: dict[int, int] = {}
        for index, launch in enumerate(self.launches):
            for buffer in (*launch.reads, *launch.writes):
                first_use.setdefault(buffer, index)
        ends: dict[int, list[int]] = {}
        for start, end in loops:
            used = {
                buffer
                for launch in self.launches[start:end]
                for buffer in (*launch.reads, *launch.writes)
                if buffer in self.last_use and first_use[buffer] < start
            }
            for buffer in sorted(used):
                if self.last_use[buffer] < end - 1:
                    self.last_use[buffer] = end - 1
                    ends.setdefault(end - 1, []).append(buffer)
        return ends

    def run(self) -> MemoryPlan:
        for index, launch in enumerate(self.launches):
            if index in self.cuts:
                self.begin_segment()
            waits = launch.jump is not None and launch.jump.kind in ("if_zero", "back")
            barrier = index in self.joins or (index > 0 and (waits or self.conflicts(launch)))
            if barrier:
                self.pass_barrier()
            reused = self.allocate(index, launch)
            if reused and not barrier and self.conflicts(launch):
                # an operand's memory is reused in place: its other readers must be done
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
            self.pending.extend(
                dead - {self.plan.block_of[b] for b in touched if self.last_use[b] > index}
            )
        return self.plan

    def begin_segment(self) -> None:
        """Goes on with a new arena: how long it is depends on sizes that the launches before it tell."""
        self.pass_barrier()
        self.free.clear()
        self.segment += 1

    def memory(self, buffer: int) -> int:
        """What two accesses of one memory have in common: the block, or the buffer itself."""
        block = self.plan.block_of.get(buffer)
        return buffer if block is None else -1 - block

    def conflicts(self, launch: Launch) -> bool:
        """Whether a launch touches memory that an earlier one may still be using.

        Serial launches run one after the other on one worker: among them nothing has to wait.
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
        for lane in (0, 1):
            self.written[lane].clear()
            self.read[lane].clear()
        # the size of an earlier segment's arena is settled
        self.free.extend([b for b in self.pending if self.plan.blocks[b].segment == self.segment])
        self.pending.clear()

    def allocate(self, index: int, launch: Launch) -> bool:
        """Gives blocks to the temporaries that a launch is the first to use; whether one was taken over in place."""
        reused = False
        for buffer in launch.writes:
            if self.buffers[buffer].kind != "temp" or buffer in self.plan.block_of:
                continue
            source = self.in_place_source(buffer, launch, index)
            if source is not None:
                block = self.plan.block_of[source]
                self.plan.blocks[block].sizes.append(self.buffers[buffer].bytes)
                self.plan.block_of[buffer] = block
                reused = True
            else:
                self.plan.block_of[buffer] = self.take(self.buffers[buffer].bytes)
        for buffer in launch.reads:
            if self.buffers[buffer].kind == "temp" and buffer not in self.plan.block_of:
                # never written: a buffer that a kernel reads before anything was stored in it
                self.plan.block_of[buffer] = self.take(self.buffers[buffer].bytes)
        return reused

    def in_place_source(self, buffer: int, launch: Launch, index: int) -> int | None:
        if not self.share:
            return None
        for written, read in launch.in_place:
            if (
                written == buffer
                and self.buffers[read].kind == "temp"
                # once only: what a caller passes twice is one buffer with several readers
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
        """A free block that fits well, or a new one."""
        wanted = nominal(size)
        best, best_waste = -1, 0
        for position, block in enumerate(self.free if self.share else ()):
            candidate = self.plan.blocks[block]
            if size in candidate.sizes:
                best = position
                break
            # static and symbolic sizes are kept apart: static blocks then have constant addresses
            if isinstance(size, int) != isinstance(candidate.sizes[0], int):
                continue
            waste = abs(candidate.estimate - wanted)
            fits = candidate.estimate <= REUSE_FACTOR * max(
                wanted, ALIGNMENT
            ) and wanted <= REUSE_FACTOR * max(candidate.estimate, ALIGNMENT)
            if fits and (best < 0 or waste < best_waste):
                best, best_waste = position, waste
        if best < 0:
            self.plan.blocks.append(Block([size], wanted, self.segment))
            return len(self.plan.blocks) - 1
        block = self.free.pop(best)
        chosen = self.plan.blocks[block]
        if size not in chosen.sizes:
            chosen.sizes.append(size)
            chosen.estimate = max(chosen.estimate, wanted)
        return block


def plan_memory(
    buffers: list[Buffer],
    launches: list[Launch],
    cuts: Sequence[int] = (),
    held: Sequence[tuple[int, int]] = (),
    labels: Iterable[int] = (),
    loops: Sequence[tuple[int, int]] = (),
    share: bool = True,
) -> MemoryPlan:
    """Assigns temporaries to arena blocks, and barriers to launches.

    Args:
        buffers: All buffers.
        launches: All launches, in order.
        cuts: Positions of launches that begin a new segment of the program, with an arena of its own.
        held: Positions and buffers that are read between the launches there, and must last until then.
        labels: Positions of launches that jumps lead to.
        loops: For each loop the positions of its first launch and of the one after its last, inner loops first.
        share: Whether buffers share memory.
    """
    return _Planner(buffers, launches, cuts, held, labels, loops, share).run()
