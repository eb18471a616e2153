"""Seconds for the vectors of texts of 8 to 256 tokens: the shape of all-MiniLM-L6-v2 and BERT-base, random weights, the mean of the tokens.

Each engine gets the same tokens in float32, and its best batch size: ours reads texts of any lengths without padding, the peers read texts
sorted by length and padded within a batch. Results are compared with torch's first.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import FOLDER, llama_python, python
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
BATCHES = (8, 32, 64)
"""Texts of a batch of the peers."""
BUDGETS = (2048, 8192)
"""Tokens of an execution of ours."""
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


def padded_batches(tokens: Sequence[Any], size: int) -> Iterator[tuple[list[int], Any, Any]]:
    """Batches of texts sorted by length: their numbers, their tokens with zeros behind, and which are tokens."""
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    for first in range(0, len(order), size):
        numbers = order[first : first + size]
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
    vectors: Callable[[int], Sequence[Any]],
    sizes: Sequence[int] = BATCHES,
    **calls: Callable[..., Any],
) -> None:
    """Serves the calls of a worker of an engine.

    Args:
        name: The engine, a key of `LABELS`.
        setup: Loads the model.
        vectors: From the size of a batch to the vectors of all texts.
        sizes: The sizes of batches.
        calls: Further calls.
    """

    def check(path: str) -> dict[str, float]:
        """Write the vectors."""
        np.save(path, np.stack(vectors(sizes[(len(sizes) - 1) // 2])))
        return {}

    def run() -> dict[str, float]:
        """Seconds for all texts, for each size."""
        seconds: dict[str, float] = {}
        for size in sizes:
            start = time.perf_counter()
            vectors(size)
            seconds[f"{name} {size}"] = time.perf_counter() - start
        return seconds

    serve({"setup": setup, "check": check, "run": run, **calls})


def _start(model: str, folder: Path, count: int) -> list[Worker]:
    """The engines that are installed; torch, the first, makes the files of the others."""
    interpreter = python("onnx")
    packages = next((FOLDER / "onnx" / "lib").glob("*/site-packages")) if interpreter else ""
    common = {"model": model, "folder": str(folder), "count": count}
    peers = "benchmarks.workers.torch_embeddings"
    workers = [Worker(peers, packages=str(packages), **common)]
    workers.append(Worker("benchmarks.workers.supremum_embeddings", **common))
    if interpreter:
        worker = "benchmarks.workers.onnxruntime_embeddings"
        workers.append(Worker(worker, python=interpreter, **common))
    if interpreter := llama_python():
        _make_gguf(folder / f"embeddings-{model}")
        worker = "benchmarks.workers.llama_cpp_embeddings"
        workers.append(Worker(worker, python=interpreter, **common))
    return workers


def _make_gguf(folder: Path) -> None:
    """Writes a BERT's folder as a GGUF file in float32 without a tokenizer."""
    target = folder / "model.gguf"
    if target.exists():
        return
    import gguf
    from transformers import BertModel

    model = BertModel.from_pretrained(folder, add_pooling_layer=False)
    config = model.config
    writer = gguf.GGUFWriter(target.with_suffix(".part"), "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_type_count(config.type_vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if "position_ids" not in name:
            array = value.float().numpy()
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    target.with_suffix(".part").rename(target)


def _check(worker: Worker, got: Any, want: Any) -> None:
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)
    if got.shape != want.shape or not error.max() <= TOLERANCE:
        raise RuntimeError(f"{worker.name}: relative error {error.max():.2g}")


def measure(
    folder: Path,
    models: Sequence[str] = tuple(SHAPES),
    runs: int = 3,
    count: int = 256,
    engines: Sequence[str] = tuple(LABELS),
) -> Iterator[str]:
    """The lines of a table, as they are measured.

    Args:
        folder: Where models are made.
        models: The names of models.
        runs: Runs of each engine.
        count: The number of texts.
        engines: The keys of `LABELS` that are timed; torch gives the reference even if it is not.
    """
    yield from HEAD
    tokens = sum(map(len, texts(count)))
    for model in models:
        workers = _start(model, folder, count)
        with tempfile.TemporaryDirectory() as results:
            path = Path(results) / "result.npy"
            wanted: Any = None
            for worker in (workers[0], *(w for w in workers[1:] if WORKERS[w.name] in engines)):
                worker.call("check", path=str(path))
                got = np.load(path)
                wanted = got if wanted is None else wanted
                _check(worker, got, wanted)
        times: dict[str, Samples] = {}
        for _ in range(runs):
            for worker in (w for w in workers if WORKERS[w.name] in engines):
                for name, value in worker.call("run").items():
                    times.setdefault(name, Samples()).values.append(value)
        for worker in workers:
            worker.close()
        best = {
            engine: min(
                (s for name, s in times.items() if name.startswith(engine)), key=lambda s: s.median
            )
            for engine in LABELS
            if any(name.startswith(engine) for name in times)
        }
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
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine())
    for line in measure(args.folder, args.models, args.runs, args.texts, args.engines):
        print(line, flush=True)


if __name__ == "__main__":
    main()
