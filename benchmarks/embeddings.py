"""Seconds for the vectors of texts of 8 to 256 tokens: the shape of all-MiniLM-L6-v2 and BERT-base, random weights, the mean of the tokens.

Each engine gets the same tokens in float32, and its best batch size: ours reads texts of any lengths without padding, the peers read texts
sorted by length and padded within a batch. Results are compared with torch's first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encoder_files import write_encoder
from benchmarks.peers import llama_python, packages, python
from benchmarks.runner import Samples, Worker, exit_on_sigterm, machine, ratio, serve

# fields of transformers' BertConfig
SHAPES: dict[str, dict[str, Any]] = {
    "minilm": {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    },
    "bert-base": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
    },
}
VOCAB, SHORTEST, LONGEST = 30522, 8, 256
SIZES = {
    "ours": (1024, 2048, 8192),
    "torch": (8, 32),
    "onnxruntime": (8, 32),
    "llama.cpp": (1, 4),
}
"""Sizes of batches: tokens of ours, texts of the peers'. llama.cpp's attention reads all texts of a batch for each token."""
CHECKED = 24
"""Texts whose vectors are compared first."""
SAMPLE = 32
"""Texts with which an engine's best size of batches is chosen."""
TOLERANCE = 1e-3
"""How far a vector may be from torch's, relative to its norm."""
LABELS = {
    "ours": "Supremum",
    "torch": "torch",
    "onnxruntime": "ONNX Runtime",
    "llama.cpp": "llama.cpp",
}
WORKERS = {
    "supremum_embeddings": "ours",
    "torch_embeddings": "torch",
    "onnxruntime_embeddings": "onnxruntime",
    "llama_cpp_embeddings": "llama.cpp",
}
"""The keys of `LABELS` by the names of workers."""
HEAD = ["| model | texts | tokens | " + " | ".join(f"{x}, s" for x in LABELS.values()) + " | ours / best peer |"]  # fmt: skip
HEAD.append("|" + "---|" * (4 + len(LABELS)))


def texts(count: int) -> list[Any]:
    """Random tokens of each text, int64."""
    rng = np.random.default_rng(3)
    return [rng.integers(1000, VOCAB, int(n)) for n in rng.integers(SHORTEST, LONGEST + 1, count)]


def batches(tokens: Sequence[Any], size: int, part: slice) -> list[list[int]]:
    """The numbers of the texts of each batch: texts sorted by length, and of their batches those in ``part``."""
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    return [order[first : first + size] for first in range(0, len(order), size)][part]


def padded_batches(
    tokens: Sequence[Any], size: int, part: slice
) -> Iterator[tuple[list[int], Any, Any]]:
    """Of each batch the numbers of its texts, their tokens with zeros behind, and which are tokens."""
    for numbers in batches(tokens, size, part):
        longest = max(len(tokens[i]) for i in numbers)
        ids = np.zeros((len(numbers), longest), np.int64)
        mask = np.zeros((len(numbers), longest), np.int64)
        for row, i in enumerate(numbers):
            ids[row, : len(tokens[i])] = tokens[i]
            mask[row, : len(tokens[i])] = 1
        yield numbers, ids, mask


def means(states: Any, mask: Any) -> Any:
    """The mean of each text's tokens ``[batch, size]``."""
    weights = mask[..., None].astype(np.float32)
    return (states * weights).sum(1) / weights.sum(1)


def serve_vectors(
    name: str,
    setup: Callable[..., dict[str, float]],
    vectors: Callable[[Sequence[Any], int, slice], Mapping[int, Any]],
    **calls: Callable[..., Any],
) -> None:
    """Serves the calls of a worker of an engine.

    Args:
        name: The engine, a key of `LABELS`.
        setup: Loads the model.
        vectors: Computes, for texts, a size of batches and the part of them that is run, a vector for each number
            of a text.
        calls: Further calls.
    """

    def check(path: str) -> dict[str, float]:
        """Write the vectors of a few texts."""
        by_number = vectors(texts(CHECKED), SIZES[name][0], slice(None))
        np.save(path, np.stack([by_number[i] for i in range(len(by_number))]))
        return {}

    def run(count: int, size: int, part: int, parts: int) -> dict[str, float]:
        """Seconds for the batches ``part``, ``part + parts``, … of some texts."""
        tokens = texts(count)
        start = time.perf_counter()
        vectors(tokens, size, slice(part, None, parts))
        return {"seconds": time.perf_counter() - start}

    serve({"setup": setup, "check": check, "run": run, **calls})


