"""Dense families of decoders with configs that hypothesis draws, against transformers' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from max.nn.transformer import ReturnLogits
from max.pipelines.models.decoder_model import DecoderModel
from tests.architectures.families import (
    LLAMA3,
    LONGEST,
    YARN,
    Case,
    architecture_named,
    config_file,
    random_model,
)
from tests.architectures.llama_harness import (
    Server,
    reference_logits,
    relative_error,
    weights_of,
)

Draw = Callable[[Any], Any]
Options = dict[str, Any]

FLAGS = st.booleans()
WINDOWS = st.integers(1, 30)
ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
ROPES = st.sampled_from(
    [
        {"rope_type": "default", "rope_theta": 37.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        LLAMA3,
        YARN,
    ]
)


def sizes(draw: Draw, *, grouped: bool = True, head_dim: bool = False) -> Options:
    """Sizes of a Llama-like config; heads have an even size."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * (draw(st.integers(1, 3)) if grouped else 1)
    size = 2 * draw(st.integers(2, 7))
    values = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": draw(FLAGS),
    }
    return values | ({"head_dim": 2 * draw(st.integers(2, 8))} if head_dim else {})


def plain(draw: Draw, *flags: str, head_dim: bool = False, **others: Any) -> Options:
    """Sizes, a rotation, an activation, and flags."""
    return {
        **sizes(draw, head_dim=head_dim),
        "rope_parameters": draw(ROPES),
        "hidden_act": draw(ACTIVATIONS),
        **{flag: draw(FLAGS) for flag in flags},
        **{key: draw(strategy) for key, strategy in others.items()},
    }


def kinds(draw: Draw, count: int, *names: str) -> list[str]:
    """A type of each layer."""
    return draw(st.lists(st.sampled_from(names), min_size=count, max_size=count))


def windowed(draw: Draw, options: Options) -> Options:
    """Options with a window, and layers without it."""
    types = kinds(draw, options["num_hidden_layers"], "full_attention", "sliding_attention")
    return options | {"sliding_window": draw(WINDOWS), "layer_types": types}


def gemma2(draw: Draw) -> Options:
    options = windowed(draw, sizes(draw, head_dim=True))
    cap = st.sampled_from([None, 1.5, 30.0])
    return options | {
        "query_pre_attn_scalar": draw(st.integers(1, 20)),
        "attn_logit_softcapping": draw(cap),
        "final_logit_softcapping": draw(cap),
        "attention_bias": draw(FLAGS),
    }


def gemma3(draw: Draw) -> Options:
    rotations = {kind: draw(ROPES) for kind in ("full_attention", "sliding_attention")}
    caps = {"attn_logit_softcapping": None}
    return gemma2(draw) | caps | {"rope_parameters": rotations}


def phi3(draw: Draw) -> Options:
    default = {"rope_type": "default", "rope_theta": 37.0, "partial_rotary_factor": 0.5}
    size = 4 * draw(st.integers(1, 3))
    options = sizes(draw)
    return options | {
        "hidden_size": size * options["num_attention_heads"],
        "rope_parameters": default,
        "sliding_window": draw(st.none() | WINDOWS),
    }


def stablelm(draw: Draw) -> Options:
    options = sizes(draw)
    return options | {
        "hidden_size": 8 * options["num_attention_heads"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 37.0, "partial_rotary_factor": draw(st.sampled_from([0.25, 0.5, 1.0]))},
        **{flag: draw(FLAGS) for flag in ("use_qkv_bias", "qk_layernorm", "use_parallel_residual")},
    }  # fmt: skip


def granite(draw: Draw) -> Options:
    factors = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    return plain(
        draw, "attention_bias", "mlp_bias", **{name: st.floats(0.1, 3.0) for name in factors}
    )  # fmt: skip


def olmo(draw: Draw) -> Options:
    return plain(draw, "attention_bias", clip_qkv=st.sampled_from([None, 0.5]))


