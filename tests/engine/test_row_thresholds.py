"""Row thresholds: the idle thread measures them, a load never does; they change only the run time."""

from __future__ import annotations

import functools
import gc
import itertools
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest

from max._backends.cpu.kernels.products.dense.packed_matmul import (
    default_threshold as dense_threshold,
)
from max._backends.cpu.kernels.products.quantized.packed import FORMATS
from max._backends.cpu.kernels.products.quantized.packed_matmul import default_threshold
from max._backends.cpu.kernels.products.quantized.unpacking import quantized_tiling
from max._backends.cpu.runtime.amx import native_target
from max._backends.cpu.tuning import TUNING
from max._config import flags
from max.driver import CPU, Tensor
from max.dtype import DType
from max.dtype.blocks import BLOCK_FORMATS, encode
from max.engine import InferenceSession, Model
from max.engine.tune import (
    busy_measurement,
    idle_measurement,
    row_thresholds,
    threshold_measurement,
)
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.quantization import QuantizationEncoding

DEVICE = DeviceRef.CPU()
N, K = 640, 768
GUESS = dense_threshold(native_target(), "float32")
"""The row threshold of float32 without a measurement."""


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path) -> Iterator[None]:
    monkeypatch.setattr(row_thresholds.process_thresholds, "_known", {})
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path))
    idler = idle_measurement._Idler()
    monkeypatch.setattr(idle_measurement, "_idler", idler)
    # the idle thread does not start; tests measure explicitly or shorten its delay
    with flags.override(MAX_AUTOTUNE=True):
        yield
    idler.end()


@functools.cache
def weights(encoding: str, layers: int, n: int) -> list[np.ndarray]:
    """The same weights for all models of a shape: to quantize them takes longer than to compile the model."""
    rng = np.random.default_rng(5)
    values = [(rng.standard_normal((n, K)) / 32).astype(np.float32) for _ in range(layers)]
    if encoding in BLOCK_FORMATS:
        return [encode(v, encoding) for v in values]
    return [v.astype(ml_dtypes.bfloat16) if encoding == "bfloat16" else v for v in values]


def product_model(encoding: str, rows: object = "rows", layers: int = 5, n: int = N) -> Model:
    """Stages a chain of products, each with its own weight."""
    quantized = encoding in BLOCK_FORMATS
    kind = DType.float32 if quantized else DType[encoding]
    registry = {f"w{i}": weight for i, weight in enumerate(weights(encoding, layers, n))}
    with Graph("products", input_types=[TensorType(kind, [rows, K], DEVICE)]) as graph:
        x = graph.inputs[0].tensor
        for i, values in enumerate(registry.values()):
            if quantized:
                weight = Weight(f"w{i}", DType.uint8, values.shape, DEVICE)
                y = ops.qmatmul(QuantizationEncoding(encoding), None, x, weight)
            else:
                y = x @ Weight(f"w{i}", kind, [n, K], DEVICE).T
            x = ops.concat([ops.tanh(y), x[:, : K - n]], axis=1) if n < K else y
        graph.output(x)
    return InferenceSession(devices=[CPU()]).load(graph, weights_registry=registry)


def limits_of(model: Model) -> set[int]:
    assert model._linked is not None
    launches = model._compiled.main.launches
    found = zip(launches, model._linked.main.executor.program.launches, strict=True)
    return {made.slots[code.limit.slot][1] for code, made in found if code.limit is not None}


def run(model: Model, rows: int, kind: str) -> np.ndarray:
    x = np.random.default_rng(rows).standard_normal((rows, K)).astype(np.float32)
    given = x.astype(ml_dtypes.bfloat16) if kind == "bfloat16" else x
    (out,) = model.execute(Tensor.from_numpy(given))
    return np.array(out.to_numpy())


def measured(model: Model) -> Model:
    """Measures a model's thresholds synchronously, as the idle thread does."""
    linked = model._linked
    assert linked is not None
    for job in [job for job in idle_measurement._idler._jobs if job.linked() is linked]:
        idle_measurement._idler._jobs.remove(job)
        idle_measurement._idler._measure(job)
    return model


@pytest.mark.parametrize(
    ("encoding", "crossing"),
    [*(("float32", n) for n in (0, 1, 3, 8, 11, 40, 100)), ("Q4_0", 100), ("Q4_0", 1000)],
)
def test_the_threshold_is_where_the_ways_cross(monkeypatch, encoding: str, crossing: int) -> None:
    asked: list[int] = []

    def few_is_faster(self: object, rows: int) -> Generator[None, None, bool]:
        asked.append(rows)
        yield from ()
        return rows <= crossing

    monkeypatch.setattr(threshold_measurement.Measurement, "_few_is_faster", few_is_faster)
    guesses = limits_of(model := product_model(encoding))
    target = native_target()
    q4 = default_threshold(target, quantized_tiling(target, FORMATS["Q4_0"]))
    assert guesses == {{"float32": GUESS, "Q4_0": q4}[encoding]} and not asked, (
        "a load measures nothing"
    )
    (limit,) = limits_of(measured(model))
    most = {"float32": 64, "Q4_0": 240}[encoding]
    if crossing >= min(most, TUNING.most_rows):
        assert limit == most
    else:
        # within half of it, at least one row
        assert max(crossing / 1.51, 1) <= limit + 1 and limit <= max(crossing, 1)
    assert 1 <= len(asked) <= 8
    before = len(asked)
    assert limits_of(measured(product_model(encoding))) == {limit} and len(asked) == before
    row_thresholds.process_thresholds._known.clear()
    assert limits_of(product_model(encoding)) == {limit} and len(asked) == before, "from the disk"


