"""Joins several compiled models into one program with conditional jumps, which runs without Python in between.

A model may occur several times, each time with its own inputs. `max.engine.loop.ModelLoop` is the special case of two
alternating models.
"""

# as part of the engine it reads private fields of models
# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max._abi import BaseLayout
from max._backends.backend import Backend, ProgramExecutor
from max._backends.program import NativeArray, PartJump, Program, packed_words
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine._model import Model
from max.engine._session import InferenceSession
from max.engine.run.input_binding import ModelInput
from max.engine.run.linked_program import Instance, Linked

__all__ = ["JoinedModels", "PartInputs", "PartJump"]

PartInputs = Callable[[list[list[Tensor]]], Sequence[ModelInput]]
"""Computes the inputs of a part from the outputs of all parts before it."""


class _Joined(NamedTuple):
    """The joined program; a run reads it once, since other threads may replace it."""

    linked: tuple[Linked, ...]
    programs: tuple[Program, ...]
    """The programs of the parts; a later measurement of row thresholds replaces them."""
    executor: ProgramExecutor
    backend: Backend
    bases: NativeArray


class JoinedModels:
    """Models that run in order as one program, with jumps between them.

    Args:
        parts: The models.
        jumps: The jumps between the parts.
        num_flags: The number of flag bytes that conditional jumps read.

    Raises:
        ValueError: :meth:`supports` is false for a model, or they run on different devices.
    """

    def __init__(
        self, parts: Sequence[Model], jumps: Sequence[PartJump], num_flags: int = 0
    ) -> None:
        for model in parts:
            if not self.supports(model):
                raise ValueError(
                    f"{model._compiled.name} cannot run in a loop: it is interpreted, or has sizes that are "
                    "known only while it runs"
                )
        self._parts, self._jumps, self._num_flags = list(parts), list(jumps), num_flags
        # a thread locks each model once
        self._models = list(dict.fromkeys(parts))
        self._joined = self._make()
        self._last_offsets: tuple[list[Instance], NativeArray] = (
            [],
            NativeArray.of(np.zeros(0, np.int64)),
        )
        """The memory plans of the last run, and the offsets that they add to base addresses."""

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether a model can be a part: it is compiled to one segment, its device runs loops, and it is not being
        profiled.

        Args:
            model: The model.
        """
        linked = model._linked
        if linked is None or linked.later or linked.main._watchers:
            return False
        return linked.main.backend.has_loop

    @staticmethod
    def runs_on(
        session: InferenceSession, device: Device, with_shared_memory: bool = False
    ) -> bool:
        """Whether a device of a session runs loops.

        Args:
            session: The session.
            device: The device.
            with_shared_memory: Whether the host must be able to read and write tensors of the loop while it runs.

        Raises:
            ValueError: The session does not have the device.
        """
        backend = session._backends.of(device)
        return backend.has_loop and (not with_shared_memory or backend.share(1) is not None)

    @staticmethod
    def run_together(models: Sequence[Model]) -> bool:
        """Whether models can be joined into one program, with any jumps.

        Args:
            models: The models, of any sessions.
        """
        if not all(map(JoinedModels.supports, models)):
            return False
        backends = [model._linked.main.backend for model in models if model._linked is not None]
        return all(own.runs_jumps and own.queue is backends[0].queue for own in backends)

    def share(
        self, dtype: DType, shape: tuple[int, ...], device: Device | None = None
    ) -> tuple[Tensor, npt.NDArray[Any]] | None:
        """Allocates a tensor of zeros that the host can read and write while the models run.

        Args:
            dtype: Its element type.
            shape: Its sizes.
            device: The device of the tensor: one of the devices that the programs run on, which share their memory if
                they are virtual; None: the first.

        Returns:
            The tensor, and the same memory for the host; None if the device has no such memory.
        """
        backend = self._joined.backend
        num_bytes = math.prod(shape) * dtype.size_in_bytes
        block = backend.share(num_bytes)
        if block is None:
            return None
        place = backend.device if device is None else device
        tensor = Tensor._over(
            (block.address, block.owner), dtype, shape, place, place.default_stream
        )
        return tensor, block.array[:num_bytes].view(dtype.to_numpy()).reshape(shape)

    def _executor(self, backend: Backend, programs: Sequence[Program]) -> ProgramExecutor:
        """Compiles the jumps and prepares the joined program."""
        return backend.join(programs, self._jumps, self._num_flags)

    def _make(self) -> _Joined:
        """Joins the programs of all parts."""
        linked = list[Linked]()
        for model in self._parts:
            own = model._linked
            assert own is not None
            linked.append(own)
        backend = linked[0].main.backend
        for model, own in zip(self._parts, linked, strict=True):
            if own.main.backend.queue is not backend.queue:
                raise ValueError(
                    f"{self._parts[0]._compiled.name} and {model._compiled.name} run on different devices"
                )
        programs = tuple(own.main.executor.program for own in linked)
        executor = self._executor(backend, programs)
        # in the joined program the inputs and outputs of all are inputs, and the flags are the outputs
        forms = [model._compiled.bases for model in self._parts]
        sizes = [form.num_inputs + form.num_outputs for form in forms]
        layout = BaseLayout(sum(sizes), self._num_flags)
        bases = [
            _places(form, layout, sum(sizes[:index]))[own.main.bases.array]
            for index, (form, own) in enumerate(zip(forms, linked, strict=True))
        ]
        flags = np.array([layout.output(index) for index in range(self._num_flags)], np.intp)
        array = NativeArray.of(np.concatenate([*bases, flags]))
        return _Joined(tuple(linked), programs, executor, backend, array)

    def run_parts(
        self, inputs: Sequence[PartInputs], flags: Sequence[Tensor] = ()
    ) -> list[list[Tensor]]:
        """Runs the program until the end of the last part, or a jump there.

        A part has the same input sizes each time it runs; only the contents of mutable inputs change.

        Args:
            inputs: For each part a function from the outputs of the parts before it to its inputs, as for
                :meth:`Model.execute`.
            flags: The flags of conditional jumps: uint8 tensors ``[1]`` on the models' device. Only parts may write
                them during the run, since all workers must read the same value.

        Returns:
            The outputs of each part from its last execution; undefined for a part that did not run.

        Raises:
            TypeError: A flag has a wrong dtype, size or device, or as for :meth:`Model.execute`.
            ValueError: The number of inputs or flags is wrong, or as for :meth:`Model.execute`.
            RuntimeError: A model is being profiled, or this thread is using it: see :meth:`Model.execute`.
            KernelRunError: A kernel raised; the contents of outputs and mutable inputs are then undefined.
        """
        backend = self._joined.backend
        if len(inputs) != len(self._parts) or len(flags) != self._num_flags:
            raise ValueError(
                f"{len(inputs)} inputs and {len(flags)} flags for {len(self._parts)} parts and "
                f"{self._num_flags} flags"
            )
        for flag in flags:
            if (
                flag.dtype is not DType.uint8
                or flag.num_elements != 1
                or not backend.holds(flag.device)
            ):
                raise TypeError(f"again is {flag!r}, expected uint8[1] on {backend.device}")
        for model in self._models:
            if not self.supports(model):
                raise RuntimeError(f"{model._compiled.name} is being profiled; run it by itself")
        work = partial(self._run, inputs, flags)
        # nested, since a thread cannot lock one model twice
        for model in self._models:
            work = partial(model._exclusively, work)
        return work()

    def _run(self, inputs: Sequence[PartInputs], flags: Sequence[Tensor]) -> list[list[Tensor]]:
        joined = self._joined
        if any(
            model._linked is not linked or linked.main.executor.program is not program
            for model, linked, program in zip(
                self._parts, joined.linked, joined.programs, strict=True
            )
        ):
            # a model was reloaded, or its row thresholds were measured
            joined = self._joined = self._make()
        tensors: list[int] = []
        instances: list[Instance] = []
        outputs: list[list[Tensor]] = []
        owners: list[list[Tensor]] = []
        for model, linked, given in zip(self._parts, joined.linked, inputs, strict=True):
            bound, symbols = model._binder.bind(given(outputs), may_copy=False)
            instance = linked.main.instance(symbols)
            results = model._new_outputs(bound, instance)
            instances.append(instance)
            tensors += [tensor._ptr for tensor in (*bound, *results)]
            owners.append(bound)
            outputs.append(results)
        # the parts run one after another in one arena, which `_memory` keeps alive until the end of the run
        holes = set(instances[0].holes).intersection(*[own.holes for own in instances[1:]])
        address, _memory = self._parts[0]._arena.take(
            max(instance.arena_bytes for instance in instances), tuple(holes)
        )
        bases = BaseLayout.addresses(address, tensors, [flag._ptr for flag in flags])
        last, offsets = self._last_offsets
        # offsets are cached: a loop has few different sizes
        if len(last) != len(instances) or any(
            new is not old for new, old in zip(instances, last, strict=True)
        ):
            parts = [instance.offsets.array for instance in instances]
            offsets = NativeArray.of(np.concatenate([*parts, np.zeros(len(flags), np.int64)]))
            self._last_offsets = instances, offsets
        joined.executor.run_at(packed_words(bases), joined.bases, offsets)
        if joined.backend.is_asynchronous:
            joined.backend.synchronize()
        # once for each model, even if it occurs in several parts
        for linked in {id(own): own for own in joined.linked}.values():
            if linked.main.after_run is not None:
                linked.main.after_run()
        return outputs


def _places(program_bases: BaseLayout, layout: BaseLayout, first: int) -> npt.NDArray[np.intp]:
    """Maps the bases of a part to those of the joined program, where the part's inputs begin at index `first`."""
    base_indices = np.zeros(program_bases.count(), np.intp)
    base_indices[program_bases.NOTHING] = layout.NOTHING
    base_indices[program_bases.arena()] = layout.arena()
    base_indices[program_bases.inputs] = [
        layout.input(first + i) for i in range(program_bases.num_inputs)
    ]
    first += program_bases.num_inputs
    base_indices[program_bases.outputs] = [
        layout.input(first + i) for i in range(program_bases.num_outputs)
    ]
    return base_indices
