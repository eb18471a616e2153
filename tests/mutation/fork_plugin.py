"""A pytest plugin that runs the collected tests on mutants, each in a fork: see :mod:`tests.mutation.forked`."""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import json
import linecache
import math
import os
import resource
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutation.forked import JOB, compiled, replaced_code
from tests.mutation.mutants import Mutant


def pytest_configure(config: pytest.Config) -> None:
    """Reads the job."""
    job = json.loads(Path(os.environ.pop(JOB)).read_text())
    mutants = [Mutant(**fields) for fields in job.pop("mutants")]
    config.pluginmanager.register(_Forks(mutants, **job), "mutation-forks")


class _Exit(BaseException):
    """SIGTERM: the forks have to end as well."""


@dataclass
class _Fork:
    """A fork at work.

    Args:
        mutant: The number of its mutant; -1 without one.
        begin: When it was started, a monotonic time in seconds.
        end: When it is killed.
        folder: Its temporary folder.
    """

    mutant: int
    begin: float
    end: float
    folder: Path


@dataclass(frozen=True)
class _Test:
    """A test on the file as it is.

    Args:
        lines: The lines of the file that it reaches.
        seconds: How long it took.
        cpu: Its CPU time in seconds.
    """

    lines: set[int]
    seconds: float
    cpu: float


