"""GGUF files that `max quantize` writes: read by ours and by llama.cpp they have the logits of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from max.engine import InferenceSession
from max.graph.weights import GGUFFile, GGUFWeights
from max.nn.transformer import ReturnLogits
from max.pipelines.checkpoints.gguf import config_of
from max.pipelines.checkpoints.gguf_families import FAMILIES
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.export.gguf_file import architecture_of, export_gguf
from max.pipelines.models.decoder_model import DecoderModel
from tests.architectures import llama_cpp
from tests.architectures.families import CASES, Case, architecture_named, random_model
from tests.architectures.llama_harness import Server, reference_logits, relative_error
from tests.programs.architectures import TINY, random_checkpoint

VOCABULARY = json.loads((TINY / "config.json").read_text())["vocab_size"]

NO_BIAS = {"attention_bias": False, "mlp_bias": False}
MANY_KV = {"num_key_value_heads": 6}
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
    "arcee": NO_BIAS,
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
    "gemma4_gguf": {
        "vocab_size_per_layer_input": VOCABULARY,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "glm4": {},
    "glm4_moe": {},
    "gpt2": {},
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
    "mistral": {},
    "mixtral": NO_WINDOW,
    "mpt": {},
    "nemotron": {"head_dim": 4},
    "nemotron_h": {"time_step_min": 1e-6},
    "olmo": {"attention_bias": False},
    "olmo2": NO_BIAS,
    "olmoe_gguf": MANY_KV,
    "phi_grouped": {},
    "phi3": NO_WINDOW,
    "phi3_long": {},
    "phimoe_gguf": {},
    "qwen2": {},
    "qwen2_moe_gguf": {},
    "qwen3": {},
    "qwen3_moe_gguf": {},
    "seed_oss": {"attention_out_bias": False, "mlp_bias": False},
    "smollm3": NO_BIAS,
    "stablelm": {},
    "stablelm_parallel": {},
    "starcoder2": NO_WINDOW,
}
"""The cases, and options that differ from theirs."""


def spec_of(case: str) -> Case:
    return replace(CASES[case], options={**CASES[case].options, **WRITTEN[case]})


def written(case: str, folder: Path, session: InferenceSession) -> tuple[Any, Path]:
    """The model of a case, and its file in float32."""
    model = random_model(spec_of(case), len(case), VOCABULARY)
    random_checkpoint(folder / "model", model)
    path = folder / "model.gguf"
    export_gguf(folder / "model", path, "f32", session)
    return model, path


def read(path: Path, case: str) -> Server:
    """Our model of a file, by the file alone."""
    config = HuggingFaceConfig(config_of(GGUFFile(path)))
    return Server(
        config,
        {name: value.data() for name, value in GGUFWeights(path).items()},
        "interpreter",
        max_seq_len=CASES[case].max_seq_len,
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

IN_HALVES = ("bloom", "falcon", "falcon_grouped", "gemma", "gemma2_plain", "gemma3_plain", "gemma4_gguf", "gpt2", "gpt_neox", "mpt", "phi_grouped", "starcoder2")  # fmt: skip
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
    architectures = {architecture_of(CASES[case].architecture) for case in WRITTEN}
    assert architectures == {*FAMILIES}


@pytest.mark.parametrize("case", WRITTEN)
def test_files_are_read(case: str, models: Any) -> None:
    path, texts, expected = models(case)
    actual = read(path, case).step(dict(enumerate(texts))).logits
    # transformers' own error of Gemma 4 is 4e-5
    bound = 1e-4 if case == "gemma4_gguf" else 2e-5
    assert max(map(relative_error, actual, expected)) < bound


@pytest.mark.parametrize("case", [case for case in WRITTEN if case not in OTHERWISE])
def test_llama_cpp_reads_files(case: str, models: Any, peer: llama_cpp.LlamaCpp) -> None:
    path, texts, expected = models(case)
    actual = peer.logits(path, texts)
    bound = 2e-3 if case in IN_HALVES else 2e-5
    if case == "gemma4_gguf":
        # scores are not divided by the heads' size: transformers with GELU in float16 is 2.2e-2 away, too
        bound = 3e-2
    assert max(map(relative_error, actual, expected)) < bound
