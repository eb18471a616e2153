"""Runs two models alternately in a loop, without Python in between.

A byte that the second model writes decides whether the loop continues. A model whose inputs depend on its outputs, such
as a generator of tokens, so runs several steps in one call::

    loop = ModelLoop(step, advance)
    outputs = loop.run(step_inputs, lambda outputs: [outputs[0], tokens, again], again)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from max._backends.backend import Backend, ProgramExecutor
from max._backends.program import Program
from max.driver import Tensor
from max.engine._model import Model
from max.engine.joined_models import JoinedModels, PartInputs, PartJump
from max.engine.run.input_binding import ModelInput

__all__ = ["ModelLoop"]


class ModelLoop(JoinedModels):
    """A loop over two models.

    Args:
        body: The first model of each turn.
        after: The second model of each turn.

    Raises:
        ValueError: :meth:`supports` is false for one of them, or they run on different devices.
    """

    def __init__(self, body: Model, after: Model) -> None:
        super().__init__([body, after], [PartJump(1, 2, 0), PartJump(1, 0)], 1)

    def _executor(self, backend: Backend, programs: Sequence[Program]) -> ProgramExecutor:
        # a device may bring a loop over two programs, and no jumps
        body, after = programs
        return backend.loop(body, after)

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
        parts: list[PartInputs] = [lambda made: body_inputs, lambda made: after_inputs(made[0])]
        return self.run_parts(parts, [again])[0]
