"""Metadata of models in GGUF files that ours writes: as the gguf package writes it of transformers' configs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest

from max.pipelines.core.exceptions import ModelFilesError
from max.pipelines.gguf.form import GGUFForm
from max.pipelines.gguf.metadata_writer import decoder_metadata, one_or_list, period_of
from max.pipelines.models.blocks.attention import AttentionForm
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.feed_forward import MLPForm
from max.pipelines.models.decoder.config import DecoderConfig
from max.pipelines.models.decoder.model import DecoderModel
from tests.architectures import gguf_files
from tests.architectures.families import (
    CASES,
    LONGEST,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.test_gguf_decoders import FILES
from tests.architectures.test_gguf_written import MAGNITUDE, spec_of

KEYS = {
    value.removeprefix("{arch}.")
    for group in vars(gguf.Keys).values()
    if isinstance(group, type)
    for value in vars(group).values()
    if isinstance(value, str) and value.startswith("{arch}.")
}
"""The keys that the gguf package has names for, without the prefix of the architecture."""

SIGMOID = gguf.ExpertGatingFuncType.SIGMOID
NORMALIZED: dict[str, Any] = {"expert_weights_norm": True, "expert_weights_scale": 1.0}

MORE: dict[str, dict[str, Any]] = {
    "arcee": {"rope.scaling.attn_factor": 0.7 / (0.1 * math.log(4.0) + 1.0)},
    "deepseek_v3_gguf": {"attention.head_count_kv": 1},
    "dots1": {"expert_gating_func": SIGMOID},
    "ernie4_5_moe": NORMALIZED,
    "gemma3_plain": {"rope.freq_base_swa": 10000.0},
    "glm4_moe": {"expert_gating_func": SIGMOID},
    "gpt_oss_wide": {"rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0},
    "granite_moe_shared": {"embedding_scale": 1.0, "logit_scale": 1.0, "residual_scale": 1.0},
    "hunyuan_moe": {**NORMALIZED, "expert_shared_count": 1, "expert_shared_feed_forward_length": 40},
    "minimax_m2": {**NORMALIZED, "expert_gating_func": SIGMOID},
    "olmo": {"attention.layer_norm_epsilon": 1e-5},
    "olmo3": {"rope.freq_base_swa": 1000.0},
    "olmoe_gguf": {"expert_weights_scale": 1.0},
    "phimoe_gguf": {"attention.layer_norm_epsilon": 1e-5},
    "qwen2_moe_gguf": {"expert_weights_scale": 1.0, "feed_forward_length": 16},
    "qwen3_moe_gguf": {"expert_weights_scale": 1.0, "feed_forward_length": 16},
    "stablelm": {"use_parallel_residual": False},
    "stablelm_parallel": {"use_parallel_residual": True},
}  # fmt: skip
"""What ours states, and files of `test_gguf_decoders` leave to defaults; of layers with experts only, their size."""

UNSTATED = {"deepseek_v3_gguf": "attention.head_count_kv", "dots1": "attention.sliding_window"}
"""Older files have a latent for each head; the window is of a version without one."""


def described(spec: Case, seed: int = 1) -> tuple[Any, DecoderConfig, GGUFForm]:
    """A random model of a case, its shape and its form."""
    model = random_model(spec, seed)
    pipeline_model = architecture_named(spec.architecture).pipeline_model
    assert issubclass(pipeline_model, DecoderModel)
    config = pipeline_model.config_class.from_huggingface(config_file(model))
    return model, config, next(form for form in pipeline_model.gguf if form.describes(config))


def written(spec: Case) -> dict[str, Any]:
    """The metadata that ours writes of a case."""
    _, config, form = described(spec)
    return decoder_metadata(config, form)


def stored(values: dict[str, Any]) -> dict[str, Any]:
    """Metadata with the floats that files hold."""
    return {k: np.float32(v) if isinstance(v, float) else v for k, v in values.items()}


@pytest.mark.parametrize("case", [c for c in FILES if c not in ("deepseek_v2_lite", "gemma4_gguf")])
def test_keys_are_those_of_the_gguf_package(case: str) -> None:
    arch, extra = FILES[case]
    model, config, form = described(spec_of(case))
    writer, source = gguf_files.writer_of(model, arch, extra)
    (stated,) = writer.kv_data
    expected = {
        key.removeprefix(f"{arch}."): item.value
        for key, item in stated.items()
        if key.startswith(f"{arch}.") and not key.endswith(UNSTATED.get(case, "no such key"))
    }
    size = getattr(source, "head_dim", None) or source.hidden_size // source.num_attention_heads
    expected = {"attention.key_length": size, "attention.value_length": size} | expected
    expected["vocab_size"] = source.vocab_size
    if "expert_count" in expected:
        width = getattr(source, "moe_intermediate_size", None) or source.intermediate_size
        expected = {"expert_feed_forward_length": width, "leading_dense_block_count": 0} | expected
        if shared := expected.get("expert_shared_count"):
            expected.setdefault("expert_shared_feed_forward_length", shared * width)
    assert form.name == arch
    assert stored(decoder_metadata(config, form)) == stored(expected | MORE.get(case, {}))


def ssm(taps: int, inner: int, state: int, rank: int, groups: int | None = None) -> dict[str, Any]:
    values = {"conv_kernel": taps, "inner_size": inner, "state_size": state, "time_step_rank": rank}
    values |= {} if groups is None else {"group_count": groups}
    return {f"ssm.{key}": value for key, value in values.items()}


def heads(*kv: int, count: int = 6) -> dict[str, Any]:
    return {
        "attention.head_count": count,
        "attention.head_count_kv": kv[0] if len(kv) == 1 else list(kv),
    }


RECURRENT: dict[str, dict[str, Any]] = {
    "falcon_h1": ssm(4, 48, 5, 6, 2) | heads(2) | {"feed_forward_length": 40},
    "granite_hybrid": ssm(4, 48, 5, 6, 2) | heads(2, 0, 0) | {"feed_forward_length": 32},
    "granite_hybrid_moe": ssm(4, 48, 5, 6, 2) | heads(0, 2, 0) | {"expert_used_count": 2, "feed_forward_length": 40},
    "jamba": ssm(4, 48, 5, 2) | heads(0, 2, 0) | {"expert_count": 4, "feed_forward_length": 40},
    "lfm2": {"shortconv.l_cache": 3} | heads(0, 2, 0, 0),
    "mamba": ssm(4, 48, 5, 2) | {"attention.head_count": 0, "feed_forward_length": 0},
    "mamba2": ssm(4, 48, 5, 6, 1) | {"attention.head_count": 0, "feed_forward_length": 0},
    "nemotron_h": ssm(4, 48, 5, 6, 3) | heads(0, 2, 0, 0) | {"feed_forward_length": [0, 0, 40, 0]},
    "qwen3_5": ssm(3, 24, 6, 4, 4) | heads(2) | {"full_attention_interval": 2},
    "qwen3_5_moe": ssm(3, 64, 16, 4, 2) | heads(2) | {"full_attention_interval": 4, "feed_forward_length": 16},
    "qwen3_next": ssm(3, 24, 6, 4, 2) | heads(2) | {"full_attention_interval": 2, "feed_forward_length": 16},
}  # fmt: skip
"""As llama.cpp's converters write them; lists are by layer."""


