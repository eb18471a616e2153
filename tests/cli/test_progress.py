"""Progress of long work: a line that changes on a terminal, a line a step in a pipe and on a dumb terminal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from max._host.machine import byte_size
from max._load_steps import STEPS, LoadSteps
from max.entrypoints.cli import progress
from max.entrypoints.cli.progress import bar_text, duration_text
from max.serve.worker.life_signs import LifeSigns

ROOT = Path(__file__).parents[2]
PROGRAM = """
import time
from max._load_steps import STEPS
from max.entrypoints.cli.progress import Progress, PullProgress
from max.entrypoints.cli.errors import set_up_logging
import logging
set_up_logging("warning")
shown = Progress()
with shown.stage("loading a model with a name of many letters that no line of a small terminal holds"):
    STEPS.at("compiling kernels", 3, 17)
    time.sleep(0.25)
    logging.getLogger("max.pipelines").warning("a warning")
    time.sleep(0.15)
with shown.stage("second step"):
    pass
shown.close()
with PullProgress() as pull:
    for at in range(0, 2001, 500):
        pull("model.gguf", at, 2000)
print("output")
"""


def lines_of(term: str, columns: int = 60) -> list[str]:
    """What a terminal gets, split at line ends."""
    pty = pytest.importorskip("pty")
    env = {**os.environ, "TERM": term, "COLUMNS": str(columns), "PYTHONPATH": str(ROOT / "src")}
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=env, stdin=there, stdout=there, stderr=there
    )
    os.close(there)
    data = b""
    try:
        while part := os.read(here, 1 << 16):
            data += part
    except OSError:  # the end, on Linux
        pass
    finally:
        os.close(here)
    assert process.wait(60) == 0
    return data.decode().replace("\r\n", "\n").split("\n")


def test_a_terminal_has_one_changing_line() -> None:
    lines = lines_of("xterm")
    drawn = [part for line in lines for part in line.split("\r\x1b[K") if part]
    assert any("compiling kernels 3/17" in part or part.endswith("…") for part in drawn)
    assert max(map(len, drawn)) < 60, "a longer line would not be overwritten as a whole"
    warning = next(line for line in lines if "a warning" in line)
    assert warning.endswith("\r\x1b[Kmax: warning: a warning"), "the line of progress is cleared"
    assert re.search("━+ 100 % 2 KiB of 2", "\n".join(lines))
    assert lines[-2].endswith("output") and len(lines) == 4


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_dumb_terminal_has_a_line_a_step(term: str) -> None:
    lines = lines_of(term)
    assert not any("\x1b" in line or "\r" in line for line in lines)
    assert [line.partition(":")[0] for line in lines[:-1]] == [
        "max", "loading a model with a name of many letters that no line of a small terminal holds",
        "second step", "model.gguf (2 KiB)", "output",
    ]  # fmt: skip


def test_a_pipe_has_a_line_a_step() -> None:
    env = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "output\n" and "\x1b" not in done.stderr and "\r" not in done.stderr
    assert len(done.stderr.splitlines()) == 4


def test_texts() -> None:
    assert byte_size(0) == "0 B" and byte_size(1536) == "1.5 KiB" and byte_size(3 << 40) == "3 TiB"
    assert [duration_text(s) for s in (0, 59.9, 61, 3661)] == ["0 s", "59 s", "1:01", "1:01:01"]
    assert "75 % 3 KiB of 4 KiB, 512 B/s, 2 s left" in bar_text(3072, 4096, 4.0, 1024)
    assert bar_text(10, None, 0.0) == "10 B"
    assert bar_text(0, 0, 2.0).startswith("╌")
    assert len(progress._fit_line("x" * 500)) < 500


def test_steps_go_to_those_who_take_them() -> None:
    steps, taken = LoadSteps(), []
    steps.at("unheard")
    with steps.handed_to(lambda *step: taken.append(step)):
        steps.at("a", 1, 2)
    steps.at("unheard")
    assert taken == [("a", 1, 2)]
    assert STEPS is not steps


def test_signs_carry_the_step_of_a_load() -> None:
    signs = LifeSigns(1.0)
    assert signs.loading == ""
    signs.note_load("compiling kernels", 3, 17)
    assert signs.loading == "compiling kernels 3/17"
    signs.note_load("ü" * 200, 0, 0)
    assert set(signs.loading) <= {"ü", "�"}
    signs.note_load("", 0, 0)
    assert signs.loading == ""
