"""Profiles: calls, bytes and shares agree with the program; nothing is kept unasked; `MAX_PROFILE` shows a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, ops


def load(session: InferenceSession) -> Model:
    types = [
        TensorType(DType.float32, ("n", 32), DeviceRef.CPU()),
        TensorType(DType.float32, (32, 48), DeviceRef.CPU()),
    ]
    with Graph("profiled", input_types=types) as graph:
        x, y = (value.tensor for value in graph.inputs)
        graph.output(ops.softmax(ops.matmul(ops.tanh(x), y)))
    return session.load(graph)


@pytest.fixture(scope="module")
def session() -> InferenceSession:
    return InferenceSession(devices=[CPU()])


def run(model: Model, rows: int) -> None:
    model.execute(np.ones((rows, 32), np.float32), np.ones((32, 48), np.float32))


def test_calls_shares_and_bytes_of_each_size(session: InferenceSession) -> None:
    model = load(session)
    run(model, 3)
    with model.profile() as profile:
        run(model, 3)
        run(model, 3)
        run(model, 7)
    run(model, 9)
    assert profile.runs == 3
    assert [kernel.calls for kernel in profile.kernels] == [3] * len(model.kernel_summaries)
    assert {kernel.name for kernel in profile.kernels} == set(model.kernel_summaries)
    assert sum(profile.share(kernel) for kernel in profile.kernels) == pytest.approx(1)
    moved = {kernel.name: kernel.bytes for kernel in profile.kernels}
    assert moved["tanh"] == 4 * sum(2 * n * 32 for n in (3, 3, 7))
    assert moved["softmax"] == 4 * sum(2 * n * 48 for n in (3, 3, 7))
    # its workspace for packed operands comes on top
    assert moved["matmul"] >= 4 * sum(n * 32 + 32 * 48 + n * 48 for n in (3, 3, 7))
    inside = sum(kernel.seconds + kernel.wait_seconds for kernel in profile.kernels)
    assert 0 < inside <= profile.seconds
    times = [kernel.seconds for kernel in profile.kernels]
    assert times == sorted(times, reverse=True)
    assert json.loads(json.dumps(profile.to_dict()))["runs"] == 3
    assert "matmul" in str(profile)


def test_blocks_may_be_nested(session: InferenceSession) -> None:
    model = load(session)
    with session.profile() as outer:
        run(model, 2)
        with model.profile() as inner:
            run(model, 2)
        run(model, 2)
    assert (inner.runs, outer.runs) == (1, 3)
    with model.profile() as nothing:
        pass
    assert nothing.runs == 0 and nothing.kernels == []
    assert model._linked is not None and model._linked.main._watchers == 0


CODE = """
import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
with Graph("p", input_types=[TensorType(DType.float32, ("n", 8), DeviceRef.CPU())]) as graph:
    graph.output(ops.tanh(graph.inputs[0].tensor))
InferenceSession(devices=[CPU()]).load(graph).execute(np.ones((2, 8), np.float32))
"""


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_the_flag_shows_a_table_at_the_end(tmp_path: Path, wanted: str) -> None:
    env = {**os.environ, "MAX_CACHE_DIR": str(tmp_path), "MAX_PROFILE": wanted}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert ("tanh" in done.stderr) == (wanted == "1"), done.stderr
