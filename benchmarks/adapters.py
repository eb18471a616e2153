"""Decoding with adapters (LoRA) against the same model without: ``python -m benchmarks.adapters --shape llama-135m``.

All pipelines are in one process and take turns, with real-time priority where the system allows it; the ratio is that of
the medians. Adapters are random, of all linear layers.

With ``--drawn`` each sequence has another adapter, drawn anew each round: ``--adapters 256 --slots 256`` has all of them in
memory, ``--slots 16`` reads most of them again. Then a batch decodes while a thread reads adapters.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.random_models import STARTUP_SHAPES, random_checkpoint, weight_shapes
from max.graph.weights._safetensors_file import write_safetensors
from max.interfaces import PipelineTask, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.text_context import TextContext
from max.pipelines.generation.generation import Generation

NEW = 48
PAUSE = 0.3
"""Seconds without work before each measurement."""
CASES = [(1, 1), (16, 8), (16, 0)]
"""Sequences, and adapters over which they are distributed; 0: none is named."""


def write_adapter(folder: Path, shape: str, rank: int, seed: int) -> Path:
    """A random adapter of all linear layers of a shape, in bfloat16."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, sizes in weight_shapes(STARTUP_SHAPES[shape]).items():
        if name.endswith("_proj.weight"):
            stem = "base_model.model." + name.removesuffix(".weight")
            for part, size in (("A", (rank, sizes[1])), ("B", (sizes[0], rank))):
                values = rng.standard_normal(size, np.float32) * 0.02
                tensors[f"{stem}.lora_{part}.weight"] = values.astype(ml_dtypes.bfloat16)
    folder.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    return folder


def load(model: Path, dtype: str, adapters: list[Path], slots: int) -> Any:
    """A pipeline; with adapters, they are named by their numbers."""
    options: dict[str, Any] = {}
    if adapters:
        paths = [f"{number}={path}" for number, path in enumerate(adapters)]
        options = {"enable_lora": True, "lora_paths": paths, "max_num_loras": slots}
    config = PipelineConfig(
        model_path=str(model),
        quantization_encoding=dtype,
        max_length=256,
        max_batch_size=32,
        **options,
    )
    return PIPELINE_REGISTRY.retrieve_factory(config, PipelineTask.TEXT_GENERATION)[1]()


def started(pipeline: Any, sequences: int, adapters: list[str], new: int = NEW) -> Any:
    """The outputs of a batch."""
    contexts = [
        TextContext(
            tokens=np.arange(5 + n, 21 + n),
            max_length=16 + new,
            ignore_eos=True,
            sampling_params=SamplingParams(top_k=1),
            adapter=adapters[n % len(adapters)] if adapters else "",
        )
        for n in range(sequences)
    ]
    return Generation.of(pipeline).stream(contexts)


def seconds(pipeline: Any, sequences: int, adapters: list[str]) -> float:
    """The time of a decoding step of a batch."""
    return measured(pipeline, sequences, adapters)[1]


def measured(pipeline: Any, sequences: int, adapters: list[str]) -> tuple[float, float]:
    """The time until prompts are read, adapters included, and that of a decoding step."""
    start = time.perf_counter()
    stream = started(pipeline, sequences, adapters)
    first = next(stream)  # prompts are read
    begin = time.perf_counter()
    count = sum(len(output.tokens) for output in stream)
    assert first.tokens
    return begin - start, (time.perf_counter() - begin) / max(count, 1) * sequences


def calls_beside_reads(pipeline: Any, sequences: int, names: list[str], others: list[str]) -> str:
    """The times of a batch's calls alone, and while a thread reads other adapters."""
    manager = pipeline.lora_manager
    times: dict[bool, list[float]] = {False: [], True: []}
    reads: list[float] = []

    def read() -> None:
        for name in others:
            begin = time.perf_counter()
            manager.prepare(name)
            reads.append(time.perf_counter() - begin)

    for beside in (False, True):
        thread = threading.Thread(target=read)
        stream = started(pipeline, sequences, names, 160)
        next(stream)
        if beside:
            thread.start()
        last = time.perf_counter()
        for output in stream:
            now = time.perf_counter()
            # the outputs of a call come together
            if output.tokens and now - last > 1e-4 and (not beside or thread.is_alive()):
                times[beside].append(now - last)
            last = now
        if beside:
            thread.join()
    alone, with_reads = (sorted(times[key]) or [0.0] for key in (False, True))
    return (
        f"reads {statistics.median(reads) * 1e3:.1f} ms; calls alone {statistics.median(alone) * 1e3:.1f} ms, the longest "
        f"{alone[-1] * 1e3:.1f}; beside {len(reads)} reads {statistics.median(with_reads) * 1e3:.1f}, the longest "
        f"{with_reads[-1] * 1e3:.1f}"
    )


def print_drawn(base: Any, adapted: Any, args: argparse.Namespace) -> None:
    """Prints a row for each number of sequences, each of which has another adapter."""
    rng = np.random.default_rng(0)
    print(
        "| sequences | of adapters | slots | ms a step | without | ratio | ms to first tokens | without |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for sequences in args.sequences:
        own: list[tuple[float, float]] = []
        plain: list[tuple[float, float]] = []
        for _ in range(args.rounds):
            names = [str(n) for n in rng.choice(args.adapters, sequences, replace=False)]
            for pipeline, chosen, results in ((base, [], plain), (adapted, names, own)):
                time.sleep(PAUSE)
                results.append(measured(pipeline, sequences, chosen))
        first, step, base_first, base_step = (
            statistics.median(r[at] for r in results) * 1e3
            for results in (own, plain)
            for at in (0, 1)
        )
        print(
            f"| {sequences} | {args.adapters} | {args.slots} | {step:.2f} | {base_step:.2f} | {base_step / step:.2f} | "
            f"{first:.0f} | {base_first:.0f} |",
            flush=True,
        )
    held = [str(n) for n in range(min(args.sequences[0], args.slots))]
    others = [str(n) for n in range(args.adapters - 8, args.adapters)]
    if args.slots < args.adapters:
        print(calls_beside_reads(adapted, len(held), held, others), flush=True)


def main() -> None:
    """Prints a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-135m", choices=STARTUP_SHAPES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--drawn", action="store_true", help="each sequence has another adapter")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 32])
    args = parser.parse_args()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_checkpoint(args.shape, args.dtype, folder / "model")
        adapters = [
            write_adapter(folder / f"a{n}", args.shape, args.rank, n) for n in range(args.adapters)
        ]
        base = load(model, args.dtype, [], 0)
        adapted = load(model, args.dtype, adapters, args.slots)
        if args.drawn:
            print_drawn(base, adapted, args)
            return
        print("| sequences | adapters | ms a step | without | ratio |\n|---|---|---|---|---|")
        for sequences, count in [*CASES, (16, args.adapters)]:
            names = [str(n) for n in range(min(count, args.adapters))]
            own: list[float] = []
            plain: list[float] = []
            for _ in range(args.rounds):
                # the system stops processes of real-time priority that take all of the time
                time.sleep(PAUSE)
                plain.append(seconds(base, sequences, []))
                time.sleep(PAUSE)
                own.append(seconds(adapted, sequences, names))
            medians = statistics.median(own) * 1e3, statistics.median(plain) * 1e3
            ratio = medians[1] / medians[0]
            print(
                f"| {sequences} | {count} | {medians[0]:.2f} | {medians[1]:.2f} | {ratio:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
