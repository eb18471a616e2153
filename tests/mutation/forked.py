"""Runs tests on mutants in forks of one process, which imports the tests and the sources once.

A fork gets the mutant's functions by replacing their code, and the mutant's text, from which kernels are compiled. It
runs the tests that reach the changed lines. Code that runs at import (a module's or a class's body, defaults) can't be
replaced: those mutants get a process each.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import CodeType

from tests.mutation.mutants import Mutant
from tests.mutation.runner import ROOT, Result, Suite, run_mutants

JOB = "MUTATION_JOB"
"""The environment variable with the file that describes a run to the pytest plugin."""


def compiled(path: Path, source: str) -> CodeType:
    """The code of a module as an import compiles it.

    Args:
        path: Its file.
        source: Its text.
    """
    return compile(source, str(path), "exec", dont_inherit=True)


def replaced_code(before: CodeType, after: CodeType) -> list[tuple[CodeType, CodeType]] | None:
    """The functions that differ between two versions of a module: their code before and after.

    A function contains those within it, which are listed too, for closures that exist already.

    Args:
        before: The module's code, or that of a function or class in it.
        after: The same of the other version.

    Returns:
        None if the difference is in code that runs at import, or if a function refers to other closure variables.
    """
    inner, other = _nested(before), _nested(after)
    same = _own(before) == _own(after)
    if not before.co_flags & inspect.CO_OPTIMIZED and not same:
        return None
    pairs: list[tuple[CodeType, CodeType]] = []
    if len(inner) == len(other):
        for one, two in zip(inner, other, strict=True):
            within = replaced_code(one, two)
            if within is None:
                return None
            pairs += within
    if before.co_flags & inspect.CO_OPTIMIZED and (pairs or not same):
        if before.co_freevars != after.co_freevars:
            return None
        pairs.append((before, after))
    return pairs


def _nested(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _own(code: CodeType) -> tuple[object, ...]:
    """What code does apart from that nested in it, without its lines: those below a mutant can move."""
    constants = ["" if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return (
        code.co_name, code.co_code, constants, code.co_names, code.co_varnames, code.co_cellvars,
        code.co_freevars, code.co_flags, code.co_exceptiontable,
    )  # fmt: skip


def run_forked(
    suite: Suite,
    file: Path,
    mutants: Sequence[Mutant],
    *,
    jobs: int = 2,
    timeout: float | None = None,
) -> Iterator[Result]:
    """Runs the tests on each mutant of a file, most of them in forks of one process.

    Args:
        suite: The tests.
        file: The file, below ``suite.source``.
        mutants: Its mutants.
        jobs: How many run at once.
        timeout: Seconds for the tests of one; by default ten times what its tests take on the file as it is, and 30
            more. They may also use three times their CPU time, and 10 s more.

    Yields:
        Results as they come. Where no test reaches a mutant's lines its outcome is "uncovered".

    Raises:
        OSError: The system has no ``fork``.
        RuntimeError: The tests fail on the file as it is.
        ValueError: The file is not below ``suite.source``.
    """
    if not hasattr(os, "fork"):
        raise OSError(f"{sys.platform} has no fork: run the mutants without --fork")
    if not file.is_relative_to(suite.source):
        raise ValueError(f"{file} is not below {suite.source}")
    source = file.read_text()
    code = compiled(file, source)
    changes = [replaced_code(code, compiled(file, m.apply(source))) for m in mutants]
    forked = [m for m, change in zip(mutants, changes, strict=True) if change is not None]
    if forked:
        yield from _forks(suite, file, forked, jobs, timeout)
    at_import = [m for m, change in zip(mutants, changes, strict=True) if change is None]
    if at_import:
        yield from run_mutants(suite, file, at_import, jobs=jobs, timeout=timeout)


def _forks(
    suite: Suite, file: Path, mutants: Sequence[Mutant], jobs: int, timeout: float | None
) -> Iterator[Result]:
    """Starts the process that forks, and reads its reports."""
    with (
        tempfile.TemporaryDirectory(prefix="mutation-") as scratch,
        Path(scratch, "output").open("w+") as output,
    ):
        name = file.relative_to(suite.source).with_suffix("")
        module = ".".join(name.parent.parts if name.name == "__init__" else name.parts)
        reports, writer = os.pipe()
        job = Path(scratch, "job.json")
        job.write_text(
            json.dumps({
                "file": str(file), "module": module, "mutants": [asdict(mutant) for mutant in mutants],
                "jobs": jobs, "timeout": timeout, "reports": writer, "scratch": scratch,
            })
        )  # fmt: skip
        environment = {**suite.environment(suite.source, Path(scratch)), JOB: str(job)}
        environment["PYTHONPATH"] += os.pathsep + str(ROOT)  # of the plugin
        command = [
            sys.executable, "-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--no-header",
            "--tb=short", "-p", "tests.mutation.fork_plugin", *suite.tests,
        ]  # fmt: skip
        with subprocess.Popen(
            command, cwd=suite.root, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, pass_fds=(writer,), start_new_session=True,
        ) as process:  # fmt: skip
            os.close(writer)
            count, begin = 0, time.perf_counter()
            try:
                with os.fdopen(reports) as lines:
                    for line in lines:
                        report = json.loads(line)
                        count += 1
                        yield Result(
                            mutants[report["mutant"]], report["outcome"], report["seconds"]
                        )
            except BaseException:
                process.terminate()  # its plugin ends the forks
                raise
        if count < len(mutants):
            output.seek(0)
            raise RuntimeError(
                f"the tests fail without a mutant, or ended after {count} of {len(mutants)} mutants "
                f"and {time.perf_counter() - begin:.0f} s:\n{output.read()[-3000:]}"
            )
