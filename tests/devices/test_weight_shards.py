"""Shards of weights against slices of NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from max.dtype import DType
from max.graph import DeviceRef, Graph, ShardingStrategy, Weight, ops
from max.graph.quantization import QuantizationEncoding
from max.graph.weight import Segment
from tests.devices.harness import BACKENDS, Array, refs, run

both = pytest.mark.parametrize("backend", BACKENDS)
CPU = DeviceRef.CPU


def values_of(weight: Weight, array: Array, backend: str, count: int) -> list[Array]:
    """Returns the shards' values from a graph whose only weight is the whole matrix."""
    shards = weight.shard(refs(count))
    assert [s.shard_idx for s in shards] == list(range(count))
    assert [s.device for s in shards] == refs(count)

    def forward(_: Any, __: Any) -> list[Any]:
        # one op per shard, so that results are not views of the weight
        return [ops.where(s.cast(DType.int64) > 300, s, s) for s in shards]

    found = run(forward, [], backend, weights={weight.name: array})
    assert [list(map(int, s.shape)) for s in shards] == [list(v.shape) for v in found]
    return found


STRATEGIES: list[tuple[ShardingStrategy, tuple[int, ...], Any]] = [
    (ShardingStrategy.rowwise(3), (7, 4), [np.s_[:3], np.s_[3:5], np.s_[5:]]),
    (ShardingStrategy.rowwise(2), (6,), [np.s_[:3], np.s_[3:]]),
    (ShardingStrategy.columnwise(2), (4, 6), [np.s_[:, :3], np.s_[:, 3:]]),
    (ShardingStrategy.replicate(2), (4, 6), [np.s_[:], np.s_[:]]),
    (ShardingStrategy.axiswise(-1, 3), (2, 3, 4), [np.s_[..., :2], np.s_[..., 2:3], np.s_[..., 3:]]),
    (
        ShardingStrategy.head_aware_columnwise(2, 3, 4),
        (5, 12),
        [np.s_[:, :8], np.s_[:, 8:]],
    ),
    (
        ShardingStrategy.stacked_qkv(2, 4, 2, 2),
        (16, 3),
        [np.s_[[0, 1, 2, 3, 8, 9, 12, 13]], np.s_[[4, 5, 6, 7, 10, 11, 14, 15]]],
    ),
    (
        ShardingStrategy.gate_up(2),
        (2, 3, 8),
        [np.s_[:, :, [0, 1, 4, 5]], np.s_[:, :, [2, 3, 6, 7]]],
    ),
    # heads of two elements, of three, and a part without heads
    (
        ShardingStrategy.segmented(2, -1, [Segment(4, 2), Segment(9, 3), Segment(3, None)]),
        (2, 16),
        [np.s_[:, [0, 1, 4, 5, 6, 7, 8, 9, 13, 14]], np.s_[:, [2, 3, 10, 11, 12, 15]]],
    ),
]  # fmt: skip


@both
@pytest.mark.parametrize(
    ("strategy", "shape", "parts"), STRATEGIES, ids=[s.kind + str(d) for s, d, _ in STRATEGIES]
)
def test_strategies(
    rng: np.random.Generator, backend: str, strategy: ShardingStrategy, shape: Any, parts: Any
) -> None:
    array = rng.standard_normal(shape).astype(np.float32)
    weight = Weight("w", DType.float32, shape, CPU(), sharding_strategy=strategy)
    assert weight.sharding_strategy == strategy
    for got, part in zip(values_of(weight, array, backend, len(parts)), parts, strict=True):
        np.testing.assert_array_equal(got, array[part])


