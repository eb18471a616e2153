"""Packed weights on the disk: the next load maps them with equal results; changed files are packed again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from max._config import flags
from max._host.disk_cache import Cache
from max.dtype import DType
from max.engine import InferenceSession
from max.engine.load import linker, packed_weights
from max.graph import DeviceRef, Graph, TensorType, Weight, ops
from max.graph.weights import SafetensorWeights

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are written on Linux only")
CPU = DeviceRef.CPU()
ROWS, COLUMNS = 96, 160


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache that accepts small weights and is not written by a timer."""
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 1)
    monkeypatch.setattr(packed_weights, "WAIT_SECONDS", 1e6)
    monkeypatch.setattr(packed_weights, "_writer", packed_weights._Writer())
    with flags.override(MAX_CACHE_DIR=tmp_path / "cache", MAX_CHECK=1, MAX_GUARD=False):
        yield tmp_path


def copies(folder: Path) -> list[Path]:
    inner = folder / "cache" / "weights"
    return sorted(inner.iterdir()) if inner.exists() else []


def write(path: Path, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {
        "w": rng.standard_normal((ROWS, COLUMNS)).astype(np.float32),
        "b": rng.standard_normal(ROWS).astype(np.float32),
    }
    save_file(arrays, path)
    return arrays


def load(path: Path, dtype: DType = DType.float32) -> Any:
    """``x @ w.T + b``, with w packed at load."""
    with Graph("affine", input_types=[TensorType(dtype, ["n", COLUMNS], CPU)]) as graph:
        w = Weight("w", dtype, [ROWS, COLUMNS], CPU)
        b = Weight("b", dtype, [ROWS], CPU)
        y = graph.inputs[0].tensor @ w.T + b
        graph.output(y.cast(DType.float32))
    weights = SafetensorWeights([path])
    registry = {name: w.data().cast_at_load(dtype).data for name, w in weights.items()}
    return InferenceSession().load(graph, weights_registry=registry)


def result(model: Any, arrays: dict[str, np.ndarray], dtype: DType = DType.float32) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((5, COLUMNS)).astype(dtype.to_numpy())
    y = model.execute(x)[0].to_numpy()
    expected = x.astype(np.float64) @ arrays["w"].astype(np.float64).T + arrays["b"]
    error = 1e-4 if dtype is DType.float32 else 0.2
    np.testing.assert_allclose(y, expected, rtol=error, atol=error)
    return y


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch):
    """Makes packing fail after the fixture is called."""

    def unwanted(*args: Any) -> None:
        raise AssertionError("packed or written again")

    def patch() -> None:
        monkeypatch.setattr(linker, "run_once", unwanted)
        # what was mapped is on the disk
        monkeypatch.setattr(packed_weights.PackedCopy, "write_later", unwanted)

    return patch


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_the_next_load_packs_nothing(folder: Path, dtype: DType, no_packing: Any) -> None:
    arrays = write(folder / "model.safetensors", 1)
    model = load(folder / "model.safetensors", dtype)
    first = result(model, arrays, dtype)
    assert not copies(folder)
    packed_weights._writer.run()
    (copy,) = copies(folder)
    assert copy.stat().st_size >= ROWS * COLUMNS * dtype.size_in_bytes
    no_packing()
    np.testing.assert_array_equal(
        result(load(folder / "model.safetensors", dtype), arrays, dtype), first
    )
    # the weight that the copy replaces is not kept: what is left is the copy, and the bias
    assert len(load(folder / "model.safetensors", dtype)._linked.owners) == 2
    # the copy is not written again
    written = copy.stat().st_ino
    packed_weights._writer.run()
    assert [path.stat().st_ino for path in copies(folder)] == [written]