def helium(draw: Draw) -> Options:
    options = sizes(draw) | {"attention_bias": draw(FLAGS), "mlp_bias": draw(FLAGS)}
    return options | {"head_dim": options["hidden_size"] // options["num_attention_heads"]}


FAMILIES: dict[str, tuple[str, Callable[[Draw], Options]]] = {
    "LlamaForCausalLM": (
        "LlamaConfig",
        lambda draw: plain(draw, "attention_bias", "mlp_bias", head_dim=True),
    ),
    "MistralForCausalLM": (
        "MistralConfig",
        lambda draw: plain(draw, head_dim=True, sliding_window=st.none() | WINDOWS),
    ),
    "Qwen2ForCausalLM": (
        "Qwen2Config",
        lambda draw: windowed(draw, plain(draw)) | {"use_sliding_window": True},
    ),
    "Qwen3ForCausalLM": ("Qwen3Config", lambda draw: plain(draw, "attention_bias", head_dim=True)),
    "GraniteForCausalLM": ("GraniteConfig", granite),
    "GemmaForCausalLM": (
        "GemmaConfig",
        lambda draw: sizes(draw, head_dim=True) | {"attention_bias": draw(FLAGS)},
    ),
    "Gemma2ForCausalLM": ("Gemma2Config", gemma2),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", gemma3),
    "Phi3ForCausalLM": ("Phi3Config", phi3),
    "OlmoForCausalLM": ("OlmoConfig", olmo),
    "Olmo2ForCausalLM": ("Olmo2Config", lambda draw: plain(draw, "attention_bias")),
    "SmolLM3ForCausalLM": (
        "SmolLM3Config",
        lambda draw: plain(draw, "attention_bias", "mlp_bias"),
    ),
    "SeedOssForCausalLM": (
        "SeedOssConfig",
        lambda draw: plain(draw, "attention_bias", "attention_out_bias", "mlp_bias", head_dim=True),
    ),
    "HeliumForCausalLM": (
        "HeliumConfig",
        helium,
    ),
    "Exaone4ForCausalLM": ("Exaone4Config", lambda draw: windowed(draw, plain(draw))),
    "CohereForCausalLM": (
        "CohereConfig",
        lambda draw: plain(draw, "attention_bias", "use_qk_norm", logit_scale=st.floats(0.1, 2)),
    ),
    "StableLmForCausalLM": ("StableLmConfig", stablelm),
    "Starcoder2ForCausalLM": (
        "Starcoder2Config",
        lambda draw: (
            sizes(draw) | {"use_bias": draw(FLAGS), "sliding_window": draw(st.none() | WINDOWS)}
        ),
    ),
}


def check(name: str, data: st.DataObject) -> None:
    """Draws a config, and compares the logits of a prompt, a chunk and steps, beside another sequence."""
    kind, drawn = FAMILIES[name]
    case = Case(name, kind, drawn(data.draw), sizes={})
    model = random_model(case, data.draw(st.integers(0, 2**20)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**20)))
    longest = data.draw(st.integers(3, 50))
    tokens, other = (rng.integers(0, 61, n).tolist() for n in (longest, 5))
    ours = Server(
        config_file(model),
        weights_of(model),
        "interpreter",
        page_size=data.draw(st.integers(1, 9)),
        max_seq_len=LONGEST,
        architecture=cast(type[DecoderModel], architecture_named(name).pipeline_model),
        return_logits=ReturnLogits.ALL,
    )
    cut = data.draw(st.integers(1, longest - 1))
    first = ours.step({"a": tokens[:cut], "b": other}).logits
    parts = [first[0], *(ours.step({"a": part}).logits[0] for part in (tokens[cut:-1], tokens[-1:]) if part)]  # fmt: skip
    assert relative_error(np.concatenate(parts), reference_logits(model, tokens)) < 1e-4
    assert relative_error(first[1], reference_logits(model, other)) < 1e-4


def drawn_test(examples: int) -> Callable[[str], None]:
    def test(family: str) -> None:
        slow = [HealthCheck.too_slow, HealthCheck.data_too_large]

        @settings(max_examples=examples, deadline=None, suppress_health_check=slow)
        @given(st.data())
        def run(data: st.DataObject) -> None:
            check(family, data)

        run()

    return test


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs(family: str) -> None:
    drawn_test(2)(family)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_configs_for_long(family: str) -> None:
    drawn_test(40)(family)
