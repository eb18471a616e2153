"""The definition of :class:`Model`."""

# the addresses of tensors are read directly: properties would double the time of an execution
# pyright: reportPrivateUsage=false
from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from max._compiler.program.code import Compiled
from max._host import host_memory
from max._host.interrupts import check_interrupt
from max._host.reentry import exclusively, mark_guarded, reentrant_lock, refuse_second_use
from max._lazy import lazy_module
from max.driver import CPU, Device, DLPackArray, Tensor
from max.driver._device import device_named
from max.driver._memory import ALIGNMENT
from max.dtype import DType
from max.engine._tensor_spec import TensorSpec
from max.engine.run.arena import Arena, ArenaBlock, arena_of
from max.engine.run.captures import Capture, Captures, checked_keys
from max.engine.run.input_binding import InputBinder, ModelInput
from max.engine.run.linked_program import Instance, Linked, LinkedProgram, Linker, Runner, run_at
from max.engine.run.output_memory import OutputMemory

if TYPE_CHECKING:
    from max import _html
    from max.engine.run import profile as profiles
    from max.engine.run.profile import Profile
else:
    # for profiles and notebooks
    _html = lazy_module("max._html")
    profiles = lazy_module("max.engine.run.profile")

__all__ = ["Model"]


_NOTHING = Tensor(DType.uint8, (0,))
"""A placeholder of an output that is not allocated yet."""


def _ends(tensor: Tensor) -> tuple[int, int]:
    """The first address of a contiguous tensor, and the one after its last."""
    start = tensor._ptr
    return start, start + math.prod(tensor._shape) * tensor._dtype.size_in_bytes


