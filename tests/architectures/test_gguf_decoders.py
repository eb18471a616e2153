"""Decoders from GGUF files, against transformers: names, conversions and metadata are llama.cpp's.

Families with recurrent layers are in `test_gguf_written`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest

from max.graph.weights import GGUFFile, GGUFWeights
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.gemma.gemma3n import GGUF as GEMMA3N
from max.pipelines.architectures.gemma.gemma4 import GGUF as GEMMA4
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.metadata import Metadata
from max.pipelines.gguf.reader import config_of, window_types
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures import gguf_files
from tests.architectures.families import CASES, architecture, transformers_model
from tests.architectures.llama_harness import Server, reference_logits, relative_error


def nothing(writer: gguf.GGUFWriter) -> None:
    pass


def granite(writer: gguf.GGUFWriter) -> None:
    writer.add_embedding_scale(3.0)
    writer.add_attention_scale(0.11)
    writer.add_residual_scale(0.6)
    writer.add_logit_scale(0.4)


def granite_moe(writer: gguf.GGUFWriter) -> None:
    writer.add_embedding_scale(3.0)
    writer.add_attention_scale(0.3)
    writer.add_residual_scale(0.6)
    writer.add_logit_scale(0.4)


def gemma2(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_logit_softcapping(2.0)
    writer.add_final_logit_softcapping(3.0)


def neox(writer: gguf.GGUFWriter) -> None:
    writer.add_parallel_residual(True)


def mpt(writer: gguf.GGUFWriter) -> None:
    writer.add_clamp_kqv(0.7)
    writer.add_max_alibi_bias(8.0)


def deepseek(writer: gguf.GGUFWriter) -> None:
    """As files that cache heads: older ones, whose kv_b is whole."""
    writer.add_kv_lora_rank(10)
    writer.add_key_length(10)
    writer.add_value_length(5)
    writer.add_rope_dimension_count(4)


def deepseek_latents(writer: gguf.GGUFWriter) -> None:
    """As files that cache latents."""
    writer.add_kv_lora_rank(10)
    writer.add_q_lora_rank(9)
    writer.add_key_length(14)
    writer.add_value_length(10)
    writer.add_key_length_mla(10)
    writer.add_value_length_mla(5)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_rope_dimension_count(4)
    writer.add_rope_scaling_yarn_log_mul(0.06)


def gemma4(writer: gguf.GGUFWriter) -> None:
    """Values of layers, which differ by kind; pairs past the share of a proportional rotation are divided by 1e30."""
    config = transformers_model("gemma4_gguf").config
    layers, own = config.num_hidden_layers, config.num_hidden_layers - config.num_kv_shared_layers
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    inner = config.intermediate_size
    writer.add_feed_forward_length([inner] * own + [2 * inner] * (layers - own))
    writer.add_head_count_kv([2 if local else 1 for local in sliding])
    writer.add_sliding_window_pattern(sliding)
    writer.add_shared_kv_layers(layers - own)
    writer.add_key_length(8)
    writer.add_key_length_swa(6)
    writer.add_embedding_length_per_layer_input(6)
    writer.add_rope_freq_base_swa(100.0)
    writer.add_final_logit_softcapping(20.0)
    writer.add_tensor("rope_freqs.weight", np.array([1, 1, 1e30, 1e30], np.float32))


def apertus(writer: gguf.GGUFWriter) -> None:
    """The activations' parameters are metadata."""
    mlps = [layer.mlp.act_fn for layer in transformers_model("apertus").model.layers]
    writer.add_xielu_alpha_p([act.alpha_p.item() for act in mlps])
    writer.add_xielu_alpha_n([act.alpha_n.item() for act in mlps])
    writer.add_xielu_beta([0.5] * len(mlps))
    writer.add_xielu_eps([-1e-6] * len(mlps))
    # what transformers divides the frequencies of Llama 3's rotation by
    scaled = transformers_model("apertus").model.rotary_emb.inv_freq.numpy()
    divisors = 500.0 ** (-np.arange(0, 4, 2) / 4) / scaled
    writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))


def without_activations(state: dict[str, Any], config: Any) -> dict[str, Any]:
    return {name: value for name, value in state.items() if ".act_fn." not in name}


def olmo3(writer: gguf.GGUFWriter) -> None:
    writer.add_sliding_window_pattern([True, False, True])


