"""Kernels of ops without shape rules, with operands that do not fit each other: they raise, or stay in their memory.

A graph may call these ops as custom ops with operands of any shape and contents. Each example takes a case of
`tests.cpu_kernels.test_interpreted` and changes some of its operands: a size along an axis, or numbers of an integer
operand. The kernel is compiled with ``MAX_KERNEL_CHECK=2``: an access outside of an operand raises with a message of
that check, which is a fault of the kernel. Where the op has a NumPy reference, both give the same result or both raise.

``python -m tests.cpu_kernels.violating --first SEED --count N`` runs examples and prints each seed before it runs.
``--case NAME`` takes one case.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from functools import partial
from inspect import Parameter, signature
from typing import Any

import numpy as np

from max._backends.cpu.kernels import library
from max._config import flags
from max._interpreter import REFERENCES
from max.kernel import KernelError
from max.mlir import OPS
from tests.cpu_kernels.harness import Runner
from tests.cpu_kernels.test_interpreted import CASES
from tests.fuzzing import count_failures, seed_parser, seeds_of
from tests.guarded import Margins
from tests.tolerance import assert_close

Array = np.ndarray[Any, Any]
UNTYPED = {symbol for symbol in library.CPU_KERNELS.families if symbol not in OPS}
"""The ops whose operands no shape rule checks before the kernel."""
NAMES = sorted(
    name
    for name, case in CASES.items()
    if case[0] in UNTYPED and (case[0].startswith("mo.") or case[0] == "mok.grouped_products")
)
REFUSED = (ValueError, IndexError, NotImplementedError, KernelError)
OUTSIDE = re.compile(
    r": (index -?\d+ is|lanes from index -?\d+ are) out of range for axis|bytes of memory"
)
"""The messages of accesses outside of an operand."""


def _number(rng: np.random.Generator, array: Array, sizes: list[int]) -> int:
    """A number near a bound of what an integer operand may hold."""
    info = np.iinfo(array.dtype)
    near = int(rng.choice(sizes)) + int(rng.integers(-1, 2))
    wild = [-1, 0, 1, near, near, int(array.flat[rng.integers(array.size)]), info.min, info.max]
    wild += [2**31 - 1, 2**31, 2**32 - 1, 2**62, near + 2**32]
    fitting = [n for n in wild if info.min <= n <= info.max]
    return fitting[rng.integers(len(fitting))]


def _resized(rng: np.random.Generator, shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape with another size of an axis."""
    size = shape[axis]
    other = int(rng.choice([0, 1, size - 1, size + 1, 2 * size]))
    return (*shape[:axis], max(other, 0), *shape[axis + 1 :])


def draw(
    name: str, rng: np.random.Generator
) -> tuple[list[Array], list[tuple[Any, tuple[int, ...]]]]:
    """Returns operands and results of a case, with one to three changes."""
    symbol, operands, results, _ = CASES[name]
    arrays, results = copy.deepcopy(operands), list(results)
    sizes = [size for array in arrays for size in array.shape] or [1]
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        integers = [i for i, array in enumerate(arrays) if array.dtype.kind in "iu" and array.size]
        if integers and rng.integers(3):
            at = int(rng.choice(integers))
            arrays[at].flat[rng.integers(arrays[at].size)] = _number(rng, arrays[at], sizes)
            continue
        if symbol.startswith("mok."):
            # results and packed weights have the sizes that the compiler computes
            at = int(rng.integers(len(arrays) - 3, len(arrays)))
        else:
            at = int(rng.integers(len(arrays) + len(results)))
        shape = arrays[at].shape if at < len(arrays) else results[at - len(arrays)][1]
        if not shape:
            continue
        # the first axis is that of rows, slots or pages: others are static in most models
        axis = 0 if rng.integers(4) else int(rng.integers(len(shape)))
        shape = _resized(rng, shape, axis)
        if at < len(arrays):
            arrays[at] = np.resize(arrays[at], shape).astype(arrays[at].dtype)
        else:
            results[at - len(arrays)] = (results[at - len(arrays)][0], shape)
    return arrays, results


def _attempt(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return run(), None
    except Exception as error:
        return None, error


def _reference(symbol: str, arrays: list[Array], results: Any, attributes: Any) -> Any:
    """Runs the NumPy reference of an op, with sizes that it takes from attributes where the kernel takes them from
    results.
    """
    function = REFERENCES[symbol]
    names = signature(function).parameters
    given = {name: value for name, value in attributes.items() if name in names}
    for name in ("count", "value_size"):
        if name in names and names[name].default is Parameter.empty and name not in given:
            given[name] = results[0][1][-1]
    returned = function(*arrays, **given)
    if returned is None:
        returned = []
    elif isinstance(returned, np.ndarray):
        returned = [returned]
    shapes = [array.shape for array in returned]
    if shapes != [shape for _, shape in results]:
        # as a graph's interpreter does
        raise ValueError(f"results of {shapes}, expected {results}")
    return list(returned)


def check(name: str, seed: int, machine: str = "host") -> bool:
    """Runs one example; returns whether the kernel has a result.

    Raises:
        AssertionError: It accesses memory outside of its operands, or gives another result than the reference.
    """
    rng = np.random.default_rng(seed)
    arrays, results = draw(name, rng)
    symbol, _, _, attributes = CASES[name]
    shapes = [array.shape for array in arrays], [shape for _, shape in results]
    integers = [array.tolist() for array in arrays if array.dtype.kind in "iu" and array.size < 99]
    what = f"{name}, seed {seed}: {shapes}, {integers}"
    ours, theirs = copy.deepcopy(arrays), copy.deepcopy(arrays)
    margins = Margins()

    def execute() -> list[Array]:
        with flags.override(MAX_KERNEL_CHECK=2):
            runner = Runner(symbol, ours, results, attributes, machine=machine)
        runner.place(margins, end=bool(seed % 2))
        outputs = runner()
        return [*outputs, *runner.operands]

    found, error = _attempt(execute)
    margins.check()
    if error is not None:
        assert isinstance(error, REFUSED), f"{what}: {error!r}"
        assert not OUTSIDE.search(str(error)), f"{what}: {error!r}"
    if symbol not in REFERENCES or (
        # a plan that does not depend on the batch is another one
        symbol == "mo.latents.plan.ragged" and machine.startswith("invariant ")
    ):
        return error is None
    with np.errstate(all="ignore"):
        expected, wrong = _attempt(lambda: _reference(symbol, theirs, results, attributes))
    if error is not None:
        if not isinstance(error, NotImplementedError):
            assert wrong is not None, f"{what}: the kernel raised {error!r}, the reference did not"
        return False
    assert wrong is None, f"{what}: the reference raised {wrong!r}, the kernel did not"
    for got, want in zip(found, [*expected, *theirs], strict=True):
        try:
            assert_close(got, want.astype(got.dtype), scale=50.0)
        except AssertionError as difference:
            raise AssertionError(f"{what}: {difference}") from None
    return True


def main() -> None:
    """Runs examples; see the module's docstring."""
    parser = seed_parser()
    parser.add_argument("--case", action="append")
    parser.add_argument("--machine", default="host")
    arguments = parser.parse_args()
    names = arguments.case or NAMES
    answered: list[bool] = []

    def example(name: str, seed: int) -> None:
        answered.append(check(name, seed, arguments.machine))

    failures = count_failures(
        (f"{seed} {name}", partial(example, name, seed))
        for seed in seeds_of(arguments)
        for name in names
    )
    print(f"{arguments.count * len(names)} examples: {sum(answered)} answered, {failures} failed")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
