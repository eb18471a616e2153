"""Executions of NumPy arrays without tensors around them."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident

from max._host.reentry import refuse_second_use
from max.driver._memory import Array
from max.engine._model import Model
from max.engine.run.linked_program import run_at

__all__ = ["execute_arrays", "execute_fitting_arrays"]


def execute_arrays(model: Model, arrays: Sequence[Array]) -> list[Array]:
    """`Model.execute` of NumPy arrays: in half of the time that a small model takes besides its kernels.

    Args:
        model: The model.
        arrays: Its inputs.

    Returns:
        The outputs, in new memory.

    Raises:
        As `Model.execute`.
    """
    results = execute_fitting_arrays(model, arrays)
    return [t.to_numpy() for t in model.execute(*arrays)] if results is None else results


def execute_fitting_arrays(model: Model, arrays: Sequence[Array]) -> list[Array] | None:
    """`execute_arrays` of arrays that fit as they are; None: nothing was run, and `Model.execute` must see to them.

    Args:
        model: The model.
        arrays: Its inputs; they may be anything.

    Raises:
        As `Model.execute`.
    """
    linked = model._linked
    # interpreted, or cut into segments
    if linked is None or linked.later:
        return None
    # `exclusively`, without the time of a call
    in_use, thread = model._in_use, get_ident()
    if thread in in_use:
        refuse_second_use(in_use, model._compiled.name)
    try:
        in_use.add(thread)
        bound = model._binder.bind_arrays(arrays)
        if bound is None:
            return None
        pointers, symbols = bound
        instance = linked.main.instance(symbols)
        addresses, results = model._output_memory.arrays(instance.output_shapes)
        run_at(model._arena, linked, instance, pointers, addresses)
        return results
    finally:
        in_use.discard(thread)
