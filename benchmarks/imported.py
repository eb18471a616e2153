"""Imported ONNX models against ONNX Runtime and OpenVINO: milliseconds for a batch.

All engines read the same file, made by `benchmarks.imported_models` with random weights, and get the same inputs; their results are compared
with ONNX Runtime's first. Ours is `max.onnx.InferenceSession`. Each engine has a process of its own and all cores of the machine; the turns
alternate. The peers' environments are `onnx`, `openvino` and `exporters` of `benchmarks.peers`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import packages, python
from benchmarks.runner import ROOT, Samples, Worker, exit_on_sigterm, interleave, machine, ratio
from benchmarks.summary import geometric_mean

IMAGES = (
    "resnet-50",
    "mobilenet-v3",
    "efficientnet-b0",
    "convnext-t",
    "regnet-y-1.6gf",
    "vit-b-16",
    "swin-t",
)
TEXTS = ("bert", "distilbert", "t5-encoder")
BATCHES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(IMAGES, (1, 8)),
    "u-net": (1, 8),
    "yolo-n": (1, 8),
    "yolo-s": (1, 8),
    **dict.fromkeys(("detr", "deeplab"), (1,)),
    **dict.fromkeys(TEXTS, (1, 8)),
    "whisper-encoder": (1,),
    "wav2vec": (1, 8),
    **dict.fromkeys(("crnn", "lstm", "gru", "mlp"), (1, 8)),
    "resnet-50-qdq": (1, 8),
    "bert-qdq": (1, 8),
    "trees": (1, 10_000),
    "silero-vad": (1, 8),
}
"""The models, and the batch sizes of each."""
TOLERANCE = {"resnet-50-qdq": 0.1, "bert-qdq": 0.2}
"""How far a result may be from ONNX Runtime's, relative to its norm; 1e-3 where nothing is said. Quantizers round ties of float arithmetic."""
LABELS = {
    "ours": "Supremum",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "lightgbm": "LightGBM",
}
WITHOUT_TORCH = ("resnet-50-qdq", "bert-qdq", "trees", "silero-vad")
"""The models that are no network of torch."""
TORCH = {"torch": "torch", "inductor": "inductor"}
"""The labels of the peers that run the network itself, where they are asked for."""


