"""Programs as users of 26.x write them: modules made lazily, compiled with weights of their own, buffers, subgraphs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession
from max.experimental import functional as F
from max.experimental.nn import Conv2d, GroupNorm, Linear, Module, ModuleList, Sequential
from max.experimental.tensor import Tensor, default_device, default_dtype
from max.graph import (
    BufferType,
    DeviceRef,
    Graph,
    ProfileScopeColor,
    ShardingStrategy,
    TensorType,
    TensorValue,
    ops,
)
from max.graph.weights import load_weights
from max.nn import LayerList
from max.nn import Linear as GraphLinear
from max.nn import Module as GraphModule
from max.nn import RMSNorm as GraphRMSNorm
from max.nn.kernels import scatter_nd_skip_oob_indices

rng = np.random.default_rng(26)
REF = DeviceRef.CPU()
f32 = DType.float32
Array = np.ndarray[Any, Any]


def drawn(module: Module[..., Any]) -> dict[str, Array]:
    """A small random array for each parameter of a module, whose own values are not computed."""
    return {
        name: (rng.standard_normal([int(d) for d in tensor.shape]) / 3).astype(np.float32)
        for name, tensor in module.parameters
    }


def close(got: Any, want: Array) -> None:
    got = got.to_numpy() if hasattr(got, "to_numpy") else got
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


class Gelu(Module[[Tensor], Tensor]):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


def perceptron() -> None:
    """A perceptron in `Sequential`, made under the defaults of a context, compiled for any batch."""
    with F.lazy(), default_device(CPU()), default_dtype(f32):
        model = Sequential(Linear(7, 12), Gelu(), Linear(12, 5), Linear(5, 3, bias=False))
    weights = drawn(model)
    compiled = model.compile(TensorType(f32, ("batch", 7), REF), weights=weights)
    for batch in (1, 4):
        x = rng.standard_normal((batch, 7)).astype(np.float32)
        h = x @ weights["0.weight"].T + weights["0.bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        h = h @ weights["2.weight"].T + weights["2.bias"]
        close(compiled(Tensor(x)), h @ weights["3.weight"].T)


class Classifier(Module[[Tensor], Tensor]):
    def __init__(self) -> None:
        self.convs = ModuleList([
            Conv2d(3, 3, 8, stride=1, padding=1, has_bias=True, permute=True),
            Conv2d(3, 8, 8, stride=2, padding=1, has_bias=True, permute=True),
        ])  # fmt: skip
        self.norm = GroupNorm(2, 8)
        self.head = Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.relu(conv(x))
        x = self.norm(x)
        x = F.mean(F.mean(x, axis=-1), axis=-2)
        return self.head(F.reshape(x, [x.shape[0], 8]))


def convolutions() -> None:
    """Convolutions of images with channels first, a group norm, means over pixels."""
    with F.lazy():
        model = Classifier()
    weights = drawn(model)
    compiled = model.compile(TensorType(f32, ("batch", 3, 9, 11), REF), weights=weights)
    import torch
    import torch.nn.functional as T

    w = {name: torch.from_numpy(value) for name, value in weights.items()}
    image = rng.standard_normal((2, 3, 9, 11)).astype(np.float32)
    x = torch.from_numpy(image)
    for index, stride in ((0, 1), (1, 2)):
        prefix = f"convs.{index}."
        x = T.relu(T.conv2d(x, w[prefix + "weight"], w[prefix + "bias"], stride, padding=1))
    x = T.group_norm(x, 2, w["norm.weight"], w["norm.bias"]).mean((-1, -2))
    close(compiled(Tensor(image)), T.linear(x, w["head.weight"], w["head.bias"]).numpy())


class CachedAttention(Module[..., Tensor]):
    def __init__(self, width: int, heads: int) -> None:
        self.heads, self.size = heads, width // heads
        self.qkv = Linear(width, 3 * width, bias=False)
        self.out = Linear(width, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        width = self.heads * self.size
        q, k, v = F.split(self.qkv(x), [width, width, width], axis=-1)
        row = slice(TensorValue(at), TensorValue(at + 1))
        F.buffer_store_slice(keys, k, [(row, 1)])
        F.buffer_store_slice(values, v, [(row, 1)])
        room = keys.shape[0]
        heads = [room, self.heads, self.size]
        k, v = (F.permute(F.reshape(t[...], heads), [1, 0, 2]) for t in (keys, values))
        q = F.reshape(q, [self.heads, 1, self.size])
        scores = q @ F.transpose(k, 1, 2) * self.size**-0.5
        places = F.arange(0, room, 1, dtype=DType.int64, device=CPU())
        seen = places <= at
        lowest = F.constant(float("-inf"), dtype=f32, device=CPU())
        mixed = F.softmax(F.where(seen, scores, lowest)) @ v
        return self.out(F.reshape(mixed, [1, width]))


def cached_attention() -> None:
    """Attention of one token at a time over keys and values in buffers, which the caller keeps."""
    with F.lazy():
        model = CachedAttention(12, 3)
    weights = drawn(model)
    room = BufferType(f32, (6, 12), REF)
    compiled = model.compile(
        TensorType(f32, (1, 12), REF), room, room, TensorType(DType.int64, (), REF), weights=weights
    )
    keys, values = (Tensor(np.zeros((6, 12), np.float32)) for _ in range(2))
    xs = rng.standard_normal((4, 12)).astype(np.float32)
    got = [
        compiled(Tensor(xs[i : i + 1]), keys, values, Tensor(i, dtype=DType.int64, device=CPU()))
        for i in range(4)
    ]
    q, k, v = np.split(xs @ weights["qkv.weight"].T, 3, axis=1)
    close(keys.to_numpy()[:4], k)
    for i in range(4):
        mixed = []
        for head in np.split(np.arange(12), 3):
            scores = k[: i + 1, head] @ q[i, head] / 2
            share = np.exp(scores - scores.max())
            mixed.append(share / share.sum() @ v[: i + 1, head])
        close(got[i], np.concatenate(mixed)[None] @ weights["out.weight"].T)


class Denoiser(Module[..., Tensor]):
    def __init__(self, width: int) -> None:
        self.width = width
        self.time = Linear(width, width)
        self.into = Linear(2, width)
        self.out = Linear(width, 2)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        half = self.width // 2
        steps = F.arange(0, half, 1, dtype=f32, device=CPU())
        angles = step * F.exp(steps * (-np.log(1e4) / half))
        code = F.concat([F.sin(angles), F.cos(angles)])
        return self.out(F.silu(self.into(x) + self.time(code)))


def diffusion_step() -> None:
    """A step of DDIM: noise is predicted from a position code of the step, the sample is clipped and mixed again."""

    class Step(Module[..., Tensor]):
        def __init__(self) -> None:
            self.model = Denoiser(8)

        def forward(self, x: Tensor, step: Tensor, now: Tensor, then: Tensor) -> Tensor:
            noise = self.model(x, step)
            clean = F.clip((x - F.sqrt(1 - now) * noise) / F.sqrt(now), -1.0, 1.0)
            return F.sqrt(then) * clean + F.sqrt(1 - then) * noise

    with F.lazy():
        model = Step()
    w = drawn(model)
    scalar = TensorType(f32, (), REF)
    compiled = model.compile(TensorType(f32, ("n", 2), REF), scalar, scalar, scalar, weights=w)
    x = rng.standard_normal((5, 2)).astype(np.float32)
    step, now, then = 17.0, 0.4, 0.7
    given = [Tensor(value, dtype=f32, device=CPU()) for value in (step, now, then)]
    angles = step * np.exp(np.arange(4) * (-np.log(1e4) / 4))
    code = np.concatenate([np.sin(angles), np.cos(angles)])
    hidden = x @ w["model.into.weight"].T + w["model.into.bias"]
    hidden = hidden + code @ w["model.time.weight"].T + w["model.time.bias"]
    hidden = hidden / (1 + np.exp(-hidden))
    noise = hidden @ w["model.out.weight"].T + w["model.out.bias"]
    clean = np.clip((x - np.sqrt(1 - now) * noise) / np.sqrt(now), -1, 1)
    close(compiled(Tensor(x), *given), np.sqrt(then) * clean + np.sqrt(1 - then) * noise)


def own_function() -> None:
    """A function of values of graphs, made one of tensors, in a module and beside a kernel of the library."""

    def squared_relu(x: TensorValue, limit: float = 4.0) -> TensorValue:
        kept = ops.min(ops.relu(x), ops.constant(limit, x.dtype, x.device))
        return kept * kept

    class Table(Module[..., Tensor]):
        def forward(self, table: Tensor, rows: Tensor, places: Tensor) -> Tensor:
            written = F.functional(scatter_nd_skip_oob_indices)(table, rows, places)
            return F.functional(squared_relu)(written, limit=2.0)

    compiled = Table().compile(
        TensorType(f32, ("n", 3), REF), TensorType(f32, ("m", 3), REF), TensorType(DType.int64, ("m", 1), REF)
    )  # fmt: skip
    table, rows = (rng.standard_normal(s).astype(np.float32) for s in ((5, 3), (3, 3)))
    places = np.array([[4], [9], [-5]])
    want = table.copy()
    want[4], want[0] = rows[0], rows[2]
    close(compiled(*[Tensor(value) for value in (table, rows, places)]), np.clip(want, 0, 2) ** 2)


def sharded_linear() -> None:
    """A linear layer whose rows are on two devices: both halves of the result are brought together."""
    places = [DeviceRef.CPU(0), DeviceRef.CPU(1)]
    layer = GraphLinear(6, 10, f32, places[0])
    layer.sharding_strategy = ShardingStrategy.rowwise(2)
    shards = layer.shard(places)
    with Graph("sharded", input_types=[TensorType(f32, ("n", 6), places[0])]) as graph:
        x = graph.inputs[0].tensor
        parts = [
            shard(x.to(place)).to(places[0]) for shard, place in zip(shards, places, strict=True)
        ]
        graph.output(ops.concat(parts, axis=-1))
    weight = rng.standard_normal((10, 6)).astype(np.float32)
    session = InferenceSession(devices=[CPU(0), CPU(1)])
    model = session.load(graph, weights_registry={"weight": weight})
    x = rng.standard_normal((3, 6)).astype(np.float32)
    close(model.execute(x)[0], x @ weight.T)


class Layer(GraphModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = GraphRMSNorm(width, f32, 1e-5)
        self.fc = GraphLinear(width, width, f32, REF)

    def __call__(self, x: TensorValue) -> TensorValue:
        return x + ops.silu(self.fc(self.norm(x)))


class Stack(GraphModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = LayerList([Layer(8) for _ in range(3)])

    def __call__(self, x: TensorValue) -> TensorValue:
        inner = self.layers[0].build_subgraph("layer", inputs=[x], weight_prefix="layers.0.")
        for index in range(len(self.layers)):
            with Graph.current.profile_scope(f"layer {index}", color=ProfileScopeColor.BLUE):
                (x,) = ops.call(inner, x, prefix=f"layers.{index}.")
        return x.tensor


def subgraphs() -> None:
    """Layers of one subgraph, called with the prefixes of their weights, in scopes of a profile."""
    stack = Stack()
    weights = {
        name: rng.standard_normal([int(d) for d in weight.shape]).astype(np.float32)
        for name, weight in stack.raw_state_dict().items()
    }
    stack.load_state_dict(weights)
    with Graph("stack", input_types=[TensorType(f32, ("n", 8), REF)]) as graph:
        graph.output(stack(graph.inputs[0].tensor))
    model = InferenceSession(devices=[CPU()]).load(graph, weights_registry=stack.state_dict())
    x = rng.standard_normal((4, 8)).astype(np.float32)
    want = x
    for index in range(3):
        part = {name: weights[f"layers.{index}.{name}"] for name in ("norm.weight", "fc.weight")}
        normed = want / np.sqrt((want**2).mean(-1, keepdims=True) + 1e-5) * part["norm.weight"]
        hidden = normed @ part["fc.weight"].T
        want = want + hidden / (1 + np.exp(-hidden))
    close(model.execute(Buffer.from_numpy(x))[0], want)


def saved_weights() -> None:
    """Parameters in a safetensors file, read lazily and given to a module and to its compilation."""
    from safetensors.numpy import save_file

    with F.lazy():
        model = Sequential(Linear(5, 6), Linear(6, 2))
    values = drawn(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(values, str(path))
        state = {name: weight.data() for name, weight in load_weights([path]).items()}
        assert set(state) == set(values)
        assert {name: tuple(int(d) for d in data.shape) for name, data in state.items()} == {
            name: value.shape for name, value in values.items()
        }
        compiled = model.compile(TensorType(f32, ("n", 5), REF), weights=state)
        model.load_state_dict(state)
        x = rng.standard_normal((3, 5)).astype(np.float32)
        hidden = x @ values["0.weight"].T + values["0.bias"]
        want = hidden @ values["1.weight"].T + values["1.bias"]
        close(compiled(Tensor(x)), want)
        close(model(Tensor(x)), want)


def sampling() -> None:
    """Tokens drawn by the Gumbel trick from a seed that is an input of the graph."""
    kinds = [TensorType(f32, ("n", 4), REF), TensorType(DType.int64, (), REF)]
    with Graph("draw", input_types=kinds) as graph:
        logits, seed = (value.tensor for value in graph.inputs)
        ops.random.set_seed(seed)
        noise = ops.random.uniform(logits.type, (1e-6, 1.0 - 1e-6))
        drawn = ops.argmax(logits - ops.log(-ops.log(noise)), axis=-1)
        graph.output(ops.squeeze(drawn, -1), noise)
    model = InferenceSession(devices=[CPU()]).load(graph)
    shares = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    logits = np.tile(np.log(shares), (4000, 1))
    first, noise = (out.to_numpy() for out in model.execute(logits, np.int64(5)))
    again, _ = (out.to_numpy() for out in model.execute(logits, np.int64(5)))
    other, _ = (out.to_numpy() for out in model.execute(logits, np.int64(6)))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    np.testing.assert_array_equal(first, (logits - np.log(-np.log(noise))).argmax(-1))
    np.testing.assert_allclose(np.bincount(first, minlength=4) / 4000, shares, atol=0.04)


PROGRAMS = [
    perceptron,
    convolutions,
    cached_attention,
    diffusion_step,
    own_function,
    sharded_linear,
    subgraphs,
    saved_weights,
    sampling,
]
