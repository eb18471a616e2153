"""Custom ops on eager tensors: one without side effects is recorded as other ops are; one that writes runs at once."""

# cells are shared by the modules of this package
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from max import driver
from max._host.process_caches import process_cache
from max._host.reentry import LockLevel, hold_lock, reentrant_lock
from max._lazy import lazy_module
from max.driver import Device
from max.engine import Model
from max.experimental.programs.argument_trees import ArgumentTree, describe
from max.experimental.programs.lazy_values import Cell
from max.experimental.programs.number_patterns import Details, Pattern
from max.experimental.programs.programs import relocate
from max.experimental.programs.sessions import session_of
from max.experimental.programs.signatures import EXAMPLES
from max.experimental.programs.staging import with_dims
from max.experimental.programs.value_types import CellType, type_of
from max.experimental.record import recorder
from max.experimental.record.dispatch import apply, in_graph
from max.experimental.tensor import Tensor
from max.graph import BufferType, DeviceRef, Graph, TensorType, TensorValue, Value, ops
from max.graph.staging.user_lines import user_place
from max.mlir import walk
from max.mlir.conditions import Condition, first_unmet

if TYPE_CHECKING:
    from max.kernel.frontend import specialize
    from max.kernel.language import extensions, registry
else:
    # slow to import, and needed for custom ops only
    specialize = lazy_module("max.kernel.frontend.specialize")
    extensions = lazy_module("max.kernel.language.extensions")
    registry = lazy_module("max.kernel.language.registry")

__all__ = ["custom", "inplace_custom"]

_STRUCTURES = 256
"""The maximum number of structures of calls that write; the oldest are dropped."""
_PROGRAMS = 8
"""The maximum number of programs of a structure, for different sizes."""
_FAILURES = 2
"""The number of failures to compile a structure with symbols after which it is always specialized."""
_PLACE = "eager"
"""The file in source locations of a program, which is shared by calls at many lines."""

Extensions = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None


def custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Any],
    out_types: Sequence[Any],
    parameters: Mapping[str, Any] | None = None,
    custom_extensions: Extensions = None,
) -> list[Tensor]:
    """Calls a custom op without side effects; in a graph that is being built, stages it.

    Args:
        name: The registered name of the kernel.
        device: The device that executes the op.
        values: The operands: tensors, numbers and arrays.
        out_types: The types of the results.
        parameters: Compile-time parameters of the kernel.
        custom_extensions: Files with kernels, or folders of them, to load before.

    Returns:
        One tensor per type in `out_types`.

    Raises:
        FileNotFoundError: A path of `custom_extensions` does not exist.
        NameError: No kernel has the name. In a graph this is raised when the graph is loaded.
        TypeError: The call does not match the kernel's signature, or the kernel writes to an operand.
    """
    extensions.load_extensions(custom_extensions)
    if in_graph():
        operands = [_graph_operand(value) for value in values]
        return apply(ops.custom, (name, device, operands, list(out_types), parameters), {})
    kernel = registry.kernel_of_op(name)
    constants = _Parameters(parameters)
    args = (kernel, name, device, list(values), _types_without_sizes(out_types), constants)
    return apply(_custom, args, {})


def _custom(
    kernel: object,
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Any],
    out_types: Sequence[Any],
    parameters: _Parameters,
) -> list[Value[Any]]:
    """Stages `max.graph.ops.custom`; `kernel` distinguishes calls of a name that was registered again."""
    return ops.custom(name, device, values, _types(out_types), parameters.values)