def inputs_of(name: str, batch: int) -> dict[str, Any]:
    """The inputs of a model, by name."""
    rng = np.random.default_rng(1)
    source = name.removesuffix("-qdq")
    if source in TEXTS:
        found = {"x": rng.integers(0, 30000, (batch, 128)), "mask": np.ones((batch, 128), np.int64)}
        # the last texts are shorter
        found["mask"][batch // 2 :, 100:] = 0
        return found
    if name == "silero-vad":
        return {
            "input": rng.standard_normal((batch, 576), np.float32) * np.float32(0.1),
            "state": np.zeros((2, batch, 128), np.float32),
            "sr": np.array(16000, np.int64),
        }
    shape = {
        "u-net": (3, 256, 256), "whisper-encoder": (80, 3000), "crnn": (1, 32, 256), "lstm": (200, 128), "gru": (200, 128),
        "mlp": (784,), "trees": (30,), "yolo-n": (3, 640, 640), "yolo-s": (3, 640, 640), "detr": (3, 800, 1088),
        "deeplab": (3, 520, 520), "wav2vec": (80000,),
    }.get(source, (3, 224, 224))  # fmt: skip
    return {"x": rng.standard_normal((batch, *shape), np.float32)}


def compare(name: str, results: Sequence[Any], expected: Sequence[Any]) -> None:
    """Raises RuntimeError where results differ from the expected ones."""
    for got, want in zip(results, expected, strict=True):
        if got.shape != want.shape:
            raise RuntimeError(f"{name}: {got.shape}, expected {want.shape}")
        error = np.linalg.norm(np.float64(got) - np.float64(want))
        if not error <= TOLERANCE.get(name, 1e-3) * max(
            float(np.linalg.norm(np.float64(want))), 1e-6
        ):
            raise RuntimeError(f"{name}: relative error {error / np.linalg.norm(want):.2g}")


def _head(labels: Sequence[str]) -> list[str]:
    columns = " | ".join(f"{label}, ms" for label in labels)
    return [
        f"| model | batch | {columns} | of ONNX Runtime | of the best |",
        "|" + "---|" * (4 + len(labels)),
    ]


def _start(name: str, folder: Path, with_torch: bool) -> list[Worker]:
    """Ours, ONNX Runtime, and the other engines that are installed and can run the model."""
    common = {"model": name, "folder": str(folder)}
    reader = python("onnx")
    workers = [Worker("benchmarks.workers.onnx_ours", packages=packages("onnx"), **common)]
    workers.append(Worker("benchmarks.workers.onnx_onnxruntime", python=reader, **common))
    if (interpreter := python("openvino")) and name not in ("trees", "silero-vad"):
        workers.append(Worker("benchmarks.workers.onnx_openvino", python=interpreter, **common))
    if name == "trees" and (interpreter := python("exporters")):
        workers.append(Worker("benchmarks.workers.trees_lightgbm", python=interpreter, **common))
    if with_torch and name not in WITHOUT_TORCH:
        interpreter = python("exporters")
        workers += [
            Worker(f"benchmarks.workers.network_{peer}", python=interpreter, model=name)
            for peer in TORCH
        ]
    return workers


def measure(
    folder: Path,
    models: Sequence[str] = tuple(BATCHES),
    runs: int = 5,
    seconds: float = 0.5,
    with_torch: bool = False,
) -> Iterator[str]:
    """The lines of a table, as they are measured; ``with_torch`` adds torch in eager mode, and compiled by inductor."""
    make_files(folder, models)
    labels = {**LABELS, **(TORCH if with_torch else {})}
    yield from _head(list(labels.values()))
    for name in models:
        workers = _start(name, folder, with_torch)
        for batch in BATCHES[name]:
            with tempfile.TemporaryDirectory() as results:
                arrays: list[list[Any]] = []
                for worker in workers:
                    path = Path(results) / f"{worker.name}.npz"
                    worker.call("make", batch=batch, path=str(path))
                    with np.load(path) as found:
                        arrays.append([found[key] for key in found])
                for result in arrays:
                    compare(name, result, arrays[1])
            found = interleave(workers, "run", runs, settle="ms", seconds=seconds)
            times: dict[str, Samples] = {
                w.name.split("_")[-1]: found[w.name]["ms"] for w in workers
            }
            peers = [samples for label, samples in times.items() if label != "ours"]
            ratios = [ratio(samples, times["ours"]) for samples in (times["onnxruntime"], *peers)]
            cells = [str(times.get(label, "")) for label in labels]
            yield f"| {name} | {batch} | {' | '.join(cells)} | {ratios[0]:.2f} | {min(ratios):.2f} |"
        for worker in workers:
            worker.close()


def make_files(folder: Path, models: Sequence[str]) -> None:
    """Writes the models whose files are missing."""
    sources = [name.removesuffix("-qdq") for name in models]
    missing = [n for n in dict.fromkeys([*sources, *models]) if not (folder / f"{n}.onnx").exists()]
    if missing:
        command = [str(python("exporters") or sys.executable), "-m", "benchmarks.imported_models"]
        subprocess.run([*command, str(folder), *missing], check=True, cwd=ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each turn")
    parser.add_argument("--torch", action="store_true", help="torch and inductor, too")
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}" / "imported"
    parser.add_argument("--folder", type=Path, default=default, help="where the models are made")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    rows: list[list[str]] = []
    for line in measure(args.folder, args.models, args.runs, args.seconds, args.torch):
        print(line, flush=True)
        rows.append(line.split("|"))
    means = [geometric_mean([float(row[i]) for row in rows[2:]]) for i in (-3, -2)]
    print(f"Geometric means: {means[0]:.2f} of ONNX Runtime, {means[1]:.2f} of the best peer.")


if __name__ == "__main__":
    main()
