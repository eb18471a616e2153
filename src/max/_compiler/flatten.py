"""Instantiates templates: calls become the launches of what they call, on the caller's buffers, symbols and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from max._compiler.sizes import Size, simplify, substitute
from max._compiler.template import (
    Buffer,
    CallStep,
    Check,
    Discover,
    IfStep,
    Jump,
    Launch,
    Number,
    Pointer,
    Slot,
    Template,
    UnsupportedOpError,
    WhileStep,
)
from max.mlir.dims import DimExpr

__all__ = ["Flat", "flatten"]


@dataclass(slots=True)
class Flat:
    """All launches of a program over one list of buffers."""

    buffers: list[Buffer] = field(default_factory=list[Buffer])
    once: list[Launch] = field(default_factory=list[Launch])
    launches: list[Launch] = field(default_factory=list[Launch])
    checks: list[Check] = field(default_factory=list[Check])
    discoveries: list[tuple[int, Discover]] = field(default_factory=list[tuple[int, Discover]])
    """What is discovered, each with the number of launches that run before."""
    outputs: list[int] = field(default_factory=list[int])
    """For each output its buffer."""
    labels: list[int] = field(default_factory=list[int])
    """For each label of a jump the position of the launch that comes there."""
    loops: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """The first launch of each loop, and the one after its last."""


class _Flattener:
    def __init__(self, templates: Mapping[str, Template]) -> None:
        self.templates = templates
        self.flat = Flat()
        self.weights: dict[str, int] = {}
        self.constants: dict[object, int] = {}
        self.taken: set[str] = set()

    def instantiate(
        self,
        template: Template,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
        path: str,
    ) -> None:
        """Adds a template's launches.

        Args:
            template: What is called.
            places: For its inputs and outputs, where they are.
            env: What its symbols stand for.
            prefix: What is put before the names of its weights.
            path: The same for the names of its launches.
        """
        env = {**env, **self.names_of_discoveries(template)}
        for index, buffer in enumerate(template.buffers):
            if index not in places:
                places[index] = Pointer(self.add(buffer, env, prefix))
        self.flat.once.extend([self.bind(launch, places, env, path) for launch in template.once])
        for step in template.steps:
            if isinstance(step, Launch):
                self.flat.launches.append(self.bind(step, places, env, path))
            elif isinstance(step, Discover):
                self.discover(step, places, env)
            elif isinstance(step, IfStep):
                self.choice(step, places, env, prefix)
            elif isinstance(step, WhileStep):
                self.loop(step, places, env, prefix, path)
            else:
                self.call(step, places, env, prefix)
        for check in template.checks:
            have, want = substitute(check.have, env), substitute(check.want, env)
            if have != want:
                self.flat.checks.append(replace(check, have=have, want=want))

    def add(self, buffer: Buffer, env: Mapping[str, Size], prefix: str) -> int:
        """A buffer of the program for one of a template; weights of one name and equal constants are one buffer."""
        if buffer.kind == "weight":
            name = prefix + buffer.name
            if name not in self.weights:
                self.weights[name] = self.append(replace(buffer, name=name))
            return self.weights[name]
        if buffer.kind == "constant":
            key: object = buffer.name or (buffer.array.tobytes(), buffer.array.dtype.str)
            if key not in self.constants:
                self.constants[key] = self.append(buffer)
            return self.constants[key]
        return self.append(replace(buffer, bytes=substitute(buffer.bytes, env)))

    def append(self, buffer: Buffer) -> int:
        self.flat.buffers.append(buffer)
        return len(self.flat.buffers) - 1

    def choice(
        self, step: IfStep, places: dict[int, Pointer], env: Mapping[str, Size], prefix: str
    ) -> None:
        """Adds a choice: over the second call, or over the first."""
        discovered = len(self.flat.discoveries)
        other, end = self.label(), self.label()
        self.jump("if_zero", other, self.pointer(step.predicate, places, env))
        self.call(step.then, places, env, prefix, inherit=True)
        self.jump("always", end)
        self.place_label(other)
        self.call(step.otherwise, places, env, prefix, inherit=True)
        self.place_label(end)
        self.check_discoveries(discovered, "cond")

    def loop(
        self,
        step: WhileStep,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
        path: str,
    ) -> None:
        """Adds a loop: the condition, a way out, the body, the way back."""
        discovered = len(self.flat.discoveries)
        head, end = self.label(), self.label()
        self.place_label(head)
        self.call(step.condition, places, env, prefix, inherit=True)
        self.jump("if_zero", end, self.pointer(step.predicate, places, env))
        self.call(step.body, places, env, prefix, inherit=True)
        self.flat.launches.extend([self.bind(launch, places, env, path) for launch in step.update])
        self.jump("back", head)
        self.place_label(end)
        self.flat.loops.append((self.flat.labels[head], self.flat.labels[end]))
        self.check_discoveries(discovered, "while_loop")

    def label(self) -> int:
        self.flat.labels.append(-1)
        return len(self.flat.labels) - 1

    def place_label(self, label: int) -> None:
        self.flat.labels[label] = len(self.flat.launches)

    def jump(self, kind: str, label: int, predicate: Pointer | None = None) -> None:
        slots = () if predicate is None else (predicate,)
        reads = tuple([pointer.buffer for pointer in slots])
        self.flat.launches.append(Launch("", slots, reads, (), False, kind, jump=Jump(kind, label)))

    def check_discoveries(self, before: int, op: str) -> None:
        """Checks that nothing inside of an op needs the host: programs are cut there."""
        for _, found in self.flat.discoveries[before:]:
            what = "prints" if found.rule == "print" else f"sizes told by mo.{found.rule}"
            raise UnsupportedOpError(
                f"{op}: {what} inside of a branch or loop are not supported: the program would have to "
                "leave it for the host"
            )

    def call(
        self,
        step: CallStep,
        places: dict[int, Pointer],
        env: Mapping[str, Size],
        prefix: str,
        inherit: bool = False,
    ) -> None:
        """Adds a call; with `inherit`, symbols that it does not bind mean what they mean here."""
        callee = self.templates[step.callee]
        bound = {name: substitute(size, env) for name, size in step.env}
        if inherit:
            bound = {**env, **bound}
        inner: dict[int, Pointer] = {}
        for (index, _), pointer in zip(callee.inputs, step.operands, strict=True):
            inner[index] = self.pointer(pointer, places, env)
        for (index, _), result in zip(callee.outputs, step.results, strict=True):
            if index not in inner:
                inner[index] = places[result]
        whole = prefix + step.prefix
        self.instantiate(callee, inner, bound, whole, whole)

    def names_of_discoveries(self, template: Template) -> dict[str, Size]:
        """The program's names for the symbols that a template discovers: each call discovers sizes of its own."""
        named: dict[str, Size] = {}
        for step in template.steps:
            if isinstance(step, Discover):
                for symbol in filter(None, step.symbols):
                    name, number = symbol, 0
                    while name in self.taken:
                        number += 1
                        name = f"{symbol}_{number}"
                    self.taken.add(name)
                    named[symbol] = DimExpr.symbol(name)
        return named

    def discover(
        self, step: Discover, places: Mapping[int, Pointer], env: Mapping[str, Size]
    ) -> None:
        """Adds a discovery."""
        symbols = tuple([str(env[symbol]) if symbol else "" for symbol in step.symbols])
        bounds = tuple([self.pointer(pointer, places, env) for pointer in step.bounds])
        shape = tuple([substitute(size, env) for size in step.shape])
        found = replace(step, symbols=symbols, bounds=bounds, shape=shape)
        self.flat.discoveries.append((len(self.flat.launches), found))

    @staticmethod
    def pointer(
        pointer: Pointer, places: Mapping[int, Pointer], env: Mapping[str, Size]
    ) -> Pointer:
        base = places[pointer.buffer]
        if pointer.offset == 0:
            return base
        return Pointer(base.buffer, simplify(base.offset + substitute(pointer.offset, env)))

    def bind(
        self, launch: Launch, places: Mapping[int, Pointer], env: Mapping[str, Size], path: str
    ) -> Launch:
        slots: list[Slot] = []
        for slot in launch.slots:
            if type(slot) is Pointer:
                slots.append(self.pointer(slot, places, env))
            else:
                assert isinstance(slot, Number)
                slots.append(
                    slot if type(slot.value) is int else Number(substitute(slot.value, env))
                )
        return Launch(
            launch.kernel,
            tuple(slots),
            tuple([places[b].buffer for b in launch.reads]),
            tuple([places[b].buffer for b in launch.writes]),
            launch.serial,
            path + launch.name,
            tuple(
                (places[w].buffer, places[r].buffer)
                for w, r in launch.in_place
                if places[w].offset == 0 and places[r].offset == 0
            ),
            tuple([places[b].buffer for b in launch.parts]),
        )


def flatten(templates: Mapping[str, Template], entry: str) -> Flat:
    """The program of the entry graph, with all calls expanded.

    Args:
        templates: All graphs by name.
        entry: The name of the entry graph.
    """
    flattener = _Flattener(templates)
    template = templates[entry]
    sizes = [dim for _, info in template.inputs for dim in info.shape]
    flattener.taken = {name for dim in sizes if not isinstance(dim, int) for name in dim.symbols}
    places: dict[int, Pointer] = {}
    flattener.instantiate(template, places, {}, "", "")
    flat = flattener.flat
    for position, (index, _) in enumerate(template.inputs):
        flat.buffers[places[index].buffer].name = str(position)
    for index, _ in template.outputs:
        buffer = places[index].buffer
        if flat.buffers[buffer].kind == "temp":
            flat.buffers[buffer].kind = "output"
        flat.outputs.append(buffer)
    return flat
