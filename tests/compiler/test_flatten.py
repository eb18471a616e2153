"""Inlined calls: random lowered graphs run as one flat program as a recursive walk over them runs them.

Kernels are stand-ins: what one writes is a checksum of what it reads and of its numbers. A predicate is a checksum too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from max._compiler.lowering.lowered_graph import (
    CallStep,
    HostStep,
    IfStep,
    Launch,
    LoweredGraph,
    Number,
    Pointer,
    Step,
    WhileStep,
)
from max._compiler.program.code import Check, WorkCode
from max._compiler.program.flatten import CUT, Flat, flatten
from tests.compiler.lowered_graphs import (
    Machine,
    TooLongError,
    Writer,
    computed_by,
    goes_on,
    key_of,
    number,
    slots_of,
)

pytestmark = pytest.mark.any_target

HOST = 0


class Walk(Machine):
    """Runs lowered graphs as they are written; a temporary buffer is named by the calls that lead to it."""

    def __init__(self, graphs: Mapping[str, LoweredGraph], runs_jumps: Sequence[bool]) -> None:
        super().__init__()
        self.graphs, self.runs_jumps = graphs, runs_jumps
        self.later_checks: list[tuple[Check, dict[str, int], str]] = []
        self.device = HOST

    def places_of(
        self,
        lowered: LoweredGraph,
        given: Mapping[int, tuple[Any, int]],
        prefix: str,
        path: tuple[Any, ...],
    ) -> dict[int, tuple[Any, int]]:
        places = dict(given)
        for index, buffer in enumerate(lowered.buffers):
            if index not in places:
                key = key_of(buffer, prefix) or ("own", path, index)
                places[index] = key, 0
                self.first_values[key] = key_of(buffer, prefix)
        return places

    def inner(
        self, step: CallStep, places: Mapping[int, Any], env: Mapping[str, int]
    ) -> dict[int, Any]:
        """The places of a callee's inputs and outputs."""
        callee = self.graphs[step.callee]
        inner = {
            index: place_in(places, env)(pointer)
            for (index, _), pointer in zip(callee.inputs, step.operands, strict=True)
        }
        for (index, _), result in zip(callee.outputs, step.results, strict=True):
            inner.setdefault(index, places[result])
        return inner

    def once(self, name: str, given: Mapping[int, Any], prefix: str, path: tuple[Any, ...]) -> None:
        """What runs at load, for each call in the text of the program."""
        lowered = self.graphs[name]
        places = self.places_of(lowered, given, prefix, path)
        for step in lowered.once:
            if isinstance(step, Launch):
                self.run_launch(step, places, {}, prefix)
            else:
                self.host_step(step, [place_in(places, {})(p) for p in step.bounds], {})
        for at, step in enumerate(lowered.steps):
            for side, call in calls_of(step):
                self.once(call.callee, {}, prefix + call.prefix, (*path, at, side))

    def run_launch(
        self, launch: Launch, places: Mapping[int, Any], env: Mapping[str, int], prefix: str
    ) -> None:
        def names(indices: Sequence[int]) -> list[Any]:
            return [("buffer", places[index][0]) for index in indices]

        pairs = [
            (*names([w]), *names([r]))
            for w, r in launch.in_place
            if not places[w][1] and not places[r][1]
        ]
        buffers = names(launch.reads), names(launch.writes), pairs, names(launch.parts)
        self.launch(
            launch, slots_of(launch, place_in(places, env), env), env, prefix + launch.name, buffers
        )

    def run(
        self,
        name: str,
        given: Mapping[int, Any],
        env: dict[str, int],
        prefix: str,
        path: tuple[Any, ...],
        conditional: bool,
    ) -> dict[str, int]:
        """Runs a graph; returns its symbols."""
        lowered = self.graphs[name]
        places = self.places_of(lowered, given, prefix, path)
        waiting = list(lowered.checks)
        unknown = {symbol for step in lowered.steps for symbol in computed_by(step)}
        if not conditional:
            self.later_checks += [(check, env, prefix + check.message) for check in waiting]
            waiting = []
        waiting = self.checked(waiting, unknown, env, prefix)
        for at, step in enumerate(lowered.steps):
            place = place_in(places, env)
            if isinstance(step, Launch):
                self.run_launch(step, places, env, prefix)
            elif isinstance(step, HostStep):
                size = self.host_step(step, [place(p) for p in step.bounds], env)
                env |= {symbol: size for symbol in step.symbols if symbol}
            elif isinstance(step, CallStep):
                self.call(step, places, env, prefix, (*path, at, 0), conditional)
            else:
                around = self.device
                device = self.buffer_device(name, step.predicate.buffer)
                on_device = self.runs_jumps[device] and self.devices(step) <= {device}
                device = device if on_device else HOST
                self.device = device
                if isinstance(step, IfStep) and not on_device:
                    # both sides write the same memory, on its device
                    results = [places[index][0] for index in step.then.results]
                    devices = [self.buffer_device(name, index) for index in step.then.results]
                    for each in sorted(set(devices)):
                        marked = [
                            ("buffer", r)
                            for r, d in zip(results, devices, strict=True)
                            if d == each
                        ]
                        self.add("mark", marked, each)
                if isinstance(step, IfStep):
                    taken = goes_on(self.read(place(step.predicate)))
                    side = 0 if taken else 1
                    call = (step.then, step.otherwise)[side]
                    self.call(call, places, env, prefix, (*path, at, side), True)
                else:
                    self.repeat(step, places, env, prefix, (*path, at))
                self.device = around
            unknown -= set(computed_by(step))
            waiting = self.checked(waiting, unknown, env, prefix)
        return env

    def checked(
        self, checks: Sequence[Check], unknown: set[str], env: Mapping[str, int], prefix: str
    ) -> list[Check]:
        """Checks what has no unknown symbol; returns the rest."""
        waiting: list[Check] = []
        for check in checks:
            symbols = {
                s
                for side in (check.actual, check.required)
                if not isinstance(side, int)
                for s in side.symbols
            }
            if symbols & unknown:
                waiting.append(check)
            else:
                self.check(check, env, prefix + check.message, self.device)
        return waiting

    def buffer_device(self, name: str, index: int) -> int:
        return self.graphs[name].buffers[index].device

    def devices(self, step: Step) -> set[int | None]:
        """Where the parts of a branch or a loop run; None: on the host, between launches."""
        if isinstance(step, HostStep):
            return {None}
        if isinstance(step, Launch):
            return {step.device}
        found: set[int | None] = set()
        if isinstance(step, WhileStep):
            found |= {launch.device for launch in step.update}
        for _, call in calls_of(step):
            for inner in self.graphs[call.callee].steps:
                found |= self.devices(inner)
                if isinstance(inner, IfStep | WhileStep):
                    found.add(self.buffer_device(call.callee, inner.predicate.buffer))
        return found

    def repeat(
        self,
        step: WhileStep,
        places: Mapping[int, Any],
        env: dict[str, int],
        prefix: str,
        path: tuple[Any, ...],
    ) -> None:
        while True:
            self.call(step.condition, places, env, prefix, (*path, 0), True)
            if not goes_on(self.read(place_in(places, env)(step.predicate))):
                return
            self.call(step.body, places, env, prefix, (*path, 1), True)
            for launch in step.update:
                self.run_launch(launch, places, env, prefix)

    def call(
        self,
        step: CallStep,
        places: Mapping[int, Any],
        env: dict[str, int],
        prefix: str,
        path: tuple[Any, ...],
        conditional: bool,
    ) -> None:
        bound = {symbol: number(size, env) for symbol, size in step.env}
        if step.inherit:
            bound = {**env, **bound}
        full = prefix + step.prefix
        known = dict(env)
        computed = self.run(
            step.callee, self.inner(step, places, env), bound, full, path, conditional
        )
        env |= {symbol: computed[symbol] for symbol in step.reveals}
        callee = self.graphs[step.callee]
        own = {symbol for inner in callee.steps for symbol in computed_by(inner)}
        shown = {
            s
            for _, info in callee.outputs
            for dim in info.shape
            if not isinstance(dim, int)
            for s in dim.symbols
        }
        for symbol in sorted(own & shown - set(step.reveals)):
            check = Check(
                computed[symbol],
                known[symbol],
                f"call: two calls of {step.callee} differ in {symbol}",
            )
            if conditional:
                self.check(check, {}, check.message, self.device)
            else:
                self.later_checks.append((check, {}, check.message))


