"""Parts of configs that hypothesis draws: what most families of decoders have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tests.architectures.families import LLAMA3, LONGEST, YARN

Draw = Callable[[Any], Any]
Options = dict[str, Any]
Families = dict[str, tuple[str, Callable[[Draw], Options]]]
"""The class of a family's config, and what draws its options, by the name of the model's class."""

FLAGS = st.booleans()
WINDOWS = st.integers(1, 30)
EPSILONS = st.sampled_from([1e-6, 1e-5, 1e-2, 0.3])
FACTORS = st.floats(0.1, 3.0)
ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
PLAIN_ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_new", "quick_gelu", "relu", "relu2"])
"""The activations of MLPs without a gate."""
DEFAULT_ROPE: Options = {"rope_type": "default", "rope_theta": 37.0}
_ROPES: list[Options] = [
    DEFAULT_ROPE,
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    LLAMA3,
    {**LLAMA3, "factor": 9.0, "low_freq_factor": 1.5, "original_max_position_embeddings": 30},
    YARN,
    {**YARN, "beta_fast": 5.0, "beta_slow": 0.5},
    {**YARN, "attention_factor": 0.7},
    {**YARN, "mscale": 0.9, "mscale_all_dim": 0.4},
]
ROPES = st.sampled_from([*_ROPES, {**YARN, "truncate": False}])
"""Rotations, with an original context that sequences exceed."""


def rotations_of_kinds(draw: Draw) -> Options:
    """A rotation of each kind of layers; transformers looks for their ``truncate`` outside of them."""
    kinds = ("full_attention", "sliding_attention")
    return {"rope_parameters": {kind: draw(st.sampled_from(_ROPES)) for kind in kinds}}


def longrope(draw: Draw, pairs: int, **others: Any) -> Options:
    """LongRoPE, with an original context that some sequences exceed.

    Args:
        draw: Draws a value.
        pairs: The number of pairs that rotate.
        others: Further parameters.
    """
    original = draw(st.integers(3, 45))
    factors = st.lists(st.floats(0.5, 8.0), min_size=pairs, max_size=pairs)
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 37.0,
        "original_max_position_embeddings": original,
        "short_factor": draw(factors),
        "long_factor": draw(factors),
        **draw(st.sampled_from([{}, {"factor": 4.0}, {"attention_factor": 0.7}])),
        **others,
    }
    return {"rope_parameters": parameters, "original_max_position_embeddings": original}


def divisor(draw: Draw, number: int) -> int:
    """A divisor of a number."""
    return draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0]))


def sizes(draw: Draw, *, grouped: bool = True, head_dim: bool = False, step: int = 2) -> Options:
    """Sizes of a Llama-like config.

    Args:
        draw: Draws a value.
        grouped: Whether several heads may share a KV head.
        head_dim: Whether heads may have another size than a part of hidden states.
        step: What divides the size of a head.
    """
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * (draw(st.integers(1, 3)) if grouped else 1)
    size = step * draw(st.integers(4 // step, 14 // step))
    values = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * size,
        "intermediate_size": draw(st.integers(1, 50)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "max_position_embeddings": LONGEST,
        "tie_word_embeddings": draw(FLAGS),
    }
    return values | (
        {"head_dim": step * draw(st.integers(4 // step, 16 // step))} if head_dim else {}
    )


def plain(
    draw: Draw,
    *flags: str,
    head_dim: bool = False,
    grouped: bool = True,
    eps: str = "rms_norm_eps",
    **others: Any,
) -> Options:
    """Sizes, a rotation, an activation, an epsilon, and flags.

    Args:
        draw: Draws a value.
        flags: Keys that are true or false.
        head_dim: As in `sizes`.
        grouped: As in `sizes`.
        eps: The key of the norms' epsilon.
        others: Strategies of further keys.
    """
    return {
        **sizes(draw, grouped=grouped, head_dim=head_dim),
        "rope_parameters": draw(ROPES),
        "hidden_act": draw(ACTIVATIONS),
        eps: draw(EPSILONS),
        **{flag: draw(FLAGS) for flag in flags},
        **{key: draw(strategy) for key, strategy in others.items()},
    }


def kinds(draw: Draw, count: int, *names: str) -> list[str]:
    """A type of each layer."""
    return draw(st.lists(st.sampled_from(names), min_size=count, max_size=count))


def windowed(draw: Draw, options: Options, other: str = "sliding_attention") -> Options:
    """Options with a window, and layers without it."""
    types = kinds(draw, options["num_hidden_layers"], "full_attention", other)
    return options | {"sliding_window": draw(WINDOWS), "layer_types": types}


def partial(draw: Draw, size: int) -> Options:
    """A rotation of a share of a head: an even number of elements."""
    share = draw(st.integers(1, size // 2)) * 2 / size
    return {"rope_parameters": {**DEFAULT_ROPE, "partial_rotary_factor": share}}


def chosen(draw: Draw, count: str, per_token: str = "num_experts_per_tok") -> Options:
    """The number of experts, and how many a token has."""
    number = draw(st.integers(1, 6))
    return {count: number, per_token: draw(st.integers(1, number))}


def grouped_experts(draw: Draw, layers: int) -> Options:
    """Experts in groups, as in DeepSeek V3."""
    groups, each = draw(st.integers(1, 3)), draw(st.integers(2, 3))
    best = draw(st.integers(1, groups))
    return {
        "n_routed_experts": groups * each,
        "n_group": groups,
        "topk_group": best,
        "num_experts_per_tok": draw(st.integers(1, best * each)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "n_shared_experts": draw(st.integers(1, 3)),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "routed_scaling_factor": draw(FACTORS),
        "norm_topk_prob": draw(FLAGS),
    }
