"""Float checkpoints that are quantized at load: the blocks of each weight, the cache, and the generated texts."""

from __future__ import annotations

from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from max.driver import Tensor
from max.dtype.blocks import ENCODED_FORMATS, encode
from max.engine import InferenceSession
from max.entrypoints.llm import LLM
from max.graph.quantization import QuantizationEncoding
from max.graph.weights import WeightData
from max.pipelines import PipelineConfig
from max.pipelines.checkpoints import quantize
from max.pipelines.checkpoints.encodings import QUANTIZED_KINDS
from max.pipelines.checkpoints.quantize import Quantizer, encoding_for, quantized_state_dict
from max.pipelines.core.exceptions import ConfigError, ModelFilesError

TINY = Path(__file__).parents[2] / "models" / "tiny-chat"


@pytest.fixture(scope="module")
def session():
    return InferenceSession()


def weight(name: str, values: np.ndarray) -> WeightData:
    return WeightData.from_numpy(values, name)


def blocks_of(data: WeightData) -> np.ndarray:
    return Tensor.from_dlpack(data.data).to_numpy()


def decoded(data: WeightData) -> np.ndarray:
    encoding = data.quantization_encoding
    assert encoding is not None
    return gguf.quants.dequantize(blocks_of(data), gguf.GGMLQuantizationType[encoding.value])


