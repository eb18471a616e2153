"""`max.nn.parallel`: concatenation by threads against NumPy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from max.driver import CPU
from max.nn.parallel import ParallelArrayOps


@pytest.mark.parametrize("seed", range(8))
def test_concatenation(seed: int) -> None:
    draw = random.Random(seed)
    rank = draw.randint(1, 3)
    axis = draw.randrange(-rank, rank)
    shape = [draw.randint(1, 6) for _ in range(rank)]
    arrays = []
    for _ in range(draw.randint(1, 5)):
        shape[axis] = draw.choice([0, 1, 7, 100])
        array = np.random.default_rng(seed).random(shape).astype(draw.choice(["f4"]))
        arrays.append(array if draw.random() < 0.5 else np.asfortranarray(array))
    pool = ParallelArrayOps(max_workers=draw.choice([1, 2, 7]))
    for least in (50.0, 0.0, 1e-5):
        result = pool.concatenate(arrays, axis, least)
        np.testing.assert_array_equal(result.to_numpy(), np.concatenate(arrays, axis))
        assert not np.shares_memory(result.to_numpy(), arrays[0])
    pool.shutdown()
    np.testing.assert_array_equal(
        pool.concatenate(arrays, axis).to_numpy(), np.concatenate(arrays, axis)
    )
    pool.shutdown(wait=False)


MISTAKES: list[tuple[Any, Any, type[Exception]]] = [
    ([], {}, ValueError),
    ([np.ones(2), np.ones((2, 2))], {}, ValueError),
    ([np.ones((2, 3)), np.ones((2, 2))], {}, ValueError),
    ([np.ones(2), np.ones(2, np.float32)], {}, ValueError),
    ([np.ones(2)], {"axis": 1}, IndexError),
    ([np.array(1.0)], {}, IndexError),
    ([[1, 2], [3]], {}, TypeError),
]


@pytest.mark.parametrize(("arrays", "options", "error"), MISTAKES)
def test_mistakes(arrays: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="concatenate: "):
        ParallelArrayOps(max_workers=2).concatenate(arrays, **options)


def test_mistakes_of_the_pool() -> None:
    with pytest.raises(ValueError, match="max_workers"):
        ParallelArrayOps(max_workers=0)
    with pytest.raises(TypeError):
        ParallelArrayOps(max_workers="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="page-locked"):
        ParallelArrayOps(accelerator=CPU())
