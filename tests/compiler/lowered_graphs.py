"""Random lowered graphs: launches, calls, branches, loops and steps of the host, with sizes and checks.

`Machine` has stand-ins of the kernels and of the host, which record what they do.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from max._backends.kernel_call import Geometry
from max._compiler.lowering.lowered_graph import (
    Buffer,
    CallStep,
    HostStep,
    IfStep,
    Launch,
    LimitSlot,
    LoweredGraph,
    Number,
    Pointer,
    Step,
    WhileStep,
)
from max._compiler.program.code import Check, TensorInfo, WorkCode
from max.dtype import DType
from max.mlir.dims import DimExpr
from max.mlir.sizes import Size

MOST_STEPS = 4000
Memory = dict[tuple[Any, int], int]


class TooLongError(Exception):
    """A random loop does not end."""


def checksum(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def number(size: Size, env: Mapping[str, int]) -> int:
    return size if isinstance(size, int) else size.evaluate(dict(env))


def key_of(buffer: Buffer, prefix: str) -> tuple[object, ...] | None:
    """What is one buffer for all calls: weights of one full name, and equal constants."""
    if buffer.kind == "weight":
        return "weight", prefix + buffer.name
    if buffer.kind == "constant":
        array = buffer.array
        return (
            ("constant", buffer.name) if buffer.name else ("constant", array.tobytes(), array.dtype)
        )
    return None


class Machine:
    """Memory and a trace of what was done; buffers are whatever names them."""

    def __init__(self) -> None:
        self.memory: Memory = {}
        self.trace: list[Any] = []
        self.first_values: dict[Any, object] = {}

    def read(self, place: tuple[Any, int]) -> int:
        return self.memory.get(place, checksum(self.first_values.get(place[0]), place[1]))

    def add(self, *item: Any) -> None:
        self.trace.append(item)
        if len(self.trace) > MOST_STEPS:
            raise TooLongError

    def launch(
        self, launch: Launch, slots: Sequence[Any], env: Mapping[str, int], name: str, buffers: Any
    ) -> None:
        """Runs a stand-in of a kernel; a slot is a place, or a number."""
        count, written = map(int, launch.kernel[1:].split("_"))
        values = [self.read(place) for place in slots[:count]]
        numbers = [slot for slot in slots[count + written :]]
        for position, place in enumerate(slots[count : count + written]):
            self.memory[place] = checksum(values, numbers, position)
        work, geometry = launch.work, launch.geometry
        self.add(
            "launch",
            name,
            launch.kernel,
            [("buffer", *s) if isinstance(s, tuple) else s for s in slots],
            *buffers,
            launch.serial,
            number(launch.flops, env),
            launch.staged_op,
            launch.device,
            work and (work.kind, number(work.amount, env)),
            geometry and ([number(size, env) for size in geometry.grid], geometry.block),
        )

    def check(self, check: Check, env: Mapping[str, int], message: str, device: int) -> None:
        """Records a condition that is not met."""
        actual, required = number(check.actual, env), number(check.required, env)
        if check.failure(actual, required):
            self.add("check", message, actual, required, check.exact, check.staged_op, device)

    def host_step(
        self, step: HostStep, places: Sequence[tuple[Any, int]], env: Mapping[str, int]
    ) -> int:
        """Records a step of the host; returns the size that it reads."""
        shape = [number(size, env) for size in step.shape]
        self.add("host", step.rule, [("buffer", *place) for place in places], shape)
        if step.rule == "copy":
            self.memory[places[1]] = self.read(places[0])
        return 1 + checksum(self.read(places[0]), shape) % 5


def goes_on(value: int) -> bool:
    """Whether a byte that a predicate points to is not 0."""
    return value % 3 != 0


def slots_of(launch: Launch, place: Any, env: Mapping[str, int]) -> list[Any]:
    slots: list[Any] = []
    for slot in launch.slots:
        if isinstance(slot, Pointer):
            slots.append(place(slot))
        elif isinstance(slot, Number):
            slots.append(number(slot.value, env))
        else:
            slots.append(["limit", slot.name, slot.default, slot.maximum, number(slot.rows, env)])
    return slots


def computed_by(step: Step) -> list[str]:
    """The symbols whose values a step computes."""
    if isinstance(step, HostStep):
        return [symbol for symbol in step.symbols if symbol]
    return list(step.reveals) if isinstance(step, CallStep) else []


class Writer:
    """Writes random graphs: the later ones call the earlier ones."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.graphs: dict[str, LoweredGraph] = {}
        self.usual_device = self.rng.randrange(2)

    def write(self, count: int) -> str:
        """Adds graphs; returns the name of the last one."""
        for _ in range(count):
            self.graph(f"g{len(self.graphs)}")
        return list(self.graphs)[-1]

    def device(self) -> int:
        return self.usual_device if self.rng.random() < 0.9 else self.rng.randrange(2)

    def graph(self, name: str) -> None:
        rng = self.rng
        self.lowered = lowered = LoweredGraph(name)
        self.graphs[name] = lowered
        # branches and loops take the second one from the graphs around them
        self.known = [f"{name}_n", "outer"]
        self.visible: list[int] = []
        for position in range(rng.randint(1, 2)):
            index = self.buffer("input")
            shape = (DimExpr.symbol(self.known[0]),) if position == 0 else ()
            lowered.inputs.append((index, TensorInfo(DType.float32, shape, ("cpu", 0))))
        # what is one buffer for all calls has one device
        device = self.device()
        lowered.buffers.append(Buffer("weight", 4, rng.choice("vw") + str(device), device=device))
        array = np.array([rng.randrange(2), device], rng.choice([np.int32, np.float32]))
        large = rng.choice(["", "", f"large{device}"])
        lowered.buffers.append(Buffer("constant", 4, large, array, device=device))
        # what runs at load knows no inputs
        inputs = len(lowered.inputs)
        self.visible = list(range(inputs, len(lowered.buffers)))
        if rng.random() < 0.4:
            kept = self.buffer("kept")
            lowered.once.append(self.launch([kept], symbols=False))
            if rng.random() < 0.5:
                bounds = tuple(self.pointer(symbols=False) for _ in range(2))
                lowered.once.append(HostStep("copy", (), bounds, DType.bool, (4,)))
                lowered.once.append(self.launch([kept], symbols=False))
            self.visible.append(kept)
        self.visible += range(inputs)
        for _ in range(rng.randint(2, 6)):
            self.step()
        for _ in range(rng.randint(1, 3)):
            exact = rng.random() < 0.5
            sides = self.size(), self.size()
            lowered.checks.append(
                Check(*sides, f"op{rng.randrange(9)}: of {name}", exact, rng.randrange(99))
            )
        outputs = [index for index in self.visible if lowered.buffers[index].kind == "temp"]
        if not outputs:
            outputs = [self.buffer("temp")]
            lowered.steps.append(self.launch(outputs))
        # results of branches and loops have no sizes that are computed in them
        shown = self.known[2:] if rng.random() < 0.7 else []
        shape = tuple(DimExpr.symbol(symbol) for symbol in shown)
        lowered.outputs.append((outputs[-1], TensorInfo(DType.float32, shape, ("cpu", 0))))
        if rng.random() < 0.3:
            lowered.outputs.append((0, TensorInfo(DType.float32, (), ("cpu", 0))))

    def buffer(self, kind: str, device: int | None = None) -> int:
        device = self.device() if device is None else device
        size: Size = DimExpr.symbol(self.known[0]) * 4 if kind == "temp" else 4
        self.lowered.buffers.append(Buffer(kind, size, device=device))
        return len(self.lowered.buffers) - 1

    def size(self, symbols: bool = True) -> Size:
        constant = self.rng.randint(0, 3)
        if not symbols or self.rng.random() < 0.3:
            return constant
        name = self.rng.choice([*self.known, self.known[-1]])
        return DimExpr.symbol(name) * self.rng.randint(1, 2) + constant

    def pointer(self, index: int | None = None, symbols: bool = True) -> Pointer:
        index = self.rng.choice(self.visible) if index is None else index
        return Pointer(index, self.rng.choice([0, 0, self.size(symbols)]))

    def launch(self, writes: Sequence[int], symbols: bool = True, **options: Any) -> Launch:
        rng = self.rng
        reads = [self.pointer(symbols=symbols) for _ in range(rng.randint(0, 2))]
        slots: list[Any] = [*reads, *map(Pointer, writes), Number(self.size(symbols))]
        if symbols:
            slots.append(LimitSlot("limit", 3, 9, self.size()))
        pairs = tuple((w, r.buffer) for w in writes for r in reads if rng.random() < 0.5)
        geometry = Geometry((self.size(symbols), 2), (32,)) if rng.random() < 0.3 else None
        work = WorkCode("region", self.size(symbols)) if rng.random() < 0.6 else None
        return Launch(
            f"k{len(reads)}_{len(writes)}",
            tuple(slots),
            tuple(r.buffer for r in reads),
            tuple(writes),
            rng.random() < 0.5,
            f"l{rng.randrange(99)}",
            pairs,
            tuple(writes[:1]),
            flops=self.size(symbols),
            staged_op=rng.randrange(99),
            device=self.device(),
            work=work,
            geometry=geometry,
            **options,
        )

    def step(self) -> None:
        rng, steps = self.rng, self.lowered.steps
        kind = rng.random()
        callees = [name for name in self.graphs if name != self.lowered.name]
        inner = [name for name in callees if not self.graphs[name].outputs[0][1].shape]
        if kind < 0.25 or not callees or (kind > 0.7 and not inner):
            result = self.buffer("temp")
            # an input that is written lies at an offset of the caller's buffer
            steps.append(self.launch([result, 0] if rng.random() < 0.3 else [result]))
            self.visible.append(result)
        elif kind < 0.45:
            self.host_steps()
        elif kind < 0.7:
            shaped = [name for name in callees if name not in inner]
            callee = rng.choice(callees if rng.random() < 0.5 or not shaped else shaped)
            # two calls of one graph compute its sizes twice
            for _ in range(2 if callee in shaped else 1):
                steps.append(self.call(callee, self.results(callee), False))
        elif kind < 0.85:
            self.write_branch(rng.choice(inner))
        else:
            self.write_loop(rng.choice(inner), rng.choice(inner))
            if rng.random() < 0.4:
                self.host_steps()

    def host_steps(self) -> None:
        """Steps that compute sizes."""
        rng, steps = self.rng, self.lowered.steps
        for _ in range(rng.randint(1, 2)):
            symbol = f"{self.lowered.name}_s{len(self.known)}"
            steps.append(
                HostStep(
                    rng.choice(["count", "range"]),
                    (symbol, ""),
                    (self.pointer(),),
                    DType.int64,
                    (self.size(),),
                )
            )
            self.known.append(symbol)

    def results(self, callee: str) -> list[int]:
        results = [
            self.buffer("temp", self.graphs[callee].buffers[index].device)
            for index, _ in self.graphs[callee].outputs
        ]
        self.visible.append(results[0])
        return results

    def operands(self, callee: str) -> list[int]:
        """Buffers of the right devices, written before."""
        found: list[int] = []
        for index, _ in self.graphs[callee].inputs:
            device = self.graphs[callee].buffers[index].device
            fitting = [i for i in self.visible if self.lowered.buffers[i].device == device]
            if not fitting or self.rng.random() < 0.5:
                fitting = [self.buffer("temp", device)]
                self.lowered.steps.append(self.launch(fitting))
                self.visible += fitting
            found.append(self.rng.choice(fitting))
        return found

    def call(
        self,
        callee: str,
        results: Sequence[int],
        inherit: bool,
        operands: Sequence[int] | None = None,
    ) -> CallStep:
        pointers = (
            [self.pointer(index) for index in self.operands(callee)]
            if operands is None
            else [Pointer(index) for index in operands]
        )
        computed = [symbol for step in self.graphs[callee].steps for symbol in computed_by(step)]
        reveals = () if inherit else tuple(s for s in computed if s not in self.known)
        env = ((f"{callee}_n", self.size()), *([] if inherit else [("outer", self.size())]))
        self.known += reveals
        prefix = self.rng.choice(["", "a.", "b."])
        return CallStep(callee, tuple(pointers), tuple(results), env, prefix, reveals, inherit)

    def write_branch(self, callee: str) -> None:
        """A branch whose sides call one graph, with operands of their own."""
        predicate = self.pointer()
        sides = [self.operands(callee) for _ in range(2)]
        results = self.results(callee)
        then, other = (self.call(callee, results, True, side) for side in sides)
        self.lowered.steps.append(IfStep(predicate, then, other))

    def write_loop(self, condition: str, body: str) -> None:
        carried = self.operands(body)
        tests = self.operands(condition)
        if self.rng.random() < 0.7:
            tests = [index for index in tests if index in carried] or tests
            tests = (tests * 2)[: len(self.graphs[condition].inputs)]
        # what the condition reads has to change, so that the loop ends
        changing = self.buffer("temp", self.lowered.buffers[tests[0]].device)
        self.lowered.steps.append(self.launch([changing]))
        tests[0] = changing
        flags, values = self.results(condition), self.results(body)
        step = WhileStep(
            self.call(condition, flags, True, tests),
            Pointer(flags[0]),
            self.call(body, values, True, carried),
            (self.copy(values[0], carried[0]), self.copy(changing, changing)),
        )
        self.lowered.steps.append(step)

    def copy(self, source: int, target: int) -> Launch:
        slots = (Pointer(source), Pointer(target), Number(self.size()))
        return Launch(
            "k1_1",
            slots,
            (source,),
            (target,),
            False,
            "update",
            device=self.rng.choice([self.usual_device, self.device(), 1]),
        )
