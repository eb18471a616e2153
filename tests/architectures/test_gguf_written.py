"""GGUF files that `max quantize` writes: read by ours and by llama.cpp they have the logits of transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest

from max.driver import Tensor
from max.engine import InferenceSession
from max.graph.weights import GGUFFile, GGUFWeights, WeightData
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.index import GGUF_CLASSES
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.export import export_gguf, forms_of
from max.pipelines.gguf.metadata_writer import decoder_metadata
from max.pipelines.gguf.reader import config_of
from max.pipelines.gguf.tensor_writer import stored_weights
from max.pipelines.models.blocks.delta_net import DeltaNetForm
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures import llama_cpp
from tests.architectures.families import (
    CASES,
    YARN,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.llama_harness import Server, reference_logits, relative_error
from tests.pipelines.test_broken_files import broken_gguf, check
from tests.programs.architectures import TINY, random_checkpoint

VOCABULARY = json.loads((TINY / "config.json").read_text())["vocab_size"]

NO_BIAS = {"attention_bias": False, "mlp_bias": False}
MANY_KV = {"num_key_value_heads": 6}
MAGNITUDE = {**YARN, "mscale": 0.6, "mscale_all_dim": 1.1}
NO_WINDOW = {"sliding_window": None}

# what files of Llama 4 do not state
LLAMA4 = {
    "attention_chunk_size": 8192,
    "no_rope_layer_interval": 4,
    "attn_scale": 0.1,
    "floor_scale": 8192,
    "attn_temperature_tuning": True,
}

WRITTEN: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {**NO_BIAS, "rope_parameters": {**YARN, "attention_factor": 0.7}},
    "bloom": {},
    "cohere": {"use_qk_norm": False},
    "cohere2": {},
    "deepseek_v2_lite": {"q_lora_rank": 9},
    "deepseek_v3_gguf": {},
    "dots1": MANY_KV,
    "ernie4_5": {"use_bias": False},
    "ernie4_5_moe": {},
    "exaone4": {**NO_WINDOW, "layer_types": ["full_attention"] * 4},
    "falcon": {"bias": False},
    "falcon_grouped": {},
    "falcon_h1": {},
    "falcon_h1_factors": {"projectors_bias": False},
    "gemma": {},
    "gemma2_plain": {},
    "gemma3_plain": {},
    "gemma3n_gguf": {},
    "gemma4_experts": {},
    "gemma4_gguf": {
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "glm": {"head_dim": 4},
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_bigcode_heads": {"scale_attn_weights": True},
    "gpt_neox": {},
    "gpt_oss_wide": {},
    "granite": {},
    "granite_hybrid": {},
    "granite_hybrid_moe": {},
    "granite_moe": {},
    "granite_moe_shared": {},
    "hunyuan": NO_BIAS,
    "hunyuan_moe": {},
    "jamba": {},
    "lfm2": {},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "llama4": {**LLAMA4, "num_hidden_layers": 5},
    "llama4_dense": {**LLAMA4, "use_qk_norm": True, "num_hidden_layers": 4, **NO_BIAS},
    "mamba": {},
    "mamba2": {},
    "minimax_m2": {},
    "ministral": {"layer_types": ["full_attention"] * 3},
    "ministral3": {},
    "mistral": {},
    "mixtral": NO_WINDOW,
    "mpt": {},
    "nemotron": {"head_dim": 4},
    "nemotron_h": {"time_step_min": 1e-6},
    "nemotron_h_latents": {
        "time_step_min": 1e-6,
        "mlp_bias": False,
        "use_bias": False,
        "n_group": 1,
        "topk_group": 1,
    },
    "olmo": {"attention_bias": False},
    "olmo2": NO_BIAS,
    "olmo3": {},
    "olmoe_gguf": MANY_KV,
    "phi_grouped": {},
    "phi3": NO_WINDOW,
    "phi3_long": {},
    "phimoe_gguf": {},
    "qwen2": {},
    "qwen2_moe_gguf": {},
    "qwen3": {},
    "qwen3_moe_gguf": {},
    "qwen3_5": {"attention_bias": False, "linear_value_head_dim": 6},
    "qwen3_5_moe": {},
    "qwen3_next": {"mlp_only_layers": [], "linear_value_head_dim": 6},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "smollm3": NO_BIAS,
    "stablelm": {},
    "stablelm_parallel": {},
    "starcoder2": NO_WINDOW,
}
"""The cases, and options that differ from theirs."""

ONLY_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_other_magnitude": ("deepseek_v3_gguf", {"rope_parameters": MAGNITUDE}),
    "falcon_alibi": ("falcon_alibi", {"bias": True}),
    "falcon_serial": ("falcon_serial", {}),
    "gemma3n_shared": ("gemma3n", {}),
    "ministral_window": ("ministral", {}),
    "mistral_window": ("mistral_window", {}),
    "qwen2_window": ("qwen2_window", {}),
    "qwen3_5_other_values": ("qwen3_5", {"linear_num_key_heads": 2}),
    "qwen2_moe_dense_layers": ("qwen2_moe", {}),
    "qwen3_moe_dense_layers": ("qwen3_moe", {}),
    "qwen3_next_other_values": ("qwen3_next", {}),
}
"""What llama.cpp refuses or leaves out, and ours reads: the cases, and options that differ from theirs."""

FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "ministral3_magnitude": (
        "ministral3",
        {"rope_parameters": {**MAGNITUDE, "llama_4_scaling_beta": 0.6}},
    ),
}
"""Further forms of cases, which llama.cpp reads, too."""

GELU = {"gemma3n_gguf": 3e-2, "gemma4_experts": 3e-2, "gemma4_gguf": 3e-2}
"""
Bounds where scores are not divided by the heads' size: transformers with GELU in float16 is 2.2e-2 away from itself for
Gemma 4, too.
"""

CONDITION = {
    "gemma4_experts": 1e-4,
    "gemma4_gguf": 1e-4,
    "qwen3_5": 1e-4,
    "qwen3_5_moe": 1e-4,
    "qwen3_5_other_values": 1e-4,
    "qwen3_next": 1e-4,
    "qwen3_next_other_values": 1e-4,
}
"""Bounds of models for which transformers' own error exceeds the others' bound."""


def spec_of(case: str) -> Case:
    base, options = (ONLY_OURS | FURTHER).get(case, (case, WRITTEN.get(case, {})))
    return replace(CASES[base], options={**CASES[base].options, **options})


def written(case: str, folder: Path, session: InferenceSession) -> tuple[Any, Path]:
    """The model of a case, and its file in float32."""
    model = random_model(spec_of(case), len(case), VOCABULARY)
    random_checkpoint(folder / "model", model)
    path = folder / "model.gguf"
    export_gguf(folder / "model", path, "f32", session)
    return model, path


def weights_of_file(path: Path) -> dict[str, WeightData]:
    return {name: value.data() for name, value in GGUFWeights(path).items()}


def read(path: Path, case: str, weights: dict[str, WeightData] | None = None) -> Server:
    """Our model of a file, by the file alone."""
    config = HuggingFaceConfig(config_of(GGUFFile(path)))
    return Server(
        config,
        weights_of_file(path) if weights is None else weights,
        "interpreter",
        max_seq_len=spec_of(case).max_seq_len,
        architecture=cast(
            type[DecoderModel], architecture_named(config.architectures[0]).pipeline_model
        ),
        return_logits=ReturnLogits.ALL,
        gguf=True,
    )


OTHERWISE = {
    "gpt_oss_wide": "it rounds the bounds of YaRN to whole pairs",
    "phimoe_gguf": "it has RMS norms and another routing there",
}
"""Cases that llama.cpp computes in another way than transformers."""

IN_HALVES = (
    "bloom",
    "falcon",
    "falcon_grouped",
    "gemma",
    "gemma2_plain",
    "gemma3_plain",
    "gpt2",
    "gpt_bigcode",
    "gpt_bigcode_heads",
    "gpt_neox",
    "mpt",
    "phi_grouped",
    "starcoder2",
)
"""Cases with GELU, which llama.cpp looks up by float16."""


@pytest.fixture(scope="module")
def session() -> InferenceSession:
    return InferenceSession()


@pytest.fixture(scope="module")
def peer() -> Iterator[llama_cpp.LlamaCpp]:
    process = llama_cpp.start()
    yield process
    process.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, session: InferenceSession) -> Any:
    """The models of cases, their files, texts and transformers' logits; each is made once."""

    @cache
    def model_of(case: str) -> tuple[Path, list[list[int]], list[Any]]:
        model, path = written(case, tmp_path_factory.mktemp(case), session)
        texts = np.random.default_rng(len(case)).integers(3, VOCABULARY, (2, 17)).tolist()
        return path, texts, [reference_logits(model, text) for text in texts]

    return model_of


