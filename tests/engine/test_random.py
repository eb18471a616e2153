"""Random tensors: known answers of the generator, engine against interpreter, distributions, reproducibility."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from max import _interpreter
from max._interpreter.random import philox
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from tests.tolerance import assert_close

DEVICE = DeviceRef.CPU()


def floats(*shape: Any, dtype: DType = DType.float32) -> TensorType:
    return TensorType(dtype, shape, DEVICE)


def graph_of(build: Callable[..., Any], *types: TensorType) -> Graph:
    with Graph("random", input_types=types) as graph:
        result = build(*[v.tensor for v in graph.inputs])
        graph.output(*(result if isinstance(result, list | tuple) else [result]))
    return graph


def run(graph: Graph, *inputs: Any, threads: int = 2) -> list[np.ndarray]:
    model = InferenceSession(devices=[CPU()], num_threads=threads).load(graph)
    return [out.to_numpy() for out in model.execute(*inputs)]


# counter, key, words: kat_vectors of Random123, philox4x32 with 10 rounds
KNOWN = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    got = philox(np.array([counter], np.uint32), np.array(key, np.uint32))
    assert got[0].tolist() == words


def test_the_first_words_are_the_generators() -> None:
    """Seed 0 and stream 0 give the counter of the first known answer."""

    def build() -> Any:
        ops.random.set_seed(0)
        return ops.random.uniform(floats(4))

    want = [(word >> 8) * 2.0**-24 for word in KNOWN[0][2]]
    assert run(graph_of(build))[0].tolist() == want


@pytest.mark.parametrize("shape", [(), (1,), (7,), (64,), (3, 5, 17), (0, 4), (1000, 33)])
@pytest.mark.parametrize("seed", [0, 1, -5, 2**40 + 3])
def test_the_engine_draws_what_the_interpreter_draws(shape: tuple[int, ...], seed: int) -> None:
    def build() -> Any:
        ops.random.set_seed(seed)
        return ops.random.uniform(floats(*shape)), ops.random.gaussian(floats(*shape))

    graph = graph_of(build)
    even, bell = _interpreter.run(graph, [])
    for threads in (1, 2):
        got_even, got_bell = run(graph, threads=threads)
        assert got_even.shape == shape
        np.testing.assert_array_equal(got_even, even)
        assert_close(got_bell, bell)


def test_distributions() -> None:
    """Kolmogorov-Smirnov distance of 200,000 numbers: below 1.95 / sqrt(n) with probability 0.999."""
    from torch import float64, from_numpy, special

    def normal(x: np.ndarray) -> np.ndarray:
        return special.ndtr(from_numpy(x).to(float64)).numpy()

    def build() -> Any:
        ops.random.set_seed(7)
        like = floats(200_000)
        return (
            ops.random.uniform(like, range=(-2.0, 5.0)),
            ops.random.gaussian(like, mean=3.0, std=0.5),
            ops.random.normal(like),
        )

    even, bell, standard = run(graph_of(build))
    assert even.min() >= -2 and even.max() < 5
    for cumulative in ((even + 2) / 7, normal((bell - 3) / 0.5), normal(standard)):
        ranks = (np.arange(cumulative.size) + 0.5) / cumulative.size
        assert np.abs(np.sort(cumulative) - ranks).max() < 1.95 / np.sqrt(cumulative.size)
    assert abs(np.corrcoef(even, standard)[0, 1]) < 0.01
    assert abs(np.corrcoef(standard[::2], standard[1::2])[0, 1]) < 0.015


def test_calls_differ_and_runs_repeat() -> None:
    def build() -> Any:
        ops.random.set_seed(3)
        return [ops.random.uniform(floats(64)) for _ in range(3)]

    first, again = run(graph_of(build)), run(graph_of(build))
    assert len({tuple(x.tolist()) for x in first}) == 3
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_seed_that_comes_in(rng: np.random.Generator) -> None:
    """Each seed gives new numbers, in branches too; sizes are symbolic."""

    def build(seed: Any, x: Any) -> Any:
        ops.random.set_seed(seed)
        dropped = ops.where(ops.random.uniform(x.type) < 0.25, 0.0, x)
        (noise,) = ops.cond(
            seed > 0, [x.type], lambda: ops.random.gaussian(x.type), lambda: x * 0.0
        )
        return dropped, noise

    graph = graph_of(build, TensorType(DType.int64, [], DEVICE), floats("n", 10))
    x = rng.standard_normal((500, 10)).astype(np.float32)
    seen = []
    for seed in (1, 2, 1, -1):
        dropped, noise = run(graph, np.int64(seed), x)
        assert abs((dropped == 0).mean() - 0.25) < 0.03
        assert abs(noise.std() - (seed > 0)) < 0.05
        seen.append(dropped)
    np.testing.assert_array_equal(seen[0], seen[2])
    assert (seen[0] != seen[1]).any() and (seen[0] != seen[3]).any()


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float16, DType.float64])
def test_dtypes(dtype: DType) -> None:
    (got,) = run(graph_of(lambda: ops.random.uniform(floats(1000, dtype=dtype))))
    assert got.dtype == dtype.to_numpy()
    assert 0.45 < got.astype(np.float32).mean() < 0.55


def test_mistakes() -> None:
    with Graph("mistakes", input_types=[floats(3)]) as graph:
        x = graph.inputs[0].tensor
        with pytest.raises(TypeError, match="uniform: .*is not of numbers"):
            ops.random.uniform(TensorType(DType.bool, [3], DEVICE))
        with pytest.raises(TypeError, match="gaussian: expected the type of a tensor"):
            ops.random.gaussian([3])  # pyright: ignore
        with pytest.raises(ValueError, match=r"expected \(low, high\)"):
            ops.random.uniform(floats(3), range=(0.0,))  # pyright: ignore
        with pytest.raises(TypeError, match="set_seed: the seed is"):
            ops.random.set_seed(x[0])
        graph.output(x)
