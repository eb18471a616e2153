"""The output of MAX_DUMP appears on stderr of a program without logging setup, also with a warm disk cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
with Graph("dumped", input_types=[TensorType(DType.float32, ("n", 8), DeviceRef.CPU())]) as graph:
    graph.output(ops.tanh(graph.inputs[0].tensor) + 1.0)
InferenceSession(devices=[CPU()]).load(graph).execute(np.ones((2, 8), np.float32))
"""


def run(tmp_path: Path, dump: str) -> str:
    env = {**os.environ, "MAX_CACHE_DIR": str(tmp_path), "MAX_DUMP": dump}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("dump", "expected"),
    [
        (
            "passes",
            [
                "// ----- after canonicalize -----",
                "// ----- after fuse -----",
                "mok.region",
                "mo.tanh",
            ],
        ),
        ("kernels", ["kernel region", "parallel"]),
        ("llvm", ["define void @k_", "<"]),
        ("asm", [".globl\tk_"]),
    ],
)
def test_each_dump_shows_cold_and_warm(tmp_path: Path, dump: str, expected: list[str]) -> None:
    for _ in range(2):
        shown = run(tmp_path, dump)
        assert [text for text in expected if text not in shown] == [], shown[:2000]


def test_nothing_is_shown_unasked(tmp_path: Path) -> None:
    assert run(tmp_path, "") == ""
