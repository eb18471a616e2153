"""The kernels of one compilation: made once for equal code, whatever uses them."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from max import kernel as k
from max._backends.backend import Backend, Backends
from max._compiler.codegen import functions
from max._compiler.codegen.nest import NestText
from max._compiler.codegen.spec import ArgView
from max._compiler.sizes import Size
from max._compiler.template import Border, Chosen, KernelInfo, Number, Pointer, Slot
from max._kernel_library.tiles.transpose import transpose

__all__ = ["Argument", "KernelTable", "KernelTables"]

_GLOBALS = {"k": k, "fn": functions, "transpose": transpose, "nan": math.nan, "inf": math.inf}

_GUARD = """
def guard(have: k.i64, want: k.i64, ctx: k.Context):
    if have {relation} want:
        raise ValueError("have {{}}, want {{}}", have, want)
"""
"""Every worker looks for itself, and leaves the program before its next launch: no barrier is needed."""


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a launch: where it is, and what the kernel is told of it.

    Args:
        pointer: The address of its first element.
        view: Dtype, shape and strides.
        static: For each dim, whether it becomes part of the code where it is known.
        static_strides: The same of the strides.
    """

    pointer: Pointer
    view: ArgView
    static: tuple[bool, ...] | None = None
    static_strides: tuple[bool, ...] | None = None

    def spec(self) -> k.TensorSpec:
        """What is known at compile time. A dim of 0 is not: code that never runs may divide by it."""
        static = self.static or (True,) * len(self.view.shape)
        shape = tuple(
            dim if known and isinstance(dim, int) and dim else None
            for dim, known in zip(self.view.shape, static, strict=True)
        )
        strides = self.view.strides
        if strides is not None:
            known = self.static_strides or (True,) * len(strides)
            strides = tuple(
                stride if here and isinstance(stride, int) else None
                for stride, here in zip(strides, known, strict=True)
            )
        return k.TensorSpec(k.scalar_type(self.view.dtype), shape, strides)


class KernelTable:
    """Specialises kernels for one device, and keeps each once.

    Args:
        backend: The device.
        ahead: Whether the device begins to compile each kernel as soon as it is specialised.
    """

    def __init__(self, backend: Backend, ahead: bool = False) -> None:
        self.backend = backend
        self._ahead = ahead
        self.target = backend.target
        self.irs: dict[str, k.KernelIR] = {}
        self.infos: dict[str, KernelInfo] = {}
        self._known: dict[Any, k.KernelIR] = {}
        self._inlines: dict[str, Any] = {}
        self._written: dict[Any, frozenset[int] | None] = {}

    def region(
        self, text: NestText, arguments: Sequence[Argument]
    ) -> tuple[str, tuple[Slot | Border, ...]]:
        """The kernel of a region, and its slots."""
        specs = [argument.spec() for argument in arguments]
        key = (text.source, tuple(specs))

        def make() -> tuple[Any, dict[str, Any]]:
            return k.from_source(text.source, "region", _GLOBALS), {}

        ir = self._specialise(key, make, [*specs, *[k.i64] * len(text.scalars)])
        return ir.key, self.slots(ir, arguments, text.scalars)

    def library(
        self,
        kernel: Any,
        arguments: Sequence[Argument | Chosen],
        params: Mapping[str, Any],
        epilogue: str | None,
    ) -> tuple[str, tuple[Slot | Border, ...]]:
        """A kernel written as a Python function, with the text of an epilogue or None."""
        specs = [k.i64 if isinstance(a, Chosen) else a.spec() for a in arguments]
        key = (
            id(kernel),
            tuple(specs),
            tuple(sorted((n, repr(v)) for n, v in params.items())),
            epilogue,
        )

        def make() -> tuple[Any, dict[str, Any]]:
            inline = {} if epilogue is None else {"epilogue": self._inline(epilogue)}
            return kernel, {**params, **inline}

        ir = self._specialise(key, make, specs)
        return ir.key, self.slots(ir, arguments)

    def guard(self, exact: bool) -> str:
        """The kernel that raises where two numbers are not equal, or where the first is less; gives its key."""
        text = _GUARD.format(relation="!=" if exact else "<")

        def make() -> tuple[Any, dict[str, Any]]:
            return k.from_source(text, "guard", _GLOBALS), {}

        return self._specialise(text, make, [k.i64, k.i64]).key

    def _inline(self, text: str) -> Any:
        if text not in self._inlines:
            made = k.from_source(text, "epilogue", _GLOBALS)
            self._inlines[text] = k.InlineFunction(made, made.source)
        return self._inlines[text]

    def _specialise(
        self, key: Any, make: Callable[[], tuple[Any, dict[str, Any]]], specs: list[Any]
    ) -> k.KernelIR:
        ir = self._known.get(key)
        if ir is None:
            kernel, params = make()
            ir = self._known[key] = k.specialize(
                kernel, args=specs, params=params, target=self.target
            )
            if ir.key not in self.irs:
                self.irs[ir.key] = ir
                self.infos[ir.key] = KernelInfo(
                    ir.key, ir.phases, ir.scratch_bytes, tuple(ir.messages)
                )
                if self._ahead:
                    self.backend.start(ir)
        return ir

    @staticmethod
    def slots(
        ir: k.KernelIR, arguments: Sequence[Argument | Chosen], scalars: Sequence[Size] = ()
    ) -> tuple[Slot | Border, ...]:
        """What goes into each slot of a kernel."""
        slots: list[Slot | Border] = []
        for slot in ir.slots:
            if slot.arg >= len(arguments):
                slots.append(Number(scalars[slot.arg - len(arguments)]))
                continue
            argument = arguments[slot.arg]
            if isinstance(argument, Chosen):
                slots.append(argument)
                continue
            if slot.kind == "pointer":
                slots.append(argument.pointer)
            elif slot.kind in ("begin", "end"):
                slots.append(Border(argument.pointer.buffer, slot.kind == "end"))
            elif slot.kind == "dim":
                slots.append(Number(argument.view.shape[slot.axis]))
            else:
                assert argument.view.strides is not None
                slots.append(Number(argument.view.strides[slot.axis]))
        return tuple(slots)

    def writes(self, kernel: Any) -> frozenset[int] | None:
        """The positions of a kernel's tensor parameters that it may write; None where all may be."""
        if kernel not in self._written:
            parameters = [
                p
                for p in inspect.signature(kernel, follow_wrapped=True).parameters.values()
                if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
            ]
            # annotations are texts where the kernel's file postpones them
            self._written[kernel] = frozenset(
                i
                for i, p in enumerate(parameters)
                if not (p.annotation is k.Input or _is_input(p.annotation))
            )
        return self._written[kernel]


class KernelTables:
    """The kernels of one compilation: a table for each device.

    Args:
        backends: The devices.
        ahead: As for `KernelTable`.
    """

    def __init__(self, backends: Backends, ahead: bool = False) -> None:
        self.backends = backends
        self._tables = [KernelTable(backend, ahead) for backend in backends]

    def __getitem__(self, device: int) -> KernelTable:
        return self._tables[device]

    def __iter__(self) -> Iterator[KernelTable]:
        return iter(self._tables)


def _is_input(annotation: Any) -> bool:
    """Whether a parameter is a tensor that is only read."""
    if isinstance(annotation, str):
        return annotation.startswith(("k.Input", "Input"))
    return getattr(annotation, "kind", None) == "input"
