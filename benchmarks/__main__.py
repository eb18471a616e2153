"""Run every benchmark and write docs/benchmarks.md."""

from __future__ import annotations

import argparse
import datetime
import os
import tempfile
from pathlib import Path

from benchmarks import generation, matmul, startup
from benchmarks.runner import ROOT, machine

PAGE = """# Benchmarks

Written by `make bench` on {date}: {machine}. Ours and the peer run in processes of their own, in turn
(A B A B …), after a warm-up; each figure is the median with its range, each ratio the median of the pairwise ratios
(above 1: ours is faster). The machine is shared and noisy: trust the ratios.

## Generation
{about}

{generation}

Seconds to load, with compilation (cold), and from the disk cache (warm):

| model | encoding | cold | warm |
|---|---|---|---|
{loading}

MAX 26.7 through its own command line:

{max}

## Matmul
{matmul_about}

{matmul}

## Start-up
Each run a fresh process.

| figure | median (range) |
|---|---|
{startup}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["llama-135m"])
    parser.add_argument("--encodings", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "benchmarks.md")
    args = parser.parse_args()
    models = Path(tempfile.gettempdir()) / f"supremum-bench-{os.getuid()}"
    cases = [(shape, encoding) for shape in args.shapes for encoding in args.encodings]
    rows = [row for case in cases for row in generation.measure(*case, models, args.runs)]
    max_rows = [row for case in cases for row in generation.measure_max(*case, models)]
    loading = [generation.measure_loading(*case, models, args.runs).row() for case in cases]
    figures = startup.measure(args.runs)
    page = PAGE.format(
        date=datetime.date.today().isoformat(),
        machine=machine(),
        about=generation.__doc__,
        generation="\n".join([*generation.HEAD, *rows]),
        loading="\n".join(loading),
        max="\n".join([*generation.MAX_HEAD, *max_rows]),
        matmul_about=matmul.__doc__,
        matmul="\n".join(matmul.measure(runs=args.runs)),
        startup="\n".join(f"| {name} | {samples} |" for name, samples in figures.items()),
    )
    args.output.write_text(page)
    print(page)


if __name__ == "__main__":
    main()
