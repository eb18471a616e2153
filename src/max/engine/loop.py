"""Runs two models alternately in a loop, without Python in between.

A byte that the second model writes decides whether the loop continues. A model whose inputs depend on its outputs, such
as a generator of tokens, so runs several steps in one call::

    loop = ModelLoop(step, advance)
    outputs = loop.run(step_inputs, lambda outputs: [outputs[0], tokens, again], again)
"""

# the loop reads private fields of models, as part of the engine
# pyright: reportPrivateUsage=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from max._abi import BaseLayout
from max._backends.backend import Backend, ProgramExecutor
from max._backends.program import NativeArray, Program, packed_words
from max.driver import Device, Tensor
from max.dtype import DType
from max.engine._model import Model
from max.engine._session import InferenceSession
from max.engine.run.input_binding import ModelInput
from max.engine.run.linked_program import Instance, Linked

__all__ = ["ModelLoop"]


class _Joined(NamedTuple):
    """The program of both models; a run reads it once, as other threads may replace it."""

    linked: tuple[Linked, Linked]
    programs: tuple[Program, Program]
    """The programs that were joined; row thresholds that are measured later replace them."""
    executor: ProgramExecutor
    backend: Backend
    bases: NativeArray


class ModelLoop:
    """A loop over two models.

    Args:
        body: The first model of each turn.
        after: The second model of each turn.

    Raises:
        ValueError: :meth:`supports` is false for one of them, or they run on different devices.
    """

    def __init__(self, body: Model, after: Model) -> None:
        for model in (body, after):
            if not self.supports(model):
                raise ValueError(
                    f"{model._compiled.name} cannot run in a loop: it is interpreted, or has sizes that are "
                    "known only while it runs"
                )
        self._body, self._after = body, after
        self._joined = self._make()
        self._last_offsets: tuple[tuple[Instance | None, Instance | None], NativeArray] = (
            (None, None),
            NativeArray.of(np.zeros(0, np.int64)),
        )
        """The numbers that are added to the bases, for the plans of the last run."""

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether a model can run in a loop: it is compiled, has one segment, on a device that runs loops, and is not
        being profiled.

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

    def share(
        self, dtype: DType, shape: tuple[int, ...], device: Device | None = None
    ) -> tuple[Tensor, npt.NDArray[Any]] | None:
        """Makes a tensor of zeros for the loop that the host reads and writes while the loop runs.

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

    def _make(self) -> _Joined:
        """Joins both programs into one, with a jump back to the start."""
        body, after = self._body._linked, self._after._linked
        assert body is not None and after is not None
        backend = body.main.backend
        if backend.queue is not after.main.backend.queue:
            raise ValueError(
                f"{self._body._compiled.name} and {self._after._compiled.name} run on different devices"
            )
        first, second = body.main.executor.program, after.main.executor.program
        executor = backend.loop(first, second)
        # in the joined program the inputs and outputs of both are inputs, and the flag is the output
        body_bases, after_bases = self._body._compiled.bases, self._after._compiled.bases
        first_after = body_bases.num_inputs + body_bases.num_outputs
        layout = BaseLayout(first_after + after_bases.num_inputs + after_bases.num_outputs, 1)
        bases = np.concatenate(
            [
                _places(body_bases, layout, 0)[body.main.bases.array],
                _places(after_bases, layout, first_after)[after.main.bases.array],
                [layout.output(0)],
            ]
        )
        return _Joined((body, after), (first, second), executor, backend, NativeArray.of(bases))

    def run(
        self,
        body_inputs: Sequence[ModelInput],
        after_inputs: Callable[[list[Tensor]], Sequence[ModelInput]],
        again: Tensor,
    ) -> list[Tensor]:
        """Runs turns until ``again`` is 0, at least one.

        Sizes are the same in all turns; inputs differ between turns only by what the models write to mutable inputs.

        Args:
            body_inputs: The first model's inputs, as for :meth:`Model.execute`.
            after_inputs: A function from the first model's outputs to the second model's inputs.
            again: A uint8 tensor ``[1]`` on the models' device. After each turn the loop ends if it is 0. Only the
                second model may write it during the run, since all workers must read the same value.

        Returns:
            The first model's outputs of the last turn.

        Raises:
            TypeError: ``again`` has another dtype, size or device, or as for :meth:`Model.execute`.
            ValueError: As for :meth:`Model.execute`.
            RuntimeError: A model is being profiled, or this thread is using it: see :meth:`Model.execute`.
            KernelRunError: A kernel raised; the contents of outputs and mutable inputs are then undefined.
        """
        backend = self._joined.backend
        if (
            again.dtype is not DType.uint8
            or again.num_elements != 1
            or not backend.holds(again.device)
        ):
            raise TypeError(f"again is {again!r}, expected uint8[1] on {backend.device}")
        for model in (self._body, self._after):
            if not self.supports(model):
                raise RuntimeError(f"{model._compiled.name} is being profiled; run it by itself")
        # a thread cannot use one model twice
        if self._body is self._after:
            return self._body._exclusively(self._run, body_inputs, after_inputs, again)
        return self._body._exclusively(
            self._after._exclusively, self._run, body_inputs, after_inputs, again
        )

    def _run(
        self,
        body_inputs: Sequence[ModelInput],
        after_inputs: Callable[[list[Tensor]], Sequence[ModelInput]],
        again: Tensor,
    ) -> list[Tensor]:
        joined = self._joined
        if any(
            model._linked is not linked or linked.main.executor.program is not program
            for model, linked, program in zip(
                (self._body, self._after), joined.linked, joined.programs, strict=True
            )
        ):
            # a model was reloaded, or its row thresholds were measured
            joined = self._joined = self._make()
        tensors: list[int] = []
        instances: list[Instance] = []
        args = body_inputs
        outputs: list[Tensor] = []
        owners: list[list[Tensor]] = []
        for model, linked in zip((self._body, self._after), joined.linked, strict=True):
            inputs, symbols = model._binder.bind(args, may_copy=False)
            instance = linked.main.instance(symbols)
            results = model._new_outputs(inputs, instance)
            instances.append(instance)
            tensors += [tensor._ptr for tensor in (*inputs, *results)]
            owners += [inputs, results]
            if model is self._body:
                outputs, args = results, after_inputs(results)
        # the models run in turn, in one arena; `_memory` keeps it alive until the end of the run
        address, _memory = self._body._arena.take(
            max(instance.arena_bytes for instance in instances),
            tuple(set(instances[0].holes).intersection(instances[1].holes)),
        )
        bases = BaseLayout.addresses(address, tensors, [again._ptr])
        last, offsets = self._last_offsets
        # plans are kept: a loop has few sizes
        if last[0] is not instances[0] or last[1] is not instances[1]:
            parts = [instance.offsets.array for instance in instances]
            offsets = NativeArray.of(np.concatenate([*parts, [0]]))
            self._last_offsets = (instances[0], instances[1]), offsets
        joined.executor.run_at(packed_words(bases), joined.bases, offsets)
        if joined.backend.is_asynchronous:
            joined.backend.synchronize()
        for linked in joined.linked:
            if linked.main.after_run is not None:
                linked.main.after_run()
        return outputs


def _places(program_bases: BaseLayout, layout: BaseLayout, first: int) -> npt.NDArray[np.intp]:
    """For each base of a program its index in the joined program, where its inputs begin at `first`."""
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