@both
@pytest.mark.parametrize(
    ("encoding", "per_block", "block_bytes"),
    [(QuantizationEncoding.Q4_0, 32, 18), (QuantizationEncoding.Q4_K, 256, 144)],
)
def test_encoded_weights_are_split_between_blocks(
    rng: np.random.Generator, backend: str, encoding: Any, per_block: int, block_bytes: int
) -> None:
    weight = Weight("w", DType.float32, (4, 5 * per_block), CPU(), encoding)
    array = rng.integers(0, 256, (4, 5 * block_bytes)).astype(np.uint8)
    weight.sharding_strategy = ShardingStrategy.columnwise(2)
    first, second = values_of(weight, array, backend, 2)
    np.testing.assert_array_equal(first, array[:, : 3 * block_bytes])
    np.testing.assert_array_equal(second, array[:, 3 * block_bytes :])
    shard = weight.shard(refs(2))[1]
    assert shard.quantization_encoding is encoding
    assert shard.original_dtype_and_shape == (DType.float32, [4, 2 * per_block])
    weight.sharding_strategy = ShardingStrategy.rowwise(2)
    np.testing.assert_array_equal(values_of(weight, array, backend, 2)[1], array[2:])
    weight.sharding_strategy = ShardingStrategy.head_aware_columnwise(2, 5, per_block // 2 * 2)
    assert weight.shard(refs(2))[0].shape[1] == 3 * block_bytes
    weight.sharding_strategy = ShardingStrategy.columnwise(6)
    with pytest.raises(ValueError, match=f"between multiples of {per_block} over 6 devices"):
        weight.shard(refs(6))


@settings(max_examples=50, deadline=None)
@given(
    sections=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
    unit=st.integers(1, 4),
    times=st.integers(1, 3),
    count=st.integers(1, 4),
)
def test_shards_are_a_partition(
    sections: tuple[int, ...], unit: int, times: int, count: int
) -> None:
    strategy = ShardingStrategy(count, "axiswise", 0, sections, unit)
    size = sum(sections) * unit * times
    if min(sections) * times < count:
        with pytest.raises(ValueError, match="cannot be split"):
            strategy.ranges("w", size, 0)
        return
    found = [r for i in range(count) for r in strategy.ranges("w", size, i)]
    covered = sorted(i for a, b in found for i in range(a, b))
    assert covered == list(range(size))
    assert all(a % unit == 0 and b > a for a, b in found)


@both
@pytest.mark.parametrize(
    ("strategy", "shape", "parts"), STRATEGIES[-2:], ids=["gate_up", "segmented"]
)
def test_a_strategy_is_a_function_of_a_weight(
    rng: np.random.Generator, backend: str, strategy: ShardingStrategy, shape: Any, parts: Any
) -> None:
    array = rng.standard_normal(shape).astype(np.float32)
    weight = Weight("w", DType.float32, shape, DeviceRef.CPU())
    results = run(
        lambda _, __: [strategy(weight, i) * 1 for i in range(2)],
        [], backend, weights={"w": array},
    )  # fmt: skip
    for got, part in zip(results, parts, strict=True):
        np.testing.assert_array_equal(got, array[part])
    with Graph("none"):
        with pytest.raises(IndexError, match="shard 2 of 2 devices"):
            strategy(weight, 2)
        with pytest.raises(ValueError, match="expert_parallel is a strategy of layers"):
            ShardingStrategy.expert_parallel(2)(weight, 0)


def test_what_a_strategy_splits() -> None:
    made = {
        "is_axiswise": ShardingStrategy.axiswise(1, 2),
        "is_gate_up": ShardingStrategy.gate_up(2),
        "is_head_aware_colwise": ShardingStrategy.head_aware_columnwise(2, 4, 8),
        "is_segmented": ShardingStrategy.segmented(2, 0, [Segment(4, None)]),
        "is_rowwise": ShardingStrategy.rowwise(2),
        "is_replicate": ShardingStrategy.replicate(2),
    }
    assert [strategy.sharded_axis for strategy in made.values()] == [1, 2, 1, 0, 0, None]
    for name in made:
        assert [kind for kind, strategy in made.items() if getattr(strategy, name)] == [name]


def test_segments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 heads cannot share 4 elements"):
        Segment(4, 3)
    with pytest.raises(ValueError, match="1 heads cannot share 0 elements"):
        Segment(0, None)
    with pytest.raises(ValueError, match="there are no segments"):
        ShardingStrategy.segmented(2, 0, [])
    with pytest.raises(TypeError, match="expected Segments, got 4"):
        ShardingStrategy.segmented(2, 0, [4])  # type: ignore[list-item]
    weight = Weight("w", DType.float32, (16, 4), CPU())
    weight.sharding_strategy = ShardingStrategy.segmented(2, 0, [Segment(4, 2), Segment(4, None)])
    with pytest.raises(ValueError, match=r"16 elements, which cannot be divided into 4\+4 parts"):
        weight.shard(refs(2))
    weight.sharding_strategy = ShardingStrategy.segmented(3, 0, [Segment(16, 2)])
    with pytest.raises(ValueError, match="between multiples of 8 over 3 devices"):
        weight.shard(refs(3))


def test_a_shard_follows_its_weight() -> None:
    weight = Weight("w", DType.float32, (4, 6), CPU())
    weight.sharding_strategy = ShardingStrategy.rowwise(2)
    shard = weight.shard(refs(2))[1]
    weight.name = "layers.0.w"
    assert (shard.name, shard.rank, shard.align) == ("layers.0.w.shards.1", 2, None)
    assert shard.sharding_strategy is weight.sharding_strategy
    assert "layers.0.w.shards.1" in repr(shard)


def test_what_is_refused() -> None:
    weight = Weight("w", DType.float32, (4, 6), CPU())
    with pytest.raises(ValueError, match="w: there is no sharding strategy"):
        weight.shard(refs(2))
    with pytest.raises(TypeError, match="expected a ShardingStrategy"):
        weight.sharding_strategy = "rowwise"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="tensor_parallel is a strategy of layers"):
        weight.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    weight.sharding_strategy = ShardingStrategy.rowwise(2)
    with pytest.raises(ValueError, match="3 devices, the sharding strategy rowwise is for 2"):
        weight.shard(refs(3))
    shard = weight.shard(refs(2))[0]
    with pytest.raises(ValueError, match="cannot be sharded further"):
        shard.shard(refs(2))
    with pytest.raises(ValueError, match="cannot be sharded further"):
        shard.sharding_strategy = ShardingStrategy.rowwise(2)
    for strategy, message in (
        (ShardingStrategy.axiswise(2, 2), "splits axis 2, the weight has rank 2"),
        (ShardingStrategy.rowwise(5), "axis 0 has 4 elements, which cannot be split over 5"),
        (ShardingStrategy.stacked_qkv(2, 3, 1, 2), r"cannot be divided into 3\+2\+2 parts"),
    ):
        weight.sharding_strategy = strategy
        with pytest.raises(ValueError, match=message):
            weight.shard(refs(strategy.num_devices))
    symbolic = Weight("s", DType.float32, ("n", 6), CPU())
    symbolic.sharding_strategy = ShardingStrategy.rowwise(2)
    with pytest.raises(ValueError, match="axis 0 is n, only a static axis"):
        symbolic.shard(refs(2))
    gptq = Weight("g", DType.uint8, (4, 6), CPU(), QuantizationEncoding.GPTQ)
    gptq.sharding_strategy = ShardingStrategy.columnwise(2)
    with pytest.raises(ValueError, match="GPTQ weights are not split"):
        gptq.shard(refs(2))
    with pytest.raises(ValueError, match="num_devices is 0"):
        ShardingStrategy.rowwise(0)
    with pytest.raises(IndexError, match="shard 2 of 2"):
        ShardingStrategy.rowwise(2).ranges("w", 4, 2)
