"""Saved graphs: the loaded graph gives equal results, and bad files are refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from max._config import flags
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import SafetensorWeights
from tests.tolerance import assert_close


@pytest.fixture
def graph() -> Graph:
    """x of [n, 64] times a weight, plus a constant too large for the text."""
    rng = np.random.default_rng(0)
    x = TensorType(DType.float32, ["n", 64], DeviceRef.CPU())
    with Graph("saved", input_types=[x]) as graph:
        table = rng.standard_normal((64, 48)).astype(np.float32)
        w = Weight("layer.w", DType.bfloat16, [64, 48], DeviceRef.CPU())
        constant = ops.constant(table, DType.float32, device=DeviceRef.CPU())
        product = graph.inputs[0].tensor @ (w.cast(DType.float32) + constant)
        graph.output(ops.relu(product), product.argmax(axis=-1))
    return graph


def weight(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((64, 48)).astype(ml_dtypes.bfloat16)


def test_a_saved_graph_runs_as_the_one_that_was_built(
    graph: Graph, tmp_path: Path, rng: np.random.Generator
) -> None:
    w = weight(rng)
    graph.save(tmp_path / "model.mo", weights={"layer.w": w})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "model.constants.safetensors", "model.mo", "model.weights.safetensors",
    ]  # fmt: skip
    session = InferenceSession(devices=[CPU()])
    built = session.load(graph, weights_registry={"layer.w": w})
    x = rng.standard_normal((5, 64)).astype(np.float32)
    wanted = [r.to_numpy() for r in built.execute(x)]
    for model in (tmp_path / "model.mo", str(tmp_path / "model.mo")):
        for got, want in zip(session.load(model).execute(x), wanted, strict=True):
            np.testing.assert_array_equal(got.to_numpy(), want)
    again = Graph(path=tmp_path / "model.mo")
    assert str(again) == str(graph)
    other = weight(rng)
    got = session.load(again, weights_registry={"layer.w": other}).execute(x)[0].to_numpy()
    want = session.load(graph, weights_registry={"layer.w": other}).execute(x)[0].to_numpy()
    np.testing.assert_array_equal(got, want)


def test_the_registry_goes_before_what_was_saved(
    graph: Graph, tmp_path: Path, rng: np.random.Generator
) -> None:
    graph.save(tmp_path / "model.mo", weights={"layer.w": weight(rng)})
    other = weight(rng)
    session = InferenceSession(devices=[CPU()])
    x = rng.standard_normal((3, 64)).astype(np.float32)
    got = session.load(tmp_path / "model.mo", weights_registry={"layer.w": other}).execute(x)
    want = session.load(graph, weights_registry={"layer.w": other}).execute(x)
    assert_close(got[0].to_numpy(), want[0].to_numpy())


def test_saved_weights_are_a_checkpoint(
    graph: Graph, tmp_path: Path, rng: np.random.Generator
) -> None:
    w = weight(rng)
    graph.save(tmp_path / "model.mo", weights={"layer.w": w})
    weights = SafetensorWeights([tmp_path / "model.weights.safetensors"])
    data = weights.layer.w.data()
    assert data.dtype is DType.bfloat16
    np.testing.assert_array_equal(np.asarray(data.data.to_numpy()), w)  # pyright: ignore


def test_saving_again_leaves_nothing_of_before(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "model.mo", weights={"layer.w": np.zeros((64, 48), ml_dtypes.bfloat16)})
    graph.save(tmp_path / "model.mo")
    with pytest.raises(ValueError, match=r"layer\.w"):
        InferenceSession(devices=[CPU()]).load(tmp_path / "model.mo")


@pytest.mark.parametrize(
    "dtype", [d for d in DType if d.size_in_bits >= 8 and d is not DType.float8_e8m0fnu], ids=str
)
def test_weights_of_each_dtype(tmp_path: Path, dtype: DType, rng: np.random.Generator) -> None:
    with Graph("one") as graph:
        w = Weight("w", dtype, [3, 2], DeviceRef.CPU())
        graph.output(graph.add_weight(w))
    values = rng.integers(0, 2, (3, 2)).astype(dtype.to_numpy())
    graph.save(tmp_path / "one.mo", weights={"w": values})
    got = InferenceSession(devices=[CPU()]).load(tmp_path / "one.mo").execute()[0]
    assert got.dtype is dtype
    np.testing.assert_array_equal(got.to_numpy().view(np.uint8), values.view(np.uint8))


def test_an_unknown_weight_is_refused(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save: the graph has no weight 'layer\.v'"):
        graph.save(tmp_path / "model.mo", weights={"layer.v": np.zeros(3)})
    assert not list(tmp_path.iterdir())


def test_a_newer_format_is_refused(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "model.mo")
    path = tmp_path / "model.mo"
    path.write_text(path.read_text().replace("// max graph 1", "// max graph 9"))
    with pytest.raises(RuntimeError, match="format 9, this version reads up to 1"):
        InferenceSession(devices=[CPU()]).load(path)


def test_missing_constants_are_an_error(graph: Graph, tmp_path: Path) -> None:
    graph.save(tmp_path / "model.mo")
    (tmp_path / "model.constants.safetensors").unlink()
    with pytest.raises(
        RuntimeError, match=r"model\.constants\.safetensors is missing; it holds the"
    ):
        InferenceSession(devices=[CPU()]).load(tmp_path / "model.mo")


def test_small_constants_of_a_file_are_read_at_each_load(tmp_path: Path) -> None:
    """The compiler folds them into code, which the disk keeps by the graph's key."""
    kind = TensorType(DType.float32, [100], DeviceRef.CPU())
    with Graph("small", input_types=[kind]) as graph:
        table = ops.constant(np.ones(100, np.float32), DType.float32, DeviceRef.CPU())
        graph.output(graph.inputs[0].tensor * table)
    graph.save(tmp_path / "model.mo")
    # as another program may write it: one element, still in the file of constants
    path = tmp_path / "model.mo"
    path.write_text(path.read_text().replace("[100]", "[1]"))
    with flags.override(MAX_CACHE_DIR=tmp_path / "cache", MAX_CHECK=1):
        for value in (2.0, 3.0):
            save_file(
                {"constant_0": np.array([value], np.float32)},
                tmp_path / "model.constants.safetensors",
            )
            model = InferenceSession(devices=[CPU()]).load(path)
            assert model.execute(np.ones(1, np.float32))[0].to_numpy().tolist() == [value]