@pytest.mark.parametrize("case", RECURRENT)
def test_keys_of_recurrent_layers(case: str) -> None:
    values = written(spec_of(case))
    expected = RECURRENT[case]
    assert values | expected == values
    names = ("ssm.", "shortconv.", "full_", "attention.head_count")
    assert {key for key in values if key.startswith(names)} == {
        key for key in expected if key.startswith(names)
    }


@pytest.mark.parametrize(
    "case", ["apertus", *RECURRENT, "gemma4_gguf", "llama4", "deepseek_v3_gguf"]
)
def test_keys_have_names_in_the_gguf_package(case: str) -> None:
    assert set(written(spec_of(case))) <= KEYS


def magnitude(factor: float, scale: float) -> float:
    """As YaRN defines it."""
    return 0.1 * scale * math.log(factor) + 1.0


def yarn(case: str, **rope: Any) -> dict[str, Any]:
    """The keys of a rotation's scaling."""
    spec = spec_of(case)
    parameters = {**spec.options["rope_parameters"], **rope}
    parameters = {key: value for key, value in parameters.items() if value is not None}
    values = written(replace(spec, options=spec.options | {"rope_parameters": parameters}))
    return {k.removeprefix("rope.scaling."): v for k, v in values.items() if "scaling" in k}


def test_keys_of_yarn() -> None:
    """The factor is relative to what llama.cpp computes of the other keys."""
    stated = {"type": "yarn", "factor": 4.0, "original_context_length": 16}
    unit = magnitude(4.0, 1.0)
    assert yarn("arcee", attention_factor=None) == pytest.approx(stated)
    assert yarn("arcee", attention_factor=unit) == pytest.approx(stated)
    assert yarn("arcee", attention_factor=0.7) == pytest.approx(
        stated | {"attn_factor": 0.7 / unit}
    )
    betas = {"beta_fast": 20.0, "beta_slow": 2.0}
    assert yarn("arcee", attention_factor=unit, **betas) == pytest.approx(
        stated | {f"yarn_{key}": value for key, value in betas.items()}
    )
    # the magnitude of both scales, as transformers takes it
    both = magnitude(4.0, 0.6) / magnitude(4.0, 1.1)
    latent = stated | {"yarn_log_multiplier": 0.11, "attn_factor": both / unit}
    assert yarn("deepseek_v3_gguf", **MAGNITUDE) == pytest.approx(latent)
    equal = {**MAGNITUDE, "mscale": 1.1}
    assert yarn("deepseek_v3_gguf", **equal) == pytest.approx(
        stated | {"yarn_log_multiplier": 0.11}
    )
    assert yarn("ministral3", **MAGNITUDE) == pytest.approx(stated | {"attn_factor": both / unit})
    # families without the multiplier state what is left, and a scale alone has no effect
    one = {**MAGNITUDE, "mscale": 1.0}
    left = stated | {"attn_factor": 1 / magnitude(4.0, 1.1)}
    assert yarn("arcee", **one, attention_factor=None) == pytest.approx(left)
    assert yarn("ministral3", **(one | {"mscale_all_dim": None})) == pytest.approx(stated)
    length = {"original_max_position_embeddings": None}
    assert yarn("arcee", **length, attention_factor=None) == pytest.approx(
        stated | {"original_context_length": LONGEST}
    )
    assert yarn("ministral3", **one) == pytest.approx(stated | {"yarn_log_multiplier": 1.1})


