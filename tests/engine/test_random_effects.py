"""Random graphs that load, change and store buffers, on the engine and the interpreter, against NumPy.

All buffers and tensors have one shape, that of a paged KV cache, so that each op can follow each. Their elements are
integers: results are exact.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph, TensorValue, ops
from max.nn.kernels.cache import store_kv_cache_ragged
from max.nn.kv_cache import KVCacheParams, PagedCacheValues
from tests.engine.conftest import DEVICE, buffer, tensor

SHAPE = PAGES, SIDES, LAYERS, PAGE, HEADS, DIM = (4, 2, 1, 4, 1, 4)
PARAMS = KVCacheParams(DType.float32, HEADS, DIM, page_size=PAGE)
TOKENS = 5
OFFSETS = np.array([0, 2, TOKENS], np.uint32)
TABLE = np.array([[2, 0], [1, 3]], np.uint32)
"""The pages of two sequences."""
REGIONS: tuple[tuple[slice, ...], ...] = (
    (slice(1, 3),), (slice(None), slice(1, 2)), (slice(None),) * 5 + (slice(None, None, 2),),
    (slice(None, None, 3), slice(None), slice(None), slice(1, None)), (slice(0, 0),),
)  # fmt: skip

Step = tuple[Any, ...]
BUFFERS, GIVEN = 3, 2


def program(rng: random.Random, count: int) -> list[Step]:
    """Random steps: each names the buffers and the tensors that it takes; results are new tensors."""
    steps: list[Step] = []
    tensors = GIVEN
    for _ in range(count):
        one, other = rng.randrange(BUFFERS), rng.randrange(BUFFERS)
        # what was computed last more often
        x, y, z = (max(rng.randrange(tensors), rng.randrange(tensors)) for _ in range(3))
        kind = rng.choice(
            ["load", "load", "store", "slice", "slice", "add", "sub", "maximum", "turned", "moved", "masked", "masked",
             "cache", "cache", "call", "call", "branch", "loop"]
        )  # fmt: skip
        steps.append((kind, one, other, x, y, z, rng.choice(REGIONS)))
        tensors += kind not in ("store", "slice", "cache", "loop")
    return steps


class Arrays:
    """The steps as NumPy has them; a load is a copy."""

    def __init__(
        self,
        held: Sequence[np.ndarray],
        given: Sequence[np.ndarray],
        is_then: bool,
        lengths: np.ndarray,
    ):
        self.held, self.tensors = [*held, np.zeros(SHAPE, np.float32)], list(given)
        self.is_then, self.lengths = is_then, lengths

    def run(self, steps: Sequence[Step]) -> None:
        for kind, *rest in steps:
            result = getattr(self, kind)(*rest)
            if result is not None:
                self.tensors.append(result.copy())

    def load(self, one: int, *_: Any) -> np.ndarray:
        return self.held[one]

    def store(self, one: int, other: int, x: int, *_: Any) -> None:
        self.held[one][...] = self.tensors[x]

    def slice(self, one: int, other: int, x: int, y: int, z: int, region: Any) -> None:
        self.held[one][region] = self.tensors[x][region]

    def add(self, one: int, other: int, x: int, y: int, *_: Any) -> np.ndarray:
        return self.tensors[x] + self.tensors[y]

    def sub(self, one: int, other: int, x: int, y: int, *_: Any) -> np.ndarray:
        return self.tensors[x] - self.tensors[y]

    def maximum(self, one: int, other: int, x: int, y: int, *_: Any) -> np.ndarray:
        return np.maximum(self.tensors[x], self.tensors[y])

    def turned(self, one: int, other: int, x: int, *_: Any) -> np.ndarray:
        return self.tensors[x].swapaxes(3, 5)

    def moved(self, one: int, other: int, x: int, *_: Any) -> np.ndarray:
        return np.roll(self.tensors[x], -1, 0)

    def masked(self, one: int, other: int, x: int, y: int, z: int, _: Any) -> np.ndarray:
        result, mask = self.tensors[x].copy(), self.tensors[y] > 0
        result[mask] = self.tensors[z].reshape(-1)[: mask.sum()]
        return result

    def cache(self, one: int, other: int, x: int, y: int, *_: Any) -> None:
        for side, rows in enumerate((self.tensors[x], self.tensors[y])):
            rows = rows.reshape(-1, DIM)[:TOKENS].copy()
            for sequence, (start, end) in enumerate(zip(OFFSETS[:-1], OFFSETS[1:], strict=True)):
                for row in range(start, end):
                    at = int(self.lengths[sequence] + row - start)
                    self.held[one][TABLE[sequence, at // PAGE], side, 0, at % PAGE, 0] = rows[row]

    def call(self, one: int, other: int, x: int, *_: Any) -> np.ndarray:
        old = self.held[one].copy()
        self.held[other][REGIONS[0]] = self.tensors[x][REGIONS[0]]
        return old - self.held[other] + self.held[one]

    def branch(self, one: int, other: int, x: int, y: int, *_: Any) -> np.ndarray:
        if self.is_then:
            self.held[one][...] = self.tensors[x]
            return self.held[other]
        self.held[other][REGIONS[1]] = self.tensors[y][REGIONS[1]]
        return self.tensors[x]

    def loop(self, one: int, other: int, x: int, *_: Any) -> None:
        for turn in range(3):
            self.held[one][turn : turn + 1] = (
                self.tensors[x][turn : turn + 1] + self.held[other][3:4]
            )


class Staged:
    """The steps as ops of a graph."""

    def __init__(self, graph: Graph, callee: Graph) -> None:
        values = list(graph.inputs)
        self.held = [value.buffer for value in values[: BUFFERS - 1]]
        self.held.append(ops.buffer_create(buffer(*SHAPE), init_value=0.0))
        self.tensors = [value.tensor for value in values[BUFFERS - 1 :][:GIVEN]]
        self.is_then, self.lengths, self.most = (
            value.tensor for value in values[BUFFERS - 1 + GIVEN :]
        )
        self.callee = callee

    def run(self, steps: Sequence[Step]) -> None:
        for kind, *rest in steps:
            result = getattr(self, kind)(*rest)
            if result is not None:
                self.tensors.append(result)

    def load(self, one: int, *_: Any) -> TensorValue:
        return self.held[one][...]

    def store(self, one: int, other: int, x: int, *_: Any) -> None:
        self.held[one][...] = self.tensors[x]

    def slice(self, one: int, other: int, x: int, y: int, z: int, region: Any) -> None:
        ops.buffer_store_slice(self.held[one], self.tensors[x][region], region)

    def add(self, one: int, other: int, x: int, y: int, *_: Any) -> TensorValue:
        return self.tensors[x] + self.tensors[y]

    def sub(self, one: int, other: int, x: int, y: int, *_: Any) -> TensorValue:
        return self.tensors[x] - self.tensors[y]

    def maximum(self, one: int, other: int, x: int, y: int, *_: Any) -> TensorValue:
        return ops.max(self.tensors[x], self.tensors[y])

    def turned(self, one: int, other: int, x: int, *_: Any) -> TensorValue:
        return ops.transpose(self.tensors[x], 3, 5)

    def moved(self, one: int, other: int, x: int, *_: Any) -> TensorValue:
        return ops.concat([self.tensors[x][1:], self.tensors[x][:1]], 0)

    def masked(self, one: int, other: int, x: int, y: int, z: int, _: Any) -> TensorValue:
        name = f"found{len(self.tensors)}"
        return ops.masked_scatter(self.tensors[x], self.tensors[y] > 0, self.tensors[z], name)

    def cache(self, one: int, other: int, x: int, y: int, *_: Any) -> None:
        offsets, table = (ops.constant(array, DType.uint32, DEVICE) for array in (OFFSETS, TABLE))
        cached = PagedCacheValues(self.held[one], self.lengths, table, self.most)
        k, v = (ops.reshape(self.tensors[i], [-1, DIM])[:TOKENS] for i in (x, y))
        layer = ops.constant(0, DType.uint32, DEVICE)
        store_kv_cache_ragged(PARAMS, k, v, offsets, cached, layer)

    def call(self, one: int, other: int, x: int, *_: Any) -> TensorValue:
        (result,) = ops.call(self.callee, self.held[one], self.held[other], self.tensors[x])
        return result.tensor

    def branch(self, one: int, other: int, x: int, y: int, *_: Any) -> TensorValue:
        def then() -> TensorValue:
            self.held[one][...] = self.tensors[x]
            return self.held[other][...]

        def otherwise() -> TensorValue:
            part = self.tensors[y][REGIONS[1]]
            ops.buffer_store_slice(self.held[other], part, REGIONS[1])
            return self.tensors[x]

        (result,) = ops.cond(self.is_then, [tensor(*SHAPE)], then, otherwise)
        return result

    def loop(self, one: int, other: int, x: int, *_: Any) -> None:
        def body(turn: TensorValue) -> TensorValue:
            row = ops.unsqueeze(ops.gather(self.tensors[x], turn, 0), 0)
            row = row + self.held[other][3:4]
            ops.buffer_store_slice(self.held[one], row, [(slice(turn, turn + 1), 1)])
            return turn + 1

        ops.while_loop(ops.constant(0, DType.int64, DEVICE), lambda turn: turn < 3, body)


def stage(steps: Sequence[Step]) -> Graph:
    """A graph of the steps; its outputs are the last tensors, and the buffer that it creates."""
    types = [
        *[buffer(*SHAPE)] * (BUFFERS - 1), *[tensor(*SHAPE)] * GIVEN, tensor(dtype=DType.bool),
        tensor(2, dtype=DType.uint32), tensor(1, 2, dtype=DType.uint32),
    ]  # fmt: skip
    with Graph("effects", input_types=types) as graph:
        inner = [buffer(*SHAPE), buffer(*SHAPE), tensor(*SHAPE)]
        with graph.add_subgraph("exchange", input_types=inner) as callee:
            one, other, new = (
                callee.inputs[0].buffer,
                callee.inputs[1].buffer,
                callee.inputs[2].tensor,
            )
            old = one[...]
            ops.buffer_store_slice(other, new[REGIONS[0]], REGIONS[0])
            callee.output(old - other[...] + one[...])
        staged = Staged(graph, callee)
        staged.run(steps)
        graph.output(*staged.tensors[-4:], staged.held[-1][...])
    return graph


def check(seed: int, count: int) -> None:
    """Compares two executions of a random graph, of which the second goes on with the buffers of the first."""
    steps = program(random.Random(seed), count)
    graph = stage(steps)
    models: list[Any] = [InferenceSession(devices=[CPU()]).load(graph)]
    with flags.override(MAX_INTERPRET=True):
        models.append(InferenceSession(devices=[CPU()]).load(graph))
    rng = np.random.default_rng(seed)
    start = [rng.integers(-8, 9, SHAPE).astype(np.float32) for _ in range(BUFFERS - 1)]
    held = [[each.copy() for each in start] for _ in range(3)]
    for _ in range(2):
        given = [rng.integers(-8, 9, SHAPE).astype(np.float32) for _ in range(GIVEN)]
        is_then = bool(rng.integers(2))
        lengths = rng.integers(0, 5, 2).astype(np.uint32)
        arrays = Arrays(held[0], given, is_then, lengths)
        arrays.run(steps)
        wanted = [*arrays.tensors[-4:], arrays.held[-1], *arrays.held[:-1]]
        most = np.array([[3, lengths.max()]], np.uint32)
        for model, own in zip(models, held[1:], strict=True):
            outputs = model.execute(*own, *given, np.array(is_then), lengths, most)
            found = [*[each.to_numpy() for each in outputs], *own]
            for number, (got, want) in enumerate(zip(found, wanted, strict=True)):
                np.testing.assert_array_equal(got, want, f"{seed}: value {number} of {steps}")
        held[0] = arrays.held[:-1]


@pytest.mark.parametrize("seed", range(6))
def test_effects_are_in_the_order_of_the_graph(seed: int) -> None:
    check(seed, 10)


@pytest.mark.long
def test_effects_are_in_the_order_of_the_graph_long() -> None:
    for seed in range(100, 400):
        check(seed, 4 + seed % 15)
