"""Records what a system answers: ``python -m tests.differential.record --python /path/to/python``.

The programs of each family run in the given Python, which has that ``max`` installed; the answers are
written to ``facts/<version>/<family>.jsonl``. A program that ends its process is recorded as a crash, one
that takes longer than ``--limit`` seconds as a hang; the rest runs on in a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.differential import facts
from tests.differential.program import CRASH, FOLDER, HANG, agree, family_names, load

ROOT = FOLDER.parents[1]


def run_all(python: str, family: str, programs: list[str], limit: float) -> list[str]:
    """The answers to *programs* under *python*, in their order.

    A program that ends its process is tried a second time, first in a new one.
    """
    answers: list[str] = []
    tried = -1
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder, "programs"), Path(folder, "answers")
        while len(answers) < len(programs):
            given.write_text("".join(json.dumps(p) + "\n" for p in programs[len(answers) :]))
            out.write_text("")
            process = subprocess.Popen(
                [python, "-m", "tests.differential.runner", family, str(given), str(out)],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            ended = _watch(process, out, limit)
            done = [json.loads(line) for line in out.read_text().splitlines()]
            answers += done
            if process.returncode == 1:
                where = programs[len(answers)]
                raise SystemExit(f"{family}: the runner itself failed under {python} at: {where}")
            if len(answers) < len(programs) and tried != len(answers):
                tried = len(answers)
            elif len(answers) < len(programs):
                answers.append(CRASH if ended else HANG)
                print(f"{family}: {answers[-1]} at {programs[len(answers) - 1]}", file=sys.stderr)
    return answers


def _watch(process: subprocess.Popen[bytes], out: Path, limit: float) -> bool:
    """Waits for the end; False when no answer came for *limit* seconds (the process is ended)."""
    size, since = -1, time.monotonic()
    while True:
        try:
            process.communicate(timeout=1)
            return True
        except subprocess.TimeoutExpired:
            now = out.stat().st_size
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > limit:
                process.kill()
                process.communicate()
                return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="a Python with the real max installed")
    parser.add_argument("--version", default=facts.OLDER, choices=(facts.OLDER, facts.NEWER))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds a program may take")
    parser.add_argument("families", nargs="*", help="all of them if none is named")
    args = parser.parse_args()
    for name in args.families or family_names():
        programs = list(dict.fromkeys(load(name).programs(args.seed)))
        if args.version != facts.OLDER:
            programs = list(facts.read(facts.OLDER, name))
        answers = dict(zip(programs, run_all(args.python, name, programs, args.limit), strict=True))
        if args.version != facts.OLDER:
            older = facts.read(facts.OLDER, name)
            answers = {p: a for p, a in answers.items() if not agree(older[p], a)}
        facts.write(args.version, name, answers)
        errors = sum(a.startswith("!") for a in answers.values())
        print(f"{name}: {len(answers)} answers, {errors} of them errors")


if __name__ == "__main__":
    main()
