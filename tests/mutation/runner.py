"""Runs tests on mutants: each in a process of its own, on a copy of the sources."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parents[2]
EQUIVALENTS = sorted(Path(__file__).parent.glob("equivalents*.toml"))
"""The lists of mutants that no test can notice: `equivalents_PACKAGE.toml`."""
# pytest's exit status where tests ran and at least one failed
_TESTS_FAILED = 1


@dataclass(frozen=True)
class Result:
    """What became of a mutant.

    Args:
        mutant: The mutant.
        outcome: "killed", "timeout", "survived", or "uncovered" where no test reaches it.
        seconds: How long its tests ran.
    """

    mutant: Mutant
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Suite:
    """The tests that a mutant has to get past.

    Args:
        root: Where they run, the project's root.
        source: The folder whose packages are copied and mutated.
        tests: Paths or node ids of tests, with further arguments of pytest.
        cache: A folder for compiled code that all runs share; None: each run has its own.
    """

    root: Path
    source: Path
    tests: tuple[str, ...]
    cache: Path | None = None

    def environment(self, tree: Path, folder: Path) -> dict[str, str]:
        """The environment of the tests' processes.

        Args:
            tree: The sources that they run on.
            folder: Where hypothesis keeps its files.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(self.root)]),
            # a cached file of the same size and time would hide a mutant
            "PYTHONDONTWRITEBYTECODE": "1",
            "HYPOTHESIS_PROFILE": "mutation",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
        }
        if self.cache is not None:
            environment["MAX_CACHE_DIR"] = str(self.cache)
        return environment

    def run(self, tree: Path, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Runs the tests on a copy of the sources.

        Args:
            tree: The copy.
            timeout: In seconds.

        Raises:
            subprocess.TimeoutExpired: They took longer.
        """
        with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
            command = [
                sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                "--no-header", "--tb=short", f"--basetemp={scratch}/tests", *self.tests,
            ]  # fmt: skip
            return _run(command, self.root, self.environment(tree, tree.parent), timeout)


def _run(
    command: list[str], folder: Path, environment: dict[str, str], timeout: float | None
) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run``; at a timeout the processes that the command has started end too."""
    with subprocess.Popen(
        command, cwd=folder, env=environment, text=True, start_new_session=os.name == "posix",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            if os.name == "posix":
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, output)


def run_mutants(
    suite: Suite,
    file: Path,
    mutants: Sequence[Mutant],
    *,
    jobs: int = 2,
    timeout: float | None = None,
) -> Iterator[Result]:
    """Runs the tests on each mutant of a file.

    Args:
        suite: The tests.
        file: The file, below ``suite.source``.
        mutants: Its mutants.
        jobs: How many run at once.
        timeout: Seconds for the tests of one; by default ten times what they take on the file as it
            is, and 30 more.

    Yields:
        Results in the order of the mutants.

    Raises:
        RuntimeError: The tests fail on the file as it is.
        ValueError: The file is not below ``suite.source``.
    """
    if not file.is_relative_to(suite.source):
        raise ValueError(f"{file} is not below {suite.source}")
    source = file.read_text()
    with ExitStack() as stack:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutation-"))
            tree = Path(folder) / "source"
            shutil.copytree(suite.source, tree)
            copy = tree / file.relative_to(suite.source)
            for compiled in copy.parent.glob(f"__pycache__/{copy.stem}.*"):
                compiled.unlink()
            trees.put(tree)
        start = time.perf_counter()
        tree = trees.get()
        plain = suite.run(tree)
        trees.put(tree)
        if plain.returncode != 0:
            raise RuntimeError(f"the tests fail without a mutant:\n{plain.stdout[-3000:]}")
        if timeout is None:
            timeout = 10 * (time.perf_counter() - start) + 30

        def run(mutant: Mutant) -> Result:
            tree = trees.get()
            copy = tree / file.relative_to(suite.source)
            begin = time.perf_counter()
            try:
                copy.write_text(mutant.apply(source))
                code = suite.run(tree, timeout).returncode
                outcome = "killed" if code else "survived"
            except subprocess.TimeoutExpired:
                outcome = "timeout"
            finally:
                copy.write_text(source)
                trees.put(tree)
            return Result(mutant, outcome, time.perf_counter() - begin)

        pool = stack.enter_context(ThreadPoolExecutor(jobs))
        yield from pool.map(run, mutants)


@dataclass(frozen=True)
class Equivalent:
    """A mutant that no test can notice.

    Args:
        file: The file, from the project's root.
        function: The qualified name of the function that it is in.
        before: The line.
        after: The line as it is changed.
        reason: Why nothing observable changes.
    """

    file: str
    function: str
    before: str
    after: str
    reason: str

    def is_of(self, file: str, mutant: Mutant) -> bool:
        """Whether this is a mutant.

        Args:
            file: The mutant's file, from the project's root.
            mutant: The mutant.
        """
        return (self.file, self.function, self.before, self.after) == (
            file, mutant.function, mutant.before, mutant.after,
        )  # fmt: skip


def equivalents() -> list[Equivalent]:
    """The mutants that were shown to change nothing observable."""
    return [
        Equivalent(**entry)
        for path in EQUIVALENTS
        for entry in tomllib.loads(path.read_text())["equivalent"]
    ]
