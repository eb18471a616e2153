"""What is measured when a program is loaded changes nothing but time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, encode
from max.engine import InferenceSession, Model, _limits
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding

DEVICE = DeviceRef.CPU()
N, K = 640, 768


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    monkeypatch.setattr(_limits, "_known", {})
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    with flags.override(MAX_AUTOTUNE=True):
        yield


def product_model(encoding: str, rows: object = "rows", layers: int = 5, n: int = N) -> Model:
    """Products by weights of their own, one after the other."""
    rng = np.random.default_rng(5)
    quantised = encoding in BLOCK_FORMATS
    kind = DType.float32 if quantised else DType[encoding]
    registry = {}
    with Graph("products", input_types=[TensorType(kind, [rows, K], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        for i in range(layers):
            values = (rng.standard_normal((n, K)) / 32).astype(np.float32)
            if quantised:
                packed = encode(values, encoding)
                weight = Weight(f"w{i}", DType.uint8, packed.shape, DEVICE)
                registry[f"w{i}"] = packed
                y = ops.qmatmul(QuantizationEncoding(encoding), None, x, weight)
            else:
                weight = Weight(f"w{i}", kind, [n, K], DEVICE)
                bits = values.astype(ml_dtypes.bfloat16 if encoding == "bfloat16" else np.float32)
                registry[f"w{i}"] = bits
                y = x @ weight.T
            x = ops.concat([ops.tanh(y), x[:, : K - n]], axis=1) if n < K else y
        graph.output(x)
    return InferenceSession(devices=[CPU()]).load(graph, weights_registry=registry)


def limits_of(model: Model) -> set[int]:
    assert model._linked is not None
    launches = model._compiled.main.launches
    found = zip(launches, model._linked.main.executor.program.launches, strict=True)
    return {made.slots[code.choice.slot][1] for code, made in found if code.choice is not None}


def run(model: Model, rows: int, kind: str) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
    given = x.astype(ml_dtypes.bfloat16) if kind == "bfloat16" else x
    (out,) = model.execute(Tensor.from_numpy(given))
    return np.array(out.to_numpy())


@pytest.mark.parametrize(
    ("encoding", "crossing"),
    [*(("float32", n) for n in (0, 1, 3, 8, 11, 40, 100)), ("Q4_0", 100), ("Q4_0", 1000)],
)
def test_the_limit_is_where_the_ways_cross(monkeypatch, encoding: str, crossing: int) -> None:
    asked: list[int] = []

    def few_is_faster(self: object, rows: int) -> bool:
        asked.append(rows)
        return rows <= crossing

    monkeypatch.setattr(_limits._Measurement, "_few_is_faster", few_is_faster)
    (limit,) = limits_of(product_model(encoding))
    most = {"float32": 64, "Q4_0": 240}[encoding]
    if crossing >= min(most, _limits.MOST_ROWS):
        assert limit == most
    else:
        # within a half of it, at the least one row
        assert max(crossing / 1.51, 1) <= limit + 1 and limit <= max(crossing, 1)
    assert 1 <= len(asked) <= 8
    before = len(asked)
    assert limits_of(product_model(encoding)) == {limit} and len(asked) == before
    _limits._known.clear()
    assert limits_of(product_model(encoding)) == {limit} and len(asked) == before, "from the disk"


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "Q4_0", "Q6_K"])
def test_results_do_not_depend_on_the_limit(monkeypatch, tmp_path, encoding: str) -> None:
    measured = product_model(encoding)
    assert all(1 <= limit <= 240 for limit in limits_of(measured))
    wanted = {rows: run(measured, rows, encoding) for rows in (1, 5, 17, 70)}
    for crossing in (1, 1000):
        _limits._known.clear()
        monkeypatch.setattr(
            _limits._Measurement, "_few_is_faster", lambda self, rows, c=crossing: rows <= c
        )
        # another folder: nothing is known there either
        monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path / str(crossing)))
        other = product_model(encoding)
        assert limits_of(other) == {1 if crossing == 1 else 64 if encoding[0] in "bf" else 240}
        for rows, out in wanted.items():
            np.testing.assert_array_equal(run(other, rows, encoding), out)


def test_a_real_measurement_runs_the_programs_own_launches(monkeypatch, caplog) -> None:
    monkeypatch.setattr(_limits, "UNDISTURBED", 0)
    with caplog.at_level("INFO", "max.engine"):
        model = product_model("float32")
    (record,) = [r for r in caplog.records if "rows are few" in r.message]
    assert "float32 by panels of float32, k 768: up to" in record.message
    x = np.random.default_rng(0).standard_normal((9, K)).astype(np.float32)
    (out,) = model.execute(x)
    assert np.isfinite(out.to_numpy()).all()


@pytest.mark.parametrize(
    "why", ["switched off", "little weights", "rows are static", "a clear guess", "a busy machine"]
)
def test_the_guess_stays(monkeypatch, why: str) -> None:
    if why == "a clear guess":
        # neither way is clearly faster
        monkeypatch.setattr(_limits.time, "perf_counter", itertools.count().__next__)
        monkeypatch.setattr(_limits.time, "process_time", itertools.count(0, 1000).__next__)
        assert limits_of(product_model("float32")) == {8}
        return

    if why == "a busy machine":
        monkeypatch.setattr(_limits.time, "process_time", lambda: 0.0)
        assert limits_of(product_model("float32")) == {8}
        assert not _limits._known, "it is measured anew the next time"
        return

    def never(self: object, rows: int) -> bool:
        raise AssertionError("it was measured")

    monkeypatch.setattr(_limits._Measurement, "_few_is_faster", never)
    if why == "switched off":
        with flags.override(MAX_AUTOTUNE=False):
            assert limits_of(product_model("float32")) == {8}
    elif why == "little weights":
        assert limits_of(product_model("float32", layers=1, n=64)) == {8}
    else:
        monkeypatch.undo()
        with flags.override(MAX_AUTOTUNE=True):
            assert limits_of(product_model("float32", rows=5)) == {8}
