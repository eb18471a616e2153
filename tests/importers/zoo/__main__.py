"""Compares models with torch; `tests.importers.zoo.table` writes the results into docs/importers.md.

python -m tests.importers.zoo {torchvision,timm,transformers} [--import-only] [--match TEXT] [--sample N]
    [--out FILE.jsonl]

Each model has a process of its own, with a limit of time and memory. Results are added to the file; models that are in
it are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import resource
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

from tests.importers.zoo.case import Outcome, compared
from tests.importers.zoo.language import transformers_models
from tests.importers.zoo.vision import timm_models, torchvision_models

FAMILIES = {
    "torchvision": torchvision_models,
    "timm": timm_models,
    "transformers": transformers_models,
}


def _child(build: Any, runs: bool, memory: int, sender: Any) -> None:
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    sender.send(compared(build, runs))


def judged(build: Any, runs: bool, seconds: float, memory: int) -> Outcome:
    """The comparison of one model, in a process of its own."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(False)
    process = context.Process(target=_child, args=(build, runs, memory, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else Outcome("error", "out of time")
    except EOFError:
        process.join(10)
        return Outcome("error", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.importers.zoo")
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--import-only", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--sample", type=int, help="the number of models, drawn with a fixed seed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--memory", type=int, default=24 << 30)
    options = parser.parse_args()
    done: dict[str, Any] = {}
    if options.out and options.out.exists():
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
        done = {row["name"]: row for row in rows}
    models = FAMILIES[options.family]()
    if options.sample:
        names = random.Random(0).sample(sorted(models), min(options.sample, len(models)))
        models = {name: models[name] for name in names}
    for name, build in models.items():
        if options.match not in name or name in done:
            continue
        start = time.monotonic()
        outcome = judged(build, not options.import_only, options.seconds, options.memory)
        row = {"name": name, **vars(outcome), "seconds": round(time.monotonic() - start, 1)}
        done[name] = row
        print(f"{name}: {outcome.status} {outcome.note} ({row['seconds']} s)", flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
    counts = Counter(row["status"] for row in done.values())
    total = sum(counts.values()) - counts["torch"]
    whole = counts["whole"] + counts["imported"]
    print(
        f"{options.family}: {whole} of {total} ({100 * whole / max(total, 1):.0f} %)", dict(counts)
    )


if __name__ == "__main__":
    sys.exit(main())