def test_outputs_in_the_middle_of_a_graph_are_refused(tmp_path: Path) -> None:
    """What is behind them would not be computed."""
    x = "!mo.tensor<[4], f32, cpu:0>"
    lines = [
        f"%y = mo.add(%x, %x) : ({x}, {x}) -> {x}",
        f"mo.output(%y) : ({x}) -> ()",
        f"%z = mo.mul(%y, %y) : ({x}, {x}) -> {x}",
        f"mo.output(%z) : ({x}) -> ()",
    ]
    path = tmp_path / "model.mo"
    for text, fits in ((lines, False), (lines[:1] + lines[2:], True)):
        body = "\n".join(text)
        path.write_text(f"builtin.module {{ mo.graph @g(%x: {x}) -> ({x}) {{\n{body}\n}} }}")
        if fits:
            (y,) = InferenceSession(devices=[CPU()]).load(path).execute(np.full(4, 3, np.float32))
            assert y.to_numpy().tolist() == [36] * 4
            continue
        with pytest.raises(RuntimeError, match="mo.output is not the last op of its block"):
            InferenceSession(devices=[CPU()]).load(path)


@pytest.mark.parametrize("what", ["weights", "constants"])
def test_a_damaged_file_beside_a_graph_is_named(
    graph: Graph, rng: np.random.Generator, tmp_path: Path, what: str
) -> None:
    graph.save(tmp_path / "model.mo", weights={"layer.w": weight(rng)})
    beside = tmp_path / f"model.{what}.safetensors"
    beside.write_bytes(beside.read_bytes()[:200])
    expected = (
        rf"load: the {what} of .*model\.mo are damaged: .*model\.{what}\.safetensors: .*truncated"
    )
    with pytest.raises(RuntimeError, match=expected):
        InferenceSession(devices=[CPU()]).load(tmp_path / "model.mo")


def test_damaged_files_are_refused(graph: Graph, tmp_path: Path, rng: np.random.Generator) -> None:
    """Random changes and truncations give one clear error, or a graph that is still valid."""
    graph.save(tmp_path / "model.mo", weights={"layer.w": np.zeros((64, 48), ml_dtypes.bfloat16)})
    session = InferenceSession(devices=[CPU()])
    for name in ("model.mo", "model.constants.safetensors", "model.weights.safetensors"):
        path = tmp_path / name
        sound = path.read_bytes()
        for _ in range(25):
            data = bytearray(sound)
            if rng.random() < 0.5:
                del data[int(rng.integers(len(data))) :]
            else:
                data[int(rng.integers(min(len(data), 4000)))] = int(rng.integers(256))
            path.write_bytes(data)
            try:
                session.load(
                    tmp_path / "model.mo",
                    weights_registry={"layer.w": np.zeros((64, 48), ml_dtypes.bfloat16)},
                )
            except (RuntimeError, ValueError):
                pass
        path.write_bytes(sound)
