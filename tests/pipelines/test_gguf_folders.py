"""Tiny folders written as GGUF files without a model that runs: what is in the file, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from benchmarks.gguf_files import gguf_name, interleaved
from max.dtype.blocks import BLOCK_FORMATS
from max.graph.weights import WeightData
from max.pipelines.checkpoints.hub import HuggingFaceRepo
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf import export
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.state_space import Mamba2Form
from max.pipelines.models.decoder.config import DecoderConfig

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ROWS, WIDTH, INNER, LAYERS = len(ALPHABET) + 4, 8, 12, 2
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": ROWS,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
SIZES = {
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // 2, WIDTH), "self_attn.v_proj": (WIDTH // 2, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip
TOP = {"model.embed_tokens": (ROWS, WIDTH), "model.norm": (WIDTH,), "lm_head": (ROWS, WIDTH)}


def weights(layers: int = LAYERS) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    shapes = TOP | {
        f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in SIZES.items()
    }
    return {f"{name}.weight": draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}  # fmt: skip


def folder_of(
    path: Path, arrays: dict[str, np.ndarray] | None = None, **changed: Any
) -> tuple[Path, Tokenizer]:
    """A folder with a Llama of random weights, and its tokenizer of single bytes."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | changed))
    vocabulary = {text: number for number, text in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    special = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    tokenizer.save(str(path / "tokenizer.json"))
    save_file(weights() if arrays is None else arrays, path / "model.safetensors")
    return path, tokenizer


def export_folder(folder: Path, kind: str = "f32", **options: Any) -> tuple[Any, Path]:
    """What was written, by a session that compiles nothing, and the file."""
    path = folder.with_suffix(".gguf")
    no_session: Any = SimpleNamespace()
    return export.export_gguf(folder, path, kind, no_session, **options), path


def fields_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def values_of(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: np.array(tensor.data) for tensor in gguf.GGUFReader(path).tensors}


def check_values(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A file's tensors are a checkpoint's weights, with the rows of rotated pairs side by side."""
    found = values_of(path)
    assert found.keys() == {gguf_name(name) for name in arrays}
    for name, array in arrays.items():
        heads = {"q_proj": 2, "k_proj": 1}.get(name.split(".")[-2])
        expected = interleaved(array, heads) if heads else array
        np.testing.assert_array_equal(found[gguf_name(name)], expected, name)


def test_weights_and_description(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "tiny")
    written, path = export_folder(folder)
    check_values(path, weights())
    assert (written.form, written.left_out) == ("llama", 0)
    assert written.nbytes == sum(array.nbytes for array in weights().values())
    fields = fields_of(path)
    assert fields["general.name"] == "tiny" and fields["general.architecture"] == "llama"
    assert fields["llama.block_count"] == LAYERS and fields["llama.embedding_length"] == WIDTH
    assert "llama.nextn_predict_layers" not in fields
    assert fields["general.quantization_version"] == gguf.GGML_QUANT_VERSION
    export_folder(folder, prediction_layers=True)
    assert "llama.nextn_predict_layers" not in fields_of(path)
    assert fields["tokenizer.ggml.tokens"][: len(ALPHABET)] == ALPHABET
    assert len(fields["tokenizer.ggml.tokens"]) == ROWS


class _Zeros:
    """Encodes to zeros of the right number."""

    def __init__(self, session: object) -> None:
        pass

    def encode(self, weight: WeightData, encoding: str, importance: Any) -> WeightData:
        form = BLOCK_FORMATS[encoding.upper()]
        shape = [int(dim) for dim in weight.shape]
        data = np.zeros((*shape[:-1], shape[-1] // form.elements * form.bytes), np.uint8)
        return WeightData.from_numpy(data, weight.name)


@pytest.mark.parametrize("kind", export.EXPORT_TYPES)
def test_the_code_of_the_file_type(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "Quantizer", _Zeros)
    folder, _ = folder_of(tmp_path / "m")
    _, path = export_folder(folder, kind)
    names = {"f32": "ALL_F32", "q4_k": "MOSTLY_Q4_K_M", "q5_k": "MOSTLY_Q5_K_M"}
    code = gguf.LlamaFileType[names.get(kind, f"MOSTLY_{kind.upper()}")]
    assert fields_of(path)["general.file_type"] == code


@pytest.mark.parametrize("stored", ["embedding", "output layer", "equal ones", "different ones"])
def test_a_tied_output_layer_is_not_written(stored: str, tmp_path: Path) -> None:
    """One of two that differ is not tied."""
    arrays = weights()
    embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    if stored == "equal ones":
        arrays[output] = arrays[embedding]
    in_folder = dict(arrays)
    if stored in ("embedding", "output layer"):
        del in_folder[output if stored == "embedding" else embedding]
    folder, _ = folder_of(tmp_path / "m", in_folder, tie_word_embeddings=True)
    _, path = export_folder(folder)
    if stored == "output layer":
        arrays[embedding] = arrays[output]
    if stored != "different ones":
        del arrays[output]
    check_values(path, arrays)


@pytest.mark.parametrize("further", [1, 2])
def test_layers_that_predict_further_tokens(further: int, tmp_path: Path) -> None:
    """They are behind the others, by the same names; most families' files do not have them."""
    arrays = weights(LAYERS + further)
    folder, _ = folder_of(tmp_path / "m", arrays, num_nextn_predict_layers=further)
    first = weights()
    for options in ({}, {"prediction_layers": False}):
        written, path = export_folder(folder, **options)
        assert written.left_out == further
        check_values(path, {name: arrays[name] for name in first})
        fields = fields_of(path)
        assert fields["llama.block_count"] == LAYERS
        assert "llama.nextn_predict_layers" not in fields
    written, path = export_folder(folder, prediction_layers=True)
    assert written.left_out == 0
    check_values(path, arrays)
    fields = fields_of(path)
    assert fields["llama.block_count"] == LAYERS + further
    assert fields["llama.nextn_predict_layers"] == further


def test_a_prediction_layer_that_is_stored_apart(tmp_path: Path) -> None:
    """Its place is behind the other layers, though config.json states none."""
    arrays = weights(LAYERS + 1)
    apart = {name.replace(f"layers.{LAYERS}.", "mtp_layers.0."): array for name, array in arrays.items()}  # fmt: skip
    bias = {f"model.layers.{i}.self_attn.{x}_proj.bias": np.ones(n, np.float32) for i in range(LAYERS)
            for x, n in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2))}  # fmt: skip
    folder, _ = folder_of(
        tmp_path / "m", apart | bias, architectures=["MiMoForCausalLM"], model_type="mimo"
    )
    written, path = export_folder(folder)
    assert written.left_out == 1 and fields_of(path)["qwen2.block_count"] == LAYERS
    written, path = export_folder(folder, prediction_layers=True)
    assert written.left_out == 0 and fields_of(path)["qwen2.block_count"] == LAYERS + 1
    found = values_of(path)
    for part in ("self_attn.o_proj", "mlp.up_proj"):
        name = f"model.layers.{LAYERS}.{part}.weight"
        np.testing.assert_array_equal(found[gguf_name(name)], arrays[name])