def inplace_custom(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Any],
    out_types: Sequence[Any] | None = None,
    parameters: Mapping[str, Any] | None = None,
    custom_extensions: Extensions = None,
) -> list[Tensor]:
    """Calls a custom op that writes to operands, at once; in a graph that is being built, stages it.

    The kernel's signature says which operands are written (``k.InOut``): these are tensors, whose memory is written
    where it is. What was recorded before is computed first, with the elements before the write. An operand that is only
    read and shares memory with a written one is read as it was before the call.

    Args:
        name: The registered name of the kernel.
        device: The device that executes the op.
        values: The operands: tensors, and numbers and arrays where the kernel only reads.
        out_types: The types of the results; none by default.
        parameters: Compile-time parameters of the kernel.
        custom_extensions: Files with kernels, or folders of them, to load before.

    Returns:
        One tensor per type in `out_types`.

    Raises:
        FileNotFoundError: A path of `custom_extensions` does not exist.
        NameError: No kernel has the name. In a graph this is raised when the graph is loaded.
        TypeError: The call does not match the kernel's signature; the kernel writes to no operand, or to one that is no
            tensor.
        ValueError: The memory of a written operand is read-only, or two written operands share memory.
    """
    extensions.load_extensions(custom_extensions)
    if in_graph():
        operands = [_graph_operand(value) for value in values]
        types = None if out_types is None else list(out_types)
        return apply(ops.inplace_custom, (name, device, operands, types, parameters), {})
    kernel = registry.kernel_of_op(name)
    # the results come first in the kernel's signature
    roles = specialize.tensor_roles(kernel)[len(out_types or ()) :]
    written: list[Cell] = []
    for index, (value, role) in enumerate(zip(values, roles, strict=False)):
        if role != "inout":
            continue
        if not isinstance(value, Tensor) or value._cell is None:
            raise TypeError(
                f"inplace_custom {name}: operand {index} is {value!r}, but the kernel writes to it; expected a Tensor"
            )
        written.append(value._cell)
    call = _Call(
        kernel,
        (
            name,
            device,
            list(values),
            _types_without_sizes(out_types or ()),
            _Parameters(parameters),
        ),
        [role == "inout" for role in roles],
    )
    # a signal handler must not record readers between the first line of it and the last
    storages = recorder.use_recorder(_run, call, written)
    return [Tensor._of_cell(Cell(type_of(storage), storage)) for storage in storages]


def _run(call: _Call, written_cells: Sequence[Cell]) -> list[driver.Tensor]:
    """Runs a call that writes to cells."""
    recorder.compute(call.cells)
    # readers that were recorded before must see the elements before
    recorder.compute_all()
    model = _model(call)
    try:
        results = model.execute(*[cell.storage for cell in call.cells])
    except Exception as error:
        place = user_place()
        relocate(error, lambda _: place)
        raise
    finally:
        # after an error too: the kernel may have written some elements
        for cell in written_cells:
            cell.drop_copies()
    return cast("list[driver.Tensor]", results)


class _Parameters:
    """Compile-time parameters: constants of a call, compared by type and value, while its other numbers may vary."""

    __slots__ = ("_key", "values")

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        self.values = dict(parameters or {})
        self._key = tuple(
            [
                # == does not find the sign of zero
                (name, type(value), value.hex() if isinstance(value, float) else value)
                for name, value in self.values.items()
            ]
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parameters) and self._key == other._key


def _graph_operand(value: Any) -> Any:
    """The graph value of a tensor; other operands unchanged."""
    if not isinstance(value, Tensor):
        return value
    return TensorValue(value) if value._value is None else value._value


def _types_without_sizes(types: Sequence[Any]) -> list[Any]:
    """Types with their sizes as separate numbers, so that calls that differ only in sizes have equal argument trees."""
    return [
        (type_.dtype, type_.device, list(type_.shape)) if isinstance(type_, TensorType) else type_
        for type_ in types
    ]


def _types(descriptions: Sequence[Any]) -> list[Any]:
    return [
        TensorType(type_[0], type_[2], type_[1]) if isinstance(type_, tuple) else type_
        for type_ in cast("Sequence[Any]", descriptions)
    ]


def _inplace(
    name: str,
    device: Device | DeviceRef,
    values: Sequence[Any],
    out_types: Sequence[Any],
    parameters: _Parameters,
) -> list[Value[Any]]:
    return ops.inplace_custom(name, device, values, _types(out_types), parameters.values)


