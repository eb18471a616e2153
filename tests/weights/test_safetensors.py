"""The safetensors reader against the reference implementation, on good, bad and fuzzed files."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from max.driver import Tensor
from max.dtype import DType
from max.graph import DeviceRef, Weight
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import SafetensorWeights, Weights, WeightsFileError, load_weights

STORED = [dtype for dtype in DType if dtype.size_in_bits >= 8]


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: str, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def as_bytes(data: Any) -> bytes:
    return Tensor.from_dlpack(data).to_numpy().tobytes()


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"model.layers.{i}.{part}.weight": torch.randn(3 + i, 5, generator=generator)
        for i in (0, 1, 10)
        for part in ("attn", "mlp")
    }
    tensors["lm_head.weight"] = torch.randn(7, 5, generator=generator).bfloat16()
    tensors["scale"] = torch.tensor(2.5)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors", tensors


@pytest.mark.parametrize("dtype", STORED, ids=lambda d: d.name)
def test_every_dtype(tmp_path: Path, dtype: DType, rng: np.random.Generator) -> None:
    values = torch.from_numpy(rng.integers(0, 2, (3, 4, 2))).to(dtype.to_torch())
    tensors = {"a": values, "empty": values[:0], "scalar": values[0, 0, 0]}
    save_file({k: v.contiguous().clone() for k, v in tensors.items()}, tmp_path / "m.safetensors")
    weights = load_weights([tmp_path / "m.safetensors"])
    for name, expected in tensors.items():
        found = weights[name].data()
        assert (found.dtype, list(map(int, found.shape))) == (dtype, list(expected.shape))
        assert as_bytes(found) == bytes(expected.reshape(-1).view(torch.uint8).tolist())
        assert torch.equal(torch.from_dlpack(found).float(), expected.float())


def test_names_and_access(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = checkpoint
    weights = load_weights([path])
    assert isinstance(weights, SafetensorWeights) and isinstance(weights, Weights)
    layer = weights.model.layers[1]
    assert layer.name == "model.layers.1" and not layer.exists() and weights.name == ""
    assert layer.mlp.weight.exists() and weights["scale"].exists()
    assert sorted(name for name, _ in layer.items()) == ["attn.weight", "mlp.weight"]
    assert [name for name, _ in weights.items()] == list(weights._names)
    assert {name for name, _ in weights.items()} == tensors.keys()
    for name, weight in weights.items():
        assert weight.name == name == weight.data().name
        assert np.array_equal(
            np.array(Tensor.from_dlpack(weight.data()), "f4"), tensors[name].float().numpy()
        )
    assert [(name, w.name) for name, w in weights.scale.items()] == [("", "scale")]
    with pytest.raises(
        KeyError, match=r"no weight is named 'model\.layers\.1\.mlp\.wight'; similar names"
    ):
        layer.mlp.wight.data()
    with pytest.raises(AttributeError):
        _ = weights.__len__


def test_no_copy_and_read_only(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    weights = load_weights([checkpoint[0]])
    first, second = weights.scale.data().data, weights.scale.data().data
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    assert first._ptr == second._ptr
    first[()] = 1  # copies the element: the file keeps its own
    assert second.item() != 1 and first.item() == 1 and first._ptr != second._ptr
    name, big = "model.layers.0.mlp.weight", weights["model.layers.0.mlp.weight"].data().data
    del weights, second
    assert np.array_equal(Tensor.from_dlpack(big).to_numpy(), checkpoint[1][name].numpy())


def test_misaligned_data_is_copied(tmp_path: Path) -> None:
    header = {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}
    path = write(tmp_path / "m.safetensors", header, b"\1" + struct.pack("<2f", 1, 2))
    found = load_weights([path]).b.data().data
    assert isinstance(found, Tensor) and found._ptr % 4 == 0
    assert found.to_numpy().tolist() == [1, 2]


def test_allocate(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    weights = load_weights([checkpoint[0]])
    weight = weights.lm_head.weight.allocate()
    assert isinstance(weight, Weight) and weight.name == "lm_head.weight"
    assert (weight.dtype, list(weight.shape), weight.device) == (
        DType.bfloat16, [7, 5], DeviceRef.CPU(),
    )  # fmt: skip
    other = weights.model.layers[0].mlp.weight.allocate(
        DType.float16, [3, 5], device=DeviceRef.CPU(1)
    )
    assert (other.dtype, other.device) == (DType.float16, DeviceRef.CPU(1))
    allocated = weights.allocated_weights
    assert list(allocated) == ["lm_head.weight", "model.layers.0.mlp.weight"]
    expected = checkpoint[1]["model.layers.0.mlp.weight"].half().numpy().tobytes()
    assert as_bytes(allocated["model.layers.0.mlp.weight"]) == expected
    with pytest.raises(ValueError, match=r"expected shape \[.*\], the file has"):
        weights.lm_head.weight.allocate(shape=[5, 7])
    with pytest.raises(ValueError, match="expected encoding Q4_K, the file has none"):
        weights.lm_head.weight.allocate(quantization_encoding=QuantizationEncoding.Q4_K)
    with pytest.raises(KeyError, match="no weight is named"):
        weights.lm_head.allocate()


def test_allocate_as_bytes(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = checkpoint
    weights = SafetensorWeights([path])
    weight = weights.lm_head.weight.allocate_as_bytes()
    assert (weight.dtype, list(weight.shape)) == (DType.uint8, [7, 10])
    assert as_bytes(weights.allocated_weights["lm_head.weight"]) == as_bytes(
        tensors["lm_head.weight"]
    )
    assert list(weights.lm_head.weight.allocate_as_bytes(DType.float32).shape) == [7, 20]
    assert list(weights.scale.allocate_as_bytes().shape) == [4]


def test_constructor_arguments(checkpoint: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = checkpoint
    allocated: dict[str, Any] = {}
    replaced = {"scale": Tensor.scalar(7, DType.float32)}
    handles: dict[Any, Any] = {}
    weights = SafetensorWeights(
        [path], tensors={"scale"}, tensors_to_file_idx={"scale": 0}, allocated=allocated,
        _st_weight_map=replaced, _st_file_handles=handles,
    )  # fmt: skip
    assert [name for name, _ in weights.items()] == ["scale"] and list(handles) == [path]
    weights.scale.allocate()
    assert allocated == replaced
    assert SafetensorWeights([path], prefix="model.layers")[0].mlp.weight.exists()
    assert (
        SafetensorWeights([path], _st_file_handles=handles).scale._files["scale"] is handles[path]
    )
    with pytest.raises(ValueError, match="no file has the weight 'x'"):
        SafetensorWeights([path], tensors={"x"})
    with pytest.raises(ValueError, match="weight 'scale' is not in file 1"):
        SafetensorWeights([path], tensors_to_file_idx={"scale": 1})


def test_shards_and_index(tmp_path: Path) -> None:
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file({"a": torch.arange(3)}, first)
    save_file({"b": torch.arange(4)}, second)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": first.name, "b": second.name}}))
    for paths in ([first, second], [index]):
        weights = load_weights(paths)
        assert [name for name, _ in weights.items()] == ["a", "b"]
        assert Tensor.from_dlpack(weights.b.data()).shape == (4,)

    def broken(weight_map: Any, message: str, error: type[Exception] = WeightsFileError) -> None:
        text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
        index.write_text(text)
        with pytest.raises(error, match=message):
            load_weights([index])

    broken({"a": second.name}, "weight 'a' is missing, but the index lists it")
    broken(
        {"a": "gone.safetensors"}, "gone.safetensors of weight 'a' is missing", FileNotFoundError
    )
    broken({"a": "../x.safetensors"}, "no safetensors file beside it")
    broken({"a": 3}, "no weight_map")
    broken("[1]", "no weight_map")
    broken("{", "not JSON")
    save_file({"a": torch.arange(3)}, second)
    with pytest.raises(WeightsFileError, match="00002.*weight 'a' is also in .*00001"):
        load_weights([first, second])


F4 = entry("F32", [1], 0, 4)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not JSON"),
        (b"[]", b"", "not a JSON object"),
        (b' {"a": 1}', b"", "not a JSON object|not an object"),
        (b'{"a": \xff}', b"", "not JSON"),
        (b'{"a":' * 100_000, b"", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "not JSON"),
        ({"a": 3}, b"", "tensor 'a': its header entry is not an object"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "found dtype, shape"),
        ({"a": F4 | {"more": 1}}, bytes(4), "found dtype, shape, data_offsets, more"),
        ({"a": entry("F33", [1], 0, 4)}, bytes(4), "unknown dtype 'F33'"),
        ({"a": F4 | {"dtype": ["F32"]}}, bytes(4), "unknown dtype"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "shape is not a list of sizes"),
        ({"a": entry("F32", [1.0], 0, 4)}, bytes(4), "shape is not a list of sizes"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), "shape is not a list of sizes"),
        ({"a": entry("F32", [2**64], 0, 4)}, bytes(4), "shape is not a list of sizes"),
        ({"a": F4 | {"shape": "1"}}, bytes(4), "shape is not a list of sizes"),
        ({"a": F4 | {"data_offsets": [4]}}, bytes(4), r"data_offsets \[4\] is not \[begin, end\]"),
        ({"a": F4 | {"data_offsets": [4, 0]}}, bytes(4), "is not .begin, end"),
        ({"a": entry("F32", [1] * 100, 0, 4)}, bytes(4), "rank 100 is above 64"),
        ({"a": entry("F32", [2**32], 0, 4)}, bytes(4), "needs 17179869184 bytes, .* give 4"),
        ({"a": entry("F32", [0, 2**62], 0, 0)}, b"", "too large for any array"),
        ({"a": entry("F32", [2], 0, 4)}, bytes(4), "needs 8 bytes, data_offsets give 4"),
        ({"a": entry("F4", [1], 0, 1)}, bytes(1), "needs 0.5 bytes"),
        ({"a": entry("F32", [4], 0, 16)}, bytes(8), "ends at byte 16, the file has 8 .*truncated"),
        ({"a": F4, "b": entry("F32", [1], 2, 6)}, bytes(6), "'b': its data overlaps .* 'a'"),
        ({"a": F4, "b": entry("F32", [1], 6, 10)}, bytes(10), "'b': 2 bytes before its data"),
        ({"a": F4}, bytes(9), "5 bytes after the last tensor"),
        ({}, bytes(1), "1 bytes after the last tensor"),
        ({"a": F4, "__metadata__": {"x": 1}}, bytes(4), "__metadata__ is not a map of texts"),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            bytes(1),
            "tensor 'a': the header names it twice",
        ),
        (
            b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}',
            bytes(1),
            "expected dtype, shape and data_offsets, found dtype, dtype",
        ),
    ],
)  # fmt: skip
def test_invalid_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(WeightsFileError, match=message) as error:
        load_weights([path])
    assert str(error.value).startswith(str(path)) and len(str(error.value)) < 800
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize("length", [3, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_invalid_header_length(tmp_path: Path, length: int) -> None:
    path = write(tmp_path / "bad.safetensors", {"a": F4}, bytes(4), length)
    with pytest.raises(WeightsFileError, match="not JSON|claims"):
        load_weights([path])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20, 200])
def test_truncated_anywhere(
    tmp_path: Path, checkpoint: tuple[Path, dict[str, torch.Tensor]], size: int
) -> None:
    whole = checkpoint[0].read_bytes()
    for cut in (size, len(whole) - 1 - size):
        (tmp_path / "cut.safetensors").write_bytes(whole[:cut])
        with pytest.raises(WeightsFileError, match=r"cut\.safetensors"):
            load_weights([tmp_path / "cut.safetensors"])


def test_types_that_cannot_be_read(tmp_path: Path) -> None:
    header = {"a": entry("F6_E2M3", [4], 0, 3), "b": entry("U8", [1], 3, 4)}
    weights = load_weights([write(tmp_path / "m.safetensors", header, bytes(4))])
    assert Tensor.from_dlpack(weights.b.data()).shape == (1,) and weights.a.exists()
    with pytest.raises(WeightsFileError, match="tensor 'a': elements of type F6_E2M3"):
        weights.a.data()


def reference_accepts(path: Path) -> dict[str, list[int]] | None:
    try:
        with safetensors.safe_open(path, "numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}
    except (safetensors.SafetensorError, OSError, OverflowError):
        return None


def ours_accepts(path: Path) -> dict[str, list[int]] | None:
    try:
        weights = load_weights([path])
    except WeightsFileError:
        return None
    found = {}
    for name, weight in weights.items():
        found[name] = list(weights._files[name].entries[name].shape)
        if weights._files[name].entries[name].dtype is not None:
            as_bytes(weight.data().data)
    return found


@st.composite
def headers(draw: st.DrawFn) -> dict[str, Any]:
    """A valid header with some numbers or names changed."""
    names = draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1))
    header, place = {}, 0
    for name in names:
        dtype, size = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("U8", 1), ("I64", 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = int(np.prod(shape, dtype=int)) * size
        header[name] = entry(dtype, shape, place, place + nbytes)
        place += nbytes
    for _ in range(draw(st.integers(0, 2))):
        victim = header[draw(st.sampled_from(names))]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        if field == "dtype":
            victim[field] = draw(st.sampled_from(["F16", "I8", "F4", "X", None, 3]))
        elif victim[field]:
            index = draw(st.integers(0, len(victim[field]) - 1))
            victim[field][index] = draw(
                st.sampled_from([0, 1, 2, 4, 8, 12, -1, 2**20, 2**64, "1", None, 1.5])
            )
    header["__metadata__"] = {"place": str(place)}
    return header


@given(headers(), st.integers(-2, 2))
@settings(max_examples=150)
def test_accepts_what_the_reference_accepts(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], more: int
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "m.safetensors"
    size = max(0, int(header["__metadata__"]["place"]) + (more if abs(more) == 2 else 0))
    write(path, header, bytes(size))
    expected, found = reference_accepts(path), ours_accepts(path)
    assert found == expected


@given(st.data())
@settings(max_examples=150)
def test_damaged_bytes_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    header = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32)}
    path = write(tmp_path_factory.mktemp("fuzz") / "m.safetensors", header, bytes(range(32)))
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 33))
        content[place] = data.draw(st.sampled_from(b'0123456789"{}[],:FUB\x00\xff'))
    path.write_bytes(content[: data.draw(st.sampled_from([len(content), len(content) - 5]))])
    found = ours_accepts(path)
    if found is not None:
        assert reference_accepts(path) is not None


def test_bundled_model() -> None:
    path = Path(__file__).parents[2] / "models" / "tiny-chat" / "model.safetensors"
    weights = load_weights([path])
    with safetensors.safe_open(path, "torch") as file:
        for name in file.keys():
            found = Tensor.from_dlpack(weights[name].data()).to_numpy()
            expected = file.get_tensor(name).view(torch.int16).numpy()
            assert found.dtype == ml_dtypes.bfloat16
            assert np.array_equal(found.view(np.int16), expected)


def test_a_file_truncated_after_opening(tmp_path: Path) -> None:
    path = tmp_path / "cut.safetensors"
    save_file({name: torch.ones(4096) for name in "ab"}, path)
    weights = SafetensorWeights([path])
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 4096)
    assert (Tensor.from_dlpack(weights.a.data().data).to_numpy() == 1).all()
    with pytest.raises(
        ValueError, match=r"cut.safetensors: tensor 'b': the file was cut to \d+ bytes"
    ):
        weights.b.data()
