"""Reads the experts of a family from a config.json."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.experts import Experts
from max.pipelines.models.rope import LONGEST_SEQUENCE

__all__ = ["EXPERT_NAMES", "grouped_experts", "latent_experts", "layer_list", "softmax_experts"]

EXPERT_NAMES = {
    "mlp.gate.weight": "mlp.gate.gate_score.weight",
    "mlp.shared_expert": "mlp.shared",
    "mlp.shared_experts": "mlp.shared",
    "mlp.shared_expert_gate": "mlp.shared_gate",
}
"""The parts of names of layers with experts in GGUF files, and the decoder's names."""


def _size(keys: ConfigKeys, key: str) -> int:
    return keys.integer(key, 1, LONGEST_SEQUENCE)


def layer_list(keys: ConfigKeys, key: str, default: Iterable[int]) -> frozenset[int]:
    """The layer indices in a list of config.json.

    Args:
        keys: The keys of config.json.
        key: The key of the list.
        default: The layers if the key is missing.

    Raises:
        ModelFilesError: The value is not a list of integers.
    """
    layers = keys.value(key)
    if layers is None:
        return frozenset(default)
    if not isinstance(layers, list) or not all(type(index) is int for index in layers):
        raise keys.error(key, "a list of layers")
    return frozenset(layers)


def softmax_experts(
    keys: ConfigKeys,
    num_layers: int,
    *,
    count: str = "num_experts",
    size: str,
    shared: str = "",
    normalised: bool = False,
) -> Experts:
    """Experts that are selected by the softmax of their scores.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        count: The key of the number of experts.
        size: The key of an expert's inner size.
        shared: The key of the inner size of the shared MLP; empty: there is none.
        normalised: Whether weights are divided by their sum if the file does not say so.

    Raises:
        ModelFilesError: A value does not fit.
    """
    sparse_step = keys.integer("decoder_sparse_step", 1, LONGEST_SEQUENCE, 1)
    dense = layer_list(keys, "mlp_only_layers", ())
    # later versions of transformers write the second name
    number = _size(keys, count if keys.value(count) is not None else "num_local_experts")
    return Experts(
        number,
        keys.integer("num_experts_per_tok", 1, number),
        _size(keys, size),
        ExpertRouting(normalised=keys.flag("norm_topk_prob", normalised)),
        _size(keys, shared) if shared else 0,
        bool(shared),
        frozenset(i for i in range(num_layers) if i in dense or (i + 1) % sparse_step),
    )


def grouped_experts(keys: ConfigKeys) -> Experts:
    """Experts that are selected by the sigmoid of their scores, within the best groups, as in DeepSeek V3.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: A value does not fit.
    """
    count, size = _size(keys, "n_routed_experts"), _size(keys, "moe_intermediate_size")
    groups = keys.integer("n_group", 1, count, 1)
    if count % groups:
        raise keys.error("n_group", f"a divisor of n_routed_experts, which is {count}")
    routing = ExpertRouting(
        "sigmoid",
        normalised=keys.flag("norm_topk_prob", True),
        scale=keys.number("routed_scaling_factor", over=0, default=1.0),
        groups=groups,
        chosen_groups=keys.integer("topk_group", 1, groups, 1),
        group_score="two_greatest",
        has_correction=True,
        in_float32=True,
    )
    return Experts(
        count,
        keys.integer("num_experts_per_tok", 1, count),
        size,
        routing,
        size * keys.integer("n_shared_experts", 0, LONGEST_SEQUENCE, 0),
        dense_layers=frozenset(range(keys.integer("first_k_dense_replace", 0, 1000, 0))),
    )


def grouped_experts_of_layers(keys: ConfigKeys, num_layers: int) -> Experts | None:
    """As `grouped_experts`; None if all layers are dense, which need no keys of experts.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.

    Raises:
        ModelFilesError: A value does not fit.
    """
    dense = keys.integer("first_k_dense_replace", 0, 1000, 0) >= num_layers
    return None if dense else grouped_experts(keys)


def latent_experts(keys: ConfigKeys, dense_layers: frozenset[int], bias: bool) -> Experts:
    """Experts as in `grouped_experts`, optionally over latents, and a shared MLP of its own size, as in Nemotron-H.

    Args:
        keys: The keys of config.json.
        dense_layers: The layers without experts.
        bias: Whether the shared MLP and the latent projections have biases.

    Raises:
        ModelFilesError: A value does not fit.
    """
    return replace(
        grouped_experts(keys),
        shared_size=_size(keys, "moe_shared_expert_intermediate_size"),
        shared_bias=bias,
        dense_layers=dense_layers,
        latent_size=keys.integer("moe_latent_size", 1, LONGEST_SEQUENCE, None),
        latent_bias=bias,
    )
