"""Architectures built on the decoder base, against transformers' models with random weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from max.dtype import DType
from max.nn.kv_cache import CacheGroup
from max.nn.transformer import ReturnLogits
from max.pipelines.architectures.deepseek import deepseek_v32_decoder
from max.pipelines.architectures.gemma.gemma3n import gemma3n_decoder
from max.pipelines.architectures.gemma.gemma4 import gemma4_decoder
from max.pipelines.architectures.granite.granite import granite_decoder
from max.pipelines.architectures.lfm2.lfm2 import lfm2_decoder
from max.pipelines.architectures.mistral.mistral import mistral_decoder
from max.pipelines.architectures.qwen.qwen2 import qwen2_decoder
from max.pipelines.architectures.qwen.qwen3 import qwen3_decoder
from max.pipelines.architectures.qwen.qwen3_next import qwen3_5_decoder
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.checkpoints.huggingface_config import HuggingFaceConfig
from max.pipelines.core.exceptions import ConfigError
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.blocks.sparse_latent_attention import SparseLatentForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.decoder import Decoder
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures.families import (
    CASES,
    architecture,
    config_file,
    tolerance,
    transformers_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)

# test_greedy_tokens compiles one case of each architecture and compares its logits, too; each of these has a path
# through layers or kernels that those lack; the long suite compiles all
COMPILED = {
    "falcon_grouped", "gemma4_experts", "lfm2_bias", "opt_after", "phimoe", "stablelm_parallel",
}  # fmt: skip
RUNS = [("interpreter", case) for case in CASES] + [
    pytest.param("engine", case, marks=() if case in COMPILED else pytest.mark.long)
    for case in CASES
]


def server(case: str, backend: str, **options: Any) -> Server:
    model = transformers_model(case)
    return Server(
        config_file(transformers_model(case)),
        weights_of(model),
        backend,
        max_seq_len=CASES[case].max_seq_len,
        architecture=cast(type[DecoderModel], architecture(case).pipeline_model),
        **options,
    )


@pytest.mark.parametrize(("backend", "case"), RUNS)
def test_logits_of_prompts_chunks_and_decoding(
    rng: np.random.Generator, case: str, backend: str
) -> None:
    """A prompt whole; another in chunks, shorter and longer than the window, across page borders."""
    ours = server(case, backend, page_size=5, return_logits=ReturnLogits.ALL)
    model = transformers_model(case)
    bound = tolerance(case)
    longest = CASES[case].max_seq_len
    first, second = (rng.integers(0, 61, min(n, longest)).tolist() for n in (23, 17))
    wanted_first, wanted_second = reference_logits(model, first), reference_logits(model, second)
    step = ours.step({"first": first, "second": second[:3]})
    assert relative_error(step.logits[0], wanted_first) < bound
    assert relative_error(step.logits[1], wanted_second[:3]) < bound
    for begin, end in pairwise((3, 10, len(second) - 1, len(second))):
        (logits,) = ours.step({"second": second[begin:end]}).logits
        assert relative_error(logits, wanted_second[begin:end]) < bound


def test_bfloat16_weights(rng: np.random.Generator) -> None:
    ours = server("qwen3", "engine", dtype=DType.bfloat16, return_logits=ReturnLogits.ALL)
    tokens = rng.integers(0, 61, 12).tolist()
    wanted = reference_logits(transformers_model("qwen3"), tokens)
    assert relative_error(ours.step({"a": tokens}).logits[0], wanted) < 0.05


V32 = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def read(fields: Any, **changes: Any) -> Any:
    values = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
        "vocab_size": 61, "rms_norm_eps": 1e-6, "max_position_embeddings": 64,
    }  # fmt: skip
    config = HuggingFaceConfig({**values, **changes})
    return fields(ConfigKeys(config))


def members(config: DecoderConfig) -> list[list[int]]:
    """The blocks of each group of the cache."""
    return [blocks for _, blocks in config.cache.groups]


def test_groups_of_layers_in_the_cache() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = read(
        gemma4_decoder, layer_types=kinds, sliding_window=9, head_dim=6, global_head_dim=10,
        num_global_key_value_heads=2, attention_k_eq_v=True, from_gguf=True,
    )  # fmt: skip
    assert members(config) == [[1], [0, 2]] and config.num_cached_layers == 1
    assert config.cache.places == [(1, 0), (0, 0), (1, 1)]
    params = config.cache_params(DType.float16, 8)
    assert (params.n_kv_heads, params.head_dim, params.window) == (2, 10, None)
    assert params.groups == (CacheGroup(layers=2, n_kv_heads=4, head_dim=6, window=9),)
    assert params.group(1).stored_head_dim == 6 and params.group(1).groups == ()
    # a window that no sequence exceeds divides no layers of one shape
    for changes, groups in (({"sliding_window": 64}, [[0, 1, 2]]), ({"sliding_window": 9}, [[1], [0, 2]])):  # fmt: skip
        same = read(gemma4_decoder, layer_types=kinds, head_dim=512, from_gguf=True, **changes)
        assert members(same) == groups
    assert read(mistral_decoder, sliding_window=9).cache_params(DType.float16, 8).window == 9


def test_windows_of_layers() -> None:
    def windows(config: Any) -> list[int | None]:
        """The windows of layers that are built for the longest sequence."""
        params = config.cache_params(DType.float32, 8)
        layers = Decoder(config, params, DType.float32).layers
        return [block.self_attn.window for block in layers]

    assert windows(read(mistral_decoder, sliding_window=None)) == [None] * 3
    assert windows(read(mistral_decoder, sliding_window=9)) == [9] * 3
    # a window as long as the longest sequence hides nothing
    assert windows(read(mistral_decoder, sliding_window=64)) == [None] * 3
    assert read(mistral_decoder).attention.window == 4096
    assert windows(read(qwen2_decoder, sliding_window=9, max_window_layers=0)) == [None] * 3
    used = {"use_sliding_window": True, "sliding_window": 9}
    assert windows(read(qwen2_decoder, max_window_layers=1, **used)) == [None, 9, 9]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(read(qwen2_decoder, layer_types=kinds, **used)) == [9, None, 9]


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        (mistral_decoder, {"sliding_window": 0}, "sliding_window is 0; expected an integer from 1"),
        (qwen2_decoder, {"layer_types": ["full_attention"]}, "layer_types is .*; expected 3 times"),
        (
            qwen3_decoder,
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types is .*; expected 3",
        ),
        (qwen3_decoder, {"attention_bias": 1}, "attention_bias is 1; expected true or false"),
        (lfm2_decoder, {"layer_types": ["conv", "mamba", "conv"]}, "layer_types is .*; expected 3"),
        (lfm2_decoder, {"conv_L_cache": 1}, "conv_L_cache is 1; expected an integer from 2"),
        (qwen3_5_decoder, {"linear_num_key_heads": 5}, "linear_num_key_heads is 5; expected a div"),
        (
            gemma3n_decoder,
            {"intermediate_size": [3, 4], "num_kv_shared_layers": 0},
            "intermediate_size is .*; expected one",
        ),
        (
            gemma3n_decoder,
            {"activation_sparsity_pattern": [0.5, 1.0, 0.0], "num_kv_shared_layers": 0},
            "activation_sparsity_pattern is .*; expected 3 numbers",
        ),
        (
            gemma3n_decoder,
            {"num_kv_shared_layers": 3},
            "num_kv_shared_layers is 3; expected a layer",
        ),
        (
            gemma4_decoder,
            {"per_layer_config": {"1": {"sliding_window": 4}}},
            "per_layer_config is .*; expected head_dim and num_key_value_heads",
        ),
        (
            gemma4_decoder,
            {"per_layer_config": {"1": {"head_dim": 4}}, "layer_types": ["full_attention"] * 3},
            "per_layer_config is .*; expected equal heads in all layers of a kind",
        ),
        (
            gemma4_decoder,
            {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
            "num_global_key_value_heads is 3; expected a divisor of the 4 query heads",
        ),
        (
            granite_decoder,
            {"logits_scaling": 0},
            "logits_scaling is 0; expected a number other than 0",
        ),
        (deepseek_v32_decoder, V32, "lacks q_lora_rank; expected an integer: the indexer reads"),
        *(
            (
                deepseek_v32_decoder,
                {**V32, "q_lora_rank": 9, key: value},
                f"{key} is .*; expected {expected}",
            )
            for key, value, expected in (
                ("index_topk", 0, "an integer from 1"),
                ("index_topk", 10**6, "an integer from 1 to 65536"),
                ("index_head_dim", 63, "qk_rope_head_dim or more, which is 64"),
                ("index_n_heads", "16", "an integer"),
                ("rope_interleave", False, "true: only index keys"),
                ("layer_types", ["full_attention"] * 3, "3 times indexed_attention"),
                ("mlp_layer_types", ["dense"] * 2, "3 times dense or sparse"),
                ("scoring_func", "softmax", "one of sigmoid"),
            )
        ),
    ],
)
def test_what_is_refused(fields: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(fields, **changes)


def test_index_keys_are_a_group_of_the_cache() -> None:
    """The layers of DeepSeek V3.2 have latents in the first group, and index keys in the second."""
    config = read(deepseek_v32_decoder, **V32, q_lora_rank=9, index_head_dim=70)
    latent = config.first_form(SparseLatentForm)
    assert latent is not None and latent.index.count == 2048
    assert dense_layers(config) == []
    assert config.cache.places == [(0, 0), (0, 1), (0, 2)]
    params = config.cache_params(DType.float16, 8, n_devices=2)
    assert (params.n_kv_heads_per_device, params.head_dim, params.is_mla) == (1, 576, True)
    assert params.groups == (CacheGroup(3, 1, 70, None, True),)
    assert (params.group(1).n_kv_heads_per_device, params.group(1).head_dim) == (1, 70)
    kinds = ["sparse", "dense", "sparse"]
    config = read(deepseek_v32_decoder, **V32, q_lora_rank=9, mlp_layer_types=kinds)
    assert dense_layers(config) == [1]


def dense_layers(config: DecoderConfig) -> list[int]:
    blocks = enumerate(config.blocks)
    return [index for index, block in blocks if isinstance(block.feed_forward, MLPForm)]


def test_latents_have_no_8_bit_cache() -> None:
    config = architecture("deepseek_v3").pipeline_model.config_class.from_huggingface(  # type: ignore[attr-defined]
        config_file(transformers_model("deepseek_v3"))
    )
    assert config.cache_params(DType.bfloat16, 8).head_dim == 14
    for dtype in (DType.int8, DType.float8_e4m3fn):
        with pytest.raises(ConfigError, match=f"format is {dtype.name}; this model caches latents"):
            config.cache_params(dtype, 8)


@pytest.mark.parametrize(("backend", "devices"), [("engine", 1), ("interpreter", 2)])
def test_expanded_latents(rng: np.random.Generator, backend: str, devices: int) -> None:
    """64 new tokens or more expand keys and values, also those of cached tokens; fewer do not."""
    model = transformers_model("deepseek_v3")
    ours = server("deepseek_v3", backend, page_size=5, return_logits=ReturnLogits.ALL, devices=devices)  # fmt: skip
    texts = {name: rng.integers(0, 61, n).tolist() for name, n in (("a", 64), ("b", 60), ("c", 12))}
    logits: dict[str, list[Any]] = {name: [] for name in texts}
    for ends in ({"a": 40, "b": 30}, {"a": 63, "b": 60, "c": 12}, {"a": 64}):
        begins = {name: sum(map(len, logits[name])) for name in ends}
        step = ours.step({name: texts[name][begins[name] : end] for name, end in ends.items()})
        for name, rows in zip(ends, step.logits, strict=True):
            logits[name].append(rows)
    for name, tokens in texts.items():
        expected = reference_logits(model, tokens)
        assert relative_error(np.concatenate(logits[name]), expected) < 2e-5
