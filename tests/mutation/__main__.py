"""``python -m tests.mutation FILE --tests PATH…``: which changes of a file do its tests not notice?"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections import Counter
from pathlib import Path

from benchmarks.runner import exit_on_sigterm
from tests.mutation.forked import run_forked
from tests.mutation.mutants import Mutant, mutants_of, sample
from tests.mutation.runner import ROOT, Suite, equivalents, run_mutants


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what is mutated")
    parser.add_argument(
        "--tests", nargs="+", default=[], metavar="PATH", help="paths or node ids of tests"
    )
    parser.add_argument(
        "--pytest", default="", metavar="ARGUMENTS", help="further arguments of pytest"
    )
    parser.add_argument(
        "--count", type=int, help="test a random sample of this many mutants per file"
    )
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default: 0)")
    parser.add_argument("--lines", metavar="A-B", help="only mutants in these lines")
    parser.add_argument("--kinds", nargs="+", help="only these kinds of mutants")
    parser.add_argument("--jobs", type=int, default=2, help="processes at once (default: 2)")
    parser.add_argument("--timeout", type=float, help="seconds for the tests of one mutant")
    parser.add_argument("--cache", type=Path, help="a folder for compiled code that all runs share")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="(default: src)")
    parser.add_argument(
        "--fork", action="store_true", help="fork one process, run the tests that reach a mutant"
    )
    parser.add_argument("--list", action="store_true", help="print the mutants, run nothing")
    parser.add_argument("--equivalents", action="store_true", help="run the known equivalents too")
    parser.add_argument("-v", "--verbose", action="store_true", help="print killed mutants too")
    options = parser.parse_args()
    if options.fork and not hasattr(os, "fork"):
        parser.error(
            f"--fork: {sys.platform} has no fork; without the option each mutant gets a process"
        )
    return options


def chosen(options: argparse.Namespace, path: Path, name: str) -> list[Mutant]:
    """The mutants of a file that the options leave."""
    mutants = mutants_of(path.read_text())
    if options.lines:
        first, _, last = options.lines.partition("-")
        mutants = [m for m in mutants if int(first) <= m.line <= int(last or first)]
    if options.kinds:
        mutants = [m for m in mutants if m.kind in options.kinds]
    if not options.equivalents:
        same = equivalents()
        mutants = [m for m in mutants if not any(e.is_of(name, m) for e in same)]
    if options.count is not None:
        mutants = sample(mutants, options.count, options.seed)
    return mutants


def main() -> int:
    """Prints the survivors of each file; the exit status is 1 where there are any."""
    options = arguments()
    exit_on_sigterm()
    cache = options.cache.resolve() if options.cache else None
    suite = Suite(
        ROOT, options.source.resolve(), (*options.tests, *shlex.split(options.pytest)), cache
    )
    survivors = 0
    for file in options.files:
        path = file.resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
        mutants = chosen(options, path, name)
        if options.list:
            print(*(f"{name}:{mutant}" for mutant in mutants), sep="\n")
            continue
        counts: Counter[str] = Counter()
        run = run_forked if options.fork else run_mutants
        try:
            for result in run(suite, path, mutants, jobs=options.jobs, timeout=options.timeout):
                counts[result.outcome] += 1
                if result.outcome in ("survived", "uncovered") or options.verbose:
                    print(f"{result.outcome}: {name}:{result.mutant}", flush=True)
        finally:  # a run that is cut short says how far it came
            outcomes = ", ".join(f"{n} {o}" for o, n in sorted(counts.items()))
            print(f"{name}: {len(mutants)} mutants, {outcomes}", flush=True)
        survivors += counts["survived"] + counts["uncovered"]
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main())
