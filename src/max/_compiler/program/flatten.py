"""Inlines calls: each becomes the launches of its callee, with the caller's buffers, symbols and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace

from max._backends.backend import HOST
from max._compiler.lowering.lowered_graph import (
    Buffer,
    CallStep,
    HostStep,
    IfStep,
    Jump,
    Launch,
    LimitSlot,
    LoweredGraph,
    Number,
    Pointer,
    Slot,
    Step,
    WhileStep,
    callees_of,
    computed_symbols,
    mark,
    symbols_computed_by,
)
from max._compiler.program.code import Check, WorkCode
from max._dataclass import dataclass
from max.dtype import DType
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size, simplify, substitute

__all__ = ["Flat", "flatten"]


def symbols_of(size: Size) -> tuple[str, ...]:
    """The symbols of a size."""
    return () if isinstance(size, int) else tuple(size.symbols)


@dataclass(slots=True)
class Flat:
    """All launches of a program over one list of buffers."""

    buffers: list[Buffer] = field(default_factory=list[Buffer])
    once: list[Launch] = field(default_factory=list[Launch])
    once_host_steps: list[tuple[int, HostStep]] = field(default_factory=list[tuple[int, HostStep]])
    """The host steps among the launches of `once`: copies between devices, each with the number of launches that run
    before.
    """
    launches: list[Launch] = field(default_factory=list[Launch])
    checks: list[Check] = field(default_factory=list[Check])
    host_steps: list[tuple[int, HostStep]] = field(default_factory=list[tuple[int, HostStep]])
    """The host steps of an execution, each with the number of launches that run before it."""
    outputs: list[int] = field(default_factory=list[int])
    """The buffer of each output."""
    labels: list[int] = field(default_factory=list[int])
    """The position of the launch after each label."""
    loops: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The position of the first launch of each loop, and of the one after its last."""


CUT = HostStep("cut", (), (), DType.bool)
"""Ends a segment; the host does nothing there."""

CheckKernel = Callable[[int, bool], str]
"""The key of the kernel of a device that raises if two numbers differ (True), or if the first is less (False)."""