def ministral3(writer: gguf.GGUFWriter) -> None:
    writer.add_attn_temperature_scale(0.6)
    writer.add_rope_scaling_yarn_log_mul(0.5)


FILES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "apertus": ("apertus", apertus),
    "arcee": ("arcee", nothing),
    "bloom": ("bloom", nothing),
    "cohere": ("command-r", lambda w: w.add_logit_scale(0.3)),
    "cohere2": ("cohere2", lambda w: w.add_logit_scale(0.0625)),
    "deepseek_v2_lite": ("deepseek2", deepseek),
    "deepseek_v3_gguf": ("deepseek2", deepseek_latents),
    "dots1": ("dots1", nothing),
    "ernie4_5_moe": ("ernie4_5-moe", nothing),
    "ernie4_5": ("ernie4_5", nothing),
    "exaone4": ("exaone4", nothing),
    "falcon": ("falcon", nothing),
    "falcon_grouped": ("falcon", nothing),
    "gemma": ("gemma", nothing),
    "gemma2_plain": ("gemma2", gemma2),
    "gemma3_plain": ("gemma3", nothing),
    "gemma4_gguf": ("gemma4", gemma4),
    "glm4_moe": ("glm4moe", nothing),
    "gpt_oss_wide": ("gpt-oss", nothing),
    "granite_moe": ("granitemoe", granite_moe),
    "granite_moe_shared": ("granitemoe", lambda w: w.add_attention_scale(1.0)),
    "hunyuan_moe": ("hunyuan-moe", nothing),
    "minimax_m2": ("minimax-m2", nothing),
    "mixtral": ("llama", nothing),
    "olmoe_gguf": ("olmoe", nothing),
    "phimoe_gguf": ("phimoe", nothing),
    "qwen2_moe_gguf": ("qwen2moe", nothing),
    "qwen3_moe_gguf": ("qwen3moe", nothing),
    "glm": ("chatglm", nothing),
    "glm4": ("glm4", nothing),
    "ministral3": ("mistral3", ministral3),
    "gpt2": ("gpt2", nothing),
    "gpt_bigcode": ("starcoder", nothing),
    "gpt_neox": ("gptneox", neox),
    "granite": ("granite", granite),
    "hunyuan": ("hunyuan-dense", nothing),
    "mpt": ("mpt", mpt),
    "nemotron": ("nemotron", nothing),
    "olmo": ("olmo", lambda w: w.add_clamp_kqv(0.7)),
    "olmo2": ("olmo2", nothing),
    "olmo3": ("olmo2", olmo3),
    "phi_grouped": ("phi2", nothing),
    "phi3": ("phi3", nothing),
    "phi3_long": ("phi3", nothing),
    "qwen2": ("qwen2", nothing),
    "qwen3": ("qwen3", nothing),
    "seed_oss": ("seed_oss", nothing),
    "smollm3": ("smollm3", nothing),
    "stablelm": ("stablelm", nothing),
    "stablelm_parallel": ("stablelm", nothing),
    "starcoder2": ("starcoder2", nothing),
}