def test_each_family_is_written() -> None:
    forms = [form for case in WRITTEN for form in forms_of(CASES[case].architecture)]
    assert {form.name for form in forms} == {*GGUF_CLASSES}


@pytest.mark.parametrize("groups", [1, 2])
def test_importance_has_the_columns_of_files(groups: int) -> None:
    """Files of Qwen 3.5 have the value heads, which the last projection reads, in another order."""
    model = random_model(CASES["qwen3_5_moe"], 3)
    config = architecture_named("Qwen3_5MoeForCausalLM").pipeline_model
    assert issubclass(config, DecoderModel)
    shape = config.config_class.from_huggingface(config_file(model))
    form = shape.first_form(DeltaNetForm)
    assert form is not None
    for index, block in enumerate(shape.blocks):
        if block.mixer is form:
            shape = shape.with_blocks(
                [index], mixer=replace(form, key_heads=form.num_heads // groups)
            )
    name = "layers.0.mixer.out_proj.weight"
    own = model.state_dict()["model.layers.0.linear_attn.out_proj.weight"].numpy()
    weights = {name: WeightData.from_numpy(own, name)}
    (stored,) = stored_weights(shape, config.gguf[0], weights)
    assert stored.column_order is not None
    np.testing.assert_array_equal(stored.values(), own[:, stored.column_order])
    assert (groups == 1) == np.array_equal(stored.values(), own)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        ("gpt_oss", {}, r"of gpt-oss do not describe a SwiGLU of other numbers than \(1.702, 7.0\)"),
        ("gemma2", {}, "of gemma2 do not describe scores that are not divided by the root of 8"),
        ("gemma3", {}, "of gemma3 do not describe scores"),
        ("gemma3n_plain", {}, "of gemma3n do not describe .* states that are not scaled"),
        ("gemma4", {"layer_types": [*["sliding_attention"] * 2, *["full_attention"] * 4]}, "of gemma4 .* shared keys"),
        ("llama4", {}, "of llama4 do not describe chunks of other lengths than 8192"),
        ("llama4", {"attention_chunk_size": 8192}, "of llama4 do not describe other unrotated layers"),
        ("llama4", LLAMA4 | {"attn_scale": 0.2}, "of llama4 do not describe other growths of queries"),
        ("llama4", LLAMA4 | {"use_qk_norm": False}, "of llama4 do not describe norms of heads"),
        ("qwen3_5", {"layer_types": ["full_attention", *["linear_attention"] * 2]}, "of qwen35 do .* uneven distances"),
    ],
)  # fmt: skip
def test_what_files_leave_out_is_refused(case: str, options: dict[str, Any], message: str) -> None:
    spec = replace(CASES[case], options=CASES[case].options | options)
    model = architecture_named(spec.architecture).pipeline_model
    assert issubclass(model, DecoderModel)
    config = model.config_class.from_huggingface(config_file(random_model(spec, 1)))
    with pytest.raises(ModelFilesError, match=message):
        decoder_metadata(config, model.gguf[0])


