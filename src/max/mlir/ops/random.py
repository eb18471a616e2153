"""Random numbers."""

from __future__ import annotations

from max.dtype import DType
from max.mlir.operation import Attrs, OpSpec, Types, define, tensor

DISTRIBUTIONS = ("uniform", "normal")


def _check_random(operands: Types, results: Types, attrs: Attrs) -> None:
    """Checks an int64 seed of rank 0, a float32 result, a known distribution and a stream of 32 bits."""
    seed, result = tensor("random", operands, 0), tensor("random", results, 0)
    if seed.dtype is not DType.int64 or seed.rank:
        raise TypeError(f"random: the seed is {seed.short}, expected si64[]")
    if result.dtype is not DType.float32:
        raise TypeError(f"random: the result is {result.short}, expected f32")
    if attrs["distribution"] not in DISTRIBUTIONS:
        distributions = ", ".join(DISTRIBUTIONS)
        raise ValueError(
            f"random: unknown distribution {attrs['distribution']!r}; there are {distributions}"
        )
    if not 0 <= attrs["stream"] < 1 << 32:
        raise ValueError(f"random: stream {attrs['stream']} does not fit into 32 bits")


define(
    OpSpec(
        "mo.random",
        (1, 1),
        1,
        attributes={"distribution": str, "stream": int},
        check=_check_random,
        takes="seed (rank 0 si64, on the CPU)",
        doc=(
            "`distribution` = uniform, normal; `stream`; f32 by Philox4x32-10: key the "
            "seed, counter (element / 4, stream); in `[0, 1)`, or of mean 0 and deviation 1"
        ),
    )
)
