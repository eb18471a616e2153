"""Llama shapes with random weights: prefill of prompts and greedy decoding of 32 tokens, ours and the peers' in one run.

Each engine runs in a process of its own, in turn (A B C A B C …), after a warm-up. Decoding at one sequence is bound by reading the
weights: the GB/s are weights' bytes times tokens a second. llama.cpp and MAX are measured where `make bench-peers` installed them.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import FILE_TYPES, make_checkpoint, make_gguf
from benchmarks.peers import python
from benchmarks.runner import Samples, Worker, interleave, machine, ratio

OURS = "supremum_llm"
LABELS = {OURS: "Supremum", "llama_cpp_llm": "llama.cpp", "transformers_llm": "transformers"}
NEW_TOKENS = 33
AVX2 = {
    "MAX_CPU_FEATURES": "avx2,fma", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
}  # fmt: skip
"""The environment in which engines use vectors of 256 bits at most, and no products of bytes or bf16."""
# prompt tokens, sequences
CASES = ((32, 1), (256, 1), (1024, 1), (32, 4), (32, 16))
HEAD = ["| model | encoding | case | " + " | ".join(LABELS.values()) + " | ours / best peer |"]
HEAD.append("|" + "---|" * (4 + len(LABELS)))


LOADING_HEAD = [
    "| model | encoding | cold, s | warm, s | weights, GB | peak | own |",
    "|---|---|---|---|---|---|---|",
]


@dataclass(frozen=True)
class Loading:
    """Seconds to load a model: cold, and from the disk cache; and the memory of the process after a few tokens."""

    shape: str
    encoding: str
    cold: Samples
    warm: Samples
    weights: int
    memory: dict[str, float]

    def row(self) -> str:
        """The row of the table."""
        parts = [f"{self.memory[key] / self.weights:.2f}" for key in ("peak_bytes", "own_bytes")]
        size = f"{self.weights / 1e9:.2f}"
        cells = (self.shape, self.encoding, self.cold, self.warm, size, *parts)
        return f"| {' | '.join(map(str, cells))} |"


def model_of(shape: str, encoding: str, folder: Path) -> dict[str, str]:
    """What our worker's ``setup`` takes."""
    if encoding in FILE_TYPES:
        checkpoint = make_checkpoint(shape, "float32", folder)
        weights = str(make_gguf(shape, encoding, folder))
        return {"model": str(checkpoint), "dtype": encoding, "weights": weights}
    return {"model": str(make_checkpoint(shape, encoding, folder)), "dtype": encoding}


def start(
    engine: str, shape: str, encoding: str, folder: Path, avx2: bool = False
) -> Worker | None:
    """An engine with the model loaded; None where it is not installed, or does not read the encoding."""
    module = f"benchmarks.workers.{engine}"
    env = AVX2 if avx2 else {}
    if engine == OURS:
        return Worker(module, env, **model_of(shape, encoding, folder))
    if engine == "transformers_llm":
        if encoding in FILE_TYPES:
            return None
        model = str(make_checkpoint(shape, encoding, folder))
        return Worker(module, env, model=model, dtype=encoding)
    interpreter = python("llama-avx2" if avx2 else "llama")
    if interpreter is None:
        return None
    model = str(make_gguf(shape, encoding, folder))
    return Worker(module, python=interpreter, model=model, dtype=encoding)


def measure_loading(shape: str, encoding: str, folder: Path, runs: int = 3) -> Loading:
    """Load ``runs`` times with an empty cache, and with a full one."""
    setup = model_of(shape, encoding, folder)
    weights = Path(setup.get("weights", f"{setup['model']}/model.safetensors"))
    memory: dict[str, float] = {}
    cold, warm = Samples(), Samples()
    for samples, caches in ((cold, runs), (warm, 1)):
        for _ in range(caches):
            with tempfile.TemporaryDirectory() as cache:
                for turn in range(1 if samples is cold else runs + 1):
                    once = Worker(
                        f"benchmarks.workers.{OURS}", {"MAX_CACHE_DIR": cache}, batch=1, **setup
                    )
                    if samples is cold or turn:
                        samples.values.append(once.setup["load_s"])
                    once.call("generate", prompt=list(range(5, 37)), new_tokens=4)
                    memory = once.call("memory")
                    once.close()
    return Loading(shape, encoding, cold, warm, weights.stat().st_size, memory)