@pytest.mark.parametrize(
    ("case", "code"), [("glm4_moe", "SIGMOID"), ("dots1", "SIGMOID"), ("deepseek_v2_lite", "SOFTMAX")]
)  # fmt: skip
def test_codes_of_routers(case: str, code: str) -> None:
    """As the gguf package lists them."""
    spec = spec_of(case)
    model = architecture_named(spec.architecture).pipeline_model
    assert issubclass(model, DecoderModel)
    config = model.config_class.from_huggingface(config_file(random_model(spec, 1)))
    written = decoder_metadata(config, model.gguf[0])
    assert written["expert_gating_func"] == gguf.ExpertGatingFuncType[code]


@pytest.mark.parametrize("case", ["gemma3n_gguf", "lfm2", "mamba2", "nemotron_h", "qwen3_next"])
def test_broken_files(
    case: str, models: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files with changed bytes or metadata generate tokens, or end in one clear error."""
    path, _, _ = models(case)
    copy = tmp_path / "model.gguf"
    assert check(path, capfd) == 0
    # llama.cpp asks for it, too
    key = b"layer_norm_rms_epsilon"
    content = path.read_bytes()
    assert content.count(key) == 1
    copy.write_bytes(content.replace(key, key[:-1] + b"_"))
    assert check(copy, capfd) == 2
    codes = Counter[int]()
    for seed in range(8):
        codes[check(broken_gguf(path, copy, seed), capfd)] += 1
    assert codes[2] > 2, codes


@pytest.mark.any_target
@pytest.mark.parametrize("case", [*WRITTEN, *ONLY_OURS, *FURTHER])
def test_files_are_read(case: str, models: Any) -> None:
    path, texts, expected = models(case)
    actual = read(path, case).step(dict(enumerate(texts))).logits
    assert max(map(relative_error, actual, expected)) < CONDITION.get(case, 2e-5)


@pytest.mark.any_target
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("gpt_bigcode_heads", r"of starcoder do not describe scores that are multiplied by 1\s"),
        ("gpt2_scaled", "of gpt2 do not describe scores that are multiplied by 0.25"),
        ("gpt2_relu", "of gpt2 do not describe the activation relu"),
    ],
)
def test_a_file_of_another_model_is_not_kept(
    case: str, message: str, tmp_path: Path, session: InferenceSession
) -> None:
    """What no key states is read back: a file that would answer wrongly is removed."""
    spec = CASES["gpt2_scaled" if case == "gpt2_relu" else case]
    plain = {"scale_attn_by_inverse_layer_idx": False} if case == "gpt2_relu" else {}
    model = random_model(replace(spec, options=spec.options | plain), 1, VOCABULARY)
    random_checkpoint(tmp_path, model)
    path = tmp_path / "model.gguf"
    with pytest.raises(ModelFilesError, match=message):
        export_gguf(tmp_path, path, "f32", session)
    assert not path.exists()


def test_fused_experts(models: Any) -> None:
    """Files of some converters have the gates and the up projections of experts as one tensor."""
    path, texts, expected = models("qwen3_5_moe")
    weights = weights_of_file(path)
    for name in [name for name in weights if name.endswith("ffn_gate_exps.weight")]:
        parts = [weights.pop(name), weights.pop(name.replace("gate", "up"))]
        both = np.concatenate([Tensor.from_dlpack(part.data).to_numpy() for part in parts], 1)
        fused = name.replace("gate", "gate_up")
        weights[fused] = WeightData.from_numpy(both, fused)
    actual = read(path, "qwen3_5_moe", weights).step(dict(enumerate(texts))).logits
    assert max(map(relative_error, actual, expected)) < 1e-4


@pytest.mark.parametrize("case", [*(case for case in WRITTEN if case not in OTHERWISE), *FURTHER])
def test_llama_cpp_reads_files(case: str, models: Any, peer: llama_cpp.LlamaCpp) -> None:
    path, texts, expected = models(case)
    actual = peer.logits(path, texts)
    bound = 2e-3 if case in IN_HALVES else CONDITION.get(case, 2e-5)
    bound = GELU.get(case, bound)
    assert max(map(relative_error, actual, expected)) < bound
