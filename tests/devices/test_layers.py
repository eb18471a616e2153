"""Layers on several virtual CPU devices give the same results as on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from max import nn
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, ShardingStrategy, TensorType, ops
from max.nn.comm import Allreduce, Signals
from max.nn.layer import Shardable
from max.nn.linear import DistributedGemmConfig
from tests.devices.harness import BACKENDS, Array, refs, run, session
from tests.tolerance import assert_close

both = pytest.mark.parametrize("backend", BACKENDS)
counts = pytest.mark.parametrize("count", [2, 3])
CPU, F32 = DeviceRef.CPU, DType.float32


def random_state(rng: np.random.Generator, layer: nn.Module) -> dict[str, Array]:
    state = {
        name: rng.standard_normal([int(d) for d in w.shape]).astype(w.dtype.to_numpy())
        for name, w in layer.raw_state_dict().items()
    }
    layer.load_state_dict(state)
    return state


def torch_linear(x: Array, weight: Array, bias: Array | None) -> Array:
    tensors = [torch.from_numpy(a) for a in (x, weight)]
    return torch.nn.functional.linear(
        *tensors, None if bias is None else torch.from_numpy(bias)
    ).numpy()


@both
@counts
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["rowwise", "columnwise", "replicate"])
def test_linear(rng: np.random.Generator, backend: str, count: int, bias: bool, kind: str) -> None:
    layer = nn.Linear(14, 10, F32, CPU(), has_bias=bias)
    layer.sharding_strategy = getattr(ShardingStrategy, kind)(count)
    assert isinstance(layer, Shardable)
    parts = layer.shard(refs(count))
    state = random_state(rng, layer)
    x = rng.standard_normal((5, 14)).astype(np.float32)

    def forward(values: list[Any], signals: list[Any]) -> Any:
        xs = [values[0].to(device) for device in refs(count)]
        if kind == "columnwise":
            cuts = [int(p.weight.shape[1]) for p in parts]
            starts = np.cumsum([0, *cuts])
            xs = [v[:, int(a) : int(a) + n] for v, a, n in zip(xs, starts, cuts, strict=False)]
        ys = [part(v) for part, v in zip(parts, xs, strict=True)]
        if kind == "rowwise":
            return ops.allgather(ys, signals, -1)
        return ops.allreduce.sum(ys, signals) if kind == "columnwise" else ys

    ys = run(forward, [x], backend, weights=layer.state_dict(), signals=count)
    wanted = torch_linear(x, state["weight"], state.get("bias"))
    for y in ys:
        assert_close(y, wanted, scale=4)


@both
@counts
def test_column_parallel_linear(rng: np.random.Generator, backend: str, count: int) -> None:
    layer = nn.ColumnParallelLinear(6, 11, F32, refs(count), has_bias=True)
    state = random_state(rng, layer)
    x = rng.standard_normal((4, 6)).astype(np.float32)
    ys = run(layer, [x] * count, backend, weights=layer.state_dict(), signals=count)
    for y in ys:
        assert_close(y, torch_linear(x, state["weight"], state["bias"]), scale=4)
    other = nn.ColumnParallelLinear(6, 11, F32, refs(count), tied_weight=layer.weight)
    assert other.raw_state_dict() == {}
    only = {"weight": state["weight"]}
    ys = run(other, [x] * count, backend, weights=only, signals=count)
    assert_close(ys[-1], torch_linear(x, state["weight"], None), scale=4)
    with pytest.raises(ValueError, match=f"1 inputs for {count} devices"):
        other([x], [])  # type: ignore[list-item]


@both
@counts
@pytest.mark.parametrize("bias", [False, True])
def test_mlp(rng: np.random.Generator, backend: str, count: int, bias: bool) -> None:
    layer = nn.MLP(F32, None, 12, 35, refs(count), has_bias=bias)
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(count)
    parts = layer.shard(refs(count))
    random_state(rng, layer)
    x = rng.standard_normal((5, 12)).astype(np.float32)

    def split(values: list[Any], signals: list[Any]) -> Any:
        ys = [part(values[0].to(device)) for part, device in zip(parts, refs(count), strict=True)]
        return Allreduce(count)(ys, signals)

    weights = layer.state_dict()
    (wanted,) = run(lambda v, _: [layer(v[0])], [x], "interpreter", weights=weights)
    for y in run(split, [x], backend, weights=weights, signals=count):
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


@both
@counts
def test_vocab_parallel_embedding(rng: np.random.Generator, backend: str, count: int) -> None:
    layer = nn.VocabParallelEmbedding(10, 4, F32, refs(count))
    table = random_state(rng, layer)["weight"]
    indices = rng.integers(0, 10, (3, 5))
    ys = run(lambda v, s: layer(v[0], s), [indices], backend, weights=layer.state_dict(),
             signals=count)  # fmt: skip
    assert len(ys) == count
    for y in ys:
        np.testing.assert_array_equal(y, table[indices])


@both
def test_norms(rng: np.random.Generator, backend: str) -> None:
    x = rng.standard_normal((3, 8)).astype(np.float32)
    norms: list[Any] = [
        nn.RMSNorm(8, F32),
        nn.LayerNorm(8, refs(1), F32),
        nn.LayerNorm(8, refs(1), F32, use_bias=False),
    ]
    for norm in norms:
        norm.sharding_strategy = ShardingStrategy.replicate(2)
        parts = norm.shard(refs(2))
        random_state(rng, norm)
        weights = norm.state_dict()
        (wanted,) = run(lambda v, _, n=norm: [n(v[0])], [x], backend, weights=weights)
        ys = run(
            lambda v, _, p=parts: [q(v[0].to(d)) for q, d in zip(p, refs(2), strict=True)],
            [x],
            backend,
            weights=weights,
        )
        for y in ys:
            assert_close(y, wanted)
        with pytest.raises(ValueError, match="is rowwise, expected replicate"):
            norm.sharding_strategy = ShardingStrategy.rowwise(2)


def test_signals_and_allreduce() -> None:
    signals = Signals(refs(2))
    buffers = signals.buffers()
    assert [b.num_elements for b in buffers] == [Signals.NUM_BYTES] * 2
    assert [b.device.id for b in buffers] == [0, 1]
    assert all(isinstance(t, BufferType) for t in signals.input_types())
    with pytest.raises(ValueError, match="expected each once"):
        Signals([CPU(), CPU()])
    with pytest.raises(ValueError, match="no device"):
        Signals([])
    with pytest.raises(ValueError, match="expected 1 or more"):
        Allreduce(0)
    assert len(Allreduce(3).devices) == 3
    with Graph("g", input_types=signals.input_types()) as graph:
        x = ops.constant(1.0, F32)
        with pytest.raises(ValueError, match="1 inputs for 3 devices"):
            Allreduce(3)([x], [graph.inputs[0].buffer])
    assert DistributedGemmConfig.generate() == DistributedGemmConfig(True)


def test_a_shard_in_a_module_is_not_in_its_state_dict() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            self.whole = nn.Linear(4, 4, F32, CPU())
            self.whole.sharding_strategy = ShardingStrategy.rowwise(2)
            self.first, self.second = self.whole.shard(refs(2))

        def __call__(self) -> None: ...

    assert list(Holder().raw_state_dict()) == ["whole.weight"]


def test_what_is_refused() -> None:
    linear = nn.Linear(4, 4, F32, CPU())
    with pytest.raises(ValueError, match="Linear: there is no sharding strategy"):
        linear.shard(refs(2))
    linear.sharding_strategy = ShardingStrategy.rowwise(2)
    with pytest.raises(ValueError, match="1 devices, the sharding strategy rowwise is for 2"):
        linear.shard(refs(1))
    mlp = nn.MLP(F32, None, 4, 8, refs(1))
    with pytest.raises(ValueError, match="MLP: the sharding strategy is columnwise, expected"):
        mlp.sharding_strategy = ShardingStrategy.columnwise(2)
    with pytest.raises(TypeError, match="expected a ShardingStrategy"):
        mlp.sharding_strategy = 2  # type: ignore[assignment]
    with pytest.raises(ValueError, match="no device"):
        nn.VocabParallelEmbedding(4, 4, F32, [])
    with pytest.raises(ValueError, match="no device"):
        nn.ColumnParallelLinear(4, 4, F32, [])


def test_parts_are_copied_once_and_sums_are_epilogues() -> None:
    layer = nn.MLP(F32, None, 64, 256, refs(2))
    layer.sharding_strategy = ShardingStrategy.tensor_parallel(2)
    parts = layer.shard(refs(2))
    weights = layer.state_dict()
    types = [BufferType(DType.uint8, [4], d) for d in refs(2)]
    with Graph("mlp", input_types=[TensorType(F32, ["n", 64], CPU()), *types]) as graph:
        x = graph.inputs[0].tensor
        ys = [part(x.to(d)) for part, d in zip(parts, refs(2), strict=True)]
        total = ops.allreduce.sum(ys, [v.buffer for v in graph.inputs[1:]])
        graph.output(x + total[0])
    model = session().load(graph, weights_registry=weights)
    program = model._compiled
    # shards of columns are copied before packing, shards of rows are not
    names = [launch.name for launch in program.once[0].launches]
    assert names.count("pack") == 6 and len(names) == 8
    # per device: gate and up with the fused activation, and down; sum and residual add no launch
    assert len(program.main.launches) == 4
