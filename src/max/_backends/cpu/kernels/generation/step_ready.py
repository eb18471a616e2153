"""The wait of a decoding step for what the host prepares while the step runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from max import kernel as k
from max._backends.cpu.kernels.operand_checks import check_size
from max._backends.kernel_call import KernelCall, Operand, run_time_views

MOST_TURNS = 30_000
"""The maximum number of looks at the number of prepared steps, a few tenths of a millisecond."""


@k.kernel
def step_ready(
    out: k.Output, steps: k.InOut, prepared: k.InOut, allowed: k.InOut, ctx: k.Context
) -> None:
    """`out[0]` is 1 if the host has prepared step `steps[0]`: `prepared[0]` is greater. Waits for it a while.

    As an operand that may change, `allowed` is not read by any worker before this kernel has ended.
    """
    for _ in ctx.parallel(1):
        check_size("the result", out.shape[0], 1)
        check_size("steps", steps.shape[0], 1)
        check_size("prepared", prepared.shape[0], 1)
        step = k.i64(steps[0])
        turns = k.i64(0)
        # an atomic addition of nothing looks anew each time
        while prepared.atomic_add(0, value=0) <= step and turns < MOST_TURNS:
            turns += 1
        out[0] = k.u8(1) if turns < MOST_TURNS else k.u8(0)


def _lower_step_ready(
    operands: Sequence[Operand],
    results: Sequence[Operand],
    attributes: Mapping[str, Any],
    target: k.Target,
) -> KernelCall:
    """The call for `mo.step.ready`."""
    return KernelCall(step_ready, run_time_views(results, operands))


LOWERINGS = {"mo.step.ready": _lower_step_ready}
