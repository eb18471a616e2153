"""Llama shapes with random weights: prefill of prompts and greedy decoding of 32 tokens, ours and the peers' in one run.

Each engine runs in a process of its own, in turn (A B C A B C …), after a warm-up; where memory does not hold all engines, ours takes turns
with one peer at a time. Decoding of one sequence is bound by reading the weights: GB/s are the weights' bytes times tokens a second.
llama.cpp and MAX are measured where `make bench-peers` installed them. Q4_K needs rows of a multiple of 256 elements, so the 135M (576) and
360M (960) shapes have none.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import FILE_TYPES, fits, make_checkpoint, make_gguf
from benchmarks.models import SHAPES as MODEL_SHAPES
from benchmarks.peers import llama_python, python
from benchmarks.runner import Samples, Worker, exit_on_sigterm, interleave, machine, ratio

OURS = "supremum_llm"
LABELS = {OURS: "Supremum", "llama_cpp_llm": "llama.cpp", "transformers_llm": "transformers"}
NEW_TOKENS = 33
AVX2 = {
    "MAX_CPU_FEATURES": "avx2,fma,f16c", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2",
}  # fmt: skip
"""The environment in which engines use vectors of 256 bits at most, and no products of bytes or bf16."""
SHAPES = ("llama-135m", "llama-360m", "llama-1.2b")
ENCODINGS = ("float32", "bfloat16", "q4_0", "q4_k", "q8_0")
FEWER_RUNS = 3
"""The most runs of what takes minutes a run."""
SPARE = 2 << 30
"""Bytes of memory that are left to others and to caches."""
# prompt tokens, sequences
CASES = ((32, 1), (256, 1), (1024, 1), (32, 4), (32, 16))
HEAD = ["| model | encoding | case | " + " | ".join(LABELS.values()) + " | ours / best peer |"]
HEAD.append("|" + "---|" * (4 + len(LABELS)))


LOADING_HEAD = [
    "| model | encoding | cold, s | warm, s | weights, GB | peak | own |",
    "|---|---|---|---|---|---|---|",
]


def models_of(shapes: Sequence[str], encodings: Sequence[str]) -> list[tuple[str, str]]:
    """The models that there are of some shapes and encodings."""
    return [(shape, e) for shape in shapes for e in encodings if fits(shape, e)]


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
        dtype = encoding.removesuffix("_m")
        return {"model": str(checkpoint), "dtype": dtype, "weights": weights}
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
    interpreter = python("llama-avx2") if avx2 else llama_python()
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


def _free_memory() -> int:
    """Bytes that new processes can have."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) * 1024 if found else 1 << 62


def groups_of(peers: Sequence[str], weights: int, free: int) -> list[list[str]]:
    """Which peers are measured at once: all, unless their weights and ours are more than the memory that is free.

    Args:
        peers: The names of the peers.
        weights: Bytes of the weights, of which each engine has a copy.
        free: Bytes of memory.
    """
    if weights * (len(peers) + 1) + SPARE <= free:
        return [list(peers)]
    return [[peer] for peer in peers]


def measure(
    shape: str, encoding: str, folder: Path, runs: int = 5,
    cases: Sequence[tuple[int, int]] = CASES, avx2: bool = False,
) -> Iterator[str]:  # fmt: skip
    """The rows of a table, as they are measured; with AVX2 only where it is asked for."""
    size = make_gguf(shape, encoding, folder).stat().st_size if llama_python() else 0
    if shape != SHAPES[0]:
        runs = min(runs, FEWER_RUNS)
    tokens = random.Random(0).choices(range(5, 4000), k=2048)
    # (case, figure) -> engine -> samples; ours once for each group
    figures: dict[str, dict[str, Samples]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for group in groups_of([name for name in LABELS if name != OURS], size, _free_memory()):
        started = [start(engine, shape, encoding, folder, avx2) for engine in (OURS, *group)]
        workers = [worker for worker in started if worker is not None]
        if len(workers) == 1 and figures:
            workers[0].close()
            continue
        for prompt, batch in cases:
            arguments = {"prompt": tokens[:prompt], "new_tokens": NEW_TOKENS, "batch": batch}
            found = interleave(workers, "generate", runs, **arguments)
            for figure, what in figures_of(prompt, batch).items():
                ours = found[OURS][figure]
                into = figures.setdefault(what, {OURS: Samples()})
                into[OURS].values.extend(ours.values)
                for worker in workers[1:]:
                    into[worker.name] = found[worker.name][figure]
                    ratios.setdefault(what, {})[worker.name] = ratio(ours, into[worker.name])
        for worker in workers:
            worker.close()
    for what, found in figures.items():
        cells = [str(found[n]) if n in found else "" for n in LABELS]
        # a token reads some experts only
        if what == "decode" and size and "num_experts" not in MODEL_SHAPES[shape]:
            cells[0] += f", {size * found[OURS].median / 1e9:.0f} GB/s"
        best = min(ratios.get(what, {}).values(), default=math.nan)
        last = "" if math.isnan(best) else f"{best:.2f}"
        yield f"| {shape} | {encoding} | {what}, tok/s | {' | '.join(cells)} | {last} |"


def figures_of(prompt: int, batch: int) -> dict[str, str]:
    """What a case is measured for: the name of the figure and how the table calls it."""
    if batch > 1:
        return {"decode_tok_s": f"decode, {batch} sequences"}
    prefill = {"prefill_tok_s": f"prefill of {prompt}"}
    return prefill | {"decode_tok_s": "decode"} if prompt <= 32 else prefill


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
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS))
    parser.add_argument("--runs", type=int, default=5)
    default = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    parser.add_argument(
        "--models", type=Path, default=default, help="where the checkpoints are made"
    )
    args = parser.parse_args()
    exit_on_sigterm()
    print(machine(), *HEAD, sep="\n")
    for shape, encoding in models_of(args.shapes, args.encodings):
        for row in measure(shape, encoding, args.models, args.runs):
            print(row, flush=True)


if __name__ == "__main__":
    main()