def test_fused_projections_of_a_checkpoint(tmp_path: Path) -> None:
    """Files of a Llama have their parts."""
    arrays = weights()
    fused = dict(arrays)
    for index in range(LAYERS):
        for name, parts in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ):  # fmt: skip
            stem = f"model.layers.{index}.{name.partition('.')[0]}"
            pieces = [fused.pop(f"{stem}.{part}.weight") for part in parts]
            fused[f"model.layers.{index}.{name}.weight"] = np.concatenate(pieces)
    folder, _ = folder_of(tmp_path / "m", fused)
    check_values(export_folder(folder)[1], arrays)


def test_the_table_of_a_rotation(tmp_path: Path) -> None:
    """Of frequencies that are divided by 8 below one of a wavelength of 64, as the papers of Llama 3.1 have it."""
    rope = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64}  # fmt: skip
    folder, _ = folder_of(tmp_path / "m", rope_parameters=rope)
    _, path = export_folder(folder)
    # the first pair turns every 6 tokens, the second one every 140
    np.testing.assert_array_equal(
        values_of(path)["rope_freqs.weight"], np.array([1, 8], np.float32)
    )


def config_of(folder: Path, model: Any) -> DecoderConfig:
    """The shape that a folder describes."""
    source = HuggingFaceConfig.load(HuggingFaceRepo(str(folder)))
    return model.config_class.from_huggingface(source)


