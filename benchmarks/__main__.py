"""Run benchmarks, keep their tables in benchmarks/history.jsonl, and write docs/benchmarks.md from the newest of each section."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import blocks, encoders, generation, matmul, overhead, perplexity, startup
from benchmarks.runner import ROOT, machine

HISTORY = ROOT / "benchmarks" / "history.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
LIMITS = ROOT / "docs" / "benchmarks-limits.md"
HEAD = """# Benchmarks

Written by `make bench` from the newest run of each section (`python -m benchmarks --sections blocks` runs one); all runs are kept in
`benchmarks/history.jsonl`. Ours and the peers run in processes of their own, in turn (A B A B …), after a warm-up; each figure is the
median with its range, each ratio the median of the pairwise ratios (above 1: ours is faster). The machine is shared and noisy, and its
memory bandwidth drifts by half within minutes: trust the ratios. What the limits are is in [what limits us](benchmarks-limits.md).
"""


def _generation(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for case in args.cases:
        shape, encoding = case.split(":")
        yield from generation.measure(shape, encoding, models, args.runs)


def _loading(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.LOADING_HEAD
    for case in args.cases:
        shape, encoding = case.split(":")
        yield generation.measure_loading(shape, encoding, models, min(args.runs, 3)).row()


def _max(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.MAX_HEAD
    for encoding in ("float32", "bfloat16"):
        yield from generation.measure_max("llama-135m", encoding, models)


def _startup(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from ("| figure | median (range) |", "|---|---|")
    for name, samples in startup.measure(args.runs).items():
        yield f"| {name} | {samples} |"


SECTIONS: dict[str, tuple[str, str | None, Callable[..., Iterator[str]]]] = {
    "generation": ("Generation", generation.__doc__, _generation),
    "loading": (
        "Loading",
        "Seconds to load a model, with compilation (cold), and from the disk cache (warm), and the memory of the process then: the most it "
        "had, and its own without mapped files, as multiples of the bytes of the weights.",
        _loading,
    ),
    "max": ("MAX", "MAX 26.7 through its own command line, ours in turn with it.", _max),
    "matmul": ("Matmul", matmul.__doc__, lambda a, _: matmul.measure(runs=min(a.runs, 3))),
    "blocks": ("Fused blocks", blocks.__doc__, lambda a, _: blocks.measure(runs=min(a.runs, 3))),
    "models": (
        "Whole models that are no Llama",
        encoders.__doc__,
        lambda a, models: encoders.measure(models, runs=min(a.runs, 3)),
    ),
    "overhead": ("Overhead", overhead.__doc__, lambda a, _: overhead.measure()),
    "compiling": ("Compile time", None, lambda a, _: overhead.measure_compiling()),
    "perplexity": ("Perplexity", perplexity.__doc__, lambda a, _: perplexity.table()),
    "startup": ("Start-up", "Each run a fresh process.", _startup),
}
CASES = [
    *(f"llama-135m:{e}" for e in ("float32", "bfloat16", "q4_0", "q8_0")),
    *(f"llama-1.2b:{e}" for e in ("bfloat16", "q4_k", "q8_0")),
]


def write_page() -> None:
    """Renders the newest tables."""
    newest: dict[str, dict[str, str]] = {}
    for line in HISTORY.read_text().splitlines():
        entry = json.loads(line)
        newest[entry["section"]] = entry
    parts = [HEAD]
    for name, (title, about, _) in SECTIONS.items():
        if name in newest:
            entry = newest[name]
            text = f"{about.strip()}\n\n" if about else ""
            stamp = f"{entry['date']}, {entry['machine']}."
            parts.append(f"## {title}\n{text}{stamp}\n\n" + "\n".join(entry["rows"]) + "\n")
    PAGE.write_text("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument(
        "--cases", nargs="+", default=CASES, help="models of generation and loading: SHAPE:ENCODING"
    )
    args = parser.parse_args()
    models = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    for name in args.sections:
        rows: list[str] = []
        try:
            for row in SECTIONS[name][2](args, models):
                print(row, flush=True)
                rows.append(row)
        finally:
            # what was measured before an interruption is kept
            today = datetime.date.today().isoformat()
            entry = {"section": name, "date": today, "machine": machine(), "rows": rows}
            with HISTORY.open("a") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
            write_page()


if __name__ == "__main__":
    main()
