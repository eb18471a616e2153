"""Profiles: calls, bytes and shares agree with the program; nothing is recorded without a request; `MAX_PROFILE` prints
a table.
"""

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
from max.graph import DeviceRef, Graph, ProfileScopeColor, TensorType, ops

DEVICE = DeviceRef.CPU()


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
    # plus the workspace for packed operands
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
from max.graph import DeviceRef, Graph, ProfileScopeColor, TensorType, ops
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


def test_operations_of_a_matmul_and_its_epilogue() -> None:
    types = [
        TensorType(DType.float32, ["n", 64], DEVICE),
        TensorType(DType.float32, [64, 32], DEVICE),
    ]
    with Graph("flops", input_types=types) as graph:
        x, w = [v.tensor for v in graph.inputs]
        graph.output(ops.tanh(x @ w) + 1, ops.sum(x, axis=1), ops.concat([x, x], axis=1))
    model = InferenceSession(devices=[CPU()]).load(graph)
    rng = np.random.default_rng(0)
    with model.profile() as profile:
        for rows in (10, 7):
            model.execute(
                *(rng.standard_normal(s).astype(np.float32) for s in ((rows, 64), (64, 32)))
            )
    found = {kernel.name: kernel for kernel in profile.kernels}
    assert found["matmul+tanh+add"].flops == 17 * (2 * 64 * 32 + 2 * 32)
    assert found["reduce_sum"].flops == 17 * 64
    assert found["reduce_sum"].gigaflops > 0
    assert found["concat"].flops == 0
    assert "GFLOP/s" in str(profile) and profile.to_dict()["kernels"][0]["flops"] > 0


def test_calls_in_a_loop_are_those_of_its_turns() -> None:
    with Graph("turns", input_types=[TensorType(DType.int32, [], DEVICE)]) as graph:
        zero = ops.constant(0, DType.int32, device=DEVICE)
        n = graph.inputs[0].tensor
        graph.output(*ops.while_loop(zero, lambda i: i < n, lambda i: i + 1))
    model = InferenceSession(devices=[CPU()]).load(graph)
    with model.profile() as profile:
        model.execute(np.int32(5))
        model.execute(np.int32(2))
    calls = {kernel.name: kernel.calls for kernel in profile.kernels}
    assert calls["greater"] == 9 and calls["add"] == 7


def test_the_trace_is_of_the_launches(tmp_path: Path) -> None:
    """The trace is well-formed and ordered, its events do not overlap, and its durations equal those of the table."""
    with Graph("trace", input_types=[TensorType(DType.float32, [300, 64], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(ops.softmax(ops.tanh(x @ x.T) @ x))
    model = InferenceSession(devices=[CPU()]).load(graph)
    x = np.random.default_rng(1).standard_normal((300, 64)).astype(np.float32)
    model.execute(x)
    with model.profile() as profile:
        for _ in range(4):
            model.execute(x)
    profile.write_chrome_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert events[0]["ts"] == 0 and {e["ph"] for e in events} == {"X"}
    end = 0.0
    for event in events:
        assert event["dur"] >= 0 and event["ts"] >= end - 1e-6
        end = event["ts"] + event["dur"]
    kernels = [e for e in events if e["cat"] == "kernel"]
    assert len(kernels) == sum(kernel.calls for kernel in profile.kernels)
    total = sum(e["dur"] for e in kernels) / 1e6
    assert np.isclose(total, sum(kernel.seconds for kernel in profile.kernels), rtol=1e-6)
    # the next profile contains no earlier events
    with model.profile() as empty:
        pass
    assert empty.events == []


def test_scopes_are_in_the_names_of_kernels(session: InferenceSession) -> None:
    with Graph("scoped", input_types=[TensorType(DType.float32, ("n", 8), DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        with graph.profile_scope("draft [1]", color=ProfileScopeColor.RED):
            y = ops.softmax(x)
            with graph.profile_scope("inner"):
                z = ops.cumsum(y)
        with pytest.raises(KeyError), graph.profile_scope("failed"):
            raise KeyError
        graph.output(ops.argsort(ops.reshape(z, [-1])))
    # by the second session too, which finds the program in the cache
    for loaded in (session, InferenceSession(devices=[CPU()])):
        model = loaded.load(graph)
        with model.profile() as profile:
            model.execute(np.ones((3, 8), np.float32))
        names = {kernel.name.partition(" ")[0]: kernel.name for kernel in profile.kernels}
        assert names["softmax"] == "softmax [draft [1]]"
        assert names["cumsum"] == "cumsum [draft [1]/inner]"
        assert {name for name in names.values() if "[" not in name}
        assert "softmax [draft [1]]" in {event["name"] for event in profile.events}


def test_names_of_scopes() -> None:
    graph = Graph("scoped")
    for name, color, error in (
        (3, None, TypeError), ("", None, ValueError), ("a\nb", None, ValueError), ("a", "red", TypeError),
    ):  # fmt: skip
        with graph, pytest.raises(error, match="profile_scope"), graph.profile_scope(name, color):  # pyright: ignore[reportArgumentType]
            pass


def test_errors_of_a_run_name_the_scope(session: InferenceSession) -> None:
    types = [TensorType(DType.float32, (5,), DEVICE), TensorType(DType.int64, ("n",), DEVICE)]
    with Graph("scoped", input_types=types) as graph:
        x, index = (value.tensor for value in graph.inputs)
        with graph.profile_scope("lookup"):
            y = ops.gather(x, index, axis=0)
        graph.output(y)
    model = session.load(graph)
    with pytest.raises(Exception, match=r"test_profile\.py:\d+ \[lookup\]"):
        model.execute(np.ones(5, np.float32), np.array([7]))
