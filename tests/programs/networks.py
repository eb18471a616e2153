"""Programs that build networks from `max.nn` modules, weights and constants."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from max import driver, engine, nn
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Dim, Graph, Shape, TensorType, TensorValue, Weight, ops
from max.graph.ops import InterpolationMode, elementwise
from max.graph.weights import WeightData, load_weights
from max.nn.attention import mask_config
from max.nn.kernels import flash_attention_gpu

rng = np.random.default_rng(7)
REF = DeviceRef.CPU()
F32 = DType.float32


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def run(graph: Graph, *inputs: np.ndarray, **options) -> list[np.ndarray]:
    model = InferenceSession(devices=[CPU()]).load(graph, **options)
    return [t.to_numpy() for t in model.execute(*inputs)]


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    centered = x - x.mean(-1, keepdims=True)
    return centered / np.sqrt((centered**2).mean(-1, keepdims=True) + eps) * weight + bias


def relu_mlp_of_constants() -> None:
    """A module that holds constants and is constructed inside the graph."""
    shapes = {"W1": (8, 5), "b1": (8,), "W2": (1, 8), "b2": (1,)}
    weights = {name: normal(*shape) for name, shape in shapes.items()}

    class Regressor(nn.Module):
        def __init__(self, weights: dict[str, np.ndarray]) -> None:
            super().__init__()
            self.W1 = ops.constant(weights["W1"].astype(np.float32), dtype=F32, device=REF)
            self.b1 = ops.constant(weights["b1"].astype(np.float32), dtype=F32, device=REF)
            self.W2 = ops.constant(weights["W2"].astype(np.float32), dtype=F32, device=REF)
            self.b2 = ops.constant(weights["b2"].astype(np.float32), dtype=F32, device=REF)

        def __call__(self, x: TensorValue) -> TensorValue:
            h = ops.relu(ops.add(ops.matmul(x, ops.transpose(self.W1, 0, 1)), self.b1))
            return ops.add(ops.matmul(h, ops.transpose(self.W2, 0, 1)), self.b2)

    with Graph("mlp", input_types=[TensorType(F32, shape=[3, 5], device=REF)]) as graph:
        graph.output(Regressor(weights)(graph.inputs[0].tensor))
    x = normal(3, 5)
    hidden = np.maximum(x @ weights["W1"].T + weights["b1"], 0)
    np.testing.assert_allclose(
        run(graph, x)[0], hidden @ weights["W2"].T + weights["b2"], rtol=1e-4, atol=1e-5
    )


def digits() -> None:
    """A CNN on NCHW images, converted to NHWC by transposes of adjacent axes."""
    import torch
    import torch.nn.functional as F

    filters, bias, head = normal(6, 1, 3, 3), normal(6), normal(10, 6 * 7 * 7, scale=0.1)

    def forward(x):
        x = ops.transpose(ops.transpose(x, 1, 2), 2, 3)
        rscf = ops.constant(filters.transpose(2, 3, 1, 0).copy(), dtype=F32, device=REF)
        bias_ = ops.constant(bias, dtype=F32, device=REF)
        x = ops.conv2d(x, rscf, bias=bias_, stride=(1, 1), padding=(1, 1, 1, 1))
        x = ops.max_pool2d(ops.relu(x), kernel_size=(2, 2), stride=(2, 2))
        x = ops.flatten(x, start_dim=1)
        return ops.matmul(x, ops.transpose(ops.constant(head, dtype=F32, device=REF), 0, 1))

    graph = Graph("cnn", forward, input_types=[TensorType(F32, [2, 1, 14, 14], REF)])
    x = normal(2, 1, 14, 14)
    y = F.max_pool2d(
        F.relu(F.conv2d(torch.tensor(x), torch.tensor(filters), torch.tensor(bias), padding=1)), 2
    )
    want = y.permute(0, 2, 3, 1).reshape(2, -1).numpy() @ head.T
    np.testing.assert_allclose(run(graph, x)[0], want, rtol=1e-4, atol=1e-4)


def detector() -> None:
    """Blocks of a detector: weights by name, channels from shapes, resizing, concatenated outputs."""
    registry: dict[str, np.ndarray] = {}

    class Conv:
        def __init__(self, c1, c2, k=1, s=1, name="conv") -> None:
            self.weight = Weight(name=f"{name}.weight", dtype=F32, shape=[k, k, c1, c2], device=REF)
            self.bias = Weight(name=f"{name}.bias", dtype=F32, shape=[c2], device=REF)
            registry[f"{name}.weight"] = normal(k, k, int(c1), c2, scale=0.2)
            registry[f"{name}.bias"] = normal(c2)
            self.s, self.p, self.act = s, k // 2, ops.silu

        def __call__(self, x):
            out = ops.conv2d(x, self.weight, stride=(self.s, self.s), padding=(self.p,) * 4)
            return self.act(out + self.bias.to(x.device).reshape((1, 1, 1, -1)))

    with Graph("detector", input_types=[TensorType(F32, [1, 16, 16, 3], device=REF)]) as graph:
        x = graph.inputs[0]
        stem = Conv(3, 8, 3, 2, name="stem")(x)
        low = Conv(stem.shape[3], 8, 3, 2, name="low")(stem)
        a, b = ops.split(low, [4, 4], axis=3)
        low = ops.concat([a, b, Conv(4, 4, 3, name="block")(b)], axis=3)
        channels_first = low.permute([0, 3, 1, 2])
        n, c, h, w = channels_first.shape
        up = ops.resize(
            channels_first,
            [n, c, int(int(h) * 2.0), int(w) * 2],
            interpolation=InterpolationMode.BICUBIC,
        )
        joined = ops.concat([up.permute([0, 2, 3, 1]), stem], axis=3)
        pooled = ops.max_pool2d(joined, kernel_size=(5, 5), padding=2, stride=1)
        heads = [
            Conv(pooled.shape[3], 5, 1, name=f"head.{i}")(t) for i, t in enumerate([joined, pooled])
        ]
        graph.output(*[head.permute([0, 3, 1, 2]) for head in heads])

    image = normal(1, 16, 16, 3)
    session = engine.InferenceSession(devices=[driver.CPU()])
    model = session.load(graph, weights_registry=registry)
    outputs = [t.to_numpy() for t in model.execute(driver.Tensor.from_numpy(image))]
    assert [o.shape for o in outputs] == [(1, 5, 8, 8)] * 2

    import torch
    import torch.nn.functional as F

    def conv(x, name, stride=1):
        weight = torch.tensor(registry[f"{name}.weight"]).permute(3, 2, 0, 1)
        bias = torch.tensor(registry[f"{name}.bias"])
        return F.silu(F.conv2d(x, weight, bias, stride, weight.shape[-1] // 2))

    stem = conv(torch.tensor(image).permute(0, 3, 1, 2), "stem", 2)
    low = conv(stem, "low", 2)
    low = torch.cat([low, conv(low[:, 4:], "block")], 1)
    up = F.interpolate(low, scale_factor=2, mode="bicubic", align_corners=False)
    joined = torch.cat([up, stem], 1)
    for i, t in enumerate([joined, F.max_pool2d(joined, 5, 1, 2)]):
        np.testing.assert_allclose(outputs[i], conv(t, f"head.{i}").numpy(), rtol=1e-2, atol=1e-2)


def projection_of_a_checkpoint() -> None:
    """A single layer, its weight given as `WeightData`."""
    name = "decoder.0.fused"
    w = normal(24, 16)
    weights = {
        name + ".weight": WeightData(w, name=name + ".weight", dtype=F32, shape=Shape(w.shape))
    }
    with Graph("fused", input_types=[TensorType(F32, [2, 3, 16], device=REF)]) as graph:
        linear = nn.Linear(16, 24, F32, REF, has_bias=False, name=name)
        graph.output(linear(graph.inputs[0].tensor))
    x = normal(2, 3, 16)
    got = run(graph, x, weights_registry=weights)[0]
    np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-5)


def audio_encoder() -> None:
    """Attention from single ops: products, a softmax without an axis, norms with positional arguments."""
    dim, length, mels = 12, 10, 5
    projection, wq, wk, wv, wo = (
        normal(*shape, scale=0.3) for shape in [(dim, mels), (dim, 4), (dim, 4), (dim, 4), (4, dim)]
    )

    def const(array):
        return ops.constant(array, dtype=F32, device=REF)

    input_type = TensorType(dtype=F32, shape=(1, mels, length), device=REF)
    with Graph("encoder", input_types=(input_type,)) as graph:
        x = ops.permute(graph.inputs[0], [0, 2, 1])
        x = ops.matmul(ops.reshape(x, (length, mels)), ops.transpose(const(projection), 0, 1))
        x = ops.reshape(elementwise.gelu(x), (1, length, dim))
        ones, zeros = (
            const(np.ones(dim).astype(np.float32)),
            const(np.zeros(dim).astype(np.float32)),
        )
        batch, steps = x.shape[0], x.shape[1]
        flat = ops.reshape(ops.layer_norm(x, ones, zeros, 1e-5), (batch * steps, dim))
        q, k, v = (ops.matmul(flat, const(w)) for w in (wq, wk, wv))
        scores = ops.matmul(q, ops.transpose(k, -2, -1))
        scores = ops.mul(scores, ops.constant(1.0 / np.sqrt(4), dtype=F32, device=REF))
        out = ops.matmul(ops.matmul(ops.softmax(scores), v), const(wo))
        graph.output(ops.add(x, ops.reshape(out, (batch, steps, dim))))
    mel = normal(1, mels, length)
    x = mel.transpose(0, 2, 1) @ projection.T
    x = 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    flat = norm(x, np.ones(dim), np.zeros(dim), 1e-5)[0]
    want = x + softmax((flat @ wq) @ (flat @ wk).T / 2) @ (flat @ wv) @ wo
    np.testing.assert_allclose(run(graph, mel)[0], want, rtol=1e-3, atol=1e-4)


class CausalSelfAttention(nn.Module):
    def __init__(self, n_head: int, n_embd: int, device: DeviceRef | None = None) -> None:
        super().__init__()
        self.n_head, self.n_embd = n_head, n_embd
        self.device = device or DeviceRef.CPU()
        self.c_attn = nn.Linear(
            in_dim=n_embd, out_dim=n_embd * 3, has_bias=True, dtype=F32, device=self.device
        )
        self.c_proj = nn.Linear(
            in_dim=n_embd, out_dim=n_embd, has_bias=True, dtype=F32, device=self.device
        )

    def __call__(self, x: TensorValue) -> TensorValue:
        B, T, C = x.shape
        assert C == self.n_embd
        q, k, v = ops.split(self.c_attn(x), [self.n_embd] * 3, axis=2)
        size = self.n_embd // self.n_head
        q, k, v = (ops.reshape(y, [B, T, self.n_head, size]) for y in (q, k, v))
        y = flash_attention_gpu(
            q,
            k,
            v,
            mask_variant=mask_config.MHAMaskVariant.CAUSAL_MASK,
            scale=1 / math.sqrt(int(k.shape[-1])),
        )
        y = y.reshape((B, T, C))
        return self.c_proj(y)


class Block(nn.Module):
    def __init__(self, n_head: int, n_embd: int, epsilon: float, device: DeviceRef) -> None:
        super().__init__()
        from max.nn.norm import LayerNorm

        self.attn = CausalSelfAttention(n_head, n_embd, device)
        self.c_fc = nn.Linear(n_embd, 4 * n_embd, F32, device, has_bias=True)
        self.c_proj = nn.Linear(4 * n_embd, n_embd, F32, device, has_bias=True)
        self.ln_1 = LayerNorm(n_embd, device, F32, eps=epsilon)
        self.ln_2 = LayerNorm(n_embd, [device], F32, eps=epsilon)

    def __call__(self, x: TensorValue) -> TensorValue:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(ops.gelu(self.c_fc(self.ln_2(x)), "tanh"))


class GPT2(nn.Module):
    """GPT-2 with tied weights."""

    def __init__(self, n_ctx, vocab_size, n_layer, n_head, n_embd, layer_norm_epsilon, device=None):
        super().__init__()
        from max.nn.layer import LayerList
        from max.nn.norm import LayerNorm

        self.device = device or DeviceRef.CPU()
        self.wte = nn.Embedding(vocab_size, n_embd, F32, device=self.device)
        self.wpe = nn.Embedding(n_ctx, n_embd, F32, device=self.device)
        self.h = LayerList(
            [Block(n_head, n_embd, layer_norm_epsilon, self.device) for _ in range(n_layer)]
        )
        self.ln_f = LayerNorm(n_embd, [self.device], F32)
        self.lm_head = nn.Linear(n_embd, vocab_size, F32, self.device, name="wte")
        self.lm_head.weight = self.wte.weight

    def __call__(self, token_ids: TensorValue) -> TensorValue:
        B, T = token_ids.shape
        pos = ops.range(0, T, out_dim=T, dtype=DType.int64, device=self.device)
        x = self.wte(token_ids) + self.wpe(pos)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x)[:, -1, :])


def gpt2_weights(config) -> dict[str, np.ndarray]:
    """Returns a random checkpoint with the names of the modules above."""
    from transformers import GPT2LMHeadModel

    state = GPT2LMHeadModel(config).state_dict()
    weights: dict[str, np.ndarray] = {}
    for name, tensor in state.items():
        key = name.removeprefix("transformer.").replace(".mlp.", ".")
        value = tensor.numpy()
        if value.ndim == 2 and key.rsplit(".", 2)[-2] in ("c_attn", "c_proj", "c_fc"):
            value = np.ascontiguousarray(value.T)
        if not key.endswith(".attn.bias"):
            weights[key] = value
    return weights


def language_model() -> None:
    """GPT-2 against transformers: lists of layers, tied weights, a registry with more weights than the graph uses."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_positions=32, vocab_size=60, n_layer=2, n_head=2, n_embd=16, initializer_range=0.3,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    weights = gpt2_weights(config)
    model = GPT2(32, 60, 2, 2, 16, 1e-5)
    model.load_state_dict(weights, weight_alignment=1, strict=False)
    types = (TensorType(DType.int64, shape=["batch_size", "total_seq_len"], device=REF),)
    with Graph("gpt2", input_types=types) as graph:
        graph.output(model(graph.inputs[0].tensor))
    tokens = rng.integers(0, 60, (3, 9))
    got = run(graph, tokens, weights_registry=model.state_dict())[0]

    torch.manual_seed(0)
    reference = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        want = reference(torch.tensor(tokens)).logits[:, -1].numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def sentiment() -> None:
    """An encoder whose weights are allocated by their names in a safetensors file."""
    from safetensors.numpy import save_file

    dim, vocab = 8, 20
    shapes = {
        "bert.embeddings.word_embeddings.weight": (vocab, dim),
        "bert.embeddings.position_embeddings.weight": (16, dim),
        "bert.embeddings.LayerNorm.weight": (dim,),
        "bert.embeddings.LayerNorm.bias": (dim,),
        "classifier.weight": (2, dim),
        "classifier.bias": (2,),
    }
    arrays = {name: normal(*shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(arrays, path)
        weights = load_weights([path])

        class Embeddings(nn.Module):
            def __init__(self, weights, config, dtype: DType) -> None:
                super().__init__()
                self.words = weights.word_embeddings.weight.allocate(F32).cast(dtype)
                self.places = weights.position_embeddings.weight.allocate(F32).cast(dtype)
                self.gamma = weights.LayerNorm.weight.allocate(F32).cast(dtype)
                self.beta = weights.LayerNorm.bias.allocate(F32).cast(dtype)
                self.eps = config.layer_norm_eps if hasattr(config, "layer_norm_eps") else 1e-12

            def __call__(self, input_ids: TensorValue) -> TensorValue:
                length = input_ids.shape[1]
                places = ops.range(0, length, 1, dtype=DType.int64, device=input_ids.device)
                places = ops.broadcast_to(ops.unsqueeze(places, 0), ("batch_size", length))
                x = ops.gather(self.words, input_ids, axis=0) + ops.gather(
                    self.places, places, axis=0
                )
                return ops.layer_norm(x, self.gamma, self.beta, self.eps)

        class Classifier(nn.Module):
            def __init__(self, weights, config, dtype: DType) -> None:
                super().__init__()
                own = weights.bert if hasattr(weights, "bert") else weights
                self.embeddings = Embeddings(own.embeddings, config, dtype)
                self.weight = weights.classifier.weight.allocate(F32).cast(dtype)
                self.bias = weights.classifier.bias.allocate(F32).cast(dtype)

            def __call__(self, input_ids: TensorValue, mask: TensorValue) -> TensorValue:
                x = self.embeddings(input_ids) * ops.unsqueeze(mask, -1)
                return ops.matmul(x[:, 0, :], ops.transpose(self.weight, 1, 0)) + self.bias

        types = [
            TensorType(DType.int64, shape=["batch_size", "seq_len"], device=REF),
            TensorType(F32, shape=["batch_size", "seq_len"], device=REF),
        ]
        with Graph("classifier", input_types=types) as graph:
            model = Classifier(weights, SimpleNamespace(), F32)
            graph.output(model(graph.inputs[0].tensor, graph.inputs[1].tensor))
        session = InferenceSession(devices=[CPU()])
        loaded = session.load(graph, weights_registry=weights.allocated_weights)
        ids, mask = rng.integers(0, vocab, (3, 7)), np.ones((3, 7), np.float32)
        got = loaded.execute(
            driver.Tensor.from_numpy(ids).to(CPU()), driver.Tensor.from_numpy(mask).to(CPU())
        )[0].to_numpy()
    x = arrays["bert.embeddings.word_embeddings.weight"][ids[:, 0]]
    x = x + arrays["bert.embeddings.position_embeddings.weight"][0]
    x = norm(
        x,
        arrays["bert.embeddings.LayerNorm.weight"],
        arrays["bert.embeddings.LayerNorm.bias"],
        1e-12,
    )
    want = x @ arrays["classifier.weight"].T + arrays["classifier.bias"]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


def layers_in_a_row() -> None:
    """`Sequential`; weights of a module are listed, set and distributed by name."""

    class Act(nn.Module):
        def __call__(self, x: TensorValue) -> TensorValue:
            return ops.silu(x)

    model = nn.Sequential(
        [nn.Linear(6, 8, F32, REF, has_bias=True), Act(), nn.Linear(8, 3, F32, REF)]
    )
    names = sorted(model.raw_state_dict())
    assert len(names) == 3
    state = {name: normal(*map(int, w.shape)) for name, w in model.raw_state_dict().items()}
    model.load_state_dict(state)
    graph = Graph("row", model, input_types=[TensorType(F32, ["n", 6], REF)])
    x = normal(4, 6)
    got = run(graph, x, weights_registry=model.state_dict())[0]
    first, second, bias = (
        next(v for v in state.values() if v.shape == shape) for shape in [(8, 6), (3, 8), (8,)]
    )
    hidden = x @ first.T + bias
    np.testing.assert_allclose(
        got, (hidden / (1 + np.exp(-hidden))) @ second.T, rtol=1e-4, atol=1e-5
    )


def gated_norm() -> None:
    """A user's norm that creates its weights in the constructor, called from a lambda."""

    class GatedNorm(nn.Module):
        def __init__(self, size, eps: float, name: str = "norm") -> None:
            super().__init__()
            self.weight = Weight("weight", F32, (size,), REF)
            self.eps = eps

        def __call__(self, x: TensorValue, gate: TensorValue) -> TensorValue:
            x = x * ops.silu(gate)
            mean = ops.mean(ops.pow(x, 2), axis=-1)
            return self.weight * x * ops.rsqrt(mean + self.eps)

    layer = GatedNorm(12, 1e-6)
    assert list(layer.state_dict()) == ["weight"]
    types = [TensorType(F32, (3, 12), device=REF)] * 2
    graph = Graph("gated", lambda x, gate: layer(x, gate), input_types=types)
    x, gate, weight = normal(3, 12), normal(3, 12), normal(12)
    got = run(graph, x, gate, weights_registry={"weight": weight})[0]
    y = x * gate / (1 + np.exp(-gate))
    want = weight * y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def speech_features() -> None:
    """Strided convolutions over a symbolic length, norms over channels by reshapes with -1, a grouped convolution."""
    import torch
    import torch.nn.functional as F

    batch, heads = 2, 2
    first, second, position = (
        normal(6, 1, 5, scale=0.5),
        normal(8, 6, 3, scale=0.3),
        normal(8, 4, 4, scale=0.3),
    )
    gamma, beta = normal(6), normal(6)

    def const(array):
        return ops.constant(np.ascontiguousarray(array, dtype=np.float32), device=REF)

    def rscf(weight):
        return const(weight.transpose(2, 1, 0)[:, None])

    with Graph("features", input_types=[TensorType(F32, [batch, Dim("L"), 1, 1], REF)]) as graph:
        x = ops.conv2d(graph.inputs[0], rscf(first), stride=(2, 1))
        x = ops.reshape(x, [batch, -1, 6])
        rows = ops.reshape(ops.transpose(x, 1, 2), [batch * 6, -1])
        centered = ops.sub(rows, ops.mean(rows, axis=1))
        spread = ops.sqrt(
            ops.add(ops.mean(ops.mul(centered, centered), axis=1), const(np.array(1e-5)))
        )
        scale = ops.reshape(ops.tile(ops.reshape(const(gamma), [1, 6]), [batch, 1]), [batch * 6, 1])
        shift = ops.reshape(ops.tile(ops.reshape(const(beta), [1, 6]), [batch, 1]), [batch * 6, 1])
        rows = ops.add(ops.mul(ops.div(centered, spread), scale), shift)
        x = ops.transpose(ops.reshape(rows, [batch, 6, -1]), 1, 2)
        x = ops.conv2d(ops.reshape(ops.gelu(x), [batch, -1, 1, 6]), rscf(second), stride=(2, 1))
        x = ops.reshape(x, [batch, -1, 8])
        padded = ops.pad(ops.reshape(x, [batch, -1, 1, 8]), [0, 0, 2, 1, 0, 0, 0, 0])
        near = ops.conv2d(padded, rscf(position), stride=(1, 1), groups=2)
        x = ops.add(x, ops.gelu(ops.reshape(near, [batch, -1, 8])))
        split = ops.transpose(ops.reshape(x, [batch, -1, heads, 4]), 1, 2)
        scores = ops.mul(ops.matmul(split, ops.transpose(split, 2, 3)), const(np.array(0.5)))
        merged = ops.transpose(ops.matmul(ops.softmax(scores, axis=-1), split), 1, 2)
        graph.output(ops.reshape(merged, [batch, -1, 8]))

    audio = normal(batch, 41)
    got = run(graph, audio.reshape(batch, -1, 1, 1))[0]
    x = F.conv1d(torch.tensor(audio)[:, None], torch.tensor(first), stride=2)
    x = F.group_norm(x, 6, torch.tensor(gamma), torch.tensor(beta))
    x = F.conv1d(F.gelu(x), torch.tensor(second), stride=2)
    x = x + F.gelu(F.conv1d(F.pad(x, (2, 1)), torch.tensor(position), groups=2))
    x = x.transpose(1, 2)
    split = x.reshape(batch, -1, heads, 4).transpose(1, 2)
    out = torch.softmax(split @ split.transpose(2, 3) * 0.5, -1) @ split
    want = out.transpose(1, 2).reshape(batch, -1, 8).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


def boxes() -> None:
    """External weights with a registry that is filled during staging; chunks; distances converted to boxes."""
    registry: dict[str, np.ndarray] = {}

    def external(name: str, array: np.ndarray) -> TensorValue:
        registry[name] = np.ascontiguousarray(array)
        return ops.constant_external(name, TensorType(F32, array.shape, device=REF))

    cells, bins = 6, 4
    mix, bias = normal(4 * bins, 4 * bins + 2, scale=0.4), normal(4 * bins + 2)
    anchors = np.stack([np.arange(cells) + 0.5, np.full(cells, 0.5)], -1).astype(np.float32)
    with Graph("decode", input_types=[TensorType(F32, (1, cells, 8 * bins), device=REF)]) as graph:
        left, right = ops.chunk(graph.inputs[0], 2, axis=2)
        x = ops.reshape(ops.mul(left, right), (cells, 4 * bins))
        x = ops.add(ops.matmul(x, external("mix", mix)), external("bias", bias))
        box, score = ops.split(ops.reshape(x, (1, cells, -1)), [4 * bins, 2], axis=2)
        share = ops.softmax(ops.reshape(box, (1, cells, 4, bins)))
        steps = ops.constant(
            np.arange(bins, dtype=np.float32).reshape(1, 1, 1, bins), F32, device=REF
        )
        distances = ops.reshape(ops.sum(ops.mul(share, steps), axis=3), (1, cells, 4))
        before, after = ops.split(distances, [2, 2], axis=2)
        anchor = ops.constant(anchors.reshape(1, cells, 2), F32, device=REF)
        low, high = ops.sub(anchor, before), ops.add(anchor, after)
        center = ops.mul(ops.add(low, high), ops.constant(np.float32(0.5), F32, device=REF))
        out = ops.concat([center, ops.sub(high, low), ops.sigmoid(score)], axis=2)
        graph.output(ops.permute(out, [0, 2, 1]))
    x = normal(1, cells, 8 * bins)
    got = run(graph, x, weights_registry=registry)[0]
    y = (x[0, :, : 4 * bins] * x[0, :, 4 * bins :]) @ mix + bias
    share = softmax(y[:, : 4 * bins].reshape(cells, 4, bins)) @ np.arange(bins)
    low, high = anchors - share[:, :2], anchors + share[:, 2:]
    want = np.concatenate([(low + high) / 2, high - low, 1 / (1 + np.exp(-y[:, 4 * bins :]))], 1)
    np.testing.assert_allclose(got[0], want.T, rtol=1e-3, atol=1e-4)


def heads_with_a_mask() -> None:
    """Attention in classes that are no modules: a mask added by `+=`, scores divided by a number."""

    class Linear:
        def __init__(self, d_in: int, d_out: int) -> None:
            self.array = normal(d_out, d_in, scale=0.5)

        def __call__(self, x):
            weight = ops.constant(self.array, dtype=F32, device=REF)
            return x @ ops.transpose(weight, -1, -2)

    query, key, value = (Linear(6, 8) for _ in range(3))

    def forward(x):
        b, tokens, _ = x.shape
        q, k, v = (
            layer(x).reshape((b, tokens, 2, 4)).transpose(1, 2) for layer in (query, key, value)
        )
        scores = q @ k.transpose(2, 3)
        low = ops.constant(float("-inf"), dtype=x.dtype, device=x.device).broadcast_to(
            (tokens, tokens)
        )
        scores += ops.band_part(low, num_lower=None, num_upper=0, exclude=True)
        weights = ops.softmax(scores / 4**0.5)
        return (weights @ v).transpose(1, 2).reshape((b, tokens, 8))

    graph = Graph("heads", forward, input_types=[TensorType(F32, ("batch", "tokens", 6), REF)])
    x = normal(2, 5, 6)
    got = run(graph, x)[0]
    q, k, v = (
        (x @ layer.array.T).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3)
        for layer in (query, key, value)
    )
    mask = np.triu(np.full((5, 5), -np.inf), 1)
    want = softmax((q @ k.swapaxes(2, 3) + mask) / 2) @ v
    np.testing.assert_allclose(
        got, want.transpose(0, 2, 1, 3).reshape(2, 5, 8), rtol=1e-3, atol=1e-4
    )


PROGRAMS = [
    relu_mlp_of_constants, digits, detector, projection_of_a_checkpoint, audio_encoder,
    language_model, sentiment, layers_in_a_row, gated_norm, speech_features, boxes, heads_with_a_mask,
]  # fmt: skip
