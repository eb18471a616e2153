"""What the command lines of the fuzzers share: seeds as arguments, and the loop over examples."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable


def seed_parser() -> argparse.ArgumentParser:
    """A parser with ``--first SEED`` and ``--count N``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    return parser


def seeds_of(arguments: argparse.Namespace) -> range:
    """The seeds that the arguments of `seed_parser` name."""
    return range(arguments.first, arguments.first + arguments.count)


def count_failures(examples: Iterable[tuple[str, Callable[[], None]]]) -> int:
    """Runs examples and prints their assertion errors; returns how many failed.

    Args:
        examples: Each with its name, which is printed before it runs: the last line names the one that ended the
            process.
    """
    failures = 0
    for name, run in examples:
        print(name, file=sys.stderr, flush=True)
        try:
            run()
        except AssertionError as failure:
            failures += 1
            print(failure, flush=True)
    return failures