class _Flattener:
    """Instantiates lowered graphs in the order in which they run, over one list of buffers."""

    def __init__(
        self,
        lowered_graphs: Mapping[str, LoweredGraph],
        check_kernel: CheckKernel,
        runs_jumps: Sequence[bool],
    ) -> None:
        self.lowered_graphs = lowered_graphs
        self.runs_jumps = runs_jumps
        self.device = HOST
        """The device that carries out the current branch or loop, and its checks."""
        self.check_kernel = check_kernel
        self.flat = Flat()
        self.weights: dict[str, int] = {}
        self.constants: dict[object, int] = {}
        self.used_names: set[str] = set()

    def instantiate(
        self,
        callee: LoweredGraph,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
        names: Mapping[str, Size] | None = None,
        conditional: bool = False,
    ) -> Mapping[str, Size]:
        """Adds the launches of a lowered graph.

        Args:
            callee: The callee.
            places: The program's memory for its inputs and outputs; its other buffers are added.
            env: The values of its symbols.
            prefix: The prefix of the names of its weights and launches.
            names: The caller's symbols for sizes that the callee computes.
            conditional: Whether the call is in a branch or a loop. Checks are then launches, which do not run if the
                branch is not taken.

        Returns:
            The values of its symbols, including those that it computes.
        """
        # each call of a graph computes sizes of its own: equal names of two calls would be one symbol
        env = {**env, **self.names_of_computed_sizes(callee, names or {})}
        for index, buffer in enumerate(callee.buffers):
            # buffers that callers pass are theirs; the others are new for each call
            if index not in places:
                places[index] = Pointer(self.add(buffer, env, prefix))
        for step in callee.once:
            if isinstance(step, Launch):
                self.add_once(self.bind_launch(step, places, env, prefix))
            else:
                position = len(self.flat.once)
                self.flat.once_host_steps.append((position, self.bind_host_step(step, places, env)))
        checks = self.bind_checks(callee.checks, env, prefix)
        # checks of sizes that the callee computes wait for the step that does
        unknown = {str(env[symbol]) for symbol in computed_symbols(callee) if conditional}
        if conditional:
            checks = self.check_launches(checks, unknown)
        else:
            self.flat.checks += checks
        for step in callee.steps:
            if isinstance(step, Launch):
                self.add_launch(self.bind_launch(step, places, env, prefix))
            elif isinstance(step, HostStep):
                self.host_step(step, places, env)
            elif isinstance(step, IfStep):
                self.branch(step, places, env, prefix)
            elif isinstance(step, WhileStep):
                self.loop(step, places, env, prefix)
            else:
                self.call(step, places, env, prefix, conditional)
            if unknown:
                unknown -= {str(env[symbol]) for symbol in symbols_computed_by(step)}
                checks = self.check_launches(checks, unknown)
        return env

    @staticmethod
    def bind_checks(checks: Iterable[Check], env: Mapping[str, Size], prefix: str) -> list[Check]:
        """Checks over the program's symbols, except those that always hold."""
        bound = [
            replace(
                check,
                actual=substitute(check.actual, env),
                required=substitute(check.required, env),
                message=f"{prefix}{check.message}",
            )
            for check in checks
        ]
        # with the caller's sizes a condition may have become a fact
        return [check for check in bound if not check.condition.always_holds]

    def check_launches(self, checks: Iterable[Check], unknown: set[str]) -> list[Check]:
        """Adds launches for the checks whose sizes are known; returns the other checks."""
        waiting: list[Check] = []
        for check in checks:
            if unknown.intersection((*symbols_of(check.actual), *symbols_of(check.required))):
                waiting.append(check)
                continue
            # both sides are computed by the host as any size is; the kernel only compares two numbers
            slots = (Number(check.actual), Number(check.required))
            kernel = self.check_kernel(self.device, check.exact)
            op = check.message.partition(":")[0]
            launch = Launch(
                kernel, slots, (), (), False, op, staged_op=check.staged_op, check=check,
                device=self.device, work=WorkCode("other", 0),
            )  # fmt: skip
            self.add_launch(launch)
        return waiting

    def add(self, buffer: Buffer, env: Mapping[str, Size], prefix: str) -> int:
        """The program's buffer for one of a lowered graph. Weights of one name, and equal constants, share a buffer."""
        if buffer.kind == "weight":
            name = prefix + buffer.name
            if name not in self.weights:
                self.weights[name] = self.append(replace(buffer, name=name))
            return self.weights[name]
        if buffer.kind == "constant":
            # constants without a name are equal if their bytes are
            key: object = buffer.name or (buffer.array.tobytes(), buffer.array.dtype.str)
            if key not in self.constants:
                self.constants[key] = self.append(buffer)
            return self.constants[key]
        return self.append(replace(buffer, bytes=substitute(buffer.bytes, env)))

    def append(self, buffer: Buffer) -> int:
        self.flat.buffers.append(buffer)
        return len(self.flat.buffers) - 1

    def branch(
        self, step: IfStep, places: dict[int, Pointer], env: Mapping[str, Size], prefix: str
    ) -> None:
        """Adds a branch: jumps around one of the two calls."""
        predicate = self.pointer(step.predicate, places, env)
        device = self.device_of(step, predicate)
        host = device is None
        around, self.device = self.device, HOST if device is None else device
        other, end = self.label(), self.label()
        if host:
            # allocates the results before the branch, so that both paths write the same memory
            self.mark(tuple([places[result].buffer for result in step.then.results]))
        self.jump("if_zero", other, device, predicate)
        self.call(step.then, places, env, prefix, conditional=True)
        # the branch that is not taken stands behind the one that is, so both need a way around
        self.jump("always", end, device)
        self.place_label(other, host)
        self.call(step.otherwise, places, env, prefix, conditional=True)
        self.place_label(end, host)
        self.device = around

    def loop(
        self,
        step: WhileStep,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
    ) -> None:
        """Adds a loop: the condition, the exit, the body, the jump back."""
        predicate = self.pointer(step.predicate, places, env)
        device = self.device_of(step, predicate)
        host = device is None
        around, self.device = self.device, HOST if device is None else device
        head, end = self.label(), self.label()
        self.place_label(head, host)
        self.call(step.condition, places, env, prefix, conditional=True)
        self.jump("if_zero", end, device, predicate)
        self.call(step.body, places, env, prefix, conditional=True)
        # the body wrote the next values beside the carried ones, which its own launches still read
        for launch in step.update:
            self.add_launch(self.bind_launch(launch, places, env, prefix))
        self.jump("back", head, device)
        self.place_label(end, host)
        self.device = around
        self.flat.loops.append((self.flat.labels[head], self.flat.labels[end]))

    def device_of(self, step: IfStep | WhileStep, predicate: Pointer) -> int | None:
        """The device that carries out a branch or a loop; None: the host does, and the program is cut there.

        A device does if it runs jumps, has the predicate in its memory, and runs all launches. The host also reads
        sizes, prints, and copies between devices.
        """
        device = self.flat.buffers[predicate.buffer].device
        is_alone = self.devices_inside(step) <= {device}
        return device if is_alone and self.runs_jumps[device] else None

    def devices_inside(self, step: Step) -> set[int | None]:
        """The devices of what a step runs; None for the host between launches."""
        if isinstance(step, HostStep):
            return {None}
        if isinstance(step, Launch):
            return {step.device}
        devices: set[int | None] = set()
        if isinstance(step, WhileStep):
            devices.update(launch.device for launch in step.update)
        for callee in callees_of(step):
            lowered = self.lowered_graphs[callee]
            for inner in lowered.steps:
                devices |= self.devices_inside(inner)
                if isinstance(inner, IfStep | WhileStep):
                    devices.add(lowered.buffers[inner.predicate.buffer].device)
        return devices

    def label(self) -> int:
        self.flat.labels.append(-1)
        return len(self.flat.labels) - 1

    def place_label(self, label: int, host: bool) -> None:
        """Places a label; the program is cut before it if the host continues there."""
        if host:
            self.end_segment()
        self.flat.labels[label] = len(self.flat.launches)
        if host:
            # separates the label's position from that of a host step right after it
            self.mark(())

    def add_launch(self, launch: Launch) -> None:
        """Adds a launch; a program is cut where the device changes."""
        launches = self.flat.launches
        # a segment is one device's: its executor gets the launches as one list
        if launches and launches[-1].device != launch.device:
            self.end_segment()
        launches.append(launch)

    def add_once(self, launch: Launch) -> None:
        """Adds a launch of the program that runs at load."""
        launches = self.flat.once
        if launches and launches[-1].device != launch.device:
            self.flat.once_host_steps.append((len(launches), CUT))
        launches.append(launch)

    def end_segment(self) -> None:
        self.flat.host_steps.append((len(self.flat.launches), CUT))

    def mark(self, writes: Sequence[int]) -> None:
        """Adds empty launches, one per device; the buffers that they write have memory from here on."""
        devices = sorted({self.flat.buffers[buffer].device for buffer in writes}) or [HOST]
        for device in devices:
            buffers_of_device = [
                buffer for buffer in writes if self.flat.buffers[buffer].device == device
            ]
            self.add_launch(mark(buffers_of_device, device))

    def jump(
        self, kind: str, label: int, device: int | None, predicate: Pointer | None = None
    ) -> None:
        """Adds a jump to a label: a launch of a device, or a host step. A predicate makes it conditional."""
        slots = () if predicate is None else (predicate,)
        if device is None:
            rule = "if_zero" if slots else "jump"
            jump = HostStep(rule, (), slots, DType.bool, target=label)
            self.flat.host_steps.append((len(self.flat.launches), jump))
            if kind == "back":
                # the last launch of the loop: its buffers keep their memory up to here
                self.mark(())
            return
        reads = tuple([pointer.buffer for pointer in slots])
        jump = Jump(kind, label)
        self.add_launch(Launch("", slots, reads, (), False, kind, jump=jump, device=device))

    def call(
        self,
        step: CallStep,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
        conditional: bool,
    ) -> None:
        """Adds a call; see `instantiate`."""
        callee = self.lowered_graphs[step.callee]
        bound = {name: substitute(size, env) for name, size in step.env}
        # a branch is staged inside its caller, so its types may have the caller's symbols
        if step.inherit:
            bound = {**env, **bound}
        inner: dict[int, Pointer] = {}
        for (index, _), pointer in zip(callee.inputs, step.operands, strict=True):
            inner[index] = self.pointer(pointer, places, env)
        for (index, _), result in zip(callee.outputs, step.results, strict=True):
            # an output that is also an input has the input's place already
            if index not in inner:
                inner[index] = places[result]
        names = {symbol: env[symbol] for symbol in step.reveals}
        computed = self.instantiate(callee, inner, bound, prefix + step.prefix, names, conditional)
        outputs = {s for _, info in callee.outputs for dim in info.shape for s in symbols_of(dim)}
        # a symbol that the caller knows already, such as from another call: both must agree
        agreement = [
            Check(
                computed[symbol],
                env[symbol],
                f"call: two calls of {step.callee} differ in {symbol}",
            )
            for symbol in sorted(outputs.intersection(computed_symbols(callee)) - set(step.reveals))
        ]
        if conditional:
            self.check_launches(agreement, set())
        else:
            self.flat.checks += agreement

    def names_of_computed_sizes(
        self, lowered_graph: LoweredGraph, names: Mapping[str, Size]
    ) -> dict[str, Size]:
        """Unique names for the symbols that a lowered graph computes: each call computes its own sizes."""
        named: dict[str, Size] = dict(names)
        for symbol in computed_symbols(lowered_graph):
            if symbol not in names:
                name, number = symbol, 0
                while name in self.used_names:
                    number += 1
                    name = f"{symbol}_{number}"
                self.used_names.add(name)
                named[symbol] = DimExpr.symbol(name)
        return named

    def host_step(
        self, step: HostStep, places: Mapping[int, Pointer], env: Mapping[str, Size]
    ) -> None:
        """Adds a host step."""
        self.flat.host_steps.append(
            (len(self.flat.launches), self.bind_host_step(step, places, env))
        )

    def bind_host_step(
        self, step: HostStep, places: Mapping[int, Pointer], env: Mapping[str, Size]
    ) -> HostStep:
        """A host step over the program's buffers and symbols."""
        symbols = tuple([str(env[symbol]) if symbol else "" for symbol in step.symbols])
        bounds = tuple([self.pointer(pointer, places, env) for pointer in step.bounds])
        shape = tuple([substitute(size, env) for size in step.shape])
        return replace(step, symbols=symbols, bounds=bounds, shape=shape)

    @staticmethod
    def pointer(
        pointer: Pointer, places: Mapping[int, Pointer], env: Mapping[str, Size]
    ) -> Pointer:
        """A lowered graph's pointer as a pointer into the caller's buffers, with the caller's sizes in its offset."""
        base = places[pointer.buffer]
        if pointer.offset == 0:
            return base
        return Pointer(base.buffer, simplify(base.offset + substitute(pointer.offset, env)))

    def bind_launch(
        self, launch: Launch, places: Mapping[int, Pointer], env: Mapping[str, Size], prefix: str
    ) -> Launch:
        """A copy of a lowered graph's launch on the caller's buffers, with the caller's sizes."""
        slots: list[Slot] = []
        for slot in launch.slots:
            if type(slot) is Pointer:
                slots.append(self.pointer(slot, places, env))
            elif isinstance(slot, LimitSlot):
                slots.append(replace(slot, rows=substitute(slot.rows, env)))
            else:
                assert isinstance(slot, Number)
                slots.append(
                    slot if type(slot.value) is int else Number(substitute(slot.value, env))
                )
        work = launch.work
        if work is not None and not isinstance(work.amount, int):
            work = WorkCode(work.kind, substitute(work.amount, env))
        geometry = launch.geometry
        if geometry is not None:
            grid = tuple([substitute(size, env) for size in geometry.grid])
            geometry = replace(geometry, grid=grid)
        return Launch(
            launch.kernel,
            tuple(slots),
            tuple([places[b].buffer for b in launch.reads]),
            tuple([places[b].buffer for b in launch.writes]),
            launch.serial,
            prefix + launch.name,
            tuple(
                (places[w].buffer, places[r].buffer)
                for w, r in launch.in_place
                # memory is shared by whole buffers
                if places[w].offset == 0 and places[r].offset == 0
            ),
            tuple([places[b].buffer for b in launch.parts]),
            flops=substitute(launch.flops, env),
            staged_op=launch.staged_op,
            jump=launch.jump,
            device=launch.device,
            work=work,
            geometry=geometry,
        )