class Model:
    """A loaded model that you can execute.

    Do not instantiate this class directly. Instead, create it with :class:`InferenceSession`.

    A model may be used from several threads; executions on one pool of workers take turns. A signal handler, finalizer
    or trace function cannot use the model that its thread is using: it gets a ``RuntimeError``.
    """

    __module__ = "max.engine"

    def __init__(
        self,
        compiled: Compiled,
        linked: Linked | None,
        linker: Linker,
        arena: Arena,
        runner: Runner | None = None,
    ) -> None:
        self._compiled = compiled
        self._linked = linked
        self._linker = linker
        self._arena = arena
        self._runner = runner
        self._binder = InputBinder(
            compiled.name, compiled.inputs, compiled.input_names, compiled.input_symbols
        )
        self._output_forms = [(info.dtype, device_named(*info.device)) for info in compiled.outputs]
        self._output_memory = OutputMemory(self._output_forms, compiled.guarded)
        self._given_back = compiled.output_buffers
        self._captures = Captures(compiled.name)
        self._lock = reentrant_lock()
        self._in_use: set[int] = set()
        """The threads that use the model, from the binding of arguments to the end of a run."""

    # metadata ----------------------------------------------------------------------------------

    @property
    def input_metadata(self) -> list[TensorSpec]:
        """Metadata about the model's input tensors, as a list of :class:`TensorSpec` objects.

        For example, you can print the input tensor names, shapes, and dtypes::

            for tensor in model.input_metadata:
                print(f'name: {tensor.name}, shape: {tensor.shape}, dtype: {tensor.dtype}')
        """
        names = self._compiled.input_names
        return [
            TensorSpec([d if isinstance(d, int) else None for d in info.shape], info.dtype, name)
            for info, name in zip(self._compiled.inputs, names, strict=True)
        ]

    @property
    def output_metadata(self) -> list[TensorSpec]:
        """Metadata about the model's output tensors, as a list of :class:`TensorSpec` objects.

        For example, you can print the output tensor names, shapes, and dtypes::

            for tensor in model.output_metadata:
                print(f'name: {tensor.name}, shape: {tensor.shape}, dtype: {tensor.dtype}')
        """
        return [
            TensorSpec(
                [d if isinstance(d, int) else None for d in info.shape],
                info.dtype,
                f"output{index}",
            )
            for index, info in enumerate(self._compiled.outputs)
        ]

    @property
    def signature(self) -> inspect.Signature:
        """Get input signature for model."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = self._compiled.input_names
        if not all(name.isidentifier() for name in names):
            kind = inspect.Parameter.POSITIONAL_ONLY
            names = [f"input{index}" for index in range(len(names))]
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    @property
    def devices(self) -> list[Device]:
        """Returns the device objects used in the Model."""
        return list(dict.fromkeys([*self.input_devices, *self.output_devices])) or [CPU()]

    @property
    def input_devices(self) -> list[Device]:
        """Devices of the model's input tensors, as a list of Device objects."""
        return [device_named(*info.device) for info in self._compiled.inputs]

    @property
    def output_devices(self) -> list[Device]:
        """Devices of the model's output tensors, as a list of Device objects."""
        return [device_named(*info.device) for info in self._compiled.outputs]

    @property
    def kernel_summaries(self) -> list[str]:
        """Kernel fusion summaries from the compiled model.

        One string per kernel launch, in order: the prefix of the subgraph call, then the ops, joined by ``+``.
        """
        parts = (self._compiled.main, *self._compiled.later)
        return [code.name for part in parts for code in part.launches if not code.jump]

    def profile(self) -> AbstractContextManager[Profile]:
        """Measures the time of each kernel in a ``with`` block.

        The profile is complete when the block ends: ``str(profile)`` is a table, ``profile.to_dict()`` data. A reload
        in the block ends the measurement. An interpreted model has no kernels.
        """
        return profiles.recording(self._programs())

    def _programs(self) -> list[LinkedProgram]:
        linked = self._linked
        return [] if linked is None else [linked.main, *linked.later]

    def _repr_html_(self) -> str:
        inputs = ", ".join(f"{t.name}: {t.dtype.name}{t.shape}" for t in self.input_metadata)
        outputs = ", ".join(f"{t.dtype.name}{t.shape}" for t in self.output_metadata)
        kernels = self.kernel_summaries
        launches = f"{len(kernels)} launch{'es' if len(kernels) != 1 else ''}"
        return _html.details_html(f"Model({inputs}) -> ({outputs}), {launches}", "\n".join(kernels))

    def __repr__(self) -> str:
        return f"Model(inputs={self.input_metadata})"

    # execution ---------------------------------------------------------------------------------

    def __call__(self, *args: object, **kwargs: object) -> list[Tensor]:
        """Call self as a function.

        Args:
            args: The inputs in order.
            kwargs: Inputs by the names in :attr:`signature`.

        Returns:
            The outputs.

        Raises:
            TypeError: An input is missing, given twice or unknown, or as for :meth:`execute`.
            ValueError: As for :meth:`execute`.
        """
        if kwargs:
            try:
                args = self.signature.bind(*args, **kwargs).args
            except TypeError as error:
                names = ", ".join(self._compiled.input_names)
                raise TypeError(f"{self._compiled.name}: {error}; the inputs are {names}") from None
        return self.execute(*args)

    @mark_guarded
    def execute(self, *args: object) -> list[Tensor]:
        """Runs the model.

        Args:
            args: The inputs in order: tensors, NumPy arrays, other DLPack arrays, and Python numbers for rank 0. They
                are not copied if they are contiguous and share no memory with a buffer that the model writes to.

        Returns:
            The outputs, in new memory; an output that is an input buffer is the tensor that was passed.

        Raises:
            TypeError: The number of inputs, a type or a dtype is wrong.
            ValueError: A rank, a size or a device is wrong, or sizes disagree.
            KernelRunError: A kernel raised; written outputs and buffers are then undefined.
            ExecutionInterrupted: An event was set, see :func:`interrupt_on`; written memory is undefined, too. Ctrl-C
                ends an execution of the main thread with ``KeyboardInterrupt``.
            RuntimeError: A signal handler, finalizer or trace function called it in an execution of the same model.
        """
        # `exclusively`, without the time of a call
        in_use, thread = self._in_use, threading.get_ident()
        if thread in in_use:
            refuse_second_use(in_use, self._compiled.name)
        try:
            in_use.add(thread)
            tensors, symbols = self._binder.bind(args)
            linked = self._linked
            if linked is None:
                assert self._runner is not None
                return self._runner(tensors)
            if linked.later:
                return self._run_segments(linked, symbols, tensors)
            instance = linked.main.instance(symbols)
            outputs = self._new_outputs(tensors, instance)
            self._run(linked, instance, tensors, outputs)
            return outputs
        finally:
            in_use.discard(thread)

    def _exclusively(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function that uses the model.

        Raises:
            RuntimeError: This thread uses it already.
        """
        return exclusively(self._in_use, self._compiled.name, function, *args)

    def _execute_into(self, args: Sequence[ModelInput], memory: Sequence[Tensor]) -> list[Tensor]:
        """`execute`, with results in memory of the caller where they fit.

        Args:
            args: The inputs.
            memory: A tensor for each output. It is written where it has the dtype, shape and alignment of the output,
                and shares no memory with an input or another output; its elements are undefined if the run raises.

        Returns:
            The outputs: the tensors of `memory` that were written, and new tensors for the others.
        """
        linked = self._linked
        if linked is None or linked.later or len(memory) != len(self._output_forms):
            return self.execute(*args)
        return self._exclusively(self._run_into, linked, args, memory)

    def _run_into(
        self, linked: Linked, args: Sequence[ModelInput], memory: Sequence[Tensor]
    ) -> list[Tensor]:
        tensors, symbols = self._binder.bind(args)
        instance = linked.main.instance(symbols)
        # memory in use: the inputs, and outputs as they are placed
        spans = [_ends(tensor) for tensor in tensors]
        outputs: list[Tensor] = []
        for index, (shape, reused) in enumerate(zip(instance.output_shapes, memory, strict=True)):
            dtype, device = self._output_forms[index]
            start, stop = _ends(reused)
            if self._given_back[index] >= 0:
                outputs.append(tensors[self._given_back[index]])
            elif (
                reused._shape == shape
                and reused._dtype is dtype
                and reused._device is device
                and reused._strides is None
                and not reused._read_only
                and not start % ALIGNMENT
                and not any([first < stop and start < last for first, last in spans])
            ):
                outputs.append(reused)
                spans.append((start, stop))
            else:
                outputs.append(self._output_memory.tensor(index, shape))
        self._run(linked, instance, tensors, outputs)
        return outputs

    def _new_outputs(self, inputs: list[Tensor], instance: Instance) -> list[Tensor]:
        memory, given_back = self._output_memory, self._given_back
        return [
            memory.tensor(index, shape) if given_back[index] < 0 else inputs[given_back[index]]
            for index, shape in enumerate(instance.output_shapes)
        ]

    def _run(
        self, linked: Linked, instance: Instance, inputs: list[Tensor], outputs: list[Tensor]
    ) -> None:
        """Runs a program of one segment."""
        pointers = [tensor._ptr for tensor in inputs]
        run_at(self._arena, linked, instance, pointers, [tensor._ptr for tensor in outputs])

    def _run_segments(
        self, linked: Linked, symbols: tuple[int, ...], inputs: list[Tensor]
    ) -> list[Tensor]:
        """Runs a program whose later parts depend on sizes that earlier ones compute."""
        # an input buffer that is an output; placeholders for those that their segments allocate
        outputs: list[Tensor] = [
            inputs[max(source, 0)] if inputs else _NOTHING for source in self._given_back
        ]
        layout = self._compiled.bases
        parts = (linked.main, *linked.later)
        bases = np.zeros(layout.count(len(parts)), np.int64)
        bases[layout.inputs] = [tensor._ptr for tensor in inputs]
        # separate arenas: other executions may run between the segments
        arenas: dict[int, tuple[Arena, ArenaBlock]] = {}
        sizes = dict(zip(self._compiled.symbols, symbols, strict=False))
        segment = 0
        while segment < len(parts):
            check_interrupt()
            part = parts[segment]
            # sizes that the host has not read yet are 0
            instance = part.instance(tuple([sizes.get(name, 0) for name in self._compiled.symbols]))
            arena = arena_of(part.backend)
            arenas[segment] = arena, arena.separate(instance.arena_bytes, instance.holes)
            bases[layout.arena(segment)] = arenas[segment][1].address
            for index, shape in zip(part.code.outputs, instance.output_shapes, strict=True):
                # a segment may run again: its outputs have memory then
                if self._given_back[index] < 0 and not bases[layout.output(index)]:
                    outputs[index] = self._output_memory.tensor(index, shape)
                    bases[layout.output(index)] = outputs[index]._ptr
            if not part.empty:
                part.run(instance, bases.tobytes())
            following = part.run_host_steps(instance, bases, sizes)
            segment = segment + 1 if following < 0 else following
        for backend in {part.backend for part in parts if part.waits}:
            backend.synchronize()
        for arena, block in arenas.values():
            arena.give_back(block)
        return outputs

    # weights -----------------------------------------------------------------------------------

    def reload(self, weights_registry: Mapping[str, DLPackArray], /) -> None:
        """Reload weights into this compiled model in-place.

        Reuses the compiled graph and replaces all weights atomically: an execution sees either the old or the new ones.
        Results computed once from weights are computed again. Captures are dropped.

        Args:
            weights_registry: Model weight names mapped to their new values.

        Raises:
            ValueError: Weights are missing, or of a wrong shape or dtype.
            RuntimeError: As for :meth:`execute`.
        """
        if self._linked is None:
            raise RuntimeError(f"{self._compiled.name}: an interpreted model cannot be reloaded")
        self._exclusively(self._reload, weights_registry)

    def _reload(self, weights_registry: Mapping[str, DLPackArray]) -> None:
        linked = self._linker.link(self._compiled, weights_registry)
        with self._lock:
            self._linked = linked
            self._captures.clear()

    def trim(self) -> None:
        """Frees memory that is kept between executions.

        These are free blocks for outputs, and the arena, which models on the same workers share. Running executions
        keep theirs; the next execution allocates again, at the cost of page faults. Weights, captures and returned
        tensors are not affected. When little memory is left, free blocks are released without a call.
        """
        self._output_memory.trim()
        self._arena.trim()
        host_memory.release_free_memory()

    # capture and replay ------------------------------------------------------------------------

    def capture(self, graph_keys: int | Sequence[int], *inputs: Tensor) -> list[Tensor]:
        """Capture execution into a device graph for caller-provided key.

        Runs the model once. A replay repeats the same launches on the same memory, without binding or allocation.

        Args:
            graph_keys: Caller-provided graph key or per-device keys identifying the captured graph.
            inputs: Input buffers; a replay reads their elements at that time.

        Returns:
            The output buffers, which each replay overwrites.

        Raises:
            TypeError: If graph_keys is neither an int nor a sequence of ints.
            ValueError: If any key is out of uint64 range, or no input buffers are provided.
            RuntimeError: As for :meth:`execute`, or the model was reloaded meanwhile.
        """
        return self._exclusively(self._capture, graph_keys, inputs)

    def _capture(self, graph_keys: int | Sequence[int], inputs: Sequence[Tensor]) -> list[Tensor]:
        keys = checked_keys(graph_keys, inputs)
        tensors, symbols = self._binder.bind(inputs, may_copy=False)
        linked = self._linked
        if linked is None:
            raise RuntimeError(f"{self._compiled.name}: an interpreted model cannot be captured")
        instance = linked.main.instance(symbols)
        if linked.later:
            raise RuntimeError(
                f"{self._compiled.name}: sizes that are computed, and values that are copied between devices or "
                "printed while the model runs cannot be captured"
            )
        capture = Capture(linked, instance, symbols, tensors, self._new_outputs(tensors, instance))
        self._run(linked, instance, tensors, capture.outputs)
        with self._lock:
            if self._linked is not linked:
                raise RuntimeError(f"{self._compiled.name}: another thread reloaded the model")
            self._captures.add(keys, capture)
        return list(capture.outputs)

    def replay(self, graph_keys: int | Sequence[int], *inputs: Tensor) -> None:
        """Replay the captured device graph for a caller-provided key.

        The outputs are written to the buffers that :meth:`capture` returned.

        Args:
            graph_keys: The key or keys of the capture.
            inputs: Input buffers of the captured shapes and dtypes.

        Raises:
            TypeError: If graph_keys is neither an int nor a sequence of ints.
            ValueError: If any key is out of uint64 range, no input buffers are provided, or they do not match.
            RuntimeError: If no graph has been captured for the keys, or as for :meth:`execute`.
        """
        self._exclusively(self._replay, graph_keys, inputs)

    def _replay(self, graph_keys: int | Sequence[int], inputs: Sequence[Tensor]) -> None:
        capture = self._captures.find(graph_keys, inputs)
        # these tensors were bound by the capture
        if all(
            tensor is captured for tensor, captured in zip(inputs, capture.inputs, strict=False)
        ):
            self._run(capture.linked, capture.instance, capture.inputs, capture.outputs)
            return
        tensors, symbols = self._binder.bind(inputs, may_copy=False)
        if symbols != capture.symbols:
            raise ValueError(
                f"{self._compiled.name}: replay with shapes {[t.shape for t in tensors]}, captured were "
                f"{[t.shape for t in capture.inputs]}"
            )
        self._run(capture.linked, capture.instance, tensors, capture.outputs)

    def debug_verify_replay(self, graph_keys: int | Sequence[int], *inputs: Tensor) -> None:
        """Execute eagerly and verify the launch trace matches the captured graph.

        Args:
            graph_keys: Caller-provided graph key or per-device keys identifying captured graphs.
            inputs: Input buffers matching the captured input signature (same shapes and dtypes used during capture).

        Raises:
            TypeError: If graph_keys is neither an int nor a sequence of ints.
            ValueError: If any key in graph_keys is out of uint64 range, or no input buffers are provided.
            RuntimeError: If no graph has been captured for graph_keys, or if the eager execution trace doesn't match
                the captured graph, or as for :meth:`execute`.
        """
        self._exclusively(self._verify_replay, graph_keys, inputs)

    def _verify_replay(self, graph_keys: int | Sequence[int], inputs: Sequence[Tensor]) -> None:
        capture = self._captures.find(graph_keys, inputs)
        tensors, symbols = self._binder.bind(inputs)
        linked = self._linked
        assert linked is not None
        instance = linked.main.instance(symbols)
        outputs = self._new_outputs(tensors, instance)
        self._run(linked, instance, tensors, outputs)
        # plans with equal offsets have equal sizes
        if linked is not capture.linked or not np.array_equal(
            instance.offsets.array, capture.instance.offsets.array
        ):
            raise RuntimeError(
                f"{self._compiled.name}: the execution does not match the captured graph: shapes "
                f"{[t.shape for t in tensors]}, captured were {[t.shape for t in capture.inputs]}"
            )
