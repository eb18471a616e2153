"""Run benchmarks, keep their tables in benchmarks/history.jsonl, and write docs/benchmarks.md from the newest of each section."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import blocks, encoders, generation, matmul, overhead, perplexity, startup
from benchmarks.runner import ROOT, machine

HISTORY = ROOT / "benchmarks" / "history.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"
LIMITS = ROOT / "docs" / "benchmarks-limits.md"
HEAD = """# Benchmarks

Written by `make bench` from the newest run of each case (`python -m benchmarks --sections blocks` runs a section); all runs are kept in
`benchmarks/history.jsonl`. Ours and the peers run in processes of their own, in turn (A B A B …), after a warm-up; each figure is the
median with its range, each ratio the median of the pairwise ratios (above 1: ours is faster). The machine is shared and noisy, and its
memory bandwidth drifts by half within minutes: trust the ratios. What the limits are is in [what limits us](benchmarks-limits.md).
"""


def _generation(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for case in args.cases:
        shape, encoding = case.split(":")
        yield from generation.measure(shape, encoding, models, args.runs)


def _avx2(args: argparse.Namespace, models: Path) -> Iterator[str]:
    yield from generation.HEAD
    for encoding in ("float32", "q4_0", "q4_k", "q8_0"):
        cases = ((32, 1), (256, 1), (32, 4))
        shape = "llama-1.2b" if encoding == "q4_k" else "llama-135m"
        yield from generation.measure(shape, encoding, models, min(args.runs, 3), cases, True)


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


# title, text, rows, and how many cells name a row
SECTIONS: dict[str, tuple[str, str | None, Callable[..., Iterator[str]], int]] = {
    "generation": ("Generation", generation.__doc__, _generation, 3),
    "avx2": (
        "Generation with AVX2 only",
        "As above, each engine held to AVX2: ours by `MAX_CPU_FEATURES=avx2,fma`, llama.cpp in a build of its own, torch by its variables.",
        _avx2,
        3,
    ),
    "loading": (
        "Loading",
        "Seconds to load a model, with compilation (cold), and from the disk cache (warm), and the memory of the process then: the most it "
        "had, and its own without mapped files, as multiples of the bytes of the weights.",
        _loading,
        2,
    ),
    "max": ("MAX", "MAX 26.7 through its own command line, ours in turn with it.", _max, 2),
    "matmul": ("Matmul", matmul.__doc__, lambda a, _: matmul.measure(runs=min(a.runs, 3)), 4),
    "blocks": ("Fused blocks", blocks.__doc__, lambda a, _: blocks.measure(runs=min(a.runs, 3)), 3),
    "models": (
        "Whole models that are no Llama",
        encoders.__doc__,
        lambda a, models: encoders.measure(models, runs=min(a.runs, 3)),
        3,
    ),
    "overhead": ("Overhead", overhead.__doc__, lambda a, _: overhead.measure(), 1),
    "compiling": ("Compile time", None, lambda a, _: overhead.measure_compiling(), 1),
    "perplexity": ("Perplexity", perplexity.__doc__, lambda a, _: perplexity.table(), 1),
    "startup": ("Start-up", "Each run a fresh process.", _startup, 1),
}
CASES = [
    *(f"llama-135m:{e}" for e in ("float32", "bfloat16", "q4_0", "q8_0")),
    *(f"llama-1.2b:{e}" for e in ("bfloat16", "q4_k", "q8_0")),
]


WITH_MEAN = ("matmul", "blocks", "models")
"""Sections whose last cells are ratios, of which the geometric mean is of interest."""


def merge(entries: Sequence[Mapping[str, Any]], cells: int) -> tuple[list[str], str]:
    """The newest row of each case of a section, and when they were measured.

    Args:
        entries: The section's runs, the oldest first; those with other columns than the newest are left out.
        cells: So many cells of a row, from the first on, name its case.
    """
    head = entries[-1]["rows"][:2]
    rows: dict[str, str] = {}
    days: dict[str, str] = {}
    for entry in entries:
        if entry["rows"][:2] == head:
            for row in entry["rows"][2:]:
                key = "|".join(row.split("|")[1 : cells + 1])
                rows[key], days[key] = row, f"{entry['date']}, {entry['machine']}."
    rows = {key: row for key, row in rows.items() if not row.startswith("| all |")}
    return [*head, *rows.values()], " ".join(sorted({days[key] for key in rows}))


def _mean(rows: Sequence[str]) -> str:
    """A sentence on the ratios in the last cells."""
    last = [row.split("|")[-2].strip() for row in rows[2:]]
    ratios = [float(cell) for cell in last if cell]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"Geometric mean of {len(ratios)} ratios: {mean:.2f}; the least: {min(ratios):.2f}.\n"


def write_page() -> None:
    """Renders the newest tables."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in HISTORY.read_text().splitlines():
        entry = json.loads(line)
        if len(entry["rows"]) > 2:
            found.setdefault(entry["section"], []).append(entry)
    parts = [HEAD]
    for name, (title, about, _, cells) in SECTIONS.items():
        if name in found:
            rows, stamp = merge(found[name], cells)
            text = f"{about.strip()}\n\n" if about else ""
            parts.append(f"## {title}\n{text}{stamp}\n\n" + "\n".join(rows) + "\n")
            if name in WITH_MEAN:
                parts.append(_mean(rows))
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