def measure(
    shape: str, encoding: str, folder: Path, runs: int = 5,
    cases: Sequence[tuple[int, int]] = CASES, avx2: bool = False,
) -> Iterator[str]:  # fmt: skip
    """The rows of a table, as they are measured; with AVX2 only where it is asked for."""
    started = [start(engine, shape, encoding, folder, avx2) for engine in LABELS]
    workers = [worker for worker in started if worker is not None]
    size = make_gguf(shape, encoding, folder).stat().st_size if python("llama") else 0
    tokens = random.Random(0).choices(range(5, 4000), k=2048)
    for prompt, batch in cases:
        arguments = {"prompt": tokens[:prompt], "new_tokens": NEW_TOKENS, "batch": batch}
        found = interleave(workers, "generate", runs, **arguments)
        figures = [("prefill_tok_s", f"prefill of {prompt}"), ("decode_tok_s", "decode")]
        if batch > 1:
            figures = [("decode_tok_s", f"decode, {batch} sequences")]
        elif prompt > 32:
            figures = figures[:1]
        for figure, what in figures:
            ours = found[OURS][figure]
            peers = [found[w.name][figure] for w in workers if w.name != OURS]
            best = max(peers, key=lambda samples: samples.median, default=None)
            cells = [str(found[n][figure]) if n in found else "" for n in LABELS]
            if what == "decode" and size:
                cells[0] += f", {size * ours.median / 1e9:.0f} GB/s"
            last = "" if best is None else f"{ratio(ours, best):.2f}"
            yield f"| {shape} | {encoding} | {what}, tok/s | {' | '.join(cells)} | {last} |"
    for worker in workers:
        worker.close()


MAX_HEAD = [
    "| model | encoding | Supremum, decode, tok/s | MAX, decode, tok/s | ours / MAX | MAX, first start, s |",
    "|---|---|---|---|---|---|",
]


def measure_max(shape: str, encoding: str, folder: Path, runs: int = 3) -> Iterator[str]:
    """MAX through its own command line, which starts anew for each run and reports what it measured; ours in turn with it."""
    interpreter = python("max")
    if interpreter is None or encoding in FILE_TYPES:
        return
    setup = model_of(shape, encoding, folder)
    try:
        peer = Worker("benchmarks.workers.max_llm", python=interpreter, **setup)
    except RuntimeError:
        yield f"| {shape} | {encoding} | | does not run it on a CPU | | |"
        return
    ours = Worker(f"benchmarks.workers.{OURS}", **setup)
    figures: dict[Worker, Samples] = {ours: Samples(), peer: Samples()}
    ids = random.Random(0).choices(range(5, 4000), k=64)
    for turn in range(runs + 1):
        for worker, samples in figures.items():
            found = worker.call(
                "generate", prompt=ids, text="word " * 32, new_tokens=2 * NEW_TOKENS
            )
            if turn:
                samples.values.append(found["decode_tok_s"])
    mine, theirs = figures[ours], figures[peer]
    yield (
        f"| {shape} | {encoding} | {mine} | {theirs} | {ratio(mine, theirs):.2f} "
        f"| {peer.setup['load_s']:.0f} |"
    )
    ours.close()
    peer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["llama-135m"])
    parser.add_argument("--encodings", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument(
        "--models", type=Path, default=default, help="where the checkpoints are made"
    )
    args = parser.parse_args()
    print(machine(), *HEAD, sep="\n")
    for shape in args.shapes:
        for encoding in args.encodings:
            for row in measure(shape, encoding, args.models, args.runs):
                print(row, flush=True)


if __name__ == "__main__":
    main()
