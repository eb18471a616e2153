"""Milliseconds for a batch: BERT-base reads sequences of 128 tokens, ResNet-50 images of 224 by 224; random weights.

All engines get the same inputs and weights, with batch norm folded into the convolutions, and their results are compared first. torch runs
BERT from transformers, eager, and compiled with frozen weights; ONNX Runtime and OpenVINO read what torch exports, with the batch size
fixed. OpenVINO computes in bfloat16 by its precision hint; ONNX Runtime has no bfloat16 on a CPU.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import packages, python
from benchmarks.runner import Samples, Worker, exit_on_sigterm, machine, ratio

TOKENS, SIDE, CLASSES = 128, 224, 1000
# fields of transformers' BertConfig
BERT = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
# the blocks of a stage, the channels inside of them; the first block of all stages but the first has stride 2
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
BATCHES = {"bert-base": (1, 32), "resnet-50": (1, 8)}
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""How far an engine's result may be from that of torch in float32, relative to its norm."""

LABELS = {
    "ours": "Supremum",
    "eager": "torch eager",
    "compiled": "compiled",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
}
HEAD = ["| model | dtype | batch | " + " | ".join(LABELS.values()) + " | ours / best peer |"]
HEAD.append("|" + "---|" * (4 + len(LABELS)))


@dataclass(frozen=True)
class Convolution:
    """A convolution of ResNet-50 with the batch norm after it folded in."""

    name: str
    size: int
    inputs: int
    outputs: int
    stride: int


@dataclass(frozen=True)
class Bottleneck:
    """Three convolutions beside a shortcut, which is a fourth one where shapes differ."""

    convolutions: tuple[Convolution, Convolution, Convolution]
    shortcut: Convolution | None


STEM = Convolution("stem", 7, 3, 64, 2)


def bottlenecks() -> list[Bottleneck]:
    """The blocks of ResNet-50 in their order; the 3×3 convolution has the stride."""
    out: list[Bottleneck] = []
    channels = STEM.outputs
    for stage, (blocks, inner) in enumerate(STAGES):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            name = f"{stage}.{block}"
            path = (
                Convolution(f"{name}.0", 1, channels, inner, 1),
                Convolution(f"{name}.1", 3, inner, inner, stride),
                Convolution(f"{name}.2", 1, inner, 4 * inner, 1),
            )
            shortcut = Convolution(f"{name}.3", 1, channels, 4 * inner, stride)
            out.append(Bottleneck(path, None if block else shortcut))
            channels = 4 * inner
    return out


def resnet_weights() -> dict[str, Any]:
    """The float32 weights of ResNet-50: filters ``[F, C, R, S]`` and biases, and the classifier's."""
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {}

    def add(name: str, shape: tuple[int, ...], scale: float = 1.0) -> None:
        deviation = np.float32(scale * math.sqrt(2 / math.prod(shape[1:])))
        out[f"{name}.weight"] = rng.standard_normal(shape, np.float32) * deviation
        out[f"{name}.bias"] = rng.standard_normal(shape[0], np.float32) * np.float32(0.1)

    add(STEM.name, (STEM.outputs, STEM.inputs, STEM.size, STEM.size))
    for block in bottlenecks():
        for i, c in enumerate((*block.convolutions, block.shortcut)):
            if c is not None:
                # what is added to a shortcut is small, so that activations do not grow with depth
                add(c.name, (c.outputs, c.inputs, c.size, c.size), 0.3 if i == 2 else 1.0)
    add("classifier", (CLASSES, 4 * STAGES[-1][1]))
    return out


def inputs_of(model: str, batch: int) -> Any:
    """Token ids ``[batch, TOKENS]`` in int64, or images ``[batch, 3, SIDE, SIDE]`` in float32."""
    rng = np.random.default_rng(1)
    if model == "bert-base":
        return rng.integers(0, BERT["vocab_size"], (batch, TOKENS))
    return rng.standard_normal((batch, 3, SIDE, SIDE), np.float32)


def _start(model: str, dtype: str, folder: Path) -> list[Worker]:
    """The engines that are installed and have the dtype, with the model's files made; torch is the second."""
    common = {"model": model, "dtype": dtype, "folder": str(folder)}
    found = python("onnx")
    # torch makes the files that the others read
    torch = Worker("benchmarks.workers.torch_models", packages=packages("onnx"), **common)
    workers = [Worker("benchmarks.workers.supremum_models", **common), torch]
    if found and dtype == "float32":
        workers.append(Worker("benchmarks.workers.onnxruntime_models", python=found, **common))
    interpreter = python("openvino")
    if found and interpreter:
        peer = Worker("benchmarks.workers.openvino_models", python=interpreter, **common)
        workers.append(peer)
    return workers


def _check(worker: Worker, path: Path, reference: Any, dtype: str) -> None:
    """Compare what the worker wrote with the reference, each of its results."""
    for result in np.load(path):
        if result.shape != reference.shape:
            raise RuntimeError(f"{worker.name}: {result.shape}, expected {reference.shape}")
        error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"{worker.name} in {dtype}: relative error {error:.2g}")


def measure(
    folder: Path,
    models: Sequence[str] = tuple(BATCHES),
    dtypes: Sequence[str] = tuple(TOLERANCE),
    runs: int = 3,
    seconds: float = 0.5,
) -> Iterator[str]:
    """The lines of a table, as they are measured."""
    yield from HEAD
    for model in models:
        for dtype in dtypes:
            workers = _start(model, dtype, folder)
            for batch in BATCHES[model]:
                with tempfile.TemporaryDirectory() as results:
                    path = Path(results) / "result.npy"
                    workers[1].call("reference", batch=batch, path=str(path))
                    reference = np.load(path)
                    for worker in workers:
                        worker.call("make", batch=batch, path=str(path))
                        _check(worker, path, reference, dtype)
                times: dict[str, Samples] = {}
                for _ in range(runs):
                    for worker in workers:
                        for name, value in worker.call("run", seconds=seconds).items():
                            times.setdefault(name, Samples()).values.append(value * 1e3)
                peers = [samples for name, samples in times.items() if name != "ours"]
                best = min(peers, key=lambda samples: samples.median)
                cells = [str(times.get(name, "")) for name in LABELS]
                cells.append(f"{ratio(best, times['ours']):.2f}")
                yield f"| {model} | {dtype} | {batch} | {' | '.join(cells)} |"
            for worker in workers:
                worker.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--dtypes", nargs="+", default=list(TOLERANCE), choices=list(TOLERANCE))
    parser.add_argument("--runs", type=int, default=3)
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument("--folder", type=Path, default=default, help="where the models are made")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    for line in measure(args.folder, args.models, args.dtypes, args.runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
