"""Formats by suffix, GGUF files and torch checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from max.driver import Tensor
from max.dtype import DType
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import (
    GGUFWeights,
    PytorchWeights,
    Weights,
    WeightsFileError,
    WeightsFormat,
    load_weights,
    weights_format,
)

GGML = gguf.GGMLQuantizationType


def test_weights_format() -> None:
    for suffix, expected in {
        "safetensors": "safetensors", "safetensors.index.json": "safetensors", "gguf": "gguf",
        "bin": "pytorch", "pt": "pytorch", "pth": "pytorch", "SafeTensors": "safetensors",
    }.items():  # fmt: skip
        found = weights_format([Path(f"dir/a.{suffix}"), Path(f"dir/b.{suffix}")])
        assert found is WeightsFormat(expected) and found == expected
    assert str(WeightsFormat.gguf) == "WeightsFormat.gguf"


def test_weights_format_errors(tmp_path: Path) -> None:
    for call in (weights_format, load_weights):
        with pytest.raises(ValueError, match="no weight files"):
            call([])
        with pytest.raises(ValueError, match="several formats: a.gguf is gguf, b.bin is pytorch"):
            call([Path("a.gguf"), Path("b.bin")])
        with pytest.raises(
            ValueError, match=r"model.onnx has no known suffix; expected one of \.g"
        ):
            call([Path("model.onnx")])
        with pytest.raises(TypeError, match="expected a list of paths"):
            call(Path("a.gguf"))
    with pytest.raises(FileNotFoundError, match="no file .*a.safetensors"):
        load_weights([tmp_path / "a.safetensors"])


def write_gguf(
    path: Path, tensors: dict[str, tuple[np.ndarray, gguf.GGMLQuantizationType]]
) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sample_gguf(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    values = np.random.default_rng(3).standard_normal((4, 512)).astype("f4")
    plain = {
        "blk.0.attn.weight": (values, GGML.F32),
        "blk.0.norm.weight": (values.astype("f2"), GGML.F16),
        "blk.1.ids": (np.arange(5, dtype=np.int32), GGML.I32),
        "blk.1.bf.weight": (gguf.quants.quantize(values, GGML.BF16), GGML.BF16),
        "blk.10.q4.weight": (gguf.quants.quantize(values, GGML.Q4_0), GGML.Q4_0),
        "blk.10.q5.weight": (gguf.quants.quantize(values, GGML.Q5_0), GGML.Q5_0),
    }
    return write_gguf(path, plain), {name: array for name, (array, _) in plain.items()}


def test_gguf(tmp_path: Path) -> None:
    path, arrays = sample_gguf(tmp_path / "m.gguf")
    weights = load_weights([path])
    assert isinstance(weights, GGUFWeights) and isinstance(weights, Weights)
    assert {name for name, _ in weights.items()} == arrays.keys()
    assert [name for name, _ in weights.blk[1].items()] == ["ids", "bf.weight"]
    assert weights.blk[0].attn.weight.data().dtype is DType.float32
    assert weights.blk[0].norm.weight.data().dtype is DType.float16
    assert weights.blk[1].ids.data().dtype is DType.int32
    for name in ("blk.0.attn.weight", "blk.0.norm.weight", "blk.1.ids", "blk.10.q4.weight"):
        found = Tensor.from_dlpack(weights[name].data()).to_numpy()
        np.testing.assert_array_equal(found, arrays[name])
    bf16 = weights.blk[1].bf.weight.data()
    assert (bf16.dtype, list(bf16.shape)) == (DType.bfloat16, [4, 512])
    expected = torch.from_numpy(arrays["blk.0.attn.weight"]).bfloat16()
    assert torch.equal(torch.from_dlpack(bf16), expected)


def test_gguf_quantized(tmp_path: Path) -> None:
    weights = load_weights([sample_gguf(tmp_path / "m.gguf")[0]])
    q4 = weights.blk[10].q4.weight
    assert q4.data().quantization_encoding is QuantizationEncoding.Q4_0
    assert (q4.data().dtype, list(q4.data().shape)) == (DType.uint8, [4, 512 // 32 * 18])
    weight = q4.allocate(DType.uint8, quantization_encoding=QuantizationEncoding.Q4_0)
    assert weight.quantization_encoding is QuantizationEncoding.Q4_0
    assert weight.name in weights.allocated_weights
    with pytest.raises(ValueError, match="expected encoding Q4_K, the file has Q4_0"):
        q4.allocate(quantization_encoding=QuantizationEncoding.Q4_K)
    with pytest.raises(ValueError, match="Q4_0 blocks cannot be converted"):
        q4.allocate(DType.float32)


def test_gguf_types_without_kernels(tmp_path: Path) -> None:
    """A type without kernels is converted to one with kernels, or to bfloat16 where that would lose precision."""
    path, arrays = sample_gguf(tmp_path / "m.gguf")
    expected = gguf.quants.dequantize(arrays["blk.10.q5.weight"], GGML.Q5_0)
    for weights in (load_weights([path]), GGUFWeights(gguf.GGUFReader(path))):
        data = weights.blk[10].q5.weight.data()
        assert data.quantization_encoding is QuantizationEncoding.Q8_0
        assert list(data.element_shape) == [4, 512]
        blocks = Tensor.from_dlpack(data).to_numpy()
        np.testing.assert_array_equal(gguf.quants.dequantize(blocks, GGML.Q8_0), expected)
    far = np.zeros((2, 17), np.uint8)
    far[:, 0], far[:, 1:] = (3, 250), 0x12
    path = write_gguf(tmp_path / "far.gguf", {"a": (far, GGML.MXFP4)})
    data = load_weights([path]).a.data()
    assert (data.dtype, data.quantization_encoding) == (DType.bfloat16, None)
    values = torch.from_dlpack(data).float().numpy()
    np.testing.assert_array_equal(values, gguf.quants.dequantize(far, GGML.MXFP4))


def test_gguf_sources(tmp_path: Path) -> None:
    path, _ = sample_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(path)
    assert GGUFWeights(reader).blk[1].ids.exists()
    only = {t.name: t for t in reader.tensors if "blk.1." in t.name}
    assert len(list(GGUFWeights(reader, only, "blk")[1].items())) == 2
    other, _ = sample_gguf(tmp_path / "n.gguf")
    with pytest.raises(WeightsFileError, match=r"n.gguf: weight 'blk.0.attn.weight' is also"):
        load_weights([path, other])


@given(st.data())
def test_damaged_gguf(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer_input = {"a": (np.arange(8, dtype="f4"), GGML.F32), "b": (np.ones(3, "f4"), GGML.F32)}
    content = bytearray(write_gguf(path, writer_input).read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, 150))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        for _, weight in load_weights([path]).items():
            Tensor.from_dlpack(weight.data()).to_numpy().sum()
    except WeightsFileError as error:
        assert str(error)


def test_pytorch(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.w": torch.randn(3, 4).bfloat16().T,
        "model.layers.0.b": torch.nn.Parameter(torch.randn(4)),
        "step": torch.tensor(3),
    }
    torch.save(tensors, tmp_path / "m.bin")
    torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "m.pt")
    for path in (tmp_path / "m.bin", tmp_path / "m.pt"):
        weights = load_weights([path])
        assert isinstance(weights, PytorchWeights) and isinstance(weights, Weights)
        assert {name for name, _ in weights.items()} == tensors.keys()
        layer = weights.model.layers[0]
        assert (layer.w.dtype, list(layer.w.shape)) == (DType.bfloat16, [4, 3])
        assert layer.w.quantization_encoding is None
        for name, weight in weights.items():
            assert torch.equal(torch.from_dlpack(weight.data()), tensors[name].detach())
        with pytest.raises(KeyError, match="no weight is named 'model.layers.1.w'"):
            _ = weights.model.layers[1].w.dtype
    torch.save({"other": torch.ones(1)}, tmp_path / "n.bin")
    assert load_weights([tmp_path / "m.bin", tmp_path / "n.bin"]).other.exists()


def test_pytorch_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "pwned"),)

    torch.save({"a": Evil(), "b": torch.ones(1)}, tmp_path / "m.bin")
    with pytest.raises(WeightsFileError, match="m.bin: cannot be read safely"):
        load_weights([tmp_path / "m.bin"])
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("content", [b"", b"PK\3\4 not a zip", b"\x80\x02}."])
def test_damaged_pytorch(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(content)
    with pytest.raises(WeightsFileError, match=r"m\.pt: "):
        load_weights([path])


@given(st.data())
def test_pytorch_fuzzed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A truncated file, or one with a changed byte: one clear error, or tensors of the file's size."""
    path = tmp_path_factory.mktemp("torch") / "m.pt"
    torch.save({"a": torch.arange(8.0), "b": torch.ones(3, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    try:
        for _, weight in load_weights([path]).items():
            assert Tensor.from_dlpack(weight.data()).to_numpy().nbytes <= 32
    except WeightsFileError as error:
        assert "m.pt" in str(error)


def test_pytorch_without_tensors(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "m.pt")
    with pytest.raises(WeightsFileError, match="expected a dictionary of tensors, got list"):
        load_weights([tmp_path / "m.pt"])
    torch.save({"a": 1}, tmp_path / "m.pt")
    with pytest.raises(WeightsFileError, match="no tensors"):
        load_weights([tmp_path / "m.pt"])


def test_a_gguf_file_truncated_after_opening(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "llama")
    for name in "ab":
        writer.add_tensor(name, np.ones(4096, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GGUFWeights(tmp_path / "cut.gguf")
    with open(tmp_path / "cut.gguf", "r+b") as file:
        file.truncate((tmp_path / "cut.gguf").stat().st_size - 4096)
    assert (Tensor.from_dlpack(weights.a.data().data).to_numpy() == 1).all()
    with pytest.raises(ValueError, match=r"cut.gguf: the file was cut to \d+ bytes .* weight 'b'"):
        weights.b.data()