@pytest.mark.parametrize("encoding", ["float32", "bfloat16", "Q4_0", "Q6_K"])
def test_results_do_not_depend_on_the_threshold(monkeypatch, tmp_path, encoding: str) -> None:
    guessed = product_model(encoding)
    wanted = {rows: run(guessed, rows, encoding) for rows in (1, 5, 17, 70)}
    for crossing in (1, 1000):
        row_thresholds.process_thresholds._known.clear()

        def few_is_faster(
            self: object, rows: int, c: int = crossing
        ) -> Generator[None, None, bool]:
            yield from ()
            return rows <= c

        monkeypatch.setattr(threshold_measurement.Measurement, "_few_is_faster", few_is_faster)
        # another cache folder has no thresholds either
        monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path / str(crossing)))
        other = measured(product_model(encoding))
        assert limits_of(other) == {1 if crossing == 1 else 64 if encoding[0] in "bf" else 240}
        for rows, out in wanted.items():
            np.testing.assert_array_equal(run(other, rows, encoding), out)


def test_a_real_measurement_runs_the_programs_own_launches(monkeypatch, caplog) -> None:
    model = product_model("float32")
    with caplog.at_level("INFO", "max.engine"):
        measured(model)
    (record,) = {id(r): r for r in caplog.records if "row threshold" in r.message}.values()
    assert "float32 by panels of float32, k 768: row threshold" in record.message
    x = np.random.default_rng(0).standard_normal((9, K)).astype(np.float32)
    (out,) = model.execute(x)
    assert np.isfinite(out.to_numpy()).all()


@pytest.mark.parametrize(
    "why", ["switched off", "little weights", "rows are static", "a clear guess", "a busy machine"]
)
def test_the_guess_stays(monkeypatch, why: str) -> None:
    if why in ("a clear guess", "a busy machine"):
        # neither kernel is clearly faster, or the processor is busy
        step = 1000 if why == "a clear guess" else 0
        monkeypatch.setattr(threshold_measurement.time, "perf_counter", itertools.count().__next__)
        monkeypatch.setattr(
            threshold_measurement.time, "process_time", itertools.count(0, step).__next__
        )
        assert limits_of(measured(product_model("float32"))) == {GUESS}
        (known,) = row_thresholds.process_thresholds._known.values()
        assert known.quality == (0 if why == "a busy machine" else known.quality)
        return

    def never(self: object, rows: int) -> bool:
        raise AssertionError("it was measured")

    monkeypatch.setattr(threshold_measurement.Measurement, "_few_is_faster", never)
    if why == "switched off":
        with flags.override(MAX_AUTOTUNE=False):
            assert limits_of(measured(product_model("float32"))) == {GUESS}
    elif why == "little weights":
        assert limits_of(measured(product_model("float32", layers=1, n=64))) == {GUESS}
    else:
        monkeypatch.undo()
        with flags.override(MAX_AUTOTUNE=True):
            assert limits_of(measured(product_model("float32", rows=5))) == {GUESS}


def test_a_better_measurement_replaces_a_worse_one(monkeypatch) -> None:
    answers = iter([(30, 0.3), (20, 0.7), (40, 0.6), (10, 0.95)])

    def threshold(self: object) -> row_thresholds.Threshold:
        return row_thresholds.Threshold(*next(answers))

    monkeypatch.setattr(threshold_measurement.Measurement, "threshold", threshold)
    used = []
    for _ in range(5):
        row_thresholds.process_thresholds._known.clear()
        used.append(limits_of(measured(product_model("float32"))))
    # too noisy to use; used; worse than the stored one; from a quiet machine, so not measured again
    assert used == [{GUESS}, {20}, {20}, {10}, {10}]
    assert next(answers, None) is None
    row_thresholds.process_thresholds._known.clear()
    assert limits_of(product_model("float32")) == {10}


def test_damaged_entries_are_not_used(tmp_path, monkeypatch) -> None:
    def few_is_faster(self: object, rows: int) -> Generator[None, None, bool]:
        yield from ()
        return rows <= 20

    monkeypatch.setattr(threshold_measurement.Measurement, "_few_is_faster", few_is_faster)
    (limit,) = limits_of(measured(product_model("float32")))
    assert limit != GUESS
    (entry,) = (path for path in (tmp_path / "limits").rglob("*") if path.is_file())
    sound = entry.read_bytes()
    for data in (sound[:-1], sound[:-1] + bytes([sound[-1] ^ 1]), b"", sound + b"x"):
        entry.write_bytes(data)
        row_thresholds.process_thresholds._known.clear()
        assert limits_of(product_model("float32")) == {GUESS}


