"""What grammars cost: the time of a token with a grammar beside that without, of one model in turns; a ratio above 1 is
what the grammar costs.

`python -m benchmarks.grammars` makes a model of random weights and a tokenizer as large as its vocabulary, and prints a
row for each kind of grammar. Both requests of a pair have the same prompt, options and number of new tokens. The ratio
of CPU times counts all threads of the process. Tokens that a grammar forces come without a step of the model, so that
an object may take less time than plain text.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.random_models import STARTUP_SHAPES, STORED, random_checkpoint
from benchmarks.runner import exit_on_sigterm, machine
from max.interfaces import PipelineTask, SamplingParams
from max.pipelines import PIPELINE_REGISTRY, PipelineConfig, TextContext
from max.pipelines.generation.batch_pipeline import limits_of
from max.pipelines.generation.engine import Engine
from max.pipelines.generation.steps.step_reader import StepReader
from max.pipelines.structured import grammar

NEW = 64
PAUSE = 0.1
"""Seconds without work before each measurement."""
SEQUENCES = (1, 4)
_ITEMS = {
    "type": "object", "required": ["name", "count", "kind", "tags"], "additionalProperties": False,
    "properties": {
        "name": {"type": "string", "minLength": 20}, "count": {"type": "integer"},
        "kind": {"enum": ["first", "second", "another"]},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 3},
    },
}  # fmt: skip
GRAMMARS = {
    "string": lambda: grammar.of_json_schema(json.dumps({"type": "string"})),
    "counted string": lambda: grammar.of_json_schema(
        json.dumps({"type": "string", "minLength": 2000})
    ),
    "objects": lambda: grammar.of_json_schema(
        json.dumps({"type": "array", "items": _ITEMS, "minItems": 50})
    ),
    "regex": lambda: grammar.of_regex(r"([0-9]{4}-[0-9]{2}: [a-z]{2,9} [A-Z][a-z ]{9,40}\n){50,}"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"top_k": 1},
    "sampled": {"temperature": 1.0, "top_k": 50, "top_p": 0.95},
}
HEAD = (
    "| grammar | options | sequences | tokens | ms a token | without | ratio | CPU ratio | steps a token |",
    "|---|---|---|---|---|---|---|---|---|",
)


def large_tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer of a size, trained on the sources of Python's standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    texts = (path.read_text("utf-8", errors="ignore") for path in files)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_model(shape: str, dtype: str, folder: Path) -> Path:
    """A checkpoint of random weights whose tokenizer has a token for each logit."""
    target = random_checkpoint(shape, dtype, folder)
    config = json.loads((target / "config.json").read_text())
    if config["eos_token_id"] is None:
        large_tokenizer(config["vocab_size"]).save(str(target / "tokenizer.json"))
        (target / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"})
        )
        (target / "config.json").write_text(json.dumps({**config, "eos_token_id": 0}))
    return target


def decode(
    pipeline: Any, sequences: int, new: int, seed: int, own: str | None, options: dict[str, Any]
) -> tuple[float, float, int, int]:
    """Decodes requests after their first token.

    Returns:
        The seconds, the CPU seconds, the number of tokens, and the number of steps.
    """
    draw = np.random.default_rng(seed)
    contexts = [
        TextContext(
            tokens=draw.integers(300, 4000, 16), max_length=16 + new, grammar=own,
            eos_token_ids={0}, ignore_eos=own is None,
            sampling_params=SamplingParams(seed=seed + row, ignore_eos=own is None, **options),
        )
        for row in range(sequences)
    ]  # fmt: skip
    # as in an engine that serves another process
    reader = StepReader(lambda outputs: None)
    engine = Engine(pipeline, limits_of(pipeline, are_steps_read=True), reader)
    for context in contexts:
        pipeline.prepare(context)
        engine.submit(context)
    while not all(len(context.generated_tokens) for context in contexts):
        engine.step()
    before = sum(len(context.generated_tokens) for context in contexts)
    begin, cpu = time.perf_counter(), time.process_time()
    # the last sequence alone would be another case
    while not any(context.is_done for context in contexts):
        engine.step()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    count = sum(len(context.generated_tokens) for context in contexts) - before
    steps = sum(engine.decode_steps.times.counts)
    for context in contexts:
        engine.cancel(context.request_id)
    engine.step()
    reader.close()
    return seconds, cpu, count, steps * sequences


def row_of(pipeline: Any, kind: str, name: str, sequences: int, new: int, rounds: int) -> str:
    """The row of a grammar."""
    own, options = GRAMMARS[kind](), OPTIONS[name]
    walls: dict[bool, list[float]] = {False: [], True: []}
    cpus: dict[bool, list[float]] = {False: [], True: []}
    tokens = steps = 0
    length = new
    for number in range(rounds + 1):
        # in turns, as the first one of a pair finds other caches
        for constrained in (False, True) if number % 2 else (True, False):
            # the system stops processes of real-time priority that take all of the time
            time.sleep(PAUSE)
            seconds, cpu, count, ran = decode(
                pipeline, sequences, new if constrained else length, number,
                own if constrained else None, options,
            )  # fmt: skip
            if constrained:
                # without the grammar as many tokens
                length = max(count // sequences, 8)
            # the first round compiles what is not compiled yet
            if number:
                walls[constrained].append(seconds / count)
                cpus[constrained].append(cpu / count)
                if constrained:
                    tokens, steps = tokens + count, steps + ran
    medians = [statistics.median(walls[constrained]) * 1e3 for constrained in (True, False)]
    ratios = [
        statistics.median([a / b for a, b in zip(times[True], times[False], strict=True)])
        for times in (walls, cpus)
    ]
    return (
        f"| {kind} | {name} | {sequences} | {tokens} | {medians[0]:.2f} | {medians[1]:.2f} "
        f"| {ratios[0]:.3f} | {ratios[1]:.3f} | {steps / tokens:.2f} |"
    )


def measure(
    folder: Path,
    rounds: int,
    shape: str = "llama-135m",
    dtype: str = "float32",
    kinds: Sequence[str] = tuple(GRAMMARS),
    options: Sequence[str] = tuple(OPTIONS),
    sequences: Sequence[int] = SEQUENCES,
    new: int = NEW,
    steps: int = -1,
) -> Iterator[str]:
    """Measures, and gives the table as it comes.

    Args:
        folder: Where the model is made, unless it is there.
        rounds: The number of pairs of requests of a row.
        shape: A key of `STARTUP_SHAPES`.
        dtype: A key of `STORED`.
        kinds: Keys of `GRAMMARS`.
        options: Keys of `OPTIONS`.
        sequences: The numbers of sequences that are decoded together.
        new: The maximum number of new tokens of a sequence.
        steps: The steps of a call, as ``max_num_steps``.
    """
    config = PipelineConfig(
        model_path=str(make_model(shape, dtype, folder)), quantization_encoding=dtype,
        max_length=16 + new, max_batch_size=max(sequences), max_num_steps=steps,
    )  # fmt: skip
    pipeline: Any = PIPELINE_REGISTRY.retrieve(config, PipelineTask.TEXT_GENERATION)[1]
    yield from HEAD
    for count in sequences:
        for kind in kinds:
            for name in options:
                yield row_of(pipeline, kind, name, count, new, rounds)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-135m", choices=STARTUP_SHAPES)
    parser.add_argument("--dtype", default="float32", choices=STORED)
    parser.add_argument("--grammars", nargs="+", default=list(GRAMMARS), choices=GRAMMARS)
    parser.add_argument("--options", nargs="+", default=list(OPTIONS), choices=OPTIONS)
    parser.add_argument("--sequences", nargs="+", type=int, default=list(SEQUENCES))
    parser.add_argument("--new", type=int, default=NEW, help="the maximum number of new tokens")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=-1, help="steps of a call, as max_num_steps")
    parser.add_argument("--folder", type=Path, help="where the model is kept for further runs")
    args = parser.parse_args()
    exit_on_sigterm()
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as own:
        for row in measure(
            args.folder or Path(own), args.rounds, args.shape, args.dtype, args.grammars,
            args.options, args.sequences, args.new, args.steps,
        ):  # fmt: skip
            print(row, flush=True)


if __name__ == "__main__":
    main()
