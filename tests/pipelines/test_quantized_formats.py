"""Quantized checkpoints of the Hugging Face layout, each against the formula of its format in torch or NumPy."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from safetensors.numpy import load_file, save_file

from max._interpreter.quantized import unpack
from max.driver import Tensor
from max.entrypoints.llm import LLM
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightData
from max.pipelines import PipelineConfig
from max.pipelines.checkpoints.encodings import SupportedEncoding
from max.pipelines.checkpoints.quantized_formats import (
    METHODS,
    convert_quantized,
    pack_words,
    unpack_words,
)
from max.pipelines.core.exceptions import ModelFilesError

torch = pytest.importorskip("torch")
TINY = Path(__file__).parents[2] / "models" / "tiny-chat"
OUT, IN = 16, 192


def state(**arrays: np.ndarray) -> dict[str, WeightData]:
    """Weights of one layer, ``a.<part>``."""
    dotted = {part: part.replace("__", ".").replace("bytes.", "bytes__") for part in arrays}
    names = {f"a.{dotted[part]}": array for part, array in arrays.items()}
    return {
        name: WeightData.from_numpy(np.ascontiguousarray(array), name)
        for name, array in names.items()
    }


def values_of(data: WeightData) -> np.ndarray:
    if data.quantization_encoding is None:
        return torch.from_dlpack(data).float().numpy()
    blocks = Tensor.from_dlpack(data.data).to_numpy()
    return gguf.quants.dequantize(
        blocks, gguf.GGMLQuantizationType[data.quantization_encoding.value]
    )


def bits_of(values: np.ndarray, bits: int) -> np.ndarray:
    """Packs integers along the first axis into words as one bit stream, the lowest bit first."""
    stream = (
        values[:, None].astype(np.uint32) >> np.arange(bits, dtype=np.uint32)[:, None] & 1
    ).reshape(-1, 32, *values.shape[1:])
    return (
        (stream << np.arange(32, dtype=np.uint32)[:, None]).sum(1).astype(np.uint32).view(np.int32)
    )


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words(bits, rng):
    values = rng.integers(0, 2**bits, (64 if bits != 3 else 96, 5)).astype(np.uint8)
    words = bits_of(values, bits)
    np.testing.assert_array_equal(unpack_words(words, bits), values)
    if bits != 3:
        np.testing.assert_array_equal(pack_words(values, bits), words)
    else:
        with pytest.raises(ValueError, match="expected a multiple of 3"):
            unpack_words(words[:4], 3)


def gptq_values(weights: dict[str, WeightData], group: np.ndarray) -> np.ndarray:
    """Decodes a GPTQ layer of 4 bits to ``[inputs, outputs]``."""
    parts = {
        part: Tensor.from_dlpack(weights[f"a.{part}"].data).to_numpy()
        for part in ("qweight", "qzeros", "scales")
    }
    q = unpack(np.ascontiguousarray(parts["qweight"].T), 4).T
    zeros = unpack(np.ascontiguousarray(parts["qzeros"]), 4) + 1 & 15
    return parts["scales"].astype(np.float32)[group] * (q - zeros[group])


@pytest.mark.parametrize("v2", [False, True])
def test_gptq_of_3_bits(v2, rng):
    q, zeros = rng.integers(0, 8, (IN, 32)), rng.integers(0, 8, (IN // 64, 32))
    scales = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    stored = zeros if v2 else zeros - 1 & 7
    weights = state(qweight=bits_of(q, 3), qzeros=bits_of(stored.T, 3).T, scales=scales)
    config = {"quant_method": "gptq", "bits": 3, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    converted = convert_quantized(weights, config)
    if v2:
        words = Tensor.from_dlpack(converted["a.qzeros"].data).to_numpy()
        np.testing.assert_array_equal(unpack(np.ascontiguousarray(words), 4), zeros)
        return
    group = np.arange(IN) // 64
    expected = scales.astype(np.float32)[group] * (q - zeros[group])
    np.testing.assert_array_equal(gptq_values(converted, group), expected)


def awq_words(values: np.ndarray) -> np.ndarray:
    """Packs as AutoAWQ does: columns 0 2 4 6 1 3 5 7 of 8, the lowest bits first."""
    words = np.zeros((len(values), values.shape[1] // 8), np.uint32)
    for i, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        words |= values[:, column::8].astype(np.uint32) << np.uint32(4 * i)
    return words.view(np.int32)


def test_awq(rng):
    q, zeros = rng.integers(0, 16, (IN, OUT)), rng.integers(0, 16, (IN // 64, OUT))
    scales = rng.uniform(0.5, 2, zeros.shape).astype(np.float16)
    weights = state(qweight=awq_words(q), qzeros=awq_words(zeros), scales=scales)
    converted = convert_quantized(
        weights, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
    )
    group = np.arange(IN) // 64
    expected = scales.astype(np.float32)[group] * (q - zeros[group])
    np.testing.assert_array_equal(gptq_values(converted, group), expected)
    with pytest.raises(ModelFilesError, match="AWQ of version 'gemv' and 4 bits"):
        convert_quantized(weights, {"quant_method": "awq", "bits": 4, "version": "gemv"})


COMPRESSED = {"quant_method": "compressed-tensors"}


@pytest.mark.parametrize("rows", [OUT, 1])
@pytest.mark.parametrize("inputs", [IN, 40])
def test_compressed_int8(rows, inputs, rng):
    q = rng.integers(-128, 128, (OUT, inputs)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, (rows, 1)).astype(ml_dtypes.bfloat16)
    weights = state(
        weight=q,
        weight_scale=scales,
        input_scale=np.ones(1, np.float32),
        k_scale=np.ones(1, np.float32),
    )
    converted = convert_quantized(weights, COMPRESSED)
    assert list(converted) == ["a.weight"]
    expected = q * scales.astype(np.float32)
    np.testing.assert_allclose(values_of(converted["a.weight"]), expected, rtol=2**-11)
    assert converted["a.weight"].quantization_encoding == (
        None if inputs == 40 else QuantizationEncoding.Q8_0
    )


@pytest.mark.parametrize("rows", [OUT, 1])
def test_compressed_float8(rows, rng):
    q = rng.standard_normal((OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.001, 0.01, (rows, 1)).astype(np.float32)
    (data,) = convert_quantized(state(weight=q, weight_scale=scales), COMPRESSED).values()
    expected = torch.from_numpy(q.astype(np.float32) * scales).bfloat16().float().numpy()
    np.testing.assert_array_equal(values_of(data), expected)


def test_compressed_int4(rng):
    q = rng.integers(0, 16, (OUT, IN))
    scales = rng.uniform(0.001, 0.01, (OUT, IN // 64)).astype(ml_dtypes.bfloat16)
    weights = state(
        weight_packed=bits_of(q.T, 4).T, weight_scale=scales, weight_shape=np.array([OUT, IN])
    )
    (data,) = convert_quantized(weights, COMPRESSED).values()
    assert data.quantization_encoding is QuantizationEncoding.Q4_0
    expected = (q - 8) * np.repeat(scales.astype(np.float32), 64, 1)
    np.testing.assert_allclose(values_of(data), expected, rtol=2**-11)


@pytest.mark.parametrize("size", [(128, 128), (1, 2**16), (7, 1)])
def test_fp8_blocks(rng, size):
    q = rng.standard_normal((300, 200)).astype(ml_dtypes.float8_e4m3fn)
    count = [-(-300 // size[0]), -(-200 // size[1])]
    scales = rng.uniform(0.001, 0.01, count).astype(np.float32)
    (data,) = convert_quantized(
        state(weight=q, weight_scale_inv=scales),
        {"quant_method": "fp8", "weight_block_size": list(size)},
    ).values()
    spread = scales[np.arange(300) // size[0]][:, np.arange(200) // size[1]]
    expected = torch.from_numpy(q.astype(np.float32) * spread).bfloat16().float().numpy()
    np.testing.assert_array_equal(values_of(data), expected)


def test_fp8_of_a_scale_a_tensor(rng):
    """Ministral 3's files: no blocks, and static scales of activations, which the engine does not quantize."""
    q = rng.standard_normal((300, 200)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array(0.0123, ml_dtypes.bfloat16)
    config = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}
    parts = state(weight=q, weight_scale_inv=scale, activation_scale=np.array(2.0, ml_dtypes.bfloat16))  # fmt: skip
    ((name, data),) = convert_quantized(parts, config).items()
    expected = torch.from_numpy(q.astype(np.float32) * np.float32(scale)).bfloat16().float()
    assert name == "a.weight"
    np.testing.assert_array_equal(values_of(data), expected.numpy())


