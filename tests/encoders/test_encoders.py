"""Encoders against transformers' models with random weights: hidden states, scores, dtypes, batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from max.pipelines import PIPELINE_REGISTRY, PipelineConfig
from max.pipelines.core.exceptions import ModelFilesError, UserError
from tests.encoders.harness import (
    CASES,
    CLASSIFIERS,
    checkpoint,
    pipeline,
    reference,
    run,
    texts,
)

LENGTHS = [17, 1, 40, 5]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("case", CASES)
def test_hidden_states(case: str) -> None:
    folder, model = checkpoint(case)
    pipe = pipeline(folder, pool_embeddings=False, max_length=40)
    tokens = texts(LENGTHS)
    for text, got in zip(tokens, run(pipe, tokens), strict=True):
        want = reference(model, text).last_hidden_state[0].numpy()
        assert relative_error(got, want) < 1e-5


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_scores(case: str) -> None:
    folder, model = checkpoint(case, "ForSequenceClassification")
    tokens = texts(LENGTHS, 1)
    for text, got in zip(tokens, run(pipeline(folder), tokens), strict=True):
        assert relative_error(got, reference(model, text).logits[0].numpy()) < 1e-5


@pytest.mark.parametrize("case", ["Bert", "MPNet", "ModernBert", "EmbeddingGemma", "Qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(case: str, dtype: str) -> None:
    """Without files of sentence-transformers, pooling is the mean over tokens."""
    folder, model = checkpoint(case, dtype=dtype)
    tokens = texts(LENGTHS, 2)
    for text, got in zip(tokens, run(pipeline(folder), tokens), strict=True):
        want = reference(model, text).last_hidden_state[0].mean(0).numpy()
        assert relative_error(got, want) < (2e-2 if dtype == "bfloat16" else 3e-3)


@pytest.mark.parametrize("case", ["Bert", "ModernBert"])
def test_results_do_not_depend_on_the_batch(case: str) -> None:
    folder, _ = checkpoint(case)
    tokens = texts([3, 30, 1, 12, 25, 8])
    pipe = pipeline(folder, prefill_chunk_size=40, max_batch_size=3)
    together = run(pipe, tokens)
    for text, got in zip(tokens, together, strict=True):
        np.testing.assert_allclose(run(pipe, [text])[0], got, rtol=1e-5, atol=1e-6)


def test_token_types() -> None:
    folder, model = checkpoint("Bert")
    tokens = texts([9, 4])
    types = [np.array([0, 0, 0, 0, 1, 1, 1, 1, 1]), np.array([0, 1, 1, 0])]
    for text, kinds, got in zip(tokens, types, run(pipeline(folder), tokens, types), strict=True):
        want = reference(model, text, token_type_ids=torch.tensor(kinds)[None])
        assert relative_error(got, want.last_hidden_state[0].mean(0).numpy()) < 1e-5


def test_conversion_on_load() -> None:
    folder, model = checkpoint("Roberta")
    tokens = texts(LENGTHS)
    pipe = pipeline(folder, quantization_encoding="bfloat16")
    for text, got in zip(tokens, run(pipe, tokens), strict=True):
        want = reference(model, text).last_hidden_state[0].mean(0).numpy()
        assert 1e-5 < relative_error(got, want) < 2e-2


def own_nomic(folder: Path, target: Path) -> None:
    """Rewrites a checkpoint of transformers with the names and keys of NomicBERT's own code."""
    config = json.loads((folder / "config.json").read_text())
    own = {
        "architectures": ["NomicBertModel"],
        "activation_function": "swiglu",
        "n_embd": config["hidden_size"],
        "n_inner": config["intermediate_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "n_positions": config["max_position_embeddings"],
        "layer_norm_epsilon": config["layer_norm_eps"],
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "type_vocab_size": 2,
        "vocab_size": config["vocab_size"],
    }
    (target / "config.json").write_text(json.dumps(own))
    weights = load_file(folder / "model.safetensors")
    renamed: dict[str, Any] = {}
    for layer in range(own["n_layer"]):
        if f"layers.{layer}.self_attn.q_proj.weight" in weights:
            parts = [weights.pop(f"layers.{layer}.self_attn.{p}_proj.weight") for p in "qkv"]
            weights[f"encoder.layers.{layer}.attn.Wqkv.weight"] = torch.cat(parts)
    table = {
        "layers.": "encoder.layers.",
        "encoder.encoder.": "encoder.",
        "embeddings.LayerNorm": "emb_ln",
        "self_attn.o_proj": "attn.out_proj",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
    }
    for name, value in weights.items():
        for theirs, own_name in table.items():
            name = name.replace(theirs, own_name)
        renamed[name] = value.contiguous()
    save_file(renamed, target / "model.safetensors", {"format": "pt"})


def test_nomic_berts_own_checkpoints(tmp_path: Path) -> None:
    folder, model = checkpoint("NomicBert")
    own_nomic(folder, tmp_path)
    tokens = texts(LENGTHS)
    for text, got in zip(tokens, run(pipeline(tmp_path), tokens), strict=True):
        want = reference(model, text).last_hidden_state[0].mean(0).numpy()
        assert relative_error(got, want) < 1e-5
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"prenorm": True}))
    PIPELINE_REGISTRY.reset()
    with pytest.raises(ModelFilesError, match="prenorm is True; expected false"):
        pipeline(tmp_path)


def test_texts_that_do_not_fit() -> None:
    folder, _ = checkpoint("Roberta")
    pipe = pipeline(folder)
    with pytest.raises(ValueError, match="has 63 tokens; expected 1 to 62"):
        run(pipe, texts([63]))
    with pytest.raises(ValueError, match="has 0 tokens"):
        run(pipe, texts([3, 0]))
    with pytest.raises(UserError, match="max_length 63 is more than the 62 tokens"):
        pipeline(folder, max_length=63)


def test_configs_that_do_not_fit(tmp_path: Path) -> None:
    folder, _ = checkpoint("Bert")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    for change, message in (
        ({"num_hidden_layers": 2}, "config.json says 2 layers, .* 3 layers"),
        ({"hidden_size": 36}, "do not fit"),
        ({"num_attention_heads": 5}, "a divisor of hidden_size, which is 32"),
        ({"hidden_act": "sin"}, "hidden_act is 'sin'; expected one of"),
        ({"position_embedding_type": "relative_key"}, "expected absolute"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        PIPELINE_REGISTRY.reset()
        with pytest.raises(ModelFilesError, match=message):
            pipeline(tmp_path)


def test_a_model_of_text_with_modules_json_is_an_embedder(tmp_path: Path) -> None:
    folder, model = checkpoint("Qwen3", "ForCausalLM")
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert PIPELINE_REGISTRY.architecture_of(
        PipelineConfig(model_path=str(tmp_path))
    ).task.value == ("text_generation")
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in (("", "Transformer"), ("1_Pooling", "Pooling"), ("2", "Normalize"))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    tokens = texts(LENGTHS)
    for text, got in zip(tokens, run(pipeline(tmp_path), tokens), strict=True):
        want = reference(model.model, text).last_hidden_state[0, -1].numpy()
        assert relative_error(got, want / np.linalg.norm(want)) < 1e-5
