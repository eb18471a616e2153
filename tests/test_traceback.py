"""Tracebacks of errors that are the caller's end at the caller's line."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import max
from max import _config
from max._traceback import drop_own_frames

PACKAGE = str(Path(max.__file__).parent)

SCRIPT = """
import threading
import numpy as np
from layers import Two
from max import nn
from max.driver import CPU, Tensor
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
F, D = DType.float32, DeviceRef.CPU()
def three(): return ops.constant(np.zeros(3, np.float32), device=D)
def true(x): return ops.constant(True, DType.bool, D)
def model():
    with Graph("h", input_types=[TensorType(F, (2,), D)]) as h:
        h.output(h.inputs[0])
    return InferenceSession(devices=[CPU()]).load(h)
def in_a_thread(action):
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()
with Graph("g", input_types=[TensorType(F, (2, 4), D)]) as graph:
    x = graph.inputs[0].tensor
    @
"""
LAYERS = """
from max import nn
class Two(nn.Module):
    def __init__(self, dtype, device):
        super().__init__()
        self.a = nn.Linear(4, 5, dtype, device)
        self.b = nn.Linear(6, 7, dtype, device)
        self.name_weights()
    def __call__(self, x):
        return self.b(self.a(x))
"""
CASES = {
    "an op": ("ops.add(x, three())", "script.py", "do not broadcast"),
    "an operator": ("x + three()", "script.py", "do not broadcast"),
    "an argument": ("ops.reshape(x, None)", "script.py", "reshape"),
    "a method": ("x.reshape((5, 5))", "script.py", "reshape"),
    "a layer of the user's": ("Two(F, D)(x)", "layers.py", "6"),
    "in a layer of ours": ("nn.Sequential([Two(F, D)])(x)", "layers.py", "6"),
    "a loop's body": ("ops.while_loop(x, true, lambda x: [x @ x])", "script.py", "matmul"),
    "the user's own mistake": ("ops.while_loop(x, true, lambda x: 1 / 0)", "script.py", "ZeroDiv"),
    "an execution": ("model().execute(np.zeros(3, np.float32))", "script.py", "expected 2"),
    "a tensor": ("Tensor.zeros((2, 2), F)[5, 5]", "script.py", "out of range"),
    "a thread": ("in_a_thread(lambda: x @ x)", "script.py", "matmul"),
}


def run(folder: Path, line: str, **more: str) -> list[str]:
    (folder / "layers.py").write_text(LAYERS)
    (folder / "script.py").write_text(SCRIPT.replace("    @\n", f"    {line}\n"))
    done = subprocess.run(
        [sys.executable, str(folder / "script.py")],
        capture_output=True, text=True, timeout=120, env={**os.environ, **more},
    )  # fmt: skip
    return done.stderr.splitlines()


@pytest.mark.parametrize("name", CASES)
def test_the_last_frame_is_the_users(tmp_path: Path, name: str) -> None:
    line, file, message = CASES[name]
    shown = run(tmp_path, line)
    frames = [text for text in shown if text.startswith("  File ")]
    assert frames and str(tmp_path / file) in frames[-1], "\n".join(shown)
    assert not [text for text in shown if PACKAGE in text], "\n".join(shown)
    assert message in shown[-1], "\n".join(shown)
    assert len([text for text in shown if text.startswith("Traceback")]) == 1


def test_the_flag_keeps_all_frames(tmp_path: Path) -> None:
    frames = [t for t in run(tmp_path, "x + three()", MAX_TRACEBACK="full") if "File" in t]
    assert PACKAGE in frames[-1] and "script.py" in frames[0]


def raised(action: object) -> Exception:
    try:
        action()  # pyright: ignore
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_is_not_ours_stays_as_it_is() -> None:
    error = raised(lambda: int("x"))
    before = error.__traceback__
    assert not drop_own_frames(error) and error.__traceback__ is before


def test_bugs_of_ours_keep_their_frames() -> None:
    # an attribute of a None that no caller gave
    error = raised(lambda: _config._words(None))  # pyright: ignore
    assert isinstance(error, AttributeError) and not drop_own_frames(error)


def test_causes_of_the_users_stay() -> None:
    def chained() -> None:
        try:
            int("x")
        except ValueError as error:
            _config.flags.flag_of(str(error))

    error = raised(chained)
    assert drop_own_frames(error)
    assert isinstance(error.__context__, ValueError) and error.__context__.__traceback__ is not None
    frames = traceback.extract_tb(error.__traceback__)
    assert {frame.filename for frame in frames} == {__file__}


def test_causes_that_never_left_max_are_dropped() -> None:
    error = raised(lambda: _config.flags.override(MAX_CHECK="x"))
    inner = raised(lambda: _config.Flags.MAX_CHECK.parse("x"))
    inner.__traceback__ = inner.__traceback__.tb_next.tb_next  # as if `max` had caught it
    error.__cause__ = inner
    assert drop_own_frames(error) and error.__cause__ is None and error.__suppress_context__