class _Forks:
    """Runs the tests once to see which lines each reaches, then on each mutant those that reach its lines.

    Args:
        mutants: The mutants.
        file: The mutated file.
        module: Its module.
        jobs: How many forks run at once.
        timeout: Seconds for one; None: by the time that its tests took without a mutant.
        reports: The descriptor to which the outcomes are written, a JSON object a line.
        scratch: A folder for temporary files.
    """

    def __init__(
        self, mutants: list[Mutant], file: str, module: str, jobs: int, timeout: float | None, reports: int,
        scratch: str
    ) -> None:  # fmt: skip
        self.mutants, self.file, self.module = mutants, file, module
        self.jobs, self.timeout = jobs, timeout
        self.reports, self.scratch = reports, Path(scratch)
        self.source = Path(file).read_text()
        self.functions: dict[CodeType, list[FunctionType]] = defaultdict(list)
        # of kernels, which are compiled from their text: no line of theirs is seen to run
        self.kernels: set[CodeType] = set()
        self.running: dict[int, _Fork] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self) -> None:
        """Looks up the file's functions, before the suite hides them from the collector of garbage."""
        importlib.import_module(self.module)  # tests may import it late
        kernels = sys.modules.get("max.kernel.language.source")
        # `isinstance` would ask proxies among the objects for their class
        for value in gc.get_objects():
            if type(value) is FunctionType and value.__code__.co_filename == self.file:
                self.functions[value.__code__].append(value)
            elif kernels is not None and issubclass(type(value), kernels.Function):
                self.kernels.add(inspect.unwrap(value).__code__)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Runs the mutants instead of the tests."""
        if session.testsfailed or not session.items:
            return None

        def stop(*_: object) -> None:
            raise _Exit

        signal.signal(signal.SIGTERM, stop)
        try:
            reached = self._reached(session)
            if reached is not None:
                self._run(session, reached)
        finally:
            for process in self.running:
                os.killpg(process, signal.SIGKILL)
            os.close(self.reports)
        return True

    # -- forks

    def _start(
        self,
        mutant: int,
        action: Callable[[], int],
        timeout: float = float("inf"),
        cpu: float = float("inf"),
    ) -> None:
        """Runs an action in a fork, whose exit status is what the action returns.

        Args:
            mutant: The number of its mutant; -1 without one.
            action: The action.
            timeout: Seconds until it is killed.
            cpu: Seconds of CPU time until it is killed: endless loops end early, whatever else the machine does.
        """
        folder = self.scratch / f"fork{mutant}"
        folder.mkdir()
        with warnings.catch_warnings():
            # threads of imported packages don't matter: a fork uses none that it has not started
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            now = time.monotonic()
            self.running[process] = _Fork(mutant, now, now + timeout, folder)
            return
        status = 3
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self.reports)
            if cpu < float("inf"):
                _, most = resource.getrlimit(resource.RLIMIT_CPU)
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu), most))
            os.environ["PYTEST_DEBUG_TEMPROOT"] = str(folder)
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in range(3):
                os.dup2(nothing, descriptor)
            status = action()
        finally:
            os._exit(status)

    def _ended(self, most: int) -> Iterator[tuple[_Fork, str]]:
        """Waits until at most `most` forks run; yields each fork that has ended, and its outcome."""
        while len(self.running) > most:
            for process, fork in list(self.running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() > fork.end
                if not ended and not late:
                    continue
                try:
                    os.killpg(process, signal.SIGKILL)  # with processes that its tests left behind
                except ProcessLookupError:
                    pass
                if not ended:
                    os.waitpid(process, 0)
                del self.running[process]
                shutil.rmtree(fork.folder, ignore_errors=True)
                late = not ended or (
                    os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
                )
                yield fork, "timeout" if late else "killed" if status else "survived"
            time.sleep(0.005)

    # -- lines that tests reach

    def _reached(self, session: pytest.Session) -> list[_Test] | None:
        """Runs all tests; None where one fails."""
        report = self.scratch / "lines.json"

        def record() -> int:
            lines: set[int] = set()

            def on_line(frame: FrameType, event: str, _: Any) -> Any:
                if event == "line":
                    lines.add(frame.f_lineno)
                return on_line

            def on_call(frame: FrameType, event: str, _: Any) -> Any:
                return on_line if frame.f_code.co_filename == self.file else None

            tests: list[tuple[list[int], float, float]] = []
            for number in range(len(session.items)):
                lines.clear()
                begin, cpu = time.monotonic(), _cpu_seconds()
                threading.settrace(on_call)
                sys.settrace(on_call)
                _run_tests(session, range(number, number + 1), session.items[number + 1 :][:1])
                sys.settrace(None)
                cpu = _cpu_seconds() - cpu
                tests.append((sorted(lines), time.monotonic() - begin, cpu))
                if session.testsfailed:
                    report.write_text(json.dumps(session.items[number].nodeid))
                    return 1
            report.write_text(json.dumps(tests))
            return 0

        self._start(-1, record)
        ((_, outcome),) = self._ended(0)
        content: Any = json.loads(report.read_text()) if report.exists() else "a process that ended"
        if outcome != "survived":
            print(f"FAILED {content}")
            return None
        return [_Test(set(lines), seconds, cpu) for lines, seconds, cpu in content]

    def _lines(self, mutant: Mutant) -> range:
        """The lines of the statement that a mutant changes; of a compound one those above its body."""
        best = range(mutant.line, mutant.line + 1)
        length = len(self.source)
        for node in ast.walk(ast.parse(self.source)):
            if not isinstance(node, ast.stmt) or isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ):
                continue
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            lines = range(node.lineno, max(last, node.lineno) + 1)
            if mutant.line in lines and len(lines) < length:
                best, length = lines, len(lines)
        return best

    # -- mutants

    def _run(self, session: pytest.Session, tests: list[_Test]) -> None:
        code = compiled(Path(self.file), self.source)
        for number, mutant in enumerate(self.mutants):
            lines = self._lines(mutant)
            text = mutant.apply(self.source)
            changes = replaced_code(code, compiled(Path(self.file), text))
            assert changes is not None
            of_kernel = any(old in self.kernels for old, _ in changes)
            chosen = [
                n for n, test in enumerate(tests) if of_kernel or not test.lines.isdisjoint(lines)
            ]
            chosen.sort(key=lambda n: tests[n].seconds)  # the quickest may notice it
            found = [(function, new) for old, new in changes for function in self.functions[old]]
            if not chosen or not found:
                self._report(number, "uncovered", 0.0)
                continue

            def run(
                found: list[tuple[FunctionType, CodeType]] = found,
                chosen: list[int] = chosen,
                text: str = text,
            ) -> int:
                for function, new in found:
                    function.__code__ = new
                # kernels are compiled from here
                linecache.cache[self.file] = len(text), None, text.splitlines(True), self.file
                return _run_tests(session, chosen)

            timeout = self.timeout
            if timeout is None:
                timeout = 10 * sum(tests[n].seconds for n in chosen) + 30
            self._start(number, run, timeout, 3 * sum(tests[n].cpu for n in chosen) + 10)
            self._report_ended(self.jobs - 1)
        self._report_ended(0)

    def _report_ended(self, most: int) -> None:
        for fork, outcome in self._ended(most):
            self._report(fork.mutant, outcome, time.monotonic() - fork.begin)

    def _report(self, mutant: int, outcome: str, seconds: float) -> None:
        line = json.dumps({"mutant": mutant, "outcome": outcome, "seconds": seconds})
        os.write(self.reports, (line + "\n").encode())


def _cpu_seconds() -> float:
    """The CPU time of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _run_tests(
    session: pytest.Session, numbers: Sequence[int], after: Sequence[pytest.Item] = ()
) -> int:
    """Runs tests until one fails; 1 if one did."""
    items = [*(session.items[number] for number in numbers), *after, None]
    for item, following in zip(items[: len(numbers)], items[1:], strict=False):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0