def test_weights_may_be_changed(tmp_path: Path) -> None:
    """With the shape, such as that of a model whose output layer gets weights of its own."""
    arrays = weights()
    del arrays["lm_head.weight"]
    folder, _ = folder_of(tmp_path / "m", arrays, tie_word_embeddings=True)
    seen: list[Any] = []

    def doubled(
        stored: dict[str, WeightData], model: Any
    ) -> tuple[DecoderConfig, dict[str, WeightData]]:
        config = config_of(folder, model)
        seen.append((set(stored), model.config_class, config.num_layers))
        own = {name: WeightData.from_numpy(array, name) for name, array in changed.items()}
        return replace(config, tie_word_embeddings=False), stored | own

    norm, output = "model.norm.weight", "lm_head.weight"
    changed = {norm: 2 * arrays[norm], output: 3 * arrays["model.embed_tokens.weight"]}
    _, path = export_folder(folder, change=doubled)
    ((names, config_class, layers),) = seen
    assert names == set(arrays) and issubclass(config_class, DecoderConfig) and layers == LAYERS
    check_values(path, arrays | changed)


def test_the_text_of_an_importance_matrix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is that of the text's tokens without special ones, and of the weights of the model itself."""
    folder, tokenizer = folder_of(tmp_path / "m", hidden_size=32, head_dim=4, arrays=_wide())
    calls: list[Any] = []
    importances: list[Any] = []

    class Encoder(_Zeros):
        def encode(self, weight: WeightData, encoding: str, importance: Any) -> WeightData:
            importances.append(importance)
            return super().encode(weight, encoding, importance)

    def matrix_of(decoder: Any, config: Any, own: dict[str, Any], tokens: list[int], _: Any) -> Any:
        calls.append((config.num_layers, set(own), tokens))
        return SimpleNamespace(of=lambda name: name)

    monkeypatch.setattr(export, "importance_matrix", matrix_of)
    monkeypatch.setattr(export, "Quantizer", Encoder)
    export_folder(folder, "q8_0", text="so <s> on")
    ((layers, names, tokens),) = calls
    assert layers == LAYERS and "layers.1.mlp.up_proj.weight" in names
    assert [*tokens] == tokenizer.encode("so <s> on", add_special_tokens=False).ids
    assert importances and all(isinstance(name, str) for name in importances)
    importances.clear()
    export_folder(folder, "q8_0")
    assert len(calls) == 1 and importances and set(importances) == {None}


def _wide() -> dict[str, np.ndarray]:
    """Weights of a hidden size of 32, which blocks fit."""
    draw = np.random.default_rng(0)
    arrays = {}
    for name, array in weights().items():
        shape = [32 if size == WIDTH else size for size in array.shape]
        if "q_proj" in name:
            shape = [8, 32]
        if "o_proj" in name:
            shape = [32, 8]
        arrays[name] = draw.normal(size=shape).astype(np.float32)
    return arrays


def refused(folder: Path, message: str, **options: Any) -> None:
    with pytest.raises(ModelFilesError, match=message):
        export_folder(folder, **options)
    assert not folder.with_suffix(".gguf").exists()


def test_what_is_not_written(tmp_path: Path) -> None:
    names = ["FooForCausalLM", "BarForCausalLM"]
    other, _ = folder_of(tmp_path / "other", architectures=names, model_type="foo")
    refused(other, r"is a FooForCausalLM, BarForCausalLM[\s\S]*models of .*LlamaForCausalLM")
    # the first class that files have counts
    names = ["FooForCausalLM", "LlamaForCausalLM"]
    both, _ = folder_of(tmp_path / "both", architectures=names, model_type="foo")
    assert export_folder(both)[0].form == "llama"
    # a family without a form
    assert export.forms_of("FooForCausalLM") == ()
    assert [form.name for form in export.forms_of("LlamaForCausalLM")] == ["llama"]
    empty, _ = folder_of(tmp_path / "empty")
    (empty / "model.safetensors").unlink()
    refused(empty, r"has no \*\.safetensors")
    codes = weights() | {"model.layers.0.mlp.up_proj.weight": np.ones((INNER, WIDTH), np.int8)}
    refused(folder_of(tmp_path / "codes", codes)[0], "'model.layers.0.mlp.up_proj.weight' is int8")
    lacking = weights()
    del lacking["model.embed_tokens.weight"]
    refused(folder_of(tmp_path / "lacking", lacking)[0], "no embedding")