def place_in(places: Mapping[int, tuple[Any, int]], env: Mapping[str, int]) -> Any:
    def place(pointer: Pointer) -> tuple[Any, int]:
        name, offset = places[pointer.buffer]
        return name, offset + number(pointer.offset, env)

    return place


def calls_of(step: Step) -> list[tuple[int, CallStep]]:
    if isinstance(step, CallStep):
        return [(0, step)]
    if isinstance(step, IfStep):
        return [(0, step.then), (1, step.otherwise)]
    return [(0, step.condition), (1, step.body)] if isinstance(step, WhileStep) else []


class Processor(Machine):
    """Runs a flat program: launches in their order, jumps, and the host's steps between segments."""

    def __init__(self, flat: Flat) -> None:
        super().__init__()
        self.flat = flat
        self.symbols: dict[str, int] = {}
        for index, buffer in enumerate(flat.buffers):
            self.first_values[index] = key_of(buffer, "")

    def place(self, pointer: Pointer) -> tuple[int, int]:
        return pointer.buffer, number(pointer.offset, self.symbols)

    def run_launch(self, launch: Launch) -> None:
        if launch.check is not None:
            assert launch.kernel == f"check{launch.device}{launch.check.exact}"
            assert launch.slots == (Number(launch.check.actual), Number(launch.check.required))
            assert (launch.reads, launch.writes, launch.serial) == ((), (), False)
            assert launch.name == launch.check.message.partition(":")[0]
            assert (launch.staged_op, launch.work) == (launch.check.staged_op, WorkCode("other", 0))
            self.check(launch.check, self.symbols, launch.check.message, launch.device)
            return
        names = [
            [("buffer", index) for index in indices]
            for indices in (launch.reads, launch.writes, launch.parts)
        ]
        pairs = [(("buffer", w), ("buffer", r)) for w, r in launch.in_place]
        slots = slots_of(launch, self.place, self.symbols)
        self.launch(launch, slots, self.symbols, launch.name, (*names[:2], pairs, names[2]))

    def once(self) -> None:
        """Runs what belongs to the load; the program is cut where its device changes."""
        flat = self.flat
        for position in range(len(flat.once) + 1):
            steps = [step for at, step in flat.once_host_steps if at == position]
            for step in steps:
                if step is not CUT:
                    self.host_step(step, [self.place(p) for p in step.bounds], {})
            if position == len(flat.once):
                return
            changes = position and flat.once[position - 1].device != flat.once[position].device
            assert [step is CUT for step in steps].count(True) == int(bool(changes))
            self.run_launch(flat.once[position])

    def run(self) -> None:
        flat = self.flat
        cuts = sorted({0, len(flat.launches), *(at for at, _ in flat.host_steps)})
        ends: dict[int, int] = {}
        for begin, end in zip(cuts, cuts[1:], strict=False):
            assert len({launch.device for launch in flat.launches[begin:end]}) <= 1
            ends |= dict.fromkeys(range(begin, end), end)
        loops = dict(flat.loops)
        at, after_host = 0, False
        while True:
            if not after_host:
                for step in [step for position, step in flat.host_steps if position == at]:
                    if step.target < 0:
                        if step is not CUT:
                            size = self.host_step(
                                step, [self.place(p) for p in step.bounds], self.symbols
                            )
                            self.symbols |= {symbol: size for symbol in step.symbols if symbol}
                        continue
                    target = flat.labels[step.target]
                    assert step.rule in ("jump", "if_zero") and target in cuts
                    if step.rule == "jump" or not self.taken(step.bounds):
                        assert target > at or any(
                            target == head and at < end for head, end in flat.loops
                        )
                        at, after_host = target, True
                        break
            if at == len(flat.launches):
                return
            launch = flat.launches[at]
            after_host = False
            end, at = ends[at], at + 1
            if launch.jump is None:
                self.run_launch(launch)
            elif launch.jump.kind == "next":
                if launch.writes:
                    self.add("mark", [("buffer", index) for index in launch.writes], launch.device)
            else:
                assert launch.name == launch.jump.kind and not launch.writes and not launch.serial
                assert launch.reads == tuple(slot.buffer for slot in launch.slots)  # pyright: ignore
                target = flat.labels[launch.jump.label]
                assert target <= end, "a jump stays in its segment"
                goes = launch.jump.kind != "if_zero" or not self.taken(launch.slots)
                if goes:
                    assert (launch.jump.kind == "back") == (target < at)
                    assert launch.jump.kind != "back" or loops[target] >= at
                    # the host's steps before a loop are not repeated
                    after_host = target < end
                    at = target

    def taken(self, pointers: Sequence[Any]) -> bool:
        return goes_on(self.read(self.place(pointers[0])))