def strange(rng: np.random.Generator, columns: int) -> np.ndarray:
    """Rows of all magnitudes: zeros, constants, one sign, one large element, and subnormal float16 scales."""
    rows = rng.standard_normal((40, columns)).astype(np.float32)
    rows *= 10.0 ** rng.uniform(-3, 2, (40, 1)).astype(np.float32)
    rows[0], rows[1], rows[2] = 0, 3, -0.25
    rows[3], rows[4] = np.abs(rows[3]), -np.abs(rows[4])
    rows[5] *= 1e-4
    rows[6, 7] = 50
    rows[7] *= 1e-9
    return rows


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_kernels_encode_as_numpy(kind, dtype, session, rng):
    """Blocks of Q4_0 and Q8_0 are the gguf package's, those of the K formats have at most the error of NumPy's; int8
    has one scale per row.
    """
    values = strange(rng, 512).astype(dtype)
    exact = values.astype(np.float32)
    data = Quantizer(session).encode(weight("a", values), kind)
    if kind == "int8":
        scale = (np.abs(exact).max(1) / 127).astype(np.float16).astype(np.float32)[:, None]
        assert data.quantization_encoding is QuantizationEncoding.Q8_0
        # one step of the row's scale, and the rounding of subnormal scales
        assert (np.abs(decoded(data) - exact) <= 0.501 * scale + 127 * 2.0**-25).all()
        steps = decoded(data)[8:] / scale[8:]
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
        return
    name = kind.upper()
    assert data.quantization_encoding is QuantizationEncoding(name)
    if kind in ("q4_0", "q8_0"):
        expected = gguf.quants.quantize(exact, gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(blocks_of(data), expected)
        return
    by_numpy = gguf.quants.dequantize(encode(exact, name), gguf.GGMLQuantizationType[name])
    ours = np.linalg.norm(decoded(data) - exact, axis=1)
    numpys = np.linalg.norm(by_numpy - exact, axis=1)
    assert (ours <= 1.02 * numpys + 1e-6).all()
    assert np.mean(blocks_of(data) == encode(exact, name)) > 0.98


@pytest.mark.parametrize("kind", [k for k in QUANTIZED_KINDS if k not in ("q8_0", "int8")])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_kernels_weigh_as_numpy(kind, dtype, session, rng):
    """Each stacked matrix has its own importance; weighted errors equal those of NumPy's blocks, and do not exceed
    those without.
    """
    values = np.stack([strange(rng, 512), strange(rng, 512)]).astype(dtype)
    exact = values.astype(np.float32)
    weights = np.exp(rng.standard_normal((2, 512)) * 1.5).astype(np.float32)
    data = Quantizer(session).encode(weight("a", values), kind, weights)
    name = kind.upper()
    assert data.quantization_encoding is QuantizationEncoding(name)
    blocks = blocks_of(data)
    expected = encode(exact, name, weights[:, None])
    assert blocks.shape == expected.shape and np.mean(blocks == expected) > 0.98
    plain = blocks_of(Quantizer(session).encode(weight("a", values), kind))

    def errors(of: np.ndarray) -> np.ndarray:
        decoded = gguf.quants.dequantize(of, gguf.GGMLQuantizationType[name])
        return (weights[:, None] * np.square(decoded - exact)).sum(-1)

    assert (errors(blocks) <= errors(plain) * (1 + 1e-5) + 1e-12).all()
    np.testing.assert_allclose(errors(blocks).sum(), errors(expected).sum(), rtol=0.01)
    assert errors(blocks).sum() < 0.9 * errors(plain).sum()


@pytest.mark.parametrize(
    ("name", "shape", "kind", "expected"),
    [
        ("layers.0.mlp.up_proj.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.mlp.up_proj.weight", [3, 320], "q4_k", "q4_0"),
        ("layers.0.mlp.up_proj.weight", [3, 320], "q5_k", "q8_0"),
        ("layers.0.mlp.up_proj.weight", [3, 320], "int8", "int8"),
        ("layers.0.mlp.up_proj.weight", [3, 40], "q8_0", None),
        ("layers.0.mlp.up_proj.bias", [512], "q8_0", None),
        ("lm_head.weight", [3, 512], "q4_k", "q6_k"),
        ("embed_tokens.weight", [3, 320], "q4_0", "q8_0"),
        ("embed_tokens.weight", [3, 512], "q8_0", "q8_0"),
        ("layers.0.mlp.gate.weight", [3, 512], "q8_0", None),
        ("layers.0.input_layernorm.weight", [512], "q8_0", None),
        ("layers.0.mlp.experts.down_proj.weight", [2, 3, 512], "q4_k", "q4_k"),
        ("layers.0.mlp.experts.gate_up_proj.weight", [2, 3, 320], "q4_k", "q4_0"),
        ("layers.0.mlp.experts.gate_proj.weight", [2, 3, 48], "q4_k", None),
        ("layers.0.mlp.experts.down_proj.bias", [2, 512], "q8_0", None),
        ("layers.0.mlp.gate.gate_score.weight", [2, 512], "q8_0", None),
        ("layers.0.mixer.in_proj_qkvz.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.self_attn.indexer.wq_b.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.self_attn.indexer.wk.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.self_attn.indexer.weights_proj.weight", [3, 512], "q4_k", None),
        ("layers.0.self_attn.kv_b_proj.weight", [3, 512], "q4_k", None),
        ("per_layer.embed_tokens_per_layer.weight", [3, 512], "q4_k", "q6_k"),
        ("per_layer.per_layer_model_projection.weight", [3, 512], "q4_k", None),
        ("layers.0.gate.per_layer_input_gate.weight", [3, 512], "q4_k", "q4_k"),
        ("layers.0.gate.per_layer_projection.weight", [3, 256], "q4_k", "q4_k"),
        ("layers.0.mlp.latent_in.weight", [3, 512], "q4_k", "q4_k"),
        ("project_out.weight", [3, 512], "q4_k", "q4_k"),
    ],
)
def test_what_is_encoded(name, shape, kind, expected):
    assert encoding_for(name, shape, kind) == expected


def test_the_cache(session, rng, tmp_path, monkeypatch):
    """A second start reads the first's blocks; another encoding replaces them, a changed file is quantized again."""
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    name = "layers.0.mlp.up_proj.weight"
    norm = weight("norm.weight", np.ones(256, np.float32))
    state = {
        name: weight(name, rng.standard_normal((5, 256)).astype(np.float32)),
        "norm.weight": norm,
    }
    first = quantized_state_dict(state, "q6_k", session, [file])
    assert first["norm.weight"] is norm and list(first) == list(state)
    calls: list[str] = []
    encode_one = Quantizer.encode

    def counted(self, data, kind):
        calls.append(kind)
        return encode_one(self, data, kind)

    monkeypatch.setattr(Quantizer, "encode", counted)
    second = quantized_state_dict(state, "q6_k", session, [file])
    assert calls == [] and second[name].quantization_encoding is QuantizationEncoding.Q6_K
    np.testing.assert_array_equal(blocks_of(second[name]), blocks_of(first[name]))
    quantized_state_dict(state, "q8_0", session, [file])
    assert calls == ["q8_0"]
    assert len(list((tmp_path / "cache" / "quantized").glob("*.safetensors"))) == 1
    file.write_bytes(b"12")
    quantized_state_dict(state, "q8_0", session, [file])
    assert calls == ["q8_0", "q8_0"]
    (cached,) = (tmp_path / "cache" / "quantized").glob("*.safetensors")
    cached.write_bytes(cached.read_bytes()[:-9])
    quantized_state_dict(state, "q8_0", session, [file])
    assert calls == ["q8_0"] * 3, "a damaged file of the cache is made again"


def test_a_cache_that_cannot_be_written(session, rng, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("MAX_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"1")
    name = "lm_head.weight"
    state = {name: weight(name, rng.standard_normal((2, 256)).astype(np.float32))}
    monkeypatch.setattr(Quantizer, "encode", lambda self, data, kind: data)
    assert name in quantized_state_dict(state, "q8_0", session, [file])
    assert "are not remembered" in caplog.text


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_values_without_blocks(value, session):
    values = np.ones((2, 64), np.float32)
    values[1, 3] = value
    for kind in ("q8_0", "int8"):
        with pytest.raises(ModelFilesError, match="weight 'a' has the value .*do not hold"):
            Quantizer(session).encode(weight("a", values), kind)


def test_options():
    with pytest.raises(ConfigError, match="quantize is 'q4_m', which does not fit"):
        PipelineConfig(model_path=str(TINY), quantize="q4_m")
    assert set(QUANTIZED_KINDS) - {"int8"} == {name.lower() for name in ENCODED_FORMATS}
    assert quantize._FORMAT >= 1


@pytest.mark.long
@pytest.mark.parametrize("kind", ["q4_k", "int8"])
def test_answers(kind):
    llm = LLM(PipelineConfig(model_path=str(TINY), quantize=kind, max_length=128))
    asked = "<|im_start|>user\nWhat is the capital of Norway?<|im_end|>\n<|im_start|>assistant\n"
    (answer,) = llm.generate([asked], max_new_tokens=12)
    assert answer == "The capital of Norway is Oslo."