LOADS = """
import json, sys, time
from pathlib import Path
from safetensors.numpy import load_file
from max._host.disk_cache import default_cache
from max._load_steps import STEPS
from max.engine.load import linker, packed_weights
from tests.engine.test_packed_copy import load, result
packed_weights.LEAST_BYTES = 1
run = linker.run_once
def pack(*arguments):
    print("packs", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    return run(*arguments)
linker.run_once = pack
with STEPS.handed_to(lambda step, *_: step == packed_weights.WAITS and print("waits", flush=True)):
    model = load(Path(sys.argv[1]))
y = result(model, load_file(sys.argv[1]))
print(default_cache().stats.num_packed, y.tobytes().hex(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_processes_that_load_at_the_same_time_pack_once(folder: Path, is_killed: bool) -> None:
    path, go = folder / "model.safetensors", folder / "go"
    write(path, 1)
    environment = {**os.environ, "MAX_CACHE_DIR": str(folder / "cache"), "MAX_CHECK": "1"}
    processes: list[Any] = []

    def start() -> None:
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", LOADS, str(path), str(go)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**environment, "MAX_GUARD": "0"},
                cwd=Path(__file__).parents[2],
            )
        )

    try:
        start()
        assert processes[0].stdout.readline() == "packs\n"
        start()
        start()
        assert [each.stdout.readline() for each in processes[1:]] == ["waits\n"] * 2
        if is_killed:
            processes[0].kill()
        go.touch()
        ends: list[list[str]] = []
        for each in processes[is_killed:]:
            # one of the others packs in place of a process that was killed
            while (line := each.stdout.readline()) == "packs\n":
                pass
            ends.append(line.split())
        assert sorted(count for count, _ in ends) == ["0"] * (len(ends) - 1) + ["1"]
        assert len({y for _, y in ends}) == 1
        # at once, not by a timer
        assert len(copies(folder)) == 1
    finally:
        for each in processes:
            each.kill()
            each.communicate()


def test_without_room_nobody_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "_has_room", lambda *_: False)
    monkeypatch.setattr(packed_weights, "claim_entry", None)
    arrays = write(folder / "model.safetensors", 1)
    result(load(folder / "model.safetensors"), arrays)


def test_changed_weights_are_packed_again(folder: Path) -> None:
    path = folder / "model.safetensors"
    first = write(path, 1)
    result(load(path), first)
    model = load(path)
    packed_weights._writer.run()
    del model
    # overwritten in place: inode, size and modification time do not change
    stat = path.stat()
    second = write(folder / "other.safetensors", 2)
    path.write_bytes((folder / "other.safetensors").read_bytes())
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_ino) == (stat.st_size, stat.st_ino)
    result(load(path), second)


def test_another_program_has_another_copy(folder: Path) -> None:
    arrays = write(folder / "model.safetensors", 1)
    models = [load(folder / "model.safetensors", d) for d in (DType.float32, DType.bfloat16)]
    packed_weights._writer.run()
    assert len(copies(folder)) == 2
    for model, dtype in zip(models, (DType.float32, DType.bfloat16), strict=True):
        result(model, arrays, dtype)


@pytest.mark.parametrize("damage", ["short", "long", "foreign", "empty"])
def test_a_damaged_copy_is_not_used(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    arrays = write(path, 1)
    model = load(path)
    packed_weights._writer.run()
    (copy,) = copies(folder)
    content = copy.read_bytes()
    changed = {"short": content[:-1], "long": content + b"x", "empty": b""}
    copy.write_bytes(changed.get(damage, b"\0" * len(content)))
    result(load(path), arrays)
    del model


def test_weights_that_are_not_in_files_have_no_copy(folder: Path) -> None:
    with Graph("affine", input_types=[TensorType(DType.float32, ["n", COLUMNS], CPU)]) as graph:
        graph.output(graph.inputs[0].tensor @ Weight("w", DType.float32, [ROWS, COLUMNS], CPU).T)
    w = np.ones((ROWS, COLUMNS), np.float32)
    model = InferenceSession().load(graph, weights_registry={"w": w})
    packed_weights._writer.run()
    assert not copies(folder)
    del model


def test_without_room_nothing_is_written(folder: Path) -> None:
    path = folder / "model.safetensors"
    write(path, 1)
    for override in ({"MAX_WEIGHT_CACHE_SIZE": 0}, {"MAX_GUARD": True}):
        with flags.override(**override):
            model = load(path)
            packed_weights._writer.run()
            assert not copies(folder)
            del model
    # the copy of a model whose files no longer exist
    model = load(path)
    del model
    gc.collect()
    packed_weights._writer.run()
    assert not copies(folder)


def test_the_least_recently_used_copies_make_room(folder: Path) -> None:
    inner = folder / "cache" / "weights"
    with flags.override(MAX_WEIGHT_CACHE_SIZE=1):
        half = np.zeros(400 << 10, np.uint8)
        for number, name in enumerate("abc"):
            assert packed_weights.PackedCopy(inner / name, half.nbytes).write(half)
            os.utime(inner / name, (number, number))
        assert {path.name for path in copies(folder)} == {"b", "c"}
        # b was used last, so c is deleted
        assert packed_weights.PackedCopy(inner / "b", half.nbytes).map_file() is not None
        assert packed_weights.PackedCopy(inner / "d", half.nbytes).write(half)
        assert {path.name for path in copies(folder)} == {"b", "d"}
    assert packed_weights.PackedCopy(inner / "c", half.nbytes).map_file() is None


def test_the_end_of_a_process_waits_for_some_time_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "model.safetensors"
    arrays = write(path, 1)
    model = load(path)
    monkeypatch.setattr(packed_weights, "CHUNK", 1 << 10)
    monkeypatch.setattr(packed_weights, "EXIT_SECONDS", 0.0)
    packed_weights._writer.at_exit()
    assert not copies(folder)
    monkeypatch.setattr(packed_weights, "EXIT_SECONDS", 60.0)
    other = load(path)
    packed_weights._writer.at_exit()
    assert len(copies(folder)) == 1
    np.testing.assert_array_equal(result(other, arrays), result(model, arrays))


def test_an_interrupted_copy_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    copy = packed_weights.PackedCopy(folder / "cache" / "weights" / "a", 100)
    with pytest.raises(KeyboardInterrupt):
        copy.write(np.zeros(100, np.uint8))
    assert not copies(folder)


def test_the_cache_of_code_does_not_count_weights(folder: Path) -> None:
    cache = Cache(folder / "cache", limit_bytes=1 << 16)
    weights = folder / "cache" / "weights"
    weights.mkdir(parents=True)
    (weights / "copy").write_bytes(b"x" * (1 << 17))
    cache.put("program", "key", b"y" * 100)
    assert cache.get("program", "key") is not None and (weights / "copy").exists()


def load_constants(path: Path, offset: int) -> tuple[Any, dict[str, np.ndarray]]:
    """``x @ w.T + b`` with constants of a mapped file, w from an offset on; and a copy of both."""
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    w = mapped[offset : offset + ROWS * COLUMNS * 4].view(np.float32).reshape(ROWS, COLUMNS)
    b = mapped[-ROWS * 4 :].view(np.float32)
    with Graph("constants", input_types=[TensorType(DType.float32, ["n", COLUMNS], CPU)]) as graph:
        x = graph.inputs[0].tensor
        graph.output(x @ ops.transpose(ops.constant(w), 0, 1) + ops.constant(b))
    return InferenceSession().load(graph), {"w": w.copy(), "b": b.copy()}


def write_bytes(path: Path, offset: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = rng.standard_normal(ROWS * COLUMNS + ROWS).astype(np.float32)
    path.write_bytes(bytes(offset) + numbers.tobytes())


@pytest.mark.parametrize("offset", [0, 1, 6])
def test_constants_of_mapped_files(folder: Path, offset: int, no_packing: Any) -> None:
    """Also where they do not begin at whole elements; their contents are not part of the copy's key."""
    path = folder / "constants"
    write_bytes(path, offset, 1)
    model, arrays = load_constants(path, offset)
    first = result(model, arrays)
    packed_weights._writer.run()
    assert len(copies(folder)) == 1
    write_bytes(path, offset, 2)
    changed, others = load_constants(path, offset)
    result(changed, others)
    assert not np.array_equal(others["w"], arrays["w"])
    packed_weights._writer.run()
    assert len(copies(folder)) == 2
    no_packing()
    again, arrays = load_constants(path, offset)
    assert not np.array_equal(result(again, arrays), first)


def test_constants_at_any_address_without_a_copy(folder: Path) -> None:
    """Constants that do not begin at whole elements are copied before kernels read them: for packing, and later."""
    path = folder / "constants"
    write_bytes(path, 3, 1)
    with flags.override(MAX_WEIGHT_CACHE_SIZE=0):
        model, arrays = load_constants(path, 3)
        result(model, arrays)
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    table = mapped[3 : 3 + ROWS * COLUMNS * 4].view(np.float32).reshape(ROWS, COLUMNS)
    with Graph("rows", input_types=[TensorType(DType.int64, ["n"], CPU)]) as graph:
        graph.output(ops.gather(ops.constant(table), graph.inputs[0].tensor, 0))
    rows = np.array([3, 0, 95])
    (got,) = InferenceSession().load(graph).execute(rows)
    np.testing.assert_array_equal(got.to_numpy(), table[rows])