def with_numbers(trace: Sequence[Any]) -> list[Any]:
    """A trace with buffers numbered as they appear."""
    numbers: dict[Any, int] = {}

    def renamed(item: Any) -> Any:
        if isinstance(item, tuple) and item and item[0] == "buffer":
            return ("buffer", numbers.setdefault(item[1], len(numbers)), *item[2:])
        if isinstance(item, list | tuple):
            return [renamed(part) for part in item]
        return item

    return [renamed(item) for item in trace]


def check_kernel(device: int, exact: bool) -> str:
    return f"check{device}{exact}"


def programs(count: int) -> Iterator[tuple[Writer, str, tuple[bool, bool]]]:
    # a branch of a device in one of the host, before a check; a choice by a value of another device, within one; a loop
    # of a device in a step of the host, before a check
    for seed in (*range(count), 244, 293, 544):
        writer = Writer(seed)
        yield writer, writer.write(3 + seed % 3), (seed % 2 > 0, seed % 5 > 0)


def test_a_flat_program_does_what_its_graphs_do() -> None:
    seen = dict.fromkeys(["check", "later check", "jump", "host jump", "host", "agreement"], 0)
    for writer, entry, runs_jumps in programs(200):
        flat = flatten(writer.graphs, entry, check_kernel, runs_jumps)
        lowered = writer.graphs[entry]
        processor, walk = Processor(flat), Walk(writer.graphs, runs_jumps)
        processor.once()
        walk.once(entry, {}, "", ())
        env = {f"{entry}_n": 3, "outer": 2}
        processor.symbols |= env
        for position, (index, _) in enumerate(lowered.inputs):
            (at,) = [
                i
                for i, b in enumerate(flat.buffers)
                if b.kind == "input" and b.name == str(position)
            ]
            processor.first_values[at] = walk.first_values["own", (), index] = ("input", position)
        try:
            walk.run(
                entry,
                {index: (("own", (), index), 0) for index, _ in lowered.inputs},
                env,
                "",
                (),
                False,
            )
        except TooLongError:
            continue
        processor.run()
        for check, symbols, message in walk.later_checks:
            walk.check(check, symbols, message, 9)
        for check in flat.checks:
            processor.check(check, processor.symbols, check.message, 9)
        for machine, index in (
            (walk, ("own", (), lowered.outputs[0][0])),
            (processor, flat.outputs[0]),
        ):
            machine.add(("buffer", index))
        for machine in (processor, walk):
            later = [item for item in machine.trace if item[0] == "check" and item[-1] == 9]
            machine.trace = [item for item in machine.trace if item not in later]
            machine.add(sorted(later))
        assert with_numbers(processor.trace) == with_numbers(walk.trace)
        seen["later check"] += len(walk.trace[-1][0])
        seen["check"] += sum(item[0] == "check" for item in walk.trace)
        seen["agreement"] += sum("two calls" in repr(item) for item in walk.trace)
        seen["jump"] += sum(
            one.jump is not None and one.jump.kind != "next" for one in flat.launches
        )
        seen["host jump"] += sum(step.target >= 0 for _, step in flat.host_steps)
        seen["host"] += sum(item[0] == "host" for item in walk.trace)
    assert min(seen.values()) > 4, seen
