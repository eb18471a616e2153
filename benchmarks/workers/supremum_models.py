"""BERT-base of `max.nn`'s layers and ResNet-50 of `max.graph`'s ops, compiled and executed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

from benchmarks.encoders import (
    BERT,
    SIDE,
    STEM,
    TOKENS,
    Bottleneck,
    Convolution,
    bottlenecks,
    inputs_of,
    resnet_weights,
)
from benchmarks.runner import peak_memory, serve
from benchmarks.timing import median_time
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Weight, ops
from max.nn import Embedding, LayerList, LayerNorm, Linear, Module, MultiheadAttention

DEVICE = DeviceRef.CPU()
SIZE, INNER = BERT["hidden_size"], BERT["intermediate_size"]
HEADS, LAYERS = BERT["num_attention_heads"], BERT["num_hidden_layers"]
EPSILON = 1e-12
state: dict[str, Any] = {}


class Layer(Module):
    """Attention and an MLP, each normalized after it is added to its input."""

    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self.attention = MultiheadAttention(
            HEADS, SIZE, [DEVICE], dtype, qkv_has_bias=True, o_proj_has_bias=True, stacked_qkv=True
        )
        self.attention_norm = LayerNorm(SIZE, [DEVICE], dtype, EPSILON)
        self.up = Linear(SIZE, INNER, dtype, DEVICE, has_bias=True)
        self.down = Linear(INNER, SIZE, dtype, DEVICE, has_bias=True)
        self.norm = LayerNorm(SIZE, [DEVICE], dtype, EPSILON)

    def __call__(self, x: TensorValue) -> TensorValue:
        x = self.attention_norm(x + self.attention(x))
        return self.norm(x + self.down(ops.gelu(self.up(x))))


class Bert(Module):
    """Token ids ``[batch, TOKENS]``, all of one segment and none of them padding, to what the last layer makes of them."""

    def __init__(self, dtype: DType) -> None:
        super().__init__()
        self.words = Embedding(BERT["vocab_size"], SIZE, dtype, DEVICE)
        self.positions = Weight("positions", dtype, (BERT["max_position_embeddings"], SIZE), DEVICE)
        self.segments = Weight("segments", dtype, (BERT["type_vocab_size"], SIZE), DEVICE)
        self.norm = LayerNorm(SIZE, [DEVICE], dtype, EPSILON)
        self.layers = LayerList([Layer(dtype) for _ in range(LAYERS)])

    def __call__(self, ids: TensorValue) -> TensorValue:
        places = TensorValue(self.positions)[:TOKENS] + TensorValue(self.segments)[0]
        x = self.norm(self.words(ids) + places)
        for layer in self.layers:
            x = layer(x)
        return x


_NAMES = {
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "norm",
}


def bert_weights(file: Path) -> dict[str, Any]:
    """The checkpoint's weights by the names of `Bert`; queries, keys and values of a layer are one weight."""
    found = load_file(file)
    table = found["embeddings.word_embeddings.weight"]
    out = {
        "words.weight": table,
        "positions": found["embeddings.position_embeddings.weight"],
        "segments": found["embeddings.token_type_embeddings.weight"],
    }
    for kind in ("weight", "bias"):
        out[f"norm.{kind}"] = found[f"embeddings.LayerNorm.{kind}"]
        for i in range(LAYERS):
            source = f"encoder.layer.{i}"
            parts = [
                found[f"{source}.attention.self.{p}.{kind}"] for p in ("query", "key", "value")
            ]
            out[f"layers.{i}.attention.qkv_proj.{kind}"] = np.concatenate(parts)
            for theirs, ours in _NAMES.items():
                out[f"layers.{i}.{ours}.{kind}"] = found[f"{source}.{theirs}.{kind}"]
    return out


def resnet(x: TensorValue, dtype: DType, shapes: dict[str, Any]) -> TensorValue:
    """Images ``[N, H, W, C]`` to the scores of the classes."""

    def parameter(name: str) -> Weight:
        return Weight(name, dtype, shapes[name], DEVICE)

    def convolve(x: TensorValue, c: Convolution) -> TensorValue:
        filters, stride = parameter(f"{c.name}.weight"), (c.stride, c.stride)
        y = ops.conv2d(x, filters, stride, (1, 1), (c.size // 2,) * 4)
        return y + parameter(f"{c.name}.bias")

    def block(x: TensorValue, b: Bottleneck) -> TensorValue:
        first, second, third = b.convolutions
        y = ops.relu(convolve(x, first))
        y = convolve(ops.relu(convolve(y, second)), third)
        return ops.relu(y + (x if b.shortcut is None else convolve(x, b.shortcut)))

    x = ops.max_pool2d(ops.relu(convolve(x, STEM)), (3, 3), 2, 1, 1)
    for b in bottlenecks():
        x = block(x, b)
    pooled = ops.reshape(ops.mean(ops.mean(x, 1), 2), (x.shape[0], x.shape[3]))
    return pooled @ parameter("classifier.weight") + parameter("classifier.bias")


def setup(model: str, dtype: str, folder: str) -> dict[str, float]:
    kind = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(np.float32)
    if model == "bert-base":
        weights = bert_weights(Path(folder) / model / "model.safetensors")
    else:
        weights = {
            # [F, C, R, S] to [R, S, C, F], [F, C] to [C, F]
            name: np.ascontiguousarray(w.transpose(2, 3, 1, 0) if w.ndim == 4 else w.T)
            for name, w in resnet_weights().items()
        }
    state["weights"] = {name: w.astype(kind) for name, w in weights.items()}
    state["model"], state["kind"] = model, kind
    return {}


def make(batch: int, path: str) -> dict[str, float]:
    """Compile for the batch size; writes the result of an execution."""
    weights, dtype = state["weights"], DType.from_numpy(state["kind"])
    start = time.perf_counter()
    array = inputs_of(state["model"], batch)
    if state["model"] == "bert-base":
        bert = Bert(dtype)
        bert.load_state_dict(weights, strict=True)
        weights = bert.state_dict()
        types = [TensorType(DType.int64, (batch, TOKENS), DEVICE)]
        with Graph("bert", input_types=types) as graph:
            graph.output(bert(graph.inputs[0].tensor))
    else:
        array = np.ascontiguousarray(array.transpose(0, 2, 3, 1)).astype(state["kind"])
        types = [TensorType(dtype, (batch, SIDE, SIDE, 3), DEVICE)]
        with Graph("resnet", input_types=types) as graph:
            shapes = {name: w.shape for name, w in weights.items()}
            graph.output(resnet(graph.inputs[0].tensor, dtype, shapes))
    state["compiled"] = InferenceSession(devices=[CPU()]).load(graph, weights_registry=weights)
    state["inputs"] = [Tensor.from_numpy(array)]
    (result,) = state["compiled"].execute(*state["inputs"])
    seconds = time.perf_counter() - start
    np.save(path, result.to_numpy().astype(np.float32)[None])
    return {"compile_s": seconds}


def run(seconds: float) -> dict[str, float]:
    """Seconds for a batch."""
    return {"ours": median_time(lambda: state["compiled"].execute(*state["inputs"]), seconds)}


def profile(seconds: float) -> dict[str, str]:
    """The time of each kernel, as a table."""
    with state["compiled"].profile() as found:
        run(seconds)
    return {"table": str(found)}


if __name__ == "__main__":
    serve({"setup": setup, "make": make, "run": run, "profile": profile, "memory": peak_memory})
