"""The kernels of one compilation. Launches with equal code share one kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.backend import Backend, Backends
from max._backends.regions import ArgView, RegionKernel
from max._compiler.codegen import functions
from max._compiler.lowering.lowered_graph import BufferBound, LimitSlot, Number, Pointer, Slot
from max._compiler.lowering.specializations import specializations
from max._compiler.program.code import KernelInfo
from max._dataclass import dataclass
from max.kernel.frontend.specialize import argument_roles
from max.mlir.sizes import Size

__all__ = ["Argument", "KernelTable", "KernelTables"]

_GLOBALS = {"k": k, "fn": functions, "nan": math.nan, "inf": math.inf}

_CHECK = """
def guard(actual: k.i64, required: k.i64, ctx: k.Context):
    if actual {relation} required:
        raise ValueError("{{}} where {{}} is required", actual, required)
"""
"""Every worker evaluates the check and leaves the program before its next launch, so that no barrier is needed."""


@dataclass(frozen=True)
class Argument:
    """A tensor argument of a launch: its address and the kernel's view.

    Args:
        pointer: The address of its first element.
        view: Dtype, shape and strides.
        static: For each dim, whether a static size becomes part of the code.
        static_strides: The same for the strides.
    """

    pointer: Pointer
    view: ArgView
    static: tuple[bool, ...] | None = None
    static_strides: tuple[bool, ...] | None = None

    def spec(self) -> k.TensorSpec:
        """The static part of the view. A dim of 0 is dynamic: dead code may divide by it at compile time."""
        static = self.static or (True,) * len(self.view.shape)
        shape = tuple(
            dim if is_static and isinstance(dim, int) and dim else None
            for dim, is_static in zip(self.view.shape, static, strict=True)
        )
        strides = self.view.strides
        if strides is not None:
            static = self.static_strides or (True,) * len(strides)
            strides = tuple(
                stride if is_static and isinstance(stride, int) else None
                for stride, is_static in zip(strides, static, strict=True)
            )
        return k.TensorSpec(k.scalar_type(self.view.dtype), shape, strides)


class KernelTable:
    """Specializes kernels for one device, each once.

    Args:
        backend: The device.
        ahead: Whether the device starts to compile each kernel as soon as it is specialized.
    """

    def __init__(self, backend: Backend, ahead: bool = False) -> None:
        self.backend = backend
        self._ahead = ahead
        self.target = backend.target
        self.irs: dict[str, k.KernelIR] = {}
        self.infos: dict[str, KernelInfo] = {}
        self._irs_by_request: dict[Any, k.KernelIR] = {}
        self._inlines: dict[str, Any] = {}
        self._written: dict[Any, frozenset[int]] = {}

    def region(
        self, text: RegionKernel, arguments: Sequence[Argument]
    ) -> tuple[str, tuple[Slot | BufferBound, ...]]:
        """The kernel of a region, and its slots."""
        specs: list[k.TensorSpec | k.ScalarType] = [argument.spec() for argument in arguments]
        # scalars are run-time arguments: they do not determine the IR
        key = (text.source, tuple(specs))

        def make() -> tuple[Any, dict[str, Any]]:
            return k.from_source(text.source, "region", {**_GLOBALS, **text.functions}), {}

        specs += [k.i64] * len(text.scalars)
        functions_used = tuple(text.functions.items())
        request = ("region", text.source, tuple(specs), functions_used)
        ir = self._specialize(key, make, specs, request)
        return ir.key, self.slots(ir, arguments, text.scalars)

    def library(
        self,
        kernel: k.Kernel,
        arguments: Sequence[Argument | LimitSlot | Number],
        params: Mapping[str, Any],
        epilogue: str | None,
    ) -> tuple[str, tuple[Slot | BufferBound, ...]]:
        """The specialization of a library kernel, with the text of an epilogue or None, and its slots."""
        specs = [a.spec() if isinstance(a, Argument) else k.i64 for a in arguments]
        key = (
            id(kernel),
            tuple(specs),
            tuple(sorted((n, repr(v)) for n, v in params.items())),
            epilogue,
        )

        def make() -> tuple[Any, dict[str, Any]]:
            inline = {} if epilogue is None else {"epilogue": self._inline(epilogue)}
            return kernel, {**params, **inline}

        fixed = _is_fixed(kernel)
        # values and their text: functions compare by identity, and only the text tells True from 1
        request = (kernel, tuple(params.items()), key) if fixed else None
        ir = self._specialize(key, make, specs, request)
        return ir.key, self.slots(ir, arguments)

    def check(self, exact: bool) -> str:
        """The key of the kernel that raises if two numbers differ (`exact`), or if the first is less."""
        text = _CHECK.format(relation="!=" if exact else "<")

        def make() -> tuple[Any, dict[str, Any]]:
            return k.from_source(text, "guard", _GLOBALS), {}

        return self._specialize(text, make, [k.i64, k.i64], ("guard", text)).key

    def _inline(self, text: str) -> Any:
        if text not in self._inlines:
            kernel = k.from_source(text, "epilogue", _GLOBALS)
            self._inlines[text] = k.InlineFunction(kernel, kernel.source)
        return self._inlines[text]

    def _specialize(
        self,
        key: Any,
        make: Callable[[], tuple[Any, dict[str, Any]]],
        specs: list[Any],
        request: tuple[Any, ...] | None,
    ) -> k.KernelIR:
        """The IR of a key, specialized once per table; with a `request`, once per process."""
        ir = self._irs_by_request.get(key)
        if ir is None:

            def specialize() -> k.KernelIR:
                kernel, params = make()
                return k.specialize(kernel, args=specs, params=params, target=self.target)

            # a user's kernel may read globals that change: it is specialized anew in each compilation
            if request is None:
                ir = specialize()
            else:
                ir = specializations.get((*request, self.target), specialize)
            self._irs_by_request[key] = ir
            # two requests may give the same IR
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
        ir: k.KernelIR,
        arguments: Sequence[Argument | LimitSlot | Number],
        scalars: Sequence[Size] = (),
    ) -> tuple[Slot | BufferBound, ...]:
        """The values of a kernel's argument slots."""
        slots: list[Slot | BufferBound] = []
        for slot in ir.slots:
            # scalars of a region come after its tensors
            if slot.arg >= len(arguments):
                slots.append(Number(scalars[slot.arg - len(arguments)]))
                continue
            argument = arguments[slot.arg]
            if not isinstance(argument, Argument):
                slots.append(argument)
                continue
            if slot.kind == "pointer":
                slots.append(argument.pointer)
            elif slot.kind in ("begin", "end"):
                slots.append(BufferBound(argument.pointer.buffer, slot.kind == "end"))
            elif slot.kind == "dim":
                slots.append(Number(argument.view.shape[slot.axis]))
            else:
                # a slot of another kind is a stride, which only strided views have
                assert argument.view.strides is not None
                slots.append(Number(argument.view.strides[slot.axis]))
        return tuple(slots)

    def writes(self, kernel: k.Kernel) -> frozenset[int]:
        """The positions of the arguments that a kernel may write."""
        if kernel not in self._written:
            self._written[kernel] = frozenset(
                i
                for i, role in enumerate(argument_roles(kernel))
                if role is not None and role != "input"
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


def _is_fixed(kernel: k.Kernel) -> bool:
    """Whether the globals of a kernel are constant: true for the kernel library, unknown for a user's kernel."""
    return kernel.source.globals.get("__name__", "").startswith("max._backends.")