def test_windows() -> None:
    """The layers with a window are stated unless they are those of the family."""
    pattern = "attention.sliding_window_pattern"
    sizes = {"num_hidden_layers": 8, "layer_types": None}
    spec = spec_of("cohere2")
    whole = replace(spec, options={**spec.options, **sizes, "layer_types": ["full_attention"] * 8})
    assert not {"attention.sliding_window", pattern} & {*written(whole)}
    local = ["sliding_attention"] * 3
    fixed = replace(whole, options=whole.options | {"layer_types": [*local, "full_attention"] * 2})
    values = written(fixed)
    assert values["attention.sliding_window"] == spec.options["sliding_window"]
    assert pattern not in values
    others = ["full_attention", *local] * 2
    values = written(replace(whole, options=whole.options | {"layer_types": others}))
    assert values[pattern] == [kind == "sliding_attention" for kind in others]


def test_sizes_by_layer() -> None:
    assert one_or_list([5]) == 5 and one_or_list([5, 5]) == 5 and one_or_list([5, 6]) == [5, 6]
    _, config, form = described(spec_of("minimax_m2"))
    mlp = described(CASES["qwen2"])[1].blocks[0].feed_forward
    assert isinstance(mlp, MLPForm)
    config = config.with_blocks([0], feed_forward=replace(mlp, size=9))
    values = decoder_metadata(config.with_blocks([1], feed_forward=replace(mlp, size=11)), form)
    # layers with experts have that of the largest MLP
    assert values["feed_forward_length"] == [9, 11, 11]
    plain = decoder_metadata(config.with_blocks([1, 2], feed_forward=None), form)
    assert plain["feed_forward_length"] == [9, 0, 0] and "expert_count" not in plain


