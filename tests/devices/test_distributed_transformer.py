"""A transformer over several virtual CPU devices has the same logits as on one device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from max import _interpreter, nn
from max.driver import Tensor
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, ShardingStrategy, TensorType
from max.nn.kv_cache import KVCacheParams, PagedCacheValues, paged_cache_types
from max.nn.transformer import ReturnLogits
from max.nn.transformer.distributed_transformer import (
    ShardableCallable,
    forward_sharded_layers,
    take,
)
from tests.devices.harness import BACKENDS, SIGNAL, Array, refs, session

both = pytest.mark.parametrize("backend", BACKENDS)
F32, CPU = DType.float32, DeviceRef.CPU
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB, LAYERS, PAGE = 12, 6, 4, 20, 31, 37, 3, 8
NEW, PAGES = [5, 1, 4], 4


def params_of(count: int, data_parallel: int = 1) -> KVCacheParams:
    return KVCacheParams(
        F32, KV_HEADS, HEAD_DIM, page_size=PAGE, n_devices=count, data_parallel_degree=data_parallel
    )


def build(count: int, variant: str, logits: ReturnLogits) -> Any:
    """Returns a model on `count` devices; the ordinary model for one."""
    devices = refs(count)
    rope = nn.RotaryEmbedding(HIDDEN, HEADS, 1000.0, 64, HEAD_DIM, interleaved=False)
    params = params_of(count)
    tensor_parallel = variant == "tensor_parallel_attention" and count > 1
    cls = nn.TensorParallelAttentionWithRope if tensor_parallel else nn.AttentionWithRope

    def block() -> Any:
        attention = cls(
            rope=rope, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HIDDEN,
            kv_params=params, devices=devices, has_bias=variant == "biased",
            stacked_qkv=variant == "stacked", use_qk_norm=variant == "normed",
        )  # fmt: skip
        mlp = nn.MLP(F32, None, HIDDEN, INNER, devices)
        norms = nn.RMSNorm(HIDDEN, F32), nn.RMSNorm(HIDDEN, F32)
        if count == 1:
            return nn.TransformerBlock(attention, mlp, *norms)
        return nn.DistributedTransformerBlock(attention, mlp, *norms, devices)

    layers = [block() for _ in range(LAYERS)]
    norm = nn.RMSNorm(HIDDEN, F32)
    if count == 1:
        output = nn.Linear(HIDDEN, VOCAB, F32, CPU())
        table = nn.Embedding(VOCAB, HIDDEN, F32, CPU())
        return nn.Transformer(
            HIDDEN, HEADS, layers, norm, output, table, params, rope, logits, logits_scaling=2.0
        )
    return nn.DistributedTransformer(
        HIDDEN, HEADS, layers, norm, nn.ColumnParallelLinear(HIDDEN, VOCAB, F32, devices),
        nn.VocabParallelEmbedding(VOCAB, HIDDEN, F32, devices), params, devices, rope, logits,
        use_subgraphs=variant != "unrolled",
        subgraph_layer_groups=[[0, 2]] if variant == "groups" else None, logits_scaling=2.0,
    )  # fmt: skip


def logits_of(model: Any, count: int, backend: str, steps: list[Array]) -> list[list[Array]]:
    """Returns the outputs of each step; a step adds the prompt or one token to each sequence."""
    devices, params, batch = refs(count), params_of(count), len(NEW)
    cache_types = [paged_cache_types(params, LAYERS, d, batch) for d in devices]
    types: list[Any] = [
        TensorType(DType.int64, ["total"], CPU()),
        TensorType(DType.int64, [1], CPU()),
        TensorType(DType.uint32, [batch + 1], CPU()),
        *(BufferType(DType.uint8, [SIGNAL], d) for d in devices),
        *(t for found in cache_types for t in found),
    ]
    with Graph("model", input_types=types) as graph:
        tokens, counts, offsets = (v.tensor for v in graph.inputs[:3])
        signals = [v.buffer for v in graph.inputs[3 : 3 + count]]
        rest = iter(graph.inputs[3 + count :])
        caches = [PagedCacheValues.of(take(rest, 4)) for _ in devices]
        if count == 1:
            graph.output(*model(tokens, caches[0], counts, offsets))
        else:
            graph.output(*model(tokens, signals, caches, counts, offsets))
    weights = model.state_dict()
    loaded = session().load(graph, weights_registry=weights) if backend == "engine" else None
    heads = KV_HEADS // count
    blocks = [
        np.zeros((batch * PAGES, 2, LAYERS, PAGE, heads, HEAD_DIM), np.float32) for _ in devices
    ]
    table = np.arange(batch * PAGES, dtype=np.uint32).reshape(batch, PAGES)
    cached, found = np.zeros(batch, np.uint32), []
    for step, tokens in enumerate(steps):
        new = np.array(NEW if step == 0 else [1] * batch, np.uint32)
        starts = np.concatenate([[0], np.cumsum(new)]).astype(np.uint32)
        longest = np.array([[new.max(), cached.max()]], np.uint32)
        inputs = [tokens, np.array([2], np.int64), starts]
        inputs += [np.zeros(SIGNAL, np.uint8) for _ in devices]
        for pages in blocks:
            inputs += [pages, cached.copy(), table, longest]
        if loaded is None:
            outputs = [np.array(y) for y in _interpreter.run(graph, inputs, weights)]
        else:
            where = [t.device.to_device() for t in types]
            tensors = [
                Tensor.from_numpy(x).to(d) if d.id else Tensor.from_numpy(x)
                for x, d in zip(inputs, where, strict=True)
            ]
            outputs = [np.array(y.to_numpy()) for y in loaded.execute(*tensors)]
            for pages, index in zip(blocks, range(3 + count, len(inputs), 4), strict=True):
                pages[...] = tensors[index].to_numpy()
        found.append(outputs)
        cached += new
    return found


def random_state(rng: np.random.Generator, model: Any) -> dict[str, Array]:
    return {
        name: (rng.standard_normal([int(d) for d in w.shape]) * 0.3).astype(np.float32)
        for name, w in model.raw_state_dict().items()
    }


VARIANTS = [
    "plain",
    "unrolled",
    "groups",
    "biased",
    "stacked",
    "normed",
    "tensor_parallel_attention",
]


@both
@pytest.mark.parametrize(
    ("variant", "count"), [(v, 2) for v in VARIANTS] + [("plain", 3), ("biased", 3)]
)
def test_logits(rng: np.random.Generator, backend: str, variant: str, count: int) -> None:
    kind = {"groups": ReturnLogits.ALL, "biased": ReturnLogits.VARIABLE}
    logits = kind.get(variant, ReturnLogits.LAST_TOKEN)
    one, several = build(1, variant, logits), build(count, variant, logits)
    state = random_state(rng, one)
    one.load_state_dict(state)
    several.load_state_dict(state)  # names and shapes equal those of the ordinary model
    steps = [rng.integers(0, VOCAB, sum(NEW)), rng.integers(0, VOCAB, len(NEW))]
    wanted = logits_of(one, 1, "interpreter", steps)
    for got, right in zip(logits_of(several, count, backend, steps), wanted, strict=True):
        assert len(got) == len(right)
        for y, z in zip(got, right, strict=True):
            np.testing.assert_allclose(y, z, rtol=1e-5, atol=1e-5 * max(1, np.abs(z).max()))


def attention(**options: Any) -> nn.AttentionWithRope:
    rope = nn.RotaryEmbedding(HIDDEN, HEADS, 1000.0, 64, HEAD_DIM)
    return nn.AttentionWithRope(
        rope=rope, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, hidden_size=HIDDEN,
        **{"kv_params": params_of(2), **options},
    )  # fmt: skip


def test_parts_of_attention() -> None:
    layer = attention(sharding_strategy=ShardingStrategy.tensor_parallel(2))
    first, second = layer.shard(refs(2))
    assert (first.n_heads, second.num_key_value_heads) == (6, 3)
    assert second.q_proj.weight.shape == [24, HIDDEN] and second.o_proj.weight.shape == [HIDDEN, 24]
    assert second.devices == [CPU(1)] and second.rope is layer.rope
    assert list(layer.raw_state_dict()) == [f"{p}_proj.weight" for p in "qkvo"]
    replicas = nn.DataParallelAttentionWithRope(
        rope=layer.rope, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        hidden_size=HIDDEN, kv_params=params_of(2, 2), devices=refs(2),
    )  # fmt: skip
    assert len(replicas.raw_state_dict()) == 4


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="12 query heads and 6 key heads cannot be divided evenly"):
        attention(sharding_strategy=ShardingStrategy.tensor_parallel(4))
    with pytest.raises(ValueError, match="give KVCacheParams n_devices=3"):
        attention(sharding_strategy=ShardingStrategy.tensor_parallel(3)).shard(refs(3))
    with pytest.raises(ValueError, match="0 devices, expected 2 or more"):
        nn.TensorParallelAttentionWithRope(
            rope=nn.RotaryEmbedding(HIDDEN, HEADS, 1000.0, 64, HEAD_DIM), num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, hidden_size=HIDDEN, kv_params=params_of(1),
        )  # fmt: skip
    with pytest.raises(AssertionError, match="1 layers, 0 inputs"):
        forward_sharded_layers([lambda x: x], [])
    norm: Any = nn.RMSNorm(HIDDEN, F32)
    assert isinstance(norm, ShardableCallable)
    with pytest.raises(TypeError, match="Sequential cannot be split"):
        nn.DistributedTransformerBlock(attention(), nn.Sequential([]), norm, norm, refs(2))  # type: ignore[arg-type]
