"""Two models in turn, again and again, with no Python in between.

What decides whether to go on is a byte that the second model writes. So a model that feeds itself, as one that generates tokens does,
runs several steps in one call::

    loop = ModelLoop(step, advance)
    outputs = loop.run(step_inputs, lambda outputs: [outputs[0], tokens, again], again)
"""

# what models are made of is read directly
# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from max._abi import BaseLayout
from max._runtime.program import NO_VALUE, Executor, Jump, Launch, Program
from max.driver import Tensor
from max.dtype import DType
from max.engine._model import Linked, Model

__all__ = ["ModelLoop"]


class ModelLoop:
    """Runs a model, then another one, as long as the other one says.

    Args:
        body: The first model.
        after: The second one.

    Raises:
        ValueError: One of them cannot be repeated (see :meth:`supports`), or they run on different devices.
    """

    def __init__(self, body: Model, after: Model) -> None:
        for model in (body, after):
            if not self.supports(model):
                raise ValueError(
                    f"{model._compiled.name} cannot run in a loop: it is interpreted, or has sizes that are "
                    "known only while it runs"
                )
        self._body, self._after = body, after
        self._executor: Executor
        self._bases: npt.NDArray[np.intp]
        self._programs: tuple[Program, Program]
        self._linked = self._make()

    @staticmethod
    def supports(model: Model) -> bool:
        """Whether a model can run in a loop: compiled, in one part, on the CPU, and not watched by a profile.

        Args:
            model: The model.
        """
        linked = model._linked
        if linked is None or linked.later or linked.main._watchers:
            return False
        return isinstance(linked.main.executor, Executor)

    def _make(self) -> tuple[Linked, Linked]:
        """Lays out both programs one after the other, and the way back."""
        body, after = self._body._linked, self._after._linked
        assert body is not None and after is not None
        first_executor, second_executor = body.main.executor, after.main.executor
        assert isinstance(first_executor, Executor) and isinstance(second_executor, Executor)
        if first_executor.pool is not second_executor.pool:
            raise ValueError(
                f"{self._body._compiled.name} and {self._after._compiled.name} run on different devices"
            )
        first, second = first_executor.program, second_executor.program
        self._programs = (first, second)
        launches = [*first.launches, *(_moved(launch, first) for launch in second.launches)]
        # each waits for the other
        for index in {0, len(first.launches)} & set(range(len(launches))):
            launches[index] = replace(launches[index], barrier=True)
        flag = first.num_values + second.num_values
        end = len(launches) + 2
        launches.append(
            Jump(0, [(flag, 0)], phases=0, name="loop", kind="if_zero", target=end),
        )
        launches.append(Jump(0, [], phases=0, name="loop", kind="back", target=0))
        scratch = max(first.scratch_bytes, second.scratch_bytes)
        self._executor = Executor(first_executor.pool, Program(launches, flag + 1, scratch))
        # the tensors of both programs are the loop's inputs, the flag is its output
        own, other = self._body._compiled.bases, self._after._compiled.bases
        shift = own.num_inputs + own.num_outputs
        layout = BaseLayout(shift + other.num_inputs + other.num_outputs, 1)
        self._bases = np.concatenate(
            [
                _places(own, layout, 0)[body.main.bases],
                _places(other, layout, shift)[after.main.bases],
                [layout.output(0)],
            ]
        )
        return body, after

    def run(
        self,
        body_inputs: Sequence[Any],
        after_inputs: Callable[[list[Tensor]], Sequence[Any]],
        again: Tensor,
    ) -> list[Tensor]:
        """Runs both at least once.

        All sizes stay as they are: inputs change by what the models write to them.

        Args:
            body_inputs: The first model's inputs, as for :meth:`Model.execute`.
            after_inputs: Gives the second one's for the first one's outputs.
            again: uint8 ``[1]``: after a turn there is another one where it is not 0. Nothing but the second model may
                write it meanwhile, as all workers must read the same.

        Returns:
            The first model's outputs of the last turn.

        Raises:
            TypeError: ``again`` is no such tensor, or as for :meth:`Model.execute`.
            ValueError: As for :meth:`Model.execute`.
            RuntimeError: A model is being profiled.
            KernelRunError: A kernel raised; what was written is then undefined.
        """
        if again.dtype is not DType.uint8 or again.num_elements != 1 or not again.device.is_host:
            raise TypeError(f"again is {again!r}, expected uint8[1] on the CPU")
        for model in (self._body, self._after):
            if not self.supports(model):
                raise RuntimeError(f"{model._compiled.name} is being profiled; run it by itself")
        if any(
            model._linked is not made or made.main.executor.program is not program
            for model, made, program in zip(
                (self._body, self._after), self._linked, self._programs, strict=True
            )
        ):
            self._linked = self._make()  # one was reloaded, or its row thresholds were measured
        tensors: list[int] = []
        offsets: list[npt.NDArray[np.int64]] = []
        arena, given = 0, body_inputs
        holes: list[tuple[int, ...]] = []
        outputs: list[Tensor] = []
        kept: list[list[Tensor]] = []
        for model, linked in zip((self._body, self._after), self._linked, strict=True):
            inputs, symbols = model._binder.bind(given, may_copy=False)
            instance = linked.main.instance(symbols)
            results = model._new_outputs(inputs, instance)
            arena = max(arena, instance.arena_bytes)
            holes.append(instance.holes)
            offsets.append(instance.offsets)
            tensors += [tensor._ptr for tensor in (*inputs, *results)]
            kept += [inputs, results]
            if model is self._body:
                outputs, given = results, after_inputs(results)
        # held by this frame until the run is over
        address, _memory = self._body._arena.take(
            arena, tuple(set(holes[0]).intersection(holes[1]))
        )
        bases = BaseLayout.addresses(address, tensors, [again._ptr])
        self._executor.run_at(
            np.array(bases, np.int64), self._bases, np.concatenate([*offsets, _NO_OFFSET])
        )
        return outputs


_NO_OFFSET = np.zeros(1, np.int64)


def _places(own: BaseLayout, layout: BaseLayout, first: int) -> npt.NDArray[np.intp]:
    """For each base of a program its place in the loop's, where its tensors are inputs from `first` on."""
    places = np.zeros(own.count(), np.intp)
    places[own.NOTHING] = layout.NOTHING
    places[own.arena()] = layout.arena()
    places[own.inputs] = [layout.input(first + i) for i in range(own.num_inputs)]
    first += own.num_inputs
    places[own.outputs] = [layout.input(first + i) for i in range(own.num_outputs)]
    return places


def _moved(launch: Launch, before: Program) -> Launch:
    """A launch behind another program's."""
    slots = [
        (value if value == NO_VALUE else value + before.num_values, addend)
        for value, addend in launch.slots
    ]
    if isinstance(launch, Jump):
        return replace(launch, slots=slots, target=launch.target + len(before.launches))
    return replace(launch, slots=slots)