@pytest.mark.parametrize(
    ("layers", "period"),
    [
        ([True], 1),
        ([True, True], 1),
        ([False, True], 2),
        ([False, True, False], 2),
        ([False, False, True], 3),
        ([False], None),
        ([False, False], None),
        ([True, False], None),
        ([False, True, True], None),
        ([False, True, False, False], None),
    ],
)
def test_distances_between_layers(layers: list[bool], period: int | None) -> None:
    if period is not None:
        assert period_of("qwen35", layers, "attention") == period
        return
    with pytest.raises(ModelFilesError, match="of qwen35 .* layers with attention at uneven"):
        period_of("qwen35", layers, "attention")


def test_experts_beside_mlps() -> None:
    """Their routing is that of the family, and all layers have them."""
    _, config, form = described(spec_of("gemma4_experts"))
    count = config.first_form(Experts)
    assert count is not None
    expected = {
        "expert_count": count.count,
        "expert_used_count": count.per_token,
        "expert_feed_forward_length": count.size,
    }
    for shape in (config, config.with_blocks([0], experts_beside=None)):
        values = decoder_metadata(shape, form)
        assert {k: v for k, v in values.items() if "expert" in k or "dense" in k} == expected


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_groups_of_experts(groups: int) -> None:
    _, config, form = described(spec_of("minimax_m2"))
    experts = config.blocks[0].feed_forward
    assert isinstance(experts, Experts)
    routing = replace(experts.routing, groups=groups, chosen_groups=1)
    shape = config.with_blocks([0, 1, 2], feed_forward=replace(experts, routing=routing))
    values = decoder_metadata(shape, form)
    found = {k: v for k, v in values.items() if "group" in k}
    stated = {"expert_group_count": groups, "expert_group_used_count": 1}
    assert found == (stated if groups > 1 else {})


@pytest.mark.parametrize("longest", [2**31 - 2, 2**31 - 1, 2**31, 2**62])
def test_contexts_fit_an_integer_of_32_bits(longest: int) -> None:
    _, config, form = described(CASES["qwen2"])
    values = decoder_metadata(replace(config, max_position_embeddings=longest), form)
    assert values["context_length"] == min(longest, 0x7FFFFFFF)


def test_families_that_state_their_windows_always_do() -> None:
    spec = spec_of("olmo3")
    kinds = [*["sliding_attention"] * 3, "full_attention"]
    options = spec.options | {"layer_types": kinds, "num_hidden_layers": 4}
    values = written(replace(spec, options=options))
    assert values["attention.sliding_window_pattern"] == [True, True, True, False]


def test_other_shapes_are_refused() -> None:
    _, config, form = described(spec_of("gemma3_plain"))
    (place, block), *_ = [
        (i, block)
        for i, block in enumerate(config.blocks)
        if isinstance(block.mixer, AttentionForm) and block.mixer.window is not None
    ]
    assert isinstance(block.mixer, AttentionForm) and block.mixer.rope is not None
    rope = replace(block.mixer.rope, kind="linear", parameters={"factor": 2.0})
    changed = config.with_blocks([place], mixer=replace(block.mixer, rope=rope))
    with pytest.raises(ModelFilesError, match="a window, which scale their rotation by linear"):
        decoder_metadata(changed, form)
    dynamic = replace(
        CASES["qwen2"],
        options={
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
        },
    )
    with pytest.raises(ModelFilesError, match=r"of qwen2 do not describe a rotation .*\(dynamic\)"):
        written(dynamic)
    _, config, form = described(spec_of("minimax_m2"))
    dense = described(CASES["qwen2"])[1].blocks[0].feed_forward
    experts = config.blocks[0].feed_forward
    assert isinstance(experts, Experts)
    first = config.with_blocks([0], feed_forward=dense)
    assert decoder_metadata(first, form)["leading_dense_block_count"] == 1
    with pytest.raises(ModelFilesError, match="layers without experts between layers with some"):
        decoder_metadata(config.with_blocks([1], feed_forward=dense), form)