def _start(model: str, folder: Path) -> list[Worker]:
    """The engines that are installed; torch, the first, makes the files of the others."""
    interpreter = python("onnx")
    common = {"model": model, "folder": str(folder)}
    peers = "benchmarks.workers.torch_embeddings"
    workers = [Worker(peers, packages=packages("onnx"), **common)]
    workers.append(Worker("benchmarks.workers.supremum_embeddings", **common))
    if interpreter:
        worker = "benchmarks.workers.onnxruntime_embeddings"
        workers.append(Worker(worker, python=interpreter, **common))
    if interpreter := llama_python():
        encoder = folder / f"embeddings-{model}"
        write_encoder(encoder, encoder / "model.gguf")
        worker = "benchmarks.workers.llama_cpp_embeddings"
        workers.append(Worker(worker, python=interpreter, **common))
    return workers


def _check(worker: Worker, got: Any, want: Any) -> None:
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    if got.shape != want.shape or not error.max() <= TOLERANCE:
        raise RuntimeError(f"{worker.name}: relative error {error.max():.2g}")


def _best_size(worker: Worker, count: int) -> int:
    """The size of batches with which an engine needs the least time for the first texts."""

    def seconds(size: int) -> float:
        answer = worker.call("run", count=min(count, SAMPLE), size=size, part=0, parts=1)
        return answer["seconds"]

    return min(SIZES[WORKERS[worker.name]], key=seconds)


def measure(
    folder: Path,
    models: Sequence[str] = tuple(SHAPES),
    runs: int = 3,
    count: int = 256,
    engines: Sequence[str] = tuple(LABELS),
    parts: int = 1,
) -> Iterator[str]:
    """The lines of a table, as they are measured.

    Args:
        folder: Where models are made.
        models: The names of models.
        runs: Runs of each engine.
        count: The number of texts.
        engines: The keys of `LABELS` that are timed; torch gives the reference even if it is not.
        parts: In how many calls an engine computes the vectors of all texts.
    """
    yield from HEAD
    tokens = sum(map(len, texts(count)))
    for model in models:
        workers = _start(model, folder)
        with tempfile.TemporaryDirectory() as results:
            path = Path(results) / "result.npy"
            wanted: Any = None
            for worker in (workers[0], *(w for w in workers[1:] if WORKERS[w.name] in engines)):
                worker.call("check", path=str(path))
                got = np.load(path)
                wanted = got if wanted is None else wanted
                _check(worker, got, wanted)
        timed = [worker for worker in workers if WORKERS[worker.name] in engines]
        sizes = {worker: _best_size(worker, count) for worker in timed}
        best: dict[str, Samples] = {}
        for _ in range(runs):
            for worker, size in sizes.items():
                calls = [
                    worker.call("run", count=count, size=size, part=i, parts=parts)["seconds"]
                    for i in range(parts)
                ]
                best.setdefault(WORKERS[worker.name], Samples()).values.append(sum(calls))
        for worker in workers:
            worker.close()
        ours = best["ours"]
        peer = min((s for name, s in best.items() if name != "ours"), key=lambda s: s.median)
        cells = [str(best.get(name, "")) for name in LABELS]
        yield f"| {model} | {count} | {tokens} | {' | '.join(cells)} | {ratio(peer, ours):.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument(
        "--engines", nargs="+", default=list(LABELS), choices=list(LABELS), help="which are timed"
    )
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument("--folder", type=Path, default=default, help="where the models are made")
    parser.add_argument("--parts", type=int, default=1, help="calls of a run")
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    for line in measure(args.folder, args.models, args.runs, args.texts, args.engines, args.parts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