def flatten(
    lowered_graphs: Mapping[str, LoweredGraph],
    entry: str,
    check_kernel: CheckKernel,
    runs_jumps: Sequence[bool],
) -> Flat:
    """Inlines all calls into the program of the entry graph.

    Args:
        lowered_graphs: All graphs by name.
        entry: The name of the entry graph.
        check_kernel: Creates the kernel of checks in branches and loops, at the first of them.
        runs_jumps: For each device, whether it carries out branches and loops.
    """
    flattener = _Flattener(lowered_graphs, check_kernel, runs_jumps)
    lowered = lowered_graphs[entry]
    sizes = [dim for _, info in lowered.inputs for dim in info.shape]
    # computed sizes must not take the names of the inputs' symbols
    flattener.used_names = {
        name for dim in sizes if not isinstance(dim, int) for name in dim.symbols
    }
    places: dict[int, Pointer] = {}
    flattener.instantiate(lowered, places, {}, "")
    flat = flattener.flat
    for position, (index, _) in enumerate(lowered.inputs):
        # the caller's tensors are bound by their positions
        flat.buffers[places[index].buffer].name = str(position)
    for index, _ in lowered.outputs:
        buffer = places[index].buffer
        if flat.buffers[buffer].kind == "temp":
            # only what the program itself writes gets new memory as an output
            flat.buffers[buffer].kind = "output"
        flat.outputs.append(buffer)
    return flat
