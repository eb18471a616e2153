"""Layers with and without a window, and how each kind rotates queries and keys."""

from __future__ import annotations

from max.pipelines.checkpoints.config_keys import ConfigKeys
from max.pipelines.models.blocks.rope import RopeConfig
from max.pipelines.models.decoder.config_values import layers_of_type

__all__ = ["full_attention_every", "read_ropes"]


def full_attention_every(
    keys: ConfigKeys, num_layers: int, interval: int, offset: int
) -> frozenset[int]:
    """The layers without a window: those that ``layer_types`` names, else one of every n.

    Args:
        keys: The keys of config.json.
        num_layers: The number of layers.
        interval: One of this many layers has no window.
        offset: Those are the layers whose index plus this is a multiple of it.

    Raises:
        ModelFilesError: ``layer_types`` does not fit.
    """
    default = frozenset(i for i in range(num_layers) if (i + offset) % interval == 0)
    return layers_of_type(keys, num_layers, default)


def read_ropes(
    keys: ConfigKeys, full: tuple[str, float], local: tuple[str, float]
) -> tuple[RopeConfig, RopeConfig]:
    """The rotations of layers without and with a window.

    ``rope_parameters`` has an object for each kind; older files have a key with each base.

    Args:
        keys: The keys of config.json.
        full: The key of the base in layers without a window, and its default.
        local: The same for layers with a window.

    Raises:
        ModelFilesError: A value does not fit.
    """
    parameters = keys.object("rope_parameters")
    ropes: list[RopeConfig] = []
    for kind, (key, default) in (("full_attention", full), ("sliding_attention", local)):
        theta = keys.number(key, over=0, default=default)
        kind_parameters = None if parameters is None else parameters.object(kind)
        # rope_scaling of older files is for layers without a window
        kind_parameters = kind_parameters or (
            keys.object("rope_scaling") if kind == "full_attention" else None
        )
        ropes.append(RopeConfig.from_parameters(keys, kind_parameters, theta))
    return ropes[0], ropes[1]