def test_a_file_of_another_model_is_removed(tmp_path: Path) -> None:
    """What no key states is read back, and what a key states is not refused."""
    refused(folder_of(tmp_path / "m", hidden_act="gelu")[0], "do not describe the activation gelu")
    scaled, _ = folder_of(
        tmp_path / "n", architectures=["GraniteForCausalLM"], model_type="granite", attention_multiplier=0.3
    )  # fmt: skip
    scale = fields_of(export_folder(scaled)[1])["granite.attention.scale"]
    assert math.isclose(scale, 0.3, rel_tol=1e-6)


def test_scores_that_no_key_states(tmp_path: Path) -> None:
    """The layers' factors are compared where both models have attention."""
    folder, _ = folder_of(tmp_path / "m")
    configs: list[DecoderConfig] = []

    def unchanged(stored: Any, model: Any) -> Any:
        configs.append(config := config_of(folder, model))
        return config, stored

    _, path = export_folder(folder, change=unchanged)
    (config,) = configs
    (form,) = export.forms_of("LlamaForCausalLM")
    export._check_description(path, config, form)
    for index in range(LAYERS):
        attention = config.blocks[index].mixer
        assert isinstance(attention, AttentionForm)
        for scale, fits in ((0.3, False), (0.5 + 1e-3, False), (0.5 + 1e-7, True)):
            changed = config.with_blocks([index], mixer=replace(attention, scale=scale))
            if fits:
                export._check_description(path, changed, form)
                continue
            with pytest.raises(ModelFilesError, match=f"llama do not .* multiplied by {scale:g}"):
                export._check_description(path, changed, form)
    other = config.with_blocks([0], mixer=Mamba2Form(1, 3, 1, 2))
    export._check_description(path, other, form)
    with pytest.raises(ModelFilesError, match="multiplied by 0.3"):
        export._check_description(
            path, other.with_blocks([1], mixer=replace(attention, scale=0.3)), form
        )


def test_weights_that_files_have_as_metadata(tmp_path: Path) -> None:
    names = {
        "input_layernorm": "attention_layernorm",
        "post_attention_layernorm": "feedforward_layernorm",
    }
    arrays: dict[str, np.ndarray] = {}
    for name, array in weights().items():
        parts = name.split(".")
        if "gate_proj" not in name:
            arrays[name.replace(parts[-2], names.get(parts[-2], parts[-2]))] = array
    values = {
        "alpha_p": [0.5, 0.25],
        "alpha_n": [1.5, 2.5],
        "beta": [0.5, 0.75],
        "eps": [-1e-6, -2e-6],
    }
    for index in range(LAYERS):
        arrays |= {
            f"model.layers.{index}.mlp.act_fn.{part}": np.array([numbers[index]], np.float32)
            for part, numbers in values.items()
        }
        arrays |= {
            f"model.layers.{index}.self_attn.{x}_norm.weight": np.ones(4, np.float32) for x in "qk"
        }
    kind = {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "hidden_act": "xielu"}
    folder, _ = folder_of(tmp_path / "m", arrays, **kind)
    written, path = export_folder(folder)
    fields = fields_of(path)
    for part, numbers in values.items():
        np.testing.assert_allclose(fields[f"xielu.{part}"], numbers, 1e-6)
    assert written.form == "apertus" and not [name for name in values_of(path) if "act" in name]


def test_weights_in_half_precision(tmp_path: Path) -> None:
    arrays = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights().items()}
    folder, _ = folder_of(tmp_path / "m", arrays)
    _, path = export_folder(folder, "f32")
    check_values(path, {name: array.astype(np.float32) for name, array in arrays.items()})