class _Call:
    """A call of an op that writes.

    Args:
        kernel: Its kernel.
        args: The arguments of `_inplace`.
        is_written: Whether the kernel writes to each operand; further operands are read.

    Attributes:
        cells: The tensors among the operands.
    """

    def __init__(self, kernel: object, args: tuple[Any, ...], is_written: Sequence[bool]) -> None:
        self.cells: list[Cell] = []
        self.numbers: list[int | float] = []
        described = tuple([describe(arg, self.cells, self.numbers) for arg in args])
        self.arguments = ArgumentTree(_inplace, described, ())
        self.name: str = args[0]
        self.device = DeviceRef.from_device(args[1])
        tensors = [getattr(value, "_cell", None) is not None for value in args[2]]
        flags = [*is_written, *[False] * len(tensors)]
        self.written = [flag for flag, is_tensor in zip(flags, tensors, strict=False) if is_tensor]
        self.key = (
            kernel, self.arguments, tuple([cell.type.kind for cell in self.cells]),
            tuple([type(number) for number in self.numbers]),
        )  # fmt: skip

    @property
    def details(self) -> Details:
        """The sizes of the tensors, and the numbers among the arguments."""
        types: list[CellType] = [cell.type for cell in self.cells]
        return (*[size for type_ in types for size in type_.shape], *self.numbers)

    def graph(self, pattern: Pattern) -> Graph:
        """The graph of the call for the details of a pattern.

        Raises:
            ValueError, TypeError: What the op raises for operands that do not fit.
        """
        positions = with_dims(pattern)
        types: list[Any] = []
        for cell, written in zip(self.cells, self.written, strict=True):
            dtype, rank, device = cell.type.kind
            shape, positions = positions[:rank], positions[rank:]
            types.append((BufferType if written else TensorType)(dtype, shape, device))
        graph = Graph(self.name or "inplace_custom", input_types=types)
        with graph, graph.at_place(_PLACE, 0):
            graph.output(*self.arguments.call(graph.inputs, positions))
        return graph

    def load(self, graph: Graph) -> Model:
        """The compiled graph."""
        devices = {cell.type.device for cell in self.cells} | {self.device}
        return session_of([device.to_device() for device in devices]).load(graph)


class _Program(NamedTuple):
    """A compiled call."""

    pattern: Pattern
    conditions: list[Condition]
    """The conditions on its symbols."""
    model: Model

    def fits(self, details: Details) -> bool:
        """Whether it computes calls with these details."""
        values = self.pattern.match(details)
        if values is None:
            return False
        sizes = {f"s{i}": value for i, value in enumerate(values) if isinstance(value, int)}
        return first_unmet(self.conditions, sizes) is None


class _Structure:
    """The programs of calls that differ only in sizes and numbers."""

    __slots__ = ("examples", "failures", "programs")

    def __init__(self) -> None:
        self.examples: list[Details] = []
        self.programs: list[_Program] = []
        self.failures = 0


_structures: dict[tuple[Any, ...], _Structure] = process_cache({})
_lock = reentrant_lock(LockLevel.CUSTOM_OPS)


@hold_lock(_lock)
def _model(call: _Call) -> Model:
    """The program of a call, compiled if none is kept: with symbols from the third set of sizes on."""
    details = call.details
    structure = _structures.get(call.key)
    if structure is None:
        structure = _Structure()
    for program in structure.programs:
        if program.fits(details):
            return program.model
    program = None
    structure.examples = [*structure.examples[-EXAMPLES:], details]
    if len(structure.examples) > EXAMPLES and structure.failures < _FAILURES:
        try:
            program = _compile_call(call, Pattern.covering(structure.examples))
        except (ValueError, TypeError, IndexError):
            # the op cannot be staged with these symbols
            structure.failures += 1
    # the symbols may have conditions that these sizes do not meet
    if program is None or not program.fits(details):
        program = _compile_call(call, Pattern(details))
    structure.programs = [program, *structure.programs[: _PROGRAMS - 1]]
    if call.key not in _structures and len(_structures) >= _STRUCTURES:
        _structures.pop(next(iter(_structures)))
    _structures[call.key] = structure
    return program.model


def _compile_call(call: _Call, pattern: Pattern) -> _Program:
    graph = call.graph(pattern)
    conditions = [c for op in walk(graph.mlir_op) for c in op.conditions() if not c.always_holds]
    return _Program(pattern, conditions, call.load(graph))