def of_layers(file: GGUFFile, name: str, count: int) -> Metadata:
    """The metadata of a file with a number of layers."""
    return Metadata(file, name, {"num_hidden_layers": count, "max_position_embeddings": 64})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_count": -1}, "gemma4.expert_count is -1, expected an integer from 0"),
        ({"attention.sliding_window_pattern": np.array([True])}, r"pattern is \[True\], expected an integer, or 3"),
        ({"attention.head_count_kv": np.array([2, 1, 4])}, r"head_count_kv is \[2, 1, 4\], expected 2 for layer 2"),
        ({"feed_forward_length": np.array([8, 9, 8])}, r"length is \[8, 9, 8\], expected \[8, 8, 8\]"),
        ({"attention.shared_kv_layers": -1}, "shared_kv_layers is -1, expected an integer from 0"),
    ],
)  # fmt: skip
def test_layers_of_two_kinds_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {
        "block_count": 3, "attention.sliding_window_pattern": np.array([True, False, True]),
        "attention.head_count_kv": np.array([2, 1, 2]), "feed_forward_length": 8, "attention.key_length": 8,
    }  # fmt: skip
    stated = {f"gemma4.{key}": value for key, value in (values | changes).items()}
    file = cast(GGUFFile, SimpleNamespace(path="x.gguf", metadata=stated, tensors={}))
    with pytest.raises(ModelFilesError, match=message):
        GEMMA4.read(of_layers(file, "gemma4", 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_sparsity_scale": np.array([1.0])}, r"scale is array\(\[1\.\]\), expected 3 numbers"),
        ({"feed_forward_length": np.array([8, 9])}, r"length is \[8, 9\], expected an integer, or 3"),
        ({"embedding_length_per_layer_input": None}, "per_layer_input is None, expected an integer from 0"),
    ],
)  # fmt: skip
def test_several_states_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    values = {"block_count": 3, "feed_forward_length": 8, "embedding_length_per_layer_input": 4}
    stated = {f"gemma3n.{key}": value for key, value in (values | changes).items()}
    tensor = SimpleNamespace(shape=(3, 4))
    tensors = {"per_layer_token_embd.weight": tensor, "blk.0.laurel_l.weight": tensor}
    file = cast(GGUFFile, SimpleNamespace(path="x.gguf", metadata=stated, tensors=tensors))
    with pytest.raises(ModelFilesError, match=message):
        GEMMA3N.read(of_layers(file, "gemma3n", 3))
    file.tensors.clear()
    with pytest.raises(ModelFilesError):
        GEMMA3N.read(of_layers(file, "gemma3n", 3))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (None, {}),
        (4, {"sliding_window_pattern": 4}),
        (np.array([True, False]), {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True}),
        (np.array([True]), "expected a period, or 2 flags"),
        (0, "is 0, expected a period"),
        ("every", "is 'every', expected a period"),
    ],
)  # fmt: skip
def test_layers_with_a_window(pattern: Any, expected: Any) -> None:
    stated = {"llama.attention.sliding_window_pattern": pattern}
    file = cast(GGUFFile, SimpleNamespace(path="x.gguf", metadata=stated))
    if isinstance(expected, str):
        with pytest.raises(ModelFilesError, match=expected):
            window_types(of_layers(file, "llama", 2))
    else:
        assert window_types(of_layers(file, "llama", 2)) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"xielu.alpha_p": np.array([1.0])},
            r"xielu.alpha_p is array\(\[1\.\]\), expected a number, or 2",
        ),
        ({"xielu.alpha_p": 1}, "xielu.alpha_p is 1, expected a number, or 2"),
        ({"xielu.alpha_n": None}, "xielu.alpha_n is None"),
        (
            {"apertus.rope.scaling.type": "yarn", "apertus.rope.scaling.attn_factor": 1.0},
            "rope.scaling.factor is None, expected a number over 0",
        ),
        (
            {"apertus.rope.scaling.type": "yarn", "apertus.rope.scaling.yarn_beta_fast": "32"},
            "yarn_beta_fast is '32', expected a number over 0",
        ),
    ],
)
def test_parameters_that_do_not_fit(values: dict[str, Any], message: str) -> None:
    keys = {
        "block_count": 2, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8,
        "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    stated = {"general.architecture": "apertus", **{f"apertus.{k}": v for k, v in keys.items()}}
    stated |= {f"xielu.{part}": 0.5 for part in ("alpha_p", "alpha_n", "beta", "eps")}
    tensors = {"token_embd.weight": SimpleNamespace(shape=(4, 8))}
    file = SimpleNamespace(path="x.gguf", metadata=stated | values, tensors=tensors)
    with pytest.raises(ModelFilesError, match=message):
        config_of(cast(GGUFFile, file))


@pytest.mark.any_target
@pytest.mark.parametrize("case", FILES)
def test_logits(tmp_path: Path, rng: np.random.Generator, case: str) -> None:
    arch, extra = FILES[case]
    model = transformers_model(case)
    path = tmp_path / "model.gguf"
    changes = {deepseek_latents: gguf_files.split_latents, apertus: without_activations}
    change = changes.get(extra)
    gguf_files.write(path, model, arch, extra, change)
    file = GGUFFile(path)
    ours = Server(
        HuggingFaceConfig(config_of(file)),
        {name: value.data() for name, value in GGUFWeights(path).items()},
        "interpreter",
        max_seq_len=CASES[case].max_seq_len,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        return_logits=ReturnLogits.ALL,
        gguf=True,
    )
    tokens = rng.integers(0, 61, 17).tolist()
    expected = reference_logits(model, tokens)
    # transformers' own error of Gemma 4 is 4e-5
    tolerance = 1e-4 if arch == "gemma4" else 2e-5
    assert relative_error(ours.step({"a": tokens}).logits[0], expected) < tolerance