NF4 = np.array([-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803,
                0.1609302,
                0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)  # fmt: skip


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(nested, rng):
    numbers = rng.integers(0, 16, OUT * IN).astype(np.uint8)
    blocks = OUT * IN // 64
    settings: dict[str, Any] = {"shape": [OUT, IN], "blocksize": 64, "quant_type": "nf4"}
    parts: dict[str, np.ndarray] = {
        "weight": (numbers[::2] << 4 | numbers[1::2])[:, None],
        "weight__quant_map": NF4,
    }
    if nested:
        inner = rng.integers(0, 256, blocks).astype(np.uint8)
        inner_map = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        inner_largest = rng.uniform(0.01, 0.02, 1).astype(np.float32)
        settings |= {"nested_blocksize": 256, "nested_offset": 0.05}
        parts |= {
            "weight__absmax": inner,
            "weight__nested_absmax": inner_largest,
            "weight__nested_quant_map": inner_map,
        }
        largest = inner_map[inner] * inner_largest[0] + np.float32(0.05)
    else:
        largest = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
        parts["weight__absmax"] = largest
    parts["weight__quant_state__bitsandbytes__nf4"] = np.frombuffer(
        json.dumps(settings).encode(), np.uint8
    )
    weights = state(**parts)
    (data,) = convert_quantized(weights, {"quant_method": "bitsandbytes"}).values()
    expected = (NF4[numbers].reshape(-1, 64) * largest[:, None]).reshape(OUT, IN)
    assert data.quantization_encoding is QuantizationEncoding.Q8_0
    assert np.abs(values_of(data) - expected).max() <= np.abs(expected).max() / 250
    if nested:
        for name, count in (("weight__nested_absmax", 2), ("weight__nested_quant_map", 255)):
            wrong = state(**{**parts, name: np.ones(count, np.float32)})
            with pytest.raises(ModelFilesError, match=f"maxima of {blocks} in blocks of 256"):
                convert_quantized(wrong, {"quant_method": "bitsandbytes"})


def test_bitsandbytes_int8(rng):
    q = rng.integers(-127, 128, (OUT, IN)).astype(np.int8)
    largest = rng.uniform(0.1, 1, OUT).astype(np.float32)
    (data,) = convert_quantized(
        state(weight=q, SCB=largest, weight_format=np.zeros((), np.uint8)),
        {"quant_method": "bitsandbytes"},
    ).values()
    np.testing.assert_allclose(values_of(data), q * largest[:, None] / 127, rtol=2**-10)


@pytest.mark.parametrize(("least", "encoding"), [(110, "Q8_0"), (60, None)])
def test_mxfp4(rng, least: int, encoding: str | None):
    """Decodes as transformers does: the two values of a byte are adjacent, the low half first."""
    blocks = rng.integers(0, 256, (2, OUT, 3, 16)).astype(np.uint8)
    scales = rng.integers(least, least + 20, (2, OUT, 3)).astype(np.uint8)
    names = {"m.down_proj_blocks": blocks, "m.down_proj_scales": scales}
    weights = {name: WeightData.from_numpy(array, name) for name, array in names.items()}
    ((name, data),) = convert_quantized(weights, {"quant_method": "mxfp4"}).items()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    codes = torch.from_numpy(
        np.stack([blocks & 15, blocks >> 4], -1).reshape(2, OUT, 3, 32).astype(np.int64)
    )
    expected = torch.ldexp(table[codes], torch.from_numpy(scales.astype(np.int32) - 127)[..., None])
    assert name == "m.down_proj"
    assert data.quantization_encoding == (encoding and QuantizationEncoding(encoding))
    matrices = expected.reshape(2, OUT, 96).numpy()
    # floats are stored as [inputs, outputs]
    np.testing.assert_array_equal(
        values_of(data), matrices if encoding else np.swapaxes(matrices, 1, 2)
    )


SMALL = np.zeros((4, 64), np.int8)
MISTAKES: dict[str, tuple[dict[str, np.ndarray], dict[str, Any], str]] = {
    "missing": ({"weight_scale": np.ones((4, 1), np.float32)}, COMPRESSED, "lacks the weight 'a.weight'"),
    "scales": ({"weight": SMALL, "weight_scale": np.ones((3, 1), np.float32)}, COMPRESSED,
        "int8 weights with 3 scales"),
    "scales of float8": (
        {"weight": SMALL.astype(ml_dtypes.float8_e4m3fn), "weight_scale": np.ones((3, 1), np.float32)},
        COMPRESSED, "float8_e4m3fn weights with 3 scales",
    ),
    "scales of floats": ({"weight": SMALL.astype(np.float32), "weight_scale": np.ones((4, 1), np.float32)},
        COMPRESSED, "float32 weights with 4 scales"),
    "large blocks": ({}, {"quant_method": "fp8", "weight_block_size": [1, 2**16 + 1]}, "weight_block_size"),
    "zeros": (
        {"weight": SMALL, "weight_scale": np.ones((4, 1), np.float32), "weight_zero_point": np.ones((4, 1), np.int8)},
        COMPRESSED, "has zero points of int8",
    ),
    "groups": (
        {"weight_packed": np.zeros((4, 8), np.int32), "weight_scale": np.ones((4, 4), np.float32),
            "weight_shape": np.array([4, 64])},
        COMPRESSED, r"\[4, 8\] words and \[4, 4\] scales",
    ),
    "blocks": ({"weight": SMALL.astype(ml_dtypes.float8_e4m3fn), "weight_scale_inv": np.ones((2, 2), np.float32)},
        {"quant_method": "fp8"}, "scales, expected"),
    "block size": ({}, {"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
    "settings": (
        {"weight": np.zeros((4, 1), np.uint8), "weight__quant_state__bitsandbytes__nf4": np.frombuffer(b"{", np.uint8)},
        {"quant_method": "bitsandbytes"}, "no JSON object with shape and blocksize",
    ),
    "shape": (
        {"weight": np.zeros((4, 1), np.uint8), "weight__absmax": np.ones(1, np.float32), "weight__quant_map": NF4,
         "weight__quant_state__bitsandbytes__nf4": np.frombuffer(b'{"shape": [1099511627776, 8], "blocksize": 64}',
             np.uint8)},
        {"quant_method": "bitsandbytes"}, "4 bytes in blocks of 64 of the shape",
    ),
    "words": ({"qweight": np.zeros((4, 8), np.int32), "qzeros": np.zeros((1, 3), np.int32)},
        {"quant_method": "gptq", "bits": 3}, "multiple of 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    parts, config, message = MISTAKES[name]
    with pytest.raises(ModelFilesError, match=message):
        convert_quantized(state(**parts), config)


@given(st.data())
def test_parts_that_lie(data):
    """Parts of any dtype and shape and settings of any value give a checkpoint error, or weights; nothing large is
    allocated.
    """
    names = ["weight", "qweight", "qzeros", "scales", "weight_scale", "weight_scale_inv", "weight_packed",
             "weight_shape", "SCB",
             "weight__absmax", "weight__quant_map", "weight__nested_absmax", "weight__nested_quant_map"]  # fmt: skip
    dtypes = [
        np.int8,
        np.uint8,
        np.int32,
        np.float32,
        np.int64,
        ml_dtypes.float8_e4m3fn,
        ml_dtypes.bfloat16,
    ]
    parts: dict[str, np.ndarray] = {}
    for name in data.draw(st.lists(st.sampled_from(names), unique=True)):
        shape = data.draw(
            st.sampled_from(
                [(4, 64), (64, 4), (3, 32), (16,), (2,), (256,), (4, 1), (1,), (0, 3), (2, 3, 16)]
            )
        )
        parts[name] = np.ones(shape, data.draw(st.sampled_from(dtypes)))
    sizes = st.sampled_from([0, 1, 2, 8, 64, 512, 10**13, -1])
    settings = {
        "shape": [data.draw(sizes), data.draw(sizes)],
        "blocksize": data.draw(sizes),
        "nested_blocksize": data.draw(sizes),
        "nested_offset": 0.5,
    }
    if data.draw(st.booleans()):
        parts["weight__quant_state__bitsandbytes__nf4"] = np.frombuffer(
            json.dumps(settings).encode(), np.uint8
        )
    config = {"quant_method": data.draw(st.sampled_from(METHODS)), "bits": data.draw(st.sampled_from([3, 4])),
              "weight_block_size": data.draw(st.sampled_from([None, [2, 2], [128, 128], [64], "x", [10**13,
                              1]]))}  # fmt: skip
    if config["quant_method"] == "awq":
        config["bits"] = 4
    with suppress(ModelFilesError):
        for value in convert_quantized(state(**parts), config).values():
            assert np.prod(value.shape) < 10**6


def test_all_methods_are_documented():
    docs = (Path(__file__).parents[2] / "docs" / "quantization.md").read_text("utf-8")
    assert all(method in docs.lower() for method in METHODS)


def int8_folder(folder: Path) -> Path:
    """The bundled model as compressed-tensors int8 with one scale per row."""
    shutil.copytree(TINY, folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        values = weights[name].astype(np.float32)
        scale = np.abs(values).max(1, keepdims=True) / 127
        weights[name] = np.rint(values / scale).astype(np.int8)
        weights[f"{name}_scale"] = scale.astype(ml_dtypes.bfloat16)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {**COMPRESSED, "format": "int-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_encoding_of_a_folder(tmp_path):
    config = PipelineConfig(model_path=str(int8_folder(tmp_path / "m")))
    assert config.model_config.checkpoint_encoding() is SupportedEncoding.bfloat16


@pytest.mark.long
def test_answers(tmp_path):
    llm = LLM(PipelineConfig(model_path=str(int8_folder(tmp_path / "m")), max_length=128))
    asked = "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n"
    assert llm.generate([asked], max_new_tokens=12) == ["The capital of Norway is Oslo."]