def wait_for(what: Callable[[], bool]) -> None:
    for _ in range(2000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def test_the_idle_thread_measures_after_the_first_execution(monkeypatch) -> None:
    monkeypatch.setattr(idle_measurement, "IDLE_SECONDS", 0.05)
    monkeypatch.setattr(idle_measurement, "IDLE_CPU", 1e9)
    monkeypatch.setattr(
        threshold_measurement.Measurement,
        "threshold",
        lambda self: row_thresholds.Threshold(33, 0.95),
    )
    model = product_model("float32")
    time.sleep(0.3)
    assert limits_of(model) == {GUESS}, "it has not run yet"
    run(model, 3, "float32")
    wait_for(lambda: limits_of(model) == {33})


def test_a_measurement_gives_way(monkeypatch) -> None:
    model, other = product_model("float32"), product_model("float32", layers=2)
    linked = model._linked
    assert linked is not None
    (job,) = (job for job in idle_measurement._idler._jobs if job.linked() is linked)
    turns, backend = [], linked.main.backend

    def stopped() -> bool:
        # another model runs on the pool between two measurements
        turns.append(1)
        if len(turns) == 2:
            run(other, 2, "float32")
        return False

    before = threshold_measurement.stats.given_up
    measurement = threshold_measurement.Measurement(
        job.compiled, job.link, job.unsure.sample, backend, stopped
    )
    with pytest.raises(threshold_measurement.PoolIsBusyError):
        measurement.threshold()
    assert threshold_measurement.stats.given_up == before + 1 and len(turns) == 2
    ended = threshold_measurement.Measurement(
        job.compiled, job.link, job.unsure.sample, backend, lambda: True
    )
    with pytest.raises(threshold_measurement.PoolIsBusyError):
        ended.threshold()


def test_a_device_that_is_never_idle_learns_between_executions(monkeypatch) -> None:
    """A turn after each execution, on its thread; results are those without it."""
    monkeypatch.setattr(busy_measurement, "BUSY_SHARE", 1e9)
    model = product_model("float32")
    linked = model._linked
    assert linked is not None
    (job,) = (job for job in idle_measurement._idler._jobs if job.linked() is linked)
    expected = run(model, 3, "float32")
    for _ in range(idle_measurement.BUSY_OBSERVATIONS):
        assert linked.main.after_run is None
        idle_measurement._idler._measure_between(job)
    before, count = threshold_measurement.stats.num_measured, 0
    while linked.main.after_run is not None:
        np.testing.assert_array_equal(run(model, 3, "float32"), expected)
        count += 1
        assert count < 9 * 8, "a turn has no end"
    assert threshold_measurement.stats.num_measured == before + 1 and count > 4
    (known,) = row_thresholds.process_thresholds._known.values()
    used = known.quality >= row_thresholds.USABLE
    assert limits_of(model) == {known.rows if used else GUESS}
    # a usable result is not measured again
    row_thresholds.process_thresholds._known[job.unsure.key] = row_thresholds.Threshold(5, 0.7)
    idle_measurement._idler._measure_between(job)
    assert linked.main.after_run is None


def test_turns_under_load_take_a_share_of_the_time(monkeypatch) -> None:
    """A disturbed measurement begins again; nothing is measured while another run lasts."""
    clock, begun = [0.0], list[int]()
    monkeypatch.setattr(busy_measurement.time, "perf_counter", lambda: clock[0])

    class Device:
        runs = 0

        def run_number(self) -> int:
            return self.runs

    device = Device()

    def turns() -> Generator[None, None, row_thresholds.Threshold]:
        begun.append(0)
        for _ in range(3):
            clock[0] += 1.0
            begun[-1] += 1
            device.runs += 4 + extra.pop() if extra else 4
            yield
        return row_thresholds.Threshold(9, 1.0)

    extra = [2]
    made: list[object] = []
    measurement = busy_measurement.BusyMeasurement(
        turns, cast(Any, device), lambda threshold: made.append(threshold)
    )
    device.runs += 1
    measurement.take_turn()
    assert not begun, "something runs"
    device.runs += 1
    measurement.take_turn()
    assert begun == [1]
    for _ in range(100):
        measurement.take_turn()
    assert begun == [1], "its share of the time is used up"
    executions = 0
    while not measurement.ended:
        clock[0] += 1.0
        executions += 1
        measurement.take_turn()
    # four turns of a second, the first one in vain
    assert (
        begun == [1, 3]
        and 3 / busy_measurement.BUSY_SHARE < clock[0] < 5 / busy_measurement.BUSY_SHARE
    )
    assert executions > 90 and made == [row_thresholds.Threshold(9, 1.0)]
    measurement.take_turn()
    assert len(made) == 1


def test_waiting_for_idleness_keeps_no_model_alive() -> None:
    model = product_model("float32")
    assert model._linked is not None
    ref = weakref.ref(model._linked)
    del model
    gc.collect()
    assert ref() is None
