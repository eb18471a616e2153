"""Reads the experts of a family from a config.json."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from max.nn.moe import ExpertRouting
from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.experts import Experts
from max.pipelines.models.blocks.rope import LONGEST_SEQUENCE
from max.pipelines.models.decoder.config import DecoderConfig

__all__ = [
    "EXPERT_NAMES",
    "grouped_experts",
    "latent_experts",
    "layer_list",
    "leading_dense_layers",
    "with_grouped_experts",
    "with_softmax_experts",
]

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


def with_softmax_experts(
    config: DecoderConfig,
    keys: ConfigKeys,
    *,
    count: str = "num_experts",
    size: str,
    shared_size_key: str = "",
    normalized: bool = False,
) -> DecoderConfig:
    """A decoder with experts that are selected by the softmax of their scores.

    Args:
        config: The decoder with MLPs.
        keys: The keys of config.json.
        count: The key of the number of experts.
        size: The key of an expert's inner size.
        shared_size_key: The key of the inner size of the shared MLP; empty: there is none.
        normalized: Whether weights are divided by their sum if the file does not say so.

    Raises:
        ModelFilesError: A value does not fit.
    """
    sparse_step = keys.integer("decoder_sparse_step", 1, LONGEST_SEQUENCE, 1)
    dense = layer_list(keys, "mlp_only_layers", ())
    # later versions of transformers write the second name
    number = _size(keys, count if keys.value(count) is not None else "num_local_experts")
    experts = Experts(
        number,
        keys.integer("num_experts_per_tok", 1, number),
        _size(keys, size),
        ExpertRouting(normalized=keys.flag("norm_topk_prob", normalized)),
        _size(keys, shared_size_key) if shared_size_key else 0,
        bool(shared_size_key),
    )
    layers = range(config.num_layers)
    # every `sparse_step`-th layer has experts, counted from 1
    return config.with_experts(experts, [i for i in layers if i in dense or (i + 1) % sparse_step])


def leading_dense_layers(keys: ConfigKeys) -> range:
    """The first layers, which have an MLP instead of experts.

    Args:
        keys: The keys of config.json.

    Raises:
        ModelFilesError: The number does not fit.
    """
    return range(keys.integer("first_k_dense_replace", 0, 1000, 0))


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
        normalized=keys.flag("norm_topk_prob", True),
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
    )


def with_grouped_experts(
    config: DecoderConfig,
    keys: ConfigKeys,
    dense_layers: Collection[int] | None = None,
    change: Callable[[Experts], Experts] = lambda experts: experts,
) -> DecoderConfig:
    """A decoder with `grouped_experts`, unless all layers are dense, which need no keys of experts.

    Args:
        config: The decoder with MLPs.
        keys: The keys of config.json.
        dense_layers: The layers without experts; None: those of `leading_dense_layers`.
        change: Changes the experts.

    Raises:
        ModelFilesError: A value does not fit.
    """
    leading = leading_dense_layers(keys)
    # such files state no sizes of experts
    if len(leading) >= config.num_layers:
        return config
    dense = leading if dense_layers is None else dense_layers
    return config.with_experts(change(grouped_experts(keys)), dense)


def latent_experts(keys: ConfigKeys, bias: bool) -> Experts:
    """Experts as in `grouped_experts`, optionally over latents, and a shared MLP of its own size, as in Nemotron-H.

    Args:
        keys: The keys of config.json.
        bias: Whether the shared MLP and the latent projections have biases.

    Raises:
        ModelFilesError: A value does not fit.
    """
    return replace(
        grouped_experts(keys),
        shared_size=_size(keys, "moe_shared_expert_intermediate_size"),
        shared_bias=bias,
        latent_size=keys.integer("moe_latent_size", 1, LONGEST_SEQUENCE, None),
        latent_bias=bias,
    )
